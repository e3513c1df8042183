"""`gang replay`: what it takes and prints. Found by the CLI through its entry point.

The one module of the service that is a command like those of `gangline.cli`: it asks a server for its history as any
other command does. Not for: any figure in the table.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gangline.cli.options import gang_command
from gangline.cli.session import Session
from gangline.cli.table import Column, Row
from gangline.client.errors import GanglineError
from service.replay.arguments import Fault, Terms, Words, read_terms, surroundings_of
from service.replay.files import read_trace
from service.replay.history import ENDED_STATES, pool_of_nodes, trace_of_history
from service.replay.pool_size import PoolShape
from service.replay.report import columns_of, forecast_lines, heading_of, notes_of, study_json
from service.replay.simulate import SimulationFault
from service.replay.study import Row as StudyRow
from service.replay.study import Study
from service.replay.traces import Trace, TraceFaults
from service.replay.workers import run_study


@gang_command()
@click.argument("trace", required=False)
@click.option("--history", "is_history", is_flag=True, help="Replay the jobs that ended on the server, on its nodes.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("time-left",),
    show_default=True,
    metavar="P[,P…]",
    help="Policies beside fifo+easy and the oracle srtf.",
)
@click.option(
    "--nodes",
    metavar="N",
    help="Nodes to replay on; else those of the server with --history, as published for a known trace, or for an "
    "offered load of 90 %.",
)
@click.option("--gpus-per-node", metavar="N", help="GPUs of each node: 8; with --history what most nodes have.")
@click.option("--limits", metavar="KIND", help="human (default), true, x5, or recorded (default with --history).")
@click.option("--reports", metavar="SHARE", help="Jobs that report progress: 100%; with --history those that did.")
@click.option("--report-error", default="20%", show_default=True, metavar="SHARE", help="How far reports are off.")
@click.option(
    "--preemptible", metavar="SHARE", help="Jobs that may be preempted: 100%; with --history those that said so."
)
@click.option("--preemption", default="all", show_default=True, metavar="KIND", help="all, reclaim_only or none.")
@click.option("--grace", default="0", show_default=True, metavar="TIME", help="For which a preempted job runs on.")
@click.option("--restore", default="60", show_default=True, metavar="TIME", help="Lost when a job starts again.")
@click.option("--seeds", default="1", show_default=True, metavar="N", help="Draws of the users' limits and reports.")
@click.option("--first-seed", default="1", show_default=True, metavar="N", help="The first of them.")
@click.option("--alone", "with_alone", is_flag=True, help="Also: jobs later than if their team had its part alone.")
@click.option("--forecast", "with_forecasts", is_flag=True, help="Also foretell each job's start, and judge that.")
@click.option(
    "--jobs", "processes", default=str(os.cpu_count() or 1), show_default="processors", metavar="N",
    help="Replays at a time.",
)  # fmt: skip
def replay(session: Session, with_alone: bool, with_forecasts: bool, **words: Any) -> None:
    """Replay a trace, or this pool's history, through the scheduler, and compare policies.

    TRACE is a .csv or .csv.gz with the columns submit_s, duration_s and gpus, and maybe job_id, team and limit_s. The
    scheduler is the one that runs the pool; nothing is submitted. With --history the pool is as its nodes are now, and
    each job has the limit that it had, may be preempted if it said so, and reports if it did. fifo+easy is the
    yardstick, srtf (which knows all run times) the bound.
    """
    terms, faults = read_terms(Words(**words))
    trace = pool = None
    if not any(fault.option == "TRACE" for fault in faults):
        trace, pool = _read(session, words["trace"], terms, faults)
    if trace is not None:
        surroundings, unfit = surroundings_of(terms, trace, pool)
        faults += unfit
    if trace is None or faults:
        raise _refusal(faults)
    study = Study(
        trace=trace,
        surroundings=surroundings,
        assumptions=terms.assumptions,
        policies=terms.policies,
        preemption=terms.preemption,
        seeds=terms.seeds,
        with_alone=with_alone,
        with_forecasts=with_forecasts,
    )
    if pool is not None and not pool.is_even and terms.nodes is None:
        told = f"{surroundings.nodes} x {surroundings.gpus_per_node}"
        session.note(f"The nodes differ ({pool.text}): replayed on {told}.")
    _show(session, study, _run(session, study, terms))


def _read(
    session: Session, path: str | None, terms: Terms, faults: list[Fault]
) -> tuple[Trace | None, PoolShape | None]:
    """The trace, None after a fault; of a history also the pool, unless the options say all of it."""
    try:
        if path is not None:
            return read_trace(Path(path)), None
        with session.busy("Reading the history"):
            found = [job.raw for state in ENDED_STATES for job in session.client.jobs(state=str(state))]
            is_told = terms.nodes is not None and terms.gpus_per_node is not None
            pool = None if is_told else pool_of_nodes(node.raw for node in session.client.nodes())
        return trace_of_history(found), pool
    except TraceFaults as error:
        if not faults:
            raise GanglineError(str(error), code="usage", fix=error.fix) from error
        faults += [Fault("TRACE", line) for line in str(error).splitlines()]
        return None, None


def _refusal(faults: list[Fault]) -> GanglineError:
    problem = {"errors": [{"pointer": fault.option, "message": fault.message} for fault in faults]}
    return GanglineError("the command cannot run as it stands", code="usage", problem=problem,
                         fix="gang replay --help shows what it takes")  # fmt: skip


def _run(session: Session, study: Study, terms: Terms) -> list[StudyRow]:
    has_bar = sys.stderr.isatty() and not session.is_json and os.environ.get("TERM") != "dumb"
    bar = Progress(
        TextColumn("Replaying"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True, no_color=session.no_color),
        transient=True,
        disable=not has_bar,
    )
    with bar:
        line = bar.add_task("", total=study.num_jobs)
        try:
            return run_study(study, terms.processes, lambda count: bar.update(line, completed=count))
        except SimulationFault as error:
            raise GanglineError(
                f"the scheduler failed in the replay of {study.trace.name}: {error}",
                code="simulation_fault",
                fix="this is a defect of the scheduler: report it with the command that you gave",
            ) from error


def _show(session: Session, study: Study, rows: list[StudyRow]) -> None:
    if session.is_json:
        session.json(study_json(study, rows))
        return
    columns = columns_of(study, rows)
    session.out(heading_of(study))
    session.table(
        [Column(header=header, right=number > 0, keep=number < 3) for number, (header, _) in enumerate(columns)],
        [Row(cells=tuple(cell(row) for _, cell in columns)) for row in rows],
    )
    for line in forecast_lines(rows):
        session.out(line)
    for note in notes_of():
        session.note(note)
