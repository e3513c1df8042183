"""A training on two hosts of a pool, each with a loopback and an address of its own, equals one process.

The job goes the whole way: REST, queue, agents, supervisors, `python -m trainer` on four ranks. Without a shared folder
each node keeps a whole copy of every checkpoint; after each of 20 steps both copies hold the weights of a hand-written
loop, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed.reference import by_hand, tensor_differences
from tests.support.ci import cannot_run
from tests.support.namespaces import Network, what_is_missing
from tests.support.stack import PYTHON, TEST_SECONDS, Stack
from trainer.checkpoint.export import export_checkpoint
from trainer.plan.training_plan import TrainSettings
from trainer.recipes.registry import build_recipe

pytestmark = pytest.mark.timeout(TEST_SECONDS)
ARGS = {"dtype": "float64", "num_layers": 2, "width": 32, "num_heads": 2, "tokens_per_sample": 16}
TRAIN = TrainSettings(steps=20, batch_size=24, optimizer="sgd", lr=0.05)


@pytest.fixture
def pool() -> Iterator[Stack]:
    missing = what_is_missing()
    if missing:
        cannot_run(missing, "run as root with iproute2 and util-linux installed")
    with Network("service", "node-1", "node-2") as network, Stack(network=network) as stack:
        yield stack


@pytest.mark.parametrize("grad_accum_steps", [4, pytest.param(1, marks=pytest.mark.full)])
def test_after_each_step_both_nodes_hold_the_weights_of_one_process(
    pool: Stack, tmp_path: Path, grad_accum_steps: int
) -> None:
    expected = by_hand(build_recipe("transformer", ARGS), TRAIN, 0)

    job_id = pool.submit(
        python=PYTHON,
        run={"recipe": "transformer", "args": ARGS},
        resources={"nodes": 2, "gpus_per_node": 2},
        parallel={"strategy": "ddp", "grad_accum_steps": grad_accum_steps},
        train={"steps": TRAIN.steps, "batch_size": TRAIN.batch_size, "optimizer": "sgd", "lr": TRAIN.lr},
        checkpoint={"every_steps": 1, "keep": 20, "async": False},
    )
    job = pool.wait_end(job_id, 600)

    assert job["state"] == "succeeded", pool.describe(job_id)
    for name in pool.node_names:
        folders = sorted(pool.node_folder(name).glob(f"jobs/{job_id}/checkpoints/*/step-*"))
        assert len(folders) == TRAIN.steps
        for folder, weights in zip(folders, expected.weights_by_step, strict=True):
            export_checkpoint(folder, tmp_path / "weights")
            found = load_file(tmp_path / "weights")
            assert found.keys() == weights.keys(), f"{name}, {folder.name}"
            assert tensor_differences(found, weights) == [], f"{name}, {folder.name}"
