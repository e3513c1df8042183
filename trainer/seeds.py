"""One seed per purpose, derived from the job's: so that more data workers, say, do not change the weights.

Dropout is seeded anew at each step from (seed, rank, step). So a resumed run draws what an unbroken one would have
drawn, and no generator state has to be saved. Not for: the order of samples (`trainer.data.order`).
"""

from __future__ import annotations

import hashlib
import os
from typing import Final

import torch

_BITS: Final = 63


def derive(seed: int, purpose: str, *numbers: int) -> int:
    """A seed for one purpose. Pure; different purposes and numbers give unrelated seeds."""
    text = ":".join([str(seed), purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - _BITS)


def seed_all(seed: int) -> None:
    """Seed torch's generators of CPU and CUDA, as `torch.manual_seed` does. That one also formats the stack for devices
    that were not used yet, which costs half a millisecond at each step."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def make_deterministic() -> None:
    """Use only algorithms that give the same bits each time; torch raises where there is none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
