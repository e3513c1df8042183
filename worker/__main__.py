"""`python -P -m worker agent` (the node's agent) and `python -P -m worker celery` (its Celery child, started by it).

Only arguments are read here. Not for: the supervisor, which has an entry of its own (`python -P -m worker.supervisor`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gangline.protocol.names import ENV_BROKER_URL
from worker.agent_log import log
from worker.inventory import CpuSlots, InventoryError, InventorySource, NvmlGPUs, RecordedGPUs
from worker.nvml import LIBRARY as NVML_LIBRARY
from worker.nvml import Nvml, NvmlError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; 2 when it cannot run as asked."""
    options = _parser().parse_args(arguments)
    if options.command == "celery":
        # Celery is imported in this process alone: the agent does without it, and starts faster so.
        from worker import celery_app

        return celery_app.main()
    return _run_agent(options)


def _run_agent(options: argparse.Namespace) -> int:
    from worker.agent import run_agent
    from worker.credential import AgentError
    from worker.enrolment import AgentSettings

    try:
        nvml = _open_nvml(options)
        return run_agent(
            AgentSettings(
                data=options.data,
                server=options.server,
                name=options.name,
                address=options.address,
                enrolment_token_file=options.enrolment_token_file,
                broker_url=options.broker_url or os.environ.get(ENV_BROKER_URL) or None,
                inventory=_inventory(options, nvml),
                nvml=nvml,
                shared_folder=options.shared_folder,
            )
        )
    except (AgentError, InventoryError) as error:
        log("agent_refused", error=error)
        return 2


def _open_nvml(options: argparse.Namespace) -> Nvml | None:
    """NVML, where the node is to offer real GPUs and has some. Raises InventoryError."""
    if options.recorded_inventory is not None or options.slots is not None:
        return None
    try:
        nvml = Nvml.open()
        return nvml if nvml is not None and nvml.devices() else None
    except NvmlError as error:
        raise InventoryError(
            f"This machine has {NVML_LIBRARY}, but its GPUs cannot be read ({error}): see whether nvidia-smi lists "
            "them, or offer CPU slots in their place with --slots."
        ) from error


def _inventory(options: argparse.Namespace, nvml: Nvml | None) -> InventorySource:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if options.recorded_inventory is not None:
        return RecordedGPUs.from_file(options.recorded_inventory, visible=visible)
    if nvml is not None:
        return NvmlGPUs(nvml=nvml, cpus=options.cpus, visible=visible)
    slots = os.cpu_count() or 1 if options.slots is None else options.slots
    return CpuSlots(count=slots, cpus=options.cpus)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -P -m worker", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("celery", help="the agent's ear for hints; started by the agent, not by hand")
    agent = commands.add_parser("agent", help="keep this machine in the pool and run its part of jobs")
    agent.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="data folder of this node, one agent each"
    )
    agent.add_argument("--server", metavar="URL", help="URL of the API; needed to enrol, remembered afterwards")
    agent.add_argument("--name", help="name of this node (default: the host name); fixed once enrolled")
    agent.add_argument(
        "--address", help="address at which other nodes reach this one (default: of the interface towards the server)"
    )
    agent.add_argument(
        "--slots", type=int, metavar="K", help="CPU slots to offer in place of GPUs (default without GPUs: one a CPU)"
    )
    agent.add_argument(
        "--cpus", type=float, metavar="N", help="cores to offer (default: all; with CPU slots: one a slot)"
    )
    agent.add_argument(
        "--enrolment-token-file", type=Path, metavar="FILE", help="file with the token that admits a new node"
    )
    agent.add_argument(
        "--broker-url",
        metavar="URL",
        help=f"Redis that carries hints (better given as {ENV_BROKER_URL}: arguments are seen by every user of the "
        "machine); without one, heartbeats alone start jobs",
    )
    agent.add_argument(
        "--shared-folder",
        type=Path,
        metavar="DIR",
        help="folder that other nodes see as well, for checkpoints: a job can then go on on any node that shares it",
    )
    agent.add_argument(
        "--recorded-inventory",
        type=Path,
        metavar="FILE",
        help="offer the devices of a recorded JSON sample instead of CPU slots: for tests and trying out placement",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
