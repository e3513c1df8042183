"""Profiles of the recipes from their arguments alone, so that jobs are planned where torch and the data are missing.

They say what `trainer.profile` would count with a GPU's kernels; a test compares the two. Not for: building a recipe
(`trainer.recipes`), or tasks of users (`trainer.profile`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from trainer.plan.model_profile import ActivationProfile, LayerProfile, ModelProfile
from trainer.plan.profile_parts import (
    FULL,
    INDEX_BYTES,
    LOW,
    Widths,
    made_layer,
    made_parameter,
    widths_of,
)
from trainer.plan.recipe_catalog import (
    BYTE_VOCABULARY,
    TransformerShape,
    complete_args,
    shape_of,
)
from trainer.plan.resnet_profile import resnet_profile


def recipe_profile(name: str, args: Mapping[str, Any]) -> ModelProfile | None:
    """The profile of recipe `name`; None where it depends on data that only the nodes see: a table or images in files.

    Raises PlanError for arguments that the recipe does not take.
    """
    return _PROFILES[name](complete_args(name, args))


# --- Transformer -----------------------------------------------------------------------------------------------------


def _transformer(args: Mapping[str, Any]) -> ModelProfile:
    shape, vocabulary = shape_of(args), args["vocab_size"] or BYTE_VOCABULARY
    layers = [_transformer_embedding(args, shape, vocabulary)]
    layers += [_transformer_layer(f"layers.{number}", args, shape) for number in range(shape.num_layers)]
    layers += [_transformer_norm(args, shape), _transformer_head(args, shape, vocabulary)]
    loss = {
        precision: shape.tokens_per_sample * (vocabulary * max(FULL, widths.normed) + INDEX_BYTES)
        for precision, widths in widths_of(args).items()
    }
    return ModelProfile(
        name="Transformer",
        layers=tuple(layers),
        can_split=True,
        has_tensor_parallel_plan=True,
        tensor_parallel_sizes=tuple(sorted({shape.num_heads, shape.width, _inner_width(args, shape)})),
        loss_bytes=loss["fp32"],
        loss_bytes_bf16=loss["bf16"],
    )


def _inner_width(args: Mapping[str, Any], shape: TransformerShape) -> int:
    if args["mlp"] == "gelu":
        return 4 * shape.width
    return math.ceil(8 / 3 * shape.width / 32) * 32


def _transformer_embedding(args: Mapping[str, Any], shape: TransformerShape, vocabulary: int) -> LayerProfile:
    tokens, numbers = shape.tokens_per_sample, shape.tokens_per_sample * shape.width
    parameters = [made_parameter("embedding.tokens.weight", (vocabulary, shape.width), args)]
    is_learned = args["positions"] == "learned"
    if is_learned:
        parameters.append(made_parameter("embedding.positions.weight", (tokens, shape.width), args))

    def activations(widths: Widths) -> ActivationProfile:
        return ActivationProfile(
            saved=tokens * INDEX_BYTES + (numbers if args["dropout"] else 0),
            saved_fixed=tokens * INDEX_BYTES if is_learned else 0,
            selective=tokens * INDEX_BYTES,
            input=tokens * INDEX_BYTES,
            output=numbers * widths.parameter,
        )

    return made_layer("embedding", parameters, activations, args)


def _transformer_layer(name: str, args: Mapping[str, Any], shape: TransformerShape) -> LayerProfile:
    width, inner, tokens = shape.width, _inner_width(args, shape), shape.tokens_per_sample
    is_gated = args["mlp"] == "swiglu"
    outer_numbers, inner_numbers = tokens * width, tokens * inner
    matrices = {
        **{f"attention.{part}": (width, width, 0) for part in ("query", "key", "value")},
        "attention.output": (width, width, 1),
        **({"mlp.gate": (inner, width, 0)} if is_gated else {}),
        "mlp.up": (inner, width, 0),
        "mlp.down": (width, inner, 1),
    }
    weights = {part: made_parameter(f"{name}.{part}.weight", (rows, columns), args, dim)
               for part, (rows, columns, dim) in matrices.items()}  # fmt: skip
    norms = {part: made_parameter(f"{name}.{part}.weight", (width,), args) for part in ("attention_norm", "mlp_norm")}
    attention, mlp = ([one for part, one in weights.items() if part.startswith(half)] for half in ("attention", "mlp"))
    parameters = [norms["attention_norm"], *attention, norms["mlp_norm"], *mlp]

    def activations(widths: Widths) -> ActivationProfile:
        # Of each row of a norm one number, of each row of each head one more.
        statistics = shape.num_heads * tokens * max(FULL, widths.normed if not widths.is_cast else FULL)
        # Query, key, value and what comes out; flash attention lays that out as the query, which turning has copied.
        is_copied = widths.is_cast and args["positions"] == "rotary"
        heads = (5 if is_copied else 4) * outer_numbers
        inside = (4 if is_gated else 2) * inner_numbers
        split = (heads + inside) * widths.computed + statistics
        # What a norm takes stays; what it makes stays once, or as a copy in bf16 for every product.
        copies = (3 + (2 if is_gated else 1)) if widths.is_cast else 2
        whole = outer_numbers * (2 * widths.normed + copies * widths.computed) + 2 * tokens * FULL
        masks = 2 * outer_numbers if args["dropout"] else 0
        weight_copies = sum(one.numel for one in weights.values()) * LOW if widths.is_cast else 0
        table = tokens * (width // shape.num_heads) * FULL if args["positions"] == "rotary" else 0
        products = (5 * outer_numbers + (2 if is_gated else 1) * inner_numbers) * widths.computed
        attended = outer_numbers * widths.computed + statistics if not args["dropout"] else 0
        return ActivationProfile(
            saved=split + whole + masks,
            saved_split=split,
            saved_fixed=weight_copies + table,
            selective=products + attended + outer_numbers * widths.normed,
            input=outer_numbers * widths.normed,
            output=outer_numbers * widths.normed,
        )

    flops = 2 * tokens * sum(one.numel for one in weights.values()) + 4 * tokens**2 * width
    return made_layer(name, parameters, activations, args, flops=flops)


def _transformer_norm(args: Mapping[str, Any], shape: TransformerShape) -> LayerProfile:
    tokens, numbers = shape.tokens_per_sample, shape.tokens_per_sample * shape.width

    def activations(widths: Widths) -> ActivationProfile:
        size = numbers * widths.normed
        return ActivationProfile(saved=size + tokens * FULL, selective=size, input=size, output=size)

    return made_layer("norm", [made_parameter("norm.weight", (shape.width,), args)], activations, args)


def _transformer_head(args: Mapping[str, Any], shape: TransformerShape, vocabulary: int) -> LayerProfile:
    tokens, numbers = shape.tokens_per_sample, shape.tokens_per_sample * shape.width
    is_tied = args["tied_embeddings"]
    name = "embedding.tokens.weight" if is_tied else "head.weight"
    weight = made_parameter(name, (vocabulary, shape.width), args, is_shared=is_tied)

    def activations(widths: Widths) -> ActivationProfile:
        scores = tokens * vocabulary * widths.computed
        return ActivationProfile(
            saved=numbers * widths.computed,
            saved_fixed=weight.numel * LOW if widths.is_cast else 0,
            selective=numbers * widths.normed + scores,
            input=numbers * widths.normed,
            output=scores,
        )

    return made_layer("head", [weight], activations, args, flops=2 * tokens * weight.numel)


# --- Multi-layer perceptron ------------------------------------------------------------------------------------------

_TABLES: Final[Mapping[str, tuple[int, int | None]]] = {
    "digits": (64, 10),
    "breast_cancer": (30, 2),
    "wine": (13, 3),
    "iris": (4, 3),
    "diabetes": (10, None),
    "synthetic": (20, 4),
}
"""Columns and classes of the built-in tables; None: regression."""


def _mlp(args: Mapping[str, Any]) -> ModelProfile | None:
    if args["data"] not in _TABLES:
        return None
    columns, num_classes = _TABLES[args["data"]]
    size = widths_of(args)["fp32"].parameter

    def nothing(widths: Widths) -> ActivationProfile:
        row = columns * widths.parameter
        return ActivationProfile(saved=0, selective=row, input=row, output=row)

    layers = [made_layer("standardise", [], nothing, args, buffer_bytes=2 * columns * size)]
    widths = [columns, *args["hidden"]]
    for number, (before, after) in enumerate(zip(widths, args["hidden"], strict=False)):
        layers.append(_mlp_layer(f"layers.{number}.0", args, before, after, is_first=number == 0))
    layers.append(_mlp_head(args, widths[-1], num_classes, is_first=len(widths) == 1))
    scored = (num_classes or 1) * max(FULL, size) + (INDEX_BYTES if num_classes else 0)
    return ModelProfile(
        name="TableModel", layers=tuple(layers), can_split=True, loss_bytes=scored, loss_bytes_bf16=scored
    )


def _mlp_layer(name: str, args: Mapping[str, Any], before: int, after: int, *, is_first: bool) -> LayerProfile:
    weight, bias = (
        made_parameter(f"{name}.weight", (after, before), args),
        made_parameter(f"{name}.bias", (after,), args),
    )
    # What ReLU and tanh give is what they keep, and what the next layer takes; GELU keeps what it was given.
    is_input_kept = not is_first and args["activation"] != "gelu" and not args["dropout"]

    def activations(widths: Widths) -> ActivationProfile:
        taken = before * (widths.parameter if is_first else widths.computed)
        saved = (0 if is_input_kept else before * widths.computed) + after * widths.computed
        return ActivationProfile(
            saved=saved + (after if args["dropout"] else 0),
            saved_fixed=weight.numel * LOW if widths.is_cast and not is_first else 0,
            selective=taken + after * widths.computed,
            input=taken,
            output=after * widths.computed,
        )

    layer_name = name.removesuffix(".0")
    return made_layer(layer_name, [weight, bias], activations, args, flops=2 * weight.numel)


def _mlp_head(args: Mapping[str, Any], before: int, num_classes: int | None, *, is_first: bool) -> LayerProfile:
    after, prefix = num_classes or 1, "head" if num_classes else "head.linear"
    weight, bias = (
        made_parameter(f"{prefix}.weight", (after, before), args),
        made_parameter(f"{prefix}.bias", (after,), args),
    )
    is_input_kept = not is_first and args["activation"] != "gelu" and not args["dropout"]

    def activations(widths: Widths) -> ActivationProfile:
        taken = before * (widths.parameter if is_first else widths.computed)
        return ActivationProfile(
            saved=0 if is_input_kept else before * widths.computed,
            saved_fixed=weight.numel * LOW if widths.is_cast and not is_first else 0,
            selective=taken + after * widths.computed,
            input=taken,
            output=after * widths.computed,
        )

    buffers = 0 if num_classes else 2 * weight.element_size
    return made_layer("head", [weight, bias], activations, args, flops=2 * weight.numel, buffer_bytes=buffers)


_PROFILES: Final[Mapping[str, Callable[[Mapping[str, Any]], ModelProfile | None]]] = {
    "transformer": _transformer,
    "mlp": _mlp,
    "resnet": resnet_profile,
}
"""Each gets every parameter that the catalog lists for it."""
