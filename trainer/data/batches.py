"""What a loader hands to the loop, and how it gets to the device. Not for: which samples (`trainer.data.order`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one rank runs forward and backward at once."""

    batch: Any
    """Collated samples, on the device."""
    num_samples: int
    """0: a stand-in, so that the rank can take part in collectives. Its loss weighs nothing."""


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """One rank's part of a step."""

    micro_batches: tuple[MicroBatch, ...]
    """As many on every rank."""
    num_samples: int
    """Samples of the step over all ranks."""
    data_seconds: float
    """How long the step waited for its samples."""


def collate_of(collate: Collate | None) -> Collate:
    """The task's own function, or torch's default."""
    return default_collate if collate is None else collate


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure with every tensor on `device`; from pinned memory without waiting.

    Reaches into mappings, lists, tuples and named tuples; anything else with a `to` method is asked to move itself.
    """
    if isinstance(batch, torch.Tensor) or callable(getattr(batch, "to", None)):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


class Stopwatch:
    """Seconds spent inside `with` blocks, since they were last taken."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._seconds += time.monotonic() - self._began

    def take(self) -> float:
        """The seconds; begins anew at 0."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def is_iterable_style(data: Any) -> bool:
    """Whether `data` is an iterable dataset rather than a map-style one. Raises TypeError when it is neither, and for a
    DataLoader: what it yields are batches, which would be taken for samples."""
    if isinstance(data, DataLoader):
        raise TypeError(
            f"{type(data).__name__} makes batches, which is Gangline's part. Give its dataset; batch size and workers "
            "are train.batch_size and train.data_workers, and its collate_fn is the task's collate."
        )
    if isinstance(data, torch.utils.data.IterableDataset):
        return True
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return False
    if isinstance(data, Iterable):
        return True
    raise TypeError(
        f"{type(data).__name__} is no dataset: it has neither __len__ and __getitem__ (map-style) nor __iter__."
    )


def check_map_style(data: Any, purpose: str) -> None:
    """Raise TypeError unless `data` is map-style, ValueError when it is empty. `purpose`: what it is, in words."""
    if is_iterable_style(data):
        raise TypeError(f"{purpose} ({type(data).__name__}) must be map-style: give it __len__ and __getitem__.")
    if len(data) == 0:
        raise ValueError(
            f"{purpose} ({type(data).__name__}) has no samples: its length is 0. Check where it reads from."
        )
