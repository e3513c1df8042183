"""From a launch plan to the exact commands of a node's processes: arguments, environment, working folder.

Pure: the environment it starts from, folders and addresses are arguments. The variables are those of torchrun, so that
`init_process_group("env://")` works as it stands. Not for: checking that a command can run
(`worker.environment_check`) or starting it (`worker.spawn`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangline.protocol import names
from gangline.protocol.launch import LaunchPlan, Rendezvous
from worker.endings import is_trainer
from worker.state import marker

_KEPT_VARIABLES: Final = frozenset(
    ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "USER", "LOGNAME", "SHELL", "LD_LIBRARY_PATH", "CUDA_HOME")
)
_KEPT_PREFIX: Final = "LC_"
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """What a node adds to the plan."""

    attempt_folder: Path
    code_folder: Path
    """Working folder of the ranks: the unpacked bundle, the named folder, or an empty one."""
    job_folder: Path
    """Stable folder of the job on this node."""
    scratch_folder: Path
    """TMPDIR of the ranks: short, since socket paths lie in it, and removed at the end."""
    package_folder: Path
    """Holds `gangline` and `trainer` and nothing else: last on PYTHONPATH, first for the trainer's own ranks."""
    environment: Mapping[str, str]
    """The agent's own environment. Only a few named variables of it reach a rank, never a secret."""
    default_python: str
    """Interpreter of a job whose plan names none."""
    interface: str | None
    """Network interface that owns the node's registered address; None: not known."""
    shell: str
    """`bash` or `sh`, whichever is there: runs the string form of a command."""


@dataclass(frozen=True, kw_only=True)
class RankCommand:
    """One process to start."""

    rank: int
    local_rank: int
    arguments: tuple[str, ...]
    environment: dict[str, str]
    working_folder: Path
    log_file: Path
    """Takes the process's stdout and stderr."""


def num_processes(plan: LaunchPlan) -> int:
    """How many processes this node starts: a command runs once, everything else once per rank."""
    return plan.processes_per_node if has_ranks(plan) else 1


def has_ranks(plan: LaunchPlan) -> bool:
    """Whether each process is a rank. A command brings its own launcher."""
    return plan.run.kind == "script" or is_trainer(plan.run)


def data_limit_bytes(plan: LaunchPlan) -> int | None:
    """What each rank may allocate where no cgroup holds the job to its memory; None: not limited.

    For trainers without GPUs only: there allocations are memory that is used. CUDA reserves far more than it uses, and
    so may any program of a script or command. Pure.
    """
    has_gpus = any(gpu.kind == "gpu" for gpu in plan.gpus)
    if plan.memory_bytes is None or has_gpus or not is_trainer(plan.run):
        return None
    return plan.memory_bytes // num_processes(plan)


def rank_commands(plan: LaunchPlan, rendezvous: Rendezvous, context: LaunchContext) -> tuple[RankCommand, ...]:
    """The commands of this node, by local rank. Raises ValueError for a plan that names nothing to run."""
    arguments = _arguments(plan, context)
    return tuple(
        RankCommand(
            rank=plan.first_rank + local_rank,
            local_rank=local_rank,
            arguments=arguments,
            environment=_environment(plan, rendezvous, context, local_rank),
            working_folder=context.code_folder,
            log_file=context.attempt_folder / names.log_file(plan.first_rank + local_rank),
        )
        for local_rank in range(num_processes(plan))
    )


def base_environment(environment: Mapping[str, str], scratch_folder: Path) -> dict[str, str]:
    """The few variables of the agent that a rank gets, before the job's own."""
    kept = {
        name: value for name, value in environment.items() if name in _KEPT_VARIABLES or name.startswith(_KEPT_PREFIX)
    }
    return {"PATH": DEFAULT_PATH, **kept, "TMPDIR": str(scratch_folder)}


def _arguments(plan: LaunchPlan, context: LaunchContext) -> tuple[str, ...]:
    run = plan.run
    if run.kind == "script" and run.script is not None:
        return (plan.python or context.default_python, run.script, *run.args)
    if is_trainer(run):
        plan_file = str(context.attempt_folder / names.PLAN_FILE)
        # -P: in the job's folder a trainer.py may lie, which is not meant.
        return (plan.python or context.default_python, "-P", "-m", "trainer", "run", plan_file)
    if run.kind == "command" and run.shell is not None:
        # A failing part of a pipe or a list fails the script: plain shells go on and end with 0.
        strict = ("-euo", "pipefail") if context.shell == "bash" else ("-eu",)
        return (context.shell, *strict, "-c", run.shell)
    if run.kind == "command" and run.command:
        return run.command
    raise ValueError(f"the launch plan names nothing to run: kind {run.kind!r}, no script, command or shell string")


def _environment(plan: LaunchPlan, rendezvous: Rendezvous, context: LaunchContext, local_rank: int) -> dict[str, str]:
    base = base_environment(context.environment, context.scratch_folder)
    return {
        **base,
        **_defaults(plan, context),
        **plan.env,
        **_gang_variables(plan, rendezvous, local_rank),
        **_gangline_variables(plan, context, plan.first_rank + local_rank),
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in plan.gpus if gpu.kind == "gpu"),
        "PYTHONPATH": _python_path(plan, context.package_folder),
    }


def _defaults(plan: LaunchPlan, context: LaunchContext) -> dict[str, str]:
    """What a job may set otherwise."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, int(plan.cpus // num_processes(plan)))),
        # Output to a file would be block-buffered, and seen at the end only.
        "PYTHONUNBUFFERED": "1",
    }
    if context.interface is not None:
        # Host names often do not resolve, and the first interface is often the wrong one. NCCL takes a bare name as a
        # prefix ("eth1" also means eth10); with "=" it is the name itself.
        defaults["GLOO_SOCKET_IFNAME"] = context.interface
        defaults["NCCL_SOCKET_IFNAME"] = f"={context.interface}"
    return defaults


def _gang_variables(plan: LaunchPlan, rendezvous: Rendezvous, local_rank: int) -> dict[str, str]:
    """The variables of torchrun. A command has no rank of its own: it brings its own launcher."""
    variables = {
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(num_processes(plan)),
        "GROUP_RANK": str(plan.node_rank),
        "GROUP_WORLD_SIZE": str(plan.num_nodes),
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        "TORCHELASTIC_RUN_ID": f"{plan.pool_id}-{plan.attempt_id}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    if has_ranks(plan):
        rank = str(plan.first_rank + local_rank)
        variables |= {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": str(local_rank)}
    return variables


def _gangline_variables(plan: LaunchPlan, context: LaunchContext, rank: int) -> dict[str, str]:
    folder = context.attempt_folder
    return {
        names.ENV_ATTEMPT: marker(plan.pool_id, plan.node_name, plan.attempt_id),
        names.ENV_JOB_ID: str(plan.job_id),
        names.ENV_JOB_NAME: plan.job_name,
        names.ENV_ATTEMPT_NUMBER: str(plan.attempt_number),
        names.ENV_START_REASON: plan.start_reason,
        names.ENV_EVENTS_FILE: str(folder / names.events_file(rank)),
        names.ENV_STOP_FILE: str(folder / names.STOP_FILE),
        names.ENV_PULSE_FILE: str(folder / names.pulse_file(rank)),
        names.ENV_RESULT_FILE: str(folder / names.RESULT_FILE),
        names.ENV_OFFSETS_FILE: str(folder / names.OFFSETS_FILE),
        names.ENV_JOB_FOLDER: str(context.job_folder),
        names.ENV_CHECKPOINT_FOLDER: str(context.job_folder / "checkpoints"),
        "TORCHELASTIC_ERROR_FILE": str(folder / names.error_file(rank)),
        "GANGLINE_NODE_RANK": str(plan.node_rank),
        "GANGLINE_NUM_NODES": str(plan.num_nodes),
        "GANGLINE_GPUS_PER_NODE": str(len(plan.gpus)),
    }


def _python_path(plan: LaunchPlan, package_folder: Path) -> str:
    """A job's own packages come first, except before the trainer when that is what is started."""
    users_own = plan.env.get("PYTHONPATH")
    if not users_own:
        return str(package_folder)
    return f"{package_folder}:{users_own}" if is_trainer(plan.run) else f"{users_own}:{package_folder}"
