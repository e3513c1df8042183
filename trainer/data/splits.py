"""Which samples are held out: a pure function of a seed of its own, so that every run evaluates on the same ones."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.data.order import SampleOrder


def held_out(num_items: int, fraction: float, seed: int, labels: Sequence[int] | None = None) -> list[int]:
    """Indices of the items that are held out, ascending: about `fraction` of them, at least one.

    With `labels` (the class of each item), that part of each class; a class of one item is kept for training. Raises
    ValueError when nothing would be left for one of the two.
    """
    groups: dict[int, list[int]] = {}
    for index in range(num_items):
        groups.setdefault(labels[index] if labels is not None else 0, []).append(index)
    chosen = [index for group in groups.values() for index in _chosen(group, fraction, seed)]
    if not 0 < len(chosen) < num_items:
        raise ValueError(f"{num_items} samples cannot be split into training data and held-out data.")
    return sorted(chosen)


def complement(indices: Sequence[int], num_items: int) -> list[int]:
    """The other indices below `num_items`, ascending."""
    taken = set(indices)
    return [index for index in range(num_items) if index not in taken]


def _chosen(group: list[int], fraction: float, seed: int) -> list[int]:
    if len(group) == 1:
        return []
    count = min(max(1, round(fraction * len(group))), len(group) - 1)
    return [group[place] for _, place in SampleOrder(len(group), seed).items(0, count)]
