"""Jobs that prove what they did: each rank writes evidence files of its own, past everything that is under test.

A test never asks the service what a job did when it wants to know whether the service is right: it reads these files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

WRITER = """
import hashlib, os, time
rank, folder = os.environ["RANK"], os.environ["EVIDENCE"]
name = f"a{os.environ['GANGLINE_ATTEMPT_NUMBER']}-r{rank}-p{os.getpid()}"
evidence = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
number = 0

def write(data):
    os.write(evidence, data)
    os.write(1, data)

while not os.path.exists(f"{folder}/release"):
    number += 1
    write(f"{number} {hashlib.sha256(f'{rank}:{number}'.encode()).hexdigest()} \\u00e9\\u6f22\\n".encode())
    time.sleep(0.02)
write(b"last, without an end of line")
os._exit(0)
"""
"""Every rank appends numbered lines with a hash to its log and, byte for byte the same, to its evidence file, until the
test releases it. The last piece has no line end and the process goes at once (O-30)."""

CLOCK = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
number, rank, folder = os.environ["GANGLINE_ATTEMPT_NUMBER"], os.environ["RANK"], os.environ["EVIDENCE"]
evidence = os.open(f"{folder}/clock", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while not os.path.exists(f"{folder}/release"):
    line = f"{number} {rank} {time.monotonic()}\\n".encode()
    os.write(evidence, line)
    os.write(1, line)
    time.sleep(0.02)
"""
"""Every rank appends (attempt, rank, time) to one file for as long as it lives; it is deaf to SIGTERM."""


class Evidence:
    """One folder of evidence; its path goes to the job as the variable EVIDENCE."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def env(self) -> dict[str, str]:
        """For `env:` of the job."""
        return {"EVIDENCE": str(self.folder)}

    def release(self) -> None:
        """Let the ranks of `WRITER` and `CLOCK` come to their end."""
        (self.folder / "release").touch()

    def of_writer(self, attempt: int = 1) -> dict[int, bytes]:
        """What each rank of an attempt wrote. A rank that was started twice is an error: it has two files."""
        found: dict[int, bytes] = {}
        for path in sorted(self.folder.glob(f"a{attempt}-r*")):
            rank = int(path.name.split("-")[1][1:])
            assert rank not in found, f"rank {rank} of attempt {attempt} ran twice: {sorted(self.folder.iterdir())}"
            found[rank] = path.read_bytes()
        return found

    def num_bytes(self) -> int:
        """Size of all evidence: it grows while ranks work."""
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def of_clock(self) -> dict[int, list[float]]:
        """Monotonic times at which any rank of each attempt was alive, by attempt number."""
        times: dict[int, list[float]] = {}
        path = self.folder / "clock"
        for line in path.read_text().splitlines() if path.exists() else []:
            number, _rank, at = line.split()
            times.setdefault(int(number), []).append(float(at))
        return times

    def lines(self, name: str) -> list[str]:
        """Lines of one evidence file; none while it does not exist."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


def check_lines(data: bytes, rank: int) -> int:
    """The number of lines of a `WRITER` log, after checking that they are its own: in order, whole, each once."""
    *lines, last = data.decode().split("\n")
    for number, line in enumerate(lines, start=1):
        digest = hashlib.sha256(f"{rank}:{number}".encode()).hexdigest()
        assert line == f"{number} {digest} \u00e9\u6f22", f"line {number} of rank {rank} is {line!r}"
    assert last == "last, without an end of line", last
    return len(lines)


def assert_log_is_evidence(stored: dict[int, bytes], evidence: dict[int, bytes]) -> None:
    """The stored log of every rank equals its evidence byte for byte; says where they part."""
    assert stored.keys() == evidence.keys()
    for rank, expected in evidence.items():
        if stored[rank] != expected:
            pairs = zip(stored[rank], expected, strict=False)
            same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(stored[rank]), len(expected)))
            raise AssertionError(
                f"the log of rank {rank} parts from its evidence at byte {same}: {len(stored[rank])} and "
                f"{len(expected)} bytes; {stored[rank][same : same + 80]!r} and {expected[same : same + 80]!r}"
            )
        check_lines(stored[rank], rank)


def gang(evidence: Evidence, *, nodes: int = 2, gpus_per_node: int = 2, **members: Any) -> dict[str, Any]:
    """Members of a job spec for a gang that writes evidence."""
    resources = {"nodes": nodes, "gpus_per_node": gpus_per_node}
    return {"resources": resources, "env": evidence.env, "stop_grace": "1s", **members}
