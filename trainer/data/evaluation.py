"""Batches for evaluation: each item of the held-out data exactly once over all ranks, whatever their number.

Nothing is repeated to make ends meet (O-45). Ranks that have fewer batches get stand-ins, which weigh nothing, so that
all of them run forward as often. Random augmentation in held-out data is the same in each evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from trainer.data.batches import Collate, MicroBatch, check_map_style, collate_of, to_device
from trainer.data.order import partition
from trainer.data.workers import BatchStream, Key, SampleFetcher

_SEED: Final = 0


def num_eval_batches(num_items: int, *, batch_size: int, size: int) -> int:
    """Batches that each of `size` ranks runs: as many as the rank with most items needs."""
    most_items = -(-num_items // size)
    return -(-most_items // batch_size)


def eval_batches(
    dataset: Any,
    *,
    batch_size: int,
    rank: int,
    size: int,
    collate: Collate | None,
    device: torch.device,
    data_workers: int,
) -> Iterator[MicroBatch]:
    """This rank's batches of at most `batch_size` items, on the device; `num_eval_batches` of them.

    A batch with `num_samples` 0 is a stand-in. Raises TypeError for a dataset that is not map-style, ValueError for an
    empty one, what the dataset raises, and DataWorkerDied.
    """
    check_map_style(dataset, "the held-out data")
    keys, sizes = _key_batches(len(dataset), batch_size, rank, size)
    fetcher = SampleFetcher(dataset, _SEED, collate_of(collate))
    stream = BatchStream(fetcher, lambda: iter(keys), data_workers=data_workers, device=device)
    try:
        for num_samples in sizes:
            yield MicroBatch(batch=to_device(next(stream), device), num_samples=num_samples)
    finally:
        stream.close()


def _key_batches(num_items: int, batch_size: int, rank: int, size: int) -> tuple[list[list[Key]], list[int]]:
    """Keys of each batch of the rank, and how many of them count."""
    first, last = partition(num_items, size)[rank]
    starts = range(first, last, batch_size)
    batches = [[(0, index) for index in range(start, min(start + batch_size, last))] for start in starts]
    missing = num_eval_batches(num_items, batch_size=batch_size, size=size) - len(batches)
    return [*batches, *([(0, 0)] for _ in range(missing))], [*map(len, batches), *[0] * missing]
