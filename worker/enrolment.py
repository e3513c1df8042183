"""How the agent becomes a node of a pool: its settings, and the credential it has or gets for an enrolment token.

Not for: the files and defaults themselves (`worker.credential`), nor the time after enrolment (`worker.agent`).
"""

from __future__ import annotations

import random
import select
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from worker.agent_log import log
from worker.api import Answered, ApiError, NodeApi
from worker.credential import (
    CREDENTIAL_FILE,
    AgentError,
    Credential,
    address_towards,
    checked_node_name,
    default_node_name,
    load_credential,
    read_enrolment_token,
    save_credential,
)
from worker.inventory import InventorySource
from worker.nvml import Nvml
from worker.wake import Wake

HTTP_TOO_MANY_REQUESTS: Final = 429
FIRST_RETRY_SECONDS: Final = 0.5
LONGEST_RETRY_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What the agent was asked to be."""

    data: Path
    """Data folder of this node, 0700; one agent each."""
    server: str | None
    """URL of the API; None: as enrolled."""
    name: str | None
    address: str | None
    enrolment_token_file: Path | None
    broker_url: str | None
    """None: no Celery child, heartbeats alone."""
    inventory: InventorySource
    shared_folder: Path | None = None
    """Folder that other nodes see as well; None: there is none."""
    nvml: Nvml | None = None
    """Says how much the GPUs work; None: this node has none."""


def retry_delay(failures: int, chance: float, *, longest_seconds: float = LONGEST_RETRY_SECONDS) -> float:
    """Seconds before the next try after `failures` (1 or more) in a row; `chance` in 0..1 spreads the nodes. Pure."""
    longest = min(FIRST_RETRY_SECONDS * 2 ** min(failures - 1, 16), longest_seconds)
    return longest * (0.75 + 0.25 * chance)


def node_credential(settings: AgentSettings, data: Path, wake: Wake) -> Credential | None:
    """Who this node is: as enrolled before, else enrolled now. None when asked to stop meanwhile. Raises AgentError."""
    stored = load_credential(data)
    if stored is None:
        return _enrol(settings, data, wake)
    if settings.name is not None and settings.name != stored.node_name:
        raise AgentError(
            f"{data} belongs to node {stored.node_name!r}, not {settings.name!r}. Fix: leave --name away, or give the "
            "other node a folder of its own with --data."
        )
    if settings.address is not None and settings.address != stored.address:
        raise AgentError(
            f"Node {stored.node_name!r} is registered at {stored.address or 'an unknown address'}, not at "
            f"{settings.address}. Fix: leave --address away, or remove {data / CREDENTIAL_FILE} and enrol it again."
        )
    if settings.server is not None and settings.server != stored.server:
        # The same pool may answer at another URL; the first heartbeat finds out.
        stored = replace(stored, server=settings.server)
        save_credential(data, stored)
    return stored


def _enrol(settings: AgentSettings, data: Path, wake: Wake) -> Credential | None:
    if settings.server is None:
        raise AgentError("This node is not enrolled yet. Fix: give the URL of the API with --server.")
    name = checked_node_name(default_node_name() if settings.name is None else settings.name)
    address = address_towards(settings.server) if settings.address is None else settings.address
    api = NodeApi(settings.server, read_enrolment_token(settings.enrolment_token_file))
    failures = 0
    while not wake.is_stopping:
        try:
            enrolment = api.enrol(name, address)
        except ApiError as error:
            if isinstance(error, Answered) and 400 <= error.status < 500 and error.status != HTTP_TOO_MANY_REQUESTS:
                raise AgentError(f"{settings.server} does not admit node {name!r}: {error}") from error
            failures += 1
            delay_seconds = retry_delay(failures, random.random())
            log("enrolment_failed", failures=failures, retry_in_seconds=round(delay_seconds, 2), error=error)
            select.select([wake], [], [], delay_seconds)
            wake.clear()
            continue
        finally:
            api.close()
        credential = Credential(
            server=settings.server,
            node_name=enrolment.node_name,
            pool_id=enrolment.pool_id,
            credential=enrolment.credential,
            address=address,
        )
        save_credential(data, credential)
        log("enrolled", node=credential.node_name, pool=credential.pool_id, address=address)
        return credential
    return None
