"""`gang up`: what it prints and how it is stopped. Found by the CLI through its entry point."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import click

from gangline.protocol.outcomes import ExitCode
from service.errors import SettingsError
from service.first_start import ADMIN_TOKEN_FILE
from service.folder import lock_data_folder, prepare_data_folder
from service.settings import ENV_PREFIX, Settings
from service.up.pool import LocalPool, PoolOptions, build_pool

WATCH_SECONDS = 0.5


@click.command("up")
@click.option("--data", "data_folder", type=click.Path(path_type=Path), default=Path(".data"), help="Data folder.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=7700, show_default=True, help="Port to listen on; 0: a free one.")
@click.option("--nodes", "num_nodes", default=1, show_default=True, help="Local agents to start.")
@click.option("--slots", default=os.cpu_count() or 1, show_default=True, help="CPU slots of each local agent.")
@click.option("--no-broker", is_flag=True, help="Without Redis: jobs start by heartbeat alone (slower).")
def up(data_folder: Path, host: str, port: int, num_nodes: int, slots: int, no_broker: bool) -> None:
    """Run the whole pool on this machine until Ctrl-C."""
    options = PoolOptions(
        data_folder=data_folder.resolve(),
        host=host,
        port=port,
        num_nodes=num_nodes,
        slots=slots,
        has_broker=not no_broker,
    )
    environment = dict(os.environ)
    environment.setdefault(f"{ENV_PREFIX}BEHIND_PROXY", "false")
    try:
        settings = Settings.from_environment(
            {key: value for key, value in environment.items() if key.startswith(ENV_PREFIX)},
            data_folder=options.data_folder,
            host=host,
            port=port,
        )
        prepare_data_folder(settings)
        with lock_data_folder(options.data_folder):
            _run(options, environment)
    except SettingsError as error:
        for line in str(error).splitlines():
            click.echo(f"gang up: {line}", err=True)
        sys.exit(ExitCode.REFUSED)


def _run(options: PoolOptions, environment: dict[str, str]) -> None:
    stopping = threading.Event()
    num_interrupts = 0

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal num_interrupts
        num_interrupts += 1
        stopping.set()

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    pool = build_pool(options, environment)
    pool.tell = lambda text: click.echo(text, err=True)
    click.echo("Starting Redis, the API and the agents …", err=True)
    pool.start()
    _greet(pool)
    while not stopping.wait(WATCH_SECONDS):
        pool.watch()
    click.echo("Stopping: jobs first (they go back into the queue), then agents, API, Redis.", err=True)
    shown = -1
    for num_left in pool.drain():
        if num_left and num_left != shown:
            shown = num_left
            click.echo(f"  {num_left} job part{'' if num_left == 1 else 's'} still ending …", err=True)
        if num_interrupts > 1:
            click.echo("  not waiting any longer", err=True)
            break
    pool.stop()
    click.echo("Stopped.", err=True)


def _greet(pool: LocalPool) -> None:
    options = pool.options
    token_file = options.data_folder / ADMIN_TOKEN_FILE
    broker = "Redis on a private socket" if pool.broker else "none found: jobs start by heartbeat (slower)"
    click.echo(
        f"""
Gangline is up at {pool.url}
  nodes     {options.num_nodes}, each with {options.slots} CPU slot{"" if options.slots == 1 else "s"}
  hints     {broker}
  data      {options.data_folder}
  isolation trusted: jobs run as you, {_user()}, and can do what you can

Log in     gang login --server {pool.url} --token-file {token_file}
Submit     gang submit job.yaml        (gang init writes one)
Stop       Ctrl-C here: jobs go back into the queue and start again at the next gang up
"""
    )


def _user() -> str:
    return os.environ.get("USER") or f"user {os.getuid()}"
