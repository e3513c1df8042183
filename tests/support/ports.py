"""Ports for processes that are told a number and bind it seconds later, such as the ranks of a training.

Not for: a server that binds port 0 itself and says what it got.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """A loopback TCP port that nobody else gets meanwhile, though a child of ours that sets SO_REUSEADDR may listen.

    A port that is looked up and let go may be somebody else's by the time a child has imported torch.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))  # bound and not listening: Linux gives it to no other port 0 and no connection
        yield int(held.getsockname()[1])
