"""Looks, before anything is started, whether this node can run the plan: folders, interpreter, script, free space.

It starts no interpreter and reads no user code: an import that fails shows in the rank's own traceback. Not for: making
what is missing.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from gangline.protocol.launch import LaunchPlan, NodeFailure
from gangline.protocol.outcomes import Outcome
from worker.launcher import RankCommand

MIN_FREE_BYTES: Final = 64 << 20
"""A node with less free space than this in its data folder or scratch starts nothing."""


def check_environment(
    plan: LaunchPlan,
    command: RankCommand,
    *,
    folders_to_fill: tuple[Path, ...],
    now: float,
    min_free_bytes: int = MIN_FREE_BYTES,
) -> NodeFailure | None:
    """The first thing that keeps the plan from running here, or None. `now` in epoch seconds."""
    failure = (
        _check_account(plan)
        or _check_code_folder(plan, command)
        or _check_program(plan, command)
        or _check_script(plan, command)
        or _check_space(folders_to_fill, min_free_bytes)
    )
    if failure is None:
        return None
    outcome, message, fix = failure
    return NodeFailure(outcome=outcome, message=message, fix=fix, at=now)


def find_program(name: str, search_path: str, working_folder: Path) -> Path | None:
    """The file that running `name` in `working_folder` would execute, as a shell finds it; None when there is none."""
    if "/" in name:
        candidates = [working_folder / name]
    else:
        candidates = [working_folder / entry / name for entry in search_path.split(":")]
    return next((path for path in candidates if path.is_file() and os.access(path, os.X_OK)), None)


def spawn_failure(number: int, program: str, message: str, now: float) -> NodeFailure:
    """The failure that an errno of starting a program means. What the job names is its own fault, the rest ours."""
    words = {
        errno.ENOENT: f"{program!r} names an interpreter (its #! line) that is not there (exit code 127)",
        errno.E2BIG: "its arguments and environment are too large for the kernel (128 KiB each, 2 MiB in all)",
        errno.ENOEXEC: f"{program!r} is neither a program nor a script with a #! line (exit code 126)",
        errno.EACCES: f"{program!r} may not be executed (exit code 126)",
    }
    if number in words:
        return NodeFailure(
            outcome=Outcome.CONFIG_ERROR,
            message=f"The job cannot be started: {words[number]}.",
            fix="Correct the command in the job file.",
            at=now,
        )
    return NodeFailure(
        outcome=Outcome.LAUNCH_FAILED,
        message=f"The node could not start a process: {message}.",
        fix="Nothing in the job is wrong; look at the node's supervisor.log and its limits on processes and memory.",
        at=now,
    )


Problem = tuple[str, str, str] | None
"""(outcome, message, fix)."""


def _check_account(plan: LaunchPlan) -> Problem:
    if plan.run_as is None:
        return None
    return (
        Outcome.ENVIRONMENT_ERROR,
        f"The job is to run as account {plan.run_as!r}, which this node's agent cannot change to.",
        "Use the isolation mode `trusted`, or update the agent of this node.",
    )


def _check_code_folder(plan: LaunchPlan, command: RankCommand) -> Problem:
    folder = command.working_folder
    if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK):
        return None
    state = "cannot be read by the agent's account" if folder.exists() else "does not exist"
    return (
        Outcome.ENVIRONMENT_ERROR,
        f"The code folder {folder} {state} on node {plan.node_name}.",
        "Mount the shared folder on this node under the same path, or let `gang submit` pack the code into a bundle.",
    )


def _check_program(plan: LaunchPlan, command: RankCommand) -> Problem:
    program = command.arguments[0]
    search_path = command.environment.get("PATH", "")
    if find_program(program, search_path, command.working_folder) is not None:
        return None
    where = f"in {command.working_folder}" if "/" in program else f"on PATH ({search_path})"
    if plan.run.kind != "command":
        return (
            Outcome.ENVIRONMENT_ERROR,
            f"The Python interpreter {program!r} is not found {where} on node {plan.node_name}.",
            "Name an interpreter that exists on every node with `python:`, or set PATH in `env:`.",
        )
    return (
        Outcome.CONFIG_ERROR,
        f"The program {program!r} is not found {where} on node {plan.node_name} (exit code 127).",
        "Correct the command, give its full path, or set PATH in `env:`.",
    )


def _check_script(plan: LaunchPlan, command: RankCommand) -> Problem:
    if plan.run.kind != "script" or plan.run.script is None:
        return None
    script = command.working_folder / plan.run.script
    if script.exists():
        return None
    return (
        Outcome.CONFIG_ERROR,
        f"The script {plan.run.script!r} does not exist in the job's code ({command.working_folder}).",
        "Give its path from the top of the code folder, and see that .ganglineignore does not leave it out.",
    )


def _check_space(folders: tuple[Path, ...], min_free_bytes: int) -> Problem:
    for folder in folders:
        facts = os.statvfs(folder)
        free_bytes = facts.f_bavail * facts.f_frsize
        if free_bytes < min_free_bytes:
            return (
                Outcome.ENVIRONMENT_ERROR,
                f"Only {free_bytes >> 20} MiB are free in {folder}; a job needs at least {min_free_bytes >> 20} MiB.",
                "Free space on the node, or move the agent's data folder to a larger disk.",
            )
    return None
