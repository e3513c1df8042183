"""Iterable datasets: each rank its own, a common end, exact resume with a state or a refusal by name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from trainer.data import Shard, shard
from trainer.data.batches import StepBatches, is_iterable_style
from trainer.data.iterable import IterableLoader, check_state
from trainer.failure import ConfigError
from trainer.task import TrainTask


class Stream:
    """Counts up; the items of one rank."""

    def __init__(self, length: int, part: Shard | None = None) -> None:
        self.length, self.part = length, part or Shard(index=0, count=1)

    def __iter__(self) -> Iterator[Any]:
        return self.part.of(range(self.length))


class StatefulStream(Stream):
    """Random numbers, from a place that can be saved."""

    place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.length:
            self.place += 1
            yield self.place + random.random()
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class EpochStream(Stream):
    """Knows in which pass it is."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter([100 * self.epoch + item for item in range(self.length)])


def loader(data: Any, **changes: Any) -> IterableLoader:
    task = TrainTask(model=torch.nn.Identity(), loss=lambda output, target: output, data=data)
    settings: dict[str, Any] = {
        "seed": 0, "batch_size": 4, "parts_rank": 0, "parts_size": 1, "grad_accum_steps": 1, "data_workers": 0,
        "device": torch.device("cpu"),
    }  # fmt: skip
    return IterableLoader(task, **{**settings, **changes})


def rows(steps: list[StepBatches]) -> list[list[Any]]:
    """The samples of each step."""
    return [[row for micro in step.micro_batches for row in micro.batch.tolist()] for step in steps]


def test_a_step_is_cut_into_micro_batches_that_differ_by_one() -> None:
    (step,) = islice(loader(Stream(9), batch_size=5, grad_accum_steps=2), 1)

    assert [micro.batch.tolist() for micro in step.micro_batches] == [[0, 1, 2], [3, 4]]
    assert [micro.num_samples for micro in step.micro_batches] == [3, 2]
    assert step.num_samples == 5


def test_o46_ranks_with_10_and_13_batches_stop_together_at_the_shortest() -> None:
    ranks = [loader(Stream(length), batch_size=2, parts_rank=rank, parts_size=2) for rank, length in [(0, 10), (1, 13)]]
    steps = [iter(rank) for rank in ranks]

    num_steps = 0
    while [rank.has_next() for rank in ranks] == [True, True]:  # what the loop agrees on
        assert [next(step).num_samples for step in steps] == [2, 2]
        num_steps += 1

    assert num_steps == 10
    assert [rank.has_next() for rank in ranks] == [False, True], "asking again changes nothing"


def test_samples_that_do_not_fill_a_step_are_dropped() -> None:
    assert rows(list(loader(Stream(10), batch_size=4))) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_next_pass_begins_for_all_ranks_at_once() -> None:
    one = loader(EpochStream(5), batch_size=2)
    first = rows(list(one))

    one.restart()

    assert first == [[0, 1], [2, 3]]
    assert rows(list(one)) == [[100, 101], [102, 103]]


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_with_a_state_the_training_goes_on_where_it_was(steps_before: int) -> None:
    whole = rows(list(islice(loader(StatefulStream(40), parts_rank=1, parts_size=2), 8)))
    stopped = loader(StatefulStream(40), parts_rank=1, parts_size=2)
    before = rows(list(islice(stopped, steps_before)))

    stopped.has_next()  # what was read ahead is not lost
    states = [{**stopped.state(), "dataset": None}, stopped.state()]
    resumed = loader(StatefulStream(40), parts_rank=1, parts_size=2, states=states)

    assert before + rows(list(islice(resumed, 8 - steps_before))) == whole


def test_a_state_belongs_to_a_number_of_ranks() -> None:
    states = [loader(StatefulStream(9), parts_rank=rank, parts_size=2).state() for rank in range(2)]

    with pytest.raises(ValueError, match=r"made by 2 data-parallel ranks, this run has 1.*Ask for 2"):
        loader(StatefulStream(9), states=states)


def test_without_a_state_resuming_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"Stream has no state_dict\(\) and load_state_dict\(\)"):
        check_state(Stream(3))
    with pytest.raises(TypeError, match="Stream has no state_dict"):
        loader(Stream(3)).state()
    with pytest.raises(TypeError, match="Stream has no state_dict"):
        loader(Stream(3), states=[loader(StatefulStream(3)).state()])


class NotedStream(StatefulStream):
    """Says where it stands in a form of its own."""

    def __init__(self, state: Any) -> None:
        super().__init__(9)
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "noted": self.state}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (random.Random(0).getstate(), r"state\['noted'\] is of type tuple"),
        ([{"of": {7: "a"}}], r"state\['noted'\]\[0\]\['of'\] has the key 7 \(int\)"),
        (torch.zeros(2), r"state\['noted'\] is of type Tensor"),
    ],
)
def test_a_state_that_would_come_back_as_something_else_is_refused_by_name(state: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"iterable dataset NotedStream cannot be kept: .*{message}"):
        loader(NotedStream(state)).state()


def test_a_state_of_what_json_knows_is_kept() -> None:
    state = {"seen": [1, 2.5, float("inf"), None, True], "files": {"a": {"offset": 7}}}

    assert loader(NotedStream(state)).state()["dataset"] == {"place": 0, "noted": state}


def test_data_workers_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"train.data_workers is 2, but an iterable dataset \(Stream\)"):
        loader(Stream(3), data_workers=2)


def test_reading_draws_nothing_from_the_generators_of_the_model() -> None:
    random.seed(1)
    expected = [random.random(), random.random()]

    random.seed(1)
    found = [random.random()]
    list(loader(StatefulStream(9)))

    assert [*found, random.random()] == expected


def test_a_rank_takes_every_nth_item() -> None:
    parts = [list(shard({"RANK": str(rank), "WORLD_SIZE": "3"}).of(range(8))) for rank in range(3)]

    assert parts == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert list(shard({}).of("ab")) == ["a", "b"]


@pytest.mark.parametrize("variables", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "-1"}, {"WORLD_SIZE": "many"}])
def test_variables_that_make_no_part_are_refused(variables: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="RANK is"):
        shard(variables)


def test_which_datasets_are_iterable() -> None:
    class TorchStream(torch.utils.data.IterableDataset[int]):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    assert is_iterable_style(TorchStream()), "though torch gives it a __getitem__"
    assert is_iterable_style(Stream(3))
    assert not is_iterable_style([1, 2])
    with pytest.raises(TypeError, match=r"DataLoader makes batches, which is Gangline's part. Give its dataset"):
        is_iterable_style(torch.utils.data.DataLoader(TorchStream()))
