"""The oracle: shortest remaining time first with free preemption, by the true times. The bound that policies aim at.

At every arrival and end the whole pool is packed anew until it is full: jobs in order of the time they still need (ties
by submission). One that runs stays where it is unless somebody before it took that place; others go by best fit. Gangs
that do not fit block nobody, and stopping or moving a job costs nothing. Pure. In replay only: no scheduler knows these
times. Compare with it by mean completion time alone: waits and preemptions depend on details of the packing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Final

from service.replay.run_record import RunRecord, Surroundings
from service.replay.traces import Trace

_SHIFT: Final = 20
"""A key is (seconds << _SHIFT) + place of the job: it orders by time, then by submission, and is one integer."""
_PLACE: Final = (1 << _SHIFT) - 1
PROGRESS_STEP: Final = 256

Parts = tuple[tuple[int, int], ...]
"""What a job holds: (node, GPUs there)."""


def run_oracle(trace: Trace, surroundings: Surroundings, on_progress: Callable[[int], None] | None = None) -> RunRecord:
    """All jobs of a trace under the oracle. The record has no runs: where a job ran is not told.

    `on_progress` gets the number of jobs that have ended since it was last called.
    """
    if len(trace.jobs) > _PLACE:
        raise ValueError(f"the oracle takes at most {_PLACE} jobs, {trace.name} has {len(trace.jobs)}")
    return _Oracle(trace, surroundings).run(on_progress or (lambda count: None))


class _Oracle:
    def __init__(self, trace: Trace, surroundings: Surroundings):
        self.jobs = trace.jobs
        self.surroundings = surroundings
        self.record = RunRecord.of(trace, surroundings)
        self.running: list[tuple[int, Parts]] = []
        """By the time they still need, and so by their ends: the keys are of those, which do not move."""
        self.waiting: list[int] = []
        """Keys of the time that they need, sorted."""

    def run(self, on_progress: Callable[[int], None]) -> RunRecord:
        """See `run_oracle`."""
        jobs, count = self.jobs, len(self.jobs)
        num_arrived = num_ended = told = 0
        while num_ended < count:
            now = self.running[0][0] >> _SHIFT if self.running else None
            if num_arrived < count and (now is None or jobs[num_arrived].submitted_at < now):
                now = jobs[num_arrived].submitted_at
            if now is None:
                raise ValueError(f"{count - num_ended} jobs of {self.record.trace.name} are larger than the pool")
            self.record.advance(now)
            num_ended += self._end(now)
            while num_arrived < count and jobs[num_arrived].submitted_at == now:
                bisect.insort(self.waiting, (jobs[num_arrived].duration << _SHIFT) + num_arrived)
                self.record.waits(jobs[num_arrived].gpus)
                num_arrived += 1
            if self.waiting:
                self._pack(now)
            if num_ended - told >= PROGRESS_STEP:
                on_progress(num_ended - told)
                told = num_ended
        on_progress(num_ended - told)
        return self.record

    def _end(self, now: int) -> int:
        """Let the jobs go that are done; returns how many."""
        count = 0
        while count < len(self.running) and self.running[count][0] >> _SHIFT == now:
            place = self.running[count][0] & _PLACE
            self.record.ends(place, self.jobs[place].gpus, now)
            count += 1
        del self.running[:count]
        return count

    def _pack(self, now: int) -> None:
        """Choose anew who runs, and where."""
        packing = _Packing(self, now)
        for place in packing.started:
            self.record.starts(place, self.jobs[place].gpus, now)
        for place in packing.stopped:
            self.record.stops(place, self.jobs[place].gpus)
        self.running, self.waiting = packing.running, packing.waiting


class _Packing:
    """One filling of the pool, in one go over those that run and those that wait."""

    def __init__(self, oracle: _Oracle, now: int):
        surroundings = oracle.surroundings
        self.jobs = oracle.jobs
        self.size = surroundings.gpus_per_node
        self.free = [self.size] * surroundings.nodes
        self.num_free = surroundings.gpus
        self.blocked = surroundings.gpus + 1
        """The least size that found no room: what is larger finds none either."""
        self.shift = now << _SHIFT
        self.running: list[tuple[int, Parts]] = []
        self.started: list[int] = []
        self.stopped: list[int] = []
        passed = self._fill(oracle.running, oracle.waiting)
        self.waiting = sorted(passed) if self.stopped else passed

    def _fill(self, running: list[tuple[int, Parts]], waiting: list[int]) -> list[int]:
        """Place whom there is room for; returns the keys of all who wait from now on."""
        free, shift, kept = self.free, self.shift, self.running
        passed: list[int] = []
        looked_at, next_end = 0, waiting[0] + shift
        for number, job in enumerate(running):
            while next_end < job[0]:
                self._take_waiting(waiting[looked_at], passed)
                looked_at += 1
                next_end = waiting[looked_at] + shift if looked_at < len(waiting) else 1 << 90
            if not self.num_free:
                passed += [self._stop(key) for key, _ in running[number:]]
                break
            for node, count in job[1]:
                if free[node] < count:
                    self._move(job[0], passed)
                    break
            else:
                for node, count in job[1]:
                    free[node] -= count
                    self.num_free -= count
                kept.append(job)
        while looked_at < len(waiting) and self.num_free:
            self._take_waiting(waiting[looked_at], passed)
            looked_at += 1
        return passed + waiting[looked_at:]

    def _take_waiting(self, key: int, passed: list[int]) -> None:
        parts = self._place(key)
        if parts is None:
            passed.append(key)
        else:
            self.running.append((key + self.shift, parts))
            self.started.append(key & _PLACE)

    def _move(self, key: int, passed: list[int]) -> None:
        parts = self._place(key)
        if parts is None:
            passed.append(self._stop(key))
        else:
            self.running.append((key, parts))

    def _stop(self, key: int) -> int:
        self.stopped.append(key & _PLACE)
        return key - self.shift

    def _place(self, key: int) -> Parts | None:
        """Room by best fit: whole nodes, and what is left over on one more. None, and nothing taken, without."""
        gpus = self.jobs[key & _PLACE].gpus
        if gpus > self.num_free or gpus >= self.blocked:
            return None
        whole, rest = divmod(gpus, self.size)
        nodes = [node for node, count in enumerate(self.free) if count == self.size][:whole] if whole else []
        parts = [(node, self.size) for node in nodes]
        if len(parts) == whole and rest:
            for node in nodes:
                self.free[node] = 0
            best = next((count for count in range(rest, self.size + 1) if count in self.free), None)
            if best is not None:
                parts.append((self.free.index(best), rest))
            for node in nodes:
                self.free[node] = self.size
        if sum(count for _, count in parts) < gpus:
            self.blocked = gpus
            return None
        for node, count in parts:
            self.free[node] -= count
        self.num_free -= gpus
        return tuple(parts)
