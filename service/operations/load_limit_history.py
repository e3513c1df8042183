"""The jobs of a user that ended by themselves, as far as they tell something of the limits that the user asks for.

Not for: what follows from them (`service.domain.limit_advice`).
"""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, select

from gangline.protocol.outcomes import Outcome
from service.db.tables import jobs
from service.domain.limit_advice import HISTORY_JOBS, SIZE_FACTOR, EndedJob
from service.domain.states import JobState

_GPUS = jobs.c.num_nodes * jobs.c.gpus_per_node
_ENDED = (
    select(jobs.c.limit_seconds, jobs.c.served_seconds)
    .where(
        jobs.c.owner_id == bindparam("user_id"),
        # A run that failed or was cancelled says nothing of how long it would have been; one at its limit does.
        (jobs.c.state == JobState.SUCCEEDED) | (jobs.c.outcome == Outcome.TIME_LIMIT),
        jobs.c.limit_seconds > 0,
        jobs.c.served_seconds > 0,  # not known of some that ended before it was counted
        bindparam("least") <= _GPUS,
        bindparam("most") >= _GPUS,
    )
    .order_by(jobs.c.submitted_at.desc(), jobs.c.id.desc())
    .limit(HISTORY_JOBS)
)


def load_limit_history(connection: Connection, user_id: int, num_gpus: int) -> list[EndedJob]:
    """The user's last ended jobs of about so many GPUs, newest first."""
    rows = connection.execute(
        _ENDED, {"user_id": user_id, "least": num_gpus / SIZE_FACTOR, "most": num_gpus * SIZE_FACTOR}
    )
    return [EndedJob(limit_seconds=row.limit_seconds, run_seconds=row.served_seconds) for row in rows]
