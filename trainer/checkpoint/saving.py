"""Writing one checkpoint: shards by all ranks, what several have by one of them, completed by the first.

Every part that can fail on one rank alone is agreed with the others, so a failure reaches all of them and none waits.
Not for: memory and threads (`staging`), when (`checkpointer`), names and order on disk (`layout`).
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trainer.checkpoint.errors import CheckpointFailed, describe, root_cause
from trainer.checkpoint.layout import (
    BrokenCheckpoint,
    Manifest,
    Position,
    StoredFile,
    begin,
    complete,
    describe_file,
    remove,
    temporary_of,
    verify,
)
from trainer.checkpoint.state import OBJECT, tensor_description

T = TypeVar("T")

METADATA_FILE: Final = ".metadata"
"""torch's own index of the shards."""

# A rank that saves or loads alone does so on purpose. Set once and here: `catch_warnings` is not safe beside a thread.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """One checkpoint to write."""

    final: Path
    """The folder that it becomes."""
    position: Position
    state: Mapping[str, Any] | None
    """What is written; None when this rank could not stage it."""
    problem: str | None
    """Why it could not."""
    world_size: int
    optimizer: str
    plan: dict[str, Any]


def write_checkpoint(
    request: SaveRequest, group: dist.ProcessGroup | None, *, is_leader: bool, note: Callable[[str], None]
) -> Manifest:
    """Write a checkpoint with all ranks of `group` (None: alone); returns its manifest once it is complete.

    Every rank of the group calls it, the leader being the group's first. A complete checkpoint of this step and
    attempt is left as it is; a broken one is cleared away. Raises CheckpointFailed, on all ranks with the same cause.
    """
    step = request.position.step

    try:
        prepared = _together(
            step, group, lambda: _prepare(request.final, note) if is_leader else None, problem=request.problem
        )
        existing = prepared[0]
        if existing is not None:
            return existing
        metadata = _write_shards(request, group)
        parts = _together(step, group, lambda: _describe_own_files(request, metadata, group, is_leader=is_leader))
        files = tuple(file for part in parts for file in part)
        manifest = _together(step, group, lambda: _finish(request, metadata, files) if is_leader else None)[0]
    except CheckpointFailed:
        if is_leader:
            shutil.rmtree(temporary_of(request.final), ignore_errors=True)  # best effort: the failure is what counts
        raise
    assert manifest is not None  # the leader's, which finished
    return manifest


def _prepare(final: Path, note: Callable[[str], None]) -> Manifest | None:
    """Make the temporary folder, or return the manifest of the checkpoint that is already there."""
    if final.exists():
        try:
            return verify(final)
        except BrokenCheckpoint as broken:
            note(f"Checkpoint {final} {broken} It is replaced.")
            remove(final)
    begin(final)
    return None


def _write_shards(request: SaveRequest, group: dist.ProcessGroup | None) -> Metadata:
    """Every rank writes its part and syncs it; torch's index comes last. Returns the index."""
    writer = dcp.FileSystemWriter(
        temporary_of(request.final),
        sync_files=True,
        thread_count=1,  # an error in one of torch's further threads would be lost
        per_thread_copy_ahead=0,
        overwrite=False,
    )
    try:
        return dcp.save(
            dict(request.state or {}),
            storage_writer=writer,
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:  # not an Exception: torch derives it from BaseException
        causes = {_global_rank(group, rank): describe(failure[0]) for rank, failure in error.failures.items()}
        raise CheckpointFailed(request.position.step, root_cause(causes)) from error
    except Exception as error:  # a peer that is gone, mostly
        raise CheckpointFailed(request.position.step, f"rank {_own_rank()}: {describe(error)}") from error


def _describe_own_files(
    request: SaveRequest, metadata: Metadata, group: dist.ProcessGroup | None, *, is_leader: bool
) -> list[StoredFile]:
    """Hash what this rank wrote: all ranks at once, so that the others never wait for one that hashes everything.

    The index names the files: a folder listing may lag behind on a network file system.
    """
    own = f"__{0 if group is None else dist.get_rank(group)}_"
    names = sorted({info.relative_path for info in metadata.storage_data.values()})
    mine = [name for name in names if name.startswith(own)] + [METADATA_FILE] * is_leader
    return [describe_file(temporary_of(request.final) / name) for name in mine]


def _finish(request: SaveRequest, metadata: Metadata, files: tuple[StoredFile, ...]) -> Manifest:
    """Complete what all ranks wrote."""
    names = {info.relative_path for info in metadata.storage_data.values()} | {METADATA_FILE}
    if names != {file.name for file in files}:
        raise RuntimeError(f"torch named the files {sorted(names)}, the ranks hashed {sorted(f.name for f in files)}")
    manifest = Manifest(
        position=request.position,
        world_size=request.world_size,
        optimizer=request.optimizer,
        torch_version=torch.__version__,
        plan=request.plan,
        files=files,
        keys=stored_keys(metadata),
    )
    complete(request.final, manifest)
    return manifest


def stored_keys(metadata: Metadata) -> dict[str, str]:
    """What torch's index lists, key to description."""
    return {
        key: tensor_description(stored.properties.dtype, stored.size)
        if isinstance(stored, TensorStorageMetadata)
        else OBJECT
        for key, stored in metadata.state_dict_metadata.items()
    }


def _together(
    step: int, group: dist.ProcessGroup | None, work: Callable[[], T], *, problem: str | None = None
) -> list[T]:
    """Do `work` on every rank, unless this one has a problem; returns the results by rank.

    Raises CheckpointFailed on all ranks if any has a problem or failed.
    """
    result: T | None = None
    try:
        result = work() if problem is None else None
    except Exception as error:  # noqa: BLE001  # told to all ranks, each of which raises it
        problem = describe(error)
    outcomes: list[Any] = [(result, problem)]
    if group is not None:
        outcomes = [None] * dist.get_world_size(group)
        try:
            dist.all_gather_object(outcomes, (result, problem), group=group)
        except Exception as error:
            causes = [one for one in (problem, describe(error)) if one is not None]
            raise CheckpointFailed(step, f"rank {_own_rank()}: {causes[0]}") from error
    problems = {_global_rank(group, rank): outcome[1] for rank, outcome in enumerate(outcomes) if outcome[1]}
    if problems:
        raise CheckpointFailed(step, root_cause(problems))
    return [outcome[0] for outcome in outcomes]


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return _own_rank() if group is None else dist.get_global_rank(group, rank)


def _own_rank() -> int:
    with contextlib.suppress(ValueError):
        return dist.get_rank()
    return 0
