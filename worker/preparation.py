"""Everything before the first rank: code, interpreter, folders, free space, rendezvous, and so the exact commands.

Nothing here touches a GPU or starts a process. Not for: starting ranks (`worker.supervisor`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangline.protocol.bundles import UnsafeBundle
from gangline.protocol.launch import LaunchPlan, NodeFailure, Rendezvous
from gangline.protocol.outcomes import Outcome
from trainer.plan.problem import PlanError
from trainer.plan.training_plan import TrainingPlan
from worker import attempt_folder as folders
from worker.agent_log import log
from worker.api import ApiError, Fenced
from worker.code_folder import Download, WrongBundleError, code_path, is_cached, provide_code
from worker.courier import retry_seconds
from worker.endings import is_trainer
from worker.environment_check import check_environment, find_program
from worker.interfaces import interface_of
from worker.launcher import LaunchContext, RankCommand, base_environment, rank_commands
from worker.plan_file import (
    NoSharedFolderError,
    checkpoint_root,
    fill_plan,
    lay_out_training,
    wants_shared_folder,
)
from worker.reachability import why_unreachable
from worker.shared_folder import SharedFolderError, check_shared_folder
from worker.state import SharedFolder

_RENDEZVOUS_LOOK_SECONDS: Final = 5.0
_REACH_SECONDS: Final = 20.0
"""Rank 0's node that stays out of reach for this long (and never longer than half the start time left) is given up."""
_SHELL_PREFERRED: Final = "bash"


class CannotStartError(Exception):
    """This node cannot run the plan; `failure` says why, for the user."""

    def __init__(self, failure: NodeFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the preparation needs of its supervisor."""

    attempt_folder: Path
    scratch_folder: Path
    deadline: float
    """Monotonic end of the start timeout."""
    download: Download
    wait: Callable[[float], None]
    """Wait so many seconds, or until something came; raises when the attempt is to stop."""
    peers_rendezvous: Callable[[], Rendezvous | None]
    """What the server has told of rank 0 so far."""
    shared_folder: SharedFolder | None = None
    """The agent's."""


def needs_patience(plan: LaunchPlan, attempt_folder: Path) -> bool:
    """Whether the preparation waits for the network, so that a stop order has to be heard meanwhile."""
    return plan.num_nodes > 1 or not is_cached(plan.code, _bundle_cache(attempt_folder))


def prepare(plan: LaunchPlan, around: Surroundings, own: Rendezvous | None) -> tuple[RankCommand, ...]:
    """The commands of this node. `own`: the port reserved here, on the node of rank 0.

    Raises CannotStartError, Fenced, and whatever `around.wait` raises.
    """
    folders.lay_out(around.attempt_folder, plan)
    _provide_code(plan, around)
    training = _training(plan, around) if is_trainer(plan.run) else None
    context = _context(plan, around)
    draft = rank_commands(plan, own or Rendezvous(address="", port=0), context)
    failure = check_environment(
        plan,
        draft[0],
        folders_to_fill=(around.attempt_folder, around.scratch_folder, *_checkpoint_folders(training)),
        now=time.time(),
    )
    if failure is not None:
        raise CannotStartError(failure)
    if own is not None:
        return draft
    rendezvous = _await_rendezvous(plan, around)
    _reach(plan, around, rendezvous)
    return rank_commands(plan, rendezvous, context)


def _training(plan: LaunchPlan, around: Surroundings) -> TrainingPlan:
    """The plan file of a recipe or entry, written, and the folder that it names for checkpoints."""
    try:
        if around.shared_folder is not None and wants_shared_folder(plan):
            check_shared_folder(around.shared_folder)
        root = checkpoint_root(plan, folders.agent_data(around.attempt_folder), around.shared_folder)
        training = fill_plan(plan.training, plan.world_size, root)
        lay_out_training(around.attempt_folder, training)
    except PlanError as error:
        fix = "Correct the job file and submit it again."
        raise _cannot_start(Outcome.CONFIG_ERROR, f"The training plan cannot be run: {error}", fix) from error
    except (NoSharedFolderError, SharedFolderError) as error:
        message = f"The checkpoints of the job cannot be reached on node {plan.node_name}: {error}."
        fix = "Mount the shared folder and start the node's agent with --shared-folder; the attempt is repeated."
        raise _cannot_start(Outcome.LAUNCH_FAILED, message, fix) from error
    return training


def _checkpoint_folders(training: TrainingPlan | None) -> tuple[Path, ...]:
    return () if training is None or training.checkpoint_root is None else (Path(training.checkpoint_root),)


def _context(plan: LaunchPlan, around: Surroundings) -> LaunchContext:
    base = base_environment(os.environ, around.scratch_folder)
    has_bash = find_program(_SHELL_PREFERRED, base["PATH"], around.scratch_folder) is not None
    return LaunchContext(
        attempt_folder=around.attempt_folder,
        code_folder=code_path(plan.code, around.attempt_folder),
        job_folder=folders.make_job_folder(around.attempt_folder, plan),
        scratch_folder=around.scratch_folder,
        package_folder=folders.make_package_folder(folders.agent_data(around.attempt_folder)),
        environment=os.environ,
        default_python=sys.executable,
        interface=interface_of(plan.node_address),
        shell=_SHELL_PREFERRED if has_bash else "sh",
    )


def _provide_code(plan: LaunchPlan, around: Surroundings) -> None:
    """Fetch and unpack; an unreachable server is asked again until the start timeout."""
    failures = 0
    while True:
        try:
            return provide_code(plan.code, around.attempt_folder, _bundle_cache(around.attempt_folder), around.download)
        except Fenced:
            raise
        except UnsafeBundle as error:
            fix = "Pack the code again with `gang submit`."
            raise _cannot_start(Outcome.CONFIG_ERROR, f"The code bundle is not unpacked: {error}", fix) from error
        except (ApiError, WrongBundleError) as error:
            failures += 1
            log("bundle_not_fetched", failures=failures, error=error)
            if time.monotonic() >= around.deadline:
                message = f"The code bundle could not be fetched within the start timeout: {error}."
                fix = "See that the node reaches the server; the attempt is repeated."
                raise _cannot_start(Outcome.LAUNCH_FAILED, message, fix) from error
            around.wait(retry_seconds(failures, 1.0))
        except OSError as error:
            message = f"The code bundle could not be unpacked on node {plan.node_name}: {error}."
            fix = "Free space on the node, and see that its data folder can be written."
            raise _cannot_start(Outcome.ENVIRONMENT_ERROR, message, fix) from error


def _await_rendezvous(plan: LaunchPlan, around: Surroundings) -> Rendezvous:
    while (rendezvous := around.peers_rendezvous()) is None:
        left = around.deadline - time.monotonic()
        if left <= 0:
            message = (
                f"Node {plan.node_name} (node rank {plan.node_rank}) did not learn where rank 0 listens "
                f"within {plan.start_timeout_seconds:g} s."
            )
            fix = "Look at the node of rank 0; the attempt is repeated."
            raise _cannot_start(Outcome.LAUNCH_FAILED, message, fix)
        around.wait(min(left, _RENDEZVOUS_LOOK_SECONDS))
    return rendezvous


def _reach(plan: LaunchPlan, around: Surroundings, rendezvous: Rendezvous) -> None:
    """Try until an answer comes from where rank 0 will listen."""
    begun_at = time.monotonic()
    patience_seconds = min(_REACH_SECONDS, (around.deadline - begun_at) / 2)
    failures = 0
    while (why := why_unreachable(rendezvous)) is not None:
        failures += 1
        log("peer_unreachable", address=rendezvous.address, port=rendezvous.port, failures=failures, why=why)
        if time.monotonic() - begun_at >= patience_seconds:
            message = (
                f"Node {plan.node_name} ({plan.node_address}) cannot reach rank 0 at "
                f"{rendezvous.address}:{rendezvous.port}: {why}."
            )
            fix = (
                "Allow TCP between the nodes at the addresses that `gang node ls` shows, or enrol the node with an "
                "--address that its peers reach; the attempt is repeated."
            )
            raise _cannot_start(Outcome.LAUNCH_FAILED, message, fix)
        around.wait(retry_seconds(failures, 1.0))


def _bundle_cache(attempt_folder: Path) -> Path:
    return folders.agent_data(attempt_folder) / "bundles"


def _cannot_start(outcome: Outcome, message: str, fix: str) -> CannotStartError:
    return CannotStartError(NodeFailure(outcome=outcome, message=message, fix=fix, at=time.time()))
