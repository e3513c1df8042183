"""Keeps a port free for rank 0 without listening on it, for as long as the attempt lives.

A bound socket that never listens keeps the kernel from handing the port to anybody who asks for "any port", while rank
0, which names it, may bind and listen there (both with SO_REUSEADDR). Not for: telling the peers (`worker.supervisor`).
"""

from __future__ import annotations

import ipaddress
import socket

from gangline.protocol.launch import Rendezvous


class ReservedPort:
    """A port that is ours until `close`."""

    def __init__(self, address: str) -> None:
        """Reserve a port on the wildcard address; `address` is where peers will look for it. Raises OSError."""
        self._socket = socket.socket(socket.AF_INET6 if _is_ipv6(address) else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.rendezvous = Rendezvous(address=address, port=int(self._socket.getsockname()[1]))

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def _is_ipv6(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False  # a name
