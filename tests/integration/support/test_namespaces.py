"""Hosts in namespaces: each has its own loopback, address and name; a cable can be pulled; nothing stays behind."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.ci import cannot_run
from tests.support.namespaces import Network, network_namespace, what_is_missing
from tests.support.processes import is_alive
from tests.support.wait import wait_until

SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 7070))
print("listening", flush=True)
while True:
    connection, peer = server.accept()
    connection.sendall((socket.gethostname() + " sees " + peer[0]).encode())
    connection.close()
"""


@pytest.fixture
def network() -> Iterator[Network]:
    missing = what_is_missing()
    if missing:
        cannot_run(missing, "run as root with iproute2 and util-linux installed")
    with Network("service", "node-1", "node-2") as network:
        yield network


def serve_on(network: Network, host: str, address: str) -> None:
    process = network.run_in(host, ["python3", "-c", SERVE, address], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n"


def ask(address: str, *, timeout: float = 60.0) -> str:
    with socket.create_connection((address, 7070), timeout=timeout) as client:
        return client.recv(100).decode()


def test_hosts_reach_each_other_by_address_and_have_their_own_names(network: Network) -> None:
    serve_on(network, "node-1", network.address("node-1"))

    with network.inside("node-2"):
        assert ask(network.address("node-1")) == f"node-1 sees {network.address('node-2')}"
    with network.inside("service"):
        assert ask(network.address("node-1")) == f"node-1 sees {network.address('service')}"


def test_the_loopback_of_one_host_is_not_that_of_another(network: Network) -> None:
    serve_on(network, "node-1", "127.0.0.1")

    with network.inside("node-1"):
        assert ask("127.0.0.1") == "node-1 sees 127.0.0.1"
    with network.inside("node-2"), pytest.raises(ConnectionRefusedError):
        ask("127.0.0.1")


def test_host_names_resolve_nowhere(network: Network) -> None:
    resolve = "import socket\ntry: socket.getaddrinfo('node-1', 80)\nexcept socket.gaierror: print('unknown')"

    process = network.run_in("node-1", ["python3", "-c", resolve], stdout=subprocess.PIPE)

    assert process.communicate(timeout=120)[0] == b"unknown\n"


def test_a_pulled_cable_is_silent_and_can_be_plugged_in_again(network: Network) -> None:
    serve_on(network, "node-1", network.address("node-1"))
    network.cut("node-1")
    with network.inside("service"), pytest.raises(OSError):
        ask(network.address("node-1"), timeout=0.3)

    network.heal("node-1")

    def answers() -> bool:
        try:
            return ask(network.address("node-1"), timeout=0.5).startswith("node-1")
        except OSError:
            return False

    with network.inside("service"):
        wait_until(answers, 60, "node-1 answers again")


def test_closing_kills_what_runs_inside_and_this_machine_is_as_before(network: Network) -> None:
    home, interfaces = network_namespace("self"), {name for _, name in socket.if_nameindex()}
    double_forked = "sleep 600 & setsid sleep 600 & echo $!; wait"
    process = network.run_in("node-1", ["sh", "-c", double_forked], stdout=subprocess.PIPE)
    assert process.stdout is not None
    escaped = int(process.stdout.readline())
    keepers = [host.keeper.pid for host in network.hosts.values()]

    network.close()

    assert not any(is_alive(pid) for pid in (process.pid, escaped, *keepers))
    assert network_namespace("self") == home
    assert {name for _, name in socket.if_nameindex()} == interfaces
