"""`gang plot`: curves of one or more jobs in the terminal.

The drawing itself is `gangline.cli.plot`. Not for: exporting data (`-o json` gives the server's columns).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import click

from gangline.cli.each import Failures
from gangline.cli.options import gang_command
from gangline.cli.plot import Cell, Curve, Drawing, draw
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.cli.text_width import cut
from gangline.cli.words import compact_number, duration
from gangline.client.errors import NotFound
from gangline.client.log_models import Metrics, Series
from gangline.client.models import Job
from gangline.protocol.outcomes import ExitCode

USUAL_KEYS = ("loss", "val_loss")
CURVE_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_cyan", "bright_yellow")
PIPED_COLUMNS = 80


@dataclass(frozen=True, kw_only=True)
class NamedCurve:
    """A curve and what to call it."""

    name: str
    series: Series

    @property
    def curve(self) -> Curve:
        """Its points."""
        return Curve(steps=self.series.step, values=self.series.last)


@gang_command()
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True)
@click.option("--keys", metavar="NAMES", help="Metrics, with commas. Default: loss and val_loss, else the first.")
@click.option("--log/--linear", "log", default=None, help="Axis of values; by default what fits them.")
@click.option("--height", type=click.IntRange(2, 60), default=12, show_default=True, help="Lines of the drawing.")
def plot(session: Session, jobs: tuple[str, ...], keys: str | None, log: bool | None, height: int) -> ExitCode:
    """Draw curves of one or more JOBs."""
    columns = session.width or PIPED_COLUMNS
    wanted = tuple(word.strip() for word in keys.split(",") if word.strip()) if keys else ()
    client, failures = session.client, Failures()

    def curves_of(word: str) -> tuple[Job, Metrics]:
        job = client.job(word)
        return job, client.metrics(job, *wanted, points=max(2, min(2000, columns * 2)))

    with session.busy("Fetching curves"):
        pairs = failures.each(jobs, curves_of)
    if session.is_json:
        failures.print_json(session, [{"id": job.id, **item.raw} for job, item in pairs])
    elif pairs:
        _print_curves(session, [job for job, _ in pairs], [item for _, item in pairs], wanted, columns, height, log)
    return failures.tell(session)


def _print_curves(
    session: Session,
    found: list[Job],
    metrics: list[Metrics],
    wanted: tuple[str, ...],
    columns: int,
    height: int,
    log: bool | None,
) -> None:
    curves = _named_curves(found, metrics, wanted)
    if not curves:
        known = sorted({name for item in metrics for name in item.keys})
        raise NotFound(
            f"no curve of {' or '.join(wanted) or 'any metric'} for {', '.join(str(job.id) for job in found)} yet",
            fix=f"it reports {', '.join(known)}" if known else "report metrics with gangline.report(step, loss=...)",
        )
    # Without colours two curves in one drawing cannot be told apart: each gets its own.
    groups = [curves] if session.has_colour else [[curve] for curve in curves]
    for group in groups:
        _print_drawing(session, group, columns, height, log)
    _print_time_left(session, found)


def _named_curves(jobs: list[Job], metrics: list[Metrics], wanted: tuple[str, ...]) -> list[NamedCurve]:
    curves = []
    for job, item in zip(jobs, metrics, strict=True):
        names = wanted or tuple(name for name in USUAL_KEYS if name in item.keys) or tuple(sorted(item.keys))[:1]
        for name in names:
            series = item.keys.get(name)
            if series is not None and series.step:
                label = name if len(jobs) == 1 else f"{job.id} {job.name} {name}"
                curves.append(NamedCurve(name=cut(clean_inline(label), 40), series=series))
    return curves


def _print_drawing(session: Session, group: list[NamedCurve], columns: int, height: int, log: bool | None) -> None:
    width = max(10, min(columns, shutil.get_terminal_size((PIPED_COLUMNS, 24)).columns) - 12)
    drawing = draw([curve.curve for curve in group], width=width, height=height, log=log)
    if drawing is None:
        session.out(f"{', '.join(curve.name for curve in group)}: no finite value")
        return
    for label, row in zip(drawing.labels, drawing.rows, strict=True):
        session.out(f"  {label} ┤{_row(session, row)}")
    margin = " " * len(drawing.labels[0])
    session.out(f"  {margin} └{'─' * min(20, width)} {_steps(drawing)}   {_legend(session, group)}")


def _row(session: Session, row: tuple[Cell, ...]) -> str:
    text = "".join(_painted(session, cell.character, cell.curve) for cell in row)
    return text.rstrip("\u2800")


def _painted(session: Session, text: str, curve: int | None) -> str:
    if curve is None or not session.has_colour:
        return text
    return click.style(text, fg=CURVE_COLOURS[curve % len(CURVE_COLOURS)])


def _steps(drawing: Drawing) -> str:
    first = "" if drawing.first_step <= 1 else f"{compact_number(drawing.first_step)} to "
    return f"{first}{compact_number(drawing.last_step)} steps"


def _legend(session: Session, group: list[NamedCurve]) -> str:
    return "   ".join(
        _painted(session, f"{curve.name} {compact_number(curve.series.last[-1])}", index)
        for index, curve in enumerate(group)
    )


def _print_time_left(session: Session, jobs: list[Job]) -> None:
    for job in jobs:
        if job.progress is not None and job.progress.eta_seconds is not None and not job.is_terminal:
            session.note(f"  {job.id} left about {duration(job.progress.eta_seconds)}")
