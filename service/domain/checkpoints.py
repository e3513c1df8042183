"""Where a checkpoint lies, and what a rank of the trainer tells of checkpoints and for its owner to read. Pure.

Not for: storing them (`service.operations.accept_checkpoints`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from service.domain.text import UNSTORABLE
from trainer.plan.training_plan import MAX_KEPT

MAX_RESUME_POINTS: Final = MAX_KEPT
"""Accepted checkpoints that an attempt is told of: to resume from one, and to delete those that are too old."""
MAX_PATH_LENGTH: Final = 500
MAX_NOTICE_LENGTH: Final = 2_000


@dataclass(frozen=True, kw_only=True)
class CheckpointHome:
    """Where a checkpoint can be read: wherever a shared folder is seen, else on the nodes that wrote it alone."""

    shared_folder_id: str | None
    node_names: tuple[str, ...]
    """Nodes of the attempt that wrote it, sorted."""

    def is_seen_by(self, node_name: str, shared_folder_id: str | None) -> bool:
        """Whether a node that sees this shared folder (None: none) can read it."""
        if self.shared_folder_id is not None:
            return shared_folder_id == self.shared_folder_id
        return node_name in self.node_names

    @classmethod
    def of_nodes(cls, shared_folder_ids: Mapping[str, str | None]) -> CheckpointHome:
        """Where the nodes of an attempt keep its checkpoints, by the shared folder that each of them tells of."""
        ids = set(shared_folder_ids.values())
        return cls(shared_folder_id=ids.pop() if len(ids) == 1 else None, node_names=tuple(sorted(shared_folder_ids)))

    @classmethod
    def of_row(cls, shared_folder_id: str | None, node_names: str) -> CheckpointHome:
        """As stored: the names are JSON text."""
        return cls(shared_folder_id=shared_folder_id, node_names=tuple(json.loads(node_names)))


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten:
    """A complete checkpoint lies in the job's folder."""

    step: int
    path: str
    """Relative to the folder of the job's checkpoints."""
    samples_seen: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointRemoved:
    """A checkpoint was removed to keep only the newest."""

    path: str


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Something that the job's owner should know."""

    text: str


TrainerEvent = CheckpointWritten | CheckpointRemoved | Notice


def parse_trainer_event(rank: int, data: Mapping[str, Any]) -> TrainerEvent | str:
    """An event of one of `TRAINER_KINDS`, or why it is refused. Never raises on what a job may write."""
    if rank != 0:
        return f"a {data['kind']} from rank {rank}: only rank 0 tells of them"
    return TRAINER_KINDS[data["kind"]](data)


def _written(data: Mapping[str, Any]) -> TrainerEvent | str:
    path = _path(data.get("path"))
    counts: dict[str, Any] = {name: data.get(name) for name in ("step", "samples_seen", "num_bytes")}
    if path is None or not all(_is_count(number) for number in counts.values()):
        return "a checkpoint without a path below the job's folder, or without step, samples_seen and num_bytes"
    return CheckpointWritten(path=path, **counts)


def _removed(data: Mapping[str, Any]) -> TrainerEvent | str:
    path = _path(data.get("path"))
    return "a removed checkpoint without a path" if path is None else CheckpointRemoved(path=path)


def _notice(data: Mapping[str, Any]) -> TrainerEvent | str:
    text = data.get("text")
    if not isinstance(text, str) or not text.strip():
        return "a notice without text"
    return Notice(text=UNSTORABLE.sub("\ufffd", text.strip()[:MAX_NOTICE_LENGTH]))


TRAINER_KINDS: Final[Mapping[str, Callable[[Mapping[str, Any]], TrainerEvent | str]]] = {
    "checkpoint": _written,
    "checkpoint_removed": _removed,
    "notice": _notice,
}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _path(value: Any) -> str | None:
    """A relative path that stays below the folder that it starts from."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_PATH_LENGTH or UNSTORABLE.search(value):
        return None
    parts: Sequence[str] = value.split("/")
    return None if any(part in ("", ".", "..") for part in parts) else value
