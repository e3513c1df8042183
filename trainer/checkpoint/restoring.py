"""Reading one checkpoint: checked first, loaded into memory of its own, handed over only when it is whole.

Each rank reads what it needs by itself, so a rank that cannot read keeps no other waiting. Not for: which checkpoint
is tried and what ranks agree on (`restorer`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from trainer.checkpoint.errors import describe, mismatch_text
from trainer.checkpoint.layout import BrokenCheckpoint, Manifest
from trainer.checkpoint.state import (
    GROUP,
    MODEL,
    OBJECT,
    STATE,
    GlobalNames,
    description,
    model_values,
    optimizer_class,
    optimizer_names,
    parameter_of,
    renamed,
)
from trainer.failure import is_out_of_memory

_PLACEHOLDER: Final = 0
"""Stands where torch puts a value that is not a tensor."""
_STEP: Final = "/step"
"""End of the key of an update counter: never split, and on the CPU unless the optimizer moves it."""


def find_mismatch(
    manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer, names: GlobalNames, optimized: set[str]
) -> str | None:
    """Why this checkpoint is another model's or optimizer's; None: it fits.

    It must hold the weights of the whole model (`names`), those that are here as they are here, and settings of every
    parameter that is `optimized` on any rank. Not the optimizer's state: one that has made no step has none.
    """
    if manifest.optimizer != optimizer_class(optimizer):
        return f"it holds the state of {manifest.optimizer}, but the job trains with {optimizer_class(optimizer)}"
    here = {name: description(value) for name, value in model_values(model).items()}
    wanted = {MODEL + name: text for name, text in ({**names.descriptions, **here}).items()}
    wanted |= {GROUP + name: OBJECT for name in sorted(optimized)}
    stored = {key: text for key, text in manifest.keys.items() if not key.startswith(STATE)}
    return mismatch_text(stored, wanted)


def load_state(folder: Path, *, prefix: str = "") -> dict[str, Any]:
    """What a verified checkpoint holds under keys with `prefix`, whole and in fresh memory of the CPU.

    However it was split when it was saved. No other rank takes part. Costs as much memory as the values. Raises
    BrokenCheckpoint.
    """

    def everything(metadata: Metadata) -> dict[str, Any]:
        return {
            key: torch.empty(stored.size, dtype=stored.properties.dtype)
            if isinstance(stored, TensorStorageMetadata)
            else _PLACEHOLDER
            for key, stored in metadata.state_dict_metadata.items()
            if key.startswith(prefix)
        }

    return _load(folder, everything)


def load_own_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, names: GlobalNames
) -> dict[str, Any]:
    """What a verified checkpoint holds of what is on this rank, split as it is here and on the same device: what
    `apply_state` takes.

    However it was split when it was saved, and without other ranks: of each stored piece that overlaps this rank's the
    whole is read, one after another. So the memory it costs is that of this rank's part of weights and optimizer, not
    of the whole state, and of one stored piece more. Changes neither model nor optimizer. Raises BrokenCheckpoint.
    """
    values = model_values(model)
    weights = {
        MODEL + name: torch.empty_like(value, requires_grad=False) if isinstance(value, torch.Tensor) else _PLACEHOLDER
        for name, value in values.items()
    }
    state = _load(folder, lambda metadata: weights)
    for own in _each_once(optimizer_names(values, optimizer), names):
        loaded = _load(folder, functools.partial(_optimizer_template, {key: values[name] for key, name in own.items()}))
        state |= {renamed(key, own[parameter_of(key)]): value for key, value in loaded.items()}
    return state


def _each_once(parameters: Sequence[str], names: GlobalNames) -> list[dict[str, str]]:
    """The parameters that are here, by their first names. One that is here twice is in a mapping of its own."""
    rounds: list[dict[str, str]] = []
    for name in parameters:
        first = names.first(name)
        free = next((one for one in rounds if first not in one), None)
        if free is None:
            rounds.append(free := {})
        free[first] = name
    return rounds


def _optimizer_template(parameters: Mapping[str, torch.Tensor], metadata: Metadata) -> dict[str, Any]:
    """Memory for what is stored of the optimizer for these parameters, which have their names in the checkpoint."""
    template: dict[str, Any] = {GROUP + name: _PLACEHOLDER for name in parameters}
    for key, stored in metadata.state_dict_metadata.items():
        if key.startswith(STATE) and (parameter := parameters.get(parameter_of(key))) is not None:
            template[key] = _memory_for(key, stored, parameter)
    return template


def _memory_for(key: str, stored: TensorStorageMetadata | BytesStorageMetadata, parameter: torch.Tensor) -> Any:
    """For a value of the optimizer's: one of the parameter's shape is split as the parameter is."""
    if not isinstance(stored, TensorStorageMetadata):
        return _PLACEHOLDER
    dtype = stored.properties.dtype
    if key.endswith(_STEP):
        return torch.empty(stored.size, dtype=dtype)
    if stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=dtype, device=parameter.device)


def _load(folder: Path, template_of: Callable[[Metadata], dict[str, Any]]) -> dict[str, Any]:
    """Fill what `template_of` makes of the checkpoint's index."""
    try:
        reader = dcp.FileSystemReader(folder)
        state = template_of(reader.read_metadata())
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
