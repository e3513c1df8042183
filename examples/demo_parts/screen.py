"""What the parts of `make demo` print with: the console, curves, and the progress of jobs.

Not for: what is run, and whether it went well (`examples/demo.py`, `examples.demo_parts.strategies`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from gangline.cli.plot import Curve, draw
from gangline.cli.words import duration, metric
from gangline.client import Job, Metrics

POLL_SECONDS = 0.25
PLAIN_PROGRESS_SECONDS = 5.0
"""Where there is no terminal a line now and then stands in for the bars."""
PICTURE_WIDTH, PICTURE_HEIGHT = 60, 10

console = Console(highlight=False, soft_wrap=True)


class DemoFailed(Exception):
    """What went wrong, in words for whoever runs the demo."""


def bars() -> Progress:
    """A bar per job, gone when they have ended; nothing where there is no terminal."""
    columns = (
        TextColumn("  {task.description}{task.fields[state]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def move_bar(progress: Progress, task: TaskID, job: Job) -> None:
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


def curves_of(metrics: Sequence[Metrics], name: str) -> list[Curve]:
    """A curve of one metric for each of `metrics` that has it."""
    found = [one.keys[name] for one in metrics if name in one.keys]
    return [Curve(steps=item.step, values=item.last) for item in found]


def show_curves(curves: Sequence[Curve], colours: Sequence[str], legend: str) -> None:
    """Curves in one picture, drawn as `gang plot` draws them: a colour for each, the last one on top."""
    drawing = draw(curves, width=PICTURE_WIDTH, height=PICTURE_HEIGHT)
    if drawing is None:
        return
    console.print()
    for label, row in zip(drawing.labels, drawing.rows, strict=True):
        console.print(f"  {label} ┤", end="")
        for cell in row:
            console.print(cell.character, style=None if cell.curve is None else colours[cell.curve], end="")
        console.print()
    indent = " " * len(drawing.labels[0])
    console.print(f"  {indent} └{'─' * PICTURE_WIDTH} step {drawing.last_step:.0f}   {legend}\n")
