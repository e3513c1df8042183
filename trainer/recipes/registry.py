"""Name of a recipe to the function that builds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from trainer.plan.recipe_catalog import complete_args
from trainer.recipes.mlp import build_mlp
from trainer.recipes.resnet import build_resnet
from trainer.recipes.transformer import build_transformer
from trainer.task import TrainTask

BUILDERS: Final[dict[str, Callable[[Mapping[str, Any]], TrainTask]]] = {
    "transformer": build_transformer,
    "mlp": build_mlp,
    "resnet": build_resnet,
}
"""Each gets every parameter that the catalog lists for it."""


def build_recipe(name: str, args: Mapping[str, Any]) -> TrainTask:
    """The task of recipe `name`; what `args` leaves out gets the catalog's default.

    Raises PlanError with all that is wrong with name and arguments, and what reading the data raises:
    FileNotFoundError, ImportError for a missing library, ValueError for data that does not fit.
    """
    return BUILDERS[name](complete_args(name, args))
