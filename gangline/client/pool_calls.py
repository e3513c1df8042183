"""The pool as a whole: what an admin says of its machines, who used it, and what it does now. Part of `Client`.

A method imports the records that it answers with, as those of `Client` do. Not for: jobs (`gangline.client.client`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gangline.client.base import BaseClient, items_of, query, segment
from gangline.client.http import Call
from gangline.client.models import build

if TYPE_CHECKING:
    from gangline.client.pool_models import IdleHolder, Node, Overview, Usage


class PoolCalls(BaseClient):
    """The methods about machines and use. Those that change a machine need an admin."""

    def cordon(self, node: str, *, reason: str, until: str | None = None) -> Node:
        """Give a machine no new work; what runs there runs on. `until`: `2h`, or a time with its zone; None: until it
        is resumed. Raises NotFound, InvalidRequest."""
        from gangline.client.pool_models import Node

        return build(Node, self.post(f"/nodes/{segment(node)}/cordon", {"reason": reason, "until": until}))

    def drain(self, node: str, *, reason: str, until: str | None = None, now: bool = False) -> dict[str, Any]:
        """Give a machine no new work and move the jobs that can go on elsewhere; with `now`, stop the others too.

        The answer has the machine's fields, the ids of jobs `stopped` and `going_on`, and of both in `cannot_move`
        those that can go on nowhere else, each as `job_id` and `why`.
        """
        body = {"reason": reason, "until": until, "now": now}
        answer: dict[str, Any] = self.post(f"/nodes/{segment(node)}/drain", body)
        return answer

    def resume(self, node: str) -> dict[str, Any]:
        """Let a machine take work again; `changed` in the answer is false when it did already."""
        answer: dict[str, Any] = self.post(f"/nodes/{segment(node)}/resume", {})
        return answer

    def label(self, node: str, labels: Mapping[str, str | None], *, reason: str = "") -> Node:
        """Set labels of a machine; None takes one away, those not named stay."""
        from gangline.client.pool_models import Node

        return build(Node, self.post(f"/nodes/{segment(node)}/labels", {"labels": dict(labels), "reason": reason}))

    def usage(self, *, by: Sequence[str] = ("team",), since: str | None = None, until: str | None = None) -> Usage:
        """GPU-hours held, busy and lost to preemption by `user`, `team` and `week`, of the last four weeks unless told
        otherwise. Times are dates (UTC) or have a zone."""
        from gangline.client.pool_models import Usage

        return build(Usage, self.get("/usage", by=",".join(by), since=since, until=until))

    def usage_csv(self, *, by: Sequence[str] = ("team",), since: str | None = None, until: str | None = None) -> str:
        """As `usage`, as CSV with a header line."""
        params = query({"by": ",".join(by), "since": since, "until": until, "format": "csv"})
        text: str = self.transport.send(Call(method="GET", path="/usage", params=params)).text
        return text

    def idle(self) -> list[IdleHolder]:
        """Running jobs none of whose GPUs has worked for a while, those that waste most first."""
        from gangline.client.pool_models import IdleHolder

        return [build(IdleHolder, item) for item in items_of(self.get("/idle"))]

    def overview(self, *, limit: int = 20) -> Overview:
        """The pool at a glance, with at most `limit` running and waiting jobs."""
        from gangline.client.pool_models import Overview

        return build(Overview, self.get("/overview", limit=limit))
