"""Entry point of `gang`: the table of commands, and the edge where every error becomes a message and an exit code.

Nothing here may import httpx, rich or PyYAML: `gang --help` answers at once. Not for: any command's work.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from gangline.cli import exit_codes
from gangline.cli.errors import error_lines
from gangline.cli.lazy import LazyCommand, LazyGroup
from gangline.cli.options import common_options
from gangline.cli.sanitise import clean
from gangline.cli.session import Session
from gangline.client.errors import GanglineError
from gangline.protocol.outcomes import ExitCode

JOBS, POOL, SETUP = "Jobs", "Pool", "Start here"
_AT = "gangline.cli.commands"

COMMANDS = {
    "login": LazyCommand(target=f"{_AT}.login:login", help="Store the server's address and your token.", section=SETUP),
    "init": LazyCommand(target=f"{_AT}.init:init", help="Write a commented job file.", section=SETUP),
    "check": LazyCommand(target=f"{_AT}.check:check", help="Validate a job file; submit nothing.", section=JOBS),
    "submit": LazyCommand(target=f"{_AT}.submit:submit", help="Submit a job file.", section=JOBS),
    "ls": LazyCommand(target=f"{_AT}.ls:ls", help="List jobs, newest first.", section=JOBS),
    "show": LazyCommand(target=f"{_AT}.show:show", help="Show all about one job.", section=JOBS),
    "why": LazyCommand(target=f"{_AT}.why:why", help="Say why a job waits, and what would help.", section=JOBS),
    "queue": LazyCommand(
        target=f"{_AT}.queue:queue", help="List the waiting jobs in the order of their turns.", section=JOBS
    ),
    "logs": LazyCommand(target=f"{_AT}.logs:logs", help="Print or follow a job's logs.", section=JOBS),
    "wait": LazyCommand(target=f"{_AT}.wait:wait", help="Wait until a job has ended.", section=JOBS),
    "cancel": LazyCommand(target=f"{_AT}.cancel:cancel", help="Stop jobs.", section=JOBS),
    "requeue": LazyCommand(
        target=f"{_AT}.requeue:requeue", help="Stop jobs at a checkpoint and start them again.", section=JOBS
    ),
    "extend": LazyCommand(target=f"{_AT}.extend:extend", help="Give a job more time.", section=JOBS),
    "hold": LazyCommand(target=f"{_AT}.hold:hold", help="Keep jobs from starting.", section=JOBS),
    "release": LazyCommand(target=f"{_AT}.release:release", help="Let held jobs take their turn.", section=JOBS),
    "priority": LazyCommand(target=f"{_AT}.priority:priority", help="Change the priority of a job.", section=JOBS),
    "plot": LazyCommand(target=f"{_AT}.plot:plot", help="Draw curves of one or more jobs.", section=JOBS),
    "top": LazyCommand(target=f"{_AT}.top:top", help="Show the pool at a glance, live.", section=POOL),
    "usage": LazyCommand(target=f"{_AT}.usage:usage", help="GPU-hours by team, user and week.", section=POOL),
    "idle": LazyCommand(target=f"{_AT}.idle:idle", help="Jobs that hold GPUs without using them.", section=POOL),
    "node": LazyCommand(target=f"{_AT}.node:node", help="Machines of the pool.", section=POOL),
    "admin": LazyCommand(target=f"{_AT}.admin:admin", help="Users, teams and tokens.", section=POOL),
}


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import gangline

        click.echo(f"gang {gangline.__version__}")
        ctx.exit()


gang = LazyGroup(
    name="gang",
    lazy_commands=COMMANDS,
    plugins=True,
    help="Run PyTorch training jobs on the GPUs that your team shares.",
    epilog="A JOB is an id, a name (your latest of that name) or -1 (your last). Ctrl-C never stops a job.",
    params=[
        *common_options(),
        click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
                     help="Show the version."),
    ],
    callback=lambda **values: None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `gang` and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to die
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run `gang`; every error becomes a message on stderr and the exit code that is returned."""
    ctx = None
    try:
        with gang.make_context("gang", list(sys.argv[1:] if arguments is None else arguments)) as ctx:
            result: Any = gang.invoke(ctx)
            sys.stdout.flush()
        return int(result) if isinstance(result, int) and not isinstance(result, bool) else ExitCode.DONE
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        return _show_usage(error)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has seen enough (`gang ls | head`). The interpreter's own flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.UNEXPECTED
    except GanglineError as error:
        return _show(error, ctx)
    except Exception as error:  # noqa: BLE001  # the edge of the process: a defect of ours becomes a message, not a dump
        return _show_defect(error, ctx)


def _session(ctx: click.Context | None) -> Session:
    session = ctx.find_root().obj if ctx is not None else None
    return session if isinstance(session, Session) else Session()


def _show_usage(error: click.ClickException) -> int:
    """An error in the command line itself. A group without a command shows its help instead."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return ExitCode.USAGE
    click.echo(f"error: {clean(error.format_message())}", err=True)
    click.echo(f"fix: {ctx.command_path if ctx else 'gang'} --help shows what it takes", err=True)
    return error.exit_code


def _show(error: GanglineError, ctx: click.Context | None) -> int:
    session = _session(ctx)
    for line in error_lines(error, label=session.job_file_label, overridden=session.overridden_keys):
        click.echo(line, err=True)
    return exit_codes.of_error(error)


def _show_defect(error: Exception, ctx: click.Context | None) -> int:
    if _session(ctx).debug:
        import traceback

        click.echo(clean("".join(traceback.format_exception(error))), err=True)
    click.echo(f"error: unexpected {type(error).__name__}: {clean(str(error))}", err=True)
    click.echo("fix: run the command again with --debug and report what it prints", err=True)
    return ExitCode.UNEXPECTED
