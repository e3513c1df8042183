"""Times that people type: `7d` ago or ahead, a date, a time with or without a zone.

Not for: showing times (`gangline.cli.words`).
"""

from __future__ import annotations

from datetime import datetime, timedelta

import click

from gangline.cli.words import parse_duration


def instant(text: str | None, now: datetime, *, hint: str, is_ahead: bool = False) -> str | None:
    """What to send for a time: `7d` is so far before `now` (or ahead of it), a date in the past stays one (UTC), a time
    without a zone is in this machine's. Raises a usage error that names the option `hint`."""
    if text is None:
        return None
    try:
        distance = timedelta(seconds=parse_duration(text))
        return (now + distance if is_ahead else now - distance).isoformat()
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        example = "2h" if is_ahead else "7d"
        raise click.BadParameter(
            f"{text!r} is no time; write it like {example}, 2026-11-30 or 2026-11-30T09:00.", param_hint=hint
        ) from error
    if len(text) == 10 and not is_ahead:
        return text
    return at.astimezone().isoformat()  # by the zone's offset on that day, which summer time may make another
