"""When the ranks of a training agree: soon, however unevenly its steps come."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gangline.protocol.pulse import Pulse
from tests.distributed.checkpoint_cases import ALONE
from tests.distributed.training_cases import Recorder
from trainer.assembly import assemble_task
from trainer.loop import Surroundings, Training
from trainer.plan.parallel_plan import ParallelPlan
from trainer.plan.training_plan import RunTarget, TrainingPlan, TrainSettings
from trainer.rates import sync_interval
from trainer.stop import StopFlag
from trainer.task import TrainTask

BATCH_SIZE = 4
SLOW_SECONDS = 8.0
QUICK_SECONDS = 0.005


class Bursts:
    """The samples of two batches arrive at once, as those of two data workers do; then nothing for a while."""

    draws_random = False

    def __init__(self) -> None:
        self.now = 0.0
        self.num_read = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        is_first_of_two = self.num_read % (2 * BATCH_SIZE) == 0
        self.now += SLOW_SECONDS if is_first_of_two else QUICK_SECONDS / BATCH_SIZE
        self.num_read += 1
        return torch.ones(3), torch.tensor(index % 2)


def test_ranks_agree_within_two_slow_steps_though_every_other_step_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    data, events = Bursts(), Recorder()
    clock = SimpleNamespace(perf_counter=lambda: data.now)
    monkeypatch.setattr("trainer.loop.time", clock)
    monkeypatch.setattr("trainer.window.time", clock)
    plan = TrainingPlan(
        run=RunTarget(entry="tests:bursts"),
        parallel=ParallelPlan(strategy="single"),
        train=TrainSettings(steps=60, batch_size=BATCH_SIZE),
    )
    task = TrainTask(model=lambda: nn.Linear(3, 2), loss=nn.functional.cross_entropy, data=data)

    subject = assemble_task(task, plan, ALONE, events, {})
    around = Surroundings(mesh=ALONE, events=events, stop=StopFlag({}), pulse=Pulse(None), say=lambda text: None)
    Training(subject, around).run()

    agreed_at = [one["step"] for one in events.records if one["kind"] == "progress" and "loss" in one["metrics"]]
    assert max(after - before for before, after in pairwise(agreed_at)) <= 2


def test_quick_steps_are_trusted_little_by_little() -> None:
    intervals = [1]
    while intervals[-1] < 20:
        intervals.append(sync_interval(QUICK_SECONDS, last_interval=intervals[-1]))

    assert intervals == [1, 2, 4, 8, 16, 20]
