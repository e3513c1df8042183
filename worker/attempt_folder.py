"""The folder of an attempt on a node: what a supervisor lays out in it, and the record it keeps for a successor.

`supervisor.json` holds what a finishing run needs when the supervisor died: the scratch folder and the started ranks.
Not for: the state file (`worker.state`) or the offsets (`worker.shipper`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangline.protocol import names
from gangline.protocol.launch import LaunchPlan, decode
from worker.launcher import num_processes
from worker.state import write_json

SUPERVISOR_FILE: Final = "supervisor.json"
LOCK_FILE: Final = "supervisor.lock"
RANK_PACKAGES: Final = ("gangline", "trainer")
"""What every rank can import, whatever its interpreter has."""
SCRATCH_ROOT: Final = Path("/tmp")
"""Not TMPDIR: socket paths of the ranks lie below it and may hold 108 bytes."""


_FOLDERS: Final = (
    names.CODE_FOLDER,
    names.LOGS_FOLDER,
    names.EVENTS_FOLDER,
    names.ERRORS_FOLDER,
    names.PULSES_FOLDER,
)


class AlreadySupervisedError(RuntimeError):
    """Another process supervises (or finishes) this attempt."""


@dataclass(frozen=True, kw_only=True)
class StartedRank:
    """A rank as it was started."""

    rank: int
    local_rank: int
    pid: int
    start_time: int
    """Clock ticks since boot."""
    started_at: float
    """Epoch seconds of this node's clock."""


@dataclass(frozen=True, kw_only=True)
class SupervisorRecord:
    """Content of `supervisor.json`."""

    scratch_folder: str | None = None
    cgroup_folders: tuple[str, ...] = ()
    """The attempt's groups. A successor may live in another place of the tree, and would look for them there."""
    ranks: tuple[StartedRank, ...] = ()


def lock(attempt_folder: Path) -> int:
    """Become the only supervisor of the attempt for as long as the returned descriptor is open.

    Raises AlreadySupervisedError, FileNotFoundError when the folder is gone.
    """
    descriptor = os.open(attempt_folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise AlreadySupervisedError(f"{attempt_folder} is supervised by another process") from error
    return descriptor


def read_plan(attempt_folder: Path) -> LaunchPlan:
    """The launch plan as the agent wrote it. Raises FileNotFoundError, ValueError."""
    return decode(LaunchPlan, json.loads((attempt_folder / names.LAUNCH_FILE).read_bytes()))


def write_record(attempt_folder: Path, record: SupervisorRecord) -> None:
    """Replace `supervisor.json`."""
    write_json(attempt_folder / SUPERVISOR_FILE, dataclasses.asdict(record))


def read_record(attempt_folder: Path) -> SupervisorRecord:
    """The record; an empty one when no supervisor came so far as to write it."""
    try:
        return decode(SupervisorRecord, json.loads((attempt_folder / SUPERVISOR_FILE).read_bytes()))
    except FileNotFoundError:
        return SupervisorRecord()


def ranks_of(plan: LaunchPlan) -> range:
    """Ranks of this node. A command counts as the node's first."""
    return range(plan.first_rank, plan.first_rank + num_processes(plan))


def lay_out(attempt_folder: Path, plan: LaunchPlan) -> None:
    """Make the folders and the empty log and events files, so that they can be watched before anything is in them."""
    for folder in _FOLDERS:
        (attempt_folder / folder).mkdir(mode=0o700, exist_ok=True)
    for rank in ranks_of(plan):
        (attempt_folder / names.log_file(rank)).touch(mode=0o600)
        (attempt_folder / names.events_file(rank)).touch(mode=0o600)


def make_job_folder(attempt_folder: Path, plan: LaunchPlan) -> Path:
    """The stable folder of the job, which outlives attempts."""
    folder = agent_data(attempt_folder) / "jobs" / str(plan.job_id)
    (folder / "checkpoints").mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def make_scratch_folder(plan: LaunchPlan) -> Path:
    """A short, fresh folder for the ranks' temporary files. Its name tells two pools on one machine apart."""
    return Path(tempfile.mkdtemp(prefix=f"gl-{plan.pool_id}-{plan.attempt_id}-", dir=SCRATCH_ROOT))


def agent_data(attempt_folder: Path) -> Path:
    """The agent's data folder, of which this is `attempts/<id>`."""
    return attempt_folder.parent.parent


def make_package_folder(data: Path) -> Path:
    """A folder that holds `gangline` and `trainer` as links and nothing else, for the ranks' PYTHONPATH.

    The folder they really lie in may be a whole site-packages, which would take the place of the job's own packages.
    """
    folder = data / "python"
    folder.mkdir(mode=0o755, exist_ok=True)
    for package in RANK_PACKAGES:
        spec = importlib.util.find_spec(package)  # found, not imported: the worker has no business in them
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"package {package!r} is not installed beside the agent; install gangline again")
        target = Path(spec.origin).resolve().parent
        link = folder / package
        if link.is_symlink() and link.readlink() == target:
            continue
        temporary = folder / f".{package}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        temporary.symlink_to(target)
        temporary.replace(link)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder with all that is in it; gone already is fine. Raises OSError for what cannot be removed."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
