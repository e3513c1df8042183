"""What a rank left behind: exit codes, error files, tracebacks, and what reads as the loss of a peer."""

from __future__ import annotations

import json

import pytest

from gangline.protocol.launch import ErrorRecord
from worker.evidence import (
    MAX_TRACEBACK_BYTES,
    error_of_abort,
    error_of_file,
    error_of_log,
    exit_of,
    is_peer_loss,
    is_port_taken,
    is_shared_memory_exhausted,
    with_shared_memory_hint,
)

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    f()\n'


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0, (0, None)),
        (1 << 8, (1, None)),
        (255 << 8, (255, None)),
        (9, (None, "SIGKILL")),
        (11 | 0x80, (None, "SIGSEGV")),
        (40, (None, "SIG40")),
    ],
)
def test_a_wait_status_is_an_exit_code_or_a_named_signal(status: int, expected: tuple[int | None, str | None]) -> None:
    assert exit_of(status) == expected


LOGS = {
    "plain": (TRACEBACK + "ValueError: bad lr\n", ("ValueError", "bad lr")),
    "without a message": (TRACEBACK + "KeyboardInterrupt\n", ("KeyboardInterrupt", "")),
    "a class in a module": (
        TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory.\n",
        ("OutOfMemoryError", "CUDA out of memory."),
    ),
    "the last of a chain": (
        TRACEBACK
        + "KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n"
        + TRACEBACK
        + "RuntimeError: second\n",
        ("RuntimeError", "second"),
    ),
    "with torch's rank prefix": (
        "".join(f"[rank1]: {line}\n" for line in (TRACEBACK + "ValueError: boom").split("\n")),
        ("ValueError", "boom"),
    ),
    "a message of several lines": (TRACEBACK + "RuntimeError: a\nb\n\nother output\n", ("RuntimeError", "a\nb")),
    "without a newline at the end": (TRACEBACK + "ValueError: x", ("ValueError", "x")),
    "with carriage returns": (TRACEBACK.replace("\n", "\r\n") + "ValueError: x\r\n", ("ValueError", "x")),
    "a script that does not parse": (
        '  File "train.py", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n',
        ("SyntaxError", "invalid syntax"),
    ),
    "an import that does not parse": (
        TRACEBACK + '  File "lib.py", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n',
        ("SyntaxError", "invalid syntax"),
    ),
    "after a progress bar": ("\r 50%|#####     | 5/10" + TRACEBACK + "ValueError: x\n", ("ValueError", "x")),
    "its header before the tail": ('  File "train.py", line 3, in f\n    f()\nValueError: x\n', ("ValueError", "x")),
    "a loader worker's inside the message": (
        TRACEBACK + "ValueError: Caught ValueError in worker 0.\nOriginal " + TRACEBACK + "ValueError: inner\n",
        ("ValueError", "inner"),
    ),
    "an indented text that is no traceback": ("Options:\n  --lr\nUsage: see above\n", None),
    "none": ("epoch 1\nloss: 2.3\n", None),
    "cut before its end": (TRACEBACK, None),
    "logged long before": (TRACEBACK + "ValueError: x\n" + "epoch\n" * 100, None),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_last_traceback_of_a_log(name: str) -> None:
    text, expected = LOGS[name]
    error = error_of_log(text.encode())

    assert (None if error is None else (error.type, error.message)) == expected


def test_a_tail_that_begins_inside_a_character_is_read_all_the_same() -> None:
    error = error_of_log("é".encode()[1:] + TRACEBACK.encode() + "ValueError: 漢\n".encode())

    assert error is not None
    assert error.message == "漢"


def test_of_a_long_traceback_the_end_is_kept() -> None:
    frames = "".join(f'  File "x.py", line {n}, in f\n    f()\n' for n in range(5000))
    error = error_of_log((TRACEBACK + frames + "RecursionError: too deep\n").encode())

    assert error is not None
    assert len(error.traceback) <= MAX_TRACEBACK_BYTES
    assert error.traceback.endswith("RecursionError: too deep")


def test_an_error_file_of_torch() -> None:
    extra = {"py_callstack": "stack", "timestamp": "1"}
    data = json.dumps({"message": {"message": "ValueError: a\nb", "extraInfo": extra}}).encode()

    assert error_of_file(data) == ErrorRecord(type="ValueError", message="a\nb", traceback="stack")


def test_an_error_file_with_a_plain_string() -> None:
    assert error_of_file(b'{"message": "it broke"}') == ErrorRecord(type="Error", message="it broke", traceback="")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"{}", b'{"message": {}}', b'{"message": 3}', b"\xff", b"[" * 60_000]
)
def test_an_error_file_that_is_none_says_nothing(data: bytes) -> None:
    assert error_of_file(data) is None


PEER_LOSS = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:129",
    "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:61148: Connection reset by peer. This is",
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete",
    "DistNetworkError: The client socket has timed out after 5000ms while trying to connect to (127.0.0.1, 29612).",
    "DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
    "DistBackendError: NCCL error: remote process exited or there was a network error, NCCL version 2.21.5",
    "DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
    "RuntimeError: Connection reset by peer [c10d/TCPStore.cpp] TCPStore: Broken pipe",
)
NO_PEER_LOSS = (
    "RuntimeError: feature store request timed out",
    "RuntimeError: could not restore session: connection reset by peer",
    "RuntimeError: object store: Broken pipe",
    "ValueError: boom",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "TimeoutError: timed out waiting for the download",
    "OutOfMemoryError: CUDA out of memory.",
    "DistNetworkError: The server socket has failed to listen on any local network address. port: 1, name: EADDRINUSE",
)


def record(text: str) -> ErrorRecord:
    kind, _, message = text.partition(": ")
    return ErrorRecord(type=kind, message=message, traceback="")


@pytest.mark.parametrize("text", PEER_LOSS)
def test_the_loss_of_a_peer_is_recognised(text: str) -> None:
    assert is_peer_loss(record(text))


@pytest.mark.parametrize("text", NO_PEER_LOSS)
def test_an_error_of_its_own_is_no_loss_of_a_peer(text: str) -> None:
    assert not is_peer_loss(record(text))


C_PLUS_PLUS = "terminate called after throwing an instance of '{}'\n  what():  {}\n"


def test_the_last_word_of_cpp_is_the_error_of_an_aborted_rank() -> None:
    gone = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
    log = C_PLUS_PLUS.format("std::bad_alloc", "std::bad_alloc") + C_PLUS_PLUS.format("gloo::IoException", gone)

    error = error_of_abort(log.encode())
    assert error == ErrorRecord(type="IoException", message=f"gloo::IoException: {gone}", traceback="")
    assert is_peer_loss(error)
    assert error_of_abort(b"terminate called without an active exception\n") is None


def test_memory_that_cpp_could_not_have_reads_as_pythons_memory_error() -> None:
    error = error_of_abort(C_PLUS_PLUS.format("std::bad_alloc", "std::bad_alloc").encode())

    assert error is not None and error.type == "MemoryError"


SHARED_MEMORY = (
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers",
    "RuntimeError: unable to write to file </torch_7_1_0>: No space left on device (28)",
    "RuntimeError: unable to open shared memory object </torch_7_1> in read-write mode: No space left on device (28)",
    "DistBackendError: Error while creating shared memory segment /dev/shm/nccl-ab (size 9637888)",
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
)
NO_SHARED_MEMORY = (
    "OSError: [Errno 28] No space left on device: '/data/x'",
    "RuntimeError: unable to open shared memory object </torch_7_1> in read-write mode: Too many open files (24)",
    "FileNotFoundError: [Errno 2] No such file or directory: '/dev/shm/mine'",
    "ValueError: the syllabus error",
)


@pytest.mark.parametrize("text", SHARED_MEMORY)
def test_o12_an_error_for_want_of_shared_memory_is_recognised(text: str) -> None:
    assert is_shared_memory_exhausted(record(text), None)


@pytest.mark.parametrize("text", NO_SHARED_MEMORY)
def test_o12_other_errors_say_nothing_of_shared_memory(text: str) -> None:
    assert not is_shared_memory_exhausted(record(text), None)
    assert not is_shared_memory_exhausted(None, "SIGSEGV")


def test_o12_the_hint_names_shared_memory_and_its_size_and_keeps_the_error() -> None:
    error = with_shared_memory_hint(ErrorRecord(type="RuntimeError", message="x" * 10_000, traceback="t"), 64 << 20)

    assert (error.type, error.traceback, error.message[:3]) == ("RuntimeError", "t", "xxx")
    assert "/dev/shm, 64 MiB on this node" in error.message
    assert len(error.message) <= 4096


def test_o34_only_the_rendezvous_port_that_is_taken_is_a_launch_failure() -> None:
    taken = record("DistNetworkError: The server socket has failed to listen. port: 29613, name: EADDRINUSE")

    assert is_port_taken(taken, 29613)
    assert not is_port_taken(taken, 2961)
    assert not is_port_taken(record("OSError: [Errno 98] Address already in use"), 29613)
