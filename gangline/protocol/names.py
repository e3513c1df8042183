"""Names that two processes must agree on: environment variables, files of an attempt folder, queues, HTTP headers.

Not for: values that only one package uses (they live beside their use).
"""

from typing import Final

# --- Environment of a rank -----------------------------------------------------------------------------------------
ENV_ATTEMPT: Final = "GANGLINE_ATTEMPT"
"""Marker of the process set: `<pool id>/<node name>/<attempt id>`. Every process of an attempt inherits it."""
ENV_JOB_ID: Final = "GANGLINE_JOB_ID"
ENV_JOB_NAME: Final = "GANGLINE_JOB_NAME"
ENV_ATTEMPT_NUMBER: Final = "GANGLINE_ATTEMPT_NUMBER"
ENV_START_REASON: Final = "GANGLINE_START_REASON"
"""Why this attempt exists: `submitted`, or the outcome of the attempt before it (`node_lost`, `preempted`, …)."""
ENV_EVENTS_FILE: Final = "GANGLINE_EVENTS_FILE"
"""This rank's events file; `gangline.report` appends one JSON line per call."""
ENV_STOP_FILE: Final = "GANGLINE_STOP_FILE"
"""Exists once the attempt has been asked to stop; its content is the stop intent (`cancel`, `time_limit`, …)."""
ENV_JOB_FOLDER: Final = "GANGLINE_JOB_FOLDER"
"""Stable folder of the job on this node: it outlives attempts."""
ENV_CHECKPOINT_FOLDER: Final = "GANGLINE_CHECKPOINT_FOLDER"
ENV_PULSE_FILE: Final = "GANGLINE_PULSE_FILE"
"""Where a rank of the trainer keeps its pulse (`gangline.protocol.pulse`)."""
ENV_RESULT_FILE: Final = "GANGLINE_RESULT_FILE"
"""Where local rank 0 of the trainer writes how the training ended, before teardown: `{"outcome": …, "step": …}`."""
ENV_OFFSETS_FILE: Final = "GANGLINE_OFFSETS_FILE"
"""Bytes of each stream that the API has accepted: a checkpoint is accepted once the event that tells of it is."""
ENV_BROKER_URL: Final = "GANGLINE_BROKER_URL"
"""Told to an agent by its environment (arguments are seen by every user of the machine); never to a rank."""
RESERVED_ENV_PREFIX: Final = "GANGLINE_"
"""Variables that a job spec may not set."""

# --- Client configuration ------------------------------------------------------------------------------------------
ENV_URL: Final = "GANGLINE_URL"
ENV_TOKEN: Final = "GANGLINE_TOKEN"
ENV_CONFIG_FOLDER: Final = "GANGLINE_CONFIG_FOLDER"

# --- Data folders --------------------------------------------------------------------------------------------------
DATA_FOLDER_MARKER: Final = ".gangline-data"
"""Lies in every data folder of a server or agent: such a folder holds tokens and is never packed into a bundle."""

# --- Files of an attempt folder on a node: <agent data>/attempts/<attempt id>/ --------------------------------------
STATE_FILE: Final = "state.json"
"""Written 0600 by the agent before it claims (token), completed by the supervisor (pid, start time, boot id)."""
LAUNCH_FILE: Final = "launch.json"
"""The launch plan as the claim answered it (`gangline.protocol.launch.LaunchPlan`)."""
OFFSETS_FILE: Final = "offsets.json"
"""Bytes of each stream that the API has accepted."""
REPORT_FILE: Final = "report.json"
"""The final node report, kept until the API has accepted it."""
RESULT_FILE: Final = "result.json"
"""Written by local rank 0 of the trainer before teardown: it overrules how the ranks' processes then end."""
PLAN_FILE: Final = "plan.json"
"""The plan file of a recipe or entry (`trainer.plan.training_plan.TrainingPlan`)."""
PULSES_FOLDER: Final = "pulses"
STOP_FILE: Final = "stop"
SUPERVISOR_LOG: Final = "supervisor.log"
CODE_FOLDER: Final = "code"
LOGS_FOLDER: Final = "logs"
EVENTS_FOLDER: Final = "events"
ERRORS_FOLDER: Final = "errors"


def log_file(rank: int) -> str:
    """Path, relative to the attempt folder, of what rank `rank` writes to stdout and stderr."""
    return f"{LOGS_FOLDER}/rank-{rank}.log"


def events_file(rank: int) -> str:
    """Path, relative to the attempt folder, of the events of rank `rank`."""
    return f"{EVENTS_FOLDER}/rank-{rank}.jsonl"


def error_file(rank: int) -> str:
    """Path, relative to the attempt folder, of the error record of rank `rank` (TORCHELASTIC_ERROR_FILE)."""
    return f"{ERRORS_FOLDER}/rank-{rank}.json"


def pulse_file(rank: int) -> str:
    """Path, relative to the attempt folder, of the pulse of rank `rank`."""
    return f"{PULSES_FOLDER}/rank-{rank}"


# --- The doorbell --------------------------------------------------------------------------------------------------
LAUNCH_TASK: Final = "gangline.launch"
"""Celery task with one argument, the attempt id: "look at attempt 17"."""


def node_queue(node_name: str) -> str:
    """Celery queue that the agent of `node_name` listens on."""
    return f"node.{node_name}"


# --- HTTP ----------------------------------------------------------------------------------------------------------
API_PREFIX: Final = "/api/v1"
IDEMPOTENCY_HEADER: Final = "Idempotency-Key"
REPLAYED_HEADER: Final = "Idempotent-Replayed"
VERSION_HEADER: Final = "X-Gangline-Version"
TOKEN_PREFIXES: Final = {"user": "glu_", "enrolment": "gle_", "node": "gln_", "attempt": "gla_"}
"""One prefix per kind of bearer token, so that a leaked one is recognised by scanners."""
