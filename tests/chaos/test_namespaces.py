"""Nodes that are hosts of their own: own loopback, own address, host names that resolve nowhere (O-35).

On one loopback a gang forms its group by whatever name it likes; here only the registered addresses work.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ci import cannot_run
from tests.support.evidence import WRITER, Evidence, assert_log_is_evidence, gang
from tests.support.namespaces import Network, what_is_missing
from tests.support.stack import PYTHON, TEST_SECONDS, Stack
from tests.support.wait import wait_until

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ddp_script" / "train.py"
START_SECONDS = 30.0
"""A node is given up as out of reach after half of it; the rest is for a busy machine."""
ANSWER_SECONDS = 1.0
"""What the API itself may need to tell."""
SETTINGS = {"START_SECONDS": str(START_SECONDS), "CLAIM_SECONDS": str(START_SECONDS - 1)}
NOTICING = {"UNREACHABLE_SECONDS": "2"}
LOSING = {**NOTICING, "LOST_SECONDS": "8"}
"""Of the test that waits for a node to be unreachable, and lost."""
pytestmark = pytest.mark.timeout(TEST_SECONDS)


@pytest.fixture
def network() -> Iterator[Network]:
    """Three hosts: one for the service, two for nodes."""
    missing = what_is_missing()
    if missing:
        cannot_run(missing, "run as root with iproute2 and util-linux installed")
    with Network("service", "node-1", "node-2") as network:
        yield network


@pytest.fixture
def pool(network: Network) -> Iterator[Stack]:
    """A pool over these hosts."""
    with Stack(network=network, settings=SETTINGS) as stack:
        yield stack


def ip(network: Network, host: str, *words: str) -> None:
    """Run `ip` inside a host."""
    subprocess.run(network.hosts[host].enter(["ip", *words]), check=True)


def lose_packets_between(network: Network) -> None:
    """What one node sends to the other goes to a network card that nobody has: no answer, no error, as with a firewall
    that drops. Both still reach the service."""
    for host, other in (("node-1", "node-2"), ("node-2", "node-1")):
        neighbour = (network.address(other), "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        ip(network, host, "neigh", "replace", *neighbour)


def find_packets_again(network: Network) -> None:
    """Undo `lose_packets_between`."""
    for host, other in (("node-1", "node-2"), ("node-2", "node-1")):
        ip(network, host, "neigh", "del", network.address(other), "dev", "eth0")


def test_o35_a_gang_trains_across_hosts_whose_names_do_not_resolve(pool: Stack, network: Network) -> None:
    for name in pool.node_names:
        with pytest.raises(OSError):
            socket.getaddrinfo(name, None)
        assert pool.node(name)["address"] == network.address(name)
    code = pool.code("")
    shutil.copy(EXAMPLE, code / "train.py")

    job_id = pool.submit(
        code={"path": str(code)},
        python=PYTHON,
        run={"script": "train.py", "args": ["--steps", "6", "--validate-every", "3", "--batch-size", "8"]},
        resources={"nodes": 2, "gpus_per_node": 1},
    )
    job = pool.wait_end(job_id, timeout=600)

    assert (job["state"], job["attempts"]) == ("succeeded", 1), pool.describe(job_id)
    assert {rank["node"] for rank in job["cause"]["ranks"]} == set(pool.node_names)
    log = pool.log_text(job_id, 0)
    assert "2 ranks on cpu" in log and "done: val_loss" in log
    assert job["progress"]["step"] == 6


@pytest.mark.parametrize(
    "is_told", [pytest.param(False, id="silence"), pytest.param(True, id="no_route", marks=pytest.mark.full)]
)
def test_o35_a_peer_out_of_reach_ends_the_start_with_a_sentence_that_names_the_addresses(
    pool: Stack, network: Network, is_told: bool
) -> None:
    if is_told:
        ip(network, "node-2", "route", "add", "unreachable", f"{network.address('node-1')}/32")
        ip(network, "node-1", "route", "add", "unreachable", f"{network.address('node-2')}/32")
    else:
        lose_packets_between(network)
    job_id = pool.python_job("import time\ntime.sleep(600)\n", resources={"nodes": 2, "gpus_per_node": 1})

    job = wait_until(
        lambda: (job := pool.job(job_id))["cause"] and job,
        START_SECONDS + ANSWER_SECONDS,
        lambda: f"the start is not given up: {pool.describe(job_id)}",
    )

    assert job["cause"]["outcome"] == "launch_failed"
    ends = [(a, b) for a, b in (("node-1", "node-2"), ("node-2", "node-1")) if f"ode {a} " in job["cause"]["sentence"]]
    assert len(ends) == 1, job["cause"]["sentence"]
    here, there = ends[0]
    assert f"({network.address(here)}) cannot reach rank 0 at {network.address(there)}:" in job["cause"]["sentence"]
    assert "gang node ls" in job["cause"]["fix"]
    pool.cancel(job_id)
    assert pool.wait_end(job_id)["state"] == "cancelled"


@pytest.mark.full
def test_o35_a_peer_that_is_reached_late_costs_nothing_but_time(pool: Stack, network: Network) -> None:
    lose_packets_between(network)
    job_id = pool.python_job("print('together')", resources={"nodes": 2, "gpus_per_node": 1})
    wait_until(lambda: any("peer_unreachable" in text for text in supervisor_logs(pool)), 60, "nobody tried yet")

    find_packets_again(network)

    job = pool.wait_end(job_id)
    assert (job["state"], job["attempts"]) == ("succeeded", 1)


def supervisor_logs(pool: Stack) -> list[str]:
    """What the supervisors of all nodes have logged so far."""
    return [path.read_text() for path in pool.folder.glob("nodes/*/attempts/*/supervisor.log")]


@pytest.mark.parametrize(
    "is_healed_early", [pytest.param(True, id="unreachable", marks=pytest.mark.full), pytest.param(False, id="lost")]
)
def test_o15_a_cable_that_is_pulled_and_plugged_in_again(
    network: Network, tmp_path: Path, is_healed_early: bool
) -> None:
    """Packets vanish and connections stay open, silent: neither side is told. The ranks need no network here."""
    with Stack(network=network, settings=NOTICING if is_healed_early else LOSING) as pool:
        pull_and_plug_in_again(pool, network, Evidence(tmp_path / "evidence"), is_healed_early=is_healed_early)


def pull_and_plug_in_again(pool: Stack, network: Network, evidence: Evidence, *, is_healed_early: bool) -> None:
    """The cable of the node on which a job runs."""
    members: dict[str, Any] = gang(evidence, nodes=1)
    job_id = pool.python_job(WRITER, **members)
    job = pool.wait_state(job_id, "running")
    pool.wait_log(job_id, "\n")
    (node,) = [node["name"] for node in job["attempt"]["nodes"]]

    network.cut(node)
    pool.wait_node(node, "unreachable" if is_healed_early else "lost")
    network.heal(node)
    pool.wait_node(node, "ready")

    attempts = 1 if is_healed_early else 2
    wait_until(lambda: pool.job(job_id)["state"] == "running", 120, lambda: pool.describe(job_id))
    wait_until(lambda: len(evidence.of_writer(attempts)) == 2, 120, lambda: pool.describe(job_id))
    evidence.release()
    ended = pool.wait_end(job_id)
    assert (ended["state"], ended["attempts"]) == ("succeeded", attempts), pool.describe(job_id)
    assert_log_is_evidence({rank: pool.log_bytes(job_id, rank) for rank in (0, 1)}, evidence.of_writer(attempts))
