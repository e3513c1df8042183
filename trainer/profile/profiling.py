"""Counts what a task's model costs from shapes alone: nothing is computed and no weights take memory.

The model is built on the meta device and run forward once or twice per precision with fake tensors, layer by layer,
while autograd's hooks tell what is saved for backward. Not for: what a plan makes of it (`trainer.plan.estimate`), or
recipes where torch is missing (`trainer.plan.recipe_profiles`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.data.batches import collate_of, is_iterable_style
from trainer.failure import ConfigError
from trainer.parallel.layers import ListedLayer, listed_layers
from trainer.plan.model_profile import ActivationProfile, LayerProfile, ModelProfile, ParameterProfile
from trainer.profile.kernels import Counter, KernelsOf
from trainer.task import TrainTask, inputs_of, target_of

_FEW, _MORE = 2, 3
"""Samples of the two runs whose difference is what one sample costs. BatchNorm does not take a single one."""
_FORWARD_AND_BACKWARD: Final = 3
"""The backward pass computes twice what the forward pass does."""
_SPLIT_DIMS: Final[dict[str, dict[str, int]]] = {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1}}
_PLAIN: Final = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_FILLING: Final = ("normal_", "uniform_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "trunc_normal_")
_WAY_OUT: Final = "Give parallel.strategy instead of auto."


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Bytes of one run of a layer."""

    saved: int
    selective: int
    input: int
    output: int
    flops: float


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A fake copy of a task's model, and how it is called."""

    task: TrainTask
    model: nn.Module
    layers: tuple[ListedLayer, ...]
    """Empty: the model is called whole."""
    batches: Mapping[int, Any]
    """Fake ones, by their number of samples."""
    kernels: str
    notes: list[str]
    representatives: tuple[nn.Module, ...]
    """For each layer the first one that saves the same. Only these are run: billions of parameters are mostly the same
    few layers again."""

    @property
    def named(self) -> list[tuple[str, nn.Module]]:
        """The layers; a model that lists none is one."""
        return [(layer.name, layer.module) for layer in self.layers] or [("model", self.model)]


def profile_task(task: TrainTask, *, name: str = "", kernels: str = "cuda") -> ModelProfile:
    """The profile of `task`. Reads one sample of its data; runs user code. `kernels`: see `model_profile.KERNELS`.

    Raises ConfigError for a model that cannot be followed on shapes alone, and what user code raises.
    """
    notes: list[str] = []
    original = _built(task, notes)
    samples = {num: _collated(task, num) for num in (_FEW, _MORE)}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _without_memory(original, mode).train()
    with mode:
        layers = _listed(task, model, notes)
        subject = _Subject(
            task=task,
            model=model,
            layers=layers,
            batches={num: tree_map_only(torch.Tensor, mode.from_tensor, batch) for num, batch in samples.items()},
            kernels=kernels,
            notes=notes,
            representatives=_representatives([layer.module for layer in layers]),
        )
        subject, trial = _tried(subject)
        return _profile(subject, trial, name or type(original).__name__)


def _profile(subject: _Subject, trial: list[_Seen], name: str) -> ModelProfile:
    splits = _split_linears(subject)
    parameters = _parameters(subject, splits)
    sizes = _tensor_parallel_sizes(subject.task, splits)
    fp32 = _Counted.of(subject, "fp32", few=trial)
    bf16 = _Counted.of(subject, "bf16")
    buffers = [sum(_num_bytes(buffer) for buffer in layer.buffers()) for _, layer in subject.named]
    shares = _split_shares(subject, splits, {"fp32": fp32, "bf16": bf16})
    layers = tuple(
        LayerProfile(
            name=layer_name,
            parameters=parameters[index],
            buffer_bytes=buffers[index],
            fp32=fp32.activations(index, shares.get("fp32")),
            bf16=bf16.activations(index, shares.get("bf16")),
            flops_per_sample=_FORWARD_AND_BACKWARD * fp32.few[index].flops / _FEW,
        )
        for index, (layer_name, _) in enumerate(subject.named)
    )
    return ModelProfile(
        name=name,
        layers=layers,
        can_split=bool(subject.layers),
        has_tensor_parallel_plan=bool(shares),
        tensor_parallel_sizes=sizes if shares else (),
        has_batch_norm=any(isinstance(module, _BatchNorm) for module in subject.model.modules()),
        loss_bytes=fp32.per_sample(-1, "saved"),
        loss_bytes_bf16=bf16.per_sample(-1, "saved"),
        kernels=subject.kernels,
        notes=tuple(subject.notes),
    )


# --- A model without memory ------------------------------------------------------------------------------------------


def _built(task: TrainTask, notes: list[str]) -> nn.Module:
    if isinstance(task.model, nn.Module):
        return task.model
    try:
        with torch.device("meta"), _NothingFilled():
            model = task.model()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        notes.append(
            f"the model had to be built in memory to be counted: on the meta device it fails with {error!s:.200}"
        )
        model = task.model()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the task's model function returned {type(model).__name__}; return a torch.nn.Module.")
    return model


class _NothingFilled(TorchFunctionMode):
    """Inside it tensors are not filled in: without memory there is nothing to fill, but it would take its time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")
        if getattr(func, "__name__", "") in _FILLING and isinstance(filled, torch.Tensor) and filled.is_meta:
            return filled
        return func(*args, **kwargs)


def _without_memory(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of `model` whose tensors are fake; what is shared stays shared."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _fake_of(tensor, mode)
    return copy.deepcopy(model, memo)


def _fake_of(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    fake = FakeTensor(mode, shape, torch.device("cpu"))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else fake


def _collated(task: TrainTask, num_samples: int) -> Any:
    sample = next(iter(task.data)) if is_iterable_style(task.data) else task.data[0]
    return collate_of(task.collate)([sample] * num_samples)


# --- Layers and parameters -------------------------------------------------------------------------------------------


def _listed(task: TrainTask, model: nn.Module, notes: list[str]) -> tuple[ListedLayer, ...]:
    """The layers that the whole model is made of; none where they are not known."""
    if task.forward is not None:
        return ()
    try:
        return listed_layers(task, model) or ()
    except ConfigError as error:
        notes.append(f"it counts as one layer: {error}")
        return ()


def _tried(subject: _Subject) -> tuple[_Subject, list[_Seen]]:
    """(`subject`, or as one layer where its layers cannot be called in turn, what the first run saw). Raises
    ConfigError when the whole model cannot be run, either."""
    failure: Exception | None = None
    for tried in dict.fromkeys((subject.layers, ())):
        subject = replace(subject, layers=tried)
        try:
            seen = _run(subject, _FEW, "fp32")
        except Exception as error:  # noqa: BLE001  # user code on tensors without values raises anything
            failure = failure or error
        else:
            if failure is not None:
                subject.notes.append(f"it counts as one layer: its layers called in turn raise {failure!s:.300}")
            return subject, seen
    assert failure is not None, "it did not run"
    raise ConfigError(
        f"the model cannot be counted from shapes alone: {type(failure).__name__}: {failure!s:.500}. Its forward may "
        f"look at values (an if, .item()). {_WAY_OUT}"
    ) from failure


def _representatives(layers: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    first: dict[Any, nn.Module] = {}
    return tuple(first.setdefault(_likeness(layer), layer) for layer in layers)


def _likeness(layer: nn.Module) -> tuple[Any, ...]:
    """Equal for layers that save the same: same types, settings and shapes, whatever the numbers in their weights."""
    found: list[Any] = []
    for name, module in layer.named_modules():
        found += [name, type(module)]
        for key, value in sorted(vars(module).items()):
            if _is_plain(value):
                found += [key, repr(value)]
            elif key in ("_parameters", "_buffers"):
                found += [(inner, None if one is None else _kind(one)) for inner, one in value.items()]
            elif isinstance(value, torch.Tensor):
                found += [key, _kind(value)]
            elif key != "_modules" and value not in ({}, set()):
                found += [key, id(value)]
    return tuple(found)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, _PLAIN)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _split_linears(subject: _Subject) -> dict[nn.Linear, str]:
    plan = subject.task.tensor_parallel_plan or {}
    found = {}
    for name, module in subject.model.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)
        if isinstance(module, nn.Linear) and style in _SPLIT_DIMS:
            found[module] = style
    return found


def _tensor_parallel_sizes(task: TrainTask, splits: Mapping[nn.Linear, str]) -> tuple[int, ...]:
    widths = {linear.out_features if style == "colwise" else linear.in_features for linear, style in splits.items()}
    return tuple(sorted(widths | set(task.tensor_parallel_sizes)))


def _parameters(subject: _Subject, splits: Mapping[nn.Linear, str]) -> list[tuple[ParameterProfile, ...]]:
    dims = {getattr(linear, key): dim for linear, style in splits.items() for key, dim in _SPLIT_DIMS[style].items()}
    names = {one: name for name, one in subject.model.named_parameters()}
    found: set[nn.Parameter] = set()
    by_layer = []
    for _, layer in subject.named:
        by_layer.append(
            tuple(
                ParameterProfile(
                    name=names[one],
                    shape=tuple(one.shape),
                    element_size=one.element_size(),
                    split_dim=dims.get(one),
                    is_trainable=one.requires_grad,
                    is_shared=one in found,
                )
                for one in layer.parameters()
            )
        )
        found.update(layer.parameters())
    return by_layer


# --- Counting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """What each layer (last: the loss) was seen to keep with few samples and with more."""

    few: list[_Seen]
    more: list[_Seen]

    @staticmethod
    def of(subject: _Subject, precision: str, few: list[_Seen] | None = None) -> _Counted:
        """`few`: a run that was made already."""
        return _Counted(few=few or _run(subject, _FEW, precision), more=_run(subject, _MORE, precision))

    def per_sample(self, index: int, key: str) -> int:
        """What a sample adds."""
        less, more = getattr(self.few[index], key), getattr(self.more[index], key)
        return max(0, (more - less) // (_MORE - _FEW))

    def fixed(self, index: int) -> int:
        """What is saved however many samples there are."""
        return max(0, self.few[index].saved - _FEW * self.per_sample(index, "saved"))

    def activations(self, index: int, shares: Sequence[int] | None) -> ActivationProfile:
        """As the profile has it; `shares`: what tensor parallelism divides, by layer."""
        saved = self.per_sample(index, "saved")
        return ActivationProfile(
            saved=saved,
            saved_split=0 if shares is None else min(saved, shares[index]),
            saved_fixed=self.fixed(index),
            selective=self.per_sample(index, "selective"),
            input=self.per_sample(index, "input"),
            output=self.per_sample(index, "output"),
        )


def _run(subject: _Subject, num_samples: int, precision: str) -> list[_Seen]:
    """One forward of model and loss: what each layer keeps, and last what the loss keeps."""
    batch = subject.batches[num_samples]
    counter = Counter([*subject.model.parameters(), *subject.model.buffers()])
    seen: list[_Seen] = []
    with ExitStack() as around:
        around.enter_context(torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"))
        around.enter_context(KernelsOf(subject.kernels))
        around.enter_context(counter)
        if subject.layers:
            output = _run_layers(subject.representatives, inputs_of(batch), counter, seen)
        else:
            forward = subject.task.forward
            output = forward(subject.model, batch) if forward else subject.model(inputs_of(batch))
            seen.append(_taken(counter, inputs_of(batch), output))
        subject.task.loss(output, target_of(batch))
        seen.append(_taken(counter, output, None))
    return seen


def _run_layers(layers: Sequence[nn.Module], values: Any, counter: Counter, seen: list[_Seen]) -> Any:
    """Call `layers` in turn, of the same one with equal inputs only the first."""
    done: dict[Any, tuple[_Seen, Any, bool]] = {}
    for layer in layers:
        key = (layer, values.shape, values.dtype, counter.has_saved(values))
        if key in done:
            once, output, was_saved = done[key]
            # A view: autocast keeps copies of leaves, and this stands for something computed.
            values = torch.empty_like(output).requires_grad_(output.requires_grad).view_as(output)
            if was_saved:
                counter.ignore(values)
        else:
            torch.clear_autocast_cache()  # the same weights stand for those of another layer
            before, values = values, layer(values)
            once = _taken(counter, before, values)
            done[key] = (once, values, counter.has_saved(values))
        seen.append(once)
    return values


def _taken(counter: Counter, before: Any, after: Any) -> _Seen:
    saved, kept, flops = counter.take()
    given = _bytes_of(before)
    return _Seen(saved=saved, selective=kept + given, input=given, output=_bytes_of(after), flops=flops)


def _split_shares(
    subject: _Subject, splits: Mapping[nn.Linear, str], whole: Mapping[str, _Counted]
) -> dict[str, list[int]]:
    """By precision and layer, what of the bytes saved per sample tensor parallelism divides: twice what is missing with
    half of each split layer. {}: nothing is split. Spoils the model: comes last."""
    if not splits:
        return {}
    copies = [_copied_bytes(layer, splits) for layer in subject.representatives or (subject.model,)]
    run = {module for layer in subject.representatives or (subject.model,) for module in layer.modules()}
    for linear in splits.keys() & run:
        for key, dim in _SPLIT_DIMS[splits[linear]].items():
            full = getattr(linear, key)
            if full is not None:
                setattr(linear, key, nn.Parameter(full.detach().narrow(dim, 0, full.shape[dim] // 2)))
    try:
        halves = {precision: _run(subject, _FEW, precision) for precision in whole}
    except Exception as error:  # noqa: BLE001  # user code with half of its heads raises anything
        subject.notes.append(
            f"tensor_parallel_plan is left out: with half of what it splits the model raises {error!s:.300}"
        )
        return {}
    return {
        precision: [
            # Copies of weights in bf16 are halved, too, but are no part of a sample.
            max(0, 2 * (before.saved - after.saved) - (copied if precision == "bf16" else 0)) // _FEW
            for before, after, copied in zip(whole[precision].few, halves[precision], copies, strict=False)
        ]
        for precision in whole
    }


def _copied_bytes(layer: nn.Module, splits: Mapping[nn.Linear, str]) -> int:
    """Bytes of the split weights of a layer in bf16."""
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear) and module in splits]
    return sum(linear.weight.numel() * torch.bfloat16.itemsize for linear in linears)


def _bytes_of(values: Any) -> int:
    return sum(_num_bytes(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
