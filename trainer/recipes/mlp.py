"""The recipe `mlp`: a multi-layer perceptron on a table, for classification or regression.

The model keeps the training rows' statistics in buffers and standardises by itself, so a trained one takes raw rows and
answers in the target's own unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from trainer.data.rows import Rows, stack_pairs
from trainer.data.splits import complement, held_out
from trainer.data.synthetic import synthetic_table
from trainer.data.tables import csv_table, sklearn_table
from trainer.plan.recipe_catalog import TABLE_NAMES
from trainer.recipes.common import DTYPES, LayeredModel, accuracy, cross_entropy, dropout, layers_in_order
from trainer.task import TrainTask

_ACTIVATIONS: Final[dict[str, Callable[[], nn.Module]]] = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}
_NUM_SYNTHETIC_ROWS: Final = 20_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics:
    """Mean and deviation of the training rows' columns, and of the target (0 and 1 for classes)."""

    mean: torch.Tensor
    deviation: torch.Tensor
    target_mean: torch.Tensor
    target_deviation: torch.Tensor

    @staticmethod
    def of(rows: Rows) -> Statistics:
        """Of these rows. A column that never changes gets the deviation 1."""
        is_regression = rows.targets.is_floating_point()
        targets = rows.targets if is_regression else torch.tensor([-1.0, 1.0], dtype=rows.inputs.dtype)
        return Statistics(
            mean=rows.inputs.mean(dim=0),
            deviation=_deviation(rows.inputs),
            target_mean=targets.mean(),
            target_deviation=_deviation(targets),
        )


class TableModel(LayeredModel):
    """Standardise, linear layers with an activation between, and back to the target's unit."""

    def __init__(
        self,
        statistics: Statistics,
        *,
        hidden: Sequence[int],
        num_classes: int | None,
        activation: str,
        dropout_probability: float,
        dtype: torch.dtype,
    ) -> None:
        """`num_classes` None: one number per row comes out, [batch] (regression), else a score per class."""
        super().__init__()
        widths = [len(statistics.mean), *hidden]
        self.standardise = Standardise(statistics)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(before, after), _ACTIVATIONS[activation](), dropout(dropout_probability))
            for before, after in zip(widths, hidden, strict=False)
        )
        self.head = nn.Linear(widths[-1], num_classes) if num_classes else RegressionHead(widths[-1], statistics)
        self.to(dtype)


class Standardise(nn.Module):
    """Every column to mean 0 and deviation 1 over the training rows."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, statistics: Statistics) -> None:
        super().__init__()
        self.register_buffer("mean", statistics.mean)
        self.register_buffer("deviation", statistics.deviation)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[batch, columns] to the same shape."""
        return (rows - self.mean) / self.deviation


class RegressionHead(nn.Module):
    """One number per row, in the target's own unit."""

    target_mean: torch.Tensor
    target_deviation: torch.Tensor

    def __init__(self, width: int, statistics: Statistics) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)
        self.register_buffer("target_mean", statistics.target_mean)
        self.register_buffer("target_deviation", statistics.target_deviation)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[batch, width] to [batch]."""
        output: torch.Tensor = self.linear(values)
        return output.squeeze(-1) * self.target_deviation + self.target_mean


def build_mlp(args: Mapping[str, Any]) -> TrainTask:
    """The task; `args` is complete, as the catalog's `complete_args` makes it."""
    dtype = DTYPES[args["dtype"]]
    train, held_out_rows, num_classes = _data(args, dtype)
    statistics = Statistics.of(train)
    unit = statistics.target_deviation
    is_regression = num_classes is None
    return TrainTask(
        model=partial(
            TableModel,
            statistics,
            hidden=args["hidden"],
            num_classes=num_classes,
            activation=args["activation"],
            dropout_probability=args["dropout"],
            dtype=dtype,
        ),
        loss=partial(_squared_error, unit=float(unit)) if is_regression else cross_entropy,
        data=train,
        eval_data=held_out_rows,
        metrics={"mean_squared_error": _squared_error} if is_regression else {"accuracy": accuracy},
        collate=stack_pairs,
        layers=layers_in_order,
    )


def _data(args: Mapping[str, Any], dtype: torch.dtype) -> tuple[Rows, Rows, int | None]:
    """Training rows, held-out rows, number of classes."""
    data, fraction, seed = args["data"], args["eval_fraction"], args["split_seed"]
    if data == "synthetic":
        rows = synthetic_table(_NUM_SYNTHETIC_ROWS, dtype)
        chosen = held_out(len(rows), fraction, seed)
        return rows.subset(complement(chosen, len(rows))), rows.subset(chosen), int(rows.targets.max()) + 1
    table = sklearn_table(data) if data in TABLE_NAMES else csv_table(Path(data), args["target"], args["task"])
    return (*table.split(fraction, seed, dtype), table.num_classes)


def _squared_error(output: torch.Tensor, target: torch.Tensor, unit: float = 1.0) -> torch.Tensor:
    """Mean squared error, measured in `unit`: with the target's deviation, 1 is as good as guessing its mean."""
    return ((output - target) / unit).square().mean()


def _deviation(values: torch.Tensor) -> torch.Tensor:
    deviation = values.std(dim=0, correction=0)
    return torch.where(deviation > 0, deviation, torch.ones_like(deviation))
