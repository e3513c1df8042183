"""How a rank ends by a failure: which exit code it means, and the error record that names it.

A gloo abort in teardown would mask the user's exception, so a failing rank writes its record, flushes and leaves by
`os._exit`: nothing of the interpreter's or torch's shutdown runs. Not for: choosing the cause among ranks (service).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn

import torch

from gangline.protocol.outcomes import TrainerExit
from gangline.protocol.peer_loss import is_peer_loss_text
from trainer.plan.problem import PlanError

ENV_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
_OUT_OF_MEMORY_TEXTS: Final = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class ConfigError(ValueError):
    """The job cannot run as written: the entry does not give a task, say. The message says what to change."""


class NonFiniteLossError(ArithmeticError):
    """This rank's loss (or gradient) became NaN or infinite."""


class PeerFailedError(RuntimeError):
    """Another rank failed, and this one stops with it: never the cause."""


def exit_code_of(error: BaseException) -> TrainerExit:
    """The exit code that an exception means. Pure."""
    if isinstance(error, ConfigError | PlanError):
        return TrainerExit.CONFIG_ERROR
    if isinstance(error, NonFiniteLossError):
        return TrainerExit.NAN_LOSS
    if isinstance(error, PeerFailedError):
        return TrainerExit.COMMUNICATION_ERROR
    if is_out_of_memory(error):
        return TrainerExit.OUT_OF_MEMORY
    if isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and is_peer_loss_text(f"{type(error).__name__}: {error}")
    ):
        return TrainerExit.COMMUNICATION_ERROR
    return TrainerExit.USER_ERROR


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, of the device or of the machine."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


def error_record(error: BaseException, at: float) -> dict[str, object]:
    """What the error file holds, in the form of torch's `@record`. `at` in epoch seconds."""
    stack = "".join(traceback.format_exception(error))
    message = f"{type(error).__name__}: {error}"
    return {"message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": str(int(at))}}}


def die(error: BaseException, environment: Mapping[str, str]) -> NoReturn:
    """Write the record and the traceback, then end this process with the code that the error means."""
    code = exit_code_of(error)
    path = environment.get(ENV_ERROR_FILE)
    if path:
        try:
            Path(path).write_text(json.dumps(error_record(error, time.time())), encoding="utf-8")
        except OSError as problem:
            print(f"gangline: the error file {path} cannot be written: {problem}", file=sys.stderr)  # noqa: T201  # the rank's log
    traceback.print_exception(error)
    leave_with(code)


def leave_with(code: int) -> NoReturn:
    """Flush and end this process at once, without teardown."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk takes no more, and changes nothing
            stream.flush()
    os._exit(code)
