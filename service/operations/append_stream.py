"""Accept bytes of a rank's log or events at an offset: stored once, in order, or refused with the present size.

The bytes are written first, then the size advances by compare-and-set in the transaction that also checks the claim
token and applies the events. A crash in between leaves bytes that do not exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, bindparam, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from service.db.session import Database, Write
from service.db.tables import attempts, events, jobs, metric_buckets, streams
from service.db.transitions import add_event
from service.db.world_changes import mark_changed
from service.domain.checkpoints import TRAINER_KINDS, TrainerEvent, parse_trainer_event
from service.domain.metric_pyramid import KEPT_BUCKETS, Bucket, buckets_of
from service.domain.progress import Progress, ProgressEvent, advance, known_metrics, parse_event
from service.domain.spec import JobSpec
from service.domain.training_evidence import TRAINED_KINDS
from service.errors import InvalidRequest, OffsetMismatch
from service.operations.accept_checkpoints import apply_trainer_events, note_checkpoint
from service.operations.job_lock import keep_from_ending
from service.operations.report_attempt import Part, open_part
from service.storage.streams import StreamFiles

KINDS: Final = ("log", "events")
MAX_EVENT_BYTES: Final = 65_536
PROGRESS_WAKE_SECONDS: Final = 0.5
"""Watchers of a job are woken by progress at most this often."""

MAX_METRIC_NAMES: Final = 1_000
"""Different names in one attempt; values under further ones are refused."""
MAX_REFUSALS_TOLD: Final = 20
"""Events about refused reports that one job may cause."""

_SIZE = select(streams.c.num_bytes, streams.c.node_rank).where(
    streams.c.attempt_id == bindparam("a"), streams.c.kind == bindparam("k"), streams.c.rank == bindparam("r")
)


def append_stream(
    database: Database, files: StreamFiles, part: Part, kind: str, rank: int, offset: int, data: bytes
) -> int:
    """Append; returns the new size. Bytes that are stored already are taken as such; a gap raises OffsetMismatch.

    Raises InvalidRequest for a rank that does not run on this node.
    """
    if kind not in KINDS or rank < 0 or offset < 0:
        raise InvalidRequest(
            f"there is no stream {kind}/{rank} at offset {offset}",
            fix=f"The kinds are {' and '.join(KINDS)}; rank and offset count from 0.",
        )
    with database.read() as connection:
        open_part(connection, part)
        row = connection.execute(_SIZE, {"a": part.attempt_id, "k": kind, "r": rank}).one_or_none()
        node_rank = row.node_rank if row else _node_rank_of(connection, part.attempt_id, rank)
    if node_rank != part.node_rank:
        raise InvalidRequest(
            f"rank {rank} of attempt {part.attempt_id} does not run on node rank {part.node_rank}",
            fix="Send it from the node that runs this rank.",
        )
    size = row.num_bytes if row else 0
    if offset > size or (offset < size and offset + len(data) > size):
        raise OffsetMismatch(f"{kind}/{rank} has {size} bytes, not {offset}", size=size)
    if offset + len(data) <= size:
        return int(size)
    files.write_at(part.attempt_id, kind, rank, offset, data)
    new_size = offset + len(data)
    with database.write() as tx:
        # What is accepted here counts for good, so nobody may end the part between the look at it and the commit.
        keep_from_ending(tx, part.attempt_id, changes_job=kind == "events")
        clock_offset = open_part(tx.connection, part).clock_offset_seconds
        if row is None:
            _create(tx, part, kind, rank)
        advanced = tx.connection.execute(
            update(streams)
            .where(
                streams.c.attempt_id == part.attempt_id,
                streams.c.kind == kind,
                streams.c.rank == rank,
                streams.c.num_bytes == offset,
            )
            .values(num_bytes=new_size, updated_at=tx.now)
        )
        if advanced.rowcount != 1:
            present = tx.connection.execute(_SIZE, {"a": part.attempt_id, "k": kind, "r": rank}).one().num_bytes
            raise OffsetMismatch(f"{kind}/{rank} has {present} bytes, not {offset}", size=present)
        if kind == "events":
            _apply_events(tx, files, part.attempt_id, rank, new_size, clock_offset)
        else:
            tx.wake(f"log:{part.attempt_id}")
    return new_size


def _node_rank_of(connection: Connection, attempt_id: int, rank: int) -> int:
    per_node = connection.execute(select(attempts.c.processes_per_node).where(attempts.c.id == attempt_id)).scalar_one()
    return int(rank // per_node)


def _create(tx: Write, part: Part, kind: str, rank: int) -> None:
    dialect = sqlite if tx.is_sqlite else postgresql
    tx.connection.execute(
        dialect.insert(streams)
        .values(
            attempt_id=part.attempt_id,
            kind=kind,
            rank=rank,
            node_rank=part.node_rank,
            num_bytes=0,
            parsed_bytes=0,
            is_complete=False,
            updated_at=tx.now,
        )
        .on_conflict_do_nothing()
    )


def _apply_events(
    tx: Write, files: StreamFiles, attempt_id: int, rank: int, size: int, clock_offset_seconds: float
) -> None:
    where = (streams.c.attempt_id == attempt_id, streams.c.kind == "events", streams.c.rank == rank)
    parsed = tx.connection.execute(select(streams.c.parsed_bytes).where(*where)).scalar_one()
    data = files.read_at(attempt_id, "events", rank, parsed, size - parsed)
    end = data.rfind(b"\n") + 1
    if not end and len(data) > MAX_EVENT_BYTES:
        end = len(data)  # a line over the limit is refused as a whole; its rest is refused as not JSON
    if not end:
        return
    tx.connection.execute(update(streams).where(*where).values(parsed_bytes=parsed + end))
    reported, told, refused = _parse(rank, data[:end])
    attempt = tx.connection.execute(
        select(attempts.c.job_id, attempts.c.number, attempts.c.progress, attempts.c.checkpointed_at).where(
            attempts.c.id == attempt_id
        )
    ).one()
    if reported:
        timed = [replace(event, at=min(max(0.0, event.at + clock_offset_seconds), tx.now)) for event in reported]
        _apply_progress(tx, attempt_id, attempt, timed, refused)
        if any(event.checkpoint for event in timed):
            _note_own_checkpoint(tx, attempt_id, attempt)
    if told:
        refused |= apply_trainer_events(tx, attempt_id, told)
    if refused:
        _tell_refusals(tx, attempt, rank, refused)


def _note_own_checkpoint(tx: Write, attempt_id: int, attempt: Any) -> None:
    """A script told of a checkpoint of its own. From the first on it counts as one that resumes, if it says it does.

    Of our own loop only accepted checkpoints count.
    """
    spec = tx.connection.execute(select(jobs.c.spec).where(jobs.c.id == attempt.job_id)).scalar_one()
    if JobSpec.from_json(spec).run.kind in TRAINED_KINDS:
        return
    note_checkpoint(tx, attempt_id)
    if attempt.checkpointed_at is None:
        mark_changed(tx, "job", attempt.job_id)


def _tell_refusals(tx: Write, attempt: Any, rank: int, refused: Mapping[str, int]) -> None:
    """As events of the job, while there are few: a job that reports nonsense at every step must not fill the table."""
    num_told = tx.connection.execute(
        select(func.count())
        .select_from(events)
        .where(events.c.job_id == attempt.job_id, events.c.kind == "report_refused")
    ).scalar_one()
    for why in sorted(refused)[: max(0, MAX_REFUSALS_TOLD - num_told)]:
        text = f"rank {rank} reported something that was refused ({refused[why]} times): {why}"
        add_event(
            tx, "report_refused", actor="service", job_id=attempt.job_id, attempt_number=attempt.number, text=text
        )


def _parse(rank: int, data: bytes) -> tuple[list[ProgressEvent], list[TrainerEvent], dict[str, int]]:
    """Progress, what else the trainer told, and why lines are refused, with how many."""
    progress: list[ProgressEvent] = []
    told: list[TrainerEvent] = []
    refused: dict[str, int] = {}
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        event = _parse_line(rank, line)
        if isinstance(event, str):
            refused[event] = refused.get(event, 0) + 1
        elif isinstance(event, ProgressEvent):
            progress.append(event)
        else:
            told.append(event)
    return progress, told, refused


def _parse_line(rank: int, line: bytes) -> ProgressEvent | TrainerEvent | str:
    if len(line) > MAX_EVENT_BYTES:
        return f"a line of {len(line)} bytes, over {MAX_EVENT_BYTES}"
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return "a line that is not JSON"
    kind = data.get("kind") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind in TRAINER_KINDS:
        return parse_trainer_event(rank, data)
    return parse_event(rank, data)


def _apply_progress(
    tx: Write, attempt_id: int, attempt: Any, reported: Sequence[ProgressEvent], refused: dict[str, int]
) -> None:
    before = Progress.from_json(json.loads(attempt.progress)) if attempt.progress else None
    progress = before
    points: list[tuple[int, str, float | str]] = []
    for event in reported:
        kept = known_metrics(progress, event, MAX_METRIC_NAMES)
        if len(kept) < len(event.metrics):
            why = f"over {MAX_METRIC_NAMES} different metric names"
            refused[why] = refused.get(why, 0) + 1
        event = replace(event, metrics=kept)
        progress = advance(progress, event)
        if event.rank == progress.rank:
            step = event.step if event.step is not None else (progress.step or 0)
            points.extend((step, key, value) for key, value in event.metrics.items())
    if progress is None:
        return
    stored = json.dumps(progress.to_json(), ensure_ascii=False)
    if before is None or tx.now - before.updated_at >= PROGRESS_WAKE_SECONDS:
        tx.connection.execute(update(jobs).where(jobs.c.id == attempt.job_id).values(version=jobs.c.version + 1))
        tx.wake(f"job:{attempt.job_id}")
    tx.connection.execute(update(attempts).where(attempts.c.id == attempt_id).values(progress=stored))
    _add_buckets(tx, attempt_id, buckets_of(points))


def _add_buckets(tx: Write, attempt_id: int, buckets: Sequence[Bucket]) -> None:
    if not buckets:
        return
    dialect = sqlite if tx.is_sqlite else postgresql
    statement = dialect.insert(metric_buckets)
    new, old = statement.excluded, metric_buckets.c
    least, most = _least(tx.is_sqlite), _most(tx.is_sqlite)
    statement = statement.on_conflict_do_update(
        index_elements=["attempt_id", "key", "level", "bucket"],
        set_={
            "step": new.step,
            "minimum": least(old.minimum, new.minimum),
            "maximum": most(old.maximum, new.maximum),
            "last": new.last,
            "last_text": new.last_text,
            "count": old.count + new.count,
        },
    )
    tx.connection.execute(statement, [{"attempt_id": attempt_id, **vars(bucket)} for bucket in buckets])
    newest = {(bucket.key, bucket.level): bucket.bucket for bucket in sorted(buckets, key=lambda one: one.bucket)}
    outdated = [
        {"a": attempt_id, "k": key, "l": level, "until": bucket - KEPT_BUCKETS}
        for (key, level), bucket in newest.items()
        if bucket >= KEPT_BUCKETS
    ]
    if outdated:
        tx.connection.execute(_PRUNE, outdated)


_PRUNE = delete(metric_buckets).where(
    metric_buckets.c.attempt_id == bindparam("a"),
    metric_buckets.c.key == bindparam("k"),
    metric_buckets.c.level == bindparam("l"),
    metric_buckets.c.bucket <= bindparam("until"),
)


def _least(is_sqlite: bool) -> Any:
    # SQLite's min(a, b) is NULL if either is; PostgreSQL's least ignores NULLs.
    if is_sqlite:
        return lambda a, b: func.min(func.coalesce(a, b), func.coalesce(b, a))
    return func.least


def _most(is_sqlite: bool) -> Any:
    if is_sqlite:
        return lambda a, b: func.max(func.coalesce(a, b), func.coalesce(b, a))
    return func.greatest
