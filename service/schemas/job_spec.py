"""The job file, version 1, as a strict pydantic model: keys, types, ranges and units; and the JSON schema made from it.

Strict: no `"2"` for 2, no `true` for 1, no 0.5 GPUs, no unknown key. Null means "not given". Not for: what keys mean
together (`service.schemas.spec_rules`), reading text (`service.schemas.parse_spec`), storage (`service.domain.spec`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidatorFunctionWrapHandler, WithJsonSchema, WrapValidator

from gangline.protocol.outcomes import Outcome
from service.domain.spec import (
    ANY_GPU,
    DEFAULT_STOP_GRACE_SECONDS,
    CodeSpec,
    Condition,
    Dependency,
    JobSpec,
    ResourceSpec,
    RetrySpec,
    RunSpec,
)
from service.domain.start_time import read_start_time
from service.domain.text import MAX_NAME_LENGTH
from service.schemas.training_wire import CheckpointWire, ParallelWire, TrainWire, training_of
from service.schemas.wire_types import Duration, OrMapping, Priority, Size, WireModel, list_of_at_most
from trainer.plan.training_plan import RunTarget

MAX_ARGUMENTS: Final = 20_000
MAX_RETRY_ENTRIES: Final = 255
MAX_RANGE_GPUS: Final = 1_024
"""Each number of a range is planned by itself: no more than `MAX_LAYOUTS`."""
MAX_TAGS: Final = 64
MAX_LABELS: Final = 64
MAX_NEEDS: Final = 200
MAX_ID: Final = 2**63 - 1
MAX_VARIABLES: Final = 1_000
RETRYABLE: Final = tuple(outcome.value for outcome in Outcome if outcome not in (Outcome.SUCCEEDED, Outcome.CANCELLED))


def _command(value: Any) -> list[str] | str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return value
    raise ValueError("must be a list of strings, or one string for the shell")


def _list_or_mapping(value: Any, check_list: ValidatorFunctionWrapHandler) -> Any:
    """Which of the two it must be depends on what is run: `spec_rules` and `training_rules` say."""
    return value if isinstance(value, dict) else check_list(value)


Command = Annotated[
    Any,
    BeforeValidator(_command),
    WithJsonSchema(
        {"anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "string", "minLength": 1}]}
    ),
]
Arguments = Annotated[
    list[str],
    list_of_at_most(MAX_ARGUMENTS),
    WrapValidator(_list_or_mapping),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "object"}]}),
]
RetryOutcome = Literal[RETRYABLE]  # type: ignore[valid-type]  # made from the enum of outcomes
ExitCodeNumber = Annotated[int, Field(ge=1, le=255)]
TextMap = dict[str, str]


class CodeWire(WireModel, title="Code"):
    """Where the job's code is: a packed bundle, or a folder on storage that every node sees."""

    bundle: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    """Digest of an uploaded bundle. `gang submit` packs a relative path and fills this in."""
    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Absolute folder on shared storage, used in place."""


class RunWire(WireModel, title="Run"):
    """What is run: exactly one of script, command, recipe, entry."""

    script: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Python script, relative to the code; one process per rank with the torchrun variables."""
    args: Arguments | None = None
    """Of a script: a list of strings, passed exactly as written. Of a recipe or entry: a mapping of its parameters."""
    command: Command | None = None
    """Run once per node. A list reaches the program exactly; a string runs as one shell script inside the job."""
    recipe: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    """A built-in training recipe; needs no code."""
    entry: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """`package.module:function` of the code that returns a training task; Gangline runs the loop."""


class GPURangeWire(WireModel, title="GPU range"):
    """The job runs on whatever number of GPUs is free between the two, each attempt on the most that fit at its start.

    Of a recipe or entry, only numbers count that its training can be split over.
    """

    min: Annotated[int, Field(ge=1, le=MAX_RANGE_GPUS)]
    """Least GPUs that it starts on."""
    max: Annotated[int, Field(ge=1, le=MAX_RANGE_GPUS)]
    """Most GPUs that it takes."""


class ResourcesWire(WireModel, title="Resources"):
    """What the job needs. Give nodes and gpus_per_node, or gpus in all. Nothing given: one GPU."""

    nodes: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Number of nodes."""
    gpus_per_node: Annotated[int, Field(ge=0, le=1_024)] | None = None
    """GPUs on each node; 0 hides all of them."""
    gpus: Annotated[int, Field(ge=0, le=100_000), OrMapping(GPURangeWire)] | None = None
    """GPUs in all, over the fewest nodes of equal share; or {min: 2, max: 8}: at each start the most that are free."""
    gpu: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    """Type of GPU, such as H100, or any."""
    gpu_memory: Annotated[Size, Field(gt=0)] | None = None
    """Least memory of each GPU, such as 40GiB."""
    labels: Annotated[TextMap, Field(max_length=MAX_LABELS)] | None = None
    """Labels that each of its nodes must have, such as {disk: nvme}; gang node ls shows them."""
    exclusive: bool | None = None
    """Whole nodes to itself, however few of their GPUs it uses."""
    cpus: Annotated[float, Field(gt=0, le=4_096, allow_inf_nan=False)] | None = None
    """CPU cores on each node. Default: one per GPU."""
    memory: Size | None = None
    """Memory on each node, such as 32GiB or 500MB; a number is bytes. Whoever takes more ends."""
    time: Annotated[Duration, Field(gt=0)] | None = None
    """Time limit of one attempt, such as 4h or 1h30m; a number is seconds."""


class NeedWire(WireModel, title="Need"):
    """A job that must have ended first, and how."""

    job: Annotated[int, Field(ge=1, le=MAX_ID)]
    """Its id."""
    condition: Literal["ok", "any", "not_ok"] | None = None
    """ok (default): it has succeeded; any: it has ended; not_ok: it has failed or was cancelled."""


class RetryWire(WireModel, title="Retry"):
    """Which failures of the job's own are tried again. Faults of the pool are retried without this."""

    max: Annotated[int, Field(ge=0, le=100)] | None = None
    """How often at most."""
    on: Annotated[list[RetryOutcome], list_of_at_most(MAX_RETRY_ENTRIES)] | None = None
    """Outcomes to try again after."""
    exit_codes: Annotated[list[ExitCodeNumber], list_of_at_most(MAX_RETRY_ENTRIES)] | None = None
    """Exit codes to try again after."""


class JobWire(WireModel, title="Gangline job"):
    """A Gangline job."""

    version: Annotated[int, Field(ge=1, le=1)] | None = None
    """Version of the job file's format; there is only 1."""
    name: str
    """Shown everywhere; 1 to 200 printable characters."""
    team: str | None = None
    """Team that the job counts for. Default: the owner's first team."""
    private: bool | None = None
    """Show others only that there is a private job."""
    code: CodeWire | None = None
    """Where the code is."""
    python: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Interpreter of the ranks on the nodes: absolute, or a name looked up on PATH there."""
    run: RunWire
    """What is run."""
    train: TrainWire | None = None
    """How long and how a recipe or entry is trained."""
    parallel: ParallelWire | None = None
    """How a recipe or entry is split over GPUs."""
    checkpoint: CheckpointWire | None = None
    """When a recipe or entry writes checkpoints."""
    profile: dict[str, Any] | None = None
    """What the model of an entry costs, as `python -m trainer profile JOB_FILE -o json` prints it: `gang submit
    --profile` adds it. For strategy auto, and to estimate memory."""
    resources: ResourcesWire | None = None
    """What it needs."""
    processes_per_node: Annotated[int, Field(ge=1, le=4_096)] | None = None
    """Ranks on each node; a command has one. Default: one per GPU, at least one."""
    env: Annotated[TextMap, Field(max_length=MAX_VARIABLES)] | None = None
    """Environment variables; values are strings."""
    retry: RetryWire | None = None
    """When to try again."""
    preemptible: bool | None = None
    """The job resumes by itself, and may be stopped to make room; a script once it has reported a checkpoint. Default:
    true for recipe and entry, else false."""
    on_disconnect: Literal["continue", "stop"] | None = None
    """What ranks do while their node cannot reach the server."""
    stop_grace: Duration | None = None
    """Time between SIGTERM and SIGKILL, such as 30s."""
    tags: Annotated[TextMap, Field(max_length=MAX_TAGS)] | None = None
    """Labels to find jobs by; values are strings."""
    priority: Priority | None = None
    """Order among the jobs of one's own team: low, normal, high, or a number from -100 to 100. top goes before the
    jobs of all teams, and is for users whom an admin has granted it."""
    on_time_limit: Literal["fail", "requeue"] | None = None
    """What becomes of the job at the end of resources.time, after its last checkpoint: it ends as time_limit (fail, the
    default), or waits for its next turn (requeue)."""
    hold: bool | None = None
    """Keep it waiting until gang release."""
    start_after: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    """Not before this time: 2026-03-08T14:30:00+01:00, or without the offset and with zone. A local time that a change
    of the clocks skips or repeats is refused with the two times that it could mean."""
    zone: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    """Zone of a start_after without offset, such as America/New_York."""
    after: (
        Annotated[
            list[Annotated[int, Field(ge=1, le=MAX_ID), OrMapping(NeedWire)]],
            list_of_at_most(MAX_NEEDS),
        ]
        | None
    ) = None
    """Jobs that must have ended first: [12, 13] for both to have succeeded, or {job: 12, condition: any}. Once a
    condition can never hold any more, the job is cancelled and says why."""


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file, for editors and `GET /schemas/job.json`."""
    schema = JobWire.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "description": "A job file of Gangline, version 1. Keys left out take their default; null means not given.",
    }


def to_job_spec(wire: JobWire) -> JobSpec:
    """The spec to store, of a job file that also passed `spec_rules`."""
    resources = wire.resources or ResourcesWire()
    retry = wire.retry or RetryWire()
    code = wire.code or CodeWire()
    gpu = resources.gpu
    gpus: Any = resources.gpus
    is_range = isinstance(gpus, GPURangeWire)
    parts = (wire.train, wire.parallel, wire.checkpoint, wire.profile)
    training = training_of(_target(wire.run), *parts) if _is_trained(wire) else None
    start = None if wire.start_after is None else read_start_time(wire.start_after, wire.zone)
    return JobSpec(
        name=wire.name,
        team=wire.team,
        private=bool(wire.private),
        code=CodeSpec(bundle=code.bundle, path=code.path),
        python=wire.python,
        run=_run_spec(wire.run),
        training=training,
        resources=ResourceSpec(
            num_nodes=resources.nodes,
            gpus_per_node=resources.gpus_per_node,
            total_gpus=gpus.max if is_range else gpus,
            min_gpus=gpus.min if is_range else None,
            gpu_type=None if gpu is None or gpu.casefold() == ANY_GPU else gpu,
            gpu_memory_bytes=resources.gpu_memory,
            labels=dict(resources.labels or {}),
            exclusive=bool(resources.exclusive),
            cpus_per_node=resources.cpus,
            memory_bytes_per_node=resources.memory,
            time_limit_seconds=resources.time,
        ),
        processes_per_node=wire.processes_per_node,
        env=dict(wire.env or {}),
        retry=RetrySpec(
            max_retries=retry.max or 0,
            outcomes=tuple(retry.on or ()),
            exit_codes=tuple(retry.exit_codes or ()),
        ),
        # Whoever trains with Gangline's loop resumes from checkpoints; a script must say that it does.
        preemptible=training is not None if wire.preemptible is None else wire.preemptible,
        on_disconnect=wire.on_disconnect or "continue",
        stop_grace_seconds=DEFAULT_STOP_GRACE_SECONDS if wire.stop_grace is None else wire.stop_grace,
        tags=dict(wire.tags or {}),
        priority=wire.priority or 0,
        on_time_limit=wire.on_time_limit or "fail",
        hold=bool(wire.hold),
        start_after=None if start is None else start.text,
        zone=None if start is None else start.zone,
        after=tuple(_dependency(one) for one in wire.after or ()),
    )


def _dependency(need: Any) -> Dependency:
    if isinstance(need, NeedWire):
        return Dependency(job=need.job, condition=Condition(need.condition or "ok"))
    return Dependency(job=need)


def _is_trained(wire: JobWire) -> bool:
    return wire.run.recipe is not None or wire.run.entry is not None


def _target(run: RunWire) -> RunTarget:
    args: Any = run.args
    return RunTarget(recipe=run.recipe, entry=run.entry, args=dict(args or {}))


def _run_spec(run: RunWire) -> RunSpec:
    if run.recipe is not None:
        return RunSpec(kind="recipe")
    if run.entry is not None:
        return RunSpec(kind="entry")
    if run.script is not None:
        return RunSpec(kind="script", script=run.script, args=tuple(run.args or ()))
    if isinstance(run.command, str):
        return RunSpec(kind="command", shell=run.command)
    return RunSpec(kind="command", command=tuple(run.command or ()))
