"""What a training feeds on: steps of batches from a position on, how many there are, and the held-out data.

Not for: making batches (`trainer.data`).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Any

from trainer.checkpoint.checkpointer import Position
from trainer.data.batches import MicroBatch, StepBatches, check_map_style, collate_of, is_iterable_style
from trainer.data.evaluation import eval_batches, num_eval_batches
from trainer.data.iterable import IterableLoader, check_state
from trainer.data.loader import TrainLoader
from trainer.data.workers import SampleFetcher
from trainer.failure import ConfigError
from trainer.mesh import Mesh
from trainer.parallel.axes import Axes
from trainer.plan.training_plan import TrainingPlan
from trainer.seeds import derive
from trainer.task import TrainTask


class Feed:
    """The data of one training on this rank."""

    def __init__(self, task: TrainTask, plan: TrainingPlan, mesh: Mesh, axes: Axes) -> None:
        """Raises ConfigError for data and settings that do not go together."""
        self._task, self._plan, self._mesh, self._axes = task, plan, mesh, axes
        self._parts_per_rank = plan.parallel.grad_accum_steps * plan.parallel.micro_batches
        self._iterable: IterableLoader | None = None
        try:
            self._is_iterable = is_iterable_style(task.data)
            if not self._is_iterable:
                check_map_style(task.data, "the training data")
            elif plan.checkpoint_root is not None:
                check_state(task.data)
            if task.eval_data is not None:
                check_map_style(task.eval_data, "the held-out data")
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error
        if self._is_iterable and axes.pp * axes.tp > 1:
            raise ConfigError(
                "the training data is iterable, and each rank reads its own, but the "
                f"{axes.pp * axes.tp} ranks that share a copy of the model must get the same samples. Make the dataset "
                "map-style (__len__ and __getitem__), or use ddp, fsdp or hsdp."
            )
        if self._is_iterable and plan.train.steps is None:
            raise ConfigError("the training data has no length, so epochs mean nothing. Give train.steps.")
        self.total_steps = self._total_steps(Position(step=0, samples_seen=0))
        """Steps of the whole training; an iterable dataset may end sooner."""

    @property
    def example(self) -> Any:
        """One sample of the training data, collated; None of an iterable dataset, which is read once."""
        if self._is_iterable:
            return None
        train = self._plan.train
        fetcher = SampleFetcher(self._task.data, derive(train.seed, "data"), collate_of(self._task.collate))
        return fetcher.__getitems__([(0, 0)])

    def go_to(self, position: Position) -> None:
        """Count the steps that are left from a restored position: the batch size may be another one by now."""
        self.total_steps = self._total_steps(position)

    def _total_steps(self, position: Position) -> int:
        train = self._plan.train
        if train.steps is not None:
            return train.steps
        assert train.epochs is not None, "a plan says steps or epochs"
        samples_left = max(0, train.epochs * len(self._task.data) - position.samples_seen)
        return position.step + math.ceil(samples_left / train.batch_size)

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Samples and held-out samples; None where there are none, or no number."""
        held_out = self._task.eval_data
        return None if self._is_iterable else len(self._task.data), None if held_out is None else len(held_out)

    @property
    def has_evaluation(self) -> bool:
        """Whether there is held-out data."""
        return self._task.eval_data is not None

    def open(self, position: Position) -> Generator[StepBatches]:
        """The steps from `position` on. Raises ConfigError for a position that this data cannot go to."""
        train = self._plan.train
        common: dict[str, Any] = {
            "seed": derive(train.seed, "data"),
            "batch_size": train.batch_size,
            "parts_rank": self._axes.dp_rank,
            "parts_size": self._axes.data_parallel_size,
            "grad_accum_steps": self._parts_per_rank,
            "data_workers": train.data_workers,
            "device": self._mesh.device,
        }
        if self._is_iterable:
            states = None if position.data_state is None else position.data_state["ranks"]
            try:
                self._iterable = IterableLoader(self._task, **common, states=states)
                if self._plan.checkpoint_root is not None:
                    self._iterable.state()  # one that no checkpoint can keep is told now, not after hours
            except (TypeError, ValueError) as error:
                raise ConfigError(str(error)) from error
            return _steps(self._iterable)
        last = None if train.epochs is None else train.epochs * len(self._task.data)
        return _steps(TrainLoader(self._task, **common, first_sample=position.samples_seen, last_sample=last))

    def has_more(self, position: Position) -> bool:
        """Whether there is another step. Of an iterable dataset all ranks agree, and stop with the shortest."""
        if position.step >= self.total_steps:
            return False
        if self._iterable is None:
            return True
        num_empty = self._mesh.sum([0.0 if self._iterable.has_next() else 1.0])[0]
        return num_empty == 0

    def is_last(self, step: int) -> bool:
        """Whether `step` is known to be the last one."""
        return step >= self.total_steps

    def state(self) -> dict[str, Any] | None:
        """What an iterable dataset needs to go on from here, of all ranks (each calls it); None for a map-style one,
        whose position says it all. Raises ConfigError for a state that a checkpoint cannot keep."""
        if self._iterable is None:
            return None
        # A rank's number is its data-parallel one here: iterable data is refused where several ranks share samples.
        return {"ranks": self._mesh.gather(self._iterable.state())}

    def evaluation(self) -> tuple[Iterator[MicroBatch], int]:
        """This rank's held-out batches, and the most that any rank has."""
        size, train = self._axes.data_parallel_size, self._plan.train
        batch_size = max(1, train.batch_size // (size * self._parts_per_rank))
        batches = eval_batches(
            self._task.eval_data,
            batch_size=batch_size,
            rank=self._axes.dp_rank,
            size=size,
            collate=self._task.collate,
            device=self._mesh.device,
            data_workers=train.data_workers,
        )
        return batches, num_eval_batches(len(self._task.eval_data), batch_size=batch_size, size=size)


def _steps(loader: TrainLoader | IterableLoader) -> Generator[StepBatches]:
    try:
        yield from loader
    finally:
        loader.close()
