"""How long things take on a real stack: submit to first instruction, many short jobs, a page of jobs, a line of log.

Not for: submissions in bulk (`submissions`), CPU (`cpu`).
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from tests.bench.support.light_client import LightClient
from tests.support.stack import PYTHON, Stack
from tests.support.wait import wait_until

ONE_SLOT = {"gpus_per_node": 1, "nodes": 1}
NANOSECONDS = 1e9
OPEN_STATES = "waiting,starting,running,stopping"

LINES_SOURCE = """
import random, sys, time
for number in range(int(sys.argv[1])):
    print(time.time_ns(), flush=True)
    time.sleep(random.uniform(0.03, 0.07))
"""
"""Lines about every 50 ms, at no fixed rhythm: a poll of the same length must neither profit nor lose by it."""


def start_seconds(stack: Stack, num_runs: int, chance: random.Random) -> list[float]:
    """From before the request to the first instruction of the rank process: `date`, that writes its own clock."""
    took = []
    with LightClient(stack.url, stack.token) as client:
        for _ in range(num_runs):
            time.sleep(chance.uniform(0.05, 0.25))  # at no fixed distance from heartbeats and polls
            began_at = time.time_ns()
            job_id = client.submit(
                {"name": "start", "run": {"command": ["date", "+%s%N"]}, "resources": ONE_SLOT},
                key=f"start-{began_at}",
            )
            assert stack.wait_end(job_id)["state"] == "succeeded", stack.describe(job_id)
            took.append((int(stack.log_text(job_id)) - began_at) / NANOSECONDS)
            wait_until(lambda: is_idle(client), 10, "the pool is not idle")
    return took


def is_idle(client: LightClient) -> bool:
    """Whether no GPU is held."""
    return not any(gpu["held"] for node in client.get_json("/nodes")["items"] for gpu in node["gpus"])


def true_jobs_per_second(stack: Stack, num_jobs: int) -> float:
    """Jobs of `true` per second, from the first submission to the last end."""
    with LightClient(stack.url, stack.token) as client:
        began_at = time.time()
        job_ids = [
            client.submit({"name": "true", "run": {"command": ["true"]}, "resources": ONE_SLOT}, key=f"true-{n}")
            for n in range(num_jobs)
        ]
        path = f"/jobs?name=true&state={OPEN_STATES}&limit=1"
        wait_until(lambda: _rested(0.1) and not client.get_json(path)["items"], 120, "not all jobs of `true` ended")
        jobs = [client.get_json(f"/jobs/{job_id}") for job_id in job_ids]
    assert all(job["state"] == "succeeded" for job in jobs), [job["cause"] for job in jobs if job["cause"]][:2]
    return num_jobs / (max(_epoch(job["ended_at"]) for job in jobs) - began_at)


def _rested(seconds: float) -> bool:
    """A wait between two questions, so that asking does not slow what is measured."""
    time.sleep(seconds)
    return True


def _epoch(rfc3339: str) -> float:
    return datetime.fromisoformat(rfc3339).timestamp()


def fill_jobs(stack: Stack, spec: dict[str, Any], num_jobs: int) -> None:
    """Submit jobs until the pool has `num_jobs`; ids are counted from 1 and jobs are never deleted."""
    with LightClient(stack.url, stack.token) as client:
        while client.submit(spec) < num_jobs:
            pass


def list_seconds(stack: Stack, num_requests: int) -> list[float]:
    """Pages of 50 jobs: every second request the newest, the others page by page through the pool."""
    took = []
    following = ""
    with LightClient(stack.url, stack.token) as client:
        for number in range(num_requests):
            path = f"/jobs?limit=50&cursor={following}" if number % 2 and following else "/jobs?limit=50"
            began_at = time.perf_counter()
            status, body = client.request("GET", path)
            took.append(time.perf_counter() - began_at)
            page = json.loads(body)
            assert status == 200 and len(page["items"]) == 50, (status, body[:300])
            if number % 2 or not following:
                following = page["next"]
    return took


def log_seconds(stack: Stack, num_lines: int) -> list[float]:
    """From the clock that a rank writes as a line, unbuffered, to the arrival of that line at a following client."""
    with LightClient(stack.url, stack.token) as client:
        command = [PYTHON, "-u", "-c", LINES_SOURCE, str(num_lines)]
        job_id = client.submit({"name": "lines", "run": {"command": command}, "resources": ONE_SLOT})
    stack.wait_state(job_id, "running")
    took = []
    rest = ""
    for text, arrived_at in _followed_text(stack, job_id):
        *lines, rest = (rest + text).split("\n")
        took += [(arrived_at - int(line)) / NANOSECONDS for line in lines]
    assert len(took) == num_lines, f"{len(took)} of {num_lines} lines came"
    return took


def _followed_text(stack: Stack, job_id: int) -> Iterator[tuple[str, int]]:
    """Text of each `log` event, and when it came (epoch nanoseconds), until the stream ends."""
    parts = urlsplit(stack.url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    connection.request("GET", f"/api/v1/jobs/{job_id}/logs/stream", headers={"Authorization": f"Bearer {stack.token}"})
    response = connection.getresponse()
    kind = ""
    while line := response.readline():
        arrived_at = time.time_ns()
        if line.startswith(b"event: "):
            kind = line[len(b"event: ") :].decode().strip()
        elif line.startswith(b"data: ") and kind == "log":
            yield json.loads(line[len(b"data: ") :])["text"], arrived_at
    connection.close()
