"""A time before which a job must not start, as people write it: with an offset, or local with the name of a zone. Pure.

A local time that a change of the clocks skips or repeats is refused with the times that it could mean: nobody has to
know which one a program would have picked. Not for: limits, which count elapsed seconds and know no zone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

YEARS: Final = range(1970, 2200)
_OFFSET: Final = re.compile(r"([+-])(\d\d):(\d\d)")
_OF_THE_SERVER: Final = frozenset({"localtime", "posixrules"})
"""Names that mean another zone on each machine."""
HOW_TO_WRITE: Final = "write it as 2026-03-08T14:30:00+01:00, or without the offset and with zone: Europe/Berlin"


@dataclass(frozen=True, kw_only=True)
class StartTime:
    """An instant, and the zone to show it in."""

    at: float
    """Epoch seconds."""
    zone: str
    """Name of a zone, or an offset such as `+01:00`."""

    @property
    def text(self) -> str:
        """As it is shown: ISO time of its zone, with offset."""
        return shown_in_zone(self.at, self.zone)


def read_start_time(text: str, zone: str | None) -> StartTime:
    """The instant that a text means. ValueError says what is wrong; after `; ` what to write instead."""
    try:
        read = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise ValueError(f"is not a time; {HOW_TO_WRITE}") from error
    if read.year not in YEARS:
        raise ValueError(f"is in the year {read.year}; write one from {YEARS[0]} to {YEARS[-1]}")
    if read.tzinfo is not None:
        if zone is not None:
            raise ValueError(f"has an offset already, beside zone: {zone}; remove the offset or the zone")
        return StartTime(at=read.timestamp(), zone=_offset_text(read.utcoffset() or timedelta()))
    if zone is None:
        raise ValueError(f"does not say of which zone it is; {HOW_TO_WRITE}")
    return StartTime(at=_only_instant(read, load_zone(zone)).timestamp(), zone=zone)


def load_zone(name: str) -> ZoneInfo:
    """The zone of this name. ValueError when this machine knows none."""
    try:
        if name in _OF_THE_SERVER:
            raise ValueError(name)
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError("is not a zone that the server knows; write one such as America/New_York or UTC") from error


def _only_instant(local: datetime, zone: ZoneInfo) -> datetime:
    """The one instant at which clocks of `zone` show `local`. ValueError when there is none, or there are two."""
    first, second = (local.replace(tzinfo=zone, fold=fold) for fold in (0, 1))
    before, after = first.utcoffset(), second.utcoffset()
    assert before is not None and after is not None, "a zone has an offset at any time"
    if before == after:
        return first
    shown = [one.astimezone(UTC).astimezone(zone).isoformat() for one in (first, second)]
    if before < after:
        raise ValueError(
            f"does not exist in {zone.key}: clocks are put forward over it; "
            f"write {shown[1]} or {shown[0]}, without zone"
        )
    raise ValueError(
        f"happens twice in {zone.key}: clocks are put back over it; "
        f"write {shown[0]} for the first time or {shown[1]} for the second, without zone"
    )


def shown_in_zone(at: float, zone: str) -> str:
    """An instant as ISO time with the offset that the zone has then: `2026-11-01T01:30:00-05:00`."""
    return datetime.fromtimestamp(at, UTC).astimezone(_zone_of(zone)).isoformat(timespec="seconds")


def _zone_of(name: str) -> timezone | ZoneInfo:
    if match := _OFFSET.fullmatch(name):
        offset = timedelta(hours=int(match[2]), minutes=int(match[3]))
        return timezone(-offset if match[1] == "-" else offset)
    try:
        return load_zone(name)
    except ValueError:
        return UTC  # it was known when the job came: the instant is still shown right


def _offset_text(offset: timedelta) -> str:
    minutes = int(offset.total_seconds()) // 60
    return f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"
