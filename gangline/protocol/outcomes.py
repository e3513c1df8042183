"""Words of an ending: outcomes of an attempt, stop intents, classes of failure evidence, exit codes of the CLI.

Not for: what follows from an outcome (retry, sentence, fix): that table is `service.domain.outcomes`.
"""

from enum import IntEnum, StrEnum


class Outcome(StrEnum):
    """Why an attempt ended. One word each, the same in code, table, API, CLI and page."""

    SUCCEEDED = "succeeded"
    USER_ERROR = "user_error"
    """User code exited non-zero, raised, or died by a signal that we did not send."""
    CONFIG_ERROR = "config_error"
    """Cannot run as written: script missing, exit 127, bad plan."""
    ENVIRONMENT_ERROR = "environment_error"
    """Interpreter, package, folder or free space missing on the node."""
    OUT_OF_MEMORY = "out_of_memory"
    NAN_LOSS = "nan_loss"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    HANG = "hang"
    COMMUNICATION_ERROR = "communication_error"
    GPU_FAULT = "gpu_fault"
    STORAGE_FULL = "storage_full"
    NODE_LOST = "node_lost"
    LAUNCH_FAILED = "launch_failed"
    """Ours, before the first rank runs: port, claim, start deadline."""
    SUPERVISOR_LOST = "supervisor_lost"
    """Ours, afterwards: the supervisor died; its ranks were ended by marker."""


class StopIntent(StrEnum):
    """Why an attempt is asked to stop. Carried as data to every rank (stop file), never guessed from a signal."""

    CANCEL = "cancel"
    """By its owner."""
    ADMIN_STOP = "admin_stop"
    """By an admin, of somebody else's job."""
    TIME_LIMIT = "time_limit"
    PEER_FAILURE = "peer_failure"
    """Another rank of the gang failed, or its node was lost."""
    START_DEADLINE = "start_deadline"
    PREEMPT = "preempt"
    DRAIN = "drain"
    DISCONNECTED = "disconnected"
    """`on_disconnect: stop`: the supervisor could not reach the API for too long."""
    FENCED = "fenced"
    """The API answered 409 attempt_fenced: somebody else has the job now."""


class TrainerExit(IntEnum):
    """Exit codes of a rank of the trainer. Read for `recipe` and `entry` only: a script's 75 is just its code."""

    SUCCEEDED = 0
    CONFIG_ERROR = 64
    """The plan cannot run, or the entry does not give a task."""
    USER_ERROR = 65
    """An exception of the user's code."""
    OUT_OF_MEMORY = 66
    NAN_LOSS = 67
    COMMUNICATION_ERROR = 68
    """A collective failed or timed out: a peer is gone. Secondary to any other failure."""
    PREEMPTED = 75
    """Asked to make room: a checkpoint of the agreed step is written."""
    CANCELLED = 76


class ExitCode(IntEnum):
    """Exit codes of `gang`. `WAIT_*` only from `wait`, `submit --wait` and `logs -f --exit-status`."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    NOT_FOUND = 3
    NOT_ALLOWED = 4
    REFUSED = 5
    UNREACHABLE = 6
    WAIT_FAILED = 10
    WAIT_CANCELLED = 11
    WAIT_TIMED_OUT = 12
    WAIT_LOST = 13
    """Lost node or time limit."""
    INTERRUPTED = 130


class JobState(StrEnum):
    """State of a job. Hold, dependency, profiling and quota are reasons of waiting, not states."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether no further change of state is possible."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
