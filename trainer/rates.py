"""How fast a training runs, from what was measured: samples/s, tokens/s, MFU, memory. Pure but for `peak_memory_bytes`.

MFU (Chowdhery et al. 2022, appendix B): the model's floating-point operations per second over the *dense* peak of the
devices; the sparse peak that data sheets print first is twice that. Unknown devices and CPUs have none.
"""

from __future__ import annotations

import resource
from collections import deque
from dataclasses import dataclass
from typing import Final

import torch

DENSE_PEAK_FLOPS: Final = {
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""bf16 (V100, T4: fp16) tensor-core peak per device, without sparsity, by a word of its name; first match counts."""
RECENT_STEPS: Final = 20


def dense_peak_flops(device_name: str) -> float | None:
    """Peak of a device by its name as torch reports it; None: not known, as is that of a slice of one (MIG)."""
    words = device_name.replace("-", " ").split()
    if "MIG" in words:
        return None
    for name, peak in DENSE_PEAK_FLOPS.items():
        wanted = name.split()
        if all(word in words for word in wanted):
            return peak
    return None


def mfu(flops_per_sample: float, samples_per_second: float, peak_flops: float | None, world_size: int) -> float | None:
    """Model FLOPs utilisation of all devices together, 0 to 1; None where the peak is not known."""
    if peak_flops is None:
        return None
    return flops_per_sample * samples_per_second / (peak_flops * world_size)


@dataclass(frozen=True, kw_only=True)
class Speedometer:
    """What turns samples per second into the rates that people compare."""

    tokens_per_sample: int | None
    flops_per_sample: float
    peak_flops: float | None
    """Dense peak of one device; None: not known."""
    world_size: int

    def rates(self, samples_per_second: float) -> dict[str, float]:
        """`tokens_per_second` where samples have tokens, `mfu` where the peak is known."""
        found: dict[str, float] = {}
        if self.tokens_per_sample:
            found["tokens_per_second"] = samples_per_second * self.tokens_per_sample
        used = mfu(self.flops_per_sample, samples_per_second, self.peak_flops, self.world_size)
        if used is not None:
            found["mfu"] = used
        return found


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: by the device's allocator, on a CPU by this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class StepTimes:
    """Durations of the recent steps, in seconds."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def add(self, seconds: float) -> None:
        """A step took so long."""
        self._recent.append(seconds)

    @property
    def slowest(self) -> float:
        """Of the recent ones; 0 before there are any."""
        return max(self._recent, default=0.0)


def sync_interval(slow_step_seconds: float, *, last_interval: int, target_seconds: float = 0.5, most: int = 20) -> int:
    """Steps until the next agreement of the ranks, so that they come about every `target_seconds`. Pure.

    By a slow step of the recent ones, and at most twice the last interval: steps are uneven (batches of data workers
    arrive in bursts), and twenty that were thought to be quick may take minutes, in which nobody hears of a stop.
    """
    if slow_step_seconds <= 0.0:
        return 1
    return max(1, min(most, 2 * last_interval, int(target_seconds / slow_step_seconds)))
