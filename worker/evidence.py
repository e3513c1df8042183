"""What a rank left behind that says how it ended: exit code or signal, its error file, the last traceback of its log.

Pure: texts and numbers in, records out. Not for: reading the files (`worker.node_report`) or what follows from a
failure (the service decides the outcome).
"""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any, Final

from gangline.protocol.launch import ErrorRecord
from gangline.protocol.peer_loss import is_peer_loss_text, is_port_taken_text

TAIL_BYTES: Final = 64 * 1024
"""How much of a log's end is looked at."""
MAX_TRACEBACK_BYTES: Final = 16 * 1024
MAX_MESSAGE_BYTES: Final = 4 * 1024
MAX_LINES_AFTER: Final = 80
"""A traceback with more output after it was caught and logged by the program: it is not why the rank ended."""

_HEADER: Final = "Traceback (most recent call last):"
_RANK_PREFIX: Final = re.compile(r"^\[rank\d+\]:(?: |$)")
"""torch.distributed puts it before each line of an uncaught exception."""
_EXCEPTION_LINE: Final = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")

_TERMINATE: Final = re.compile(
    r"terminate called after throwing an instance of '(?P<type>[^']+)'(?:\s+what\(\):\s+(?P<message>[^\n]*))?"
)
_SHARED_MEMORY: Final = re.compile(
    r"\bbus error\b|insufficient shared memory|creating shared memory segment"
    r"|(shared memory object|file </|/dev/shm).*no space left on device|no space left on device.*/dev/shm",
    re.IGNORECASE,
)
"""What torch, multiprocessing and NCCL say when /dev/shm is full."""


def exit_of(status: int) -> tuple[int | None, str | None]:
    """(exit code, None) or (None, signal name) of a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return None, signal.Signals(number).name
        except ValueError:
            return None, f"SIG{number}"  # a real-time signal between SIGRTMIN and SIGRTMAX has no name of its own
    return os.WEXITSTATUS(status), None


def error_of_file(data: bytes) -> ErrorRecord | None:
    """The error in a TORCHELASTIC_ERROR_FILE as torch's `@record` writes it; None when it holds none that is known.

    Either {"message": {"message": "ValueError: …", "extraInfo": {"py_callstack": "…"}}} or a plain string there.
    """
    try:
        outer: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    inner = outer.get("message") if isinstance(outer, dict) else None
    if isinstance(inner, str) and inner:
        kind, message = _split_message(inner)
        return ErrorRecord(type=kind, message=_cut_end(message, MAX_MESSAGE_BYTES), traceback="")
    if not isinstance(inner, dict) or not isinstance(inner.get("message"), str):
        return None
    extra = inner.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    kind, message = _split_message(inner["message"])
    return ErrorRecord(
        type=kind,
        message=_cut_end(message, MAX_MESSAGE_BYTES),
        traceback=_keep_end(stack if isinstance(stack, str) else "", MAX_TRACEBACK_BYTES),
    )


def error_of_log(tail: bytes) -> ErrorRecord | None:
    """The last Python traceback near the end of a log (its last `TAIL_BYTES`); None when there is none."""
    lines = [_plain(line) for line in tail.decode("utf-8", "replace").split("\n")]
    for end in range(len(lines) - 1, max(0, len(lines) - 1 - MAX_LINES_AFTER), -1):
        match = _EXCEPTION_LINE.match(lines[end])
        start = _start_of_frames(lines, end) if match is not None else None
        if match is None or start is None:
            continue
        message = "\n".join((match["message"] or "", *_message_rest(lines[end + 1 :])))
        return ErrorRecord(
            type=match["type"].rpartition(".")[2],
            message=_cut_end(message.strip(), MAX_MESSAGE_BYTES),
            traceback=_keep_end("\n".join(lines[start : end + 1]), MAX_TRACEBACK_BYTES),
        )
    return None


def error_of_abort(tail: bytes) -> ErrorRecord | None:
    """What C++ said of itself when it ended a process by SIGABRT, in the end of a log; None when it did not."""
    found = list(_TERMINATE.finditer(tail.decode("utf-8", "replace")))
    if not found:
        return None
    match = found[-1]
    kind = match["type"].rpartition("::")[2]
    message = (match["message"] or "").strip()
    if kind == "bad_alloc":
        return ErrorRecord(type="MemoryError", message=f"C++ could not allocate memory: {message}", traceback="")
    return ErrorRecord(type=kind, message=_cut_end(f"{match['type']}: {message}", MAX_MESSAGE_BYTES), traceback="")


def is_shared_memory_exhausted(error: ErrorRecord | None, signal_name: str | None) -> bool:
    """Whether a rank, or one of its data loaders, reads as having run out of shared memory."""
    if signal_name == "SIGBUS":
        return True
    return error is not None and _SHARED_MEMORY.search(f"{error.type}: {error.message}".replace("\n", " ")) is not None


def with_shared_memory_hint(error: ErrorRecord | None, size_bytes: int) -> ErrorRecord:
    """The error of a rank that ran out of shared memory, with the size and what helps."""
    hint = (
        f"The most likely reason is that shared memory (/dev/shm, {_size(size_bytes)} on this node) was full. "
        "Fix: make it larger (--shm-size of a container), or use fewer data loader workers or smaller batches."
    )
    if error is None:
        return ErrorRecord(type="BusError", message=hint, traceback="")
    return ErrorRecord(
        type=error.type,
        message=f"{_cut_end(error.message, MAX_MESSAGE_BYTES - len(hint) - 1)}\n{hint}",
        traceback=error.traceback,
    )


def is_peer_loss(error: ErrorRecord | None) -> bool:
    """Whether an error reads as the loss of a peer: secondary to any other failure of the gang."""
    if error is None:
        return False
    return is_peer_loss_text(f"{error.type}: {error.message}")


def is_port_taken(error: ErrorRecord | None, port: int) -> bool:
    """Whether rank 0 could not listen on the rendezvous port because something else does."""
    if error is None:
        return False
    text = f"{error.type}: {error.message}"
    return is_port_taken_text(text) and re.search(rf"(?<!\d){port}(?!\d)", text) is not None


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 30} GiB" if num_bytes >= 10 << 30 else f"{num_bytes >> 20} MiB"


def _plain(line: str) -> str:
    """A line without torch's rank prefix and without a carriage return."""
    return _RANK_PREFIX.sub("", line.rstrip("\r"))


def _start_of_frames(lines: list[str], end: int) -> int | None:
    """Where the indented lines above an exception begin, their header included; None when they name no file.

    The header may share its line with a progress bar, may lie before the tail, and a syntax error of the script itself
    has none.
    """
    start = end
    has_file = False
    while start > 0 and lines[start - 1].startswith(" "):
        start -= 1
        has_file = has_file or lines[start].startswith('  File "')
    if not has_file:
        return None
    return start - 1 if start > 0 and lines[start - 1].endswith(_HEADER) else start


def _message_rest(lines: list[str]) -> list[str]:
    """Further lines of a message: up to an empty one, where other output begins at the latest."""
    rest: list[str] = []
    for line in lines[:20]:
        if not line.strip():
            break
        rest.append(line)
    return rest


def _split_message(text: str) -> tuple[str, str]:
    """`ValueError: boom` as (`ValueError`, `boom`); a text that does not begin with a class name is all message."""
    first, _, rest = text.partition("\n")
    match = _EXCEPTION_LINE.match(first)
    if match is None or (match["message"] is None and not match["type"][:1].isupper()):
        return "Error", text
    message = match["message"] or ""
    return match["type"].rpartition(".")[2], f"{message}\n{rest}" if rest else message


def _keep_end(text: str, max_bytes: int) -> str:
    data = text.encode("utf-8", "replace")
    return text if len(data) <= max_bytes else data[-max_bytes:].decode("utf-8", "ignore")


def _cut_end(text: str, max_bytes: int) -> str:
    data = text.encode("utf-8", "replace")
    return text if len(data) <= max_bytes else data[:max_bytes].decode("utf-8", "ignore")
