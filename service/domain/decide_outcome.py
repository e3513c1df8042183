"""`decide_outcome(node_reports, intent)`: why an attempt ended, from what its nodes report. Pure.

Order of evidence: a training that is finished, what we asked for (cancel, limit), then failures by class, then by
server-corrected time. Losses of a peer and ranks that we stopped are secondary: they never name the cause while
something else does. What a rank's exit code says of itself (`training_evidence`) is read for recipes and entries alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gangline.protocol.launch import ErrorRecord, NodeReport, RankReport
from gangline.protocol.outcomes import Outcome, StopIntent
from gangline.protocol.storage_full import is_storage_full_text
from service.domain.known_errors import recognise_error
from service.domain.training_evidence import TRAINED_KINDS, common_result, is_end_of_teardown, outcome_of_exit


@dataclass(frozen=True, kw_only=True)
class NodeEnding:
    """How an attempt ended on one node: its report, or none when the node was lost or never claimed its part."""

    node_name: str
    node_rank: int
    report: NodeReport | None
    is_lost: bool = False
    clock_offset_seconds: float = 0.0
    """Server clock minus node clock; added to the node's times before they are compared."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why an attempt ended: the outcome with what names it. `detail` completes the outcome's sentence."""

    outcome: Outcome
    detail: str
    fix: str | None = None
    """A fix for just this error; None: the outcome's own."""
    node_name: str | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    error: ErrorRecord | None = None
    note: str = ""
    is_unasked: bool = False
    """Somebody other than the service stopped it."""


CANCELS: Final = (StopIntent.CANCEL, StopIntent.ADMIN_STOP)
"""Stops for good, at somebody's wish."""

_INTENT_OUTCOMES: Final = {
    StopIntent.CANCEL: Outcome.CANCELLED,
    StopIntent.ADMIN_STOP: Outcome.CANCELLED,
    StopIntent.TIME_LIMIT: Outcome.TIME_LIMIT,
    StopIntent.PREEMPT: Outcome.PREEMPTED,
    StopIntent.DRAIN: Outcome.PREEMPTED,
    StopIntent.START_DEADLINE: Outcome.LAUNCH_FAILED,
}
"""Outcomes that our own decision makes, whatever the ranks then did. A cancel wins over everything (I-08)."""

_OWN_STOPS: Final = {
    StopIntent.DISCONNECTED: (Outcome.NODE_LOST, "was cut off and stopped its ranks, as on_disconnect: stop says"),
    StopIntent.DRAIN: (Outcome.PREEMPTED, "is going down and stopped its ranks"),
}

_MISSING_PACKAGE: Final = frozenset({"ModuleNotFoundError"})
_OUT_OF_MEMORY: Final = frozenset({"OutOfMemoryError", "MemoryError"})
_CHILD_KILLED: Final = re.compile(r"killed by (signal: Killed|SIGKILL)")
"""What torch's DataLoader, or the trainer, says of a data worker that got SIGKILL."""
_STORAGE_ERRORS: Final = frozenset({"OSError", "CheckpointFailed"})


def decide_outcome(
    endings: Sequence[NodeEnding], intent: StopIntent | None, *, intent_detail: str = "", kind: str = "script"
) -> Cause:
    """The one cause of an attempt's end.

    `intent` is why the service asked it to stop, None when it was not asked; `kind` is what was run: `script`,
    `command` (exit code 127 means that the program was not found), `recipe` or `entry`.
    """
    note = _note(endings)
    result = common_result([ending.report for ending in endings]) if kind in TRAINED_KINDS else None
    if result == "succeeded" and intent not in CANCELS:
        # Finished on every node before anything else could matter: a stop that came late, or an abort in teardown.
        return Cause(outcome=Outcome.SUCCEEDED, detail="", exit_code=0, note=note)
    if intent in _INTENT_OUTCOMES and not (intent is StopIntent.TIME_LIMIT and not _any_stopped(endings)):
        outcome = _INTENT_OUTCOMES[intent]
        primary = _first_rank_failure(endings, kind) if intent is StopIntent.START_DEADLINE else None
        if primary is None:
            return Cause(outcome=outcome, detail=intent_detail, note=note)
    own_stop = _stopped_by_node(endings, note)
    if own_stop is not None:
        return own_stop
    node_failure = _first_node_failure(endings)
    primary = _first_rank_failure(endings, kind)
    if node_failure is not None and (primary is None or primary.is_secondary or node_failure.precedes(primary.at)):
        return node_failure.cause(note)
    lost = [ending for ending in endings if ending.is_lost]
    if primary is not None and not primary.is_secondary:
        return primary.cause(note)
    if lost:
        names = ", ".join(ending.node_name for ending in lost)
        return Cause(
            outcome=Outcome.NODE_LOST, detail=f"{names} gave no sign of life", node_name=lost[0].node_name, note=note
        )
    if result == "preempted" or (primary is not None and primary.has_made_room):
        detail = "a signal from outside asked it to make room"
        return Cause(outcome=Outcome.PREEMPTED, detail=detail, note=note, is_unasked=True)
    if primary is not None:
        return primary.peer_loss_cause(note)
    missing = [ending for ending in endings if ending.report is None]
    if missing:
        names = ", ".join(ending.node_name for ending in missing)
        return Cause(outcome=Outcome.LAUNCH_FAILED, detail=f"{names} never started its part", note=note)
    if _any_stopped(endings):
        return Cause(
            outcome=Outcome.SUPERVISOR_LOST, detail="its ranks were stopped without a recorded reason", note=note
        )
    if kind in TRAINED_KINDS:
        return _unfinished(endings, note)
    return Cause(outcome=Outcome.SUCCEEDED, detail="", exit_code=0, note=note)


def _unfinished(endings: Sequence[NodeEnding], note: str) -> Cause:
    """All ranks ended with 0, but not all nodes say that the training is done: the user's code left."""
    ending = min(endings, key=lambda one: (one.report is None or one.report.result is not None, one.node_rank))
    rank = min((one.rank for one in ending.report.ranks), default=None) if ending.report else None
    return Cause(
        outcome=Outcome.USER_ERROR,
        detail=f"rank {rank} on {ending.node_name} ended with exit code 0 before the training was done",
        fix="Let the code return to Gangline's loop: it must not end the process (exit, os._exit).",
        node_name=ending.node_name,
        rank=rank,
        exit_code=0,
        note=note,
    )


def _stopped_by_node(endings: Sequence[NodeEnding], note: str) -> Cause | None:
    """The cause when a supervisor stopped its ranks by itself: cut off from the service, or its machine going down."""
    for ending in endings:
        intent = ending.report.stop_intent if ending.report else None
        if intent in _OWN_STOPS:
            outcome, text = _OWN_STOPS[StopIntent(intent)]
            return Cause(outcome=outcome, detail=f"{ending.node_name} {text}", node_name=ending.node_name, note=note)
    return None


@dataclass(frozen=True, kw_only=True)
class _RankFailure:
    node_name: str
    at: float
    report: RankReport
    oom_kills: int
    """Of its node, counted in the attempt's cgroup."""
    kind: str
    """What was run."""

    @property
    def stated(self) -> Outcome | None:
        """What the exit code says by itself: only where Gangline's own loop made it."""
        return outcome_of_exit(self.report.exit_code) if self.kind in TRAINED_KINDS else None

    @property
    def is_peer_loss(self) -> bool:
        if self.stated is not None:
            return self.stated is Outcome.COMMUNICATION_ERROR
        return self.report.is_peer_loss

    @property
    def has_made_room(self) -> bool:
        return self.stated is Outcome.PREEMPTED

    @property
    def is_secondary(self) -> bool:
        return self.is_peer_loss or self.has_made_room

    def cause(self, note: str) -> Cause:
        rank = self.report
        outcome, detail, fix = self._classified()
        return Cause(
            outcome=outcome,
            detail=f"rank {rank.rank} on {self.node_name}: {detail}",
            fix=fix,
            node_name=self.node_name,
            rank=rank.rank,
            exit_code=rank.exit_code,
            signal=rank.signal,
            error=rank.error,
            note=note,
        )

    def _classified(self) -> tuple[Outcome, str, str | None]:
        if self.stated is not None:
            return self.stated, _ended(self.report), None
        return _classify(self.report, self.kind, self.oom_kills)

    def peer_loss_cause(self, note: str) -> Cause:
        rank = self.report
        return Cause(
            outcome=Outcome.COMMUNICATION_ERROR,
            detail=f"rank {rank.rank} on {self.node_name} lost its peers: {_ended(rank)}",
            node_name=self.node_name,
            rank=rank.rank,
            exit_code=rank.exit_code,
            signal=rank.signal,
            error=rank.error,
            note=note,
        )


@dataclass(frozen=True, kw_only=True)
class _NodeFailure:
    node_name: str
    at: float
    outcome: Outcome
    message: str
    fix: str
    rank: int | None
    moves: int | None

    def precedes(self, at: float) -> bool:
        # A missing script or a lost supervisor explains what its ranks then did; a limit or hang only what came after.
        return self.outcome not in (Outcome.TIME_LIMIT, Outcome.HANG) or self.at <= at

    def cause(self, note: str) -> Cause:
        return Cause(
            outcome=self.outcome,
            detail=f"{self.node_name}: {self.message}",
            fix=self.fix or None,
            node_name=self.node_name,
            rank=self.rank,
            note=note,
        )


def _first_rank_failure(endings: Sequence[NodeEnding], kind: str) -> _RankFailure | None:
    failures = [
        _RankFailure(
            node_name=ending.node_name,
            at=rank.ended_at + ending.clock_offset_seconds,
            report=rank,
            oom_kills=ending.report.oom_kills,
            kind=kind,
        )
        for ending in endings
        if ending.report is not None
        for rank in ending.report.ranks
        if not rank.stopped_by_us and (rank.signal is not None or rank.exit_code not in (0, None))
        if kind not in TRAINED_KINDS or not is_end_of_teardown(rank, ending.report.result)
    ]
    return min(
        failures,
        key=lambda one: (one.is_peer_loss, one.has_made_room, one.at, one.report.rank),
        default=None,
    )


def _first_node_failure(endings: Sequence[NodeEnding]) -> _NodeFailure | None:
    failures = [
        _NodeFailure(
            node_name=ending.node_name,
            at=ending.report.failure.at + ending.clock_offset_seconds,
            outcome=_known_outcome(ending.report.failure.outcome),
            message=ending.report.failure.message,
            fix=ending.report.failure.fix,
            rank=ending.report.failure.rank,
            moves=ending.report.failure.moves,
        )
        for ending in endings
        if ending.report is not None and ending.report.failure is not None
    ]
    first = min(failures, key=lambda failure: (failure.at, failure.node_name), default=None)
    if first is None or first.outcome is not Outcome.HANG:
        return first
    # Every node sees the ranks wait for each other; the one with the fewest moves is the one that all wait for.
    hangs = [failure for failure in failures if failure.outcome is Outcome.HANG]
    return min(hangs, key=lambda hang: (hang.moves is None, hang.moves or 0, hang.at, hang.node_name))


def _known_outcome(word: str) -> Outcome:
    # A node of the next release may name an outcome that this one does not know; its message and fix still say it.
    return Outcome(word) if word in list(Outcome) else Outcome.USER_ERROR


def _any_stopped(endings: Sequence[NodeEnding]) -> bool:
    return any(rank.stopped_by_us for ending in endings if ending.report for rank in ending.report.ranks)


def _note(endings: Sequence[NodeEnding]) -> str:
    killed = any(rank.killed_after_grace for ending in endings if ending.report for rank in ending.report.ranks)
    leftovers = [left for ending in endings if ending.report for left in ending.report.leftovers]
    notes = (["killed after grace"] if killed else []) + ([f"left over: {', '.join(leftovers)}"] if leftovers else [])
    return "; ".join(notes)


def _classify(rank: RankReport, kind: str, oom_kills: int) -> tuple[Outcome, str, str | None]:
    error = rank.error
    if rank.exit_code == 127 and error is None and kind == "command":
        return Outcome.CONFIG_ERROR, "exit code 127: a program that the command names was not found", None
    if error is not None and error.type in _MISSING_PACKAGE:
        return Outcome.ENVIRONMENT_ERROR, error.message, None
    if error is not None and error.type in _OUT_OF_MEMORY:
        return Outcome.OUT_OF_MEMORY, f"{error.type}: {error.message}", None
    if rank.signal == "SIGKILL" and oom_kills:
        detail = f"ended by SIGKILL; the kernel counted {oom_kills} out-of-memory kill{'' if oom_kills == 1 else 's'}"
        return Outcome.OUT_OF_MEMORY, detail, None
    if error is not None and oom_kills and _CHILD_KILLED.search(error.message):
        # The kernel took a process that loaded data for the rank, and the rank says so.
        return Outcome.OUT_OF_MEMORY, f"{error.type}: {error.message}", None
    if error is not None and error.type in _STORAGE_ERRORS and is_storage_full_text(error.message):
        return Outcome.STORAGE_FULL, f"{error.type}: {error.message}", None
    known = recognise_error(error) if error is not None else None
    return Outcome.USER_ERROR, _ended(rank), known


def _ended(rank: RankReport) -> str:
    if rank.error is not None:
        first_line = rank.error.message.strip().split("\n", 1)[0][:300]
        return f"{rank.error.type}: {first_line}" if first_line else rank.error.type
    if rank.signal is not None:
        return f"ended by signal {rank.signal}"
    return f"ended with exit code {rank.exit_code}"
