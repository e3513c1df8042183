"""From plan to commands: torchrun variables, what a job may override, and what of the agent never reaches a rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gangline.protocol.launch import AssignedGPU, CodeSource, LaunchPlan, Rendezvous, RunPlan
from worker.launcher import LaunchContext, RankCommand, rank_commands

RENDEZVOUS = Rendezvous(address="10.0.0.1", port=4711)


def a_plan(**changes: Any) -> LaunchPlan:
    plan = LaunchPlan(
        attempt_id=17,
        job_id=12,
        job_name="gpt",
        attempt_number=2,
        pool_id="pool",
        node_name="node-2",
        node_rank=1,
        num_nodes=2,
        node_address="10.0.0.2",
        processes_per_node=2,
        first_rank=2,
        world_size=4,
        gpus=(AssignedGPU(index=0, uuid="GPU-b"), AssignedGPU(index=1, uuid="GPU-a")),
        cpus=7.0,
        memory_bytes=None,
        run=RunPlan(kind="script", script="train.py", args=("--lr", "3e-4")),
        code=CodeSource(),
        python="python3",
        env={},
        time_limit_seconds=None,
        stop_grace_seconds=30.0,
        start_timeout_seconds=60.0,
        disconnect_stop_seconds=None,
        gather_seconds=0.05,
        start_reason="node_lost",
    )
    return dataclasses.replace(plan, **changes)


def commands(plan: LaunchPlan, **changes: Any) -> tuple[RankCommand, ...]:
    context = LaunchContext(
        attempt_folder=Path("/data/attempts/17"),
        code_folder=Path("/data/attempts/17/code"),
        job_folder=Path("/data/jobs/12"),
        scratch_folder=Path("/tmp/gl-1"),
        package_folder=Path("/data/python"),
        environment={"PATH": "/bin", "HOME": "/root", "LC_ALL": "C", "AGENT_TOKEN": "secret", "PYTHONPATH": "/agent"},
        default_python="/venv/bin/python",
        interface="eth1",
        shell="bash",
    )
    return rank_commands(plan, RENDEZVOUS, dataclasses.replace(context, **changes))


def test_a_script_is_started_once_per_rank_with_the_variables_of_torchrun() -> None:
    first, second = commands(a_plan())

    assert (first.rank, second.rank, first.local_rank, second.local_rank) == (2, 3, 0, 1)
    assert first.arguments == second.arguments == ("python3", "train.py", "--lr", "3e-4")
    assert second.log_file == Path("/data/attempts/17/logs/rank-3.log")
    expected = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "pool-17",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_ERROR_FILE": "/data/attempts/17/errors/rank-3.json",
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
        "CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a",
        "TMPDIR": "/tmp/gl-1",
        "GANGLINE_ATTEMPT": "pool/node-2/17",
        "GANGLINE_START_REASON": "node_lost",
        "GANGLINE_CHECKPOINT_FOLDER": "/data/jobs/12/checkpoints",
    }
    assert {name: second.environment[name] for name in expected} == expected
    assert "TORCHELASTIC_USE_AGENT_STORE" not in second.environment


def test_a_command_is_started_once_per_node_and_has_no_rank_of_its_own() -> None:
    (command,) = commands(a_plan(run=RunPlan(kind="command", command=("prog", "a;b"))))

    assert command.arguments == ("prog", "a;b")
    assert not {"RANK", "LOCAL_RANK", "ROLE_RANK"} & command.environment.keys()
    assert command.environment["GANGLINE_NODE_RANK"] == "1"
    assert command.environment["GANGLINE_NUM_NODES"] == "2"
    assert command.environment["GANGLINE_GPUS_PER_NODE"] == "2"
    assert command.environment["MASTER_ADDR"] == "10.0.0.1"


@pytest.mark.parametrize(
    ("shell", "words"), [("bash", ("bash", "-euo", "pipefail", "-c")), ("sh", ("sh", "-eu", "-c"))]
)
def test_a_shell_string_is_one_strict_script(shell: str, words: tuple[str, ...]) -> None:
    (command,) = commands(a_plan(run=RunPlan(kind="command", shell="a | b; c")), shell=shell)

    assert command.arguments == (*words, "a | b; c")


def test_only_a_few_named_variables_of_the_agent_reach_a_rank() -> None:
    environment = commands(a_plan())[0].environment

    assert (environment["PATH"], environment["HOME"], environment["LC_ALL"]) == ("/bin", "/root", "C")
    assert "AGENT_TOKEN" not in environment
    assert environment["PYTHONPATH"] == "/data/python"


def test_a_job_may_set_what_is_its_own_and_not_what_holds_the_gang_together() -> None:
    own = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "PATH": "/opt/bin",
        "TMPDIR": "/x",
    }
    ours = {"RANK": "9", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "7", "GANGLINE_ATTEMPT": "else"}
    environment = commands(a_plan(env=own | ours | {"PYTHONPATH": "/mine"}))[0].environment

    assert {name: environment[name] for name in own} == own
    assert all(environment[name] != value for name, value in ours.items())
    assert environment["PYTHONPATH"] == "/mine:/data/python"


def test_o37_cpu_slots_are_no_devices() -> None:
    plan = a_plan(gpus=(AssignedGPU(index=0, uuid="cpu-slot-0", kind="cpu_slot"),))

    assert commands(plan)[0].environment["CUDA_VISIBLE_DEVICES"] == ""


def test_every_process_gets_a_thread_however_few_cores_there_are() -> None:
    assert commands(a_plan(cpus=0.5))[0].environment["OMP_NUM_THREADS"] == "1"


def test_without_a_known_interface_none_is_named() -> None:
    assert "GLOO_SOCKET_IFNAME" not in commands(a_plan(), interface=None)[0].environment


def test_a_plan_that_names_no_interpreter_uses_the_agents() -> None:
    assert commands(a_plan(python=None))[0].arguments[0] == "/venv/bin/python"


def test_a_plan_that_names_nothing_to_run_is_refused() -> None:
    with pytest.raises(ValueError, match="names nothing to run"):
        commands(a_plan(run=RunPlan(kind="command")))
