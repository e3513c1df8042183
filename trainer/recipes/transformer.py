"""The recipe `transformer`: a decoder language model on bytes of text or on tokens.

Pre-norm with RMSNorm and no biases; rotary or learned positions; SwiGLU or GELU. Each layer keeps a name of its own
(`layers.3.attention.query`), so that a checkpoint fits however the model is split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from trainer.data.rows import stack_pairs
from trainer.data.synthetic import SyntheticTokens
from trainer.data.tokens import Tokens, TokenWindows, text_tokens, token_file, topics_tokens
from trainer.plan.recipe_catalog import BYTE_VOCABULARY, is_token_file, shape_of
from trainer.recipes.common import DTYPES, LayeredModel, bits_per_byte, cross_entropy, dropout, layers_in_order
from trainer.task import TrainTask

TENSOR_PARALLEL_PLAN: Final = {
    "layers.*.attention.query": "colwise",
    "layers.*.attention.key": "colwise",
    "layers.*.attention.value": "colwise",
    "layers.*.attention.output": "rowwise",
    "layers.*.mlp.gate": "colwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
}
"""Module names to how a tensor-parallel group splits them: by columns, then by rows, one reduction for each pair."""

_ROTARY_BASE: Final = 10_000.0
_INITIAL_DEVIATION: Final = 0.02
_SWIGLU_WIDTH: Final = 8 / 3
"""Inner width per outer width, so that three matrices have as many parameters as GELU's two of 4."""
_SWIGLU_MULTIPLE: Final = 32
_NUM_ROTARY_TABLES: Final = 16
"""As many are kept: one per length, head width, device and type in use."""
_NUM_SYNTHETIC_SAMPLES: Final = 100_000


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """All that decides the model's shape."""

    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    tokens_per_sample: int
    positions: str = "rotary"
    mlp: str = "swiglu"
    has_tied_embeddings: bool = False
    dropout: float = 0.0

    @property
    def head_width(self) -> int:
        """Numbers per attention head."""
        return self.width // self.num_heads

    @property
    def mlp_width(self) -> int:
        """Numbers per token inside the second half of a layer."""
        if self.mlp == "gelu":
            return 4 * self.width
        return math.ceil(_SWIGLU_WIDTH * self.width / _SWIGLU_MULTIPLE) * _SWIGLU_MULTIPLE

    @property
    def flops_per_sample(self) -> float:
        """Floating-point operations of forward and backward: 6 per weight and token, and those of attention.

        Embeddings that are looked up cost nothing; attention is counted in full, as is the custom for MFU.
        """
        mlp_matrices = 2 if self.mlp == "gelu" else 3
        per_layer = 4 * self.width**2 + mlp_matrices * self.width * self.mlp_width
        weights = self.num_layers * per_layer + self.width * self.vocab_size
        attention = 12 * self.num_layers * self.width * self.tokens_per_sample**2
        return 6.0 * weights * self.tokens_per_sample + attention


class Transformer(LayeredModel):
    """Tokens [batch, T] to scores [batch, T, vocabulary] for the token after each.

    At most `tokens_per_sample` tokens with learned positions; any number with rotary ones.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.apply(partial(_initialise, num_layers=config.num_layers))
        if config.has_tied_embeddings:
            self.head.weight = self.embedding.tokens.weight
        self.to(dtype)


class Embedding(nn.Module):
    """A vector per token, to which learned positions are added (`positions` is missing with rotary ones)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.tokens_per_sample, config.width) if config.positions == "learned" else None
        self.dropout = dropout(config.dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, T] to [batch, T, width]."""
        values = self.tokens(tokens)
        if self.positions is not None:
            values = values + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        result: torch.Tensor = self.dropout(values)
        return result


class Layer(nn.Module):
    """Attention, then an MLP, each of the normed input and added to it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = Mlp(config)
        self.dropout = dropout(config.dropout)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[batch, T, width] to the same shape."""
        values = values + self.dropout(self.attention(self.attention_norm(values)))
        result: torch.Tensor = values + self.dropout(self.mlp(self.mlp_norm(values)))
        return result


class Attention(nn.Module):
    """Causal self-attention. Works with a part of the heads, too, as a tensor-parallel rank has them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_width, self.dropout_probability = config.head_width, config.dropout
        self.is_rotary = config.positions == "rotary"
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[batch, T, width] to the same shape."""
        query, key, value = (self._heads(linear(values)) for linear in (self.query, self.key, self.value))
        if self.is_rotary:
            rotary = rotary_table(query.shape[2], self.head_width, query)
            query, key = turned(query, rotary), turned(key, rotary)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout_probability if self.training else 0.0, is_causal=True
        )
        result: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def _heads(self, values: torch.Tensor) -> torch.Tensor:
        return own_part(values).unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Mlp(nn.Module):
    """SwiGLU (three matrices) or GELU (two; `gate` is then missing)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.mlp_width, bias=False) if config.mlp == "swiglu" else None
        self.up = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[batch, T, width] to the same shape."""
        inner = self.up(values)
        inner = functional.gelu(inner) if self.gate is None else functional.silu(self.gate(values)) * inner
        result: torch.Tensor = self.down(inner)
        return result


def rotary_table(num_tokens: int, head_width: int, like: torch.Tensor) -> torch.Tensor:
    """cos and sin of each place's angles: [2, T, head_width / 2], on the device of `like`, in float32 or more.

    Computed once, not by every layer at every step, and no part of any state dict.
    """
    shape = (num_tokens, head_width, like.device, torch.promote_types(like.dtype, torch.float32))
    # What is traced or stands for shapes alone must not be kept for those who compute.
    is_plain = type(like) is torch.Tensor and not torch.compiler.is_compiling()
    return _kept_rotary_table(*shape) if is_plain else _rotary_table(*shape)


def _rotary_table(num_tokens: int, head_width: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    exponents = torch.arange(0, head_width, 2, device=device, dtype=dtype) / head_width
    angles = torch.outer(torch.arange(num_tokens, device=device, dtype=dtype), _ROTARY_BASE**-exponents)
    return torch.stack((angles.cos(), angles.sin()))


@lru_cache(maxsize=_NUM_ROTARY_TABLES)
def _kept_rotary_table(num_tokens: int, head_width: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):  # a tensor made in inference mode could not be trained with later
        return _rotary_table(num_tokens, head_width, device, dtype)


def own_part(values: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank holds of what may be a DTensor."""
    to_local = getattr(values, "to_local", None)
    return values if to_local is None else to_local()


def turned(heads: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """`heads` [batch, heads, T, head_width], each pair (i, i + half) turned by its angle; in the type of `heads`."""
    (cosine, sine), (first, second) = rotary, heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(heads.dtype)


def build_transformer(args: Mapping[str, Any]) -> TrainTask:
    """The task; `args` is complete, as the catalog's `complete_args` makes it."""
    config = config_of(args)
    train, held_out = _data(args, config)
    is_bytes = args["data"] != "synthetic" and not is_token_file(args["data"])
    return TrainTask(
        model=partial(Transformer, config, DTYPES[args["dtype"]]),
        loss=cross_entropy,
        data=train,
        eval_data=held_out,
        metrics={"bits_per_byte": bits_per_byte} if is_bytes else {},
        collate=stack_pairs,
        tokens_per_sample=config.tokens_per_sample,
        flops_per_sample=config.flops_per_sample,
        layers=layers_in_order,
        tensor_parallel_plan=TENSOR_PARALLEL_PLAN,
        tensor_parallel_sizes=(config.num_heads,),
    )


def config_of(args: Mapping[str, Any]) -> TransformerConfig:
    """The shape that complete arguments stand for."""
    shape = shape_of(args)
    return TransformerConfig(
        vocab_size=args["vocab_size"] or BYTE_VOCABULARY,
        num_layers=shape.num_layers,
        width=shape.width,
        num_heads=shape.num_heads,
        tokens_per_sample=shape.tokens_per_sample,
        positions=args["positions"],
        mlp=args["mlp"],
        has_tied_embeddings=args["tied_embeddings"],
        dropout=args["dropout"],
    )


def _data(args: Mapping[str, Any], config: TransformerConfig) -> tuple[Any, Any]:
    """Training and held-out samples."""
    tokens_per_sample, vocab_size = config.tokens_per_sample, config.vocab_size
    if args["data"] == "synthetic":
        num_held_out = max(1, round(args["eval_fraction"] * _NUM_SYNTHETIC_SAMPLES))
        num_train = _NUM_SYNTHETIC_SAMPLES - num_held_out
        train = SyntheticTokens(num_train, tokens_per_sample, vocab_size)
        return train, SyntheticTokens(num_held_out, tokens_per_sample, vocab_size, first=num_train)
    windows, held_out = (
        TokenWindows(_tokens(path, args["token_dtype"]), tokens_per_sample=tokens_per_sample, vocab_size=vocab_size)
        for path in (args["data"], args["eval_data"] or args["data"])
    )
    return (windows, held_out) if args["eval_data"] is not None else windows.split(args["eval_fraction"])


def _tokens(data: str | None, token_dtype: str) -> Tokens:
    if data is None:
        return topics_tokens()
    return token_file(Path(data), token_dtype) if is_token_file(data) else text_tokens(Path(data))


def _initialise(module: nn.Module, num_layers: int) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_INITIAL_DEVIATION)
    # What is added to the residual stream is made smaller, so that it does not grow with the depth (as in GPT-2).
    for name in ("output", "down"):
        linear = getattr(module, name, None)
        if isinstance(linear, nn.Linear):
            nn.init.normal_(linear.weight, std=_INITIAL_DEVIATION / math.sqrt(2 * num_layers))
