"""Reading one checkpoint: checked first, loaded into memory of its own, handed over only when it is whole.

Each rank reads what it needs by itself, so a rank that cannot read keeps no other waiting. Not for: which checkpoint
is tried and what ranks agree on (`checkpointer`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainer.checkpoint.errors import describe, mismatch_text
from trainer.checkpoint.layout import BrokenCheckpoint, Manifest
from trainer.checkpoint.state import STATE, optimizer_class, wanted_keys
from trainer.failure import is_out_of_memory

_PLACEHOLDER: Final = 0
"""Stands where torch puts a value that is not a tensor."""


def find_mismatch(manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Why this checkpoint is another model's or optimizer's; None: it fits."""
    if manifest.optimizer != optimizer_class(optimizer):
        return f"it holds the state of {manifest.optimizer}, but the job trains with {optimizer_class(optimizer)}"
    stored = {key: text for key, text in manifest.keys.items() if not key.startswith(STATE)}
    return mismatch_text(stored, wanted_keys(model, optimizer))


def load_state(folder: Path, *, prefix: str = "") -> dict[str, Any]:
    """What a verified checkpoint holds under keys with `prefix`, in fresh memory of the CPU. Raises BrokenCheckpoint.

    No other rank takes part. Costs as much memory as the values.
    """
    try:
        reader = dcp.FileSystemReader(folder)
        metadata = reader.read_metadata()
        state: dict[str, Any] = {
            key: torch.empty(stored.size, dtype=stored.properties.dtype)
            if isinstance(stored, TensorStorageMetadata)
            else _PLACEHOLDER
            for key, stored in metadata.state_dict_metadata.items()
            if key.startswith(prefix)
        }
        dcp.load(
            state,
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )
    except CheckpointException as error:  # not an Exception: torch derives it from BaseException
        cause = next(iter(error.failures.values()))[0]
        raise _broken(cause) from error
    except Exception as error:
        raise _broken(error) from error
    return state


def _broken(cause: BaseException) -> BaseException:
    """What a failed load is raised as: a lack of memory says nothing about the checkpoint."""
    return cause if is_out_of_memory(cause) else BrokenCheckpoint(f"cannot be loaded: {describe(cause)}.")
