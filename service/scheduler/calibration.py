"""What past forecasts teach: by what factor waits were longer or shorter than foretold, by kinds of jobs. Pure.

A forecast that still waits counts as "at least so long" (Kaplan and Meier, 1958), so that a growing queue is not
judged by those who got through it. Old experience is dropped. Not for: foretelling itself (`look_ahead`).
"""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

SOON_SECONDS: Final = 600.0
"""Up to there a wait is no matter: running jobs get minutes to end, and then it starts."""
LEAST_SECONDS: Final = 60.0
WAIT_EDGES: Final = (SOON_SECONDS, 3_600.0, 4 * 3_600.0, 12 * 3_600.0, 48 * 3_600.0)
"""Between the classes of foretold waits."""
MEMORY: Final = 120
"""Ended waits kept of each class."""
HALF_TRUSTED: Final = 40
"""So many waits of a class count for half of its ranges, the model itself and the usual width for the other half."""
MOST_OPEN: Final = 4_000
PRIOR: Final[Mapping[bool, tuple[float, ...]]] = {
    True: (0.5, 1.0, 1.0, 1.0, 1.2, 2.0, 4.0, 8.0, 20.0, 60.0),
    False: (0.3, 0.8, 1.0, 1.3, 1.8, 3.5),
}
"""Factors taken as experience before there is any: of jobs that should start soon, and of others."""

PRIOR_LATE_SOON: Final = (1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
"""The same, in parts of SOON_SECONDS, of jobs that should have started soon and did not."""

SizeClass = int
ClassKey = tuple[SizeClass, int]


def size_class(num_gpus: int, node_gpus: int) -> SizeClass:
    """0: a part of a node, 1: whole nodes."""
    return int(num_gpus >= node_gpus > 0)


@dataclass(frozen=True, slots=True)
class _Open:
    """A forecast whose job still waits."""

    key: ClassKey
    seconds: float
    at: float


class Calibration:
    """Experience with forecasts. Learns from what has happened alone."""

    def __init__(self) -> None:
        self._ended: defaultdict[ClassKey, deque[float]] = defaultdict(lambda: deque(maxlen=MEMORY))
        self._late: defaultdict[ClassKey, deque[float]] = defaultdict(lambda: deque(maxlen=MEMORY))
        """Of those, the ones that waited for more than SOON_SECONDS, over what `_late_unit` says."""
        self._open: dict[int, _Open] = {}

    def foretold(self, job_id: int, size: SizeClass, seconds: float, now: float) -> None:
        """A forecast was made for a job that waits."""
        if len(self._open) >= MOST_OPEN:
            self._open.pop(next(iter(self._open)))
        self._open[job_id] = _Open(_key(size, seconds), max(LEAST_SECONDS, seconds), now)

    def started(self, job_id: int, now: float) -> None:
        """The job of a forecast has started."""
        known = self._open.pop(job_id, None)
        if known is not None:
            waited = max(1.0, now - known.at)
            self._ended[known.key].append(waited / known.seconds)
            if waited > SOON_SECONDS:
                self._late[known.key].append(waited / _late_unit(known.key, known.seconds))

    def gone(self, job_id: int) -> None:
        """The job of a forecast waits no more and never started: it teaches nothing."""
        self._open.pop(job_id, None)

    @property
    def open_jobs(self) -> Iterable[int]:
        """Jobs with a forecast that still wait."""
        return self._open.keys()

    def factors(self, size: SizeClass, seconds: float, shares: Iterable[float], now: float) -> list[float]:
        """True over foretold wait, by shares of the jobs of this kind (0.5: half of them waited at most so long)."""
        key = _key(size, seconds)
        ended = sorted([*self._ended[key], *PRIOR[key[1] == 0]])
        at_least = sorted((now - one.at) / one.seconds for one in self._open.values() if one.key == key)
        return _quantiles(ended, at_least, sorted(shares))

    def late_seconds(self, size: SizeClass, seconds: float, shares: Iterable[float], now: float) -> list[float]:
        """How long jobs of this kind wait, by shares of those alone that do not start within SOON_SECONDS."""
        key = _key(size, seconds)
        unit = _late_unit(key, max(LEAST_SECONDS, seconds))
        ended = sorted([*self._late[key], *(PRIOR[False] if key[1] else PRIOR_LATE_SOON)])
        at_least = sorted(
            (now - one.at) / _late_unit(key, one.seconds)
            for one in self._open.values()
            if one.key == key and now - one.at > SOON_SECONDS
        )
        return [unit * factor for factor in _quantiles(ended, at_least, sorted(shares))]

    def trust(self, size: SizeClass, seconds: float, *, are_late: bool = False) -> float:
        """How far the experience with this kind counts, 0 to 1: a handful of jobs of one crowd says little."""
        count = len((self._late if are_late else self._ended)[_key(size, seconds)])
        return count / (count + HALF_TRUSTED)

    def to_json(self) -> dict[str, Any]:
        """All that it knows, so that it outlives its process."""
        return {
            "ended": _classes_json(self._ended),
            "late": _classes_json(self._late),
            "open": [[job_id, *one.key, one.seconds, one.at] for job_id, one in self._open.items()],
        }

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> Calibration:
        """What `to_json` gave. Raises KeyError, TypeError, ValueError: it is of another version."""
        made = cls()
        for kept, told in ((made._ended, known["ended"]), (made._late, known["late"])):
            for name, factors in told.items():
                size, wait = name.split(":")
                kept[int(size), int(wait)].extend(float(factor) for factor in factors)
        for job_id, size, wait, seconds, at in known["open"]:
            made._open[int(job_id)] = _Open((int(size), int(wait)), float(seconds), float(at))
        return made


def _classes_json(kept: Mapping[ClassKey, Iterable[float]]) -> dict[str, list[float]]:
    return {f"{size}:{wait}": [float(f"{one:.4g}") for one in kept[size, wait]] for size, wait in sorted(kept)}


def _late_unit(key: ClassKey, seconds: float) -> float:
    """What waits longer than SOON_SECONDS are measured in: how soon it should have been says nothing of how late."""
    return seconds if key[1] else SOON_SECONDS


def _key(size: SizeClass, seconds: float) -> ClassKey:
    return size, bisect.bisect_left(WAIT_EDGES, seconds)


def _quantiles(ended: list[float], at_least: list[float], shares: list[float]) -> list[float]:
    """Quantiles of what ended, where others are known only to exceed a value; `shares` rise."""
    alive, rest, place = 1.0, len(ended) + len(at_least), 0
    found: list[float] = []
    for value in ended:
        while place < len(at_least) and at_least[place] < value:
            place += 1
            rest -= 1
        alive *= 1.0 - 1.0 / rest
        rest -= 1
        while len(found) < len(shares) and 1.0 - alive >= shares[len(found)] - 1e-9:
            found.append(value)
        if len(found) == len(shares):
            return found
    return [*found, *[max(ended[-1], at_least[-1] if at_least else 0.0)] * (len(shares) - len(found))]
