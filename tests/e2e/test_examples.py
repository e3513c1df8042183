"""The examples keep their word: every job file is submitted to a pool and reaches the accuracy that it is there for."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.stack import PYTHON, Stack

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.timeout(1800)
SECONDS = 600.0
"""For one training: under a minute on two idle cores."""
GANG = Path(PYTHON).with_name("gang")
ACCURACY = {"recipe_mlp": 0.95, "recipe_resnet": 0.97, "entry": 0.95}
"""On held-out digits."""
MOST_LINES = 30


@pytest.fixture(scope="module")
def pool() -> Iterator[Stack]:
    with Stack(num_nodes=1, slots=2) as stack:
        yield stack


def submit(pool: Stack, job_file: Path, *overrides: str) -> int:
    """Submit as a user would; the id of the job."""
    command = [
        str(GANG),
        "submit",
        str(job_file),
        "-o",
        "json",
        *(word for one in overrides for word in ("--set", one)),
    ]
    environment = {"GANGLINE_URL": pool.url, "GANGLINE_TOKEN": pool.token, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["id"])


def last(pool: Stack, job_id: int, name: str) -> float:
    """Last value of a metric."""
    curve: dict[str, Any] = pool.get(f"/jobs/{job_id}/metrics?keys={name}")["keys"][name]
    return float(curve["last"][-1])


@pytest.mark.parametrize(
    "name",
    ["entry", "recipe_mlp", pytest.param("recipe_resnet", marks=pytest.mark.full)],  # a minute on two cores
)
def test_an_example_reaches_its_accuracy_on_held_out_digits(pool: Stack, name: str) -> None:
    job_id = submit(pool, EXAMPLES / name / "job.yaml")

    job = pool.wait_end(job_id, SECONDS)

    assert job["state"] == "succeeded", pool.describe(job_id)
    assert last(pool, job_id, "val_accuracy") >= ACCURACY[name]


def test_the_language_model_learns_more_than_how_often_bytes_occur(pool: Stack) -> None:
    short = ("train.steps=60", "resources.nodes=1", "resources.gpus_per_node=2")
    job_id = submit(pool, EXAMPLES / "recipe_transformer" / "job.yaml", *short)

    job = pool.wait_end(job_id, SECONDS)

    assert job["state"] == "succeeded", pool.describe(job_id)
    byte_frequencies = 3.25  # nats per byte of this text, knowing nothing else
    assert last(pool, job_id, "val_loss") < byte_frequencies


def test_a_users_script_is_ported_in_under_30_lines() -> None:
    lines = (EXAMPLES / "entry" / "entry.py").read_text().splitlines()

    assert len(lines) < MOST_LINES


# --- One model, split in every way -----------------------------------------------------------------------------------

STRATEGIES = sorted(path.stem for path in (EXAMPLES / "strategies").glob("*.yaml"))
SAME_LOSS = 2e-3
"""In nats, after a minute's training in single precision: only the order of additions differs."""


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Stack]:
    with Stack(num_nodes=2, slots=4) as stack:
        yield stack


def test_every_way_to_split_a_model_ends_at_the_same_loss(two_nodes: Stack) -> None:
    ids = {name: submit(two_nodes, EXAMPLES / "strategies" / f"{name}.yaml", "train.steps=30") for name in STRATEGIES}

    jobs = {name: two_nodes.wait_end(job_id, 2 * SECONDS) for name, job_id in ids.items()}

    for name, job in jobs.items():
        assert job["state"] == "succeeded", f"{name}\n{two_nodes.describe(ids[name])}"
    losses = {name: last(two_nodes, job_id, "val_loss") for name, job_id in ids.items()}
    assert losses == pytest.approx(dict.fromkeys(losses, losses["single"]), abs=SAME_LOSS)
    assert losses["model"] == losses["single"], "one layer after another: the same bits"
    two_nodes.assert_nothing_left()


def test_files_of_strategies_differ_in_resources_and_parallel_alone() -> None:
    files = {name: yaml.safe_load((EXAMPLES / "strategies" / f"{name}.yaml").read_text()) for name in STRATEGIES}

    for one in files.values():
        for key in ("name", "resources", "parallel"):
            del one[key]
    assert all(one == files["single"] for one in files.values())


@pytest.mark.parametrize("name", ["model_script", "ddp_script", "hello_command"])
def test_scripts_and_commands_of_ones_own_run_as_they_are(two_nodes: Stack, name: str) -> None:
    job_id = submit(two_nodes, EXAMPLES / name / "job.yaml")

    job = two_nodes.wait_end(job_id, SECONDS)

    assert job["state"] == "succeeded", two_nodes.describe(job_id)
