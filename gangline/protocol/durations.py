"""A length of time in words that can be typed again, as job files and `gang extend` read them: `30m`, `1h30m`. Pure.

Not for: lengths that were measured, which are rounded (`gangline.cli.words.duration`).
"""

from __future__ import annotations

from typing import Final

_UNITS: Final = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def exact_duration(seconds: float) -> str:
    """`45s`, `30m`, `1h30m`, `2d`; seconds alone where there are fractions of them."""
    if seconds < 60 or seconds != int(seconds):
        return f"{seconds:g}s"
    parts, left = [], int(seconds)
    for unit, length in _UNITS:
        number, left = divmod(left, length)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts)
