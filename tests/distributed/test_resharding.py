"""A checkpoint of any plan goes on under any other, as if training had never stopped: weights, optimizer, place in the
data. Six plans, each saved and loaded by each; `make test` takes 8 of the 36 pairs, `make test-full` all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.reference import all_differences, by_hand
from tests.distributed.tasks import TASKS
from tests.distributed.training_cases import Trace, plan_for, train_and_stop, train_and_trace
from tests.support.ranks import TEST_SECONDS, Ranks
from trainer.checkpoint import restoring
from trainer.mesh import Mesh
from trainer.plan.training_plan import CheckpointSettings, ResumePoint, TrainingPlan, TrainSettings

pytestmark = pytest.mark.timeout(TEST_SECONDS)

TASK = "tied_transformer"
SAVED_STEP, NUM_STEPS, NUM_TRACED = 7, 20, 5
TRAIN = TrainSettings(steps=NUM_STEPS, batch_size=24, optimizer="adamw", lr=1e-3, weight_decay=0.1)
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (4, {"strategy": "fsdp"}),
    "hsdp": (4, {"strategy": "hsdp"}),
    "pipeline": (2, {"strategy": "pipeline", "schedule": "Interleaved1F1B", "stages_per_rank": 2}),
    "pipeline_ddp": (4, {"strategy": "pipeline", "pp": 2, "dp_replicate": 2}),
    "tensor_fsdp": (4, {"strategy": "tensor", "tp": 2, "dp_shard": 2}),
}
NAMES = list(PLANS)
SAMPLED = {*zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True), ("pipeline_ddp", "fsdp"), ("tensor_fsdp", "pipeline")}
PAIRS = [
    pytest.param(source, target, marks=[] if (source, target) in SAMPLED else [pytest.mark.full])
    for source in NAMES
    for target in NAMES
]


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[dict[int, Ranks]]:
    with Ranks(2) as two, Ranks(4) as four:
        yield {2: two, 4: four}


@pytest.fixture(scope="module")
def expected() -> Trace:
    """Never stopped: its last gradients are those after the checkpoint."""
    whole = by_hand(TASKS[TASK](), TRAIN, NUM_STEPS)
    return dataclasses.replace(whole, gradients=whole.gradients[SAVED_STEP : SAVED_STEP + NUM_TRACED])


@pytest.fixture(scope="module")
def saved(ranks_of: dict[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each plan's checkpoint, made when first asked for."""

    class Saved(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            root = tmp_path_factory.mktemp(name)
            plan = plan_of(name, root, dataclasses.replace(TRAIN, steps=SAVED_STEP))
            ranks_of[plan.parallel.world_size].run(train_and_trace, TASK, plan, 0)
            self[name] = root
            return root

    return Saved()


def plan_of(name: str, root: Path, train: TrainSettings) -> TrainingPlan:
    """The plan of that name, which saves at its end and resumes from what lies below `root`."""
    world_size, parallel = PLANS[name]
    return dataclasses.replace(
        plan_for(TASK, world_size, train, **parallel),
        checkpoint=CheckpointSettings(every_steps=None, every_seconds=None),
        checkpoint_root=str(root),
        checkpoint_subfolder=f"attempt-{name}-{train.steps}",
    )


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_training_goes_on_under_another_plan(
    ranks_of: dict[int, Ranks], saved: dict[str, Path], expected: Trace, source: str, target: str
) -> None:
    plan = plan_of(target, saved[source], TRAIN)

    traces = ranks_of[plan.parallel.world_size].run(train_and_trace, TASK, resuming(plan, source), NUM_TRACED)

    assert all_differences(traces, expected) == []
    assert traces[0].losses == pytest.approx(expected.losses[SAVED_STEP:], rel=1e-10)


def test_a_job_preempted_as_pipelines_ends_as_shards_on_the_same_curve(
    ranks_of: dict[int, Ranks], expected: Trace, tmp_path: Path
) -> None:
    """4 ranks as pipeline × data are asked to make room in the middle, 2 ranks as FSDP go on."""
    before = plan_of("pipeline_ddp", tmp_path, TRAIN)
    stopped = ranks_of[4].run(train_and_stop, TASK, before, SAVED_STEP)
    assert {one.step for one in stopped} == {SAVED_STEP}
    after = dataclasses.replace(
        plan_for(TASK, 2, TRAIN, strategy="fsdp"),
        checkpoint_root=str(tmp_path),
        resume_from=(ResumePoint(path=f"{before.checkpoint_subfolder}/step-{SAVED_STEP:08d}", step=SAVED_STEP),),
    )

    traces = ranks_of[2].run(train_and_trace, TASK, after, NUM_TRACED)

    assert all_differences(traces, expected) == []
    assert [*stopped[0].losses, *traces[0].losses] == pytest.approx(expected.losses, rel=1e-10)


@pytest.mark.parametrize("target", ["pipeline", "fsdp"])
def test_the_comparison_sees_weights_loaded_into_another_layer(
    ranks_of: dict[int, Ranks], saved: dict[str, Path], expected: Trace, target: str
) -> None:
    plan = resuming(plan_of(target, saved["pipeline"], TRAIN), "pipeline")

    traces = ranks_of[plan.parallel.world_size].run(train_with_swapped_layers, TASK, plan, NUM_TRACED)

    assert all_differences(traces, expected) != []


def resuming(plan: TrainingPlan, source: str) -> TrainingPlan:
    """`plan`, told which checkpoint it resumes from: what other cases save below the same root does not count."""
    point = ResumePoint(path=f"attempt-{source}-{SAVED_STEP}/step-{SAVED_STEP:08d}", step=SAVED_STEP)
    subfolder = f"from-{source}-{plan.checkpoint_subfolder}"
    return dataclasses.replace(plan, resume_from=(point,), checkpoint_subfolder=subfolder)


def train_with_swapped_layers(mesh: Mesh, task: str, plan: TrainingPlan, num_traced: int) -> Trace:
    """As `train_and_trace`, but two layers get each other's weights."""
    right = restoring.dcp.load

    def load(state: dict[str, Any], **others: Any) -> None:
        swapped = {_other_layer(key): value for key, value in state.items()}
        right(swapped, **others)
        state.update({key: swapped[_other_layer(key)] for key in state})

    with patch.object(restoring.dcp, "load", load):
        return train_and_trace(mesh, task, plan, num_traced)


def _other_layer(key: str) -> str:
    swaps = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    found = next((old for old in swaps if old in key), None)
    return key if found is None else key.replace(found, swaps[found])
