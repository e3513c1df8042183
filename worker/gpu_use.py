"""How much each GPU of this node works, for the heartbeat: from NVML, or, for CPU slots, from what their ranks used.

A slot's use is the share of a core's time that the processes of its rank took since the last look. NVML is read in a
thread of its own, so that a GPU that no longer answers holds up no heartbeat. Not for: what a node offers
(`worker.inventory`), nor what the numbers lead to (the service).
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from worker.agent_log import log
from worker.attempt_folder import read_plan, read_record
from worker.inventory import GPU, KIND_CPU_SLOT
from worker.nvml import Nvml, NvmlError
from worker.state import StateError, read_state

_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_SHORTEST_LOOK_SECONDS: Final = 0.05
"""CPU time comes in ticks of a hundredth of a second: shares of a shorter time would mean nothing."""


@dataclass(frozen=True, kw_only=True)
class GPUUse:
    """One GPU now. The names are those of the heartbeat."""

    index: int
    utilisation: float
    """0 to 1."""
    memory_bytes: int


class UseMeter(Protocol):
    """What the agent asks at each heartbeat."""

    def read(self, now: float) -> tuple[GPUUse, ...]:
        """The use of every GPU of which it is known. `now`: monotonic seconds."""
        ...


def meter_for(gpus: Sequence[GPU], nvml: Nvml | None, attempts_folder: Path) -> UseMeter:
    """The meter for what this node offers. Recorded devices have no use to tell of."""
    if gpus and all(gpu.kind == KIND_CPU_SLOT for gpu in gpus):
        return SlotMeter(attempts_folder, [gpu.index for gpu in gpus])
    return NvmlMeter(nvml, {gpu.uuid: gpu.index for gpu in gpus}) if nvml is not None else NoMeter()


class NoMeter:
    """Knows nothing."""

    def read(self, now: float) -> tuple[GPUUse, ...]:
        """Nothing."""
        return ()


class NvmlMeter:
    """Reads NVML in a daemon thread; each `read` tells of the look that the one before has asked for."""

    def __init__(self, nvml: Nvml, indexes: Mapping[str, int]) -> None:
        """`indexes`: index by UUID of the GPUs that the node offers."""
        self._nvml = nvml
        self._indexes = dict(indexes)
        self._asked = threading.Event()
        self._latest: tuple[GPUUse, ...] = ()
        self._has_failed = False
        threading.Thread(target=self._run, name="nvml", daemon=True).start()

    def read(self, now: float) -> tuple[GPUUse, ...]:
        """The use as of about the last call; nothing while NVML does not answer."""
        found, self._latest = self._latest, ()
        self._asked.set()
        return found

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            self._latest = self.look()

    def look(self) -> tuple[GPUUse, ...]:
        """Ask NVML now. What fails is logged once, until it works again."""
        try:
            uses = self._nvml.use()
        except NvmlError as error:
            if not self._has_failed:
                log("gpu_use_unknown", error=error)
            self._has_failed = True
            return ()
        self._has_failed = False
        return tuple(
            GPUUse(index=self._indexes[use.uuid], utilisation=use.utilisation, memory_bytes=use.memory_bytes)
            for use in uses
            if use.uuid in self._indexes
        )


# --- CPU slots -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProcessTimes:
    """What one process has used so far."""

    parent_pid: int
    ticks: int
    """CPU time, children that it has waited for included."""
    memory_bytes: int
    """Resident."""


@dataclass(frozen=True, kw_only=True)
class SlotHolder:
    """An attempt that holds slots here."""

    attempt_id: int
    slots: tuple[int, ...]
    supervisor_pid: int
    rank_pids: tuple[int, ...]
    """By local rank."""


class SlotMeter:
    """Measures CPU slots. The first look tells nothing: there is nothing yet to compare it with."""

    def __init__(self, attempts_folder: Path, slots: Sequence[int]) -> None:
        self._folder = attempts_folder
        self._slots = tuple(slots)
        self._ticks: dict[tuple[int, int], float] = {}
        """At the last look, by attempt and slot."""
        self._looked_at: float | None = None
        self._told: tuple[GPUUse, ...] = ()

    def read(self, now: float) -> tuple[GPUUse, ...]:
        """The share of a core that each slot's rank used since the last call."""
        if self._looked_at is not None and now - self._looked_at < _SHORTEST_LOOK_SECONDS:
            return self._told
        holders = list(holders_in(self._folder))
        shares = share_out(holders, read_process_times() if holders else {})
        ticks = {key: share.ticks for key, share in shares.items()}
        if self._looked_at is not None:
            self._told = self._compare(shares, now - self._looked_at)
        self._ticks, self._looked_at = ticks, now
        return self._told

    def _compare(self, shares: Mapping[tuple[int, int], SlotShare], elapsed: float) -> tuple[GPUUse, ...]:
        by_slot = {slot: (key, share) for key, share in shares.items() for slot in (key[1],)}
        return tuple(self._use_of(slot, by_slot.get(slot), elapsed) for slot in self._slots)

    def _use_of(self, slot: int, held: tuple[tuple[int, int], SlotShare] | None, elapsed: float) -> GPUUse:
        if held is None:
            return GPUUse(index=slot, utilisation=0.0, memory_bytes=0)
        key, share = held
        # An attempt that was not here at the last look has begun since. Times can also shrink: with a process that
        # nobody waited for, its time is gone.
        seconds = max(0.0, share.ticks - self._ticks.get(key, 0.0)) / _TICKS_PER_SECOND
        return GPUUse(index=slot, utilisation=min(1.0, seconds / elapsed), memory_bytes=round(share.memory_bytes))


@dataclass(frozen=True, kw_only=True)
class SlotShare:
    """What of an attempt falls to one of its slots."""

    ticks: float
    memory_bytes: float


def share_out(holders: Iterable[SlotHolder], times: Mapping[int, ProcessTimes]) -> dict[tuple[int, int], SlotShare]:
    """What each slot's processes have used so far, by attempt and slot. Pure.

    With as many ranks as slots each rank has its own, with all that it started; otherwise (a command that brings its
    own launcher), and for processes that left their rank, the slots share alike.
    """
    result: dict[tuple[int, int], SlotShare] = {}
    for holder in holders:
        of_rank: defaultdict[int | None, list[ProcessTimes]] = defaultdict(list)
        is_own = len(holder.rank_pids) == len(holder.slots)
        for pid, process in times.items():
            rank = _rank_of(pid, holder, times)
            if rank is not None:
                of_rank[rank if is_own and rank >= 0 else None].append(process)
        shared = of_rank[None]
        for place, slot in enumerate(holder.slots):
            own = of_rank[place]
            result[holder.attempt_id, slot] = SlotShare(
                ticks=sum(one.ticks for one in own) + sum(one.ticks for one in shared) / len(holder.slots),
                memory_bytes=sum(one.memory_bytes for one in own)
                + sum(one.memory_bytes for one in shared) / len(holder.slots),
            )
    return result


def _rank_of(pid: int, holder: SlotHolder, times: Mapping[int, ProcessTimes]) -> int | None:
    """The local rank whose process `pid` is or comes from; -1: of the attempt, but of no rank; None: not of it."""
    seen: set[int] = set()
    current = pid
    while current in times and current not in seen:
        if current in holder.rank_pids:
            return holder.rank_pids.index(current)
        if current == holder.supervisor_pid:
            return None if pid == current else -1
        seen.add(current)
        current = times[current].parent_pid
    return None


def holders_in(attempts_folder: Path) -> Iterator[SlotHolder]:
    """The attempts whose ranks run here. One whose folder goes away meanwhile is left out."""
    for folder in sorted(attempts_folder.glob("[0-9]*")):
        try:
            supervisor = read_state(folder).supervisor
            plan, record = read_plan(folder), read_record(folder)
        except (OSError, StateError, ValueError):
            continue
        if supervisor is None or not record.ranks or not plan.gpus:
            continue
        ranks = sorted(record.ranks, key=lambda rank: rank.local_rank)
        yield SlotHolder(
            attempt_id=plan.attempt_id,
            slots=tuple(gpu.index for gpu in plan.gpus),
            supervisor_pid=supervisor.pid,
            rank_pids=tuple(rank.pid for rank in ranks),
        )


def read_process_times() -> dict[int, ProcessTimes]:
    """What every process of this machine has used so far, by pid."""
    found: dict[int, ProcessTimes] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  # names are all it needs
        if not name.isdecimal():
            continue
        try:
            text = Path(f"/proc/{name}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name stands in parentheses and may itself hold spaces and parentheses: fields begin after the last one.
        fields = text.rpartition(b")")[2].split()
        found[int(name)] = ProcessTimes(
            parent_pid=int(fields[1]),
            ticks=sum(int(field) for field in fields[11:15]),
            memory_bytes=int(fields[21]) * _PAGE_BYTES,
        )
    return found
