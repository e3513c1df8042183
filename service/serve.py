"""The API process: `python -P -m service.serve`, settings from the environment. Says where it listens in `server.json`.

SIGTERM and SIGINT stop it (open streams end at once); SIGUSR1 stops all jobs and puts them back into the queue.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType

import uvicorn

from service.api.deps import AppState
from service.app import create_app, create_state
from service.errors import SettingsError
from service.first_start import make_first_admin, write_private
from service.operations.stop_pool import lift_shutdown_cordon, stop_pool
from service.settings import settings_from_process_environment

log = logging.getLogger("gangline")
SERVER_FILE = "server.json"
SHUTDOWN_GRACE_SECONDS = 15.0


class Server(uvicorn.Server):
    """uvicorn that wakes its open streams when it is asked to stop."""

    def __init__(self, config: uvicorn.Config, state: AppState):
        super().__init__(config)
        self._state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop: streams and long-polls end first, then the server."""
        self._state.bus.close()
        super().handle_exit(sig, frame)


def main() -> int:
    """Run until stopped. Exit code 2: refused to start, with the reason on stderr."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = settings_from_process_environment()
        state = create_state(settings)
        make_first_admin(state.database, settings.data_folder)
        lift_shutdown_cordon(state.database)
        listener = _listen(settings.host, settings.port)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    write_private(settings.data_folder / SERVER_FILE, json.dumps({"url": f"http://{shown}:{port}", "pid": os.getpid()}))
    app = create_app(state)
    gc.collect()
    gc.freeze()  # what is loaded stays, so no later collection need look at it
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        log_config=None,
        access_log=False,
        proxy_headers=settings.behind_proxy,
        timeout_graceful_shutdown=3,
        timeout_keep_alive=75,
        backlog=1024,
    )

    def stop_jobs(_signal: int, _frame: FrameType | None) -> None:
        threading.Thread(
            target=stop_pool,
            args=(state.database,),
            kwargs={"longest_grace_seconds": SHUTDOWN_GRACE_SECONDS, "settle_seconds": settings.settle_seconds},
        ).start()

    signal.signal(signal.SIGUSR1, stop_jobs)
    server = Server(config, state)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return 0
    return 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another with --port, or 0 for a free one."
        ) from error
    return listener


if __name__ == "__main__":
    sys.exit(main())
