"""Cases that run on ranks: train one step, and weigh what lies there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gangline.protocol.pulse import Pulse
from tests.distributed.training_cases import Recorder
from trainer.assembly import assemble_task
from trainer.loop import Surroundings, Training
from trainer.mesh import Mesh
from trainer.plan.training_plan import TrainingPlan
from trainer.recipes.registry import build_recipe
from trainer.stop import StopFlag


def weigh_states(mesh: Mesh, recipe: str, args: dict[str, Any], plan: TrainingPlan) -> tuple[int, int, int]:
    """(parameters, gradients, optimizer state) of this rank in bytes, as they lie in memory at the end of a step."""
    events = Recorder()
    task = dataclasses.replace(build_recipe(recipe, args), eval_data=None)
    subject = assemble_task(task, plan, mesh, events, {})
    found: list[tuple[int, int, int]] = []

    def weigh(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        gradients = [one.grad for one in parameters if one.grad is not None]
        found.append((_stored(subject.model.inner.parameters()), _stored(gradients), sum(map(_own, states))))

    subject.optimizer.register_step_post_hook(weigh)
    around = Surroundings(mesh=mesh, events=events, stop=StopFlag({}), pulse=Pulse(None), say=lambda text: None)
    Training(subject, around).run()
    return found[0]


def _stored(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each once: the padding of shards counts."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in map(_local, tensors)}
    return sum(storages.values())


def _own(tensor: torch.Tensor) -> int:
    local = _local(tensor)
    return local.numel() * local.element_size()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
