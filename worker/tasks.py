"""Celery tasks of a node: `gangline.launch` rings the agent's doorbell and returns.

A hint says "look at attempt 17" and no more. It may be lost, repeated, late or forged: the agent asks the service what
is true. So nothing here is retried, and an error is logged and dropped.
"""

from __future__ import annotations

import logging
import os

from celery import shared_task

from gangline.protocol.names import LAUNCH_TASK
from worker.doorbell import ENV_DOORBELL, launch_message, ring

logger = logging.getLogger(__name__)


@shared_task(name=LAUNCH_TASK)
def launch(attempt_id: object = None, *extra: object) -> None:
    """Tell the agent to look at attempt `attempt_id`. Anything but one positive integer is logged and dropped."""
    message = None if extra else launch_message(attempt_id)
    if message is None:
        logger.warning("dropped_hint task=%s argument=%.200r", LAUNCH_TASK, (attempt_id, *extra))
        return
    try:
        ring(os.environ[ENV_DOORBELL], message)
    except OSError as error:
        # The agent restarts, or its socket is full. Its next heartbeat brings the attempt all the same.
        logger.warning("dropped_hint task=%s attempt_id=%s error=%r", LAUNCH_TASK, attempt_id, str(error))
