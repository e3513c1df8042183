"""Records of jobs that the client answers with, and `build`, which makes any record: frozen, with the field names of
the REST interface, unknown fields ignored.

Times are aware UTC datetimes. `raw` holds the server's own JSON object, for fields newer than this client and for
`-o json`. Not for: what is sent to the server; records of the queue, logs and the pool, each in a module of its own,
since making a record's class costs every command that imports it about half a millisecond.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from gangline.client.errors import ServerFailed
from gangline.protocol.outcomes import JobState

if TYPE_CHECKING:
    from gangline.client.client import Client
    from gangline.client.log_models import LogLine, Metrics

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a job asks for, resolved: `gpus` in all, `gpu` a model name or None for any.

    `min_gpus`: it runs on as many as are free from there to `gpus`, of which this is the largest layout; None: on
    exactly `gpus`.
    """

    nodes: int = 1
    gpus_per_node: int = 0
    gpus: int = 0
    min_gpus: int | None = None
    gpu: str | None = None


@dataclass(frozen=True, kw_only=True)
class Size:
    """What an attempt has (or had): nodes, GPUs and ranks of each, GPUs in all."""

    nodes: int = 1
    gpus_per_node: int = 0
    gpus: int = 0
    processes_per_node: int = 1


@dataclass(frozen=True, kw_only=True)
class AttemptNode:
    """One node's part of an attempt; `gpus` are device indexes on that node. `name` is None for a removed node."""

    name: str | None = None
    node_rank: int = 0
    state: str = ""
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try at running a job, numbered from 1."""

    id: int
    number: int
    state: str
    started_at: datetime | None = None
    """When its ranks began to run; None: not yet."""
    nodes: tuple[AttemptNode, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EndedAttempt:
    """An attempt that has ended. `started_at` is None if its ranks never ran."""

    number: int
    outcome: str = ""
    started_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a job waits, or what its stop waits for."""

    code: str
    text: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Who holds a job back, and why. `is_by_admin`: only an admin releases it."""

    by: str = ""
    is_by_admin: bool = False
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """The exception that ended a rank."""

    type: str
    message: str = ""
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended. `stopped_by_us`: after we had signalled it, so never the cause."""

    rank: int
    node: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    stopped_by_us: bool = False
    killed_after_grace: bool = False


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why the last attempt ended: one sentence, the fix, and the rank that was first."""

    outcome: str
    sentence: str = ""
    fix: str = ""
    rank: int | None = None
    node: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    error: ErrorRecord | None = None
    stop_reason: str | None = None
    """Why it was asked to stop, as its ranks could read it: a `StopIntent`; None: it was not asked."""
    note: str = ""
    ranks: tuple[RankEnd, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Training progress as last reported. Non-finite metrics are the strings `NaN`, `Infinity`, `-Infinity`."""

    step: int | None = None
    total_steps: int | None = None
    fraction: float | None = None
    eta_seconds: float | None = None
    phase: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    updated_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that a job may resume from. With the job itself only step, samples and time are told."""

    step: int
    samples_seen: int = 0
    accepted_at: datetime | None = None
    attempt: int | None = None
    path: str = ""
    """Below the folder of the job's checkpoints."""
    num_bytes: int | None = None
    shared_folder_id: str | None = None
    nodes: tuple[str, ...] = ()
    """Nodes that wrote it; without a shared folder it lies on them alone."""
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as the server last showed it. A value: ask again for news (`Client.job`)."""

    id: int
    name: str
    state: str
    owner: str = ""
    team: str | None = None
    private: bool = False
    submitted_at: datetime | None = None
    started_at: datetime | None = None
    """When its first attempt began to run."""
    ended_at: datetime | None = None
    resources: Resources = Resources()
    processes_per_node: int | None = None
    size: Size | None = None
    """Of its latest attempt; None before the first."""
    priority: int = 0
    held: Hold | None = None
    start_after: datetime | None = None
    """In the zone that its owner wrote it in."""
    tags: dict[str, Any] = field(default_factory=dict)
    attempts: int = 0
    attempt: Attempt | None = None
    """The one that holds its GPUs now; None: there is none."""
    last_attempt: EndedAttempt | None = None
    """The one that ended last, which `cause` is about; None: none has ended."""
    reason: Reason | None = None
    outcome: str | None = None
    cause: Cause | None = None
    progress: Progress | None = None
    checkpoint: Checkpoint | None = None
    """The one it would resume from."""
    cost: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    spec: dict[str, Any] | None = None
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    client: Client | None = field(default=None, repr=False, compare=False)
    """The client it came from, which the methods below ask; None for a record made by hand."""

    @property
    def is_terminal(self) -> bool:
        """Whether it has ended for good."""
        return self.state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    def of(self, client: Client) -> Job:
        """The same record with its methods bound to `client`."""
        return dataclasses.replace(self, client=client)

    def refresh(self) -> Job:
        """This job as it is now."""
        return self._client().job(self.id)

    def wait(self, *, timeout: float | None = None) -> Job:
        """Wait until it has ended (`Client.wait`)."""
        return self._client().wait(self.id, timeout=timeout)

    def cancel(self, *, reason: str = "") -> Job:
        """Ask it to stop (`Client.cancel`)."""
        return self._client().cancel(self.id, reason=reason)

    def requeue(self, *, reason: str = "", from_start: bool = False) -> Job:
        """Have it start again from its last checkpoint (`Client.requeue`)."""
        return self._client().requeue(self.id, reason=reason, from_start=from_start)

    def hold(self, *, reason: str = "") -> Job:
        """Keep it from starting until it is released (`Client.hold`)."""
        return self._client().hold(self.id, reason=reason)

    def release(self) -> Job:
        """Let a held job take its turn (`Client.release`)."""
        return self._client().release(self.id)

    def set_priority(self, priority: int | str) -> Job:
        """Change its priority (`Client.set_priority`)."""
        return self._client().set_priority(self.id, priority)

    def logs(
        self, *, follow: bool = False, rank: int | str | None = None, tail: int | None = None
    ) -> Iterator[LogLine]:
        """Its log lines (`Client.logs`)."""
        return self._client().logs(self.id, follow=follow, rank=rank, tail=tail)

    def metrics(self, *keys: str) -> Metrics:
        """Its curves (`Client.metrics`)."""
        return self._client().metrics(self.id, *keys)

    def _client(self) -> Client:
        if self.client is None:
            raise ValueError(f"job {self.id} has no client: get it from Client.job, Client.jobs or Client.submit")
        return self.client


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """One entry of a job's history."""

    id: int
    at: datetime | None = None
    kind: str = ""
    actor: str | None = None
    attempt: int | None = None
    node: str | None = None
    text: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Me:
    """Who the token belongs to, and the server's release."""

    name: str
    admin: bool = False
    teams: tuple[str, ...] = ()
    server_version: str = ""
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


def build(cls: type[T], data: Any) -> T:
    """Record `cls` from the server's JSON object. Unknown keys are ignored, missing optional ones take their default.

    Raises ServerFailed when the object lacks what the record cannot do without, or holds another type there.
    """
    try:
        return _build(cls, data)
    except (TypeError, ValueError, KeyError) as error:
        raise ServerFailed(
            f"the server's answer is not a {cls.__name__.lower()} this client understands: {error}",
            fix="check that the address is a Gangline server and that client and server are of the same release",
        ) from error


def parse_number(value: Any) -> float:
    """A metric value as the wire carries it: a number, or the name of a non-finite one."""
    return float(value)  # float() reads "NaN", "Infinity" and "-Infinity" as they are spelt on the wire


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    # `Client` is a name for type checkers alone (importing it here would be a circle); its field is never converted.
    return typing.get_type_hints(cls, localns={"Client": object})


def _build(cls: type[T], data: Any) -> T:
    if not isinstance(data, dict):
        raise TypeError(f"expected an object, got {type(data).__name__}")
    hints = _hints(cls)  # type: ignore[arg-type]  # mypy does not see that a class is hashable
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):  # type: ignore[arg-type]  # every record here is a dataclass
        if spec.name == "client":
            continue
        if spec.name == "raw":
            values["raw"] = data
        elif spec.name in data and (data[spec.name] is not None or _is_optional(hints[spec.name])):
            # A null where this client expects a value is read as "not said": the default applies.
            values[spec.name] = _convert(hints[spec.name], data[spec.name])
    return cls(**values)


def _is_optional(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in typing.get_args(hint)


def _convert(hint: Any, value: Any) -> Any:
    if _is_optional(hint):
        if value is None:
            return None
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    origin = typing.get_origin(hint)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"expected a list, got {value!r:.60}")
        return tuple(_convert(typing.get_args(hint)[0], item) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise TypeError(f"expected an object, got {value!r:.60}")
        item_hint = typing.get_args(hint)[1]
        return value if item_hint is Any else {str(name): _convert(item_hint, item) for name, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value)
    if hint is datetime:
        return _datetime(value)
    if hint is float and value is None:
        return math.nan  # a bucket of a curve that holds no finite value has no lowest and no highest one
    if hint is float and isinstance(value, int | float | str):
        return parse_number(value)
    if hint is str and isinstance(value, int | float):
        return str(value)
    if not isinstance(value, hint):
        raise TypeError(f"expected {hint.__name__}, got {value!r:.60}")
    return value


def _datetime(value: Any) -> datetime:
    if not isinstance(value, str):
        raise TypeError(f"expected an RFC 3339 time, got {value!r:.60}")
    return datetime.fromisoformat(value)
