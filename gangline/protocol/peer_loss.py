"""What gloo, NCCL and TCPStore say when the other side is gone: the loss of a peer, secondary to any other failure.

Trainer and worker read errors by the same table, so that both call the same texts a loss. Not for: which rank was lost.
"""

from __future__ import annotations

import re
from typing import Final

_PEER_LOSS: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # gloo: pair.cc and unbound_buffer.cc
        r"gloo.*connection closed by peer",
        r"gloo.*(connection reset by peer|broken pipe|connection refused)",
        r"gloo.*timed out waiting \d+ms for (recv|send) operation",
        r"gloo.*(application timeout caused pair closure|timed out|no route to host)",
        r"connect(ed)?FullMesh failed",
        # NCCL and ProcessGroupNCCL
        r"ncclRemoteError|remote process exited or there was a network error",
        r"ncclSystemError.*(socket|connection|network)",
        r"NCCL.*(timeout|timed out|connection closed by remote peer|communicator was aborted|connection reset)",
        r"watchdog caught collective operation timeout",
        # TCPStore and rendezvous
        r"client socket has timed out after \d+ms",
        r"timed out after \d+ seconds waiting for clients",
        r"(\b(TCP|File|Prefix|Hash)Store\b|c10d|socket\.cpp).*"
        r"(connection reset|broken pipe|connection closed|wait timeout|timed out)",
        r"recvValue failed|failed to recv, got 0 bytes|sendBytes failed|recvVector failed",
        r"DistStoreError|DistNetworkError(?!.*EADDRINUSE)",
        r"monitoredBarrier.*(timed out|failed)",
    )
)
"""A bare "connection reset" is not here: it is as likely the user's own download."""

_PORT_TAKEN: Final = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


def is_peer_loss_text(text: str) -> bool:
    """Whether an error's text (class name and message, lines joined or not) reads as the loss of a peer."""
    line = text.replace("\n", " ")
    return any(pattern.search(line) for pattern in _PEER_LOSS) and not is_port_taken_text(line)


def is_port_taken_text(text: str) -> bool:
    """Whether an error's text says that something else listens on the port."""
    return _PORT_TAKEN.search(text) is not None
