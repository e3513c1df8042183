"""The only reader of time in the service. Everything else takes `now` as an argument or asks the database clock.

Intervals on the server use the database clock (`service.db.session`); this module serves what is not stored: timers of
threads, and the database clock of SQLite, which is this process's own.
"""

import time
from datetime import UTC, datetime


def epoch() -> float:
    """Seconds since 1970, of this process's wall clock."""
    return time.time()


def monotonic() -> float:
    """Seconds of a clock that never jumps; only differences mean anything."""
    return time.monotonic()


def rfc3339(epoch_seconds: float | None) -> str | None:
    """UTC time as the API shows it, with milliseconds: `2026-01-31T12:00:00.000Z`."""
    if epoch_seconds is None:
        return None
    return datetime.fromtimestamp(epoch_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
