"""Whether this node reaches the address at which rank 0 will listen, found out before any rank waits for it in vain.

torch would wait for minutes and then name neither node. The port is reserved and nobody listens there yet, so "refused"
is the good answer: it came from the other node. Not for: the other directions of a gang.
"""

from __future__ import annotations

import socket
from typing import Final

from gangline.protocol.launch import Rendezvous

TRY_SECONDS: Final = 2.0
"""One try. A firewall that drops packets answers nothing at all."""


def why_unreachable(rendezvous: Rendezvous) -> str | None:
    """Why no answer came from there, in words; None when one came. Waits `TRY_SECONDS` at most."""
    try:
        with socket.create_connection((rendezvous.address, rendezvous.port), timeout=TRY_SECONDS):
            return None
    except ConnectionRefusedError:
        return None
    except TimeoutError:
        return f"no answer within {TRY_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
