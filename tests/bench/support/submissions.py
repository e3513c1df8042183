"""Submissions per second by concurrent clients, what survives `kill -9` of the API, and the bare inserts beside it.

Each client is a process with one keep-alive connection over a raw socket, that sends its next request when the last one
is answered. Not for: how fast jobs start.
"""

from __future__ import annotations

import json
import multiprocessing
import sqlite3
import time
import uuid
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from service.db.session import Database
from tests.bench.support.light_client import LightClient
from tests.support.stack import Stack

FORK = multiprocessing.get_context("fork")
START_SECONDS = 30.0


class Clients:
    """Processes that submit until a deadline or until their connection breaks."""

    def __init__(self, stack: Stack, spec: Mapping[str, Any], num_clients: int, seconds: float) -> None:
        self._barrier = FORK.Barrier(num_clients + 1)
        self._receivers: list[Connection] = []
        self._processes = []
        for _ in range(num_clients):
            receiver, sender = FORK.Pipe(duplex=False)
            process = FORK.Process(
                target=_submit_for, args=(stack.url, stack.token, spec, seconds, self._barrier, sender), daemon=True
            )
            process.start()
            sender.close()
            self._receivers.append(receiver)
            self._processes.append(process)
        self._barrier.wait(START_SECONDS)
        self.began_at = time.perf_counter()

    def join(self) -> tuple[dict[int, str], float]:
        """Name of each job that was answered, by id; and the seconds until the last answer."""
        answered: dict[int, str] = {}
        last_at = self.began_at
        for receiver, process in zip(self._receivers, self._processes, strict=True):
            named, ended_at = receiver.recv()
            answered.update(named)
            last_at = max(last_at, ended_at)
            process.join()
        return answered, last_at - self.began_at


def _submit_for(
    url: str, token: str, spec: Mapping[str, Any], seconds: float, barrier: Barrier, sender: Connection
) -> None:
    answered: dict[int, str] = {}
    with LightClient(url, token) as client:
        prefix = uuid.uuid4().hex
        barrier.wait(START_SECONDS)
        ended_at = time.perf_counter()
        deadline = ended_at + seconds
        while ended_at < deadline:
            name = f"{prefix}-{len(answered)}"
            try:
                job_id = client.submit({**spec, "name": name}, key=name)
            except ConnectionError:
                break  # the server was killed: what was answered until now counts
            answered[job_id] = name
            ended_at = time.perf_counter()
    sender.send((answered, ended_at))


def submissions_per_second(stack: Stack, spec: Mapping[str, Any], num_clients: int, seconds: float) -> float:
    """Answered submissions per second of `num_clients` clients."""
    answered, took = Clients(stack, spec, num_clients, seconds).join()
    return len(answered) / took


def survivors_of_kill(stack: Stack, spec: Mapping[str, Any], num_clients: int, seconds: float) -> int:
    """`kill -9` of the API while clients submit, and a new start: the number of jobs that were answered.

    Raises AssertionError unless each of them is there, under the name that it was given.
    """
    clients = Clients(stack, spec, num_clients, seconds * 10)
    time.sleep(seconds)
    stack.kill9("server")
    answered, _ = clients.join()
    stack.start_server()
    with LightClient(stack.url, stack.token) as client:
        stored = {job["id"]: job["name"] for job in _newest_jobs(client, len(answered) + num_clients)}
    lost = {job_id: name for job_id, name in answered.items() if stored.get(job_id) != name}
    assert answered and not lost, f"{len(lost)} of {len(answered)} answered submissions are lost: {list(lost)[:5]}"
    return len(answered)


def _newest_jobs(client: LightClient, at_least: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    path = "/jobs?limit=200"
    while len(found) < at_least:
        page = client.get_json(path)
        found += page["items"]
        if page["next"] is None:
            break
        path = f"/jobs?limit=200&cursor={page['next']}"
    return found


def bare_inserts_per_second(folder: Path, spec: Mapping[str, Any], seconds: float) -> float:
    """One thread that inserts one row a transaction with `sqlite3` alone, under the pragmas of the product."""
    database = Database(f"sqlite:///{folder / 'bare.db'}")
    pooled = database.engine.raw_connection()
    connection = pooled.driver_connection
    assert isinstance(connection, sqlite3.Connection)
    connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, name TEXT, spec TEXT, submitted_at REAL)")
    text = json.dumps(spec)
    began_at = time.perf_counter()
    num_rows = 0
    while (now := time.perf_counter()) < began_at + seconds:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO rows (name, spec, submitted_at) VALUES (?, ?, ?)", (f"{num_rows}", text, now))
        connection.execute("COMMIT")
        num_rows += 1
    pooled.close()
    database.dispose()
    return num_rows / (now - began_at)
