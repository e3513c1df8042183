"""Each rank gets its part of each step, from any position on, with any number of data workers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import batches
from trainer.data.batches import StepBatches
from trainer.data.loader import TrainLoader
from trainer.data.seeding import generators_kept, seed_generators
from trainer.task import TrainTask

CPU = torch.device("cpu")


class Numbers:
    """Item i is i."""

    draws_random = False

    def __init__(self, length: int) -> None:
        self.length, self.read = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Augmented(Numbers):
    """Item i is i and what three generators drew for it."""

    draws_random = True

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), random.random(), np.random.rand(), torch.rand(()).item()])


def loader(data: Any, **changes: Any) -> TrainLoader:
    task = TrainTask(model=torch.nn.Identity(), loss=lambda output, target: output, data=data)
    settings: dict[str, Any] = {
        "seed": 3, "batch_size": 4, "parts_rank": 0, "parts_size": 1, "grad_accum_steps": 1, "data_workers": 0,
        "device": CPU, "first_sample": 0, "last_sample": None,
    }  # fmt: skip
    return TrainLoader(task, **{**settings, **changes})


def steps_of(one: TrainLoader, count: int | None = None) -> list[StepBatches]:
    """The first `count` steps."""
    steps = list(islice(one, count))
    one.close()
    return steps


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def counted(steps: list[StepBatches]) -> list[list[Any]]:
    """What counts in each step, in order."""
    return [[row for m in step.micro_batches for row in m.batch.tolist()[: m.num_samples]] for step in steps]


@pytest.mark.parametrize(("ranks", "grad_accum_steps"), [(1, 1), (1, 4), (2, 1), (3, 2), (4, 1), (5, 1)])
@pytest.mark.parametrize("batch_size", [10, 11])
def test_a_step_is_the_same_samples_in_any_layout(ranks: int, grad_accum_steps: int, batch_size: int) -> None:
    """Nothing of a shard is read by two ranks, nothing is left out, and a micro-batch is one slice over all ranks."""
    reference = counted(steps_of(loader(Numbers(23), batch_size=batch_size), 7))

    by_rank = [
        steps_of(
            loader(
                Numbers(23),
                batch_size=batch_size,
                parts_rank=rank,
                parts_size=ranks,
                grad_accum_steps=grad_accum_steps,
            ),
            7,
        )
        for rank in range(ranks)
    ]

    for number, parts in enumerate(zip(*by_rank, strict=True)):
        micro_batches = zip(*(step.micro_batches for step in parts), strict=True)
        rows = [row for of_ranks in micro_batches for m in of_ranks for row in m.batch.tolist()[: m.num_samples]]
        assert rows == reference[number]


def test_epochs_follow_each_other_without_a_gap() -> None:
    seen = flat(counted(steps_of(loader(Numbers(7), batch_size=3), 14)))

    epochs = [seen[first : first + 7] for first in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1, "each epoch is shuffled anew"


@pytest.mark.parametrize("interrupted_after", [3, 23])  # steps: in epoch 0, and in epoch 2
@pytest.mark.parametrize("ranks_afterwards", [1, 2])
def test_o47_an_interrupted_epoch_goes_on_with_the_samples_it_had_left(
    interrupted_after: int, ranks_afterwards: int
) -> None:
    whole = flat(counted(steps_of(loader(Numbers(20), batch_size=2), 30)))
    before = flat(counted(steps_of(loader(Numbers(20), batch_size=2), interrupted_after)))

    by_rank = [
        counted(steps_of(loader(Numbers(20), batch_size=2, parts_rank=rank, parts_size=ranks_afterwards,
                                first_sample=len(before)), 30 - interrupted_after))
        for rank in range(ranks_afterwards)
    ]  # fmt: skip
    after = flat(flat(parts) for parts in zip(*by_rank, strict=True))

    assert before + after == whole


def test_resuming_reads_none_of_the_samples_before() -> None:
    data = Numbers(1000)

    steps_of(loader(data, first_sample=10**9), 1)

    assert len(data.read) == 4


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(12, 20))
def test_an_uneven_end_counts_nothing_twice(
    length: int, epochs: int, ranks: int, grad_accum_steps: int, batch_size: int
) -> None:
    by_rank = [
        steps_of(loader(Numbers(length), batch_size=batch_size, parts_rank=rank, parts_size=ranks,
                        grad_accum_steps=grad_accum_steps, last_sample=epochs * length))
        for rank in range(ranks)
    ]  # fmt: skip

    seen = [row for steps in by_rank for step in counted(steps) for row in step]
    assert sorted(seen) == sorted(list(range(length)) * epochs)
    for steps in zip(*by_rank, strict=True):  # all ranks take as many steps
        assert {len(step.micro_batches) for step in steps} == {grad_accum_steps}
        assert {step.num_samples for step in steps} == {sum(m.num_samples for s in steps for m in s.micro_batches)}


def test_a_rank_without_a_sample_gets_a_stand_in_that_weighs_nothing() -> None:
    (step,) = steps_of(loader(Numbers(1), batch_size=4, parts_rank=3, parts_size=4, last_sample=1))

    assert [(m.num_samples, m.batch.tolist()) for m in step.micro_batches] == [(0, [0])]
    assert step.num_samples == 1


def test_augmentation_depends_on_nothing_but_seed_epoch_and_item() -> None:
    def rows(**changes: Any) -> list[list[float]]:
        return flat(counted(steps_of(loader(Augmented(6), batch_size=6, **changes), 3)))

    reference = rows()
    elsewhere = [rows(parts_rank=rank, parts_size=2, grad_accum_steps=3) for rank in range(2)]

    assert sorted(flat(elsewhere)) == sorted(reference)
    by_item: dict[float, set[tuple[float, ...]]] = {}
    for row in reference:
        by_item.setdefault(row[0], set()).add(tuple(row[1:]))
    assert all(len(drawn) == 3 for drawn in by_item.values()), "it differs from epoch to epoch"
    assert sorted(rows(seed=4)) != sorted(reference)


def test_batches_are_the_same_with_and_without_data_workers() -> None:
    alone, helped = (
        counted(steps_of(loader(Augmented(23), batch_size=5, grad_accum_steps=2, data_workers=workers), 12))
        for workers in (0, 2)
    )

    assert helped == alone


def test_loading_draws_nothing_from_the_generators_of_the_model() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    seed_generators(1)
    expected = drawn(), drawn()

    seed_generators(1)
    first = drawn()
    steps_of(loader(Augmented(6)), 3)

    assert (first, drawn()) == expected


def test_the_generators_are_put_back_even_when_a_sample_fails() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2).tolist()

    torch.manual_seed(5)
    first = torch.rand(1).tolist()
    with pytest.raises(ZeroDivisionError), generators_kept():
        torch.rand(100)
        _ = 1 / 0

    assert first + torch.rand(1).tolist() == expected


def test_a_batch_may_be_any_structure() -> None:
    class Texts(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"tokens": torch.full((2,), index), "name": f"item {index}", "pair": (index, [index])}

    (step,) = steps_of(loader(Texts(3), batch_size=3), 1)

    batch = step.micro_batches[0].batch
    assert sorted(batch["name"]) == ["item 0", "item 1", "item 2"]
    assert batch["tokens"].shape == (3, 2)
    assert torch.equal(batch["pair"][0], batch["pair"][1][0])


def test_the_tasks_own_collate_function_makes_the_batches() -> None:
    task = TrainTask(
        model=torch.nn.Identity(), loss=lambda output, target: output, data=Numbers(9), collate=lambda items: sum(items)
    )
    one = TrainLoader(
        task, seed=0, batch_size=9, parts_rank=0, parts_size=1, grad_accum_steps=1, data_workers=0, device=CPU,
        first_sample=0, last_sample=9,
    )  # fmt: skip

    assert [step.micro_batches[0].batch for step in one] == [36]


def test_time_spent_on_samples_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            clock[0] += 1.5
            return super().__getitem__(index)

    monkeypatch.setattr(batches, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    told = []
    for step in islice(loader(Slow(9)), 2):
        told.append(step.data_seconds)
        clock[0] += 100.0  # what is done with them

    assert told == [4 * 1.5, 4 * 1.5]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ValueError, r"training data \(list\) has no samples"),
        (iter([1]), TypeError, "must be map-style"),
        (7, TypeError, "int is no dataset"),
    ],
)
def test_what_is_no_training_data_is_said_by_name(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        loader(data)
