"""The same training by four loops: the trainer's own, one written by hand, Lightning Fabric's and Accelerate's.

Same model and start, same samples in memory, same collate function, optimizer, clipping and threads; each loop as its
documentation writes it. What a loop costs is the time between the ends of optimizer updates, by a hook of the
optimizer. The functions that take a mesh run on ranks (`tests.support.ranks`). Not for: figures (`ratios`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader

from gangline.protocol.pulse import Pulse
from tests.bench.support.ratios import batch_for, turn_order
from trainer.assembly import assemble_task
from trainer.data.rows import Rows, stack_pairs
from trainer.events import EventWriter
from trainer.loop import Surroundings, Training
from trainer.mesh import Mesh
from trainer.optimizers import build_optimizer
from trainer.plan.parallel_plan import ParallelPlan
from trainer.plan.training_plan import RunTarget, TrainingPlan, TrainSettings
from trainer.recipes.common import cross_entropy
from trainer.recipes.registry import build_recipe
from trainer.seeds import derive, seed_all
from trainer.stop import StopFlag
from trainer.task import TrainTask

HAND, TRAINER, FABRIC, ACCELERATE = "hand", "trainer", "fabric", "accelerate"
WARM_STEPS: Final = 5
"""Not timed at the start of each block: caches, the first agreement of ranks, the next epoch's loader."""
LOG_EVERY: Final = 10
CLIP_NORM: Final = 1.0
NUM_SAMPLES: Final = 2_000
_TRIED_BATCHES: Final = (4, 16)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every loop trains."""

    batch_size: int
    """Global: samples per step over all ranks."""
    timed_steps: int
    """Of a block, after the warm ones."""
    size: str = "tiny"
    """Of the transformer recipe."""

    @property
    def block_steps(self) -> int:
        """Steps of a block in all."""
        return WARM_STEPS + self.timed_steps

    def settings(self) -> TrainSettings:
        """How it is trained; reports as often as they are made when nobody says how often."""
        return TrainSettings(steps=self.block_steps, batch_size=self.batch_size, lr=1e-4, clip_norm=CLIP_NORM, seed=1)


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one block of steps took, per timed step."""

    wall_seconds: float
    cpu_seconds: float
    """Of the whole process, all threads: what other processes do to the machine shows less in it."""


class StepClock:
    """Notes when each optimizer update ended."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._marks: list[tuple[float, float]] = []
        optimizer.register_step_post_hook(self.note)

    def note(self, *_: Any) -> None:
        """An update ended."""
        self._marks.append((time.perf_counter(), time.process_time()))

    def take(self, num_steps: int) -> Block:
        """The block that just ended, of `num_steps` steps. Raises RuntimeError when it had another number."""
        marks, self._marks = self._marks, []
        if len(marks) != num_steps:
            raise RuntimeError(f"the loop made {len(marks)} updates, not {num_steps}: it cannot be compared")
        timed = num_steps - WARM_STEPS
        (wall_began, cpu_began), (wall_ended, cpu_ended) = marks[WARM_STEPS - 1], marks[-1]
        return Block(wall_seconds=(wall_ended - wall_began) / timed, cpu_seconds=(cpu_ended - cpu_began) / timed)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One loop, ready to run block after block."""

    run: Callable[[], None]
    """Runs one block."""
    model: nn.Module
    clock: StepClock


# --- Cases on ranks --------------------------------------------------------------------------------------------------


def choose_batch(mesh: Mesh, step_seconds: float) -> int:
    """Samples per step with which the loop by hand takes about `step_seconds` of one core."""
    tried = {}
    for batch_size in _TRIED_BATCHES:
        workload = Workload(batch_size=batch_size, timed_steps=10)
        contestant = by_hand(task_of(workload), workload)
        tried[batch_size] = min(_timed(contestant, workload).cpu_seconds for _ in range(3))
    return batch_for(step_seconds, tried)


def run_turn(mesh: Mesh, workload: Workload, folder: str, turn: int) -> dict[str, Block]:
    """One block of each loop, one after the other, by the name of the loop. The loops are made at the first turn."""
    contestants = _contestants(mesh, workload, folder)
    return {name: _timed(contestants[name], workload) for name in turn_order(list(contestants), turn)}


def check_same_updates(mesh: Mesh, folder: str) -> None:
    """Raise AssertionError unless the four loops come to the same weights: else they do not do the same work."""
    workload = Workload(batch_size=2, timed_steps=3)
    contestants = _make_all(one_sample_task(workload), workload, mesh, Path(folder))
    weights = {}
    for name, contestant in contestants.items():
        _timed(contestant, workload)
        weights[name] = dict(contestant.model.named_parameters())
    for name in weights:
        torch.testing.assert_close(weights[name], weights[HAND], msg=lambda text: f"{name} and {HAND}: {text}")  # noqa: B023  # called at once


def run_trainer(mesh: Mesh, workload: Workload, folder: str) -> Block:
    """One block of the trainer's loop alone, on as many ranks as there are."""
    return _timed(_trainer_alone(mesh, workload, folder), workload)


def _timed(contestant: Contestant, workload: Workload) -> Block:
    contestant.run()
    return contestant.clock.take(workload.block_steps)


@functools.cache
def _contestants(mesh: Mesh, workload: Workload, folder: str) -> dict[str, Contestant]:
    return _make_all(task_of(workload), workload, mesh, Path(folder))


def _make_all(task: TrainTask, workload: Workload, mesh: Mesh, folder: Path) -> dict[str, Contestant]:
    # Accelerate and Fabric look at the variables of torchrun, and would set up gloo for the one rank that there is.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        os.environ.pop(name, None)
    return {
        HAND: by_hand(task, workload),
        TRAINER: by_trainer(task, workload, mesh, folder),
        FABRIC: by_fabric(task, workload),
        ACCELERATE: by_accelerate(task, workload),
    }


@functools.cache
def _trainer_alone(mesh: Mesh, workload: Workload, folder: str) -> Contestant:
    return by_trainer(task_of(workload), workload, mesh, Path(folder))


# --- The loops -------------------------------------------------------------------------------------------------------


def task_of(workload: Workload) -> TrainTask:
    """The transformer recipe on bytes of English, with the samples in memory and nothing held out."""
    task = build_recipe("transformer", {"size": workload.size})
    samples = [task.data[index] for index in range(NUM_SAMPLES)]
    inputs, targets = stack_pairs(samples)
    return dataclasses.replace(task, data=Rows(inputs, targets), eval_data=None, metrics={})


def one_sample_task(workload: Workload) -> TrainTask:
    """All samples are alike, so that it does not matter in which order a loop takes them."""
    task = task_of(workload)
    inputs, targets = (values[:1].repeat(NUM_SAMPLES, 1) for values in (task.data.inputs, task.data.targets))
    return dataclasses.replace(task, data=Rows(inputs, targets))


def by_trainer(task: TrainTask, workload: Workload, mesh: Mesh, folder: Path) -> Contestant:
    """The loop of the trainer as a job runs it: events and pulse in files, reports about twice a second."""
    strategy = "ddp" if mesh.world_size > 1 else "single"
    plan = TrainingPlan(
        run=RunTarget(recipe="transformer", args={"size": workload.size}),
        parallel=ParallelPlan(strategy=strategy, dp_replicate=mesh.world_size),
        train=workload.settings(),
    )
    own = folder / f"{mesh.world_size}-{mesh.rank}"
    own.mkdir(parents=True, exist_ok=True)
    events = EventWriter(own / "events.jsonl" if mesh.is_leader else None)
    log = (own / "log.txt").open("a", encoding="utf-8")
    around = Surroundings(
        mesh=mesh,
        events=events,
        stop=StopFlag({}),
        pulse=Pulse(own / "pulse"),
        say=lambda text: print(text, file=log, flush=True),
    )
    subject = assemble_task(task, plan, mesh, events, {})
    return Contestant(
        # A training runs once: each block is a new one of the same model and optimizer.
        run=lambda: _drop(Training(subject, around).run()),
        model=subject.model.inner,
        clock=StepClock(subject.optimizer),
    )


def by_hand(task: TrainTask, workload: Workload) -> Contestant:
    """What a careful user writes with torch alone."""
    model, optimizer, loader = _parts(task, workload)

    def run() -> None:
        for step, (inputs, targets) in _steps(loader, workload):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            if step % LOG_EVERY == 0:
                loss.item()

    return Contestant(run=run, model=model, clock=StepClock(optimizer))


def by_fabric(task: TrainTask, workload: Workload) -> Contestant:
    """Lightning Fabric. Raises ImportError when it is not installed."""
    plain_model, plain_optimizer, plain_loader = _parts(task, workload)
    clock = StepClock(plain_optimizer)
    fabric: Any = importlib.import_module("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(plain_model, plain_optimizer)
    loader = fabric.setup_dataloaders(plain_loader)

    def run() -> None:
        for step, (inputs, targets) in _steps(loader, workload):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
            optimizer.step()
            if step % LOG_EVERY == 0:
                loss.item()

    return Contestant(run=run, model=plain_model, clock=clock)


def by_accelerate(task: TrainTask, workload: Workload) -> Contestant:
    """Hugging Face Accelerate. Raises ImportError when it is not installed."""
    plain_model, plain_optimizer, plain_loader = _parts(task, workload)
    clock = StepClock(plain_optimizer)
    accelerator: Any = importlib.import_module("accelerate").Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(plain_model, plain_optimizer, plain_loader)
    if accelerator.num_processes != 1 or model is not plain_model:
        raise RuntimeError(f"Accelerate runs as {accelerator.distributed_type}, the others on one rank without")

    def run() -> None:
        for step, (inputs, targets) in _steps(loader, workload):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            if step % LOG_EVERY == 0:
                loss.item()

    return Contestant(run=run, model=plain_model, clock=clock)


def _parts(task: TrainTask, workload: Workload) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """Model, optimizer and loader, the model as the trainer would start it."""
    settings = workload.settings()
    seed_all(derive(settings.seed, "init"))
    model = copy.deepcopy(task.model) if isinstance(task.model, nn.Module) else task.model()
    loader: DataLoader[Any] = DataLoader(
        task.data, batch_size=workload.batch_size, shuffle=True, drop_last=True, collate_fn=stack_pairs
    )
    return model, build_optimizer(model, settings), loader


def _steps(loader: Any, workload: Workload) -> Iterator[tuple[int, Any]]:
    """(step, batch) of one block, counted from 1, over as many epochs as it takes."""
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    return enumerate(itertools.islice(epochs, workload.block_steps), start=1)


def _drop(value: object) -> None:
    return None
