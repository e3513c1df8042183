"""What a training script calls inside a job: `report()` progress, ask `should_stop()`, find `checkpoint_dir()`.

Standard library only. Each call of `report` appends one JSON line to this rank's events file, which the supervisor
ships. Reporting never breaks a training: a full disk or a missing folder costs the line and one warning. Outside a job
every function checks its arguments and does nothing else. Not for: sending anything over a network.
"""

from __future__ import annotations

import json
import math
import operator
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from gangline.protocol.names import ENV_CHECKPOINT_FOLDER, ENV_EVENTS_FILE, ENV_STOP_FILE

MAX_LINE_BYTES = 64 * 1024
"""One event is one `write`, small enough that lines of several processes of a rank never mix."""
MAX_METRICS = 100
MAX_NAME_CHARS = 200
MAX_CHECKPOINT_CHARS = 4096
MAX_EXACT_INTEGER = 2**53
"""Above this a whole number is not exact in JSON readers that use doubles, so it is sent as a float."""
STOP_CHECK_SECONDS = 0.05
"""`should_stop` looks at the file system at most this often, so that calling it each step costs nothing."""

_lock = threading.Lock()
_num_reported = 0
_is_line_torn = False
_has_warned = False
_stop_seen = False
_stop_checked_at = -math.inf


def report(
    step: Any = None,
    total_steps: Any = None,
    *,
    phase: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    **metrics: Any,
) -> None:
    """Report training progress: the current step, the number of steps in all, any metrics by name.

    `phase` is a word such as `training`; `checkpoint` the path of a checkpoint that is complete and durable.
    Metrics are numbers, or anything `float()` takes a number from (NumPy and torch scalars). NaN and infinities are
    kept. Raises TypeError for a value that is not a number and ValueError for too many or too long names, also outside
    a job, so that a mistake shows at the desk. Never raises for a disk that is full or a folder that is gone.
    """
    event = {
        "step": _whole_number("step", step),
        "total_steps": _whole_number("total_steps", total_steps),
        "phase": _text("phase", phase, MAX_NAME_CHARS),
        "metrics": _checked_metrics(metrics),
        "checkpoint": _text("checkpoint", None if checkpoint is None else os.fspath(checkpoint), MAX_CHECKPOINT_CHARS),
    }
    path = os.environ.get(ENV_EVENTS_FILE)
    if path:
        _append(path, event)


def should_stop() -> bool:
    """Whether this attempt has been asked to stop (cancel, time limit, preemption): save and leave. Cheap per step.

    Each rank asks for itself: in a gang agree on the answer (all-reduce it) before leaving a collective loop.
    """
    global _stop_seen, _stop_checked_at
    if _stop_seen:
        return True
    path = os.environ.get(ENV_STOP_FILE)
    if not path:
        return False
    now = time.monotonic()
    if now - _stop_checked_at >= STOP_CHECK_SECONDS:
        _stop_checked_at = now
        _stop_seen = os.path.exists(path)  # noqa: PTH110  # a Path object costs more than the stat itself
    return _stop_seen


def stop_reason() -> str | None:
    """Why this attempt is asked to stop (`cancel`, `time_limit`, `preempt`, …: a `StopIntent`); None if it is not."""
    path = os.environ.get(ENV_STOP_FILE)
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip() or "unknown"
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _warn(f"cannot read the stop file {path}: {error}")
        return "unknown"


def checkpoint_dir() -> Path | None:
    """Folder for this job's checkpoints, the same for all its attempts; None outside a job. Makes the folder."""
    value = os.environ.get(ENV_CHECKPOINT_FOLDER)
    if not value:
        return None
    folder = Path(value)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _warn(f"cannot make the checkpoint folder {folder}: {error}")
    return folder


def _whole_number(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        as_float = _as_float(name, value)
        if not as_float.is_integer():
            raise ValueError(f"report({name}={value!r}): {name} is a whole number of steps") from None
        number = int(as_float)
    if not 0 <= number <= MAX_EXACT_INTEGER:
        raise ValueError(f"report({name}={number}): {name} lies between 0 and 2**53")
    return number


def _text(name: str, value: Any, max_chars: int) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"report({name}=...): expected text, got {type(value).__name__}")
    if len(value) > max_chars:
        raise ValueError(f"report({name}=...): {len(value)} characters, at most {max_chars} are kept; shorten it")
    return value


def _checked_metrics(metrics: dict[str, Any]) -> dict[str, float | int | str]:
    if len(metrics) > MAX_METRICS:
        raise ValueError(
            f"report(): {len(metrics)} metrics in one call, at most {MAX_METRICS}; "
            "report the ones you look at, or spread them over several calls"
        )
    checked: dict[str, float | int | str] = {}
    for name, value in metrics.items():
        if not name or len(name) > MAX_NAME_CHARS:
            raise ValueError(
                f"report(): the metric name {name[:40]!r}... has {len(name)} characters; "
                f"use 1 to {MAX_NAME_CHARS} characters"
            )
        checked[name] = _metric_value(name, value)
    return checked


def _metric_value(name: str, value: Any) -> float | int | str:
    """A number as JSON can carry it: exact integers as such, all else as a double, non-finite ones by name."""
    try:
        whole = operator.index(value)
    except TypeError:
        number = _as_float(name, value)
    else:
        if abs(whole) <= MAX_EXACT_INTEGER:
            return whole
        try:
            number = float(whole)
        except OverflowError:
            number = math.inf if whole > 0 else -math.inf
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def _as_float(name: str, value: Any) -> float:
    # float("3") works too, but a number in quotes is a mistake worth showing.
    if isinstance(value, str | bytes | bytearray) or not hasattr(value, "__float__"):
        raise TypeError(f"report({name}=...): expected a number, got {type(value).__name__}: {value!r:.80}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"report({name}=...): {type(value).__name__} has no single value ({error}); "
            "report one number, for example its mean"
        ) from error


def _append(path: str, event: dict[str, Any]) -> None:
    """Number the event and append it as one line by one write; whatever the disk says, return."""
    global _num_reported, _is_line_torn
    with _lock:
        _num_reported += 1
        record = {"seq": _num_reported, "at": time.time(), "kind": "progress", **event}
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # After a write that the disk cut short, end that half line first, so that it costs itself alone.
        line = (b"\n" if _is_line_torn else b"") + text.encode("utf-8", errors="replace") + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(
                f"report(): the event has {len(line)} bytes, at most {MAX_LINE_BYTES}; "
                "use fewer metrics or shorter names"
            )
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                written = os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            _warn(f"progress is not recorded: cannot write {path}: {error}")
            return
        _is_line_torn = written < len(line)
        if _is_line_torn:
            _warn(f"progress is not recorded: only {written} of {len(line)} bytes fit into {path}")


def _warn(message: str) -> None:
    """Say it once per process; a training that goes on must not drown in the same line."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        print(f"gangline: warning: {message}. Training goes on.", file=sys.stderr, flush=True)  # noqa: T201


def _start_afresh() -> None:
    """A forked child (a data loader worker) is its own process: its numbers start at 1 and the lock is free."""
    global _lock, _num_reported
    _lock = threading.Lock()
    _num_reported = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
