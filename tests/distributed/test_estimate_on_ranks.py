"""What the estimate says of parameters, gradients and optimizer state is what lies on every rank, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.estimate_cases import weigh_states
from tests.distributed.training_cases import plan_for
from tests.support.ranks import TEST_SECONDS, Ranks
from trainer.plan.estimate import OptimizerKind, own_layers, states_of
from trainer.plan.recipe_profiles import recipe_profile
from trainer.plan.training_plan import TrainSettings

pytestmark = pytest.mark.timeout(TEST_SECONDS)

ARGS = {
    "num_layers": 3, "width": 12, "num_heads": 2, "tokens_per_sample": 8, "vocab_size": 37, "data": "synthetic",
    "mlp": "gelu",
}  # fmt: skip
"""Nothing that is sharded divides by 4 but the layers' matrices, and those not by 8."""
SETTINGS = {
    "adamw": TrainSettings(steps=1, batch_size=16, optimizer="adamw"),
    "sgd": TrainSettings(steps=1, batch_size=16, optimizer="sgd", momentum=0.9),
    "plain sgd": TrainSettings(steps=1, batch_size=16, optimizer="sgd", momentum=0.0),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as four:
        yield four


CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("adamw", {"strategy": "ddp"}, True),
    ("sgd", {"strategy": "ddp"}, False),
    ("adamw", {"strategy": "fsdp"}, False),
    ("adamw", {"strategy": "fsdp", "precision": "bf16"}, True),
    ("plain sgd", {"strategy": "fsdp"}, False),
    ("adamw", {"strategy": "hsdp"}, False),
    ("adamw", {"strategy": "tensor", "tp": 2}, False),
    ("sgd", {"strategy": "tensor", "tp": 2, "dp_shard": 2}, True),
    ("adamw", {"strategy": "pipeline", "pp": 2}, False),
    ("adamw", {"strategy": "pipeline", "pp": 2, "dp_shard": 2}, True),
    ("adamw", {"strategy": "pipeline", "pp": 2, "tp": 2}, False),
    ("sgd", {"strategy": "pipeline", "pp": 2, "schedule": "ZBVZeroBubble", "micro_batches": 4}, False),
    ("adamw", {"strategy": "model", "pp": 4}, False),
]
"""Optimizer, plan, and whether `make test` runs it. Each with weights of its own, and with tied ones in test-full."""


@pytest.mark.parametrize(
    ("optimizer", "parallel", "tied"),
    [
        pytest.param(
            optimizer,
            parallel,
            tied,
            id="-".join([optimizer, *map(str, parallel.values()), "tied" if tied else "apart"]),
            marks=[] if is_quick and tied else [pytest.mark.full],
        )
        for optimizer, parallel, is_quick in CASES
        for tied in (False, True)
    ],
)
def test_states_are_exact_on_every_rank(ranks: Ranks, optimizer: str, parallel: dict[str, Any], tied: bool) -> None:
    args = {**ARGS, "tied_embeddings": tied}
    settings = SETTINGS[optimizer]
    plan = plan_for("transformer", 4, settings, **parallel)
    weighed = ranks.run(weigh_states, "transformer", args, plan)
    profile = recipe_profile("transformer", args)
    assert profile is not None
    kind = OptimizerKind(name=settings.optimizer, momentum=settings.momentum)
    split = plan.parallel
    for rank, found in enumerate(weighed):
        pp_rank, place = divmod(rank, split.data_parallel_size * split.tp)
        layers = own_layers(profile, split, pp_rank)
        assert found == states_of(layers, split, kind, shard=place // split.tp % split.dp_shard), f"rank {rank}"
