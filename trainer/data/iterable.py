"""Batches of an iterable dataset: a stream that only it knows how to read.

Rules, since such a dataset has neither length nor order:
- Each rank iterates its own; the dataset gives each rank other samples by RANK and WORLD_SIZE, or by
  `trainer.data.shard()`. It is read in the rank's own process.
- A step happens when every rank has all samples of its part. So a pass ends for all at the shortest, and what is left
  over elsewhere is dropped (O-46): ask `has_next` and agree, then take the next step.
- To resume, the dataset needs `state_dict()` and `load_state_dict(state)`; the state belongs to a rank, so a resumed
  run needs as many. `state_dict` says where the iteration stands; iterating after `load_state_dict` goes on there.
  It is kept as JSON, so what JSON would give back as something else (a tuple, a key that is a number) is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from trainer.data.batches import MicroBatch, StepBatches, Stopwatch, collate_of, to_device
from trainer.data.order import partition
from trainer.data.seeding import draws_random, generators_kept, seed_generators
from trainer.failure import ConfigError
from trainer.task import TrainTask

_NO_MORE: Final = object()


def has_state(data: Any) -> bool:
    """Whether an iterable dataset can say where it stands and go on there."""
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def check_state(data: Any) -> None:
    """Raise TypeError unless an iterable dataset can be resumed. For when checkpoints are wanted, and at resume."""
    if not has_state(data):
        raise TypeError(
            f"the iterable dataset {type(data).__name__} has no state_dict() and load_state_dict(), so a resumed run "
            "would train on the same samples again. Add both, or make it map-style (__len__ and __getitem__), which "
            "resumes by itself."
        )


def check_state_value(data: Any, state: Any) -> None:
    """Raise ConfigError unless `state`, the `state_dict()` of an iterable dataset, comes back from JSON as it was."""
    changed = _changed_by_json(state, "state")
    if changed is not None:
        raise ConfigError(
            f"the state_dict() of the iterable dataset {type(data).__name__} cannot be kept: a checkpoint holds it as "
            f"JSON, and {changed}, which would come back as something else or not at all. Use dicts with string keys, "
            "lists, numbers, strings and None (for a tuple or a tensor a list), and undo it in load_state_dict()."
        )


def _changed_by_json(value: Any, where: str) -> str | None:
    """What of `value` JSON does not give back as it was, in words; None: nothing."""
    if value is None or isinstance(value, bool | int | float | str):
        return None
    if isinstance(value, dict):
        strange = next((key for key in value if not isinstance(key, str)), None)
        if strange is not None:
            return f"{where} has the key {strange!r:.60} ({type(strange).__name__})"
        parts = [(f"{where}[{key!r:.60}]", part) for key, part in value.items()]
    elif isinstance(value, list):
        parts = [(f"{where}[{index}]", part) for index, part in enumerate(value)]
    else:
        return f"{where} is of type {type(value).__name__}"
    return next((found for name, part in parts if (found := _changed_by_json(part, name)) is not None), None)


class IterableLoader:
    """What one data-parallel rank trains on, of an iterable dataset."""

    def __init__(
        self,
        task: TrainTask,
        *,
        seed: int,
        batch_size: int,
        parts_rank: int,
        parts_size: int,
        grad_accum_steps: int,
        data_workers: int,
        device: torch.device,
        states: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Steps of `batch_size` samples over all ranks. `states`: of a checkpoint, of each rank, in their order.

        Raises ValueError for data workers and for a checkpoint of another number of ranks, TypeError for a checkpoint
        and a dataset without `load_state_dict`.
        """
        if data_workers > 0:
            raise ValueError(
                f"train.data_workers is {data_workers}, but an iterable dataset ({type(task.data).__name__}) is read "
                "in the rank's own process. Set it to 0, or make the dataset map-style."
            )
        self._data, self._collate, self._device = task.data, collate_of(task.collate), device
        self._seed, self._rank, self._size = seed, parts_rank, parts_size
        self._batch_size = batch_size
        all_parts = partition(batch_size, parts_size * grad_accum_steps)
        own = all_parts[parts_rank * grad_accum_steps : (parts_rank + 1) * grad_accum_steps]
        self._sizes = [last - first for first, last in own]
        self._waiting = Stopwatch()
        self._pass, self._num_drawn = 0, 0
        self._ahead: list[Any] = []
        """Samples of the next step that were read already."""
        if states is not None:
            self._load(states)
        self._before_ahead = self._state_now()
        self._iterator: Iterator[Any] = iter(self._data)

    def has_next(self) -> bool:
        """Whether this rank has all samples of its part of the next step. Reads them."""
        self._read_ahead()
        return len(self._ahead) == sum(self._sizes)

    def __iter__(self) -> Iterator[StepBatches]:
        """The steps, while `has_next`; with several ranks call that first and agree."""
        while self.has_next():
            yield self._next_step()

    def restart(self) -> None:
        """Begin the next pass; what is left of this one is dropped. Tells a dataset with `set_epoch` its number."""
        self._pass += 1
        self._ahead = []
        if callable(getattr(self._data, "set_epoch", None)):
            self._data.set_epoch(self._pass)
        self._iterator = iter(self._data)
        self._before_ahead = self._state_now()

    def state(self) -> dict[str, Any]:
        """Where this rank stands after the steps it took. Raises TypeError for a dataset without `state_dict`,
        ConfigError for a state that a checkpoint cannot keep as it is."""
        check_state(self._data)
        state = self._before_ahead if self._ahead else self._state_now()
        check_state_value(self._data, state["dataset"])
        return copy.deepcopy(state)

    def close(self) -> None:
        """Nothing to end; for the same interface as `TrainLoader`."""

    def _read_ahead(self) -> None:
        if not self._ahead:
            self._before_ahead = copy.deepcopy(self._state_now())
        wanted = sum(self._sizes)
        with self._waiting, generators_kept():
            while len(self._ahead) < wanted:
                if draws_random(self._data):
                    seed_generators(self._seed, self._rank, self._num_drawn)
                sample = next(self._iterator, _NO_MORE)
                if sample is _NO_MORE:
                    return
                self._ahead.append(sample)
                self._num_drawn += 1

    def _next_step(self) -> StepBatches:
        samples, self._ahead = iter(self._ahead), []
        micro_batches = []
        for size in self._sizes:
            with self._waiting, generators_kept():
                batch = self._collate([next(samples) for _ in range(size)])
            micro_batches.append(MicroBatch(batch=to_device(batch, self._device), num_samples=size))
        return StepBatches(
            micro_batches=tuple(micro_batches), num_samples=self._batch_size, data_seconds=self._waiting.take()
        )

    def _state_now(self) -> dict[str, Any]:
        return {
            "num_ranks": self._size,
            "pass": self._pass,
            "num_drawn": self._num_drawn,
            "dataset": self._data.state_dict() if has_state(self._data) else None,
        }

    def _load(self, states: Sequence[dict[str, Any]]) -> None:
        check_state(self._data)
        if len(states) != self._size or any(state["num_ranks"] != self._size for state in states):
            raise ValueError(
                f"the checkpoint was made by {len(states)} data-parallel ranks, this run has {self._size}; the "
                f"position in an iterable dataset ({type(self._data).__name__}) belongs to a rank. Ask for "
                f"{len(states)}, or make the dataset map-style, which resumes on any number."
            )
        own = states[self._rank]
        self._pass, self._num_drawn = own["pass"], own["num_drawn"]
        if callable(getattr(self._data, "set_epoch", None)):
            self._data.set_epoch(self._pass)
        self._data.load_state_dict(copy.deepcopy(own["dataset"]))
