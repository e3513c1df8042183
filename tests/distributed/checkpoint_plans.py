"""Ways to split a small model over ranks, for the tests of checkpoints: by torch's own functions, not the trainer's.

What a rank must hold is made by splitting a whole model that has the wanted values: nothing here knows of offsets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.checkpoint_cases import Told, plan_for
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.state import GlobalNames, local_part, model_values
from trainer.mesh import Mesh

WORLD = 4
LEARNING_RATE = 0.125
"""Of the run that saves; one that has not restored has another."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """All groups of ranks that the ways to split use. Made once per process, on every rank in the same order."""

    meshes: dict[int, Mesh | None]
    """The first so many ranks as a mesh of their own; None where this rank is not among them."""
    lines: dict[int, DeviceMesh]
    """The same as device meshes."""
    square: DeviceMesh
    """2 × 2, "outer" and "inner"."""


@lru_cache
def _groups(rank: int) -> Groups:
    meshes: dict[int, Mesh | None] = {}
    lines: dict[int, DeviceMesh] = {}
    for size in range(1, WORLD + 1):
        members = list(range(size))
        groups = {name: dist.new_group(members, backend="gloo") for name in ("control", "background", "node_group")}
        mesh = Mesh(
            rank=rank,
            local_rank=rank,
            world_size=size,
            local_world_size=size,
            node_rank=0,
            num_nodes=1,
            device=torch.device("cpu"),
            **groups,
        )
        meshes[size] = mesh if rank < size else None
        lines[size] = DeviceMesh("cpu", members)
    return Groups(meshes=meshes, lines=lines, square=init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")))


def groups_of(mesh: Mesh) -> Groups:
    return _groups(mesh.rank)


# --- Models ----------------------------------------------------------------------------------------------------------


def layers_with_values(seed: int) -> nn.Sequential:
    """float64, every parameter and buffer different. Layer 3 has 5 rows, which no number of ranks divides."""
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5), nn.Linear(5, 8, bias=False)
    )
    return _with_values(model, seed)


def tied_with_values(seed: int) -> nn.Sequential:
    """A head that shares the 7 rows of its weight with the embedding."""
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    return _with_values(nn.Sequential(OrderedDict(embedding=embedding, middle=nn.Linear(4, 4), head=head)), seed)


def _with_values(model: nn.Sequential, seed: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model.double()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.rand(value.shape, generator=generator, dtype=torch.float64) * 100)
    return model


# --- Ways to split ---------------------------------------------------------------------------------------------------

Split = Callable[[nn.Sequential, Groups, int], nn.Module]
"""(whole model, groups, rank) to what the rank has of it."""


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As a plan does: each layer that has parameters, then what is left."""
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _stage(model: nn.Sequential, number: int, *, first_of_last: int) -> nn.Module:
    """The layers of a stage under their names in the whole model."""
    named = list(model.named_children())
    return nn.Sequential(OrderedDict(named[:first_of_last] if number == 0 else named[first_of_last:]))


def _replicated(model: nn.Sequential, groups: Groups, rank: int) -> nn.Module:
    mesh = groups.meshes[2]
    assert mesh is not None
    return DistributedDataParallel(model, process_group=mesh.control)


def _sharded_over(size: int) -> Split:
    return lambda model, groups, rank: _shard(model, groups.lines[size])


def _sharded_as_one(model: nn.Sequential, groups: Groups, rank: int) -> nn.Module:
    fully_shard(model, mesh=groups.lines[4])
    return model


def _tensor_and_sharded(model: nn.Sequential, groups: Groups, rank: int) -> nn.Module:
    parallelize_module(model, groups.square["inner"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return _shard(model, groups.square["outer"])


def _two_stages(model: nn.Sequential, groups: Groups, rank: int) -> nn.Module:
    return _stage(model, rank, first_of_last=2)


def _sharded_stages(model: nn.Sequential, groups: Groups, rank: int) -> nn.Module:
    return _shard(_stage(model, rank // 2, first_of_last=2), groups.square["inner"])


def _tensor_stages(model: nn.Sequential, groups: Groups, rank: int) -> nn.Module:
    """The head of the tied model is split over two ranks, the embedding is not: one weight, two ways."""
    stage = _stage(model, rank // 2, first_of_last=2)
    return stage if rank < 2 else parallelize_module(stage, groups.square["inner"], {"head": ColwiseParallel()})


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to split a model."""

    num_ranks: int
    split: Split


WAYS: dict[str, Way] = {
    "whole": Way(num_ranks=1, split=lambda model, groups, rank: model),
    "replicated": Way(num_ranks=2, split=_replicated),
    "sharded": Way(num_ranks=4, split=_sharded_over(4)),
    "sharded_2": Way(num_ranks=2, split=_sharded_over(2)),
    "sharded_3": Way(num_ranks=3, split=_sharded_over(3)),
    "sharded_as_one": Way(num_ranks=4, split=_sharded_as_one),
    "hybrid": Way(num_ranks=4, split=lambda model, groups, rank: _shard(model, groups.square)),
    "tensor": Way(num_ranks=4, split=_tensor_and_sharded),
    "stages": Way(num_ranks=2, split=_two_stages),
    "sharded_stages": Way(num_ranks=4, split=_sharded_stages),
    "tensor_stages": Way(num_ranks=4, split=_tensor_stages),
}
MAKERS: dict[str, Callable[[int], nn.Sequential]] = {"layers": layers_with_values, "tied": tied_with_values}


# --- A run under one of them -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a rank has of a model and its AdamW."""

    mesh: Mesh
    model: nn.Module
    optimizer: torch.optim.AdamW
    names: GlobalNames

    def checkpointer(self, root: Path, told: Told | None = None, **plan: Any) -> Checkpointer:
        told = told or Told()
        return Checkpointer(
            self.mesh,
            plan_for(root, **plan),
            names=self.names,
            emit=told.emit,
            accepted_bytes=lambda: told.accepted,
            note=told.notes.append,
        )

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By the name that the parameter has here."""
        return {name: one for name, one in model_values(self.model).items() if isinstance(one, nn.Parameter)}


def start(mesh: Mesh, maker: str, way: str, seed: int, *, lr: float = 0.01) -> Run | None:
    """A run that has made no step; None on ranks that the way does not use."""
    groups = groups_of(mesh)
    place = groups.meshes[WAYS[way].num_ranks]
    if place is None:
        return None
    whole = MAKERS[maker](seed)
    names = GlobalNames.of(whole)
    model = WAYS[way].split(whole, groups, mesh.rank)
    return Run(mesh=place, model=model, optimizer=_adamw(model, lr), names=names)


def trained(mesh: Mesh, maker: str, way: str) -> Run | None:
    """A run whose weights and moments are those that `maker` gives for the seeds 1, 2 and 3; its last step was 7."""
    run = start(mesh, maker, way, seed=1, lr=LEARNING_RATE)
    if run is None:
        return None
    for parameter in run.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    run.optimizer.step()
    for moment, seed in (("weight", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
        wanted = expected(mesh, maker, way, seed)
        for name, parameter in run.parameters.items():
            state = run.optimizer.state[parameter]
            local_part(parameter.detach() if moment == "weight" else state[moment]).copy_(local_part(wanted[name]))
            state["step"].fill_(7.0)
    return run


def expected(mesh: Mesh, maker: str, way: str, seed: int) -> dict[str, torch.Tensor]:
    """What this rank has, by name, of a whole model with the values of `seed`."""
    model = WAYS[way].split(MAKERS[maker](seed), groups_of(mesh), mesh.rank)
    return {name: value.detach() for name, value in model_values(model).items()}


def problems_of(run: Run, mesh: Mesh, maker: str, way: str) -> list[str]:
    """What of a restored run is not what `trained` made, bit by bit, and what its next step then does otherwise."""
    problems = [
        name
        for name, wanted in expected(mesh, maker, way, 1).items()
        if not is_same(model_values(run.model)[name].detach(), wanted)
    ]
    for moment, seed in (("exp_avg", 2), ("exp_avg_sq", 3)):
        wanted = expected(mesh, maker, way, seed)
        for name, parameter in run.parameters.items():
            state = run.optimizer.state[parameter]
            if not is_same(state[moment], wanted[name]) or state["step"].item() != 7.0:
                problems.append(f"{moment} of {name}")
    rates = {(group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups}
    problems += [f"settings {one}" for one in rates if one not in {(LEARNING_RATE, 0.5), (LEARNING_RATE, 0.0)}]
    return problems + _problems_of_a_step(run, mesh, maker, way)


def _problems_of_a_step(run: Run, mesh: Mesh, maker: str, way: str) -> list[str]:
    gradients = expected(mesh, maker, way, 4)
    for name, parameter in run.parameters.items():
        parameter.grad = gradients[name]
    run.optimizer.step()
    whole = MAKERS[maker](1)
    alone = Run(mesh=run.mesh, model=whole, optimizer=_adamw(whole, LEARNING_RATE), names=run.names)
    moments = {seed: model_values(MAKERS[maker](seed)) for seed in (2, 3, 4)}
    for name, parameter in alone.parameters.items():
        parameter.grad = moments[4][name].detach()
        alone.optimizer.state[parameter] = {
            "step": torch.tensor(7.0), "exp_avg": moments[2][name].detach(), "exp_avg_sq": moments[3][name].detach()
        }  # fmt: skip
    alone.optimizer.step()
    model = WAYS[way].split(whole, groups_of(mesh), mesh.rank)
    stepped = {name: value for name, value in model_values(model).items() if isinstance(value, nn.Parameter)}
    return [
        f"{name} after a step"
        for name, one in run.parameters.items()
        if not is_same(one.detach(), stepped[name].detach())
    ]


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are split alike and this rank has the same of both."""
    if isinstance(one, DTensor) != isinstance(other, DTensor) or one.shape != other.shape:
        return False
    if isinstance(one, DTensor) and isinstance(other, DTensor) and one.placements != other.placements:
        return False
    return one.dtype == other.dtype and torch.equal(local_part(one), local_part(other))


def _adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Groups as a plan makes them: by weight decay, and by kind of tensor, since one call takes only one kind."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault((parameter.ndim > 1, isinstance(parameter, DTensor)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": 0.5 if is_matrix else 0.0, "foreach": not is_split}
            for (is_matrix, is_split), members in groups.items()
        ],
        lr=lr,
    )
