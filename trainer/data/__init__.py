"""Samples and batches: what is trained on at which position, and the built-in data sets.

Batches are a pure function of (seed, position): the position is the number of samples seen so far, so a run resumes
anywhere, on any number of ranks, with nothing else saved. Not for: models (`trainer.recipes`).
"""

from __future__ import annotations

from trainer.data.sharding import Shard, shard

__all__ = ["Shard", "shard"]
