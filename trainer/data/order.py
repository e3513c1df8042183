"""In what order samples are seen, and who gets which: pure, and nothing of it has to be saved.

The stream of samples is endless: sample k is item `permutation(seed, epoch)[k mod N]` of epoch k div N. The permutation
is computed, not drawn and kept: a keyed Feistel network over the numbers below the next power of four, walked until it
lands below N. So any place of any epoch costs the same, in time and memory, for a thousand samples or ten billion.
Not for: fetching samples (`trainer.data.loader`).
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

_ROUNDS: Final = 8
_BLOCK: Final = 2048
"""Places computed at once: one array operation costs as much for one as for some hundred."""
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)  # odd; the golden ratio's bits spread well (Fibonacci hashing)

Words = npt.NDArray[np.uint64]


class SampleOrder:
    """Which item of the data stands where in the endless stream of samples."""

    def __init__(self, num_samples: int, seed: int, shuffle: bool = True) -> None:
        """Order of `num_samples` items; with `shuffle` another one each epoch. Raises ValueError without items."""
        if num_samples < 1:
            raise ValueError(f"there is no order of {num_samples} samples; at least one is needed.")
        self.num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle
        self._block: tuple[int, int, list[int]] | None = None
        """(epoch, number of the block, items): the block used last."""

    def items(self, first: int, last: int) -> list[tuple[int, int]]:
        """(epoch, index) of the samples from `first` up to, not including, `last` of the stream, in order."""
        return [self._item(position) for position in range(first, last)]

    def _item(self, position: int) -> tuple[int, int]:
        epoch, place = divmod(position, self.num_samples)
        if not self._shuffle:
            return epoch, place
        number, offset = divmod(place, _BLOCK)
        if self._block is None or self._block[:2] != (epoch, number):
            begin = number * _BLOCK
            places = np.arange(begin, min(begin + _BLOCK, self.num_samples), dtype=np.uint64)
            keys = _round_keys(self._seed, epoch)
            self._block = epoch, number, permuted(places, self.num_samples, keys).tolist()
        return epoch, self._block[2][offset]


def permuted(places: Words, num_items: int, keys: Words) -> Words:
    """Where each of `places` goes in the permutation of the numbers below `num_items` that `keys` choose."""
    half_bits = max(1, ((num_items - 1).bit_length() + 1) // 2)
    found = _feistel(places, half_bits, keys)
    # Cycle walking: a number that lands beyond the end is sent on until it lands inside. It stays one to one.
    outside = np.flatnonzero(found >= num_items)
    while outside.size:
        found[outside] = _feistel(found[outside], half_bits, keys)
        outside = outside[found[outside] >= num_items]
    return found


def partition(count: int, parts: int) -> list[tuple[int, int]]:
    """`count` things in `parts` slices (first, last) in order, whose sizes differ by at most 1; some may be empty."""
    size, larger = divmod(count, parts)
    bounds = [part * size + min(part, larger) for part in range(parts + 1)]
    return list(pairwise(bounds))


def _round_keys(seed: int, epoch: int) -> Words:
    digest = hashlib.shake_128(f"sample order {seed} {epoch}".encode()).digest(8 * _ROUNDS)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(values: Words, half_bits: int, keys: Words) -> Words:
    """A one-to-one map of the numbers of 2 × `half_bits` bits, at most 62."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        mixed = (right ^ key) * _MULTIPLIER
        mixed = (mixed ^ (mixed >> np.uint64(32))) * _MULTIPLIER
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << bits) | right
