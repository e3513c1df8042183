"""A plan and a model that do not go together: all ranks say the same, with the sum, before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.plan.model_rules import ModelFacts, model_problems
from trainer.plan.parallel_plan import ParallelPlan

LAYERS = ModelFacts(num_layers=6, layer_names=("embed", "block.0", "block.1", "block.2", "block.3", "head"))
SPLIT = ModelFacts(num_layers=None, tensor_parallel_sizes=(12, 48), has_tensor_parallel_plan=True)


@pytest.mark.parametrize(
    ("plan", "facts", "key", "message", "fix"),
    [
        ({"pp": 2}, ModelFacts(num_layers=None), "pp", "does not list its layers", "strategy: fsdp"),
        ({"pp": 8}, LAYERS, "pp", "pp 8 × stages_per_rank 1 = 8 stages of one layer or more, but the model has 6 "
         "layers (embed, block.0, …, head)", "Set parallel.pp to 6 or less"),
        ({"pp": 2, "schedule": "Interleaved1F1B", "stages_per_rank": 4}, LAYERS, "pp",
         "pp 2 × stages_per_rank 4 = 8 stages", "Set parallel.stages_per_rank to 3"),
        ({"pp": 4, "schedule": "ZBVZeroBubble", "stages_per_rank": 2}, LAYERS, "pp",
         "= 8 stages", "use parallel.schedule: 1F1B"),
        ({"pp": 3, "cut_points": (2,)}, LAYERS, "cut_points", "1 cuts, but 3 stages need 2", "Write 2 numbers"),
        ({"pp": 3, "cut_points": (4, 2)}, LAYERS, "cut_points", "above the one before", "Write rising numbers"),
        ({"pp": 3, "cut_points": (4, 6)}, LAYERS, "cut_points", "cuts at 6, but the last layer is 5", "from 1 to 5"),
        ({"tp": 2}, ModelFacts(num_layers=None), "tp", "does not say which layers to split", "tensor_parallel_plan"),
        ({"tp": 8}, SPLIT, "tp", "does not divide all that is split: 12 = 1 × 8 + 4", "Set it to 6"),
        ({"tp": 5}, SPLIT, "tp", "12 = 2 × 5 + 2, 48 = 9 × 5 + 3", "Set it to 4"),
        ({"tp": 2}, ModelFacts(num_layers=None, tensor_parallel_sizes=(3,), has_tensor_parallel_plan=True), "tp",
         "3 = 1 × 2 + 1", "Set it to 3"),
        ({"tp": 2}, ModelFacts(num_layers=None, tensor_parallel_sizes=(3, 8), has_tensor_parallel_plan=True), "tp",
         "3 = 1 × 2 + 1", "Use parallel.strategy: fsdp"),
        ({"pp": 2, "micro_batches": 4, "grad_accum_steps": 2}, ModelFacts(num_layers=2, has_batch_norm=True),
         "micro_batches", "micro_batches 4 × grad_accum_steps 2 = 8 parts, and BatchNorm", "Use GroupNorm"),
        ({"pp": 2, "grad_accum_steps": 2}, ModelFacts(num_layers=2, has_batch_norm=True),
         "grad_accum_steps", "= 2 parts, and BatchNorm", "strategy: model"),
        ({"dp_shard": 4}, ModelFacts(num_layers=2, scalar_parameters=("head.scale",)), "dp_shard",
         "is 4, but a parameter without dimension cannot be cut into shards: head.scale.", "torch.ones(1)"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_the_model_is_refused_with_the_sum(
    plan: dict[str, Any], facts: ModelFacts, key: str, message: str, fix: str
) -> None:
    (problem,) = model_problems(ParallelPlan(**plan), facts)

    assert problem.key == f"parallel.{key}"
    assert message in problem.message
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("plan", "facts"),
    [
        ({}, ModelFacts(num_layers=None, has_batch_norm=True)),
        ({"dp_shard": 8}, ModelFacts(num_layers=None, has_batch_norm=True)),
        ({"dp_replicate": 8}, ModelFacts(num_layers=None, scalar_parameters=("scale",))),
        ({"pp": 6}, LAYERS),
        ({"pp": 3, "cut_points": (1, 5)}, LAYERS),
        ({"pp": 2}, ModelFacts(num_layers=2, has_batch_norm=True)),  # model: one part, the statistics of one process
        ({"tp": 4}, SPLIT),
        ({"tp": 12}, SPLIT),
    ],
)
def test_what_goes_with_the_model_has_no_problem(plan: dict[str, Any], facts: ModelFacts) -> None:
    assert model_problems(ParallelPlan(**plan), facts) == []


def test_all_that_is_wrong_with_the_model_is_told_at_once() -> None:
    plan = ParallelPlan(pp=4, tp=5, micro_batches=2, cut_points=(1, 9))
    facts = ModelFacts(num_layers=2, tensor_parallel_sizes=(4,), has_batch_norm=True)

    keys = [problem.key.removeprefix("parallel.") for problem in model_problems(plan, facts)]
    assert keys == ["pp", "cut_points", "cut_points", "tp", "tp", "micro_batches"]
