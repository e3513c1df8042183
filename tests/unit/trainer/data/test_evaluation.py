"""Evaluation counts each held-out item once, whatever the number of ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.batches import MicroBatch
from trainer.data.evaluation import eval_batches, num_eval_batches


class Augmented:
    """Random numbers, as held-out data should not be, but may."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> float:
        return index + random.random()


def batches(data: Any, rank: int = 0, size: int = 1, batch_size: int = 2, data_workers: int = 0) -> list[MicroBatch]:
    return list(
        eval_batches(
            data, batch_size=batch_size, rank=rank, size=size, collate=None, device=torch.device("cpu"),
            data_workers=data_workers,
        )
    )  # fmt: skip


def counted(found: list[MicroBatch]) -> list[Any]:
    return [item for one in found for item in one.batch.tolist()[: one.num_samples]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("data_workers", [0, 2])
def test_o45_seven_items_give_the_same_metric_on_any_number_of_ranks(size: int, data_workers: int) -> None:
    items = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]

    sums = [counted(batches(items, rank, size, data_workers=data_workers)) for rank in range(size)]

    assert sum(map(len, sums)) == 7
    assert sum(map(sum, sums)) / sum(map(len, sums)) == 127 / 7


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 9))
def test_each_item_is_counted_once_and_all_ranks_run_as_many_batches(length: int, size: int, batch_size: int) -> None:
    by_rank = [batches(range(length), rank, size, batch_size) for rank in range(size)]

    assert sorted(sum((counted(one) for one in by_rank), start=[])) == list(range(length))  # noqa: RUF017
    assert {len(one) for one in by_rank} == {num_eval_batches(length, batch_size=batch_size, size=size)}
    assert all(len(batch.batch) <= batch_size for one in by_rank for batch in one)


def test_random_augmentation_of_held_out_data_is_the_same_each_time() -> None:
    first = counted(batches(Augmented()))

    random.seed(1)
    assert counted(batches(Augmented())) == first
    assert sorted(counted(batches(Augmented(), 0, 2)) + counted(batches(Augmented(), 1, 2))) == first


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [([], ValueError, "held-out data .* has no samples"), (iter([1]), TypeError, "held-out data .* must be map-style")],
)
def test_what_is_no_held_out_data_is_said(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        batches(data)
