"""`gang node`: the machines of the pool.

Not for: bringing a machine in (the agent enrols itself with a token of `gang admin token create --enrolment`).
"""

from __future__ import annotations

import sys

import click

from gangline.cli.lazy import LazyCommand, LazyGroup
from gangline.cli.options import gang_command
from gangline.cli.records import print_record
from gangline.cli.session import Session
from gangline.cli.table import Column, Row
from gangline.cli.words import NOTHING, count, size
from gangline.client.models import Node

COLUMNS = (
    Column(header="NODE", keep=True),
    Column(header="STATE", keep=True),
    Column(header="FREE", right=True),
    Column(header="GPUS"),
    Column(header="CPUS", right=True),
    Column(header="MEMORY", right=True),
    Column(header="JOBS"),
    Column(header="NOTE"),
)

node = LazyGroup(
    name="node",
    help="Machines of the pool.",
    lazy_commands={
        "ls": LazyCommand(target="gangline.cli.commands.node:ls", help="List the machines."),
        "release": LazyCommand(
            target="gangline.cli.commands.node:release", help="Admin: declare that a silent machine is off."
        ),
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
    session.table(COLUMNS, [row(found) for found in nodes])
    total = sum(len(found.gpus) for found in nodes)
    held = sum(1 for found in nodes for gpu in found.gpus if gpu.held or gpu.job_id is not None)
    quarantined = sum(1 for found in nodes for gpu in found.gpus if gpu.quarantined)
    session.note(f"{held} of {total} GPUs held" + (f", {quarantined} quarantined" if quarantined else ""))


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


def row(found: Node) -> Row:
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
            _note(found),
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


def _note(found: Node) -> str:
    notes = [f"cordoned: {found.cordoned}"] if found.cordoned else []
    notes += [f"GPU {gpu.index} quarantined: {gpu.quarantined}" for gpu in found.gpus if gpu.quarantined]
    return "; ".join(notes)
