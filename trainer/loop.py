"""The training loop: steps, and between them what all ranks agree on.

Order at a step: update, agree, report, stop if agreed, checkpoint, evaluate. A checkpoint of step N comes before the
evaluation at N, so that a run resumed at N evaluates first, and no evaluation is lost. Not for: starting and ending the
process (`trainer.main`), one update (`trainer.step`), what is written (`trainer.checkpoint`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from gangline.protocol.outcomes import Outcome
from gangline.protocol.pulse import Phase, Pulse
from trainer.agreement import Agreed, Said, agree
from trainer.checkpoint.checkpointer import Checkpointer, Position
from trainer.checkpoint.growth import told_while_bytes_move
from trainer.checkpoint_schedule import CheckpointSchedule
from trainer.data.batches import StepBatches
from trainer.evaluation import Evaluator
from trainer.events import EventWriter
from trainer.failure import ConfigError, NonFiniteLossError, PeerFailedError
from trainer.feed import Feed
from trainer.mesh import Mesh, tighten_timeout
from trainer.optimizers import lr_factor, set_lr
from trainer.parallel.model import ParallelModel
from trainer.plan.training_plan import TrainingPlan
from trainer.rates import Speedometer, StepTimes, sync_interval
from trainer.seeds import derive, seed_all
from trainer.step import Stepper
from trainer.stop import StopFlag
from trainer.task import TrainTask
from trainer.window import Window

FLOOR_SECONDS: Final = {
    Phase.STARTING: 600.0,
    Phase.RESTORING: 1800.0,
    Phase.COMPILING: 1800.0,
    Phase.CHECKPOINT: 600.0,
    Phase.STOPPING: 600.0,
}
"""How long a phase may go without a move, where that is more than the job's own `hang_after`."""


SAY_SECONDS: Final = 5.0
"""The log gets a line of progress about this often, unless the job says how often it reports."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the training ended without failing."""

    outcome: Outcome
    """succeeded, preempted or cancelled."""
    step: int


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the loop talks to."""

    mesh: Mesh
    events: EventWriter
    """Rank 0 tells; the others' go nowhere."""
    stop: StopFlag
    pulse: Pulse
    say: Callable[[str], None]
    """Prints a line into the rank's log; only rank 0's does."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is trained: the task as the plan made it."""

    plan: TrainingPlan
    """With nothing left to choose."""
    task: TrainTask
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    feed: Feed
    checkpointer: Checkpointer | None
    speed: Speedometer


class Training:
    """One run of the loop on this rank."""

    def __init__(self, subject: Subject, around: Surroundings) -> None:
        plan = subject.plan
        self._plan, self._train = plan, plan.train
        self._subject, self._around, self._mesh = subject, around, around.mesh
        self._feed = subject.feed
        self._base_lrs = [float(group["lr"]) for group in subject.optimizer.param_groups]
        self._settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in subject.optimizer.param_groups
        ]
        self._stepper = Stepper(
            subject.task,
            subject.model,
            subject.optimizer,
            self._mesh,
            clip_norm=plan.train.clip_norm,
            moved=around.pulse.move,
        )
        self._evaluator = Evaluator(
            task=subject.task,
            model=subject.model,
            mesh=self._mesh,
            is_stop_asked=lambda: around.stop.is_set,
            moved=around.pulse.move,
        )
        self._checkpoints = CheckpointSchedule(subject.checkpointer, plan.checkpoint, self._mesh, around.say)
        self._position = Position(step=0, samples_seen=0)
        self._window = Window(self._mesh.device)
        self._times = StepTimes()
        self._next_sync, self._sync_interval = 1, 1
        self._evaluated_step = -1
        self._has_ended = False
        self._said_at = -SAY_SECONDS

    def run(self) -> Ending:
        """Train to the end, or until all ranks agree to stop. Raises what user code raises, NonFiniteLossError,
        PeerFailedError, and what checkpoints raise."""
        self._restore()
        step = self._position.step
        self._around.events.progress(step=step or None, total_steps=self._feed.total_steps)
        if self._mesh.sum([float(self._around.stop.is_set)])[0]:
            return self._stop(is_final=self._agreed_final())
        if self._is_evaluation_due(step) and not self._evaluate():
            return self._stop(is_final=self._agreed_final())
        self._enter(Phase.COMPILING if self._plan.parallel.compile else Phase.TRAINING)
        with contextlib.closing(self._feed.open(self._position)) as batches:
            ending = self._run_steps(batches)
        return ending if ending is not None else self._finish()

    # --- Steps -------------------------------------------------------------------------------------------------------

    def _run_steps(self, batches: Iterator[StepBatches]) -> Ending | None:
        """None: all steps are done."""
        self._checkpoints.restart_clock()
        self._window.restart()
        is_first, begun_at = True, time.perf_counter()
        while self._feed.has_more(self._position):
            is_sync = self._is_sync(self._position.step + 1)
            self._update(next(batches), wants_norm=is_sync)
            now = time.perf_counter()
            if is_first:
                # It allocates, meets and perhaps compiles: its time says nothing about the next ones.
                tighten_timeout(self._mesh, self._subject.model.axes.groups, self._train.hang_after_seconds)
                self._enter(Phase.TRAINING)
            else:
                self._times.add(now - begun_at)
            is_first, begun_at = False, now
            self._around.pulse.move(self._position.step, self._times.slowest)
            if is_sync:
                ending = self._between_steps()
                if ending is not None:
                    return ending
                begun_at = time.perf_counter()
        return self._end_of_data()

    def _end_of_data(self) -> Ending | None:
        """After the last step. An iterable dataset may have ended before it was due, between two agreements."""
        step, total = self._position.step, self._feed.total_steps
        if step == 0:
            raise ConfigError("the training data ended before its first step: some rank had too few samples for one.")
        self._has_ended = True
        if step < total:
            self._around.events.notice(f"The training data ended at step {step} of {total}.")
        return self._between_steps() if self._window.num_steps else None

    def _update(self, batches: StepBatches, *, wants_norm: bool) -> None:
        step, task = self._position.step, self._subject.task
        axes = self._subject.model.axes
        # Ranks that split layers hold the same activations, and must drop the same ones.
        seed_all(derive(self._train.seed, "dropout", step, axes.dp_rank, axes.pp_rank))
        total = self._feed.total_steps
        factor = task.schedule(step) if task.schedule else lr_factor(step, total, self._train)
        self._window.lr = set_lr(self._subject.optimizer, self._base_lrs, factor)
        result = self._stepper.step(batches, wants_norm=wants_norm)
        self._window.add(step + 1, result, batches)
        self._position = Position(step=step + 1, samples_seen=self._position.samples_seen + batches.num_samples)

    def _is_sync(self, step: int) -> bool:
        """Whether the ranks agree after `step`: from what all of them know."""
        every = self._train.report_every
        return (
            step >= self._next_sync
            or (every is not None and step % every == 0)
            or self._is_evaluation_due(step)
            or self._checkpoints.is_due(step)
            or self._feed.is_last(step)
        )

    def _between_steps(self) -> Ending | None:
        """Agree, and do what was agreed. An ending: leave."""
        agreed = self._agree()
        step = self._position.step
        if agreed.is_not_finite:
            self._raise_not_finite()
        self._sync_interval = sync_interval(agreed.step_seconds, last_interval=self._sync_interval)
        self._next_sync = step + self._sync_interval
        every, is_last = self._train.report_every, self._feed.is_last(step) or self._has_ended
        if every is None or step % every == 0 or is_last or agreed.is_stop:
            self._report(agreed)
        self._checkpoints.follow(is_finished=agreed.is_checkpoint_finished, has_failed=agreed.is_checkpoint_failed)
        if agreed.is_stop:
            return self._stop(is_final=agreed.is_stop_final)
        if is_last:
            return None
        away_since = time.perf_counter()
        if agreed.is_checkpoint_due or self._checkpoints.is_due(step):
            self._save(is_async=self._plan.checkpoint.is_async)
        if self._is_evaluation_due(step) and not self._evaluate():
            return self._stop(is_final=self._agreed_final())
        self._window.leave_out(time.perf_counter() - away_since)
        return None

    def _agree(self) -> Agreed:
        window, stop = self._window, self._around.stop
        said = Said(
            loss_sum=window.loss_sum,
            count=window.count,
            step_seconds=max(window.step_seconds, self._times.slowest),
            is_stop_asked=stop.is_set,
            is_stop_final=stop.is_without_checkpoint,
            is_not_finite=window.is_not_finite,
            is_checkpoint_due=self._checkpoints.is_clock_due(),
            is_checkpoint_finished=self._checkpoints.is_finished,
            is_checkpoint_failed=self._checkpoints.has_failed,
        )
        return agree(self._mesh, said)

    def _agreed_final(self) -> bool:
        return self._mesh.sum([float(self._around.stop.is_without_checkpoint)])[0] > 0

    def _raise_not_finite(self) -> None:
        """The rank whose loss was the first to go raises the cause; the others say whose it was."""
        firsts = self._mesh.gather((self._window.first_bad_loss_step, self._window.first_bad_norm_step))
        found = [(step, index, rank) for rank, steps in enumerate(firsts) for index, step in enumerate(steps) if step]
        step, index, rank = min(found)
        text = f"the {('loss', 'gradient norm')[index]} is not finite at step {step} on rank {rank}"
        if rank != self._mesh.rank:
            raise PeerFailedError(f"{text}; this rank stops with it")
        raise NonFiniteLossError(
            f"{text}. Lower train.lr, set train.clip_norm, or look at the samples of that step (train.seed "
            f"{self._train.seed} gives the same ones again)."
        )

    # --- Telling -----------------------------------------------------------------------------------------------------

    def _report(self, agreed: Agreed) -> None:
        step, total = self._position.step, self._feed.total_steps
        metrics = self._window.metrics(agreed.loss, self._subject.speed)
        self._around.events.progress(step=step, total_steps=total, metrics=metrics)
        if time.perf_counter() - self._said_at >= SAY_SECONDS or self._train.report_every or self._feed.is_last(step):
            self._said_at = time.perf_counter()
            shown = " ".join(f"{name} {metrics[name]:.5g}" for name in ("loss", "lr", "grad_norm") if name in metrics)
            self._around.say(f"step {step} of {total}  {shown}  {metrics['samples_per_second']:.4g} samples/s")
        self._window.restart()

    def _enter(self, phase: Phase) -> None:
        self._around.pulse.enter(phase, max(self._train.hang_after_seconds, FLOOR_SECONDS.get(phase, 0.0)))
        self._around.events.progress(phase=phase.name.lower())

    # --- Evaluation --------------------------------------------------------------------------------------------------

    def _is_evaluation_due(self, step: int) -> bool:
        every = self._train.eval_every
        return self._feed.has_evaluation and every is not None and step > 0 and step % every == 0

    def _evaluate(self) -> bool:
        """Whether it came to the end."""
        self._enter(Phase.EVALUATION)
        self._subject.model.share_buffers(self._mesh)
        batches, num_batches = self._feed.evaluation()
        values = self._evaluator.run(batches, num_batches)
        if values is not None:
            step = self._position.step
            metrics = {f"val_{name}": value for name, value in values.items()}
            self._around.events.progress(step=step, total_steps=self._feed.total_steps, metrics=metrics)
            self._around.say(f"step {step}  " + " ".join(f"{name} {value:.5g}" for name, value in metrics.items()))
            self._evaluated_step = step
        self._enter(Phase.TRAINING)
        return values is not None

    # --- Checkpoints and endings -------------------------------------------------------------------------------------

    def _restore(self) -> None:
        self._enter(Phase.RESTORING)
        with self._told_while_bytes_move():
            restored = self._checkpoints.restore(self._subject.model.inner, self._subject.optimizer)
        if restored is None:
            return
        self._position = restored.position
        self._feed.go_to(self._position)
        if self._subject.task.optimizer is None:
            # The plan says how it is trained, also where a checkpoint was made with other settings.
            for group, settings in zip(self._subject.optimizer.param_groups, self._settings, strict=True):
                group.update(settings)
        self._next_sync = self._position.step + 1
        text = f"Resumed at step {self._position.step} from {restored.path}, saved by {restored.world_size} ranks."
        self._around.say(text)
        self._around.events.notice(text)

    def _save(self, *, is_async: bool) -> None:
        """Begin a checkpoint of this step, or write it to the end; nothing when it is saved already."""
        if not self._checkpoints.needs(self._position.step):
            return
        self._enter(Phase.CHECKPOINT)
        self._subject.model.share_buffers(self._mesh)
        position = dataclasses.replace(self._position, data_state=self._feed.state())
        with self._told_while_bytes_move():
            blocked = self._checkpoints.save(
                self._subject.model.inner, self._subject.optimizer, position, is_async=is_async
            )
        self._around.events.progress(step=position.step, metrics={"checkpoint_blocking_seconds": blocked})
        self._enter(Phase.TRAINING)

    def _told_while_bytes_move(self) -> AbstractContextManager[None]:
        """In the phase that was entered last: what still moves bytes may take as long as it needs."""
        root = self._plan.checkpoint_root
        floor = self._around.pulse.floor_seconds
        return told_while_bytes_move(
            None if root is None else Path(root), lambda seconds: self._around.pulse.allow(seconds + floor)
        )

    def _stop(self, *, is_final: bool) -> Ending:
        """All ranks leave at this step: with a checkpoint unless nobody will resume from it."""
        step = self._position.step
        self._around.say(f"asked to stop: leaving at step {step}")
        if not is_final and step:
            self._save(is_async=False)
        self._enter(Phase.STOPPING)
        with self._told_while_bytes_move():
            self._checkpoints.wait()
        return Ending(outcome=Outcome.CANCELLED if is_final else Outcome.PREEMPTED, step=step)

    def _finish(self) -> Ending:
        self._save(is_async=False)
        self._enter(Phase.CHECKPOINT)
        with self._told_while_bytes_move():
            self._checkpoints.wait()
        is_evaluated = not self._feed.has_evaluation or self._evaluated_step == self._position.step
        if not is_evaluated and not self._evaluate():
            return self._stop(is_final=self._agreed_final())
        self._enter(Phase.STOPPING)
        return Ending(outcome=Outcome.SUCCEEDED, step=self._position.step)
