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

_PEER_LOSS: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # gloo: pair.cc and unbound_buffer.cc
        r"gloo.*connection closed by peer",
        r"gloo.*(connection reset by peer|broken pipe|connection refused)",
        r"gloo.*timed out waiting \d+ms for (recv|send) operation",
        r"gloo.*(application timeout caused pair closure|timed out|no route to host)",
        r"connect(ed)?FullMesh failed",
        # NCCL and ProcessGroupNCCL
        r"ncclRemoteError|remote process exited or there was a network error",
        r"ncclSystemError.*(socket|connection|network)",
        r"NCCL.*(timeout|timed out|connection closed by remote peer|communicator was aborted|connection reset)",
        r"watchdog caught collective operation timeout",
        # TCPStore and rendezvous
        r"client socket has timed out after \d+ms",
        r"timed out after \d+ seconds waiting for clients",
        r"(TCPStore|c10d|socket\.cpp|store).*(connection reset|broken pipe|connection closed|wait timeout|timed out)",
        r"recvValue failed|failed to recv, got 0 bytes|sendBytes failed|recvVector failed",
        r"DistStoreError|DistNetworkError(?!.*EADDRINUSE)",
        r"monitoredBarrier.*(timed out|failed)",
    )
)
"""What gloo, NCCL and TCPStore say when the other side is gone. A bare "connection reset" is not here: it is as likely
the user's own download."""

_PORT_TAKEN: Final = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


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
    except ValueError:
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


def is_peer_loss(error: ErrorRecord | None) -> bool:
    """Whether an error reads as the loss of a peer: secondary to any other failure of the gang."""
    if error is None:
        return False
    text = f"{error.type}: {error.message}".replace("\n", " ")
    return any(pattern.search(text) for pattern in _PEER_LOSS) and not _PORT_TAKEN.search(text)


def is_port_taken(error: ErrorRecord | None, port: int) -> bool:
    """Whether rank 0 could not listen on the rendezvous port because something else does."""
    if error is None:
        return False
    text = f"{error.type}: {error.message}"
    return _PORT_TAKEN.search(text) is not None and re.search(rf"(?<!\d){port}(?!\d)", text) is not None


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
