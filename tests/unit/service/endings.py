"""Short ways to write down how ranks and nodes ended, for the tests of the decision."""

from __future__ import annotations

from typing import Any

from gangline.protocol.launch import ErrorRecord, NodeFailure, NodeReport, RankReport
from service.domain.decide_outcome import NodeEnding


def rank(number: int, code: int | None = 0, *, signal: str | None = None, at: float = 100.0, **more: Any) -> RankReport:
    """A rank that ended at `at` with an exit code, or by a signal. `error`: a pair of type and message."""
    error = more.pop("error", None)
    return RankReport(
        rank=number,
        local_rank=number,
        exit_code=None if signal else code,
        signal=signal,
        stopped_by_us=more.pop("stopped", False),
        killed_after_grace=more.pop("killed", False),
        started_at=0.0,
        ended_at=at,
        error=ErrorRecord(type=error[0], message=error[1], traceback="") if error else None,
        is_peer_loss=more.pop("peer_loss", False),
    )


def failure(
    outcome: str, message: str = "it says why", *, at: float = 100.0, fix: str = "", **more: int | None
) -> NodeFailure:
    """A failure that a node found itself. `rank`, `moves`: of a hang."""
    return NodeFailure(
        outcome=outcome, message=message, fix=fix, at=at, rank=more.pop("rank", None), moves=more.pop("moves", None)
    )


def node(number: int, *ranks: RankReport, offset: float = 0.0, **more: Any) -> NodeEnding:
    """Node `node-<number>`, which reported `ranks`."""
    report = NodeReport(
        ranks=ranks,
        failure=more.pop("failure", None),
        stop_intent=more.pop("stop_intent", None),
        process_set_empty=True,
        leftovers=more.pop("leftovers", ()),
        oom_kills=more.pop("oom_kills", 0),
        result=more.pop("result", None),
    )
    return NodeEnding(node_name=f"node-{number}", node_rank=number - 1, report=report, clock_offset_seconds=offset)


def lost(number: int) -> NodeEnding:
    """A node that was lost."""
    return NodeEnding(node_name=f"node-{number}", node_rank=number - 1, report=None, is_lost=True)


def silent(number: int) -> NodeEnding:
    """A node that never reported, though it was not lost: it never claimed its part."""
    return NodeEnding(node_name=f"node-{number}", node_rank=number - 1, report=None)
