"""Submit a job: check what only the service knows, resolve the gang, have it stored, answer.

Nothing is published here: the scheduler wakes after the commit.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, select
from sqlalchemy.exc import IntegrityError

from gangline.protocol.outcomes import JobState
from service import clock
from service.auth.principals import Principal
from service.db.session import Database
from service.db.tables import bundles, gpus, idempotency_keys, nodes
from service.domain.gang_layout import layouts_to_json
from service.domain.misfit import DoesNotFit
from service.domain.node_shapes import NodeShape, least_gpu_memory
from service.domain.reasons import Reason, ReasonCode
from service.domain.spec import JobSpec, ResolvedGang, resolve_gang
from service.errors import DoesNotFitPool, FieldProblem, Forbidden, IdempotencyConflict, InvalidJobSpec
from service.operations.check_turn import turn_columns, turn_problems
from service.operations.claim_attempt import disconnect_stop_seconds
from service.operations.commit_submissions import NewJob, SubmissionCommitter
from service.operations.plan_gang import plan_gang
from service.settings import Settings
from service.storage.bundles import BundleFiles
from trainer.plan.planning import Planned
from trainer.plan.problem import PlanError

SUBMITTED = Reason(
    code=ReasonCode.SUBMITTED, text="It was just submitted; the scheduler looks at it now.", fix="Nothing to do."
)
_SUBMITTED_JSON = json.dumps(SUBMITTED.to_json())


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A checked submission: what will be stored."""

    spec: JobSpec
    gang: ResolvedGang
    training: Planned | None
    """Of a recipe or entry: its plan for the ranks that the gang makes; with a range of GPUs, for the largest size."""
    team_id: int
    team: str


class PoolShapes:
    """What the pool's nodes have in all, kept for a second: a burst of submissions reads it once."""

    KEEP_SECONDS = 1.0

    def __init__(self, database: Database):
        self._database = database
        self._lock = threading.Lock()
        self._until = 0.0
        self._shapes: tuple[NodeShape, ...] = ()

    def get(self, *, refresh: bool = False) -> tuple[NodeShape, ...]:
        """The shapes; `refresh` reads them now."""
        with self._lock:
            if refresh or clock.monotonic() >= self._until:
                self._shapes = self._load()
                self._until = clock.monotonic() + self.KEEP_SECONDS
            return self._shapes

    def _load(self) -> tuple[NodeShape, ...]:
        with self._database.read() as connection:
            models: defaultdict[int, list[str]] = defaultdict(list)
            memories: defaultdict[int, list[int]] = defaultdict(list)
            present = select(gpus.c.node_id, gpus.c.model, gpus.c.memory_bytes).where(gpus.c.removed_at.is_(None))
            for row in connection.execute(present):
                models[row.node_id].append(row.model)
                memories[row.node_id] += [row.memory_bytes] if row.memory_bytes else []
            # A node that has only enrolled has not said yet what it has.
            rows = connection.execute(select(nodes).where(nodes.c.last_heartbeat_at.is_not(None)))
            return tuple(
                NodeShape(
                    name=node.name,
                    num_gpus=len(models[node.id]),
                    gpu_types=frozenset(models[node.id]),
                    gpu_memory_bytes=min(memories[node.id], default=None),
                    cpus=node.cpus,
                    memory_bytes=node.memory_bytes,
                    labels=json.loads(node.labels),
                    gpu_memories=tuple(memories[node.id]),
                )
                for node in rows
            )


def check_submission(
    database: Database,
    settings: Settings,
    shapes: PoolShapes,
    principal: Principal,
    spec: JobSpec,
    *,
    is_dry_run: bool = False,
) -> Submission:
    """Everything that can be refused before anything is stored. Raises InvalidJobSpec, Forbidden, DoesNotFitPool.

    A dry run does not need the code bundle to be on the server yet.
    """
    team_id, team = _team_of(principal, spec.team)
    problems = [*_problems(settings, spec), *turn_problems(database, principal, spec)]
    if spec.code.bundle is not None:
        problems += _bundle_problems(database, settings, spec, spec.code.bundle, is_dry_run=is_dry_run)
    if problems:
        raise _invalid(problems)
    gang = resolve_gang(spec, shapes.get())
    if isinstance(gang, DoesNotFit):
        gang = resolve_gang(spec, shapes.get(refresh=True))
    if isinstance(gang, DoesNotFit):
        raise DoesNotFitPool(gang.message, fix=gang.fix)
    asked = spec.resources
    memory = least_gpu_memory(
        asked.gpu_type,
        shapes.get(),
        at_least=asked.gpu_memory_bytes,
        labels=asked.labels,
        share=min((layout.gpus_per_node for layout in gang.layouts), default=gang.gpus_per_node),
    )
    gang, training = _plan(spec, gang, memory)
    return Submission(spec=spec, gang=gang, training=training, team_id=team_id, team=team)


def _invalid(problems: Sequence[FieldProblem]) -> InvalidJobSpec:
    return InvalidJobSpec(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}", errors=problems)


def _plan(spec: JobSpec, gang: ResolvedGang, gpu_memory_bytes: int | None) -> tuple[ResolvedGang, Planned | None]:
    """The plan of a training for the number of ranks, known only now (`plan_gang`). Raises InvalidJobSpec."""
    try:
        return plan_gang(spec, gang, gpu_memory_bytes)
    except PlanError as error:
        raise _invalid(
            [FieldProblem(pointer=one.key, message=one.message, suggestion=one.fix) for one in error.problems]
        ) from error


def _team_of(principal: Principal, asked: str | None) -> tuple[int, str]:
    names = ", ".join(name for _, name in principal.teams) or "none"
    if asked is None:
        if not principal.teams:
            raise Forbidden(
                f"{principal.name} is in no team, and a job belongs to one",
                fix="Ask an admin: gang admin team add TEAM USER.",
            )
        return principal.teams[0]
    for team_id, name in principal.teams:
        if name == asked:
            return team_id, name
    raise Forbidden(f"{principal.name} is not in team {asked} (in: {names})", fix="Name one of your teams as `team`.")


def _problems(settings: Settings, spec: JobSpec) -> list[FieldProblem]:
    problems = []
    if spec.stop_grace_seconds > settings.stop_grace_limit_seconds:
        problems.append(
            FieldProblem(
                pointer="stop_grace",
                message=f"{spec.stop_grace_seconds:g} s is over this pool's limit",
                suggestion=f"at most {settings.stop_grace_limit_seconds:g} s",
            )
        )
    if spec.on_disconnect == "stop" and disconnect_stop_seconds(settings, spec.stop_grace_seconds) <= 0:
        longest = settings.lost_seconds * 0.9
        problems.append(
            FieldProblem(
                pointer="on_disconnect",
                message=(
                    f"with on_disconnect: stop, a node must have ended its ranks before it is called lost "
                    f"({settings.lost_seconds:g} s), but stop_grace is {spec.stop_grace_seconds:g} s"
                ),
                suggestion=f"stop_grace below {longest:g}s",
            )
        )
    return problems


def _bundle_problems(
    database: Database, settings: Settings, spec: JobSpec, digest: str, *, is_dry_run: bool
) -> list[FieldProblem]:
    with database.read() as connection:
        known = connection.execute(_KNOWN_BUNDLE, {"digest": digest}).first()
    if known is not None:
        # A script is started by itself, so a folder of that name is its own business.
        if spec.run.kind == "entry" and _hides_trainer(settings, known.hides_trainer, digest):
            return [_HIDDEN_TRAINER]
        return []
    if is_dry_run:
        return []
    return [
        FieldProblem(
            pointer="code.bundle",
            message=f"bundle {digest} is not on the server",
            suggestion="upload it first: PUT /api/v1/bundles/{digest}, or use gang submit",
        )
    ]


_HIDDEN_TRAINER = FieldProblem(
    pointer="code.bundle",
    message="holds `trainer` at its top, which would hide Gangline's own package of that name from run.entry",
    suggestion="rename that folder or file in the code",
)


def _hides_trainer(settings: Settings, stored: bool | None, digest: str) -> bool:
    return BundleFiles(settings.data_folder).hides_trainer(digest) if stored is None else stored


_KNOWN_BUNDLE = select(bundles.c.hides_trainer).where(bundles.c.digest == bindparam("digest"))


def request_hash(body: bytes, query: str) -> str:
    """What must be equal when an Idempotency-Key is used again."""
    return hashlib.sha256(query.encode() + b"\0" + body).hexdigest()


_REPLAY = select(idempotency_keys.c.request_hash, idempotency_keys.c.response).where(
    idempotency_keys.c.user_id == bindparam("user_id"), idempotency_keys.c.key == bindparam("key")
)


def replay(database: Database, principal: Principal, key: str, hashed: str) -> str | None:
    """The first answer to this key, or None. Raises IdempotencyConflict when it was for another request."""
    with database.read() as connection:
        row = connection.execute(_REPLAY, {"user_id": principal.user_id, "key": key}).one_or_none()
    return None if row is None else _same_request(row, key, hashed)


def _same_request(row: Any, key: str, hashed: str) -> str:
    if row.request_hash != hashed:
        raise IdempotencyConflict(f"Idempotency-Key {key!r} was used for another request")
    return str(row.response)


def submit_job(
    database: Database,
    committer: SubmissionCommitter,
    principal: Principal,
    submission: Submission,
    *,
    key: str | None,
    hashed: str,
    describe: Callable[[int, Mapping[str, Any]], str],
) -> tuple[str, bool]:
    """Store the job; returns the answer's JSON text and whether it replays an earlier one.

    `describe(job_id, columns)` makes the answer, which is stored with the key in the same transaction.
    """
    spec, gang = submission.spec, submission.gang
    columns = {
        "name": spec.name,
        "owner_id": principal.user_id,
        "team_id": submission.team_id,
        "is_private": spec.private,
        "spec": spec.to_json(),
        "num_nodes": gang.num_nodes,
        "gpus_per_node": gang.gpus_per_node,
        "gpu_type": spec.resources.gpu_type,
        "cpus_per_node": gang.cpus_per_node,
        "memory_bytes_per_node": gang.memory_bytes_per_node,
        "processes_per_node": gang.processes_per_node,
        "layouts": layouts_to_json(gang.layouts) if gang.layouts else None,
        "priority": spec.priority,
        **turn_columns(spec, principal.name),
        "tags": json.dumps(spec.tags, ensure_ascii=False),
        "state": JobState.WAITING,
        "version": 1,
        "is_cancel_wished": False,
        "cancel_detail": "",
        "reason": _SUBMITTED_JSON,
        "num_attempts": 0,
        "num_charged_retries": 0,
        "num_pool_retries": 0,
        "start_reason": "submitted",
        "gpu_seconds": 0.0,
    }
    new_job = NewJob(
        needs=tuple((need.job, str(need.condition)) for need in spec.after),
        owner_id=principal.user_id,
        owner=principal.name,
        columns=columns,
        key=key,
        request_hash=hashed,
        describe=describe,
    )
    try:
        return committer.commit(new_job), False
    except IntegrityError:
        # Another request with the same key was faster; its job is the one.
        first = replay(database, principal, key, hashed) if key is not None else None
        if first is None:
            raise
        return first, True
