"""The catalog says all that is wrong with a recipe's arguments, and builders get every parameter from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainer.plan.problem import PlanError
from trainer.plan.recipe_catalog import RECIPES, TRANSFORMER_SIZES, check_recipe, complete_args, shape_of
from trainer.plan.training_plan import RunTarget, TrainingSpec, TrainSettings, check_training


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_without_arguments(name: str) -> None:
    assert check_recipe(name, {}) == []
    assert list(complete_args(name, {})) == [one.name for one in RECIPES[name].parameters]


@pytest.mark.parametrize("name", RECIPES)
def test_every_default_is_a_right_value_and_every_parameter_is_explained(name: str) -> None:
    defaults = {one.name: one.default for one in RECIPES[name].parameters}

    assert check_recipe(name, defaults) == []
    assert json.loads(json.dumps(complete_args(name, defaults))) == defaults, "JSON values only"
    assert all(one.meaning.endswith(".") for one in RECIPES[name].parameters)


def test_a_default_is_not_shared() -> None:
    complete_args("mlp", {})["hidden"].append(7)

    assert complete_args("mlp", {})["hidden"] == [128, 128]


@pytest.mark.parametrize(
    ("name", "args", "key", "text"),
    [
        ("transfomer", {}, "run.recipe", "names no recipe: 'transfomer'. Did you mean transformer?"),
        ("gpt", {}, "run.recipe", "Choose one of: transformer, mlp, resnet."),
        ("mlp", {"hiden": [1]}, "run.args.hiden", "is no parameter of mlp. Did you mean hidden?"),
        ("mlp", {"hidden": 128}, "run.args.hidden", "must be a list of whole numbers, not 128."),
        ("mlp", {"hidden": [8, 0]}, "run.args.hidden", "is 0. Use 1 or more."),
        ("mlp", {"dropout": 1}, "run.args.dropout", "is 1. Use a number from 0.0 to 0.9."),
        ("mlp", {"dropout": float("nan")}, "run.args.dropout", "must be a number, not nan."),
        ("mlp", {"split_seed": True}, "run.args.split_seed", "must be a whole number, not True."),
        ("mlp", {"data": "digit"}, "run.args.data", "neither built in nor a path. Did you mean digits? A path is"),
        ("mlp", {"data": None}, "run.args.data", "must be a string, not None."),
        ("mlp", {"data": "./x.csv"}, "run.args.task", "is missing"),
        ("mlp", {"task": "regression"}, "run.args.task", "is for table files; what digits is for is known."),
        ("resnet", {"depth": 19}, "run.args.depth", "cannot be 19. Choose one of: 18, 34, 50."),
        ("resnet", {"stem": "large"}, "run.args.stem", "divides the size by 32, and the images have 8 pixels."),
        ("resnet", {"eval_data": "./more"}, "run.args.eval_data", "is a folder of images, but data is digits."),
        ("transformer", {"size": "2b"}, "run.args.size", "cannot be '2b'. Choose one of: tiny, small, 125m, 350m, 1b."),
        ("transformer", {"num_heads": 5}, "run.args.num_heads", "is 5, which does not divide the width 64."),
        ("transformer", {"width": 12}, "run.args.num_heads", "makes heads of 3 numbers"),
        ("transformer", {"data": "./tokens.bin"}, "run.args.vocab_size", "is missing"),
        ("transformer", {"tied_embeddings": "yes"}, "run.args.tied_embeddings", "must be true or false"),
        ("transformer", {"eval_data": "./a.txt"}, "run.args.eval_data", "needs data of the same kind."),
    ],
)
def test_what_is_wrong_is_said_with_its_key(name: str, args: dict[str, Any], key: str, text: str) -> None:
    (problem,) = check_recipe(name, args)

    assert problem.key == key
    assert text in f"{problem.message} {problem.fix}"


def test_all_problems_are_said_at_once() -> None:
    problems = check_recipe("resnet", {"depht": 18, "norm": "layer", "width": 0})

    assert [one.key for one in problems] == ["run.args.depht", "run.args.width", "run.args.norm"]
    with pytest.raises(PlanError, match="depht"):
        complete_args("resnet", {"depht": 18})


def test_a_job_with_a_wrong_recipe_is_refused_like_any_other_wrong_setting() -> None:
    spec = TrainingSpec(run=RunTarget(recipe="mlp", args={"hiden": []}), train=TrainSettings(steps=0))

    with pytest.raises(PlanError) as caught:
        check_training(spec)

    assert [one.key for one in caught.value.problems] == ["run.args.hiden", "train.steps"]


def test_a_size_stands_for_a_shape_that_arguments_may_change() -> None:
    assert shape_of(complete_args("transformer", {"size": "small"})) == TRANSFORMER_SIZES["small"]
    assert shape_of(complete_args("transformer", {"num_layers": 2})).num_layers == 2
    assert shape_of(complete_args("transformer", {"num_layers": 2})).width == TRANSFORMER_SIZES["tiny"].width
