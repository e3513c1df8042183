"""Applies a `ParallelPlan` to a model: what each rank keeps of it, how it is called, and who exchanges what.

Order: activation checkpointing, tensor parallelism, compiling, sharding, DDP: each wraps what came before.
Not for: each way itself (one file each beside this one), or choosing a plan (`trainer.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.checkpoint.state import GlobalNames
from trainer.failure import ConfigError, PeerFailedError
from trainer.mesh import Mesh
from trainer.parallel.activation_checkpointing import checkpoint_activations
from trainer.parallel.axes import Axes
from trainer.parallel.batch_norm import has_batch_norm, synchronise_batch_norm
from trainer.parallel.compiling import compile_layers
from trainer.parallel.layers import ListedLayer, boundary_shapes, check_composition, listed_layers
from trainer.parallel.model import Engine, ParallelModel
from trainer.parallel.pipeline import Boundary, PipelineEngine, StageBody, checked_input
from trainer.parallel.precision import autocast_of
from trainer.parallel.sharding import shard
from trainer.parallel.stages import own_modules, split_layers, tie, tied_families
from trainer.parallel.tensor import split_linears, split_sizes
from trainer.parallel.whole import WholeEngine
from trainer.plan.model_rules import ModelFacts, model_problems
from trainer.plan.parallel_plan import ParallelPlan
from trainer.plan.problem import PlanError
from trainer.task import TrainTask


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """What every way to split a model needs to know."""

    task: TrainTask
    plan: ParallelPlan
    mesh: Mesh
    axes: Axes


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """What of a model is this rank's, and how it runs. Made without talking to other ranks."""

    inner: nn.Module
    engine: Engine
    names: GlobalNames
    num_parameters: int
    speaks: bool
    fingerprint: Mapping[str, tuple[float, float]]
    """Of the weights that the whole model began with, by name."""
    families: Sequence[Sequence[tuple[int, str]]] = ()
    """Weights that several stages hold."""


def parallelise(
    task: TrainTask,
    build: Callable[[], nn.Module],
    plan: ParallelPlan,
    mesh: Mesh,
    axes: Axes,
    example: Any = None,
) -> ParallelModel:
    """The model that `build` makes, as `plan` runs it on this rank. All ranks call it.

    `build` must make the same weights on every rank, on the CPU. Where each rank keeps a part only, the ranks of a node
    build one after another, so that the node holds one whole model at a time. `example`, one collated sample, is for
    pipelines. Raises ConfigError and PlanError for what cannot be split as the plan says, and what user code raises.
    """
    setting = _Setting(task=task, plan=plan, mesh=mesh, axes=axes)
    is_split = plan.pp * plan.dp_shard * plan.tp > 1

    def make() -> _Part:
        return _part(setting, build(), example)

    part = _in_turn(mesh, make) if is_split else make()
    if is_split:
        _refuse_other_weights(mesh, part.fingerprint)
    return ParallelModel(
        inner=part.inner,
        engine=part.engine,
        axes=axes,
        autocast=autocast_of(plan, mesh.device),
        names=part.names,
        num_parameters=part.num_parameters,
        averages_itself=plan.dp_replicate > 1 and plan.dp_shard == 1 and plan.pp * plan.tp > 1,
        speaks=part.speaks,
        is_forward_shared=is_split,
        tied=tie(part.families, part.inner, plan, axes, mesh),
    )


def _in_turn(mesh: Mesh, work: Callable[[], _Part]) -> _Part:
    """`work`, by the ranks of a node one after another. What it raises on one rank ends it on all of them."""
    found: _Part | None = None
    error: Exception | None = None
    for turn in range(mesh.local_world_size):
        if turn == mesh.local_rank:
            try:
                found = work()
            except Exception as raised:  # noqa: BLE001  # the others are told first, who would wait for this rank
                error = raised
        failed = [rank for rank, has_failed in enumerate(mesh.gather(error is not None)) if has_failed]
        if error is not None:
            raise error
        if failed:
            raise PeerFailedError(f"rank {failed[0]} could not make its part of the model; this rank stops with it")
    assert found is not None, "every rank has its turn"
    return found


def _part(setting: _Setting, model: nn.Module, example: Any) -> _Part:
    layers = listed_layers(setting.task, model)
    _check(setting, model, layers)
    names = GlobalNames.of(model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    # DDP sends the weights of rank 0 to all: only where nothing is sent must they be compared.
    fingerprint = _fingerprint(model) if setting.plan.pp * setting.plan.dp_shard * setting.plan.tp > 1 else {}
    speaks = setting.axes.tp_rank == 0
    if setting.plan.pp == 1:
        inner, engine = _whole(setting, model, layers)
        return _Part(
            inner=inner,
            engine=engine,
            names=names,
            num_parameters=num_parameters,
            speaks=speaks,
            fingerprint=fingerprint,
        )
    assert layers is not None and example is not None, "checked before"
    inner, pipeline, families = _pipeline(setting, model, layers, example)
    return _Part(
        inner=inner,
        engine=pipeline,
        names=names,
        num_parameters=num_parameters,
        speaks=speaks and pipeline.has_output,
        fingerprint=fingerprint,
        families=families,
    )


@torch.no_grad()
def _fingerprint(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Two sums of each parameter, which other weights would not have."""
    return {
        name: (float(one.sum(dtype=torch.float64)), float(one.square().sum(dtype=torch.float64)))
        for name, one in model.named_parameters()
        if one.is_floating_point()
    }


def _refuse_other_weights(mesh: Mesh, fingerprint: Mapping[str, tuple[float, float]]) -> None:
    """Parts of different models would make no model. DDP sends rank 0's weights to all; here nothing is sent."""
    by_rank = mesh.gather(fingerprint)
    names = [name for name, sums in by_rank[0].items() if any(other.get(name) != sums for other in by_rank)]
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ConfigError(
            f"the ranks built the model with different weights ({names[0]}{others}). Draw them with torch, which is "
            "seeded alike on every rank; numpy and random must be seeded by your code."
        )


def _check(setting: _Setting, model: nn.Module, layers: Sequence[ListedLayer] | None) -> None:
    task, plan = setting.task, setting.plan
    facts = ModelFacts(
        num_layers=None if layers is None else len(layers),
        layer_names=() if layers is None else tuple(layer.name for layer in layers),
        has_batch_norm=has_batch_norm(model),
        has_tensor_parallel_plan=bool(task.tensor_parallel_plan),
        tensor_parallel_sizes=_sizes(task, model) if plan.tp > 1 else (),
        scalar_parameters=tuple(name for name, one in model.named_parameters() if one.ndim == 0),
    )
    if problems := model_problems(plan, facts):
        raise PlanError(problems)


def _sizes(task: TrainTask, model: nn.Module) -> tuple[int, ...]:
    return (*task.tensor_parallel_sizes, *split_sizes(model, task.tensor_parallel_plan or {}))


# --- Whole -----------------------------------------------------------------------------------------------------------


def _whole(setting: _Setting, model: nn.Module, layers: Sequence[ListedLayer] | None) -> tuple[nn.Module, WholeEngine]:
    plan, mesh, axes = setting.plan, setting.mesh, setting.axes
    model, layers = _synchronised(setting, model, layers)
    modules = [layer.module for layer in layers or ()]
    checkpoint_activations(modules, plan.activation_checkpointing)
    is_split = plan.dp_shard * plan.tp > 1
    called = model
    if not is_split:
        model.to(mesh.device)
        # The whole model at once gives the compiler most to work with; what is wrapped below is compiled by layers.
        called = torch.compile(model) if plan.compile else model  # type: ignore[assignment]
    if plan.tp > 1:
        _split_tensors(setting, model)
    if is_split and plan.compile:
        compile_layers(modules or [model])
    if plan.dp_shard > 1:
        shard(model, modules, plan, axes, mesh.device)
    is_ddp = axes.data_parallel_size > 1 and not is_split
    if is_ddp:
        called = _with_ddp(called, plan, mesh)
    engine = WholeEngine(
        setting.task,
        called,
        model,
        mesh,
        autocast=autocast_of(plan, mesh.device),
        unused="refuse" if is_ddp and not plan.find_unused_parameters else "alike" if plan.dp_shard > 1 else "allow",
    )
    return model, engine


def _synchronised(
    setting: _Setting, model: nn.Module, layers: Sequence[ListedLayer] | None
) -> tuple[nn.Module, Sequence[ListedLayer] | None]:
    """The model and its layers with BatchNorm over all ranks that hold the same part, where that was asked for."""
    axes = setting.axes
    if axes.data_parallel_size == 1 or not setting.plan.sync_batch_norm or not has_batch_norm(model):
        return model, layers
    converted = synchronise_batch_norm(model, setting.mesh.device, axes.data_group)
    return converted, listed_layers(setting.task, converted)


def _split_tensors(setting: _Setting, model: nn.Module) -> None:
    # A layer at a time goes to the device, and there only this rank's part of it stays.
    split_linears(model, setting.task.tensor_parallel_plan or {}, setting.axes.submesh("tp"))
    if setting.plan.dp_shard == 1:
        model.to(setting.mesh.device)


def _with_ddp(model: nn.Module, plan: ParallelPlan, mesh: Mesh) -> DistributedDataParallel:
    return DistributedDataParallel(
        model,
        device_ids=[mesh.device.index] if mesh.device.type == "cuda" else None,
        # Buffers are shared before they matter, not at each step.
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=plan.find_unused_parameters,
    )


# --- Pipelines -------------------------------------------------------------------------------------------------------


def _pipeline(
    setting: _Setting, model: nn.Module, layers: Sequence[ListedLayer], example: Any
) -> tuple[nn.Module, PipelineEngine, Sequence[Sequence[tuple[int, str]]]]:
    task, plan, mesh, axes = setting.task, setting.plan, setting.mesh, setting.axes
    if task.forward is not None:
        raise ConfigError(
            "the task has a forward of its own, but a pipeline calls the model's layers in turn. Put what it does into "
            "the layers, or use another strategy."
        )
    sample = checked_input(example)
    check_composition(task, model, layers, example)
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    # Two samples: BatchNorm takes no statistics of one.
    costs = boundary_shapes(layers, torch.cat((sample, sample))[:2])
    model, synchronised = _synchronised(setting, model, layers)
    layers = synchronised or layers
    split = split_layers(layers, costs, plan, axes)
    families = tied_families(layers, split)  # before anything replaces parameters by parts of them
    boundaries = [Boundary(shape=costs[numbers[-1]].shape[1:], dtype=dtype) for numbers in split.ranges]
    inner, stages = own_modules(layers, split)
    modules = [layers[index].module for number in split.own for index in split.ranges[number]]
    checkpoint_activations(modules, plan.activation_checkpointing)
    inner.to(mesh.device)
    if plan.tp > 1:
        _split_tensors(setting, inner)
    if plan.compile:
        compile_layers(modules)
    bodies = _bodies(setting, stages, boundaries)
    if plan.dp_shard > 1:
        for number, body in bodies.items():
            shard(body, [layers[index].module for index in split.ranges[number]], plan, axes, mesh.device)
    engine = PipelineEngine(
        bodies,
        boundaries,
        plan,
        axes,
        device=mesh.device,
        example=sample,
    )
    return inner, engine, families


def _bodies(setting: _Setting, stages: Mapping[int, nn.Module], boundaries: Sequence[Boundary]) -> dict[int, StageBody]:
    last = len(boundaries) - 1
    autocast = autocast_of(setting.plan, setting.mesh.device)
    return {
        number: StageBody(module, autocast, is_first=number == 0, output=None if number == last else boundaries[number])
        for number, module in stages.items()
    }
