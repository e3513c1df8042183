"""`Checkpointer`: what the training loop calls to save, announce and restore. The shell around the other modules.

Contract with the loop. All ranks call `restore`, `save`, `announce`, `wait` together. After an asynchronous `save` the
loop all-reduces the minimum of `finished_step` (or of `finished_or_failed`) with its other numbers, and once the
minimum reaches a step that was not announced yet, all ranks call `announce` with it. Not for: when to save.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gangline.protocol.launch import encode
from trainer.checkpoint.errors import (
    CheckpointFailed,
    CheckpointMismatch,
    NoUsableCheckpoint,
    describe,
    root_cause,
)
from trainer.checkpoint.layout import (
    BrokenCheckpoint,
    Manifest,
    Position,
    list_checkpoints,
    list_leftovers,
    read_manifest,
    remove,
    retire,
    step_folder,
    verify,
)
from trainer.checkpoint.restoring import find_mismatch, load_state
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.saving import BackgroundThread, KeptCopies, SaveRequest, write_checkpoint
from trainer.checkpoint.state import apply_state, flat_state, optimizer_class
from trainer.mesh import Mesh
from trainer.plan.training_plan import ResumePoint, TrainingPlan

__all__ = [
    "CheckpointFailed",
    "CheckpointMismatch",
    "Checkpointer",
    "Emit",
    "NoUsableCheckpoint",
    "Position",
    "Restored",
]

Emit = Callable[[dict[str, Any]], Callable[[], int | None]]
"""Queues an event record; what it returns answers with the record's end in the events file, None until it is written.
Called from the background thread too."""

FAILED: Final = -1
"""`finished_or_failed` after a save that failed: below every step, so a minimum over ranks shows it."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The checkpoint that a training continues from."""

    position: Position
    path: str
    """Relative to the root."""
    world_size: int
    """Ranks that saved it."""


@dataclass(frozen=True, kw_only=True)
class _Finished:
    """A checkpoint that is complete here and not announced yet."""

    step: int
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What a rank got out of a checkpoint, or why it got nothing."""

    state: dict[str, Any] | None = None
    problem: str | None = None
    """The checkpoint is unusable: the next one is tried."""
    mismatch: str | None = None
    """It is another model's: an error."""


class Checkpointer:
    """Saves and restores for one rank. The main thread calls it; it owns one background thread."""

    def __init__(
        self,
        mesh: Mesh,
        plan: TrainingPlan,
        *,
        emit: Emit,
        accepted_bytes: Callable[[], int | None],
        note: Callable[[str], None],
    ) -> None:
        """`accepted_bytes`: how much of rank 0's events the API has; None without a supervisor. `note`: tell the user
        something in a sentence. It and `emit` are called from the background thread too."""
        self._mesh = mesh
        self._plan = plan
        self._root = None if plan.checkpoint_root is None else Path(plan.checkpoint_root)
        self._is_shared = plan.is_checkpoint_root_shared
        self._is_leader = mesh.is_leader if self._is_shared else mesh.is_node_leader
        self._emit = emit
        self._note = note
        self._retention = Retention(plan.checkpoint.keep, accepted_bytes)
        self._copies = KeptCopies()
        self._thread = BackgroundThread("checkpoint")
        self._in_flight: Future[Manifest] | None = None
        self._saving_step = 0
        self._started_step: int | None = None
        self._finished_step = 0
        self._unannounced: list[_Finished] = []
        self._failure: CheckpointFailed | None = None

    # --- Restoring ---------------------------------------------------------------------------------------------------

    def restore(self, model: nn.Module, optimizer: Optimizer) -> Restored | None:
        """Load the newest usable checkpoint; None when there is none to resume from. All ranks call it.

        The plan's list is tried in order; without one, what lies below the root, newest step first. Each copy is
        checked byte by byte, by all ranks that share it, then loaded by every rank; model and optimizer change only
        once all ranks have all of it. Raises NoUsableCheckpoint when there are some but none loads,
        CheckpointMismatch when the first that is whole is another model's. A rank waits for the others' checks, about
        a second per gigabyte and rank, within the timeout of the control group.
        """
        if self._root is None:
            return None
        self._sweep(self._root)
        candidates = self._candidates(self._root)
        self._retention.start([point.path for point in reversed(candidates)])
        reasons: list[str] = []
        for point in candidates:
            reason, restored = self._try(self._root, point, model, optimizer)
            if restored is not None:
                return restored
            reasons.append(f"{point.path} {reason}")
            self._retention.mark_broken(point.path)
            if self._mesh.is_leader:
                self._note(f"Checkpoint {point.path} was skipped: it {reason}")
        if reasons:
            raise NoUsableCheckpoint(reasons)
        return None

    def _candidates(self, root: Path) -> list[ResumePoint]:
        if self._plan.resume_from is not None:
            return list(self._plan.resume_from)
        found = [ResumePoint(path=one.path, step=one.step) for one in list_checkpoints(root)]
        listed: list[ResumePoint] = self._mesh.gather(found if self._mesh.is_leader else None)[0]
        return listed

    def _try(
        self, root: Path, point: ResumePoint, model: nn.Module, optimizer: Optimizer
    ) -> tuple[str, Restored | None]:
        folder = root / point.path
        broken = _first(self._mesh.gather(self._why_broken(folder, point)))
        if broken is not None:
            return broken, None
        read = _read(folder, model, optimizer)
        outcomes = self._mesh.gather((read.mismatch, read.problem))
        mismatch = _first([one[0] for one in outcomes])
        if mismatch is not None:
            raise CheckpointMismatch(
                f"the job cannot resume from {point.path}: {mismatch}. Train the model and optimizer that saved it, or "
                "submit the job anew to start from nothing."
            )
        problem = _first([one[1] for one in outcomes])
        if problem is not None or read.state is None:
            return problem or "is unusable.", None
        apply_state(read.state, model, optimizer)
        manifest = read_manifest(folder)
        return "", Restored(position=manifest.position, path=point.path, world_size=manifest.world_size)

    def _why_broken(self, folder: Path, point: ResumePoint) -> str | None:
        mesh = self._mesh
        part, parts = (mesh.rank, mesh.world_size) if self._is_shared else (mesh.local_rank, mesh.local_world_size)
        try:
            manifest = verify(folder, part, parts)
        except BrokenCheckpoint as broken:
            return str(broken)
        if manifest.position.step != point.step:
            return f"holds step {manifest.position.step}, not {point.step}."
        return None

    # --- Saving ------------------------------------------------------------------------------------------------------

    @property
    def finished_step(self) -> int:
        """Newest step whose checkpoint is complete as far as this rank's copy goes; 0 before any.

        The same on all ranks that write one copy, within moments. Raises CheckpointFailed when a save failed.
        """
        self._poll()
        if self._failure is not None:
            raise self._failure
        return self._finished_step

    @property
    def finished_or_failed(self) -> int:
        """As `finished_step`, but FAILED (-1) instead of raising.

        For the all-reduced minimum: when it is negative, all ranks call `wait`, which raises the same on each.
        """
        self._poll()
        return self._finished_step if self._failure is None else FAILED

    def save(self, model: nn.Module, optimizer: Optimizer, position: Position, *, is_async: bool) -> float:
        """Write a checkpoint; returns the seconds that it blocked. All ranks call it. Never saves a step twice.

        Asynchronous: returns once the state is copied in memory; a save still in flight is waited for first.
        Synchronous: returns once the checkpoint is complete on every node. Raises CheckpointFailed on all ranks alike.
        """
        started = time.monotonic()
        if self._root is None:
            return 0.0
        json.dumps(
            position.data_state
        )  # a state that is no JSON is an error of the dataset's, here and not in a thread
        self.wait()
        if self._started_step == position.step:
            return time.monotonic() - started
        self._started_step = self._saving_step = position.step
        if is_async:
            request = self._request(self._root, model, optimizer, position, self._copies)
            group = self._mesh.background if self._is_shared else self._mesh.node_group
            self._in_flight = self._thread.submit(lambda: self._write(request, group))
        else:
            request = self._request(self._root, model, optimizer, position, None)
            self._take(self._run(request, self._mesh.control if self._is_shared else self._mesh.node_group))
            self.wait()
        return time.monotonic() - started

    def wait(self) -> None:
        """Return once no save is in flight and all that are complete are announced. All ranks call it.

        Raises CheckpointFailed on all ranks alike if a save failed on any.
        """
        if self._in_flight is not None:
            self._take(self._in_flight)
        self._agree()
        if self._unannounced:
            self.announce(self._unannounced[-1].step)

    def close(self) -> None:
        """End the background thread, after what it still has to do. Collective only if a save is in flight."""
        self._thread.close()

    def _request(
        self, root: Path, model: nn.Module, optimizer: Optimizer, position: Position, copies: KeptCopies | None
    ) -> SaveRequest:
        state: dict[str, Any] | None = None
        problem: str | None = None
        try:
            state = flat_state(model, optimizer)
            state = state if copies is None else copies.copy(state)
        except Exception as error:  # noqa: BLE001  # told to the other ranks, who would wait for this one
            problem = describe(error)
        return SaveRequest(
            final=root / self._plan.checkpoint_subfolder / step_folder(position.step),
            position=position,
            state=state,
            problem=problem,
            world_size=self._mesh.world_size,
            optimizer=optimizer_class(optimizer),
            plan=encode(self._plan),
        )

    def _write(self, request: SaveRequest, group: dist.ProcessGroup | None) -> Manifest:
        return write_checkpoint(request, group, is_leader=self._is_leader, note=self._note)

    def _run(self, request: SaveRequest, group: dist.ProcessGroup | None) -> Future[Manifest]:
        """`_write` here and now, its end as a future."""
        future: Future[Manifest] = Future()
        try:
            future.set_result(self._write(request, group))
        except CheckpointFailed as failure:
            future.set_exception(failure)
        return future

    def _poll(self) -> None:
        if self._in_flight is not None and self._in_flight.done():
            self._take(self._in_flight)

    def _take(self, future: Future[Manifest]) -> None:
        """Note how a save ended. Blocks until it has."""
        self._in_flight = None
        try:
            manifest = future.result()
        except CheckpointFailed as failure:
            self._failure = failure
        else:
            self._finished_step = max(self._finished_step, self._saving_step)
            self._unannounced.append(_Finished(step=self._saving_step, manifest=manifest))

    def _agree(self) -> None:
        """Raise CheckpointFailed on all ranks if a save failed on any: each node knows only of its own copy."""
        if self._failure is not None and self._failure.is_peer_loss:
            raise self._failure  # somebody is gone: asking would only fail again
        try:
            causes = self._mesh.gather(None if self._failure is None else self._failure.cause)
        except RuntimeError as error:
            if self._failure is None:
                raise
            raise self._failure from error  # the others may have left by now, for the same reason
        failed = {rank: cause for rank, cause in enumerate(causes) if cause is not None}
        if failed:
            self._failure = self._failure or CheckpointFailed(self._saving_step, root_cause(failed))
            raise self._failure

    # --- Announcing and deleting -----------------------------------------------------------------------------------

    def announce(self, step: int) -> None:
        """Tell of the checkpoints up to `step`, which every copy's leader has finished, and delete what is too old.

        All ranks call it at the same step. Rank 0 emits the events; deleting happens in the background.
        """
        if self._root is None:
            return
        finished = [one for one in self._unannounced if one.step <= step]
        self._unannounced = [one for one in self._unannounced if one.step > step]
        if self._mesh.is_leader:
            for one in finished:
                self._retention.add(self._path(one.step), self._emit(self._event(one)))
        doomed = self._retention.take_removable() if self._mesh.is_leader else []
        if not self._is_shared:
            doomed = self._mesh.gather(doomed)[0]
        if doomed and self._is_leader:
            root = self._root
            self._thread.submit(lambda: self._remove(root, doomed))

    def _event(self, finished: _Finished) -> dict[str, Any]:
        return {
            "kind": "checkpoint",
            "step": finished.step,
            "path": self._path(finished.step),
            "samples_seen": finished.manifest.position.samples_seen,
            "num_bytes": finished.manifest.num_bytes,
        }

    def _path(self, step: int) -> str:
        return (Path(self._plan.checkpoint_subfolder) / step_folder(step)).as_posix()

    def _remove(self, root: Path, paths: list[str]) -> None:
        for path in paths:
            try:
                remove(root / path)
            except FileNotFoundError:
                pass  # gone already: an earlier attempt was ended between deleting and telling
            except OSError as error:
                self._note(f"Checkpoint {path} is no longer needed but cannot be deleted: {error}.")
                continue
            if self._mesh.is_leader:
                self._emit({"kind": "checkpoint_removed", "path": path})

    def _sweep(self, root: Path) -> None:
        """Delete what interrupted saves of earlier attempts left: nobody else would. The deleting in the background.

        An earlier attempt that is cut off and still writes loses its save by that; its effects are refused anyway.
        """
        if not self._is_leader:
            return
        for leftover in list_leftovers(root):
            try:
                retired = retire(leftover)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._note(f"{leftover}, left by an interrupted save, cannot be deleted: {error}.")
                continue
            self._thread.submit(functools.partial(shutil.rmtree, retired, ignore_errors=True))


def _read(folder: Path, model: nn.Module, optimizer: Optimizer) -> _Read:
    try:
        mismatch = find_mismatch(read_manifest(folder), model, optimizer)
        if mismatch is not None:
            return _Read(mismatch=mismatch)
        return _Read(state=load_state(folder))
    except BrokenCheckpoint as broken:
        return _Read(problem=str(broken))


def _first(problems: list[str | None]) -> str | None:
    """The problem of the lowest rank that has one, with the rank unless that is 0; None: nobody has."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            return problem if rank == 0 else f"{problem} (Seen by rank {rank}.)"
    return None
