"""`make bench NAME=trainer`: its statistics, its line of JSON, and that the loops it compares do the same work."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.bench import trainer
from tests.bench.support import training_loops
from tests.bench.support.checkpoint_times import BlockingTimes, blocking_times
from tests.bench.support.ratios import batch_for, median_interval, ratio_interval, turn_order
from tests.bench.support.training_loops import (
    WARM_STEPS,
    Block,
    Contestant,
    StepClock,
    Workload,
    by_hand,
    by_trainer,
    one_sample_task,
)
from tests.distributed.checkpoint_cases import ALONE

ISSUE_KEYS = (
    "step_ratio_to_hand_loop",
    "step_ratio_to_fabric",
    "step_ratio_to_accelerate",
    "async_checkpoint_blocking_ratio",
    "ddp_scaling_1_to_2",
)


# --- Statistics ------------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_over_turns_and_lies_in_its_interval() -> None:
    found = ratio_interval([10.4, 20.2, 30.3, 500.0], [10.0, 20.0, 30.0, 40.0])

    assert found.median == pytest.approx((1.01 + 1.04) / 2)
    assert found.low <= found.median <= found.high
    assert [found.low, found.high] == pytest.approx([1.01, 12.5])


def test_the_interval_holds_the_true_ratio_and_shrinks_with_more_turns() -> None:
    chance = random.Random(3)

    def interval_of(num_turns: int) -> tuple[float, float]:
        machine = [1 + chance.random() for _ in range(num_turns)]  # how slow it is in each turn, for both alike
        theirs = [slow * chance.gauss(1, 0.02) for slow in machine]
        found = ratio_interval([1.05 * slow * chance.gauss(1, 0.02) for slow in machine], theirs)
        return found.low, found.high

    (low, high), (closer_low, closer_high) = interval_of(20), interval_of(400)

    assert low < 1.05 < high and closer_low < 1.05 < closer_high
    assert closer_high - closer_low < (high - low) / 2


def test_the_same_measurements_give_the_same_interval() -> None:
    values = [1.0, 1.1, 0.9, 1.3, 1.2]

    assert median_interval(values) == median_interval(values)


@pytest.mark.parametrize("values", [[], [1.0]])
def test_one_measurement_has_no_interval(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        median_interval(values)


def test_turns_that_do_not_match_are_an_error() -> None:
    with pytest.raises(ValueError):
        ratio_interval([1.0, 1.0, 1.0], [1.0, 1.0])


def test_every_loop_runs_once_a_turn_and_first_as_often_as_last() -> None:
    assert turn_order("abc", 0) == ["a", "b", "c"]
    assert turn_order("abc", 1) == ["c", "b", "a"]


def test_the_batch_makes_steps_of_the_wanted_length() -> None:
    assert batch_for(0.05, {4: 0.03, 16: 0.09}) == 8
    assert batch_for(0.001, {4: 0.03, 16: 0.09}) == 1
    with pytest.raises(ValueError, match="too busy"):
        batch_for(0.05, {4: 0.03, 16: 0.03})


# --- Figures ---------------------------------------------------------------------------------------------------------


def turn(hand: float, ours: float, fabric: float, accelerate: float) -> dict[str, Block]:
    """A turn of blocks that took so long by the clock, and half of it of CPU."""
    seconds = {"hand": hand, "trainer": ours, "fabric": fabric, "accelerate": accelerate}
    return {name: Block(wall_seconds=one, cpu_seconds=one / 2) for name, one in seconds.items()}


def measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    """The last line that the benchmark prints, of measurements that were made up."""
    turns = [turn(1.0, 1.02, 1.0, 2.04), turn(2.0, 2.04, 2.0, 4.08), turn(3.0, 3.06, 3.0, 6.12)]
    times = BlockingTimes(sync_seconds=[2.0, 4.0], async_seconds=[0.2, 0.4], num_bytes=1_000_000_000)
    scaling = {"ddp_scaling_1_to_2": 1.5, "ddp_scaling_1_to_2_low": 1.4, "ddp_scaling_1_to_2_high": 1.6}
    monkeypatch.setattr(trainer, "choose_batch", lambda *_: 4)
    monkeypatch.setattr(trainer, "measure_loops", lambda *_: trainer.loop_figures(turns))
    monkeypatch.setattr(trainer, "measure_checkpoints", lambda *_: trainer.checkpoint_figures(times))
    monkeypatch.setattr(trainer, "measure_scaling", lambda *_: scaling)
    assert trainer.main([]) == 0
    figures: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return figures


def test_the_last_line_has_the_keys_of_the_issue_each_with_an_interval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = measured(monkeypatch, capsys)

    for key in ISSUE_KEYS:
        assert figures[f"{key}_low"] <= figures[key] <= figures[f"{key}_high"]


def test_every_ratio_is_the_trainer_over_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = measured(monkeypatch, capsys)

    assert [figures[key] for key in ISSUE_KEYS] == pytest.approx([1.02, 1.02, 0.5, 0.1, 1.5])
    assert figures["step_cpu_ratio_to_accelerate"] == pytest.approx(0.5)
    assert figures["hand_loop_step_ms"] == pytest.approx(2_000)
    assert (figures["checkpoint_gb"], figures["turns"]) == (1.0, 3)


def test_a_checkpoint_is_smaller_where_memory_or_disk_is_short() -> None:
    wanted, plenty = 1_000_000_000, 10_000_000_000

    assert trainer.checkpoint_size(wanted, plenty, plenty) == wanted
    assert trainer.checkpoint_size(wanted, wanted, plenty) == 256_000_000
    assert trainer.checkpoint_size(wanted, plenty, wanted) == 256_000_000
    assert trainer.checkpoint_size(100, 0, 0) == 100
    assert trainer.available_memory() > 0


# --- What is measured ------------------------------------------------------------------------------------------------


def test_the_first_steps_of_a_block_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    moments = iter([0.0, 50.0, 90.0, 95.0, 99.0, 100.0, 102.0, 106.0])
    monkeypatch.setattr(
        training_loops, "time", SimpleNamespace(perf_counter=lambda: next(moments), process_time=lambda: 0.0)
    )
    for _ in range(WARM_STEPS + 3):
        clock.note()

    assert clock.take(WARM_STEPS + 3).wall_seconds == pytest.approx((106.0 - 99.0) / 3)
    with pytest.raises(RuntimeError, match="made 0 updates"):
        clock.take(WARM_STEPS + 3)


WORKLOAD = Workload(batch_size=2, timed_steps=3)


def weights_of(contestant: Contestant) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in contestant.model.named_parameters()}


def test_the_trainer_and_the_loop_by_hand_make_the_same_updates(tmp_path: Path) -> None:
    task = one_sample_task(WORKLOAD)
    ours, by_a_user = by_trainer(task, WORKLOAD, ALONE, tmp_path), by_hand(task, WORKLOAD)
    before = weights_of(ours)
    for contestant in (ours, by_a_user):
        contestant.run()
        assert contestant.clock.take(WORKLOAD.block_steps).wall_seconds > 0

    after = weights_of(ours)
    torch.testing.assert_close(after, weights_of(by_a_user))
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert '"loss"' in (tmp_path / "1-0" / "events.jsonl").read_text()


def test_checkpoints_of_both_kinds_are_timed_in_turns(tmp_path: Path) -> None:
    times = blocking_times(ALONE, 1_000, 2, str(tmp_path))

    assert len(times.sync_seconds) == len(times.async_seconds) == 2
    assert min(*times.sync_seconds, *times.async_seconds) > 0
    assert times.num_bytes > 12 * 2_048**2
