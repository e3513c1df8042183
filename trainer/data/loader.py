"""Batches of a map-style dataset for training: each rank's part of each step, from any position on.

A step takes the next `batch_size` samples of the stream (`trainer.data.order`), whatever the layout; only how they are
cut into parts depends on ranks and micro-batches. Not for: iterable datasets (`trainer.data.iterable`), evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainer.data.batches import MicroBatch, StepBatches, Stopwatch, check_map_style, collate_of, to_device
from trainer.data.order import SampleOrder, partition
from trainer.data.workers import BatchStream, Key, SampleFetcher
from trainer.task import TrainTask


class TrainLoader:
    """What one data-parallel rank trains on."""

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
        first_sample: int,
        last_sample: int | None,
    ) -> None:
        """Steps of `batch_size` samples over all ranks, from position `first_sample` of the stream.

        `parts_rank`, `parts_size`: this rank among the data-parallel ones. `last_sample`: where the run ends, so that
        the last step may be smaller; None: it never does. Raises TypeError for a dataset that is not map-style,
        ValueError for an empty one.
        """
        check_map_style(task.data, "the training data")
        self._order = SampleOrder(len(task.data), seed)
        self._fetcher = SampleFetcher(task.data, seed, collate_of(task.collate))
        self._batch_size = batch_size
        self._num_parts = parts_size * grad_accum_steps
        # A micro-batch is one slice of the step over all ranks, as one process would take it: BatchNorm sees that.
        self._own_parts = slice(parts_rank, None, parts_size)
        self._data_workers, self._device = data_workers, device
        self._first_sample, self._last_sample = first_sample, last_sample
        self._stream: BatchStream | None = None

    def __iter__(self) -> Iterator[StepBatches]:
        """The steps, in order. Starting again starts at `first_sample` again.

        Raises what the dataset raises, with its traceback, also from a worker; DataWorkerDied for a killed worker.
        """
        self.close()
        self._stream = stream = BatchStream(
            self._fetcher, self._key_batches, data_workers=self._data_workers, device=self._device
        )
        waiting = Stopwatch()
        for first, last in self._steps():
            micro_batches = []
            for begin, end in self._parts(first, last):
                with waiting:
                    batch = next(stream)
                micro_batches.append(MicroBatch(batch=to_device(batch, self._device), num_samples=end - begin))
            yield StepBatches(micro_batches=tuple(micro_batches), num_samples=last - first, data_seconds=waiting.take())

    def close(self) -> None:
        """End the data workers. Without it they end within a second of this process."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _steps(self) -> Iterator[tuple[int, int]]:
        """(first, last) of the stream for each step."""
        first = self._first_sample
        while self._last_sample is None or first < self._last_sample:
            last = first + self._batch_size
            if self._last_sample is not None:
                last = min(last, self._last_sample)
            yield first, last
            first = last

    def _parts(self, first: int, last: int) -> list[tuple[int, int]]:
        """(first, last) of the stream for each micro-batch of this rank; some may be empty in the last step."""
        parts = partition(last - first, self._num_parts)[self._own_parts]
        return [(first + begin, first + end) for begin, end in parts]

    def _key_batches(self) -> Iterator[list[Key]]:
        for first, last in self._steps():
            for begin, end in self._parts(first, last):
                # An empty part gets the step's first sample as a stand-in.
                yield self._order.items(begin, end) or self._order.items(first, first + 1)
