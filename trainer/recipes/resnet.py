"""The recipe `resnet`: ResNet-18, -34 and -50 for classifying images.

As in "Deep Residual Learning" (He et al., 2015), with the stride in the 3×3 convolution of a bottleneck. With 1,000
classes, width 64 and BatchNorm they have the customary numbers of parameters. The small stem is for images of some
ten pixels, which the usual one would shrink to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from trainer.data.images import ImageFolder, RandomFlip, Subset, digits_images
from trainer.data.rows import stack_pairs
from trainer.data.splits import complement, held_out
from trainer.data.synthetic import SyntheticImages
from trainer.plan.recipe_catalog import image_size_of, stem_of
from trainer.recipes.common import DTYPES, LayeredModel, accuracy, cross_entropy, dropout, layers_in_order
from trainer.task import TrainTask

_STAGES: Final = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
"""Blocks per stage."""
_BOTTLENECK_DEPTHS: Final = (50,)
_EXPANSION: Final = 4
"""Channels that leave a bottleneck, per channel inside."""
_MOST_GROUPS: Final = 32
_NUM_SYNTHETIC_IMAGES: Final = 10_000
_BACKWARD_AND_FORWARD: Final = 3
"""The backward pass computes twice what the forward pass does."""


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """All that decides a ResNet's shape."""

    depth: int = 18
    width: int = 64
    channels: int = 3
    num_classes: int = 1000
    norm: str = "batch"
    stem: str = "large"
    dropout: float = 0.0


class ResNet(LayeredModel):
    """Images [batch, channels, height, width] to a score per class [batch, classes]."""

    def __init__(self, config: ResNetConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.stem = _stem(config)
        is_bottleneck = config.depth in _BOTTLENECK_DEPTHS
        blocks: list[nn.Module] = []
        before = config.width
        for stage, num_blocks in enumerate(_STAGES[config.depth]):
            inside = config.width << stage
            for number in range(num_blocks):
                stride = 2 if stage > 0 and number == 0 else 1
                after = inside * _EXPANSION if is_bottleneck else inside
                blocks.append(Block(before, inside, after, stride, config.norm, is_bottleneck=is_bottleneck))
                before = after
        self.layers = nn.ModuleList(blocks)
        self.head = Head(before, config.num_classes, config.dropout)
        self.apply(_initialise)
        self.to(dtype)


class Block(nn.Module):
    """Two 3×3 convolutions, or 1×1, 3×3, 1×1 as a bottleneck, around which the input is added."""

    def __init__(self, before: int, inside: int, after: int, stride: int, norm: str, *, is_bottleneck: bool) -> None:
        super().__init__()
        if is_bottleneck:
            steps = [(before, inside, 1, 1), (inside, inside, 3, stride), (inside, after, 1, 1)]
        else:
            steps = [(before, inside, 3, stride), (inside, after, 3, 1)]
        self.convolutions = nn.ModuleList(_convolution(*step) for step in steps)
        self.norms = nn.ModuleList(_norm(norm, step[1]) for step in steps)
        self.shortcut = (
            nn.Sequential(_convolution(before, after, 1, stride), _norm(norm, after))
            if stride != 1 or before != after
            else nn.Identity()
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[batch, before, h, w] to [batch, after, h / stride, w / stride]."""
        inner = values
        last = len(self.norms) - 1
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            inner = norm(convolution(inner))
            if number < last:
                inner = functional.relu(inner)
        return functional.relu(inner + self.shortcut(values))


class Head(nn.Module):
    """The mean over all places, and a score per class of it."""

    def __init__(self, width: int, num_classes: int, dropout_probability: float) -> None:
        super().__init__()
        self.dropout = dropout(dropout_probability)
        self.linear = nn.Linear(width, num_classes)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[batch, width, h, w] to [batch, classes]."""
        output: torch.Tensor = self.linear(self.dropout(values.mean(dim=(2, 3))))
        return output


def build_resnet(args: Mapping[str, Any]) -> TrainTask:
    """The task; `args` is complete, as the catalog's `complete_args` makes it."""
    dtype, size = DTYPES[args["dtype"]], image_size_of(args)
    train, held_out_images, num_classes = _data(args, size, dtype)
    config = ResNetConfig(
        depth=args["depth"],
        width=args["width"],
        channels=train[0][0].shape[0],
        num_classes=num_classes,
        norm=args["norm"],
        stem=stem_of(args),
        dropout=args["dropout"],
    )
    return TrainTask(
        model=partial(ResNet, config, dtype),
        loss=cross_entropy,
        data=RandomFlip(train) if args["random_flip"] else train,
        eval_data=held_out_images,
        metrics={"accuracy": accuracy},
        collate=stack_pairs,
        flops_per_sample=flops_per_sample(config, size),
        layers=layers_in_order,
    )


def flops_per_sample(config: ResNetConfig, size: int) -> float:
    """Floating-point operations of forward and backward for one image; nothing is computed."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        ResNet(config).eval()(torch.empty(1, config.channels, size, size))
    return float(_BACKWARD_AND_FORWARD * counter.get_total_flops())


def _data(args: Mapping[str, Any], size: int, dtype: torch.dtype) -> tuple[Any, Any, int]:
    """Training images, held-out images, number of classes."""
    fraction, seed = args["eval_fraction"], args["split_seed"]
    if args["data"] == "synthetic":
        num_held_out = max(1, round(fraction * _NUM_SYNTHETIC_IMAGES))
        num_train = _NUM_SYNTHETIC_IMAGES - num_held_out
        train = SyntheticImages(num_train, size, dtype)
        return train, SyntheticImages(num_held_out, size, dtype, first=num_train), SyntheticImages.num_classes
    if args["data"] == "digits":
        images = digits_images(size, dtype)
        chosen = held_out(len(images), fraction, seed, images.targets.tolist())
        return images.subset(complement(chosen, len(images))), images.subset(chosen), 10
    folder = ImageFolder(Path(args["data"]), size, dtype)
    if args["eval_data"] is not None:
        other = ImageFolder(Path(args["eval_data"]), size, dtype, folder.classes)
        return folder, other, len(folder.classes)
    chosen = held_out(len(folder), fraction, seed, folder.labels)
    return Subset(folder, complement(chosen, len(folder))), Subset(folder, chosen), len(folder.classes)


def _stem(config: ResNetConfig) -> nn.Sequential:
    if config.stem == "small":
        convolution = _convolution(config.channels, config.width, 3, 1)
        return nn.Sequential(convolution, _norm(config.norm, config.width), nn.ReLU())
    convolution = _convolution(config.channels, config.width, 7, 2)
    return nn.Sequential(convolution, _norm(config.norm, config.width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))


def _convolution(before: int, after: int, side: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, side, stride, padding=side // 2, bias=False)


def _norm(norm: str, channels: int) -> nn.Module:
    if norm == "group":
        return nn.GroupNorm(math.gcd(_MOST_GROUPS, channels), channels)
    return nn.BatchNorm2d(channels)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
