"""Records between service and worker: the launch plan (claim's answer), the directive, the node report.

They are plain JSON objects on the wire and in files. Decoding ignores unknown keys, so that a node and a server one
release apart understand each other. Not for: what users submit (`service.schemas.job_spec`).
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AssignedGPU:
    """One device of an allocation. On a node without GPUs a CPU slot stands in for one (`kind = "cpu_slot"`)."""

    index: int
    uuid: str
    kind: str = "gpu"
    """`gpu` or `cpu_slot`."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What each node starts. `command`: once per node, list or shell string. All others: one process per rank."""

    kind: str
    """`script`, `command`, `recipe` or `entry`; what the last two train is in `LaunchPlan.training`."""
    script: str | None = None
    args: tuple[str, ...] = ()
    command: tuple[str, ...] | None = None
    """Argument list, passed to the program exactly."""
    shell: str | None = None
    """String form: run as one `bash -euo pipefail -c` (or `sh -eu -c`) script inside the job only."""


@dataclass(frozen=True, kw_only=True)
class CodeSource:
    """Where a job's code comes from. Both None: the job brings no code and starts in an empty folder."""

    bundle: str | None = None
    """`sha256:<hex>` of a gzip'd tar (`gangline.protocol.bundles`)."""
    path: str | None = None
    """Absolute folder on the nodes (shared storage); used in place, never written by us."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Everything a node needs to run its part of an attempt. The answer to a claim; also `launch.json`."""

    attempt_id: int
    job_id: int
    job_name: str
    attempt_number: int
    """1 for the first try."""
    pool_id: str
    node_name: str
    node_rank: int
    num_nodes: int
    node_address: str
    """Registered address of this node; peers reach it there."""
    processes_per_node: int
    first_rank: int
    """Rank of local rank 0 on this node."""
    world_size: int
    gpus: tuple[AssignedGPU, ...]
    cpus: float
    memory_bytes: int | None
    run: RunPlan
    code: CodeSource
    python: str | None
    """Interpreter of a `script` (absolute, or a name looked up on PATH); None: the agent's own default."""
    env: dict[str, str]
    time_limit_seconds: float | None
    stop_grace_seconds: float
    start_timeout_seconds: float
    """From allocation to `running`; the server ends the attempt then."""
    disconnect_stop_seconds: float | None
    """`on_disconnect: stop`: stop the ranks after this long without any answer from the API; None: keep training."""
    gather_seconds: float
    """Log bytes and events are gathered at most this long before they are sent."""
    start_reason: str
    run_as: str | None = None
    """Account the ranks run as; None: the agent's own (isolation `trusted`)."""
    training: dict[str, Any] | None = None
    """Of a `recipe` or `entry`: the plan file (`trainer.plan`) as the service made it, without this node's folders."""
    shared_folder_id: str | None = None
    """Of a `recipe` or `entry`: the shared folder where its checkpoints belong; a node that has another one must not
    start. It is where the job's checkpoints lie, at first the one that all its nodes tell of. None: each node keeps its
    checkpoints to itself."""


@dataclass(frozen=True, kw_only=True)
class StopOrder:
    """Asks a supervisor to end its ranks: SIGTERM, then SIGKILL after the grace."""

    intent: str
    """A `StopIntent`."""
    grace_seconds: float


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Address and port that rank 0 listens on (MASTER_ADDR, MASTER_PORT)."""

    address: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Directive:
    """What the API wants of a supervisor, long-polled by `version`."""

    version: int
    stop: StopOrder | None = None
    rendezvous: Rendezvous | None = None
    time_limit_seconds: float | None = None
    """The job's time limit by now, in place of the launch plan's. None: nothing new is known of it."""


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """A user exception: from TORCHELASTIC_ERROR_FILE, else from the last traceback in the rank's log."""

    type: str
    """Class name, e.g. `ValueError`."""
    message: str
    traceback: str
    """At most 16 KiB, the end kept."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """How one rank (for `command`: one process of a node) ended."""

    rank: int
    local_rank: int
    exit_code: int | None
    """0..255 when it exited; None when a signal ended it or it never started."""
    signal: str | None
    """Name such as `SIGKILL` when a signal ended it."""
    stopped_by_us: bool
    """It ended after we had sent it a signal: never the cause of a failure."""
    killed_after_grace: bool
    started_at: float
    """Epoch seconds of the node's clock, as are the others; the server corrects by the clock offset."""
    ended_at: float
    error: ErrorRecord | None = None
    is_peer_loss: bool = False
    """Its error reads as the loss of a peer (connection closed, reset, timed out): secondary to any other failure."""


@dataclass(frozen=True, kw_only=True)
class NodeFailure:
    """A failure that is not a rank's exit: found by the environment check, the launcher, a limit or the agent."""

    outcome: str
    """An `Outcome`."""
    message: str
    """One sentence with the values, for the user."""
    fix: str = ""
    at: float = 0.0
    rank: int | None = None
    """The rank that is at fault, where there is one: of a hang, the one furthest behind on this node."""
    moves: int | None = None
    """Of a hang: the moves of that rank (`gangline.protocol.pulse`). Over all nodes the fewest name the culprit."""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """The end of an attempt on one node, sent once its process set is empty. Sending it again changes nothing."""

    ranks: tuple[RankReport, ...]
    failure: NodeFailure | None
    stop_intent: str | None
    """The intent this node acted on when it stopped its ranks; None when they all ended by themselves."""
    process_set_empty: bool
    leftovers: tuple[str, ...] = ()
    """Processes that could not be ended, as `pid command`: they keep the node's share quarantined."""
    oom_kills: int = 0
    """OOM kills counted in the attempt's cgroup; 0 where there is none."""
    stream_sizes: dict[str, int] = field(default_factory=dict)
    """Final size in bytes of each stream, by `log/<rank>` and `events/<rank>`."""
    sent_at: float = 0.0
    """Node clock when it was sent, from which the server corrects the times."""
    result: str | None = None
    """How the training ended, as the trainer wrote it before teardown (`succeeded`, `preempted`, `cancelled`): it
    overrules how the ranks' processes then ended. None: it did not come so far, or is no job of the trainer."""
    shared_memory_bytes: int | None = None
    """Size of the node's shared memory, where a rank reads as having run out of it."""


def encode(record: Any) -> dict[str, Any]:
    """A record as a JSON-ready dict."""
    return dataclasses.asdict(record)


def decode(cls: type[T], data: Any) -> T:
    """Build record `cls` from a JSON object. Unknown keys are ignored; a missing or mistyped one raises ValueError."""
    if not isinstance(data, dict):
        raise ValueError(f"{cls.__name__}: expected an object, got {type(data).__name__}")
    hints = _type_hints(cls)  # type: ignore[arg-type]  # mypy does not see that every class is hashable
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):  # type: ignore[arg-type]  # every record here is a dataclass
        if spec.name in data:
            values[spec.name] = _decode_value(hints[spec.name], data[spec.name], f"{cls.__name__}.{spec.name}")
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error


@functools.cache
def _type_hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode_value(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if value is None else _decode_value(options[0], value, where)
    if dataclasses.is_dataclass(hint):
        return decode(hint, value)  # type: ignore[arg-type]  # is_dataclass also admits instances; hints are classes
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: expected a list, got {type(value).__name__}")
        return tuple(_decode_value(typing.get_args(hint)[0], item, where) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object, got {type(value).__name__}")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value
