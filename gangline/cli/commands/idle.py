"""`gang idle`: jobs that hold GPUs without using them.

Not for: stopping them (`gang cancel`).
"""

from __future__ import annotations

from gangline.cli.options import gang_command
from gangline.cli.session import Session
from gangline.cli.table import Column, Row
from gangline.cli.words import NOTHING, duration, local_time
from gangline.client.pool_models import IdleHolder

COLUMNS = (
    Column(header="JOB", right=True, keep=True),
    Column(header="NAME", keep=True, shrinks=True),
    Column(header="OWNER", keep=True),
    Column(header="TEAM"),
    Column(header="GPUS", right=True, keep=True),
    Column(header="IDLE", right=True, keep=True),
    Column(header="SINCE"),
    Column(header="WASTED", right=True),
    Column(header="WHERE"),
)


@gang_command()
def idle(session: Session) -> None:
    """List running jobs none of whose GPUs has worked for a while: whose, since when, GPU-hours wasted."""
    with session.busy("Asking"):
        found = session.client.idle()
    if session.is_json:
        session.json({"items": [holder.raw for holder in found]})
        return
    if not found:
        session.note("Nobody holds GPUs without using them.")
        return
    session.table(COLUMNS, [_row(holder, session) for holder in found])
    wasted = sum(holder.wasted_gpu_hours for holder in found)
    session.note(f"{sum(holder.gpus for holder in found)} GPUs, {wasted:.1f} GPU-hours held without use")


def _row(holder: IdleHolder, session: Session) -> Row:
    where = (f"{node.name}:{','.join(map(str, node.gpus))}" for node in holder.nodes)
    return Row(
        cells=(
            NOTHING if holder.job_id is None else str(holder.job_id),
            holder.name,
            holder.owner or NOTHING,
            holder.team,
            str(holder.gpus),
            duration(holder.idle_seconds),
            local_time(holder.since, session.now()),
            f"{holder.wasted_gpu_hours:.1f} h",
            " ".join(where),
        )
    )
