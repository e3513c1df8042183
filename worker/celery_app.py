"""The agent's Celery child: an ear for the doorbell, in a process of its own that may die at any time.

It listens on the queue of its node and passes hints on to the agent (`worker.tasks`). It starts nothing, holds no token
and keeps no state: whatever is lost here, the agent's next heartbeat brings. A message that is no JSON ends it by
Celery's design; the agent starts it again.

Not for: publishing (the service's dispatcher does), results, retries, or work that lasts.
"""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any, Final

from celery import Celery
from celery.platforms import SecurityWarning

from gangline.protocol.names import ENV_BROKER_URL, node_queue
from worker.doorbell import ENV_NODE_NAME, ENV_PARENT_PIPE

BROKER_TRANSPORT_OPTIONS: Final = {
    # Without acknowledgements nothing is ever stranded or repeated by the broker; a lost hint costs one heartbeat.
    "ack_emulation": False,
    "socket_connect_timeout": 2,
    # Above the broker's blocking read (1 s), and so that a frozen Redis is noticed.
    "socket_timeout": 5,
    "socket_keepalive": True,
    "health_check_interval": 25,
}

SETTINGS: Final[dict[str, Any]] = {  # Any: Celery's settings are of every type
    "task_serializer": "json",
    "accept_content": ["json"],
    "result_backend": None,
    "task_ignore_result": True,
    "enable_utc": True,
    "timezone": "UTC",
    "task_create_missing_queues": True,
    "worker_prefetch_multiplier": 1,
    "worker_disable_prefetch": True,
    "task_acks_late": False,
    # Whoever can write to Redis could otherwise shut the worker down by a broadcast.
    "worker_enable_remote_control": False,
    "worker_send_task_events": False,
    "worker_hijack_root_logger": False,
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    "broker_transport_options": BROKER_TRANSPORT_OPTIONS,
}


def make_app(broker_url: str) -> Celery:
    """The Celery application with the node's tasks. Connects to nothing."""
    app = Celery("gangline", broker=broker_url, include=["worker.tasks"])
    app.conf.update(SETTINGS)
    return app


def worker_arguments(node_name: str) -> list[str]:
    """Arguments of Celery's `worker` command for the agent of `node_name`. Pure."""
    return [
        "worker",
        *("-P", "threads"),
        *("-c", "4"),
        *("-Q", node_queue(node_name)),
        *("-n", f"{node_name}@%h"),
        *("-l", "WARNING"),
        "--without-gossip",
        "--without-mingle",
        "--without-heartbeat",
    ]


def main() -> int:
    """Run the Celery worker until it is told to end or the agent is gone. What it needs is in the environment."""
    missing = [name for name in (ENV_BROKER_URL, ENV_NODE_NAME, ENV_PARENT_PIPE) if not os.environ.get(name)]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not set: this command is started by the agent, not by hand.")
    # The account is the agent's, and what the warning is about (pickled messages) is refused by `accept_content`.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    threading.Thread(target=_end_with_parent, args=(int(os.environ[ENV_PARENT_PIPE]),), daemon=True).start()
    make_app(os.environ[ENV_BROKER_URL]).worker_main(worker_arguments(os.environ[ENV_NODE_NAME]))
    return 0


def _end_with_parent(pipe: int) -> None:
    """Wait for the end of the agent, then end at once: nothing here is worth a clean stop."""
    while os.read(pipe, 1):
        pass  # the agent never writes; a stray byte is no EOF
    os._exit(0)
