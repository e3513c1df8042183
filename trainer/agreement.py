"""What the ranks agree on between steps: one small all-reduce carries the loss, the wish to stop, and what is due.

Since every rank sees the same sums, every rank takes the same decision at the same step, and nobody waits for a peer
that has left. Not for: acting on it (`trainer.loop`).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Said:
    """What one rank says."""

    loss_sum: float = 0.0
    count: float = 0.0
    step_seconds: float = 0.0
    """Duration of a slow one of its recent steps."""
    is_stop_asked: bool = False
    is_stop_final: bool = False
    """Stop without a checkpoint: cancelled."""
    is_not_finite: bool = False
    is_checkpoint_due: bool = False
    """By the clock. Only rank 0 says so."""
    is_checkpoint_finished: bool = False
    """The one in flight is complete, as far as this rank's copy goes."""
    is_checkpoint_failed: bool = False


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all of them said."""

    loss: float
    """Mean over what all ranks counted; NaN when nothing was."""
    step_seconds: float
    is_stop: bool
    is_stop_final: bool
    is_not_finite: bool
    is_checkpoint_due: bool
    is_checkpoint_finished: bool
    """On every rank."""
    is_checkpoint_failed: bool
    """On any rank."""


def agree(mesh: Mesh, said: Said) -> Agreed:
    """Every rank calls it at the same step. Blocks until all have."""
    loss_sum, count, seconds, stops, finals, bad, due, finished, failed = mesh.sum(
        (
            said.loss_sum,
            said.count,
            said.step_seconds,
            said.is_stop_asked,
            said.is_stop_final,
            said.is_not_finite,
            said.is_checkpoint_due,
            said.is_checkpoint_finished,
            said.is_checkpoint_failed,
        )
    )
    return Agreed(
        loss=loss_sum / count if count else float("nan"),
        step_seconds=seconds / mesh.world_size,
        is_stop=stops > 0,
        is_stop_final=finals > 0,
        is_not_finite=bad > 0,
        is_checkpoint_due=due > 0,
        is_checkpoint_finished=round(finished) == mesh.world_size,
        is_checkpoint_failed=failed > 0,
    )
