"""Made-up data that can be learnt, for measuring and for machines without data. Item i depends on i alone."""

from __future__ import annotations

from typing import Final

import torch

from trainer.data.rows import Pair, Rows

_NUM_COLUMNS: Final = 20
_NUM_TABLE_CLASSES: Final = 4
_NUM_IMAGE_CLASSES: Final = 10
_MULTIPLIER: Final = 0x9E3779B97F4A7C15


class SyntheticTokens:
    """Counting: each sample begins at some token and goes on in steps of 1 to 8, modulo the vocabulary.

    Two tokens give the rest away, so a model that has learnt it has a loss near 0.
    """

    draws_random = False

    def __init__(self, num_samples: int, tokens_per_sample: int, vocab_size: int, first: int = 0) -> None:
        """`first`: number of the first sample, so that held-out samples are others."""
        self._num_samples, self._vocab_size, self._first = num_samples, vocab_size, first
        self._places = torch.arange(tokens_per_sample + 1)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Pair:
        bits = ((self._first + index + 1) * _MULTIPLIER) % (1 << 64) >> 24
        window = (bits + self._places * (1 + bits % 8)) % self._vocab_size
        return window[:-1], window[1:]


def synthetic_table(num_rows: int, dtype: torch.dtype) -> Rows:
    """Random rows; the class is the largest of a few random linear functions of them."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_rows, _NUM_COLUMNS, generator=generator, dtype=torch.float64)
    teacher = torch.randn(_NUM_COLUMNS, _NUM_TABLE_CLASSES, generator=generator, dtype=torch.float64)
    return Rows(features.to(dtype), (features @ teacher).argmax(dim=1))


class SyntheticImages:
    """Noise [3, size, size] over a pattern of its class, which is `index` mod 10."""

    draws_random = False
    num_classes = _NUM_IMAGE_CLASSES

    def __init__(self, num_samples: int, size: int, dtype: torch.dtype, first: int = 0) -> None:
        """`first`: number of the first sample, so that held-out samples are others."""
        self._num_samples, self._dtype, self._first = num_samples, dtype, first
        generator = torch.Generator().manual_seed(0)
        self._patterns = torch.randn(_NUM_IMAGE_CLASSES, 3, size, size, generator=generator)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Pair:
        number = self._first + index
        label = number % _NUM_IMAGE_CLASSES
        noise = torch.randn(self._patterns.shape[1:], generator=torch.Generator().manual_seed(number))
        return (self._patterns[label] + noise).to(self._dtype), torch.tensor(label)
