"""The recipes learn: accuracy on held-out data within seconds, with settings that a job file can say.

Trained with a plain loop over our loader, so that a failure here is the recipe's or the data's.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainer.data.evaluation import eval_batches
from trainer.data.loader import TrainLoader
from trainer.recipes.registry import build_recipe
from trainer.task import TrainTask, inputs_of, target_of

CPU = torch.device("cpu")


def trained(
    name: str, args: dict[str, Any], *, steps: int, batch_size: int, lr: float, warmup_steps: int, weight_decay: float
) -> dict[str, float]:
    """Held-out loss and metrics after training with AdamW and a cosine schedule."""
    torch.manual_seed(0)
    task = build_recipe(name, args)
    assert not isinstance(task.model, torch.nn.Module)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return (1 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps))) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    loader = TrainLoader(
        task, seed=0, batch_size=batch_size, parts_rank=0, parts_size=1, grad_accum_steps=1, data_workers=0, device=CPU,
        first_sample=0, last_sample=steps * batch_size,
    )  # fmt: skip
    for step in loader:
        batch = step.micro_batches[0].batch
        optimizer.zero_grad()
        torch.as_tensor(task.loss(model(inputs_of(batch)), target_of(batch))).backward()
        optimizer.step()
        schedule.step()
    return evaluated(task, model)


@torch.no_grad()
def evaluated(task: TrainTask, model: torch.nn.Module) -> dict[str, float]:
    model.eval()
    functions = {"loss": task.loss, **task.metrics}
    sums, count = dict.fromkeys(functions, 0.0), 0
    for one in eval_batches(
        task.eval_data, batch_size=256, rank=0, size=1, collate=task.collate, device=CPU, data_workers=0
    ):
        output, target = model(inputs_of(one.batch)), target_of(one.batch)
        count += one.num_samples
        for name, function in functions.items():
            sums[name] += float(torch.as_tensor(function(output, target))) * one.num_samples
    return {name: value / count for name, value in sums.items()}


def test_an_mlp_reads_at_least_95_of_100_digits() -> None:
    found = trained("mlp", {}, steps=400, batch_size=64, lr=1e-3, warmup_steps=0, weight_decay=0.0)

    assert found["accuracy"] >= 0.95, found


@pytest.mark.full  # the same through a pool: tests/e2e/test_examples.py
def test_a_resnet_18_reads_at_least_97_of_100_digits() -> None:
    found = trained("resnet", {"width": 16}, steps=250, batch_size=64, lr=1e-2, warmup_steps=10, weight_decay=0.05)

    assert found["accuracy"] >= 0.97, found


@pytest.mark.full  # the same through a pool: tests/e2e/test_examples.py
def test_a_byte_language_model_learns_english(record_property: Any) -> None:
    found = trained("transformer", {}, steps=100, batch_size=16, lr=3e-3, warmup_steps=10, weight_decay=0.0)
    record_property("validation_loss", found["loss"])
    print(f"byte language model, validation loss after 100 steps: {found['loss']:.3f}")

    assert found["loss"] < 2.9, found  # guessing: 5.55; knowing how frequent each byte is: 3.25
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))


@pytest.mark.parametrize(("name", "metric", "least"), [("breast_cancer", "accuracy", 0.93), ("wine", "accuracy", 0.94)])
def test_an_mlp_classifies_tables(name: str, metric: str, least: float) -> None:
    found = trained("mlp", {"data": name}, steps=200, batch_size=32, lr=1e-3, warmup_steps=0, weight_decay=0.0)

    assert found[metric] >= least, found


def test_an_mlp_predicts_numbers_better_than_their_mean() -> None:
    found = trained("mlp", {"data": "diabetes"}, steps=150, batch_size=32, lr=1e-3, warmup_steps=0, weight_decay=0.0)

    assert found["loss"] < 0.6, found  # 1 is guessing the mean
