"""The plan file of a recipe or entry: what the service planned, with this node's folder for checkpoints filled in.

Not for: what a plan may say (`trainer.plan`), or the commands that read it (`worker.launcher`).
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gangline.protocol import names
from gangline.protocol.launch import LaunchPlan
from trainer.plan.parallel_plan import check_parallel_plan
from trainer.plan.training_plan import TrainingPlan, read_plan, write_plan
from worker.state import SharedFolder

JOBS_FOLDER: Final = "jobs"
CHECKPOINTS_FOLDER: Final = "checkpoints"


class NoSharedFolderError(RuntimeError):
    """The service counts on a folder that all nodes see, and this node has none, or another one."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRoot:
    """Where all checkpoints of a job lie, as this node calls it."""

    folder: Path
    is_shared: bool
    """All nodes of the attempt see the same folder."""


def checkpoint_root(plan: LaunchPlan, data: Path, shared: SharedFolder | None) -> CheckpointRoot:
    """The job's folder for checkpoints: shared when the service says that all nodes of the attempt see the same one,
    else below the agent's `data`. Pure. Raises NoSharedFolderError."""
    if not wants_shared_folder(plan):
        return CheckpointRoot(folder=data / JOBS_FOLDER / str(plan.job_id) / CHECKPOINTS_FOLDER, is_shared=False)
    if shared is None:
        # Silently local it would be read by nobody, and the other nodes would miss this one's part.
        raise NoSharedFolderError(f"node {plan.node_name} has no shared folder any more, and the plan counts on it")
    if plan.shared_folder_id is not None and plan.shared_folder_id != shared.folder_id:
        raise NoSharedFolderError(
            f"node {plan.node_name} has the shared folder {shared.folder_id} ({shared.path}), and the plan counts on "
            f"{plan.shared_folder_id}"
        )
    job = f"{plan.pool_id}-{plan.job_id}"
    return CheckpointRoot(folder=Path(shared.path) / JOBS_FOLDER / job / CHECKPOINTS_FOLDER, is_shared=True)


def wants_shared_folder(plan: LaunchPlan) -> bool:
    """Whether the service counts on a shared folder. Pure."""
    return plan.training is not None and plan.training.get("is_checkpoint_root_shared") is True


def fill_plan(training: dict[str, Any] | None, world_size: int, root: CheckpointRoot) -> TrainingPlan:
    """The plan that the ranks read. Pure. Raises PlanError (a ValueError) for one that cannot be run."""
    plan = read_plan(json.dumps(training))
    check_parallel_plan(plan.parallel, world_size)
    return dataclasses.replace(plan, checkpoint_root=str(root.folder), is_checkpoint_root_shared=root.is_shared)


def lay_out_training(attempt_folder: Path, training: TrainingPlan) -> None:
    """Make the folder that the ranks save checkpoints in, and write the plan file. Raises OSError."""
    assert training.checkpoint_root is not None, "fill_plan names the root"
    root = Path(training.checkpoint_root)
    (root / training.checkpoint_subfolder).mkdir(mode=0o755, parents=True, exist_ok=True)
    path = attempt_folder / names.PLAN_FILE
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(write_plan(training), encoding="utf-8")
    temporary.replace(path)
