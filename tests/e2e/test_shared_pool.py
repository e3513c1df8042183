"""Two teams share a pool of two nodes with four CPU slots each: borrowing, reclaim, large gangs, with real processes.

What stopped trainings had learnt is compared with one process that nobody disturbed, weight by weight.
"""

from __future__ import annotations

import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.distributed.reference import by_hand, tensor_differences
from tests.support.stack import PYTHON, TEST_SECONDS, Stack
from tests.support.wait import wait_until
from trainer.checkpoint.export import export_checkpoint
from trainer.plan.training_plan import TrainSettings

TRAIN = TrainSettings(steps=300, batch_size=8, optimizer="sgd", lr=0.05)
SOURCE = """
import time

import torch
from torch import nn

from trainer.task import TrainTask


class Samples(torch.utils.data.Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(self.seconds)
        inputs = torch.randn(8, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return inputs, (inputs.sum() > 0).long()


def build(seconds=0.0):
    return TrainTask(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double(),
        loss=nn.functional.cross_entropy,
        data=Samples(seconds),
    )
"""
GANG_SOURCE = "import os, time\nprint('rank', os.environ['RANK'], 'runs', flush=True)\ntime.sleep(1.0)\n"


@pytest.fixture
def pool() -> Iterator[Stack]:
    with Stack(num_nodes=2, slots=4) as stack:
        for team in ("lenders", "borrowers"):
            assert stack.request("POST", "/teams", json={"name": team}).is_success
            assert stack.request("PUT", f"/teams/{team}/members/{stack.get('/me')['name']}").is_success
        yield stack


def set_quota(pool: Stack, team: str, count: int) -> None:
    answer = pool.request("POST", f"/teams/{team}/quota", json={"quota_gpus": count})
    assert answer.is_success, answer.text


def train(pool: Stack, *, every_steps: int) -> int:
    """A training of the borrowers that holds a node; a step takes some 64 ms."""
    folder = Path(tempfile.mkdtemp(prefix="code-", dir=pool.folder))
    (folder / "mine.py").write_text(SOURCE)
    return pool.submit(
        team="borrowers",
        code={"path": str(folder)},
        python=PYTHON,
        run={"entry": "mine:build", "args": {"seconds": 0.008}},
        resources={"gpus": 4},
        processes_per_node=1,
        train={"steps": TRAIN.steps, "batch_size": TRAIN.batch_size, "optimizer": "sgd", "lr": TRAIN.lr,
               "report_every": 5},
        checkpoint={"every_steps": every_steps, "async": False},
    )  # fmt: skip


def gang(pool: Stack, num_nodes: int) -> int:
    """A gang of the lenders over whole nodes."""
    return pool.python_job(
        GANG_SOURCE, team="lenders", resources={"nodes": num_nodes, "gpus_per_node": 4, "time": "10m"}
    )


def step_of(pool: Stack, job_id: int) -> int:
    return int((pool.job(job_id)["progress"] or {}).get("step") or 0)


def attempts_of(pool: Stack, job_id: int) -> int:
    return int(pool.job(job_id)["attempts"])


def wait_training(pool: Stack, job_ids: list[int], timeout: float = 240.0) -> None:
    """Until each of them has come to a step that is worth something."""
    wait_until(
        lambda: all(step_of(pool, job_id) >= 15 for job_id in job_ids),
        timeout,
        lambda: "\n".join(pool.describe(job_id) for job_id in job_ids),
    )


def final_weights(pool: Stack, job_id: int, folder: Path) -> Any:
    (found,) = [
        path
        for name in pool.node_names
        for path in pool.node_folder(name).glob(f"jobs/{job_id}/checkpoints/*/step-{TRAIN.steps:08}")
    ]
    export_checkpoint(found, folder)
    return load_file(folder)


@pytest.mark.timeout(TEST_SECONDS)
def test_a_team_gets_its_quota_back_from_borrowers_which_lose_nothing(pool: Stack, tmp_path: Path) -> None:
    """Of two it is the cheaper to stop; then a gang of the whole pool lands although smaller jobs keep coming."""
    set_quota(pool, "borrowers", 0)
    set_quota(pool, "lenders", 4)
    cheap, dear = train(pool, every_steps=10), train(pool, every_steps=10_000)
    wait_training(pool, [cheap, dear])

    half = gang(pool, 1)
    ended = pool.wait_end(half, 240)

    assert ended["state"] == "succeeded", pool.describe(half)
    assert attempts_of(pool, dear) == 1, "the one that would lose most was left alone"
    told = [event["text"] for event in pool.events(cheap)]
    assert any(f"team lenders gets its quota back, for job {half} of" in text for text in told), told
    columns = "num_stops, num_charged_retries, served_seconds > 0"
    assert pool.sql(f"select {columns} from jobs where id = :id", id=cheap) == [(1, 0, 1)]
    wait_until(lambda: pool.job(cheap)["state"] == "running", 120, lambda: pool.describe(cheap))

    set_quota(pool, "lenders", 8)
    flood = [train(pool, every_steps=10) for _ in range(3)]
    whole = gang(pool, 2)
    flood += [train(pool, every_steps=10) for _ in range(3)]
    assert pool.wait_end(whole, 240)["state"] == "succeeded", pool.describe(whole)
    for job_id in flood:
        pool.cancel(job_id)

    expected = by_hand(entry().build(), TRAIN, 0).weights
    for job_id in (cheap, dear):
        job = pool.wait_end(job_id, 400)
        assert job["state"] == "succeeded", pool.describe(job_id)
        assert tensor_differences(final_weights(pool, job_id, tmp_path / str(job_id)), expected) == []
    assert attempts_of(pool, cheap) >= 2


def entry() -> Any:
    """The module of the trainings, without what slows them down."""
    module = types.ModuleType("mine")
    exec(SOURCE, module.__dict__)
    return module
