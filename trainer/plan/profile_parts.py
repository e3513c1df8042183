"""What the profiles of recipes are made of: bytes of numbers by precision, layers, parameters. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainer.plan.model_profile import ActivationProfile, LayerProfile, ParameterProfile

FORWARD_AND_BACKWARD: Final = 3
INDEX_BYTES: Final = 8
LOW: Final = 2
FULL: Final = 4
"""Bytes of a number in bf16, and in what autocast computes in fp32."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes of a number, in one precision."""

    parameter: int
    computed: int
    """Of what matrix products and convolutions take and make."""
    normed: int
    """Of norms and of what is added to them."""

    @property
    def is_cast(self) -> bool:
        """Whether weights and inputs of products are copied into another type."""
        return self.computed != self.normed


def widths_of(args: Mapping[str, Any]) -> dict[str, Widths]:
    """By precision. Autocast leaves float64 as it is."""
    size = {"float32": FULL, "float64": 8}[args["dtype"]]
    plain = Widths(parameter=size, computed=size, normed=size)
    low = Widths(parameter=size, computed=LOW, normed=FULL) if size == FULL else plain
    return {"fp32": plain, "bf16": low}


def made_layer(
    name: str,
    parameters: Sequence[ParameterProfile],
    activations: Callable[[Widths], ActivationProfile],
    args: Mapping[str, Any],
    *,
    flops: float = 0.0,
    buffer_bytes: int = 0,
) -> LayerProfile:
    """`flops`: of forward."""
    by_precision = {precision: activations(widths) for precision, widths in widths_of(args).items()}
    return LayerProfile(
        name=name,
        parameters=tuple(parameters),
        buffer_bytes=buffer_bytes,
        fp32=by_precision["fp32"],
        bf16=by_precision["bf16"],
        flops_per_sample=float(FORWARD_AND_BACKWARD * flops),
    )


def made_parameter(
    name: str, shape: tuple[int, ...], args: Mapping[str, Any], split_dim: int | None = None, *, is_shared: bool = False
) -> ParameterProfile:
    size = widths_of(args)["fp32"].parameter
    return ParameterProfile(name=name, shape=shape, element_size=size, split_dim=split_dim, is_shared=is_shared)
