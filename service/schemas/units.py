"""Values with units, as job files write them: `4h`, `1h30m`, `32GiB`. Pure.

A plain number is seconds or bytes. What could be read in two ways (`32G`, `5M`) is refused with what to write.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

_DURATION: Final = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:ms|[dhms])\s*)+")
_DURATION_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[dhms])")
_SECONDS: Final = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([a-zA-Z]+)")
_BYTES: Final = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
MAX_SECONDS: Final = 10 * 366 * 86_400.0
MAX_BYTES: Final = 2**60


def parse_duration(value: Any) -> float:
    """Seconds. ValueError says what is wrong and what to write instead."""
    if isinstance(value, str):
        return _bounded_seconds(_seconds_of_text(value), value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a duration such as 4h, 90m or 1h30m, or a number of seconds")
    return _bounded_seconds(value, value)


def _seconds_of_text(text: str) -> float:
    compact = text.strip()
    if _DURATION.fullmatch(compact):
        parts = _DURATION_PART.findall(compact)
        units = [list(_SECONDS).index(unit) for _, unit in parts]
        if units == sorted(set(units)):
            return sum(float(number) * _SECONDS[unit] for number, unit in parts)
    hint = ""
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", compact):
        hint = f"; for seconds write {compact[:20]}s, or the number without quotes"
    raise ValueError(f"is not a duration; write it as 4h, 90m, 1h30m or 45s{hint}")


def _bounded_seconds(seconds: float, value: Any) -> float:
    # Compared before it becomes a float: an integer may be too large for one.
    if isinstance(seconds, float) and not math.isfinite(seconds):
        raise ValueError("must be a finite number of seconds")
    if seconds < 0:
        raise ValueError("must not be negative")
    if seconds > MAX_SECONDS:
        raise ValueError("is longer than ten years")
    return float(seconds)


def parse_size(value: Any) -> int:
    """Bytes. ValueError says what is wrong and what to write instead."""
    if isinstance(value, str):
        size = _bytes_of_text(value)
    elif isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a size such as 32GiB or 500MB, or a whole number of bytes")
    else:
        size = value
    if size < 0:
        raise ValueError("must not be negative")
    if size > MAX_BYTES:
        raise ValueError(f"is larger than any machine's memory (at most {MAX_BYTES} bytes)")
    return size


def _bytes_of_text(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].casefold() if match else ""
    if match and unit in _BYTES:
        return round(float(match[1]) * _BYTES[unit])
    hint = ""
    if match and f"{unit}ib" in _BYTES:
        letter = unit.upper()
        hint = f"; {match[2]} could mean either: write {match[1]}{letter}iB (1024) or {match[1]}{letter}B (1000)"
    elif re.fullmatch(r"[0-9]+", text.strip()):
        hint = "; for bytes write the number without quotes"
    raise ValueError(f"is not a size; write it as 32GiB, 500MB or 1.5TiB{hint}")
