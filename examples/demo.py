"""`make demo`: a whole cluster on this machine, one real training job through it, and everything stopped again.

It starts `gang up` with 2 nodes of 2 slots in a temporary folder, submits `examples/ddp_script` (4 ranks of a plain
DDP script), follows log and progress, draws the loss curve and says what the job cost. Exit status 0 means: the job
succeeded, the validation loss fell by at least 1.5, and no process is left.

It uses nothing but `gangline.Client` and the CLI's drawing, so it is also an example of the client.
"""

from __future__ import annotations

import json
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

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from gangline import Client
from gangline.cli.plot import Curve, draw
from gangline.cli.words import duration, metric
from gangline.client import GanglineError, Job, Metrics

JOB_FILE = Path(__file__).parent / "ddp_script" / "job.yaml"
NODES, SLOTS = 2, 2
NEEDED_FALL = 1.5
READY_SECONDS = 60.0
JOB_SECONDS = 300.0
STOP_SECONDS = 40.0
POLL_SECONDS = 0.25
PLAIN_PROGRESS_SECONDS = 5.0
"""Where there is no terminal a line now and then stands in for the bar."""

console = Console(highlight=False, soft_wrap=True)


class DemoFailed(Exception):
    """What went wrong, in words for whoever runs the demo."""


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


def watch(client: Client, job: Job) -> Job:
    """Show state, reason and progress until the job has ended. Raises DemoFailed when that takes too long."""
    columns = (
        TextColumn("  {task.fields[state]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    deadline = time.monotonic() + JOB_SECONDS
    said, shown_at = "", 0.0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
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
            show_progress(progress, task, job)
            if not console.is_terminal and job.progress and time.monotonic() - shown_at > PLAIN_PROGRESS_SECONDS:
                shown_at = time.monotonic()
                console.print(f"  step {job.progress.step} of {job.progress.total_steps}, {note(job)}")
            time.sleep(POLL_SECONDS)


def show_progress(progress: Progress, task: TaskID, job: Job) -> None:
    """Move the bar to what the job has reported."""
    if job.progress is None or job.progress.step is None:
        progress.update(task, state=job.state, note="")
        return
    now = job.progress
    progress.update(task, completed=now.step, total=now.total_steps, state=job.state, note=note(job))


def note(job: Job) -> str:
    """Loss and time left, as far as they are known."""
    left = job.progress.eta_seconds if job.progress else None
    return f"loss {metric(job.progress, 'loss')}" + ("" if left is None else f", {duration(left)} left")


def show_curve(metrics: Metrics) -> None:
    """The loss curves, drawn as `gang plot` draws them."""
    names = [name for name in ("loss", "val_loss") if name in metrics.keys]
    series = [metrics.keys[name] for name in names]
    drawing = draw([Curve(steps=item.step, values=item.last) for item in series], width=60, height=10)
    if drawing is None:
        return
    colours = ("cyan", "magenta")
    console.print()
    for label, row in zip(drawing.labels, drawing.rows, strict=True):
        console.print(f"  {label} ┤", end="")
        for cell in row:
            console.print(cell.character, style=None if cell.curve is None else colours[cell.curve], end="")
        console.print()
    legend = "   ".join(f"[{colour}]{name}[/]" for name, colour in zip(names, colours, strict=False))
    indent = " " * len(drawing.labels[0])
    console.print(f"  {indent} └{'─' * 60} step {drawing.last_step:.0f}   {legend}\n")


def judge(job: Job, metrics: Metrics) -> str | None:
    """Say how it went; returns what is wrong, or None."""
    if job.state != "succeeded":
        cause = f": {job.cause.sentence} {job.cause.fix}" if job.cause else ""
        return f"the job ended {job.state}{cause}"
    losses: list[Any] = list(metrics.keys["val_loss"].last) if "val_loss" in metrics.keys else []
    if not losses:
        return "the job reported no val_loss"
    gpu_seconds = float(job.cost.get("gpu_seconds", 0.0))
    ran = (job.ended_at - job.started_at).total_seconds() if job.ended_at and job.started_at else 0.0
    console.print(f"  validation loss  {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte")
    console.print(f"  ran              {duration(ran)} on {job.resources.gpus} slots, {job.attempts} attempt(s)")
    console.print(f"  cost             {gpu_seconds:.0f} GPU-seconds")
    fall = losses[0] - losses[-1]
    return None if fall >= NEEDED_FALL else f"the validation loss fell by {fall:.2f} only, {NEEDED_FALL} was expected"


def run_job(cluster: Cluster) -> str | None:
    """One job from submission to verdict; returns what is wrong, or None."""
    with Client(cluster.url, cluster.token) as client:
        job = client.submit(JOB_FILE, on_step=lambda text: console.print(f"  {text}", markup=False))
        console.print(f"job {job.id} ({job.name}) submitted: {job.resources.gpus} ranks on {job.resources.nodes} nodes")
        follower = Follower(cluster, job.id)
        follower.start()
        job = watch(client, job)
        follower.join(timeout=10)
        if follower.error is not None:
            raise DemoFailed(f"following the log failed: {follower.error}")
        metrics = client.metrics(job.id, "loss", "val_loss")
        show_curve(metrics)
        return judge(job, metrics)


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
        problem = run_job(cluster)
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
