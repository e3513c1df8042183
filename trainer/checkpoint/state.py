"""Model and optimizer as one flat mapping with global names, and back: the same for every layout of ranks.

    model.<name>                        a parameter or buffer
    optimizer.state.<parameter>/<name>  a moment, a step counter
    optimizer.group.<parameter>         the settings of the group that a parameter is in

A rank has what it has: DTensors of which it holds a part, plain tensors, and only the layers of its pipeline stages,
all under the names of the whole model.

Both are asked by `state_dict()`. torch's `get_model_state_dict` looks each key up in the module again, and its
`get_optimizer_state_dict` fills an empty AdamW by a step with zero gradients, after which its step counter is 1 and the
first real update another one. Not for: what of it a rank writes (`saving`) or reads (`restoring`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
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
_MANNER: Final = ("foreach", "fused", "capturable", "differentiable")
"""Settings of how an optimizer computes, not what. They follow the kind of its tensors: they are the running one's."""


@dataclass(frozen=True, kw_only=True)
class GlobalNames:
    """What the state of a whole model is made of. A rank that holds a part of the model cannot tell by itself."""

    descriptions: Mapping[str, str]
    """Every key of its state_dict, with what it is: `float32[64, 128]`."""
    first_name: Mapping[str, str] = field(default_factory=dict)
    """Each further name of a shared parameter, and its first one, under which the optimizer's state of it is kept."""

    @classmethod
    def of(cls, model: nn.Module) -> GlobalNames:
        """Of a model as it is before it is split (on the meta device, say). Reads no values."""
        first: dict[int, str] = {}
        values = model_values(model)
        further = {name: one for name, value in values.items() if (one := first.setdefault(id(value), name)) != name}
        return cls(
            descriptions={name: description(value) for name, value in values.items()},
            first_name={name: one for name, one in further.items() if isinstance(values[name], nn.Parameter)},
        )

    def first(self, name: str) -> str:
        """First name of the parameter that has this name."""
        return self.first_name.get(name, name)


def model_values(model: nn.Module) -> dict[str, Any]:
    """Parameters (themselves) and buffers of the model, or of the part that is here, by global name.

    A global name is the one in the model as it was written, without what DDP and torch.compile put before it. FSDP's
    parameters are their shards: it takes back what it gathered for a forward.
    """
    names = _global_names(model)
    return {names(key): value for key, value in model.state_dict(keep_vars=True).items()}


def flat_state(model: nn.Module, optimizer: torch.optim.Optimizer, names: GlobalNames | None = None) -> dict[str, Any]:
    """All that this rank has. Tensors share memory with model and optimizer. Changes neither. No communication.

    `names` are the whole model's; None: the model is whole. A parameter's state is under its first name in the whole
    model, also where only another name of it is. Where a shared parameter is here twice (the first and the last stage
    on one rank), each copy kept equal, the one of the first name is told. Raises ConfigError.
    """
    values = model_values(model)
    state = {
        MODEL + name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values.items()
    }
    own = optimizer_names(values, optimizer)
    firsts = own if names is None else [names.first(name) for name in own]
    packed = optimizer.state_dict()
    told: dict[str, Any] = {}
    copies: dict[str, Any] = {}
    for index, moments in packed["state"].items():
        if not isinstance(index, int):
            raise ConfigError(
                f"{optimizer_class(optimizer)} keeps state under {index!r}, which is no parameter: it cannot be saved. "
                "Keep it with a parameter or in a parameter group."
            )
        target = told if firsts[index] == own[index] else copies
        target |= {f"{STATE}{firsts[index]}{_SEPARATOR}{name}": value for name, value in moments.items()}
    for group in packed["param_groups"]:
        settings = {name: _detached(value) for name, value in group.items() if name not in _NOT_SETTINGS}
        for index in group["params"]:
            (told if firsts[index] == own[index] else copies)[GROUP + firsts[index]] = settings
    return state | copies | told


def written_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank writes of its `flat_state`: not the optimizer's state of a shared parameter whose first name is
    elsewhere. The rank that has it writes the same values, and may have split them in another way."""
    return {key: value for key, value in state.items() if key.startswith(MODEL) or MODEL + parameter_of(key) in state}


def parameter_of(key: str) -> str:
    """Name of the parameter that an optimizer's key belongs to."""
    return key.removeprefix(GROUP) if key.startswith(GROUP) else key.removeprefix(STATE).rpartition(_SEPARATOR)[0]


def renamed(key: str, parameter: str) -> str:
    """An optimizer's key as that of another parameter."""
    return (
        GROUP + parameter if key.startswith(GROUP) else STATE + parameter + _SEPARATOR + key.rpartition(_SEPARATOR)[2]
    )


def apply_state(state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give model and optimizer a state that is split as theirs is. No communication.

    It has a key for each parameter that is here, by its name here (of `flat_state`: by its first name). Weights are
    copied into place; the optimizer may keep the tensors passed. `group_conflict` must have found none.
    """
    global_name = _global_names(model)
    raw_names = {global_name(key): key for key in model.state_dict()}
    own = optimizer_names(model_values(model), optimizer)
    groups = [_restored_group(group, own, state) for group in optimizer.state_dict()["param_groups"]]
    weights = {name.removeprefix(MODEL): value for name, value in state.items() if name.startswith(MODEL)}
    model.load_state_dict({raw_names.get(name, name): value for name, value in weights.items()}, strict=True)
    indexes = {name: index for index, name in enumerate(own)}
    moments: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith(STATE):
            name = key.removeprefix(STATE).rpartition(_SEPARATOR)[2]
            moments.setdefault(indexes[parameter_of(key)], {})[name] = value
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def group_conflict(state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Why the optimizer's groups cannot have the settings in `state` (as for `apply_state`): parameters that share them
    no longer could. None: they can."""
    parameters = optimizer_names(model_values(model), optimizer)
    for group in optimizer.state_dict()["param_groups"]:
        members = [parameters[index] for index in group["params"]]
        for member in members[1:]:
            first, other = _settings(state, members[0]), _settings(state, member)
            if first != other:
                return (
                    f"the optimizer has {members[0]} and {member} in one group, but the checkpoint has them in groups "
                    f"with other settings: {first} and {other}; group the parameters as they were"
                )
    return None


def optimizer_names(values: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> list[str]:
    """Name that each of the optimizer's parameters has here, in the order of its groups. `values` are the model's.

    Of several names here the first. Raises ConfigError.
    """
    known: dict[int, str] = {}
    for name, value in values.items():
        known.setdefault(id(value), name)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unknown = sum(id(parameter) not in known for parameter in parameters)
    if unknown:
        raise ConfigError(
            f"{unknown} of the {len(parameters)} parameters of {optimizer_class(optimizer)} are not the model's, so a "
            "checkpoint could not name them. Make the optimizer from the model that is trained."
        )
    return [known[id(parameter)] for parameter in parameters]


def optimizer_class(optimizer: torch.optim.Optimizer) -> str:
    """Class of an optimizer, with its module: state of one is nothing to another."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def description(value: Any) -> str:
    """A value in a word: `float32[64, 128]`, or `object`."""
    return tensor_description(value.dtype, value.shape) if isinstance(value, torch.Tensor) else OBJECT


def tensor_description(dtype: torch.dtype, shape: torch.Size) -> str:
    """`float32[64, 128]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: of a DTensor its shard, in the same memory; of a plain one all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _restored_group(group: dict[str, Any], names: list[str], state: Mapping[str, Any]) -> dict[str, Any]:
    """A group of the running optimizer with the settings that its parameters were saved with."""
    if not group["params"]:
        return group
    own = {name: value for name, value in group.items() if name in _NOT_SETTINGS or name in _MANNER}
    return {**_settings(state, names[group["params"][0]]), **own}


def _settings(state: Mapping[str, Any], parameter: str) -> dict[str, Any]:
    return {name: value for name, value in state[GROUP + parameter].items() if name not in _MANNER}


def _global_names(model: nn.Module) -> Callable[[str], str]:
    """What makes a key of the model's own state_dict a global name."""
    wrapped = {
        f"{path}.{attribute}" if path else attribute
        for path, module in model.named_modules(remove_duplicate=False)
        for wrapper, attribute in _WRAPPERS
        if isinstance(module, wrapper)
    }

    def name(key: str) -> str:
        parts = key.split(".") if wrapped else [key]
        return ".".join(part for index, part in enumerate(parts) if ".".join(parts[: index + 1]) not in wrapped)

    return name


def _detached(value: Any) -> Any:
    return value.detach().to("cpu") if isinstance(value, torch.Tensor) else value
