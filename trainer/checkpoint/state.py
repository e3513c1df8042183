"""Model and optimizer as one flat mapping with global names, and back: the same for every layout of ranks.

    model.<name>                        a parameter or buffer
    optimizer.state.<parameter>/<name>  a moment, a step counter
    optimizer.group.<parameter>         the settings of the group that a parameter is in

The optimizer is asked by `state_dict()`, not by torch's `get_optimizer_state_dict`: that one fills an empty AdamW by a
step with zero gradients, after which its step counter is 1 and the first real update another one.
Not for: tensors that are split over ranks; they come with the strategies that split them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from trainer.failure import ConfigError

MODEL: Final = "model."
STATE: Final = "optimizer.state."
GROUP: Final = "optimizer.group."
OBJECT: Final = "object"
"""Description of a value that is not a tensor."""
_SEPARATOR: Final = "/"
_WRAPPERS: Final = ((DistributedDataParallel, "module"), (torch._dynamo.eval_frame.OptimizedModule, "_orig_mod"))
_NOT_SETTINGS: Final = ("params", "param_names")
"""What of a group says which parameters it has: that is the running optimizer's."""


def flat_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that is saved. Tensors share memory with model and optimizer. Changes neither. Raises ConfigError."""
    state: dict[str, Any] = {MODEL + name: value for name, value in get_model_state_dict(model).items()}
    names = optimizer_names(model, optimizer)
    packed = optimizer.state_dict()
    for index, values in packed["state"].items():
        if not isinstance(index, int):
            raise ConfigError(
                f"{optimizer_class(optimizer)} keeps state under {index!r}, which is no parameter: it cannot be saved. "
                "Keep it with a parameter or in a parameter group."
            )
        for name, value in values.items():
            state[f"{STATE}{names[index]}{_SEPARATOR}{name}"] = value
    for group in packed["param_groups"]:
        settings = {name: _detached(value) for name, value in group.items() if name not in _NOT_SETTINGS}
        for index in group["params"]:
            state[GROUP + names[index]] = settings
    return state


def apply_state(state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give model and optimizer what `flat_state` took from theirs. The optimizer may keep the tensors passed.

    Raises ConfigError, before anything is changed, when parameters that shared their settings no longer can.
    """
    names = optimizer_names(model, optimizer)
    groups = [_restored_group(group, names, state) for group in optimizer.state_dict()["param_groups"]]
    weights = {key.removeprefix(MODEL): value for key, value in state.items() if key.startswith(MODEL)}
    set_model_state_dict(model, weights, options=StateDictOptions(strict=True))
    indexes = {name: index for index, name in enumerate(names)}
    moments: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith(STATE):
            parameter, _, name = key.removeprefix(STATE).rpartition(_SEPARATOR)
            moments.setdefault(indexes[parameter], {})[name] = value
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def wanted_keys(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What a checkpoint for them must hold, key to description: weights, and the parameters that are optimized.

    Not the optimizer's state: an optimizer that has made no step has none.
    """
    weights = {MODEL + name: description(value) for name, value in get_model_state_dict(model).items()}
    return weights | {GROUP + name: OBJECT for name in optimizer_names(model, optimizer)}


def optimizer_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Global name of each of the optimizer's parameters, in the order of its groups. Raises ConfigError."""
    names = global_names(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unknown = sum(parameter not in names for parameter in parameters)
    if unknown:
        raise ConfigError(
            f"{unknown} of the {len(parameters)} parameters of {optimizer_class(optimizer)} are not the model's, so a "
            "checkpoint could not name them. Make the optimizer from the model that is trained."
        )
    return [names[parameter] for parameter in parameters]


def global_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Name of each parameter without what DDP and torch.compile put before it; the first name of a shared one."""
    names: dict[nn.Parameter, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for wrapper, attribute in _WRAPPERS:
            if isinstance(module, wrapper):
                visit(getattr(module, attribute), prefix)
                return
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(parameter, prefix + name)
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.")

    visit(model, "")
    return names


def optimizer_class(optimizer: torch.optim.Optimizer) -> str:
    """Class of an optimizer, with its module: state of one is nothing to another."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def description(value: Any) -> str:
    """A value in a word: `float32[64, 128]`, or `object`."""
    return tensor_description(value.dtype, value.shape) if isinstance(value, torch.Tensor) else OBJECT


def tensor_description(dtype: torch.dtype, shape: torch.Size) -> str:
    """`float32[64, 128]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _restored_group(group: dict[str, Any], names: list[str], state: Mapping[str, Any]) -> dict[str, Any]:
    """A group of the running optimizer with the settings that its parameters were saved with."""
    own = {name: value for name, value in group.items() if name in _NOT_SETTINGS}
    members = [names[index] for index in group["params"]]
    if not members:
        return group
    settings = state[GROUP + members[0]]
    for member in members[1:]:
        if state[GROUP + member] != settings:
            raise ConfigError(
                f"the optimizer has {members[0]} and {member} in one group, but the checkpoint has them in groups with "
                f"other settings: {settings} and {state[GROUP + member]}. Group the parameters as they were."
            )
    return {**settings, **own}


def _detached(value: Any) -> Any:
    return value.detach().to("cpu") if isinstance(value, torch.Tensor) else value
