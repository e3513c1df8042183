"""Tables: the small sets that come with scikit-learn, and CSV files of numbers.

Not for: standardising, which the model does with the statistics of its training rows (`trainer.recipes.mlp`).
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.libraries import library
from trainer.data.rows import Rows
from trainer.data.splits import complement, held_out

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Rows of numbers, and what is to be predicted of each."""

    features: Numbers
    """rows × columns."""
    targets: npt.NDArray[np.float64] | npt.NDArray[np.int64]
    """A number per row for regression; the number of its class for classification."""
    num_classes: int | None
    """None: regression."""

    def split(self, eval_fraction: float, seed: int, dtype: torch.dtype) -> tuple[Rows, Rows]:
        """Training and held-out rows: of each class the same part is held out. Raises ValueError for too few rows."""
        labels = self.targets.tolist() if self.num_classes is not None else None
        chosen = held_out(len(self.features), eval_fraction, seed, labels)
        targets = torch.from_numpy(self.targets)
        rows = Rows(torch.from_numpy(self.features).to(dtype), targets if labels is not None else targets.to(dtype))
        return rows.subset(complement(chosen, len(rows))), rows.subset(chosen)


def sklearn_table(name: str) -> Table:
    """One of digits, breast_cancer, wine, iris, diabetes. Raises ImportError without scikit-learn."""
    bunch = getattr(library("sklearn.datasets"), f"load_{name}")()
    features = np.asarray(bunch.data, dtype=np.float64)
    if name == "diabetes":
        return Table(features=features, targets=np.asarray(bunch.target, dtype=np.float64), num_classes=None)
    return Table(
        features=features, targets=np.asarray(bunch.target, dtype=np.int64), num_classes=len(bunch.target_names)
    )


def csv_table(path: Path, target: str | None, task: str) -> Table:
    """A CSV file with a header and numeric columns. `target`: the column to predict (None: the last).

    For `task` classification the target may hold any words; each is a class, numbered in their sorted order. Raises
    FileNotFoundError; ValueError with line and column for what is not a finite number, and for a missing column.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file here (the working folder is {Path.cwd()}).")
    with open(path, newline="", encoding="utf-8-sig") as file:
        lines = [line for line in csv.reader(file) if line]
    if len(lines) < 2:
        raise ValueError(f"{path} has {len(lines)} lines; it needs a header and at least one row.")
    header, rows = [name.strip() for name in lines[0]], lines[1:]
    if target is not None and target not in header:
        raise ValueError(f"{path} has no column {target!r}; its columns are {', '.join(header)}.")
    column = len(header) - 1 if target is None else header.index(target)
    values = [
        [0.0 if task == "classification" and place == column else _number(path, number, header[place], cell)
         for place, cell in enumerate(_full(path, number, row, header))]
        for number, row in enumerate(rows, start=2)
    ]  # fmt: skip
    everything = np.array(values, dtype=np.float64)
    features = np.delete(everything, column, axis=1)
    if task == "regression":
        return Table(features=features, targets=everything[:, column], num_classes=None)
    words = [row[column].strip() for row in rows]
    classes = {word: number for number, word in enumerate(sorted(set(words)))}
    return Table(
        features=features,
        targets=np.array([classes[word] for word in words], dtype=np.int64),
        num_classes=len(classes),
    )


def _full(path: Path, number: int, row: list[str], header: list[str]) -> list[str]:
    if len(row) != len(header):
        raise ValueError(f"{path}, line {number}, has {len(row)} columns; the header has {len(header)}.")
    return row


def _number(path: Path, line: int, column: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{path}, line {line}, column {column!r}: {cell!r} is no finite number.")
    return value
