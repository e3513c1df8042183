"""`Checkpointer`: what the training loop calls to save, announce and restore. Which save waits for which is here;
restoring (`restorer`), writing (`saving`), telling and deleting (`announcing`) are beside it.

Contract with the loop. All ranks call `restore`, `save`, `announce`, `wait` together. After an asynchronous `save` the
loop all-reduces the minimum of `finished_step` (or of `finished_or_failed`) with its other numbers, and once the
minimum reaches a step that was not announced yet, all ranks call `announce` with it. Not for: when to save.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gangline.protocol.launch import encode
from trainer.checkpoint.announcing import Announcer, Emit, Place
from trainer.checkpoint.errors import (
    CheckpointFailed,
    CheckpointMismatch,
    NoUsableCheckpoint,
    describe,
    root_cause,
)
from trainer.checkpoint.layout import Manifest, Position
from trainer.checkpoint.restorer import Restored, Restorer, Target
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.saving import SaveRequest, write_checkpoint
from trainer.checkpoint.staging import BackgroundThread, KeptCopies
from trainer.checkpoint.state import GlobalNames, flat_state, model_values, optimizer_class, written_state
from trainer.checkpoint.wholeness import check_copies, part_of
from trainer.mesh import Mesh
from trainer.plan.training_plan import TrainingPlan

__all__ = [
    "CheckpointFailed",
    "CheckpointMismatch",
    "Checkpointer",
    "Emit",
    "NoUsableCheckpoint",
    "Position",
    "Restored",
]

FAILED: Final = -1
"""`finished_or_failed` after a save that failed: below every step, so a minimum over ranks shows it."""


class Checkpointer:
    """Saves and restores for one rank. The main thread calls it; it owns one background thread."""

    def __init__(
        self,
        mesh: Mesh,
        plan: TrainingPlan,
        *,
        names: GlobalNames | None = None,
        emit: Emit,
        accepted_bytes: Callable[[], int | None],
        note: Callable[[str], None],
    ) -> None:
        """`names`: of the whole model; None: the model that is saved or restored first is whole on every rank.
        `accepted_bytes`: how much of rank 0's events the API has; None without a supervisor. `note`: tell the user
        something in a sentence. It and `emit` are called from the background thread too."""
        self._mesh = mesh
        self._plan = plan
        self._names = names
        self._note = note
        self._retention = Retention(plan.checkpoint.keep, accepted_bytes)
        self._copies = KeptCopies()
        self._thread = BackgroundThread("checkpoint")
        self._announcer: Announcer | None = None
        if plan.checkpoint_root is not None:
            place = Place.of(plan, mesh, Path(plan.checkpoint_root))
            self._announcer = Announcer(mesh, place, self._retention, self._thread, emit=emit, note=note)
        self._is_checked = False
        self._in_flight: Future[Manifest] | None = None
        self._saving_step = 0
        self._started_step: int | None = None
        self._finished_step = 0
        self._failure: CheckpointFailed | None = None

    # --- Restoring ---------------------------------------------------------------------------------------------------

    def restore(self, model: nn.Module, optimizer: Optimizer) -> Restored | None:
        """Load the newest usable checkpoint; None when there is none to resume from. All ranks call it.

        The plan's list is tried in order; without one, what lies below the root, newest step first. Each copy is
        checked byte by byte, by all ranks that share it, then each rank reads its own part of it, however the ranks
        that saved it split it; model and optimizer change only once all ranks have all of theirs. Costs the memory of
        this rank's weights once more until it returns (see `restoring.load_own_state`).

        Raises NoUsableCheckpoint when there are some but none loads, CheckpointMismatch when the first that is whole is
        another model's, and ConfigError, with or without checkpoints, when those of this plan could not be whole. A
        rank waits for the others' checks, about a second per gigabyte and rank, within the control group's timeout.
        """
        if self._announcer is None:
            return None
        self._announcer.sweep()
        names = self._checked_names(model, self._announcer.place)
        restorer = Restorer(self._mesh, self._plan, self._announcer.place.root, self._retention, self._note)
        return restorer.restore(Target(model=model, optimizer=optimizer, names=names))

    def _checked_names(self, model: nn.Module, place: Place) -> GlobalNames:
        """The whole model's names. At the first call all ranks check that they have the whole model together."""
        if self._names is None:
            self._names = GlobalNames.of(model)
        if not self._is_checked:
            own = part_of(model_values(model), self._mesh.node_rank)
            told = self._mesh.gather((own, self._names if self._mesh.is_leader else None))
            # Against the leader's names on every rank, so that all come to the same end.
            check_copies([part for part, _ in told], told[0][1], is_shared=place.is_shared)
            self._is_checked = True
        return self._names

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
        Synchronous: returns once the checkpoint is complete on every node. Raises CheckpointFailed on all ranks alike,
        and ConfigError, at the first call, when the checkpoints of this plan could not be whole.
        """
        started = time.monotonic()
        if self._announcer is None:
            return 0.0
        json.dumps(position.data_state)  # one that is no JSON is an error of the dataset's, here and not in a thread
        self.wait()
        if self._started_step == position.step:
            return time.monotonic() - started
        place = self._announcer.place
        names = self._checked_names(model, place)
        self._started_step = self._saving_step = position.step
        if is_async:
            request = self._request(place, model, optimizer, names, position, self._copies)
            group = self._mesh.background if place.is_shared else self._mesh.node_group
            self._in_flight = self._thread.submit(lambda: self._write(place, request, group))
        else:
            request = self._request(place, model, optimizer, names, position, None)
            self._take(self._run(place, request, self._mesh.control if place.is_shared else self._mesh.node_group))
            self.wait()
        return time.monotonic() - started

    def wait(self) -> None:
        """Return once no save is in flight and all that are complete are announced. All ranks call it.

        Raises CheckpointFailed on all ranks alike if a save failed on any.
        """
        if self._in_flight is not None:
            self._take(self._in_flight)
        self._agree()
        if self._announcer is not None:
            self._announcer.announce_all()

    def close(self) -> None:
        """End the background thread, after what it still has to do. Collective only if a save is in flight."""
        self._thread.close()

    def _request(
        self,
        place: Place,
        model: nn.Module,
        optimizer: Optimizer,
        names: GlobalNames,
        position: Position,
        copies: KeptCopies | None,
    ) -> SaveRequest:
        state: dict[str, Any] | None = None
        problem: str | None = None
        try:
            state = written_state(flat_state(model, optimizer, names))
            state = state if copies is None else copies.copy(state)
        except Exception as error:  # noqa: BLE001  # told to the other ranks, who would wait for this one
            problem = describe(error)
        return SaveRequest(
            final=place.root / place.path(position.step),
            position=position,
            state=state,
            problem=problem,
            world_size=self._mesh.world_size,
            optimizer=optimizer_class(optimizer),
            plan=encode(self._plan),
        )

    def _write(self, place: Place, request: SaveRequest, group: dist.ProcessGroup | None) -> Manifest:
        return write_checkpoint(request, group, is_leader=place.is_leader, note=self._note)

    def _run(self, place: Place, request: SaveRequest, group: dist.ProcessGroup | None) -> Future[Manifest]:
        """`_write` here and now, its end as a future."""
        future: Future[Manifest] = Future()
        try:
            future.set_result(self._write(place, request, group))
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
            if self._announcer is not None:
                self._announcer.add(self._saving_step, manifest)

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

    # --- Announcing --------------------------------------------------------------------------------------------------

    def announce(self, step: int) -> None:
        """Tell of the checkpoints up to `step`, which every copy's leader has finished, and delete what is too old.

        All ranks call it at the same step. Rank 0 emits the events; deleting happens in the background.
        """
        if self._announcer is not None:
            self._announcer.announce(step)
