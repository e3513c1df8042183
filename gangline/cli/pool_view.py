"""The screen of `gang top`: nodes with their GPUs, running jobs, waiting jobs, teams. Pure: text from one overview.

Not for: asking the server or refreshing (`gangline.cli.commands.top`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TypeVar

from gangline.cli.table import Column, Paint, Row, render
from gangline.cli.words import NOTHING, count, duration, gpu_range, local_time, progress_cell
from gangline.client.pool_models import GoingJob, Node, NodeGPU, Overview, TeamShare
from gangline.client.queue_models import QueuedJob

T = TypeVar("T")

LEVELS = "▁▂▃▄▅▆▇█"
"""Utilisation of a held GPU, from nothing to all of the time."""
FREE, UNKNOWN, OUT_OF_USE = "·", "?", "x"
IDLE_SHOWN_SECONDS = 600.0
"""A held GPU that has done nothing for this long is pointed out."""
NODE_COLUMNS = (
    Column(header="NODE", keep=True),
    Column(header="STATE", keep=True),
    Column(header="GPUS", keep=True),
    Column(header="TYPE"),
    Column(header="OWNERS", shrinks=True),
)
RUNNING_COLUMNS = (
    Column(header="ID", right=True, keep=True),
    Column(header="STATE", keep=True),
    Column(header="NAME", keep=True, shrinks=True),
    Column(header="OWNER", shrinks=True),
    Column(header="GPUS", right=True, keep=True),
    Column(header="PROGRESS"),
    Column(header="STEP", right=True),
    Column(header="LEFT", right=True),
)
WAITING_COLUMNS = (
    Column(header="ID", right=True, keep=True),
    Column(header="STATE", keep=True),
    Column(header="NAME", keep=True, shrinks=True),
    Column(header="OWNER", shrinks=True),
    Column(header="GPUS", right=True, keep=True),
    Column(header="WAITS", right=True, keep=True),
)
TEAM_COLUMNS = (
    Column(header="TEAM", keep=True),
    Column(header="HELD", right=True, keep=True),
    Column(header="QUOTA", right=True, keep=True),
    Column(header="CAP", right=True),
)


def frame(
    overview: Overview, now: datetime, *, width: int | None, height: int | None, paint: Paint | None = None
) -> list[str]:
    """The whole screen. With a `height`, each list is cut so that all of them are seen; None: nothing is cut."""
    most = None if height is None else max(3, (height - 12) // 4)
    parts = (
        (NODE_COLUMNS, [_node_row(node, now) for node in overview.nodes], len(overview.nodes), "node", most),
        (RUNNING_COLUMNS, [_running_row(job) for job in overview.running], overview.num_running, "running job", most),
        (
            WAITING_COLUMNS,
            [_waiting_row(job, now) for job in overview.waiting],
            overview.num_waiting,
            "waiting job",
            most,
        ),
        (TEAM_COLUMNS, [_team_row(team) for team in overview.teams], len(overview.teams), "team", most),
    )
    lines = [summary(overview)]
    for columns, rows, number, noun, most_rows in parts:
        if rows:
            lines += ["", *_section(columns, rows, number, noun, most_rows, width, paint)]
    return lines


def _section(
    columns: Sequence[Column],
    rows: Sequence[Row],
    number: int,
    noun: str,
    most: int | None,
    width: int | None,
    paint: Paint | None,
) -> list[str]:
    shown = rows if most is None else rows[:most]
    heading, *lines = render(columns, shown, width=width, paint=paint)
    more = [f"… {count(number - len(shown), f'more {noun}')}"] if number > len(shown) else []
    return [paint("heading", heading) if paint is not None else heading, *lines, *more]


def summary(overview: Overview) -> str:
    """`99 of 128 GPUs held, 86 % busy · 21 free · 8 draining · 4 jobs wait for 65`."""
    gpus = [(node, gpu) for node in overview.nodes for gpu in node.gpus]
    held = [gpu for _, gpu in gpus if _is_held(gpu)]
    known = [gpu.utilisation for gpu in held if gpu.utilisation is not None]
    free = sum(1 for node, gpu in gpus if gpu.is_free and node.state == "ready" and not node.cordoned)
    draining = sum(1 for node, _ in gpus if node.cordoned)
    quarantined = sum(1 for _, gpu in gpus if gpu.quarantined)
    busy = f", {sum(known) / len(known) * 100:.0f} % busy" if known else ""
    words = [f"{len(held)} of {count(len(gpus), 'GPU')} held{busy}", f"{free} free"]
    words += [f"{draining} cordoned or draining"] if draining else []
    words += [f"{quarantined} quarantined"] if quarantined else []
    if overview.num_waiting:
        verb = "waits" if overview.num_waiting == 1 else "wait"
        words.append(f"{count(overview.num_waiting, 'job')} {verb} for {overview.num_gpus_waited_for}")
    return " · ".join(words)


def gpu_levels(gpus: Iterable[NodeGPU]) -> str:
    """One character a GPU: the level of its utilisation when it is held, else free or out of use."""
    return "".join(_level(gpu) for gpu in gpus)


def _level(gpu: NodeGPU) -> str:
    if gpu.quarantined:
        return OUT_OF_USE
    if not _is_held(gpu):
        return FREE
    if gpu.utilisation is None:
        return UNKNOWN
    return LEVELS[min(len(LEVELS) - 1, int(max(0.0, gpu.utilisation) * len(LEVELS)))]


def _is_held(gpu: NodeGPU) -> bool:
    return gpu.held or gpu.job_id is not None


def _node_row(node: Node, now: datetime) -> Row:
    owners = Counter(gpu.owner or "(private)" for gpu in node.gpus if _is_held(gpu))
    kinds = {
        "CPU slot" if gpu.kind == "cpu_slot" else (gpu.model or "GPU").removeprefix("NVIDIA ") for gpu in node.gpus
    }
    notes = [cordon_note(node, now)] if node.cordoned else []
    idle = [(now - gpu.idle_since).total_seconds() for gpu in node.gpus if _is_held(gpu) and gpu.idle_since is not None]
    if idle and max(idle) >= IDLE_SHOWN_SECONDS:
        long = [seconds for seconds in idle if seconds >= IDLE_SHOWN_SECONDS]
        notes.append(f"← {count(len(long), 'GPU')} held, idle {duration(min(long))}")
    return Row(
        cells=(
            node.name,
            node.state,
            gpu_levels(node.gpus) or NOTHING,
            ", ".join(sorted(kinds)) or NOTHING,
            " ".join(owner for owner, _ in owners.most_common()) or NOTHING,
        ),
        note="; ".join(notes),
        style=node.state,
    )


def cordon_note(node: Node, now: datetime) -> str:
    """`draining until 14:00:00: new driver`."""
    end = "" if node.cordon_until is None else f" until {local_time(node.cordon_until, now)}"
    return f"{'draining' if node.draining else 'cordoned'}{end}: {node.cordoned}"


def _running_row(job: GoingJob) -> Row:
    progress = job.progress
    step = NOTHING
    if progress is not None and progress.step is not None:
        step = f"{progress.step}" + (f"/{progress.total_steps}" if progress.total_steps else "")
    left = None if progress is None else progress.eta_seconds
    return Row(
        cells=(
            *_who(job),
            str(job.gpus),
            progress_cell(progress),
            step,
            NOTHING if left is None else duration(left),
        ),
        style=job.state,
    )


def _waiting_row(job: QueuedJob, now: datetime) -> Row:
    waits = NOTHING if job.waiting_since is None else duration((now - job.waiting_since).total_seconds())
    return Row(
        cells=(*_who(job), gpu_range(job.gpus, job.min_gpus), waits),
        note="" if job.reason is None else job.reason.text,
        style=job.state,
    )


def _who(job: GoingJob | QueuedJob) -> tuple[str, str, str, str]:
    return (NOTHING if job.id is None else str(job.id), job.state, job.name, job.owner or NOTHING)


def _team_row(team: TeamShare) -> Row:
    quota = [] if team.quota_gpus is None else [str(team.quota_gpus)]
    quota += [] if team.quota_nodes is None else [count(team.quota_nodes, "node")]
    over = team.quota_gpus is not None and team.held_gpus > team.quota_gpus
    borrowed = f"borrows {team.held_gpus - (team.quota_gpus or 0)}" if over else ""
    cap = NOTHING if team.cap_gpus is None else str(team.cap_gpus)
    return Row(cells=(team.name, str(team.held_gpus), " + ".join(quota) or NOTHING, cap), note=borrowed)
