"""Ranks that stay alive between test cases: importing torch.distributed costs seconds, a case milliseconds.

A case is a module-level function `case(mesh, *arguments)`; it runs on every rank at once, and what it returns (or
raises) comes back by rank. After a case that failed the ranks are started anew, so that none is stuck in a collective.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from tests.support.child import die_with_parent
from tests.support.ports import held_port

if TYPE_CHECKING:
    from trainer.mesh import Mesh

ROOT = Path(__file__).resolve().parents[2]
CASE_SECONDS: Final = 300.0
"""Eight ranks on two busy cores take turns at every collective."""
START_SECONDS: Final = 150.0
"""They import torch for a minute there. It is no time of the first case."""
TEST_SECONDS: Final = 900.0
"""For `pytest.mark.timeout` of tests with ranks: the deadlines here come first. They fail one test, pytest's ends the
whole run."""


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
        self._loaded: set[str] = set()
        """Modules that the ranks have imported."""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def run(self, case: Callable[..., Any], *arguments: Any, seconds: float = CASE_SECONDS) -> list[Any]:
        """What the case returned, by rank. Raises RankFailed. `seconds` are the case's own: starting the ranks and
        importing the case's module come before."""
        # By the file's dotted name, not as a pickled function: pytest may know the file under another one.
        file = Path(str(sys.modules[case.__module__].__file__)).relative_to(ROOT).with_suffix("")
        module = ".".join(file.parts)
        if not self._processes:
            self._start()
        if module not in self._loaded:
            self._call((__name__, load.__name__, (module,)), START_SECONDS)
            self._loaded.add(module)
        return self._call((module, case.__qualname__, arguments), seconds)

    def _call(self, call: tuple[str, str, tuple[Any, ...]], seconds: float) -> list[Any]:
        for connection in self._connections:
            connection.send_bytes(pickle.dumps(call))
        return self._answers(seconds)

    def _answers(self, seconds: float) -> list[Any]:
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
                except (EOFError, ConnectionResetError):
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
        self._loaded.clear()

    def _start(self) -> None:
        with held_port() as port:
            for rank in range(self.world_size):
                ours, theirs = Pipe()
                with theirs:
                    self._processes.append(self._spawn(rank, port, theirs.fileno()))
                self._connections.append(ours)
            self._answers(START_SECONDS)

    def _spawn(self, rank: int, port: int, descriptor: int) -> subprocess.Popen[bytes]:
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
            [sys.executable, "-m", "tests.support.ranks", str(descriptor)],
            env=environment,
            cwd=ROOT,
            pass_fds=(descriptor,),
            preexec_fn=die_with_parent(),
        )


def load(mesh: Mesh, module: str) -> None:
    """The case that comes before all others of a module: it costs seconds of the processor."""
    importlib.import_module(module)


def serve(descriptor: int) -> None:
    """A rank's process: meet the others, say so, and run the cases that come."""
    import torch

    from trainer.mesh import join_mesh

    torch.set_num_threads(1)
    connection: Connection[Any, Any] = Connection(descriptor)
    with connection:
        mesh = join_mesh(os.environ, start_timeout=START_SECONDS, timeout=60.0)
        connection.send_bytes(pickle.dumps((True, None)))
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
    serve(int(sys.argv[1]))
