"""A model profile is read with all that is wrong told at once, and says which parameters are whose."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.trainer.plan.models_of_many_sizes import model
from trainer.plan.model_profile import read_profile, write_profile
from trainer.plan.parallel_plan import RankLayout
from trainer.plan.planned_file import parse_bytes, read_planned
from trainer.plan.problem import PlanError


def data_of(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(write_profile(model("mlp")))
    return {**data, **changes}


def messages_of(text: str) -> list[str]:
    with pytest.raises(PlanError) as refused:
        read_profile(text)
    return [problem.message for problem in refused.value.problems]


@pytest.mark.parametrize("name", ["7B", "resnet", "mlp", "3B that lists no layers"])
def test_what_was_written_is_read(name: str) -> None:
    assert read_profile(write_profile(model(name))) == model(name)


def test_billions_of_parameters_are_a_small_file() -> None:
    assert len(write_profile(model("70B"))) < 200_000


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "m", "layers": 3}', '{"name": 3, "layers": []}'])
def test_what_is_no_profile_is_refused(text: str) -> None:
    assert messages_of(text)[0].startswith("cannot be read: ")


def test_a_profile_of_another_version_is_refused() -> None:
    assert "is of version 7; this is version 1." in messages_of(json.dumps(data_of(version=7)))


def test_all_that_is_wrong_is_told_at_once() -> None:
    data = data_of(kernels="tpu")
    data["layers"][1]["name"] = data["layers"][2]["name"]
    data["layers"][2]["fp32"]["saved"] = -1
    data["layers"][2]["parameters"][0]["split_dim"] = 2
    messages = messages_of(json.dumps(data))
    for words in ("kernels 'tpu'", "names layers twice: layers.1", "layers.1: fp32.saved", "weight: split_dim"):
        assert any(words in message for message in messages), words


def test_a_profile_without_parameters_is_refused() -> None:
    assert "has no layers." in messages_of(json.dumps(data_of(layers=[])))


def test_a_part_may_not_be_more_than_the_whole() -> None:
    data = data_of()
    data["layers"][1]["bf16"]["saved_split"] = 10**9
    assert "has a number that cannot be, in layers.0: bf16.saved_split." in messages_of(json.dumps(data))


def test_parameters_that_tensor_parallelism_splits_are_told_apart() -> None:
    layer = model("7B").layers[1]
    assert layer.num_parameters - layer.num_tensor_parallel_parameters == 2 * 4096


# --- Files of the command line ---------------------------------------------------------------------------------------


def test_a_job_file_says_what_is_trained_and_how() -> None:
    planned = read_planned(
        {
            "name": "a job",
            "run": {"recipe": "mlp"},
            "parallel": {"strategy": "pipeline", "pp": 2, "cut_points": [2]},
            "train": {"batch_size": 64, "optimizer": "sgd", "hang_after": "5m"},
        }
    )
    assert (planned.run.recipe, planned.batch_size, planned.optimizer.name) == ("mlp", 64, "sgd")
    assert (planned.parallel.pp, planned.parallel.cut_points) == (2, (2,))


def test_a_plan_file_is_its_own_plan_on_its_own_ranks_and_its_strategy_on_others() -> None:
    planned = read_planned(
        {
            "run": {"entry": "a:b"},
            "parallel": {"strategy": "fsdp", "dp_shard": 8, "precision": "bf16"},
            "train": {},
            "resume_from": None,
        }
    )
    assert planned.layout == RankLayout(ranks_per_node=8)
    assert planned.request_on(planned.layout).dp_shard == 8
    other = planned.request_on(RankLayout(num_nodes=2, ranks_per_node=8))
    assert (other.strategy, other.precision, other.dp_shard) == ("fsdp", "bf16", None)
    instead = planned.request_on(planned.layout, "ddp")
    assert (instead.strategy, instead.precision, instead.dp_shard) == ("ddp", "bf16", None)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (["x"], "expected a mapping, got list"),
        ({"run": {"script": "train.py"}}, "must name a recipe or an entry"),
        ({"run": {"recipe": "mlp"}, "train": {"batch_size": "many"}}, "batch_size: expected int"),
        ({"run": {"recipe": "mlp"}, "train": {"batch_size": 0}}, "train.batch_size is 0"),
    ],
)
def test_a_file_that_says_no_such_thing_is_refused(data: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        read_planned(data)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("24 GiB", 24 * 2**30), ("1.5tb", 1.5e12), ("512MiB", 2**29), ("1000", 1000)],
)
def test_memory_is_read_with_its_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "80XB", "80 G B", "-1GB", "0GB", "nanGB"])
def test_memory_without_sense_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="Write a number and GB or GiB"):
        parse_bytes(text)
