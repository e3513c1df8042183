"""Random augmentation as a pure function of the sample: the generators are seeded anew around each item.

So a crop or a flip in `__getitem__` is the same on any rank, with any number of data workers, and after any resume.
It costs some 10 µs an item; a dataset that draws nothing says so with `draws_random = False` and pays nothing.
Not for: the seeds of weights and dropout, which belong to the loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from numpy.random import mtrand

_NUMPY_SEEDS: Final = 1 << 32
_DATA_GENERATOR: Final = np.random.MT19937(0)
"""numpy's generator while a sample is fetched."""


def draws_random(data: Any) -> bool:
    """Whether an item of the dataset may draw random numbers: yes, unless its `draws_random` is False."""
    return bool(getattr(data, "draws_random", True))


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """What is drawn inside does not disturb the global generators of random, numpy and torch (CPU)."""
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    # Swapped, not saved and restored: 1 µs rather than 120.
    numpy_generator = mtrand.get_bit_generator()
    mtrand.set_bit_generator(_DATA_GENERATOR)
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        mtrand.set_bit_generator(numpy_generator)


def seed_generators(seed: int, *position: int) -> None:
    """Seed the global generators of random, numpy and torch (CPU) for what stands at `position`."""
    text = ":".join(map(str, (seed, *position)))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    random.seed(number)
    np.random.seed(number % _NUMPY_SEEDS)
    # Not torch.manual_seed: that also looks for every kind of accelerator, which takes 0.3 ms.
    torch.default_generator.manual_seed(number)
