"""`gang node`: the machines of the pool.

Not for: bringing a machine in (the agent enrols itself with a token of `gang admin token create --enrolment`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import click

from gangline.cli.lazy import LazyCommand, LazyGroup
from gangline.cli.options import gang_command
from gangline.cli.pool_view import cordon_note
from gangline.cli.records import print_record
from gangline.cli.session import Session
from gangline.cli.table import Column, Row
from gangline.cli.times import instant
from gangline.cli.words import NOTHING, count, size
from gangline.client.models import build
from gangline.client.pool_models import Node

COLUMNS = (
    Column(header="NODE", keep=True),
    Column(header="STATE", keep=True),
    Column(header="FREE", right=True),
    Column(header="GPUS"),
    Column(header="CPUS", right=True),
    Column(header="MEMORY", right=True),
    Column(header="JOBS"),
    Column(header="LABELS"),
    Column(header="NOTE"),
)

_AT = "gangline.cli.commands.node"
node = LazyGroup(
    name="node",
    help="Machines of the pool.",
    lazy_commands={
        "ls": LazyCommand(target=f"{_AT}:ls", help="List the machines."),
        "cordon": LazyCommand(target=f"{_AT}:cordon", help="Admin: give a machine no new work."),
        "drain": LazyCommand(target=f"{_AT}:drain", help="Admin: no new work, and move what resumes elsewhere."),
        "resume": LazyCommand(target=f"{_AT}:resume", help="Admin: let a machine take work again."),
        "label": LazyCommand(target=f"{_AT}:label", help="Admin: set labels of a machine."),
        "release": LazyCommand(target=f"{_AT}:release", help="Admin: declare that a silent machine is off."),
    },
)


@gang_command(name="ls")
def ls(session: Session) -> None:
    """List the machines of the pool: state, GPUs free and held, by which jobs."""
    with session.busy("Listing nodes"):
        nodes = session.client.nodes()
    if session.is_json:
        session.json({"items": [found.raw for found in nodes]})
        return
    if not nodes:
        session.note("No machines yet. `gang up` starts some here; an agent on a GPU machine enrols it.")
        return
    now = session.now()
    session.table(COLUMNS, [row(found, now) for found in nodes])
    total = sum(len(found.gpus) for found in nodes)
    held = sum(1 for found in nodes for gpu in found.gpus if gpu.held or gpu.job_id is not None)
    quarantined = sum(1 for found in nodes for gpu in found.gpus if gpu.quarantined)
    session.note(f"{held} of {total} GPUs held" + (f", {quarantined} quarantined" if quarantined else ""))


_reason = click.option("--reason", required=True, metavar="TEXT", help="Why; whoever waits for the machine reads it.")
_until = click.option("--until", metavar="TIME", help="Resume it then by itself: in 2h, or at 2026-12-01T09:00.")


@gang_command(name="cordon")
@click.argument("name", metavar="NODE")
@_reason
@_until
def cordon(session: Session, name: str, reason: str, until: str | None) -> None:
    """Give NODE no new work; what runs there runs on."""
    end = instant(until, session.now(), hint="--until", is_ahead=True)
    with session.busy("Cordoning"):
        found = session.client.cordon(name, reason=reason, until=end)
    print_record(session, found.raw, f"{name} takes no new work: {cordon_note(found, session.now())}.")
    _say_how_to_resume(session, found)


@gang_command(name="drain")
@click.argument("name", metavar="NODE")
@_reason
@_until
@click.option(
    "--now", "is_now", is_flag=True, help="Stop those that would run on, too; what does not resume starts anew."
)
def drain(session: Session, name: str, reason: str, until: str | None, is_now: bool) -> None:
    """Give NODE no new work; jobs that resume stop at a checkpoint and go on elsewhere, the others run to their end.

    A job goes on elsewhere only if other nodes that take work can read its checkpoints: they must lie in a folder that
    the nodes share. Without one they lie on the job's own nodes alone, so that it runs on too, unless --now is given.
    """
    end = instant(until, session.now(), hint="--until", is_ahead=True)
    with session.busy("Draining"):
        answer = session.client.drain(name, reason=reason, until=end, now=is_now)
    found = build(Node, answer)
    sentences = [f"{name} takes no new work: {cordon_note(found, session.now())}.", *_drained(name, answer)]
    print_record(session, answer, " ".join(sentences))
    _say_how_to_resume(session, found)


def _drained(name: str, answer: dict[str, Any]) -> Iterator[str]:
    """What a drain means for the jobs on the node, those together that stop or run on for the same reason."""
    why = {one["job_id"]: one["why"] for one in answer.get("cannot_move", [])}
    groups: dict[tuple[str, str | None], list[int]] = {}
    for kind in ("stopped", "going_on"):
        for job_id in answer.get(kind, []):
            groups.setdefault((kind, why.get(job_id)), []).append(job_id)
    for (kind, bound), ids in groups.items():
        jobs, is_one = count(len(ids), "job"), len(ids) == 1
        if kind == "stopped" and bound is None:
            yield f"{jobs} stopped to start elsewhere: {_ids(ids)}."
        elif kind == "stopped":
            yield f"{jobs} stopped and can go on only once {name} is back ({bound}): {_ids(ids)}."
        elif bound is None:
            yield f"{jobs} {'runs' if is_one else 'run'} on to the end: {_ids(ids)} (--now stops them)."
        else:
            it = "it" if is_one else "them"
            yield (
                f"{jobs} {'runs' if is_one else 'run'} on ({bound}): {_ids(ids)}; "
                f"--now stops {it} until {name} is back."
            )


def _ids(jobs: list[int]) -> str:
    return " ".join(str(job) for job in jobs)


def _say_how_to_resume(session: Session, found: Node) -> None:
    if found.cordon_until is None:
        session.note(f"  back again   gang node resume {found.name}")


@gang_command(name="resume")
@click.argument("name", metavar="NODE")
def resume(session: Session, name: str) -> None:
    """Let NODE take work again, whether it was cordoned or drained."""
    with session.busy("Resuming"):
        answer = session.client.resume(name)
    print_record(session, answer, f"{name} takes work{' again' if answer.get('changed') else ' already'}.")


@gang_command(name="label")
@click.argument("name", metavar="NODE")
@click.argument("labels", metavar="KEY=VALUE...", nargs=-1, required=True)
@click.option("--reason", default="", metavar="TEXT", help="Why; kept with the change.")
def label(session: Session, name: str, labels: tuple[str, ...], reason: str) -> None:
    """Set labels of NODE, which jobs can ask for; KEY- takes one away. `switch` names its network switch."""
    changes = _parse_labels(labels)
    with session.busy("Labelling"):
        found = session.client.label(name, changes, reason=reason)
    print_record(session, found.raw, f"{name} has the labels {_labels(found)}.")


def _parse_labels(words: tuple[str, ...]) -> dict[str, str | None]:
    """`switch=leaf-3` sets, `switch-` takes away. Raises a usage error that names every word that is neither."""
    changes: dict[str, str | None] = {}
    wrong = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key and value:
            changes[key] = value
        elif not equals and len(word) > 1 and word.endswith("-"):
            changes[word[:-1]] = None
        else:
            wrong.append(repr(word))
    if wrong:
        raise click.UsageError(f"{', '.join(wrong)}: write KEY=VALUE to set a label, KEY- to take it away.")
    return changes


@gang_command(name="release")
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def release(session: Session, name: str, yes: bool) -> None:
    """Declare that nothing runs on the machine NAME, which does not answer: jobs that wait for its word end.

    Only for a machine that is known to be off: if it still runs, its ranks go on until it hears of the server again.
    """
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("Without a terminal to ask on, -y is needed.")
        click.confirm(f"Is {name} really off?", abort=True, err=True)
    with session.busy("Releasing"):
        answer = session.client.release_node(name)
    ended = answer.get("ended", 0)
    print_record(session, answer, f"Released {name}: {count(ended, 'attempt')} ended there.")


def row(found: Node, now: datetime) -> Row:
    """A machine as a row."""
    free = sum(1 for gpu in found.gpus if gpu.is_free)
    jobs = [str(job) for job in sorted({gpu.job_id for gpu in found.gpus if gpu.job_id is not None})]
    if any(gpu.held and gpu.job_id is None for gpu in found.gpus):
        jobs.append("(private)")
    return Row(
        cells=(
            found.name,
            found.state,
            str(free),
            _gpus(found),
            f"{found.cpus:g}",
            size(found.memory_bytes),
            " ".join(jobs) or NOTHING,
            _labels(found),
            _note(found, now),
        ),
        style=found.state,
    )


def _gpus(found: Node) -> str:
    """`8 × NVIDIA H100`; CPU slots are called what they are."""
    kinds: dict[str, int] = {}
    for gpu in found.gpus:
        kind = "CPU slot" if gpu.kind == "cpu_slot" else gpu.model or "GPU"
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{number} × {kind}" for kind, number in kinds.items()) or NOTHING


def _labels(found: Node) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(found.labels.items())) or NOTHING


def _note(found: Node, now: datetime) -> str:
    notes = [cordon_note(found, now)] if found.cordoned else []
    notes += [f"GPU {gpu.index} quarantined: {gpu.quarantined}" for gpu in found.gpus if gpu.quarantined]
    return "; ".join(notes)
