"""A training that was stopped and goes on, on as many ranks, fewer or more, ends with the weights of one never stopped.

It is stopped at random moments of one rank: between any two moves of its pulse, so in the first step, in forward, in an
evaluation and around a checkpoint too. With the same layout the weights are the same bits, else within the tolerance of
the gradient tests.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gangline.protocol.outcomes import Outcome
from gangline.protocol.pulse import Phase, Pulse
from tests.distributed.tasks import TASKS
from tests.distributed.training_cases import Recorder, Tensors, plan_for
from tests.support.ranks import TEST_SECONDS, Ranks
from trainer.assembly import assemble_task
from trainer.loop import Surroundings, Training
from trainer.mesh import Mesh
from trainer.plan.training_plan import CheckpointSettings, TrainingPlan, TrainSettings
from trainer.stop import StopFlag

pytestmark = pytest.mark.timeout(TEST_SECONDS)

SEED = 20261130
# 97 samples: neither 8 nor the number of steps nor any number of ranks divides them, and 3 epochs end inside a batch.
TRAIN = TrainSettings(epochs=3, batch_size=8, optimizer="adamw", lr=2e-3, eval_every=7)
CHECKPOINT = CheckpointSettings(every_steps=5, keep=2)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One run, from a start or a checkpoint to the end or a stop."""

    outcome: Outcome
    step: int
    phases: list[Phase]
    """At each move of the pulse."""
    first_step: int | None
    """The first one reported as new progress."""
    steps: list[int]
    weights: Tensors
    val_losses: dict[int, float]


class StoppingPulse(Pulse):
    """Asks this rank to stop at its `at`-th move."""

    def __init__(self, stop: StopFlag, at: int | None) -> None:
        super().__init__(None)
        self.phases: list[Phase] = []
        self._stop, self._at = stop, at

    def move(self, step: int | None = None, slowest_step_seconds: float | None = None) -> None:
        super().move(step, slowest_step_seconds)
        self.phases.append(self._phase)
        if len(self.phases) == self._at:
            self._stop.set()


def run_leg(mesh: Mesh, task: str, plan: TrainingPlan, stop_rank: int, stop_at: int | None) -> Leg:
    """Train until the end, or until rank `stop_rank` is asked to stop at its `stop_at`-th move."""
    events, stop = Recorder(), StopFlag({})
    pulse = StoppingPulse(stop, stop_at if mesh.rank == stop_rank else None)
    subject = assemble_task(TASKS[task](), plan, mesh, events, {})
    around = Surroundings(mesh=mesh, events=events, stop=stop, pulse=pulse, say=lambda text: None)
    ending = Training(subject, around).run()
    reported = [record for record in events.records if record["kind"] == "progress" and record["step"]]
    steps = [record["step"] for record in reported if "loss" in record["metrics"]]
    return Leg(
        outcome=ending.outcome,
        step=ending.step,
        phases=pulse.phases,
        first_step=steps[0] if steps else None,
        steps=steps,
        weights={name: one.detach().clone() for name, one in subject.model.inner.state_dict().items()},
        val_losses={one["step"]: one["metrics"]["val_loss"] for one in reported if "val_loss" in one["metrics"]},
    )


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[dict[int, Ranks]]:
    with Ranks(1) as one, Ranks(2) as two, Ranks(3) as three:
        yield {1: one, 2: two, 3: three}


def plan_of(root: Path, task: str, world_size: int, **train: Any) -> TrainingPlan:
    plan = plan_for(task, world_size, dataclasses.replace(TRAIN, **train))
    return dataclasses.replace(plan, checkpoint=CHECKPOINT, checkpoint_root=str(root))


def is_close(found: Tensors, expected: Tensors) -> bool:
    return all(float((found[name] - one).norm()) <= 1e-10 * float(one.norm()) for name, one in expected.items())


def is_equal(found: Tensors, expected: Tensors) -> bool:
    return all(torch.equal(found[name], one) for name, one in expected.items())


NUM_MOMENTS = [7, pytest.param(20, marks=pytest.mark.full)]
PHASES = (Phase.RESTORING, Phase.EVALUATION, Phase.CHECKPOINT)


def moments(phases: list[Phase], number: int, draw: random.Random) -> list[int]:
    """Moves at which to stop: one in the first step, one in each phase, the others at random."""
    first_step = phases.index(Phase.TRAINING) + 2
    one_of_each = [draw.choice([at for at, one in enumerate(phases, 1) if one is phase]) for phase in PHASES]
    rest = [draw.randrange(1, len(phases)) for _ in range(number - 1 - len(PHASES))]
    return [first_step, *one_of_each, *rest]


@pytest.mark.parametrize("data_workers", [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("task", ["mlp", "mlp_with_dropout"])
@pytest.mark.parametrize("num_moments", NUM_MOMENTS)
def test_stopped_at_random_moments_it_ends_with_the_weights_of_one_never_stopped(
    ranks_of: dict[int, Ranks], tmp_path: Path, task: str, data_workers: int, num_moments: int
) -> None:
    draw = random.Random(SEED)
    plan = plan_of(tmp_path / "unbroken", task, 2, data_workers=data_workers)
    unbroken = ranks_of[2].run(run_leg, task, plan, 0, None)[0]
    # With dropout a rank's masks are its own: only the same layout draws the same.
    continue_on = [2] if task == "mlp_with_dropout" else [2, 1, 3]
    for moment, stop_at in enumerate(moments(unbroken.phases, num_moments, draw)):
        root = tmp_path / str(moment)
        plan = plan_of(root, task, 2, data_workers=data_workers)
        first = ranks_of[2].run(run_leg, task, plan, draw.randrange(2), stop_at)
        where = f"moment {moment}: move {stop_at}, {unbroken.phases[stop_at - 1].name}, step {first[0].step}"
        assert {leg.outcome for leg in first} <= {Outcome.PREEMPTED, Outcome.SUCCEEDED}, where
        assert len({leg.step for leg in first}) == 1, f"{where}: all ranks leave at the same step"

        world_size = continue_on[moment % len(continue_on)]
        plan = plan_of(root, task, world_size, data_workers=data_workers)
        second = ranks_of[world_size].run(run_leg, task, plan, 0, None)[0]

        assert second.outcome == Outcome.SUCCEEDED and second.step == unbroken.step, where
        assert [*first[0].steps, *second.steps] == unbroken.steps, f"{where}: each step is reported once"
        same = is_equal if world_size == 2 else is_close
        assert same(second.weights, unbroken.weights), f"{where}, then {world_size} ranks: other weights"
        told = {**first[0].val_losses, **second.val_losses}
        assert told == pytest.approx(unbroken.val_losses, rel=1e-10), where


def test_epochs_end_after_as_many_samples_when_the_batch_size_changes(
    ranks_of: dict[int, Ranks], tmp_path: Path
) -> None:
    first = ranks_of[2].run(run_until_step, "mlp", plan_of(tmp_path, "mlp", 2), 20)[0]

    second = ranks_of[2].run(run_leg, "mlp", plan_of(tmp_path, "mlp", 2, batch_size=16), 0, None)[0]
    third = ranks_of[2].run(run_leg, "mlp", plan_of(tmp_path, "mlp", 2, batch_size=16), 0, None)[0]

    samples_left = 3 * 97 - 20 * 8
    assert (first.step, second.step) == (20, 20 + -(-samples_left // 16))
    assert (third.step, third.steps) == (second.step, []), "there is nothing left to train"


def test_what_was_trained_before_a_stop_is_reported_with_it(ranks_of: dict[int, Ranks], tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "mlp", 2)
    plan = dataclasses.replace(plan, train=dataclasses.replace(plan.train, report_every=4))

    first = ranks_of[2].run(run_until_step, "mlp", plan, 6)[0]
    second = ranks_of[2].run(run_until_step, "mlp", plan, 9)[0]

    assert first.step > 4 and second.step > 8
    assert (first.steps, second.steps) == ([4, first.step], [8, second.step])


def test_o43_three_interruptions_each_resume_where_the_last_one_stopped(
    ranks_of: dict[int, Ranks], tmp_path: Path
) -> None:
    steps_wanted = [25, 45, 46, 60]
    unbroken = ranks_of[2].run(run_leg, "mlp", plan_of(tmp_path / "a", "mlp", 2, epochs=None, steps=60), 0, None)[0]
    legs = []
    for last in steps_wanted[:-1]:
        leg = ranks_of[2].run(run_until_step, "mlp", plan_of(tmp_path / "b", "mlp", 2, epochs=None, steps=60), last)[0]
        assert (leg.outcome, leg.step) == (Outcome.PREEMPTED, last)
        legs.append(leg)
    legs.append(ranks_of[2].run(run_leg, "mlp", plan_of(tmp_path / "b", "mlp", 2, epochs=None, steps=60), 0, None)[0])

    assert [leg.first_step for leg in legs] == [1, 26, 46, 47]
    assert [step for leg in legs for step in leg.steps] == list(range(1, 61))
    assert is_equal(legs[-1].weights, unbroken.weights)


def run_until_step(mesh: Mesh, task: str, plan: TrainingPlan, last_step: int) -> Leg:
    """Train until rank 0 is asked to stop during step `last_step`."""
    events, stop = Recorder(), StopFlag({})
    subject = assemble_task(TASKS[task](), plan, mesh, events, {})
    num_done = 0

    def count(*_: object) -> None:
        nonlocal num_done
        num_done += 1
        if first_step + num_done == last_step and mesh.rank == 0:
            stop.set()

    around = Surroundings(mesh=mesh, events=events, stop=stop, pulse=Pulse(None), say=lambda text: None)
    training = Training(subject, around)
    restored = [int(path.name[5:]) for path in Path(plan.checkpoint_root or "").glob("step-*")]
    first_step = max(restored, default=0)
    subject.optimizer.register_step_post_hook(count)
    ending = training.run()
    steps = [one["step"] for one in events.records if one["kind"] == "progress" and "loss" in one["metrics"]]
    weights = {name: one.detach().clone() for name, one in subject.model.inner.state_dict().items()}
    return Leg(
        outcome=ending.outcome,
        step=ending.step,
        phases=[],
        first_step=steps[0],
        steps=steps,
        weights=weights,
        val_losses={},
    )
