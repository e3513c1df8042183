"""`make demo`: a whole cluster on this machine, real training jobs through it, and everything stopped again.

It starts `gang up` with 2 nodes of 2 slots in a temporary folder and shows two things:

1. A job survives. It submits `examples/recipe_transformer` (4 ranks, data parallel), follows log and progress, and
   kills one rank on the way, as a bad machine would. The job goes on from its last checkpoint; the demo draws both
   attempts as one curve and says what the job cost.
2. However a model is split, it is the same training. It submits four files of `examples/strategies` at once (one rank,
   data, model and pipeline parallelism), which share the 4 slots, and draws their losses as one curve
   (`examples.demo_parts.strategies`).

Exit status 0 means: the first job succeeded in its second attempt, that one began where a checkpoint of the first one
stood, on the old curve, the validation loss fell by at least 1.5; the four ways agree within 2e-3 nats at every step,
model parallelism exactly; and no process is left.

It uses nothing but `gangline.Client` and the CLI's drawing, so it is also an example of the client.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.markup import escape

from gangline import Client
from gangline.cli.words import duration
from gangline.client import GanglineError, Job, Metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script: its own parts are not installed

from examples.demo_parts.screen import (
    PLAIN_PROGRESS_SECONDS,
    POLL_SECONDS,
    DemoFailed,
    bars,
    console,
    curves_of,
    move_bar,
    note,
    show_curves,
)
from examples.demo_parts.strategies import run_strategies

JOB_FILE = Path(__file__).parent / "recipe_transformer" / "job.yaml"
NODES, SLOTS = 2, 2
NEEDED_FALL = 1.5
KILL_AFTER_STEP = 110
"""The rank is killed once the job is past this step and has a checkpoint."""
KILLED_RANK = 3
UNTRAINED_LOSS = math.log(256)
"""Of a model that gives every byte the same chance."""
LARGEST_JUMP = 0.35
"""Of the loss where the second attempt takes over, in nats: batches differ by about a third of it."""
READY_SECONDS = 60.0
JOB_SECONDS = 300.0
STOP_SECONDS = 40.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running `gang up`."""

    process: subprocess.Popen[bytes]
    url: str
    token: str
    pids: dict[str, int]


def start_cluster(data: Path) -> subprocess.Popen[bytes]:
    """Start `gang up` in a session of its own: Ctrl-C reaches us, and we stop it in order."""
    command = [str(Path(sys.executable).with_name("gang")), "up", "--data", str(data)]
    command += ["--nodes", str(NODES), "--slots", str(SLOTS), "--port", "0"]
    with open(data.parent / "up.log", "wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def wait_for_cluster(process: subprocess.Popen[bytes], data: Path) -> Cluster:
    """The cluster, once it has written where it is. Raises DemoFailed with the end of its log."""
    deadline = time.monotonic() + READY_SECONDS
    while not (data / "up.json").exists():
        if process.poll() is not None:
            raise DemoFailed(f"gang up exited with {process.returncode}. It said:\n{log_tail(data)}")
        if time.monotonic() > deadline:
            raise DemoFailed(f"gang up is not ready after {READY_SECONDS:.0f} s. It said:\n{log_tail(data)}")
        time.sleep(POLL_SECONDS / 5)
    facts = json.loads((data / "up.json").read_text())
    token = Path(facts["admin_token_file"]).read_text().strip()
    return Cluster(process=process, url=facts["url"], token=token, pids=facts.get("pids", {}))


def stop_cluster(process: subprocess.Popen[bytes], pids: dict[str, int]) -> list[str]:
    """Ask it to stop, as Ctrl-C does; returns what is left of it (and ends that by force): empty when all is well."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return [f"gang up (process {process.pid}) did not stop within {STOP_SECONDS:.0f} s"]
    left = [f"{name} (process {pid})" for name, pid in pids.items() if is_alive(pid)]
    for pid in pids.values():
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    return left


def is_alive(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def log_tail(data: Path) -> str:
    """The end of what `gang up` printed."""
    path = data.parent / "up.log"
    return path.read_text(errors="replace")[-3000:] if path.exists() else "(nothing)"


class Follower(threading.Thread):
    """Prints the log of rank 0 as it arrives, with a client of its own (one client, one thread)."""

    def __init__(self, cluster: Cluster, job_id: int) -> None:
        super().__init__(daemon=True)
        self._cluster, self._job_id = cluster, job_id
        self.error: GanglineError | None = None

    def run(self) -> None:
        try:
            with Client(self._cluster.url, self._cluster.token) as client:
                for line in client.logs(self._job_id, follow=True, rank=0):
                    console.print(f"  [dim]rank {line.rank}[/] ", end="")
                    console.print(line.text.rstrip("\n"), markup=False)
        except GanglineError as error:
            self.error = error


def rank_pid(job_id: int, rank: int) -> int | None:
    """Process of a rank of the job, which carries its numbers in its environment; None when it does not run."""
    wanted = {f"GANGLINE_JOB_ID={job_id}".encode(), f"RANK={rank}".encode()}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            variables = set((folder / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue  # gone, or another account's
        if wanted <= variables and any(variable.startswith(b"GANGLINE_ATTEMPT=") for variable in variables):
            return int(folder.name)
    return None


class Assassin:
    """Kills a rank once, when the job has come far enough."""

    def __init__(self) -> None:
        self.killed_at: int | None = None
        """The last step reported before."""

    def look(self, client: Client, job: Job) -> None:
        """Kill now, if it is time."""
        step = None if job.progress is None else job.progress.step
        if self.killed_at is not None or step is None or step < KILL_AFTER_STEP or not client.checkpoints(job.id):
            return
        pid = rank_pid(job.id, KILLED_RANK)
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        self.killed_at = step
        console.print(f"[bold red]killed rank {KILLED_RANK}[/] (process {pid}) at step {step}, as a bad machine would")


def watch(client: Client, job: Job, assassin: Assassin) -> Job:
    """Show state, reason and progress until the job has ended. Raises DemoFailed when that takes too long."""
    deadline = time.monotonic() + JOB_SECONDS
    said, shown_at = "", 0.0
    with bars() as progress:
        task = progress.add_task("", total=None, state=job.state, note="")
        while True:
            job = client.job(job.id)
            if job.state != said:
                said = job.state
                console.print(f"[bold]{job.state}[/]" + (f": {escape(job.reason.text)}" if job.reason else ""))
            if job.is_terminal:
                return job
            if time.monotonic() > deadline:
                raise DemoFailed(f"job {job.id} is still {job.state} after {JOB_SECONDS:.0f} s")
            move_bar(progress, task, job)
            assassin.look(client, job)
            now = job.progress
            is_due = not console.is_terminal and time.monotonic() - shown_at > PLAIN_PROGRESS_SECONDS
            if is_due and now is not None and now.step is not None:
                shown_at = time.monotonic()
                console.print(f"  step {now.step} of {now.total_steps}, {note(job)}")
            time.sleep(POLL_SECONDS)


def show_attempts(attempts: list[Metrics]) -> None:
    """The loss of both attempts and of the validation in one picture."""
    losses, validation = curves_of(attempts, "loss"), curves_of(attempts, "val_loss")
    colours = [*("cyan", "yellow")[: len(losses)], *["magenta"] * len(validation)]
    legend = "[cyan]loss, attempt 1[/]   [yellow]loss, attempt 2[/]   [magenta]val_loss[/]"
    show_curves([*losses, *validation], colours, legend)


def seam_problem(attempts: list[Metrics], killed_at: int | None) -> str | None:
    """What is wrong with the place where the second attempt takes over; None: it joins the old curve."""
    if killed_at is None:
        return "the job ended before a rank was killed"
    if len(attempts) != 2:
        return f"the job took {len(attempts)} attempts, not 2"
    first, second = (metrics.keys["loss"] for metrics in attempts)
    begin = int(second.step[0])
    if begin <= 1 or begin > int(first.step[-1]) + 1:
        return f"the second attempt began at step {begin}, not at a checkpoint of the first ({first.step[-1]} steps)"
    near = [float(value) for step, value in zip(first.step, first.last, strict=True) if abs(step - begin) <= 10]
    if not near:
        return f"the first attempt has no loss near step {begin}"
    jump = abs(float(second.last[0]) - sum(near) / len(near))
    console.print(f"  resumed          at step {begin}, {killed_at - begin + 1} steps before the kill")
    console.print(f"  seam             {jump:.3f} nats between the old curve and the new one")
    return None if jump <= LARGEST_JUMP else f"the new curve is {jump:.2f} off the old one at step {begin}"


def judge(job: Job, attempts: list[Metrics], killed_at: int | None) -> str | None:
    """Say how it went; returns what is wrong, or None."""
    if job.state != "succeeded":
        cause = f": {job.cause.sentence} {job.cause.fix}" if job.cause else ""
        return f"the job ended {job.state}{cause}"
    losses: list[Any] = [value for curve in curves_of(attempts, "val_loss") for value in curve.values]
    if not losses:
        return "the job reported no val_loss"
    gpu_seconds = float(job.cost.get("gpu_seconds", 0.0))
    ran = (job.ended_at - job.started_at).total_seconds() if job.ended_at and job.started_at else 0.0
    console.print(f"  validation loss  {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte")
    console.print(f"  ran              {duration(ran)} on {job.resources.gpus} slots, {job.attempts} attempts")
    console.print(f"  cost             {gpu_seconds:.0f} GPU-seconds")
    seam = seam_problem(attempts, killed_at)
    if seam is not None:
        return seam
    fall = UNTRAINED_LOSS - losses[-1]
    return None if fall >= NEEDED_FALL else f"the validation loss fell by {fall:.2f} only, {NEEDED_FALL} was expected"


def run_job(client: Client, cluster: Cluster) -> str | None:
    """One job from submission to verdict; returns what is wrong, or None."""
    job = client.submit(JOB_FILE, on_step=lambda text: console.print(f"  {text}", markup=False))
    console.print(f"job {job.id} ({job.name}) submitted: {job.resources.gpus} ranks on {job.resources.nodes} nodes")
    follower = Follower(cluster, job.id)
    follower.start()
    assassin = Assassin()
    job = watch(client, job, assassin)
    follower.join(timeout=10)
    if follower.error is not None:
        raise DemoFailed(f"following the log failed: {follower.error}")
    numbers = range(1, job.attempts + 1)
    attempts = [client.metrics(job.id, "loss", "val_loss", attempt=number) for number in numbers]
    show_attempts(attempts)
    return judge(job, attempts, assassin.killed_at)


def run_all(cluster: Cluster) -> str | None:
    """Both parts of the demo; returns what is wrong, or None."""
    with Client(cluster.url, cluster.token) as client:
        console.print("\n[bold]1. A job loses a rank and goes on[/]")
        problem = run_job(client, cluster)
        if problem is not None:
            return problem
        console.print("\n[bold]2. One model, split in four ways: the same training[/]")
        return run_strategies(client)


def main() -> int:
    """The demo. Returns the exit status."""
    signal.signal(signal.SIGTERM, interrupt)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="gl-demo-"))
    data = folder / "data"
    data.mkdir(mode=0o700)
    pids: dict[str, int] = {}
    console.print(f"starting Gangline with {NODES} nodes of {SLOTS} slots (data in {data}) ...")
    process = start_cluster(data)
    problem: str | None = "interrupted"
    try:
        cluster = wait_for_cluster(process, data)
        pids = cluster.pids
        console.print(f"ready after {time.monotonic() - started:.1f} s at {cluster.url}")
        problem = run_all(cluster)
    except (DemoFailed, GanglineError) as error:
        problem = str(error)
    except KeyboardInterrupt:
        console.print("interrupted: stopping everything ...")
    finally:
        left = stop_cluster(process, pids)
        if problem is None and not left:
            shutil.rmtree(folder)
    if left:
        problem = "; ".join(filter(None, [problem, "left running: " + ", ".join(left)]))
    if problem is not None:
        console.print(f"[bold red]demo failed[/]: {escape(problem)}\nlogs are kept in {folder}")
        return 1
    console.print(f"[bold green]done[/] in {time.monotonic() - started:.0f} s: everything that was started is stopped")
    return 0


def interrupt(signal_number: int, frame: FrameType | None) -> None:
    """SIGTERM stops the demo as Ctrl-C does."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
