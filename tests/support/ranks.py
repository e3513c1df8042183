"""Ranks that stay alive between test cases: importing torch.distributed costs seconds, a case milliseconds.

A case is a module-level function `case(mesh, *arguments)`; it runs on every rank at once, and what it returns (or
raises) comes back by rank. After a case that failed the ranks are started anew, so that none is stuck in a collective.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.child import die_with_parent
from tests.support.postgres import free_port

ROOT = Path(__file__).resolve().parents[2]
CASE_SECONDS = 120.0
START_SECONDS = 60.0


class RankFailed(AssertionError):
    """A case raised on some rank; the message holds each rank's traceback."""

    def __init__(self, errors: dict[int, tuple[str, str]]) -> None:
        self.types = {rank: kind for rank, (kind, _) in errors.items()}
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, (_, text) in sorted(errors.items())))


class Ranks:
    """`world_size` ranks over gloo on loopback, started at the first case. A context manager."""

    def __init__(self, world_size: int, *, ranks_per_node: int | None = None) -> None:
        self.world_size = world_size
        self.ranks_per_node = ranks_per_node or world_size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection[Any, Any]] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def run(self, case: Callable[..., Any], *arguments: Any, seconds: float = CASE_SECONDS) -> list[Any]:
        """What the case returned, by rank. Raises RankFailed."""
        if not self._processes:
            self._start()
        # By the file's dotted name, not as a pickled function: pytest may know the file under another one.
        file = Path(str(sys.modules[case.__module__].__file__)).relative_to(ROOT).with_suffix("")
        call = (".".join(file.parts), case.__qualname__, arguments)
        for connection in self._connections:
            connection.send_bytes(pickle.dumps(call))
        answers: dict[int, tuple[bool, Any]] = {}
        left: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        while left:
            ready: list[Any] = wait(list(left), timeout=seconds)
            if not ready:
                self.stop()
                raise AssertionError(f"ranks {sorted(left.values())} did not finish within {seconds:g} s")
            for connection in ready:
                rank = left.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    answers[rank] = (False, ("died", f"rank {rank} ended"))
        errors = {rank: answer for rank, (is_fine, answer) in answers.items() if not is_fine}
        if errors:
            self.stop()
            raise RankFailed(errors)
        return [answers[rank][1] for rank in range(self.world_size)]

    def stop(self) -> None:
        """End the ranks."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        port = free_port()
        with tempfile.TemporaryDirectory(prefix="gl-ranks-") as folder:
            address = str(Path(folder) / "socket")
            with Listener(address, family="AF_UNIX", backlog=self.world_size) as listener:
                for rank in range(self.world_size):
                    self._processes.append(self._spawn(rank, port, address))
                by_rank: dict[int, Connection[Any, Any]] = {}
                for _ in range(self.world_size):
                    connection = listener.accept()
                    by_rank[connection.recv()] = connection
        self._connections = [by_rank[rank] for rank in range(self.world_size)]

    def _spawn(self, rank: int, port: int, address: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.ranks_per_node),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(rank // self.ranks_per_node),
            "GROUP_WORLD_SIZE": str(self.world_size // self.ranks_per_node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks", address],
            env=environment,
            cwd=ROOT,
            preexec_fn=die_with_parent(),
        )


def serve(address: str) -> None:
    """A rank's process: run the cases that come."""
    import importlib
    from multiprocessing.connection import Client

    import torch

    from trainer.mesh import join_mesh

    torch.set_num_threads(1)
    with Client(address, family="AF_UNIX") as connection:
        connection.send(int(os.environ["RANK"]))
        mesh = join_mesh(os.environ, start_timeout=START_SECONDS, timeout=60.0)
        while True:
            try:
                module, name, arguments = pickle.loads(connection.recv_bytes())
            except EOFError:
                os._exit(0)
            try:
                answer = (True, getattr(importlib.import_module(module), name)(mesh, *arguments))
            except BaseException as error:  # noqa: BLE001  # it goes to the test
                answer = (False, (type(error).__name__, traceback.format_exc()))
            connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    serve(sys.argv[1])
