"""Who this node is for the service: `credential.json`, made by enrolment and kept 0600 in the agent's data folder.

Also the two defaults that enrolment needs: a node name and the address that peers reach this node at. Not for: what
users log in with.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from gangline.protocol.launch import decode
from worker.state import write_json

CREDENTIAL_FILE: Final = "credential.json"
LOOPBACK_ADDRESS: Final = "127.0.0.1"
# It becomes part of a queue name and of the process marker, so no slash and nothing to quote.
_NODE_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


class AgentError(Exception):
    """The agent cannot run as asked. The message says what happened and the fix; it goes to the user as it is."""


@dataclass(frozen=True, kw_only=True)
class Credential:
    """The content of `credential.json`."""

    server: str
    """URL of the API."""
    node_name: str
    pool_id: str
    credential: str
    """Bearer token `gln_…` of this node."""
    address: str = ""
    """Address that was registered."""


def load_credential(data: Path) -> Credential | None:
    """The credential in data folder `data`; None when the node was never enrolled. Raises AgentError."""
    path = data / CREDENTIAL_FILE
    try:
        return decode(Credential, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise AgentError(
            f"{path} cannot be read ({error}). Fix: remove it and start the agent with --enrolment-token-file."
        ) from error


def save_credential(data: Path, credential: Credential) -> None:
    """Replace the credential in one step, mode 0600."""
    write_json(data / CREDENTIAL_FILE, dataclasses.asdict(credential))


def read_enrolment_token(path: Path | None) -> str:
    """The one-time secret that admits a new node. Raises AgentError with the fix."""
    if path is None:
        raise AgentError(
            "This node is not enrolled yet. Fix: give --enrolment-token-file a file that holds an enrolment token, "
            "which an admin makes with `gang admin token create --enrolment`."
        )
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise AgentError(f"The enrolment token file {path} cannot be read: {error}.") from error
    if not re.fullmatch(r"gle_[A-Za-z0-9_-]+", token):
        raise AgentError(f"{path} holds no enrolment token: one line that begins with gle_ is expected.")
    return token


def checked_node_name(name: str) -> str:
    """`name`, if a node may be called so. Raises AgentError."""
    if not _NODE_NAME.fullmatch(name):
        raise AgentError(
            f"A node cannot be named {name!r}. Fix: give --name 1 to 63 letters, digits, dots, dashes, underscores."
        )
    return name


def default_node_name() -> str:
    """The first part of this machine's host name."""
    return socket.gethostname().partition(".")[0]


def address_towards(server: str) -> str:
    """Address of the interface that reaches `server`, the loopback address for a server on this machine.

    Asks the routing table only: nothing is sent. Raises AgentError when there is no way to it.
    """
    parts = urlsplit(server)
    if not parts.hostname:
        raise AgentError(f"{server!r} is no server URL. Fix: give --server http://HOST:PORT.")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise AgentError(
            f"No way from this node to {server} ({error}). Fix: check --server, or give --address with the address at "
            "which the other nodes reach this one."
        ) from error
    return LOOPBACK_ADDRESS if ipaddress.ip_address(address).is_loopback else address
