"""`python -m trainer run plan.json` as processes: how each way to end shows in exit codes, error files and result."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gangline.protocol.outcomes import TrainerExit
from tests.support.child import die_with_parent, end
from tests.support.ports import held_port
from tests.support.wait import wait_until
from trainer.plan.parallel_plan import ParallelPlan
from trainer.plan.training_plan import CheckpointSettings, RunTarget, TrainingPlan, TrainSettings, write_plan

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 150.0
"""Of which importing torch may take a minute on a busy machine."""

pytestmark = pytest.mark.timeout(4 * END_SECONDS)


@dataclass
class Job:
    """Ranks of one training, in a folder of its own."""

    folder: Path
    world_size: int
    port: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, plan: TrainingPlan, *, data_bytes: int | None = None) -> None:
        """Start every rank. `data_bytes` bounds what each may allocate, from its first moment."""

        def prepare() -> None:
            die_with_parent()()
            if data_bytes is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))

        (self.folder / "plan.json").write_text(write_plan(plan))
        (self.folder / "code").mkdir(exist_ok=True)
        shutil.copy(Path(__file__).with_name("faulty_entry.py"), self.folder / "code" / "mine.py")
        for rank in range(self.world_size):
            variables = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "GANGLINE_EVENTS_FILE": str(self.folder / f"events-{rank}.jsonl"),
                "GANGLINE_STOP_FILE": str(self.folder / "stop"),
                "GANGLINE_RESULT_FILE": str(self.folder / "result.json"),
                "GANGLINE_PULSE_FILE": str(self.folder / f"pulse-{rank}"),
                "TORCHELASTIC_ERROR_FILE": str(self.folder / f"error-{rank}.json"),
            }
            with (self.folder / f"log-{rank}").open("wb") as log:
                command = [sys.executable, "-P", "-m", "trainer", "run", str(self.folder / "plan.json")]
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=variables,
                        cwd=self.folder / "code",
                        stdout=log,
                        stderr=log,
                        preexec_fn=prepare,
                    )
                )

    def codes(self) -> list[int]:
        """Exit codes, by rank."""
        return [process.wait(END_SECONDS) for process in self.processes]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What rank 0 told."""
        path = self.folder / "events-0.jsonl"
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        records = [json.loads(line) for line in lines[:-1]]
        return [record for record in records if record["kind"] == kind]

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Until rank 0 told such progress."""
        wait_until(lambda: any(map(condition, self.events("progress"))), END_SECONDS, lambda: f"{self.log(0)}")

    def error(self, rank: int) -> str:
        """The message of a rank's error file."""
        record: str = json.loads((self.folder / f"error-{rank}.json").read_text())["message"]["message"]
        return record

    def log(self, rank: int) -> str:
        """What a rank printed."""
        return (self.folder / f"log-{rank}").read_text()

    def result(self) -> dict[str, Any] | None:
        """The result file."""
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None


@contextlib.contextmanager
def job_of(folder: Path, world_size: int) -> Iterator[Job]:
    """A job whose ranks end with the block."""
    with held_port() as port:
        started = Job(folder, world_size, port)
        try:
            yield started
        finally:
            for process in started.processes:
                end(process, first=signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with job_of(tmp_path, 2) as started:
        yield started


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Job]:
    with job_of(tmp_path, 1) as started:
        yield started


def plan_of(
    job: Job, entry: str = "mine:build", steps: int = 400, eval_every: int | None = None, **args: Any
) -> TrainingPlan:
    size = job.world_size
    return TrainingPlan(
        run=RunTarget(entry=entry, args=args),
        parallel=ParallelPlan(strategy="ddp", dp_replicate=size),
        train=TrainSettings(steps=steps, batch_size=8, eval_every=eval_every),
        checkpoint=CheckpointSettings(every_seconds=None),
        checkpoint_root=str(job.folder / "checkpoints"),
    )


def test_a_training_that_ends_writes_its_result_and_a_checkpoint(job: Job) -> None:
    job.start(plan_of(job, steps=12, eval_every=5, eval_length=30))

    assert job.codes() == [0, 0], job.log(0)
    assert job.result() == {"outcome": "succeeded", "step": 12}
    assert [event["step"] for event in job.events("checkpoint")] == [12]
    evaluated = [event["step"] for event in job.events("progress") if "val_loss" in event["metrics"]]
    assert evaluated == [5, 10, 12]


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("raise", TrainerExit.USER_ERROR, "ValueError: the sample cannot be decoded"),
        ("nan", TrainerExit.NAN_LOSS, "NonFiniteLossError: the loss is not finite at step 30 on rank 1"),
    ],
)
def test_the_rank_that_failed_is_told_apart_from_those_that_lost_it(
    job: Job, fault: str, code: int, message: str
) -> None:
    job.start(plan_of(job, fault=fault, rank=1, at=30))

    assert job.codes() == [TrainerExit.COMMUNICATION_ERROR, code]
    assert job.error(1).startswith(message)
    assert "Traceback (most recent call last)" in job.log(1)
    assert job.result() is None


def test_memory_that_cannot_be_had_is_out_of_memory(job: Job) -> None:
    job.start(plan_of(job, fault="allocate", rank=1), data_bytes=4 << 30)

    assert job.codes() == [TrainerExit.COMMUNICATION_ERROR, TrainerExit.OUT_OF_MEMORY], job.log(1)


def test_an_entry_that_gives_no_task_cannot_run_as_written(alone: Job) -> None:
    alone.start(plan_of(alone, entry="mine:no_task"))

    assert alone.codes() == [TrainerExit.CONFIG_ERROR]
    assert "mine:no_task returned str; return a trainer.task.TrainTask" in alone.error(0)


@pytest.mark.parametrize("phase", ["training", "evaluation"])
def test_a_signal_to_one_rank_stops_all_at_one_step_with_a_checkpoint(job: Job, phase: str) -> None:
    slow_evaluation: dict[str, Any] = {"eval_length": 4000, "eval_seconds": 0.01, "eval_every": 3}
    job.start(plan_of(job, steps=100_000, **(slow_evaluation if phase == "evaluation" else {})))
    job.wait_for(lambda event: event["phase"] == phase if phase == "evaluation" else (event["step"] or 0) >= 2)

    job.processes[1].send_signal(signal.SIGTERM)

    assert job.codes() == [TrainerExit.PREEMPTED, TrainerExit.PREEMPTED], job.log(0)
    result = job.result()
    assert result is not None and result["outcome"] == "preempted"
    assert [event["step"] for event in job.events("checkpoint")] == [result["step"]]


def test_a_full_log_disk_ends_the_log_and_not_the_training(alone: Job) -> None:
    (alone.folder / "log-0").symlink_to("/dev/full")
    alone.start(plan_of(alone, steps=3))

    assert alone.codes() == [0]
    assert alone.result() == {"outcome": "succeeded", "step": 3}


def test_a_cancelled_training_leaves_at_once_without_a_checkpoint(job: Job) -> None:
    job.start(plan_of(job, steps=100_000))
    job.wait_for(lambda event: (event["step"] or 0) >= 2)

    (job.folder / "stop").write_text("cancel")
    for process in job.processes:
        process.send_signal(signal.SIGTERM)

    assert job.codes() == [TrainerExit.CANCELLED, TrainerExit.CANCELLED], job.log(0)
    assert job.events("checkpoint") == []


def test_a_hung_rank_shows_the_stacks_of_its_threads_when_asked(job: Job) -> None:
    job.start(plan_of(job, fault="hang", rank=1, at=20))
    job.wait_for(lambda event: (event["step"] or 0) >= 1)

    def dumped() -> bool:
        job.processes[1].send_signal(signal.SIGUSR2)
        return "misbehave" in job.log(1)

    wait_until(dumped, END_SECONDS, lambda: job.log(1))
    assert job.processes[1].poll() is None


def test_stopped_while_data_workers_load_they_do_not_die_of_the_signal(job: Job) -> None:
    plan = plan_of(job, steps=100_000, seconds=0.01)
    plan = TrainingPlan(**{**vars(plan), "train": TrainSettings(steps=100_000, batch_size=8, data_workers=2)})
    job.start(plan)
    job.wait_for(lambda event: (event["step"] or 0) >= 2)

    workers = [pid for process in job.processes for pid in children_of(process.pid)]
    assert len(workers) == 4
    for pid in workers:  # before their ranks, which end them when they stop
        os.kill(pid, signal.SIGTERM)
    for process in job.processes:
        process.send_signal(signal.SIGTERM)

    assert job.codes() == [TrainerExit.PREEMPTED, TrainerExit.PREEMPTED], job.log(0)


def children_of(pid: int) -> list[int]:
    """Children of a process of ours."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
