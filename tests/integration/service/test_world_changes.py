"""Whatever moves is marked for the scheduler in the same transaction, which also wakes it once it is committed."""

from __future__ import annotations

import contextlib

from sqlalchemy import delete, select

from gangline.protocol.outcomes import JobState
from service.db.tables import nodes, world_changes
from service.db.transitions import move_job, move_node
from service.db.world_changes import mark_all_changed, mark_changed
from service.domain.states import NodeState
from tests.integration.service.api_server import Api


def marks(api: Api) -> set[tuple[str, int]]:
    """What has to be read again; reading takes the marks away."""
    with api.database.write() as tx:
        query = delete(world_changes).returning(world_changes.c.id, world_changes.c.kind, world_changes.c.key)
        return {(row.kind, row.key) for row in tx.connection.execute(query)}


def test_every_step_of_a_job_marks_the_job_and_what_its_nodes_have_free(api: Api) -> None:
    node = api.node()
    with api.database.read() as connection:
        node_id = connection.execute(select(nodes.c.id)).scalar_one()
    marks(api)
    job_id = api.submit()
    assert marks(api) == {("job", job_id)}
    api.place()
    assert ("job", job_id) in marks(api)
    part = node.claim(api.attempt_id(job_id))
    assert marks(api) == {("job", job_id), ("node", node_id)}
    part.started()
    assert marks(api) == {("job", job_id), ("node", node_id)}
    part.ended()
    assert marks(api) == {("job", job_id), ("node", node_id)}


def test_a_node_that_moves_is_marked(api: Api) -> None:
    api.node()
    with api.database.write() as tx:
        node_id = tx.connection.execute(select(nodes.c.id)).scalar_one()
        tx.connection.execute(delete(world_changes))
        move_node(tx, node_id, NodeState.UNREACHABLE, name="node-1", text="")
    assert marks(api) == {("node", node_id)}


def test_a_mark_goes_with_its_change_and_none_wakes_nobody(api: Api) -> None:
    job_id = api.submit()
    marks(api)
    with contextlib.suppress(ZeroDivisionError), api.database.write() as tx:
        move_job(tx, job_id, JobState.CANCELLED, actor="test", text="")
        raise ZeroDivisionError
    assert (marks(api), api.job(job_id)["state"]) == (set(), "waiting")
    with api.database.write() as tx:
        mark_all_changed(tx, "team", [])
        assert not tx.topics
        mark_changed(tx, "team", 7)
        mark_all_changed(tx, "user", [8, 9])
        assert "schedule" in tx.topics
    assert marks(api) == {("team", 7), ("user", 8), ("user", 9)}
