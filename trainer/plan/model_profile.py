"""What a model costs, layer by layer, as data: parameters, what forward keeps for backward, floating-point operations.

A profile is made once (`trainer.profile` counts a task on shapes alone, `trainer.plan.recipe_profiles` computes that of
a recipe) and is all that `auto` and the memory estimate know of a model, so the API plans without torch. A parameter
that several layers share is counted with the first of them. Not for: what a plan makes of it (`trainer.plan.estimate`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from gangline.protocol.launch import decode, encode
from trainer.plan.problem import PlanError, PlanProblem

PROFILE_VERSION: Final = 1
KERNELS: Final = ("cuda", "cpu")
"""Whose kernels a profile counts with. They differ in what attention and norms keep."""


@dataclass(frozen=True, kw_only=True)
class ParameterProfile:
    """One parameter."""

    name: str
    """Its name in the whole model; of a shared one the first."""
    shape: tuple[int, ...]
    element_size: int = 4
    """Bytes of a number in the parameter, its gradient and its optimizer state."""
    split_dim: int | None = None
    """The dimension that tensor parallelism splits; None: every rank of a tensor-parallel group has all of it."""
    is_trainable: bool = True
    is_shared: bool = False
    """Whether an earlier layer has the same one: it lies in memory once where both are on one rank."""

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of it."""
        return self.numel * self.element_size


@dataclass(frozen=True, kw_only=True)
class ActivationProfile:
    """What a layer keeps between forward and backward, in bytes per sample; parameters are not counted."""

    saved: int
    """Without activation checkpointing."""
    saved_split: int = 0
    """The part of `saved` that tensor parallelism divides among its ranks."""
    saved_fixed: int = 0
    """What is kept beside `saved` however many samples there are: copies of the weights in bf16, tables."""
    selective: int
    """Under selective checkpointing: the input, and what is computed by matrix products, convolutions and attention."""
    input: int
    """The layer's input: all that full checkpointing keeps, and what a pipeline sends from stage to stage."""
    output: int
    """What the layer gives to the next."""


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One of the modules that, called in turn, are the model."""

    name: str
    parameters: tuple[ParameterProfile, ...]
    buffer_bytes: int
    fp32: ActivationProfile
    """In the type of the parameters."""
    bf16: ActivationProfile
    """Under bf16 autocast."""
    flops_per_sample: float
    """Forward and backward."""

    @cached_property
    def sizes(self) -> tuple[tuple[tuple[int, ...], int, int | None, bool], ...]:
        """(shape, element size, split dimension, whether it is trained) of each parameter: what memory depends on."""
        return tuple((one.shape, one.element_size, one.split_dim, one.is_trainable) for one in self.parameters)

    @cached_property
    def has_shared(self) -> bool:
        """Whether an earlier layer has one of its parameters."""
        return any(one.is_shared for one in self.parameters)

    @property
    def own_parameters(self) -> tuple[ParameterProfile, ...]:
        """Those that no earlier layer has."""
        return tuple(one for one in self.parameters if not one.is_shared)

    @property
    def num_parameters(self) -> int:
        """Numbers in its own parameters."""
        return sum(one.numel for one in self.own_parameters)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of its own parameters."""
        return sum(one.num_bytes for one in self.own_parameters)

    @property
    def num_tensor_parallel_parameters(self) -> int:
        """How many of them tensor parallelism splits."""
        return sum(one.numel for one in self.own_parameters if one.split_dim is not None)

    def activations(self, precision: str) -> ActivationProfile:
        """Those of `fp32` or `bf16`."""
        return self.bf16 if precision == "bf16" else self.fp32


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model, as its layers in order. One whose layers cannot be listed is one layer."""

    version: int = PROFILE_VERSION
    name: str
    layers: tuple[LayerProfile, ...]
    can_split: bool
    """Whether its layers can lie on different ranks, or be sharded one by one."""
    has_tensor_parallel_plan: bool = False
    tensor_parallel_sizes: tuple[int, ...] = ()
    """Numbers that a tensor-parallel size must divide: heads and widths."""
    has_batch_norm: bool = False
    loss_bytes: int = 0
    """Kept by the loss per sample, in fp32 or under autocast: of a language model, scores over the vocabulary."""
    loss_bytes_bf16: int = 0
    kernels: str = "cuda"
    notes: tuple[str, ...] = ()
    """What the profile could not see, in words."""

    @property
    def num_parameters(self) -> int:
        """Numbers in all parameters."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def num_trainable_parameters(self) -> int:
        """Numbers in the parameters that are trained."""
        return sum(one.numel for layer in self.layers for one in layer.own_parameters if one.is_trainable)

    @property
    def scalar_parameters(self) -> tuple[str, ...]:
        """Names of the parameters without any dimension."""
        return tuple(one.name for layer in self.layers for one in layer.own_parameters if not one.shape)

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward."""
        return sum(layer.flops_per_sample for layer in self.layers)

    def loss(self, precision: str) -> int:
        """Bytes per sample that the loss keeps in `precision`."""
        return self.loss_bytes_bf16 if precision == "bf16" else self.loss_bytes


def read_profile(text: str | bytes) -> ModelProfile:
    """The profile in a JSON text. Raises PlanError with all that is wrong."""
    try:
        profile = decode(ModelProfile, json.loads(text))
    except ValueError as error:
        raise PlanError([_unreadable(f"cannot be read: {error}.")]) from error
    if problems := [problem for rule in _RULES for problem in rule(profile)]:
        raise PlanError(problems)
    return profile


def write_profile(profile: ModelProfile) -> str:
    """The profile as a JSON text."""
    return json.dumps(encode(profile), ensure_ascii=False) + "\n"


def profile_as_dict(profile: ModelProfile) -> dict[str, Any]:
    """The profile as a JSON-ready dict."""
    return encode(profile)


def _unreadable(message: str) -> PlanProblem:
    return PlanProblem(key="model profile", message=message, fix="Write it with python -m trainer profile.")


def _version_rule(profile: ModelProfile) -> Iterator[PlanProblem]:
    if profile.version != PROFILE_VERSION:
        yield _unreadable(f"is of version {profile.version}; this is version {PROFILE_VERSION}.")


def _word_rule(profile: ModelProfile) -> Iterator[PlanProblem]:
    if profile.kernels not in KERNELS:
        yield _unreadable(f"has the kernels {profile.kernels!r}; known are {' and '.join(KERNELS)}.")


def _layer_rule(profile: ModelProfile) -> Iterator[PlanProblem]:
    if not profile.layers:
        yield _unreadable("has no layers.")
    if not profile.num_parameters:
        yield _unreadable("has no parameters.")
    names = [layer.name for layer in profile.layers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield _unreadable(f"names layers twice: {', '.join(twice[:5])}.")


def _number_rule(profile: ModelProfile) -> Iterator[PlanProblem]:
    numbers: list[tuple[str, float]] = [
        ("loss_bytes", min(profile.loss_bytes, profile.loss_bytes_bf16)),
        ("tensor_parallel_sizes", min(profile.tensor_parallel_sizes, default=1) - 1),
    ]
    for layer in profile.layers:
        numbers.append((f"{layer.name}: buffer_bytes", layer.buffer_bytes))
        numbers.append((f"{layer.name}: flops_per_sample", layer.flops_per_sample))
        for precision, kept in (("fp32", layer.fp32), ("bf16", layer.bf16)):
            numbers += [(f"{layer.name}: {precision}.{key}", value) for key, value in vars(kept).items()]
            numbers.append((f"{layer.name}: {precision}.saved_split", kept.saved - kept.saved_split))
        for one in layer.parameters:
            numbers.append((f"{one.name}: shape", min(one.shape, default=0)))
            numbers.append((f"{one.name}: element_size", one.element_size - 1))
            if one.split_dim is not None:
                is_dimension = 0 <= one.split_dim < len(one.shape)
                numbers.append((f"{one.name}: split_dim", 0 if is_dimension else -1))
    for key, value in numbers:
        if not value >= 0 or math.isinf(value):
            yield _unreadable(f"has a number that cannot be, in {key}.")


_RULES: Final[tuple[Callable[[ModelProfile], Iterator[PlanProblem]], ...]] = (
    _version_rule,
    _word_rule,
    _layer_rule,
    _number_rule,
)
