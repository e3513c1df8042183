"""Checkpoints that are complete and not told of yet, telling of them, and deleting what they replace.

Not for: which ones may go (`retention`).
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.layout import Manifest, list_leftovers, remove, retire, step_folder
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.staging import BackgroundThread
from trainer.mesh import Mesh
from trainer.plan.training_plan import TrainingPlan

Emit = Callable[[dict[str, Any]], Callable[[], int | None]]
"""Queues an event record; what it returns answers with the record's end in the events file, None until it is written.
Called from the background thread too."""


@dataclass(frozen=True, kw_only=True)
class _Finished:
    """A checkpoint that is complete here and not announced yet."""

    step: int
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a job's checkpoints lie, for the rank that asks."""

    root: Path
    subfolder: str
    """Of this attempt, below the root."""
    is_shared: bool
    """One folder for all nodes; otherwise each node has a copy in its own."""
    is_leader: bool
    """Whether this rank deletes and completes: one rank per copy."""

    @classmethod
    def of(cls, plan: TrainingPlan, mesh: Mesh, root: Path) -> Place:
        """The plan's, below `root`."""
        is_shared = plan.is_checkpoint_root_shared
        return cls(
            root=root,
            subfolder=plan.checkpoint_subfolder,
            is_shared=is_shared,
            is_leader=mesh.is_leader if is_shared else mesh.is_node_leader,
        )

    def path(self, step: int) -> str:
        """Of the checkpoint of `step`, relative to the root."""
        return (Path(self.subfolder) / step_folder(step)).as_posix()


class Announcer:
    """Tells and deletes for one rank. Deleting happens in the background thread."""

    def __init__(
        self,
        mesh: Mesh,
        place: Place,
        retention: Retention,
        thread: BackgroundThread,
        *,
        emit: Emit,
        note: Callable[[str], None],
    ) -> None:
        self._mesh = mesh
        self.place = place
        self._retention = retention
        self._thread = thread
        self._emit = emit
        self._note = note
        self._unannounced: list[_Finished] = []

    def add(self, step: int, manifest: Manifest) -> None:
        """The checkpoint of `step` is complete here."""
        self._unannounced.append(_Finished(step=step, manifest=manifest))

    def announce_all(self) -> None:
        """`announce` all that were added. All ranks call it, each having added the same steps."""
        if self._unannounced:
            self.announce(self._unannounced[-1].step)

    def announce(self, step: int) -> None:
        """See `Checkpointer.announce`."""
        finished = [one for one in self._unannounced if one.step <= step]
        self._unannounced = [one for one in self._unannounced if one.step > step]
        if self._mesh.is_leader:
            for one in finished:
                self._retention.add(self.place.path(one.step), self._emit(self._event(one)))
        doomed = self._retention.take_removable() if self._mesh.is_leader else []
        if not self.place.is_shared:
            doomed = self._mesh.gather(doomed)[0]
        if doomed and self.place.is_leader:
            self._thread.submit(lambda: self._remove(doomed))

    def sweep(self) -> None:
        """Delete what interrupted saves of earlier attempts left: nobody else would. The deleting in the background.

        An earlier attempt that is cut off and still writes loses its save by that; its effects are refused anyway.
        """
        if not self.place.is_leader:
            return
        for leftover in list_leftovers(self.place.root):
            try:
                retired = retire(leftover)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._note(f"{leftover}, left by an interrupted save, cannot be deleted: {error}.")
                continue
            self._thread.submit(functools.partial(shutil.rmtree, retired, ignore_errors=True))

    def _event(self, finished: _Finished) -> dict[str, Any]:
        return {
            "kind": "checkpoint",
            "step": finished.step,
            "path": self.place.path(finished.step),
            "samples_seen": finished.manifest.position.samples_seen,
            "num_bytes": finished.manifest.num_bytes,
        }

    def _remove(self, paths: list[str]) -> None:
        for path in paths:
            try:
                remove(self.place.root / path)
            except FileNotFoundError:
                pass  # gone already: an earlier attempt was ended between deleting and telling
            except OSError as error:
                self._note(f"Checkpoint {path} is no longer needed but cannot be deleted: {error}.")
                continue
            if self._mesh.is_leader:
                self._emit({"kind": "checkpoint_removed", "path": path})
