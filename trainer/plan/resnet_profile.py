"""The profile of the recipe `resnet` from its arguments alone. Pure.

Not for: building it (`trainer.recipes.resnet`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainer.plan.model_profile import ActivationProfile, LayerProfile, ModelProfile, ParameterProfile
from trainer.plan.profile_parts import FULL, INDEX_BYTES, LOW, Widths, made_layer, made_parameter, widths_of
from trainer.plan.recipe_catalog import image_size_of, stem_of

_BLOCKS: Final = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
_BOTTLENECK_DEPTHS: Final = (50,)
_EXPANSION: Final = 4
_MOST_GROUPS: Final = 32
_IMAGES: Final[Mapping[str, tuple[int, int]]] = {"digits": (1, 10), "synthetic": (3, 10)}
"""Channels and classes of the built-in images."""


@dataclass(frozen=True, kw_only=True)
class _Convolution:
    """A convolution and the norm after it."""

    name: str
    """Of the convolution."""
    norm_name: str
    before: int
    after: int
    side: int
    size: int
    """Side of what it makes, in pixels."""

    @property
    def weights(self) -> int:
        """Numbers in its weight."""
        return self.after * self.before * self.side**2

    @property
    def numbers(self) -> int:
        """Numbers in what it makes of an image."""
        return self.after * self.size**2

    @property
    def flops(self) -> int:
        """Of forward, for an image."""
        return 2 * self.weights * self.size**2


def resnet_profile(args: Mapping[str, Any]) -> ModelProfile | None:
    """The profile; None for a folder of images, whose classes only the nodes see."""
    if args["data"] not in _IMAGES:
        return None
    channels, num_classes = _IMAGES[args["data"]]
    layers = [*_layers(args, channels, num_classes)]
    scored = num_classes * max(FULL, widths_of(args)["fp32"].parameter) + INDEX_BYTES
    return ModelProfile(
        name="ResNet",
        layers=tuple(layers),
        can_split=True,
        has_batch_norm=args["norm"] == "batch",
        loss_bytes=scored,
        loss_bytes_bf16=scored,
    )


def _layers(args: Mapping[str, Any], channels: int, num_classes: int) -> Iterator[LayerProfile]:
    side, width, is_large = image_size_of(args), args["width"], stem_of(args) == "large"
    stem = _Convolution(
        name="stem.0",
        norm_name="stem.1",
        before=channels,
        after=width,
        side=7 if is_large else 3,
        size=_halved(side) if is_large else side,
    )
    yield _stem(args, stem, side, is_large=is_large)
    size = _halved(stem.size) if is_large else stem.size
    is_bottleneck = args["depth"] in _BOTTLENECK_DEPTHS
    before, number = width, 0
    for stage, num_blocks in enumerate(_BLOCKS[args["depth"]]):
        inside = width << stage
        for place in range(num_blocks):
            after = inside * _EXPANSION if is_bottleneck else inside
            made = _halved(size) if stage > 0 and place == 0 else size
            is_pooled = number == 0 and is_large
            yield _block(args, number, (before, inside, after), (size, made), is_first_after_pooling=is_pooled)
            before, size, number = after, made, number + 1
    yield _head(args, before, size, num_classes)


def _stem(args: Mapping[str, Any], stem: _Convolution, side: int, *, is_large: bool) -> LayerProfile:
    pooled = stem.after * _halved(stem.size) ** 2

    def activations(widths: Widths) -> ActivationProfile:
        normed = _normed(args, widths)
        taken = stem.before * side**2
        kept = taken * widths.computed + stem.numbers * (_normed(args, widths) + normed) + _statistics(args, stem)
        return ActivationProfile(
            saved=kept + (pooled * INDEX_BYTES if is_large else 0),
            saved_fixed=_fixed(args, [stem], widths),
            selective=taken * widths.parameter + stem.numbers * widths.computed,
            input=taken * widths.parameter,
            output=(pooled if is_large else stem.numbers) * normed,
        )

    return made_layer(
        "stem", _of_convolution(args, stem), activations, args, flops=stem.flops, buffer_bytes=_buffers(args, [stem])
    )


def _block(
    args: Mapping[str, Any],
    number: int,
    channels: tuple[int, int, int],
    sizes: tuple[int, int],
    *,
    is_first_after_pooling: bool,
) -> LayerProfile:
    name, (before, inside, after), (size, made) = f"layers.{number}", channels, sizes
    if args["depth"] in _BOTTLENECK_DEPTHS:
        steps = [(before, inside, 1, size), (inside, inside, 3, made), (inside, after, 1, made)]
    else:
        steps = [(before, inside, 3, made), (inside, after, 3, made)]
    own = [
        _Convolution(
            name=f"{name}.convolutions.{place}", norm_name=f"{name}.norms.{place}",
            before=step[0], after=step[1], side=step[2], size=step[3],
        )
        for place, step in enumerate(steps)
    ]  # fmt: skip
    shortcut = []
    if size != made or before != after:
        shortcut = [
            _Convolution(
                name=f"{name}.shortcut.0", norm_name=f"{name}.shortcut.1", before=before, after=after, side=1, size=made
            )
        ]
    everything = [*own, *shortcut]
    taken = before * size**2

    def activations(widths: Widths) -> ActivationProfile:
        normed = _normed(args, widths)
        # What each convolution makes, and what ReLU makes of it (of the last after the shortcut was added).
        saved = sum(one.numbers for one in everything) * _normed(args, widths)
        saved += sum(one.numbers for one in own) * normed + sum(_statistics(args, one) for one in everything)
        if normed != widths.computed:
            inputs = [taken, *(one.numbers for one in own[:-1]), *([taken] if shortcut else [])]
            saved += sum(inputs) * widths.computed
        elif is_first_after_pooling:
            saved += taken * normed  # what the pooling made is kept by nobody else
        return ActivationProfile(
            saved=saved,
            saved_fixed=_fixed(args, everything, widths),
            selective=taken * normed + sum(one.numbers for one in everything) * widths.computed,
            input=taken * normed,
            output=own[-1].numbers * normed,
        )

    parameters = [
        *(one for convolution in own for one in _of_convolution(args, convolution)[:1]),
        *(one for convolution in own for one in _of_convolution(args, convolution)[1:]),
        *(one for convolution in shortcut for one in _of_convolution(args, convolution)),
    ]
    flops = sum(one.flops for one in everything)
    return made_layer(name, parameters, activations, args, flops=flops, buffer_bytes=_buffers(args, everything))


def _head(args: Mapping[str, Any], width: int, size: int, num_classes: int) -> LayerProfile:
    weight = made_parameter("head.linear.weight", (num_classes, width), args)
    bias = made_parameter("head.linear.bias", (num_classes,), args)

    def activations(widths: Widths) -> ActivationProfile:
        taken = width * size**2 * _normed(args, widths)
        return ActivationProfile(
            saved=width * widths.computed + (width if args["dropout"] else 0),
            saved_fixed=weight.numel * LOW if widths.is_cast else 0,
            selective=taken + num_classes * widths.computed,
            input=taken,
            output=num_classes * widths.computed,
        )

    return made_layer("head", [weight, bias], activations, args, flops=2 * weight.numel)


# --- Norms -----------------------------------------------------------------------------------------------------------


def _normed(args: Mapping[str, Any], widths: Widths) -> int:
    """Bytes of a number that leaves a norm: under autocast GroupNorm computes in fp32, BatchNorm in what it gets."""
    return widths.normed if args["norm"] == "group" else widths.computed


def _statistics(args: Mapping[str, Any], one: _Convolution) -> int:
    """What GroupNorm keeps of a sample: mean and deviation of each group."""
    return 2 * math.gcd(_MOST_GROUPS, one.after) * FULL if args["norm"] == "group" else 0


def _fixed(args: Mapping[str, Any], convolutions: list[_Convolution], widths: Widths) -> int:
    """Whatever the number of samples: BatchNorm's mean and deviation of each channel, weights in bf16."""
    statistics = sum(2 * one.after * FULL for one in convolutions) if args["norm"] == "batch" else 0
    return statistics + (sum(one.weights for one in convolutions) * LOW if widths.is_cast else 0)


def _buffers(args: Mapping[str, Any], convolutions: list[_Convolution]) -> int:
    """Mean and variance of each channel, and how many batches they are of."""
    size = widths_of(args)["fp32"].parameter
    return sum(2 * one.after * size + INDEX_BYTES for one in convolutions) if args["norm"] == "batch" else 0


def _of_convolution(args: Mapping[str, Any], one: _Convolution) -> list[ParameterProfile]:
    """Its weight, and weight and bias of the norm after it."""
    return [
        made_parameter(f"{one.name}.weight", (one.after, one.before, one.side, one.side), args),
        made_parameter(f"{one.norm_name}.weight", (one.after,), args),
        made_parameter(f"{one.norm_name}.bias", (one.after,), args),
    ]


def _halved(size: int) -> int:
    """Side of what a step of 2 makes of `size` pixels."""
    return -(-size // 2)
