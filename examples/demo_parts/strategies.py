"""The part of `make demo` that trains one model in four ways at once and shows that all of them are the same training.

Not for: the rules of each way (deploy/docs/training.md), the other files of `examples/strategies`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from examples.demo_parts.screen import (
    PLAIN_PROGRESS_SECONDS,
    POLL_SECONDS,
    DemoFailed,
    bars,
    console,
    curves_of,
    move_bar,
    show_curves,
)
from gangline import Client
from gangline.client import Job, Metrics

FOLDER = Path(__file__).resolve().parents[1] / "strategies"
COLOURS = {"single": "cyan", "ddp": "yellow", "model": "magenta", "pipeline": "green"}
"""Of the job files that are run; the first one is what the others are compared with."""
REFERENCE = "single"
SAME_BITS = frozenset({"model"})
"""They do the additions of the reference in its order."""
SHORTER = {"train.steps": 30, "train.eval_every": 10, "train.report_every": 1}
COMPARED = ("loss", "val_loss")
LARGEST_DIFFERENCE = 2e-3
"""In nats, of a loss anywhere on the curve: elsewhere only the order of additions differs."""
SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one strategy."""

    name: str
    ranks: int
    final_loss: float
    """Validation, in nats."""
    difference: float
    """The largest one from the reference, of any loss at any step, in nats."""


def run_strategies(client: Client) -> str | None:
    """Train in every way, show the curves and a table; returns what is wrong, or None. Raises DemoFailed."""
    ids = {}
    for name in COLOURS:
        job = client.submit(FOLDER / f"{name}.yaml", set=SHORTER)
        ids[name] = job.id
        console.print(f"job {job.id} ({job.name}) submitted: {_ranks_text(job)}")
    jobs = watch(client, ids)
    if ended := [f"{name} ended {job.state}{_cause(job)}" for name, job in jobs.items() if job.state != "succeeded"]:
        return "; ".join(ended)
    metrics = {name: client.metrics(job.id, *COMPARED) for name, job in jobs.items()}
    if silent := [name for name, one in metrics.items() if any(key not in one.keys for key in COMPARED)]:
        return f"{', '.join(silent)} did not report all of {', '.join(COMPARED)}"
    legend = "   ".join(f"[{colour}]{name}[/]" for name, colour in COLOURS.items())
    show_curves(curves_of(list(metrics.values()), "loss"), list(COLOURS.values()), f"loss: {legend}")
    rows = [row_of(name, jobs[name].resources.gpus, metrics[name], metrics[REFERENCE]) for name in jobs]
    show_table(rows)
    return problem_of(rows)


def watch(client: Client, ids: Mapping[str, int]) -> dict[str, Job]:
    """Show the jobs' progress until all have ended. Raises DemoFailed when that takes too long."""
    deadline = time.monotonic() + SECONDS
    shown_at = time.monotonic()
    said = dict.fromkeys(ids, "")
    with bars() as progress:
        tasks = {name: progress.add_task(f"{name:9}", total=None, state="", note="") for name in ids}
        while True:
            jobs = {name: client.job(job_id) for name, job_id in ids.items()}
            for name, job in jobs.items():
                if job.state != said[name]:
                    said[name] = job.state
                    console.print(f"  {name:9} {job.state}" + (f": {escape(job.reason.text)}" if job.reason else ""))
                move_bar(progress, tasks[name], job)
            if all(job.is_terminal for job in jobs.values()):
                return jobs
            if time.monotonic() > deadline:
                waiting = ", ".join(f"{name} {job.state}" for name, job in jobs.items() if not job.is_terminal)
                raise DemoFailed(f"after {SECONDS:.0f} s not all strategies have ended: {waiting}")
            if not console.is_terminal and time.monotonic() - shown_at > PLAIN_PROGRESS_SECONDS:
                shown_at = time.monotonic()
                console.print("  " + ", ".join(f"{name} {_where(job)}" for name, job in jobs.items()))
            time.sleep(POLL_SECONDS)


def row_of(name: str, ranks: int, metrics: Metrics, reference: Metrics) -> Row:
    """The table's row for one strategy. Raises DemoFailed when its losses are not those of the reference's steps."""
    differences = []
    for key in COMPARED:
        own, other = metrics.keys[key], reference.keys[key]
        if own.step != other.step:
            raise DemoFailed(f"{name} reported {key} at steps {own.step}, {REFERENCE} at {other.step}")
        differences += [abs(float(one) - float(two)) for one, two in zip(own.last, other.last, strict=True)]
    final_loss = float(metrics.keys["val_loss"].last[-1])
    return Row(name=name, ranks=ranks, final_loss=final_loss, difference=max(differences))


def show_table(rows: Sequence[Row]) -> None:
    """A line per strategy."""
    console.print(f"  [bold]{'strategy':10}{'ranks':>5}{'validation loss':>18}{'largest difference':>21}[/]")
    for row in rows:
        difference = "-" if row.name == REFERENCE else "none" if row.difference == 0 else f"{row.difference:.1e}"
        console.print(f"  {row.name:10}{row.ranks:5}{row.final_loss:18.6f}{difference:>21}")
    console.print()


def problem_of(rows: Sequence[Row]) -> str | None:
    """What the strategies do not agree on; None when they do. Pure."""
    wrong = []
    for row in rows:
        allowed = 0.0 if row.name in SAME_BITS else LARGEST_DIFFERENCE
        if not row.difference <= allowed:  # so that NaN is wrong, too
            wrong.append(f"{row.name} is {row.difference:.2g} nats off {REFERENCE}, {allowed:g} are allowed")
    return "; ".join(wrong) or None


def _ranks_text(job: Job) -> str:
    return f"{job.resources.gpus} rank" + ("" if job.resources.gpus == 1 else "s")


def _where(job: Job) -> str:
    if job.is_terminal or job.progress is None or job.progress.step is None:
        return job.state
    return f"{job.progress.step}/{job.progress.total_steps}"


def _cause(job: Job) -> str:
    return f" ({job.cause.sentence} {job.cause.fix})" if job.cause else ""
