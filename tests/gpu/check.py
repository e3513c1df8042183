"""`python -m tests.gpu.check`: each path of the trainer that one GPU can run, in one short script, and a table of them.

bf16, compiling, activation checkpointing, the estimate beside the allocator's peak, a checkpoint there and back, and
speed: tokens/s and MFU of a decoder. On a machine without a GPU `--cpu` runs the same code with a tiny model, so that
the script itself is known to work; what only a GPU can tell is then left out. Exit status 1: a check failed.

Not for: several GPUs, or whether gradients are right (`tests/distributed` compares them on CPUs).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from gangline.protocol.pulse import Pulse
from tests.distributed.training_cases import Recorder
from trainer.assembly import assemble_task
from trainer.loop import Surroundings, Training
from trainer.mesh import Mesh, join_mesh
from trainer.plan.estimate import OptimizerKind, estimate
from trainer.plan.parallel_plan import ParallelPlan
from trainer.plan.training_plan import CheckpointSettings, RunTarget, TrainingPlan, TrainSettings
from trainer.profile import profile_task
from trainer.recipes.registry import build_recipe
from trainer.stop import StopFlag

ESTIMATE_TOLERANCE: Final = 0.10
SAME_LOSS: Final = 2e-2
"""Of bf16 with and without compiling: other kernels round otherwise."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the checks are."""

    small: dict[str, Any]
    """Recipe arguments of what is only to run."""
    large: dict[str, Any]
    """Of what is to be fast, and fill memory."""
    batch_size: int
    large_batch_size: int
    steps: int


GPU: Final = Scale(
    small={"size": "125m", "data": "synthetic", "vocab_size": 50257},
    large={"size": "1b", "data": "synthetic", "vocab_size": 50257, "tied_embeddings": True},
    batch_size=4,
    large_batch_size=4,
    steps=8,
)
CPU: Final = Scale(
    small={"size": "tiny", "data": "synthetic", "vocab_size": 256},
    large={"size": "tiny", "data": "synthetic", "vocab_size": 256, "num_layers": 8, "tied_embeddings": True},
    batch_size=4,
    large_batch_size=4,
    steps=4,
)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a short training came to."""

    losses: list[float]
    metrics: dict[str, float]
    """Of the last report."""
    peak_bytes: int


def train(mesh: Mesh, args: dict[str, Any], train: TrainSettings, root: Path | None = None, **parallel: Any) -> Ran:
    """Train the transformer for some steps on this device."""
    plan = TrainingPlan(
        run=RunTarget(recipe="transformer", args=args),
        parallel=ParallelPlan(**parallel),
        train=train,
        checkpoint=CheckpointSettings(every_steps=None, every_seconds=None, is_async=True),
        checkpoint_root=None if root is None else str(root),
    )
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    events = Recorder()
    task = dataclasses.replace(build_recipe("transformer", args), eval_data=None)
    subject = assemble_task(task, plan, mesh, events, {})
    around = Surroundings(mesh=mesh, events=events, stop=StopFlag({}), pulse=Pulse(None), say=lambda text: None)
    Training(subject, around).run()
    reports = [one["metrics"] for one in events.records if one["kind"] == "progress" and "loss" in one["metrics"]]
    peak = torch.cuda.max_memory_allocated() if mesh.device.type == "cuda" else 0
    return Ran(losses=events.values("loss"), metrics=reports[-1], peak_bytes=peak)


class Checks:
    """The checks, each a sentence of what was found. They raise AssertionError for what is wrong."""

    def __init__(self, mesh: Mesh, scale: Scale) -> None:
        self._mesh, self._scale = mesh, scale
        self._train = TrainSettings(steps=scale.steps, batch_size=scale.batch_size, lr=1e-4, report_every=1)

    def fp32(self) -> str:
        """The plain path."""
        ran = train(self._mesh, self._scale.small, self._train)
        untrained = math.log(self._scale.small["vocab_size"])
        assert all(abs(loss - untrained) < 0.1 * untrained for loss in ran.losses), f"{ran.losses}, not {untrained:.2f}"
        return f"loss {ran.losses[0]:.3f} -> {ran.losses[-1]:.3f}"

    def bf16(self) -> str:
        """Autocast computes about what fp32 does."""
        return self._close_to_plain(precision="bf16")

    def compiled(self) -> str:
        """torch.compile."""
        return self._close_to_plain(precision="bf16", compile=True)

    def selective_checkpointing(self) -> str:
        """Recomputing what is cheap: the same loss with less memory."""
        return self._less_memory("selective")

    def full_checkpointing(self) -> str:
        """Recomputing each layer."""
        return self._less_memory("full")

    def checkpoint(self) -> str:
        """A training that is resumed goes on where it was, with page-locked staging."""
        half = dataclasses.replace(self._train, steps=self._scale.steps // 2)
        whole = train(self._mesh, self._scale.small, self._train)
        with tempfile.TemporaryDirectory() as folder:
            first = train(self._mesh, self._scale.small, half, Path(folder))
            second = train(self._mesh, self._scale.small, self._train, Path(folder))
        joined = [*first.losses, *second.losses]
        furthest = max(abs(one - other) for one, other in zip(joined, whole.losses, strict=True))
        assert furthest <= SAME_LOSS, f"{joined} beside {whole.losses}"
        return f"resumed at step {len(first.losses)}, at most {furthest:.1e} off the curve"

    def estimated(self) -> str:
        """The estimate beside the allocator's peak, for each way to keep activations."""
        told = []
        for mode in ("none", "selective", "full"):
            plan = ParallelPlan(precision="bf16", activation_checkpointing=mode)
            task = build_recipe("transformer", self._scale.large)
            profile = profile_task(task, kernels=self._mesh.device.type)
            memory = estimate(profile, plan, optimizer=OptimizerKind(), batch_size=self._scale.large_batch_size)
            expected = memory.worst.total
            found = self._large(precision="bf16", activation_checkpointing=mode).peak_bytes
            if not found:
                told.append(f"{mode} {expected / 2**20:.0f} MiB (no allocator here)")
                continue
            off = expected / found - 1
            told.append(f"{mode} {expected / 2**30:.2f} of {found / 2**30:.2f} GiB ({off:+.1%})")
            assert abs(off) <= ESTIMATE_TOLERANCE, "; ".join(told)
        return "; ".join(told)

    def speed(self) -> str:
        """Tokens/s and MFU."""
        metrics = self._large(precision="bf16", compile=self._mesh.device.type == "cuda").metrics
        mfu = metrics.get("mfu")
        told = "unknown (no peak for this device)" if mfu is None else f"{mfu:.1%}"
        return (
            f"{metrics['tokens_per_second']:.0f} tokens/s, MFU {told}, {metrics['step_seconds'] * 1000:.0f} ms a step"
        )

    def _large(self, **parallel: Any) -> Ran:
        settings = dataclasses.replace(self._train, batch_size=self._scale.large_batch_size)
        return train(self._mesh, self._scale.large, settings, **parallel)

    def _close_to_plain(self, **parallel: Any) -> str:
        plain = train(self._mesh, self._scale.small, self._train)
        other = train(self._mesh, self._scale.small, self._train, **parallel)
        furthest = max(abs(one - two) for one, two in zip(plain.losses, other.losses, strict=True))
        assert furthest <= SAME_LOSS * plain.losses[0], f"{other.losses} beside {plain.losses}"
        return f"at most {furthest:.1e} off fp32"

    def _less_memory(self, mode: str) -> str:
        plain = train(self._mesh, self._scale.small, self._train)
        other = train(self._mesh, self._scale.small, self._train, activation_checkpointing=mode)
        assert (
            other.losses == plain.losses
            or max(abs(one - two) for one, two in zip(plain.losses, other.losses, strict=True)) <= 1e-4
        ), f"{other.losses} beside {plain.losses}"
        if not plain.peak_bytes:
            return "same losses"
        assert other.peak_bytes < plain.peak_bytes, f"{other.peak_bytes} bytes at the peak, {plain.peak_bytes} without"
        return f"same losses, peak {other.peak_bytes / plain.peak_bytes:.0%}"


NAMES: Final = (
    "fp32",
    "bf16",
    "compiled",
    "selective_checkpointing",
    "full_checkpointing",
    "checkpoint",
    "estimated",
    "speed",
)


def main() -> int:
    """Run the checks; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU: is the script itself right?")
    parser.add_argument("--only", choices=NAMES, action="append", help="run these checks (default: all)")
    given = parser.parse_args()
    if not given.cpu and not torch.cuda.is_available():
        print("No CUDA device here. --cpu runs the same code with a tiny model on the CPU.")
        return 2
    mesh = join_mesh({"CUDA_VISIBLE_DEVICES": ""} if given.cpu else {}, start_timeout=60, timeout=60)
    checks = Checks(mesh, CPU if given.cpu else GPU)
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__} on {name}")
    results = [run(check, getattr(checks, check)) for check in given.only or NAMES]
    print(json.dumps({"device": name, "checks": results}))
    return int(any(not one["ok"] for one in results))


def run(name: str, check: Callable[[], str]) -> dict[str, Any]:
    """One line of the table."""
    begun = time.monotonic()
    try:
        text, is_ok = check(), True
    except Exception as error:  # noqa: BLE001  # the other checks still count
        text, is_ok = f"{type(error).__name__}: {error}", False
        traceback.print_exc()
    seconds = time.monotonic() - begun
    print(f"{'ok ' if is_ok else 'BAD'}  {name:<24} {seconds:6.1f} s  {text}", flush=True)
    return {"name": name, "ok": is_ok, "seconds": round(seconds, 1), "text": text}


if __name__ == "__main__":
    sys.exit(main())
