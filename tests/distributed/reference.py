"""The reference of every layout: one process and plain torch, and when two runs count as equal.

The tolerance is ‖a − b‖ ≤ 1e-10 × max(‖b‖, 1e-6 × norm of the whole gradient), in float64: some gradients are truly
zero (an attention key's bias), where a plain relative one would fail on right code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tests.distributed.training_cases import Tensors, Trace
from trainer.data.order import SampleOrder
from trainer.optimizers import build_optimizer
from trainer.plan.training_plan import TrainSettings
from trainer.seeds import derive, seed_all
from trainer.task import TrainTask


def by_hand(task: TrainTask, train: TrainSettings, num_traced: int) -> Trace:
    """One process, one batch per step, plain torch. Only the order of samples and the first weights are ours."""
    torch.set_num_threads(1)  # as the ranks do: the number decides the bits
    seed_all(derive(train.seed, "init"))
    model = task.model()
    optimizer = build_optimizer(model, train)
    order = SampleOrder(len(task.data), derive(train.seed, "data"))
    gradients: list[Tensors] = []
    weights_by_step: list[Tensors] = []
    losses = []
    assert train.steps is not None
    for step in range(train.steps):
        items = order.items(step * train.batch_size, (step + 1) * train.batch_size)
        samples = [task.data[index] for _, index in items]
        inputs, targets = (torch.stack([torch.as_tensor(sample[part]) for sample in samples]) for part in (0, 1))
        loss = task.loss(model(inputs), targets)
        assert isinstance(loss, torch.Tensor)
        optimizer.zero_grad()
        loss.backward()
        if step < num_traced:
            gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
        optimizer.step()
        weights_by_step.append({name: one.detach().clone() for name, one in model.named_parameters()})
        losses.append(float(loss.detach()))
    return Trace(
        gradients=gradients,
        weights=weights_by_step[-1],
        losses=losses,
        weights_by_step=weights_by_step,
    )


def differences(found: Trace, expected: Trace) -> list[str]:
    """Where two runs differ by more than the tolerance, in words; empty: nowhere."""
    return part_differences(found, expected) + _missing([found], expected)


def all_differences(parts: Sequence[Trace], expected: Trace) -> list[str]:
    """As `differences`, of the ranks of a model that is split: each has a part, and together they have all of it."""
    wrong = [f"rank {rank}: {text}" for rank, part in enumerate(parts) for text in part_differences(part, expected)]
    return wrong + _missing(parts, expected)


def part_differences(found: Trace, expected: Trace) -> list[str]:
    """Where what one rank has of a run differs by more than the tolerance, in words."""
    num_found, num_expected = len(found.gradients), len(expected.gradients)
    wrong = [f"{num_found} gradients, not {num_expected}"] if num_found != num_expected else []
    for step, (own, reference) in enumerate(zip(found.gradients, expected.gradients, strict=False)):
        wrong += [f"gradient of step {step}, {text}" for text in tensor_differences(own, reference)]
    return wrong + [f"weights, {text}" for text in tensor_differences(found.weights, expected.weights)]


def _missing(parts: Sequence[Trace], expected: Trace) -> list[str]:
    """What no rank has."""
    names: set[str] = set().union(*(part.weights.keys() for part in parts))
    return [f"nobody has {name}" for name in sorted(expected.weights.keys() - names)]


def tensor_differences(found: Tensors, expected: Tensors) -> list[str]:
    """Where tensors differ by more than the tolerance, in words. `found` may be a part of them."""
    if unknown := found.keys() - expected.keys():
        return [f"unknown names {sorted(unknown)}"]
    whole = math.sqrt(sum(float(one.square().sum()) for one in expected.values()))
    return [
        f"{name}: off by {float((one - expected[name]).norm()):.3g} of {float(expected[name].norm()):.3g}"
        for name, one in found.items()
        if not float((one - expected[name]).norm()) <= 1e-10 * max(float(expected[name].norm()), 1e-6 * whole)
    ]
