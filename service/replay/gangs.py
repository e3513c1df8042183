"""What a job of a trace asks of nodes: one share of a node, or whole nodes and what is left over on another. Pure."""

from __future__ import annotations

import functools

from service.domain.gang_layout import GangLayout


@functools.lru_cache(maxsize=4096)
def layout_of(gpus: int, gpus_per_node: int) -> GangLayout:
    """The layout of a job of `gpus` GPUs: 12 on nodes of 8 are one whole node and 4 GPUs of another."""
    whole, rest = divmod(gpus, gpus_per_node)
    if whole == 0:
        return GangLayout(num_nodes=1, gpus_per_node=rest, processes_per_node=rest, cpus_per_node=0.0)
    return GangLayout(
        num_nodes=whole,
        gpus_per_node=gpus_per_node,
        processes_per_node=gpus_per_node,
        cpus_per_node=0.0,
        rest_gpus=rest,
    )
