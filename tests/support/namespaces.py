"""Several hosts on one machine: network namespaces on one bridge, each with an address and a host name of its own.

Two "nodes" on one loopback hide address bugs: here `127.0.0.1` of one host is not the other's, and the host names
resolve nowhere, as on many clusters. Everything happens inside namespaces that we make, so this machine's own network
stays untouched and the kernel removes it all with the last process. Needs root and `ip` (Debian: iproute2);
`unshare` and `nsenter` come with util-linux, which every Debian has.

Not for: the file system. All hosts share it, so unix sockets and data folders can be reached from all of them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.child import end
from tests.support.wait import wait_until

SUBNET = "10.77.0"
CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def what_is_missing() -> str | None:
    """Why namespaces cannot be made here, as a sentence, or None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"the program `{program}` is missing"
    probe = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True, check=False)
    return None if probe.returncode == 0 else f"`unshare --net` fails here: {probe.stderr.strip()}"


class Host:
    """One namespace pair (network and host name), kept alive by a process that waits on our pipe."""

    def __init__(self, name: str, address: str) -> None:
        """`name` becomes the host name inside. `address` is where peers reach this host."""
        self.name = name
        self.address = address
        # `cat` ends when the pipe closes, also when this test run is killed: then the kernel removes the namespaces.
        script = 'echo "$0" > /proc/sys/kernel/hostname && ip link set lo up && echo ready && exec cat'
        self.keeper = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", script, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.keeper.stdout is not None
        if self.keeper.stdout.readline() != b"ready\n":
            raise RuntimeError(f"cannot make the namespaces of host {name}: exit status {self.keeper.wait()}")
        self.identity = network_namespace(self.keeper.pid)

    def enter(self, argv: Sequence[str]) -> list[str]:
        """`argv` as a command line that runs inside this host."""
        return ["nsenter", "--target", str(self.keeper.pid), "--net", "--uts", "--", *argv]

    def is_empty(self) -> bool:
        """Whether nothing but the keeper runs inside."""
        return not self.processes()

    def processes(self) -> list[int]:
        """Live processes inside, the keeper not counted."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if pid != self.keeper.pid and network_namespace(pid) == self.identity]


class Network:
    """Hosts that reach each other by address. Use as a context manager; leaving it kills all processes inside."""

    def __init__(self, *names: str) -> None:
        """The first name is .1 and carries the bridge; the others follow as .2, .3, …"""
        self.hosts: dict[str, Host] = {}
        self._hub, *self._others = names
        self._popens: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, name: str) -> str:
        """The address at which the peers of host `name` reach it."""
        return self.hosts[name].address

    def run_in(self, name: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start `argv` in host `name`; `options` go to Popen. What still runs is killed by `close()`."""
        process = subprocess.Popen(self.hosts[name].enter(argv), **options)
        self._popens.append(process)
        return process

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Sockets that this thread opens meanwhile live in host `name`: for a client that must reach a server there."""
        with open("/proc/thread-self/ns/net") as home, open(f"/proc/{self.hosts[name].keeper.pid}/ns/net") as there:
            _set_namespace(there.fileno())
            try:
                yield
            finally:
                _set_namespace(home.fileno())

    def cut(self, name: str) -> None:
        """Pull the cable of a host (not the hub's): packets vanish, connections stay open and silent."""
        self._ip(self.hosts[self._hub], "link", "set", self._port(name), "down")

    def heal(self, name: str) -> None:
        """Plug the cable back in."""
        self._ip(self.hosts[self._hub], "link", "set", self._port(name), "up")

    def close(self) -> None:
        """Kill whatever runs inside and end the namespaces. Calling it again does nothing."""
        for host in self.hosts.values():
            for pid in host.processes():
                _kill(pid)
        for process in self._popens:
            process.wait()
        for host in self.hosts.values():
            wait_until(host.is_empty, 60, f"processes in host {host.name} survive SIGKILL")
            assert host.keeper.stdin is not None and host.keeper.stdout is not None
            host.keeper.stdin.close()
            end(host.keeper)
            host.keeper.stdout.close()
        self.hosts.clear()
        self._popens.clear()

    def _build(self) -> None:
        for number, name in enumerate((self._hub, *self._others), start=1):
            self.hosts[name] = Host(name, f"{SUBNET}.{number}")
        hub = self.hosts[self._hub]
        self._ip(hub, "link", "add", "bridge0", "type", "bridge")
        self._ip(hub, "address", "add", f"{hub.address}/24", "dev", "bridge0")
        self._ip(hub, "link", "set", "bridge0", "up")
        for name in self._others:
            host, port = self.hosts[name], self._port(name)
            pair = ("type", "veth", "peer", "name", "eth0", "netns", str(host.keeper.pid))
            self._ip(hub, "link", "add", port, *pair)
            self._ip(hub, "link", "set", port, "master", "bridge0", "up")
            self._ip(host, "address", "add", f"{host.address}/24", "dev", "eth0")
            self._ip(host, "link", "set", "eth0", "up")

    def _port(self, name: str) -> str:
        """Name of the bridge's end of a host's cable."""
        return f"port{self._others.index(name) + 1}"

    @staticmethod
    def _ip(host: Host, *words: str) -> None:
        done = subprocess.run(host.enter(["ip", *words]), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"ip {' '.join(words)} in host {host.name}: {done.stderr.strip()}")


def network_namespace(pid: int | str) -> str | None:
    """Identity of the network namespace of a process; None when it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
