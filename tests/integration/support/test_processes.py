"""What the tests use to see leftovers must itself see a planted process, port, socket and folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.child import die_with_parent, end
from tests.support.processes import (
    Traces,
    all_processes,
    children_of,
    folders_named,
    is_alive,
    listeners,
    processes_marked,
)
from tests.support.wait import wait_until

LISTEN = """
import socket, sys
tcp = socket.create_server(("127.0.0.1", 0))
tcp6 = socket.create_server(("::1", 0), family=socket.AF_INET6)
unix = socket.socket(socket.AF_UNIX); unix.bind(sys.argv[1]); unix.listen()
print(tcp.getsockname()[1], tcp6.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def a_listening_process(marker: str, socket_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], set[str]]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN, str(socket_path)],
        env={**os.environ, "GANGLINE_TEST_MARKER": marker},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent(),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        port, port6 = process.stdout.readline().split()
        yield process, {f"127.0.0.1:{int(port)}", f"[::1]:{int(port6)}", str(socket_path)}
    finally:
        process.stdin.close()
        end(process)
        process.stdout.close()


def test_a_process_is_found_by_its_environment_and_its_sockets_by_the_process(tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    with a_listening_process(marker, tmp_path / "s") as (process, addresses):
        assert [item.pid for item in processes_marked("GANGLINE_TEST_MARKER", marker)] == [process.pid]
        assert {item.address for item in listeners([process.pid])} == addresses
        assert {item.pid for item in listeners() if item.address in addresses} == {process.pid}
        assert process.pid in children_of(os.getpid())

    assert processes_marked("GANGLINE_TEST_MARKER", marker) == []


def test_everything_that_was_left_behind_is_named(tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    before = Traces.take("GANGLINE_TEST_MARKER", marker)
    folder = Path(tempfile.mkdtemp(prefix="gl-left-"))
    try:
        with a_listening_process(marker, tmp_path / "s") as (process, addresses):
            left = Traces.take("GANGLINE_TEST_MARKER", marker).left_since(before)
    finally:
        folder.rmdir()

    assert any(line.startswith(f"process {process.pid}: ") for line in left)
    assert {f"listening: {address}" for address in addresses} <= set(left)
    assert f"folder {folder}" in left
    after = Traces.take("GANGLINE_TEST_MARKER", marker)
    assert not {line for line in after.left_since(before) if str(folder) in line or marker in line}
    assert not after.processes and not after.listeners


def test_folders_that_go_while_one_looks_for_them_hinder_nothing(tmp_path: Path) -> None:
    for parent in "abc":
        (tmp_path / parent / "gangline-1" / "deeper").mkdir(parents=True)

    looking = folders_named("gangline-*", [tmp_path])
    found = next(looking)
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)

    assert found.name == "gangline-1"
    assert list(looking) == []


def test_a_zombie_counts_as_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    try:
        wait_until(lambda: not is_alive(child.pid), 60, "the child ends")

        os.kill(child.pid, 0)  # an unreaped child still answers to this
        assert child.pid not in [item.pid for item in all_processes()]
    finally:
        child.wait()
