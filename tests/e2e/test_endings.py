"""Every way a gang can end: outcome, exit code or signal, first failing rank, sentence, fix, and nothing left behind.

Two nodes, real processes. `tests/unit/service/test_decide_outcome.py` has the table of the decision itself.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.support.stack import PYTHON, TEST_SECONDS, Stack, hold_source
from tests.support.wait import wait_until

pytestmark = pytest.mark.timeout(TEST_SECONDS)
GANG: dict[str, Any] = {"resources": {"nodes": 2, "gpus_per_node": 2}, "stop_grace": "2s"}
RANK = "import os, sys, time\nrank = int(os.environ['RANK'])\n"


def pid_of_rank(pool: Stack, job_id: int, rank: int) -> int:
    """Pid of a rank: it printed it as the first word of its log."""
    pool.wait_log(job_id, "\n", rank)
    return int(pool.log_text(job_id, rank).split("\n")[0])


def assert_clean(pool: Stack, job: dict[str, Any]) -> None:
    """The job has ended with a cause that tells what to do, and nothing of it is left."""
    assert job["cause"]["sentence"]
    assert job["cause"]["fix"] or job["outcome"] in ("succeeded", "cancelled")
    assert job["attempt"] is None
    pool.assert_nothing_left()


def test_a_gang_whose_ranks_all_exit_0_has_succeeded(pool: Stack) -> None:
    job_id = pool.python_job(RANK + "print('rank', rank)", **GANG)

    job = pool.wait_end(job_id)

    assert (job["state"], job["outcome"], job["cause"]["exit_code"]) == ("succeeded", "succeeded", 0)
    assert [pool.log_text(job_id, rank) for rank in range(4)] == [f"rank {rank}\n" for rank in range(4)]
    assert job["cost"]["gpu_seconds"] > 0
    assert_clean(pool, job)


@pytest.mark.parametrize("code", [1, 2, 7, 255])
def test_o01_a_non_zero_exit_code_is_never_a_success(pool: Stack, code: int) -> None:
    job = pool.wait_end(pool.submit(run={"command": f"echo x; exit {code}"}))

    assert (job["state"], job["outcome"], job["cause"]["exit_code"]) == ("failed", "user_error", code)
    assert_clean(pool, job)


def test_o01_exit_127_of_a_command_means_that_a_program_is_missing(pool: Stack) -> None:
    job = pool.wait_end(pool.submit(run={"command": "no-such-program-here --help"}))

    assert (job["outcome"], job["cause"]["exit_code"]) == ("config_error", 127)
    assert "127" in job["cause"]["sentence"]
    assert_clean(pool, job)


def test_a_missing_script_is_a_config_error_that_names_it(pool: Stack) -> None:
    job_id = pool.submit(code={"path": str(pool.code(""))}, python=PYTHON, run={"script": "trian.py"}, **GANG)

    job = pool.wait_end(job_id)

    assert job["outcome"] == "config_error"
    assert "trian.py" in job["cause"]["sentence"]
    assert_clean(pool, job)


def test_a_missing_package_is_an_environment_error_that_names_it(pool: Stack) -> None:
    job = pool.wait_end(pool.python_job("import no_such_package_xyz\n", **GANG))

    assert job["outcome"] == "environment_error"
    assert "no_such_package_xyz" in job["cause"]["sentence"]
    assert_clean(pool, job)


def test_a_missing_interpreter_is_an_environment_error(pool: Stack) -> None:
    job_id = pool.submit(code={"path": str(pool.code(""))}, python="/no/such/python", run={"script": "main.py"})

    job = pool.wait_end(job_id)

    assert job["outcome"] == "environment_error"
    assert "/no/such/python" in job["cause"]["sentence"]
    assert_clean(pool, job)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL, signal.SIGTERM])
def test_o01_a_signal_from_outside_is_a_user_error_that_names_it(pool: Stack, number: signal.Signals) -> None:
    job_id = pool.python_job(RANK + "print(os.getpid(), flush=True)\ntime.sleep(120)\n", **GANG)
    pool.wait_state(job_id, "running")

    os.kill(pid_of_rank(pool, job_id, 2), number)
    job = pool.wait_end(job_id)

    assert (job["state"], job["outcome"]) == ("failed", "user_error")
    assert (job["cause"]["signal"], job["cause"]["exit_code"], job["cause"]["rank"]) == (number.name, None, 2)
    assert number.name in job["cause"]["sentence"]
    assert_clean(pool, job)


def test_o02_the_first_failing_rank_is_the_cause_and_the_others_are_marked_as_stopped_by_us(pool: Stack) -> None:
    source = RANK + "if rank == 2:\n    time.sleep(1)\n    raise ValueError('bad batch 17')\ntime.sleep(120)\n"
    job = pool.wait_end(pool.python_job(source, **GANG))

    cause = job["cause"]
    assert (job["outcome"], cause["rank"], cause["node"], cause["exit_code"]) == ("user_error", 2, "node-2", 1)
    assert (cause["error"]["type"], cause["error"]["message"]) == ("ValueError", "bad batch 17")
    assert "main.py" in cause["error"]["traceback"]
    others = [rank for rank in cause["ranks"] if rank["rank"] != 2]
    assert [rank["stopped_by_us"] for rank in others] == [True, True, True]
    assert_clean(pool, job)


def test_o11_a_failure_on_one_node_stops_the_sleeping_one(pool: Stack) -> None:
    command = '[ "$GANGLINE_NODE_RANK" = 0 ] && exec sleep 3600; sleep 1; exit 1'
    job = pool.wait_end(pool.submit(run={"command": command}, **GANG))

    assert (job["outcome"], job["cause"]["node"], job["cause"]["exit_code"]) == ("user_error", "node-2", 1)
    assert_clean(pool, job)


def test_the_device_ids_of_the_old_tutorial_get_their_fix(pool: Stack) -> None:
    source = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.Linear(2, 2)\n"
        "torch.nn.parallel.DistributedDataParallel(model, device_ids=[0, 1])\n"
    )
    job = pool.wait_end(pool.python_job(source, resources={"nodes": 2, "gpus_per_node": 1}), timeout=600)

    assert job["outcome"] == "user_error"
    assert "LOCAL_RANK" in job["cause"]["fix"]
    assert_clean(pool, job)


def test_a_log_that_mentions_out_of_memory_is_still_a_user_error(pool: Stack) -> None:
    job = pool.wait_end(pool.submit(run={"command": "echo 'CUDA out of memory'; exit 1"}))

    assert (job["outcome"], job["cause"]["exit_code"]) == ("user_error", 1)
    assert_clean(pool, job)


def test_a_waiting_job_is_cancelled_without_an_attempt(pool: Stack) -> None:
    holder = pool.python_job(hold_source(), **GANG)
    pool.wait_state(holder, "running")
    waiting = pool.python_job(hold_source(), **GANG)

    assert pool.cancel(waiting).status_code == 202
    job = pool.job(waiting)

    assert (job["state"], job["outcome"], job["attempts"]) == ("cancelled", "cancelled", 0)
    pool.cancel(holder)
    assert_clean(pool, pool.wait_end(holder))


def test_a_starting_job_is_cancelled(pool: Stack) -> None:
    job_id = pool.python_job(hold_source(), **GANG)
    wait_until(lambda: pool.job(job_id)["state"] != "waiting", 60, "the job does not start")

    assert pool.cancel(job_id).status_code == 202
    job = pool.wait_end(job_id)

    assert (job["state"], job["outcome"]) == ("cancelled", "cancelled")
    assert_clean(pool, job)


def test_a_running_job_is_cancelled_and_cancelling_again_changes_nothing(pool: Stack) -> None:
    long_grace = "60s"  # which a busy machine does not use up
    job_id = pool.python_job(hold_source(), **{**GANG, "stop_grace": long_grace})
    pool.wait_state(job_id, "running")

    first, *again = [pool.cancel(job_id).status_code for _ in range(3)]
    job = pool.wait_end(job_id)

    assert first == 202
    assert set(again) <= {202, 200}  # 200: it had ended by then
    assert (job["state"], job["outcome"], job["cause"]["note"]) == ("cancelled", "cancelled", "")
    assert pool.cancel(job_id).status_code == 200
    assert_clean(pool, job)


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(pool: Stack) -> None:
    source = (
        RANK
        + "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(300)\n"
    )
    job_id = pool.python_job(source, **{**GANG, "stop_grace": "1s"})
    for rank in range(4):
        pool.wait_log(job_id, "deaf", rank)

    pool.cancel(job_id)
    job = pool.wait_end(job_id)

    assert (job["state"], job["cause"]["note"]) == ("cancelled", "killed after grace")
    assert_clean(pool, job)


def test_o10_a_rank_that_forks_and_leaves_its_session_twice_is_caught(pool: Stack) -> None:
    source = RANK + (
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        time.sleep(300)\n"
        "    os._exit(0)\n"
        "print('forked', flush=True)\n"
        "time.sleep(300)\n"
    )
    job_id = pool.python_job(source, **{**GANG, "stop_grace": "1s"})
    for rank in range(4):
        pool.wait_log(job_id, "forked", rank)

    pool.cancel(job_id)
    job = pool.wait_end(job_id)

    assert job["state"] == "cancelled"
    assert_clean(pool, job)


def test_o57_the_time_limit_counts_from_the_start_of_the_ranks(pool: Stack) -> None:
    resources = {**GANG["resources"], "time": "2s"}
    job = pool.wait_end(pool.python_job(hold_source(), **{**GANG, "resources": resources}))

    assert (job["state"], job["outcome"]) == ("failed", "time_limit")
    assert "2s" in job["cause"]["sentence"]
    assert_clean(pool, job)
