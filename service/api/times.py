"""Times that people give in requests: an instant with its zone, a date, or how long from now. Pure: `now` is given."""

from __future__ import annotations

from datetime import UTC, date, datetime

from service.clock import rfc3339
from service.domain.text import shown
from service.errors import InvalidRequest
from service.schemas.units import parse_duration


def moment(text: str, name: str) -> float:
    """Epoch seconds of `2026-11-30T09:00:00+01:00`, or of a date: its first moment in UTC. Raises InvalidRequest."""
    try:
        if len(text) == 10:
            return datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC).timestamp()
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequest(
            f"{name} {text[:60]!r} is no time",
            fix=f"Write {name} as 2026-11-30, or with its zone: 2026-11-30T09:00:00+01:00.",
        ) from error
    if at.tzinfo is None:
        raise InvalidRequest(
            f"{name} {text!r} has no zone, so it could mean several instants", fix=f"Add it: {text}Z, or {text}+01:00."
        )
    return at.timestamp()


def end_given(value: object, now: float) -> float | None:
    """Epoch seconds of an end: `2h` from now, or an instant with its zone; None: no end. Raises InvalidRequest for one
    that has passed."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidRequest(
            f"until is {shown(value)}, not a text", fix="Write it as 2h, or with its zone: 2026-11-30T09:00:00+01:00."
        )
    try:
        end = now + parse_duration(value)
    except ValueError:
        end = moment(value, "until")
    if end <= now:
        raise InvalidRequest(
            f"until {value!r} ({rfc3339(end)}) does not lie ahead: it is {rfc3339(now)} now",
            fix="Give an end in the future, or none.",
        )
    return end
