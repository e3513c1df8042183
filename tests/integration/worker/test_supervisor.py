"""The supervisor with real processes against a small service: outcomes, stops, left-overs, bytes, outages.

Tests named after a case of the bug list say its number. Everything a rank did is read from evidence that the rank wrote
itself, or from what the service received.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gangline.protocol.launch import AssignedGPU, CodeSource, LaunchPlan, RunPlan
from gangline.protocol.names import ENV_ATTEMPT
from tests.integration.worker.fake_api import FakeApi, a_plan
from tests.integration.worker.supervised import Supervised
from tests.support.cuttable_proxy import CuttableProxy
from tests.support.processes import Traces, is_alive
from tests.support.wait import BUSY_SECONDS, wait_until
from worker.cgroup import group_name
from worker.nursery import Nursery

Supervise = Callable[..., Supervised]


@pytest.fixture
def supervise(tmp_path: Path, api: FakeApi, nursery: Nursery) -> Iterator[Supervise]:
    """Start the supervisor of a plan; fields of the plan as keywords."""
    started: list[Supervised] = []

    def start(*, server: str | None = None, is_started: bool = True, **changes: Any) -> Supervised:
        plan = our_plan(len(started), **changes)
        supervised = Supervised(tmp_path / "agent", api, plan, nursery, server=server)
        started.append(supervised)
        return supervised.start() if is_started else supervised

    yield start
    for supervised in started:
        supervised.close()


def our_plan(attempt_id: int, **changes: Any) -> LaunchPlan:
    """A plan in a pool of this test process's own: an agent of another test run would end what is marked as its."""
    return dataclasses.replace(a_plan(attempt_id, **changes), pool_id=f"pool-{os.getpid()}")


def python(code: str) -> RunPlan:
    return RunPlan(kind="command", command=(sys.executable, "-c", code))


def wait_for_more_output(run: Supervised) -> None:
    size = len(run.output())
    wait_until(lambda: len(run.output()) > size or run.attempt.reports, BUSY_SECONDS, "no output")


def script_folder(tmp_path: Path, **files: str) -> CodeSource:
    folder = tmp_path / "code"
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return CodeSource(path=str(folder))


# --- Outcome and cause -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 2, 127, 255])
def test_o01_the_exit_code_is_stored_exactly(supervise: Supervise, code: int) -> None:
    rank = supervise(run=python(f"import sys; print('x'); sys.exit({code})")).only_rank()

    assert (rank["exit_code"], rank["signal"], rank["stopped_by_us"]) == (code, None, False)


@pytest.mark.parametrize("name", ["SIGABRT", "SIGKILL", "SIGSEGV", "SIGTERM"])
def test_o01_death_by_a_signal_that_we_did_not_send_names_the_signal(supervise: Supervise, name: str) -> None:
    rank = supervise(run=python(f"import os, signal; os.kill(os.getpid(), signal.{name})")).only_rank()

    assert (rank["exit_code"], rank["signal"], rank["stopped_by_us"]) == (None, name, False)


def test_a_shell_script_fails_with_its_first_failing_part(supervise: Supervise) -> None:
    assert supervise(shell="false | cat; echo not reached").only_rank()["exit_code"] == 1
    assert supervise(shell="no-such-program-here; echo not reached").only_rank()["exit_code"] == 127


def test_a_program_that_is_not_there_is_a_config_error_in_words(supervise: Supervise) -> None:
    report = supervise(run=RunPlan(kind="command", command=("no-such-program", "x"))).report()

    assert report["failure"]["outcome"] == "config_error"
    assert "'no-such-program' is not found on PATH" in report["failure"]["message"]
    assert "127" in report["failure"]["message"]
    assert report["ranks"] == []


def test_a_missing_script_is_a_config_error_and_nothing_is_started(supervise: Supervise, tmp_path: Path) -> None:
    run = supervise(script="train.py", code=script_folder(tmp_path, other=""), python=sys.executable)

    failure = run.report()["failure"]
    assert (failure["outcome"], run.attempt.pids) == ("config_error", {})
    assert "'train.py' does not exist" in failure["message"]


def test_a_missing_code_folder_is_an_environment_error(supervise: Supervise) -> None:
    failure = supervise(shell="true", code=CodeSource(path="/nowhere/at/all")).report()["failure"]

    assert failure["outcome"] == "environment_error"
    assert "/nowhere/at/all does not exist on node node-1" in failure["message"]


def test_a_missing_interpreter_is_an_environment_error(supervise: Supervise, tmp_path: Path) -> None:
    run = supervise(script="train.py", code=script_folder(tmp_path, train=""), python="python9.99")

    assert run.report()["failure"]["outcome"] == "environment_error"


def test_the_error_of_a_rank_is_its_last_traceback(supervise: Supervise, tmp_path: Path) -> None:
    code = script_folder(tmp_path, train="def f():\n    raise ValueError('bad lr')\nf()\n")
    rank = supervise(script="train.py", code=code, python=sys.executable).only_rank()

    assert (rank["error"]["type"], rank["error"]["message"]) == ("ValueError", "bad lr")
    assert "train.py" in rank["error"]["traceback"]


def test_the_error_file_of_torch_wins_over_the_log(supervise: Supervise) -> None:
    content = {
        "message": {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": "Traceback: deep", "timestamp": "1"}}
    }
    code = (
        f"import os, json; json.dump({content!r}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w')); raise RuntimeError"
    )
    error = supervise(run=python(code)).only_rank()["error"]

    assert error == {"type": "KeyError", "message": "'x'", "traceback": "Traceback: deep"}


# --- A gang on one node ----------------------------------------------------------------------------------------------


def test_o02_the_first_failing_rank_is_told_at_once_and_the_others_are_stopped(
    supervise: Supervise, tmp_path: Path
) -> None:
    text = "import os, time\nif os.environ['RANK'] == '2': os._exit(7)\ntime.sleep(3600)\n"
    run = supervise(
        script="train.py",
        code=script_folder(tmp_path, train=text),
        python=sys.executable,
        processes_per_node=4,
        world_size=4,
    )
    report = run.report()

    by_rank = {rank["rank"]: rank for rank in report["ranks"]}
    assert (by_rank[2]["exit_code"], by_rank[2]["stopped_by_us"]) == (7, False)
    assert all(by_rank[rank]["signal"] == "SIGTERM" and by_rank[rank]["stopped_by_us"] for rank in (0, 1, 3))
    assert report["stop_intent"] == "peer_failure"
    assert [rank["rank"] for rank in run.attempt.failing[0]["ranks"]] == [2]
    assert run.attempt.failing[0]["process_set_empty"] is False


def test_each_rank_has_the_variables_of_torchrun(supervise: Supervise, tmp_path: Path) -> None:
    text = "import os, json\nprint(json.dumps(dict(os.environ)))\n"
    run = supervise(
        script="train.py",
        code=script_folder(tmp_path, train=text),
        python=sys.executable,
        processes_per_node=2,
        world_size=2,
        cpus=4.0,
    )
    run.report()

    seen = [json.loads(run.output(rank)) for rank in (0, 1)]
    assert [variables["RANK"] for variables in seen] == ["0", "1"]
    assert {variables["WORLD_SIZE"] for variables in seen} == {"2"}
    assert {variables["OMP_NUM_THREADS"] for variables in seen} == {"2"}
    assert {variables["MASTER_ADDR"] for variables in seen} == {"127.0.0.1"}
    assert len({variables["MASTER_PORT"] for variables in seen}) == 1
    assert not [name for name in seen[0] if "TOKEN" in name or "CREDENTIAL" in name]


def test_o34_rank_0_can_listen_on_the_reserved_port_and_nobody_is_given_it(supervise: Supervise) -> None:
    code = (
        "import os, socket\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "others = [socket.socket() for _ in range(500)]\n"
        "for s in others: s.bind(('', 0))\n"
        "assert port not in {s.getsockname()[1] for s in others}\n"
        "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "s.bind(('', port)); s.listen(); print('listens')\n"
    )
    run = supervise(run=python(code))

    assert run.only_rank()["exit_code"] == 0
    assert run.output() == b"listens\n"


def test_o34_a_lost_port_race_is_ours_and_not_the_users(supervise: Supervise) -> None:
    code = (
        "import os\n"
        'raise RuntimeError(f"The server socket has failed to listen on any local network address. port: '
        "{os.environ['MASTER_PORT']}, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\")"
    )
    assert supervise(run=python(code)).report()["failure"]["outcome"] == "launch_failed"


def test_a_node_without_rank_0_waits_for_its_address(supervise: Supervise, api: FakeApi) -> None:
    run = supervise(
        run=python("import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"),
        node_rank=1,
        num_nodes=2,
        first_rank=1,
        world_size=2,
    )
    wait_until(lambda: (run.folder / "code").exists(), BUSY_SECONDS, "the supervisor did not begin")
    assert run.attempt.state == "claimed"

    api._direct(run.plan.attempt_id, rendezvous={"address": "127.0.0.7", "port": 4711})

    run.report()
    assert run.output(1) == b"127.0.0.7 4711\n"


def test_the_node_of_rank_0_tells_its_address(supervise: Supervise) -> None:
    run = supervise(shell='echo "$MASTER_PORT"', num_nodes=2, world_size=2)
    run.report()

    assert run.attempt.directive["rendezvous"] == {"address": "127.0.0.1", "port": int(run.output())}


# --- Stopping --------------------------------------------------------------------------------------------------------

TRAPPING = """
import os, pathlib, signal, sys, time
def stop(number, frame):
    time.sleep(float(os.environ['ENDING_SECONDS']))
    pathlib.Path(os.environ['EVIDENCE']).write_text('complete')
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print('ready', flush=True)
while True:
    time.sleep(60)
"""

FORMS = {
    "directly": "exec {python} prog.py",
    "by sh -c": "sh -c '{python} prog.py; true'",
    "by a script": "bash run.sh; true",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("grace", "ending_seconds"), [(60.0, 0.6), (0.2, 3600.0)])
def test_o09_the_real_program_behind_a_shell_gets_its_time_to_end(
    supervise: Supervise, api: FakeApi, tmp_path: Path, form: str, grace: float, ending_seconds: float
) -> None:
    code = script_folder(tmp_path, prog=TRAPPING)
    (tmp_path / "code" / "run.sh").write_text(f"{sys.executable} prog.py\ntrue\n")
    evidence = tmp_path / "evidence"
    env = {"EVIDENCE": str(evidence), "ENDING_SECONDS": str(ending_seconds)}
    run = supervise(shell=FORMS[form].format(python=sys.executable), code=code, env=env)
    wait_until(lambda: run.output() == b"ready\n", BUSY_SECONDS, "the program did not start")

    api.stop(run.plan.attempt_id, "cancel", grace)
    report = run.report()

    assert report["stop_intent"] == "cancel"
    assert evidence.exists() == (grace > 1)
    assert report["ranks"][0]["killed_after_grace"] == (grace < 1)
    assert report["ranks"][0]["stopped_by_us"] is True
    assert report["process_set_empty"] is True
    assert run.marked() == []


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(supervise: Supervise, api: FakeApi) -> None:
    run = supervise(shell="trap '' TERM; echo ready; while true; do sleep 0.05; done", stop_grace_seconds=3600.0)
    wait_until(lambda: run.output() == b"ready\n", BUSY_SECONDS, "the program did not start")

    asked_at = time.monotonic()
    api.stop(run.plan.attempt_id, "cancel", 0.5)
    rank = run.only_rank()

    assert (rank["signal"], rank["killed_after_grace"]) == ("SIGKILL", True)
    assert 0.5 <= time.monotonic() - asked_at < BUSY_SECONDS


def test_o24_the_reason_of_a_stop_is_readable_by_the_job(supervise: Supervise, api: FakeApi) -> None:
    run = supervise(
        shell="trap 'cat \"$GANGLINE_STOP_FILE\"; exit 0' TERM; echo ready; while true; do sleep 0.02; done"
    )
    wait_until(lambda: run.output() == b"ready\n", BUSY_SECONDS, "the program did not start")

    api.stop(run.plan.attempt_id, "preempt", 60.0)

    assert run.report()["stop_intent"] == "preempt"
    assert run.output().endswith(b"preempt")


def test_the_time_limit_counts_from_the_start_of_the_ranks(supervise: Supervise) -> None:
    report = supervise(shell="sleep 3600", time_limit_seconds=0.4).report()

    (rank,) = report["ranks"]
    assert (report["stop_intent"], report["failure"]["outcome"]) == ("time_limit", "time_limit")
    assert 0.4 <= rank["ended_at"] - rank["started_at"] < BUSY_SECONDS


def test_more_time_counts_from_the_start_of_the_ranks_too(supervise: Supervise, api: FakeApi) -> None:
    run = supervise(shell="echo ready; sleep 3600", time_limit_seconds=3600.0)
    wait_until(lambda: run.output() == b"ready\n", BUSY_SECONDS, "the program did not start")

    api.limit(run.plan.attempt_id, 1.0)

    report = run.report()
    (rank,) = report["ranks"]
    assert report["failure"]["message"] == "It ran for its whole time limit of 1s."
    assert 1.0 <= rank["ended_at"] - rank["started_at"] < BUSY_SECONDS


def test_an_attempt_that_is_stopped_while_it_waits_starts_nothing(supervise: Supervise, api: FakeApi) -> None:
    run = supervise(shell="echo started", node_rank=1, num_nodes=2, first_rank=1, world_size=2)
    api.stop(run.plan.attempt_id, "cancel", 5.0)

    report = run.report()
    assert (report["ranks"], report["stop_intent"], report["failure"]) == ([], "cancel", None)
    assert run.output(1) == b""


def test_sigterm_to_the_supervisor_drains_the_attempt(supervise: Supervise) -> None:
    run = supervise(shell="echo ready; exec sleep 3600")
    wait_until(lambda: run.output() == b"ready\n", BUSY_SECONDS, "the program did not start")

    assert run.pid is not None
    os.kill(run.pid, signal.SIGTERM)

    assert run.report()["stop_intent"] == "drain"


# --- Left-overs ------------------------------------------------------------------------------------------------------

DAEMON = """
import os, signal, sys, time
if os.fork(): os._exit(0) if len(sys.argv) > 1 else time.sleep(3600)
os.setsid()
if os.fork(): os._exit(0)
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.environ.clear()
open(EVIDENCE + '.new', 'w').write(str(os.getpid()))
os.rename(EVIDENCE + '.new', EVIDENCE)
time.sleep(3600)
"""


def test_o10_a_child_that_leaves_session_and_parent_is_ended_with_the_attempt(
    supervise: Supervise, api: FakeApi, tmp_path: Path
) -> None:
    evidence = tmp_path / "pid"
    run = supervise(run=python(f"EVIDENCE = {str(evidence)!r}\n" + DAEMON))
    daemon = int(
        wait_until(lambda: evidence.exists() and evidence.read_text(), BUSY_SECONDS, "the daemon did not start")
    )

    api.stop(run.plan.attempt_id, "cancel", 0.3)
    report = run.report()

    assert report["process_set_empty"] is True
    assert not is_alive(daemon)


def test_o10_what_a_successful_rank_leaves_running_is_ended_and_changes_no_outcome(
    supervise: Supervise, tmp_path: Path
) -> None:
    evidence = tmp_path / "pid"
    code = f"import sys; sys.argv.append('leave')\nEVIDENCE = {str(evidence)!r}\n" + DAEMON
    # The rank goes only when its daemon is there, so that there is something to end.
    waiting = (
        f"import os, time\nif os.fork() == 0:\n  exec({code!r})\n"
        f"while not os.path.exists({str(evidence)!r}): time.sleep(0.01)\n"
    )
    report = supervise(run=python(waiting), stop_grace_seconds=0.3).report()

    (rank,) = report["ranks"]
    assert (rank["exit_code"], rank["stopped_by_us"], report["stop_intent"]) == (0, False, None)
    assert rank["killed_after_grace"] is False
    assert not is_alive(int(evidence.read_text()))


def test_o53_a_foreign_process_with_our_names_in_its_arguments_lives_on(supervise: Supervise, api: FakeApi) -> None:
    run = supervise(shell="echo ready; exec sleep 3600")
    words = [f"{ENV_ATTEMPT}={run.mark}", "worker.supervisor", str(run.plan.attempt_id), str(run.folder)]
    foreign = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)", *words],
        env={"NOTE": f"{ENV_ATTEMPT}={run.mark}", ENV_ATTEMPT: f"{run.mark}0"},
    )
    try:
        wait_until(lambda: run.output() == b"ready\n", BUSY_SECONDS, "the program did not start")

        api.stop(run.plan.attempt_id, "cancel", 0.2)
        run.report()

        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


def test_nothing_is_left_on_the_node_after_an_attempt(supervise: Supervise, api: FakeApi) -> None:
    script = 'touch "$TMPDIR/x"; sleep 3600 & exec sleep 3600'
    run = supervise(is_started=False, shell=script, processes_per_node=1)
    before = Traces.take(ENV_ATTEMPT, run.mark)
    own_names = (f"gl-{run.plan.pool_id}-", group_name(run.mark))

    def left() -> list[str]:
        """Of this attempt: others on this machine make folders and cgroups meanwhile, too."""
        lines = Traces.take(ENV_ATTEMPT, run.mark).left_since(before)
        by_name = ("folder ", "cgroup ")
        return [line for line in lines if not line.startswith(by_name) or any(name in line for name in own_names)]

    run.start()
    wait_until(lambda: {line.split()[0] for line in left()} >= {"process", "folder"}, BUSY_SECONDS, "nothing is there")

    api.stop(run.plan.attempt_id, "cancel", 2.0)
    run.report()

    assert left() == []


def test_i10_after_the_death_of_a_supervisor_a_finishing_run_ends_its_ranks_and_reports(
    supervise: Supervise, tmp_path: Path
) -> None:
    run = supervise(shell="trap '' TERM; echo ready; while true; do sleep 0.05; done")
    wait_until(lambda: run.output() == b"ready\n", BUSY_SECONDS, "the program did not start")
    assert run.pid is not None

    os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: not run.is_running(), BUSY_SECONDS, "the supervisor did not die")
    assert run.marked() != []
    command = [sys.executable, "-P", "-m", "worker.supervisor", str(run.folder)]
    done = subprocess.run(
        [*command, "--finish", "supervisor_lost", "It died."], timeout=BUSY_SECONDS, capture_output=True
    )

    report = run.report()
    assert done.returncode == 0
    assert report["failure"]["outcome"] == "supervisor_lost"
    assert [rank["rank"] for rank in report["ranks"]] == [0]
    assert run.marked() == []


def test_a_second_supervisor_over_the_traces_of_a_first_starts_no_rank_again(
    supervise: Supervise, tmp_path: Path
) -> None:
    evidence = tmp_path / "starts"
    run = supervise(shell=f"echo start >> {evidence}; exec sleep 3600")
    wait_until(lambda: run.attempt.pids and evidence.exists(), BUSY_SECONDS, "the program did not start")
    assert run.pid is not None

    os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: not run.is_running(), BUSY_SECONDS, "the supervisor did not die")
    subprocess.run(
        [sys.executable, "-P", "-m", "worker.supervisor", str(run.folder)], timeout=BUSY_SECONDS, capture_output=True
    )

    assert run.report()["failure"]["outcome"] == "supervisor_lost"
    assert evidence.read_text() == "start\n"
    assert run.marked() == []


def test_a_report_that_was_ready_when_the_supervisor_died_is_sent_as_it_is(supervise: Supervise, api: FakeApi) -> None:
    run = supervise(shell="echo ready; while [ ! -e go ]; do sleep 0.02; done; echo end; exit 3")
    wait_until(lambda: run.output() == b"ready\n", BUSY_SECONDS, "the program did not start")
    with api.lock:
        api.outage = 503
    (run.folder / "code" / "go").touch()
    wait_until(lambda: (run.folder / "report.json").exists(), BUSY_SECONDS, "no report was made")
    assert run.pid is not None
    os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: not run.is_running(), BUSY_SECONDS, "the supervisor did not die")
    with api.lock:
        api.outage = None

    command = [sys.executable, "-P", "-m", "worker.supervisor", str(run.folder)]
    subprocess.run([*command, "--finish", "supervisor_lost", "It died."], timeout=BUSY_SECONDS, capture_output=True)

    report = run.report()
    assert (report["failure"], report["ranks"][0]["exit_code"]) == (None, 3)
    assert run.output() == b"ready\nend\n"


def test_an_attempt_has_one_supervisor_however_often_it_is_asked_for(
    supervise: Supervise, api: FakeApi, nursery: Nursery
) -> None:
    run = supervise(shell="echo one; exec sleep 3600")
    wait_until(lambda: run.output() == b"one\n", BUSY_SECONDS, "the program did not start")

    second = nursery.spawn_supervisor(run.folder)
    wait_until(lambda: not is_alive(second), BUSY_SECONDS, "the second supervisor went on")

    assert run.is_running()
    assert run.output() == b"one\n"
    api.stop(run.plan.attempt_id)
    run.report()


def test_supervisors_outlive_the_nursery(tmp_path: Path, api: FakeApi) -> None:
    with Nursery() as nursery:
        run = Supervised(
            tmp_path / "agent", api, our_plan(1, shell="while [ ! -e go ]; do sleep 0.02; done"), nursery
        ).start()
        wait_until(lambda: run.attempt.pids, BUSY_SECONDS, "not started")
        assert nursery.pid is not None
        os.kill(nursery.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(nursery.pid or 0), BUSY_SECONDS, "the nursery lives")
        again = Supervised(tmp_path / "agent", api, our_plan(2, shell="true"), nursery).start()

        assert again.only_rank()["exit_code"] == 0
        (run.folder / "code" / "go").touch()
    assert run.only_rank()["exit_code"] == 0


# --- Fencing and outages ---------------------------------------------------------------------------------------------


def test_i05_a_fenced_attempt_is_killed_at_once_and_sends_nothing_more(supervise: Supervise, api: FakeApi) -> None:
    run = supervise(shell="trap '' TERM; echo ready; while true; do sleep 0.05; done", stop_grace_seconds=3600.0)
    wait_until(lambda: run.output() == b"ready\n", BUSY_SECONDS, "the program did not start")

    api.fence(run.plan.attempt_id)
    run.until_gone()

    assert run.marked() == []
    assert run.attempt.reports == []


def test_o15_a_job_notices_nothing_of_an_outage_and_its_log_is_byte_equal(
    supervise: Supervise, api: FakeApi, tmp_path: Path
) -> None:
    evidence = tmp_path / "lines"
    with CuttableProxy(api.url) as proxy:
        shell = f"for i in $(seq 1 400); do echo line-$i | tee -a {evidence}; sleep 0.005; done"
        run = supervise(server=proxy.url, shell=shell)
        wait_until(lambda: len(run.output()) > 100, BUSY_SECONDS, "no output")

        proxy.cut()
        wait_until(lambda: evidence.read_text().count("\n") >= 200, BUSY_SECONDS, "the job did not go on")
        proxy.restore()
        wait_until(lambda: len(run.output()) > 2000, BUSY_SECONDS, "nothing came after the outage")
        with api.lock:
            api.outage = 500
        wait_until(lambda: evidence.read_text().count("\n") >= 400, BUSY_SECONDS, "the job did not go on")
        wait_until(lambda: run.marked() == [], BUSY_SECONDS, "the job did not end")
        with api.lock:
            api.outage = None
        assert run.only_rank()["exit_code"] == 0

    assert run.output() == evidence.read_bytes()


def test_i20_an_answer_that_is_lost_repeats_no_byte(supervise: Supervise, api: FakeApi) -> None:
    with CuttableProxy(api.url) as proxy:
        run = supervise(server=proxy.url, shell="for i in $(seq 1 300); do echo line-$i; sleep 0.003; done")
        for _ in range(5):
            wait_for_more_output(run)
            proxy.lose_next_answer()
        run.report()

    assert run.output() == b"".join(b"line-%d\n" % i for i in range(1, 301))


@pytest.mark.parametrize("status", [401, 404])
def test_i05_only_a_fence_ends_a_job_and_no_other_refusal(supervise: Supervise, api: FakeApi, status: int) -> None:
    run = supervise(shell="echo ready; while [ ! -e go ]; do sleep 0.02; done; echo done")
    wait_until(lambda: run.output() == b"ready\n", BUSY_SECONDS, "the program did not start")

    with api.lock:
        api.outage = status
    (run.folder / "code" / "go").touch()
    wait_until(lambda: run.marked() == [], BUSY_SECONDS, "the job did not end by itself")
    assert run.is_running()
    with api.lock:
        api.outage = None

    assert run.only_rank()["exit_code"] == 0
    assert run.output() == b"ready\ndone\n"


def test_a_job_that_stops_when_cut_off_is_stopped(supervise: Supervise, api: FakeApi) -> None:
    with CuttableProxy(api.url) as proxy:
        # No program in place of the shell: while it takes over, its environment, and so its mark, is not to be seen.
        shell = "echo ready; while true; do sleep 0.05; done"
        run = supervise(server=proxy.url, shell=shell, disconnect_stop_seconds=6.0)
        wait_until(lambda: run.output() == b"ready\n", BUSY_SECONDS, "the program did not start")
        proxy.cut()
        wait_until(lambda: run.marked() == [], BUSY_SECONDS, "the ranks run on")
        proxy.restore()

        assert run.report()["stop_intent"] == "disconnected"


# --- Bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", range(5))
def test_o29_the_bytes_of_a_log_are_stored_unchanged(supervise: Supervise, shift: int) -> None:
    parts = ("é", "漢", "👩\u200d🔬")
    data = b"".join(b"a" * (4095 - shift) + part.encode() for part in parts) + b"\xff\xfe\x00 no newline at the end"
    code = f"import sys; sys.stdout.buffer.write({data!r})"
    run = supervise(run=python(code))

    assert run.only_rank()["exit_code"] == 0
    assert run.output() == data


def test_stdout_and_stderr_come_in_the_order_they_were_written(supervise: Supervise) -> None:
    run = supervise(shell="echo 1; echo 2 >&2; echo 3; echo 4 >&2")
    run.report()

    assert run.output() == b"1\n2\n3\n4\n"


def test_a_large_log_arrives_whole(supervise: Supervise) -> None:
    run = supervise(
        run=python("import sys\nfor i in range(40): sys.stdout.buffer.write(bytes([65 + i % 26]) * 131072)")
    )
    run.report()

    expected = b"".join(bytes([65 + i % 26]) * 131072 for i in range(40))
    assert hashlib.sha256(run.output()).hexdigest() == hashlib.sha256(expected).hexdigest()


def test_o33_the_first_print_is_readable_while_the_program_runs(supervise: Supervise, api: FakeApi) -> None:
    run = supervise(run=python("import time\nprint('first')\ntime.sleep(3600)"))

    wait_until(lambda: run.output() == b"first\n", BUSY_SECONDS, "the output is held back")
    api.stop(run.plan.attempt_id)
    run.report()


def test_o33_the_users_own_setting_of_buffering_wins(supervise: Supervise) -> None:
    run = supervise(
        shell='echo "$PYTHONUNBUFFERED/$OMP_NUM_THREADS"', env={"PYTHONUNBUFFERED": "", "OMP_NUM_THREADS": "3"}
    )
    run.report()

    assert run.output() == b"/3\n"


def test_events_arrive_in_whole_lines(supervise: Supervise, api: FakeApi) -> None:
    code = (
        "import os, time\n"
        "f = os.open(os.environ['GANGLINE_EVENTS_FILE'], os.O_WRONLY | os.O_APPEND)\n"
        "os.write(f, b'{\"step\": 1}\\n{\"st'); print('half', flush=True); time.sleep(3600)\n"
    )
    run = supervise(run=python(code))
    wait_until(lambda: run.output() == b"half\n", BUSY_SECONDS, "not started")
    wait_until(lambda: run.attempt.streams.get("events/0"), BUSY_SECONDS, "no events")

    assert bytes(run.attempt.streams["events/0"]) == b'{"step": 1}\n'
    api.stop(run.plan.attempt_id)
    run.report()
    assert bytes(run.attempt.streams["events/0"]) == b'{"step": 1}\n{"st'


# --- Devices and input -----------------------------------------------------------------------------------------------


def test_o36_the_assigned_devices_are_seen_as_given_and_in_order(supervise: Supervise) -> None:
    ids = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-41b3b6f0-7a4a-5c2e-a4cf-a2bd3b1b0e6c", "3")
    gpus = tuple(AssignedGPU(index=index, uuid=uuid) for index, uuid in enumerate(ids))
    run = supervise(shell='printf %s "$CUDA_VISIBLE_DEVICES"', gpus=gpus)
    run.report()

    assert run.output().decode() == ",".join(ids)


def test_o37_a_job_without_gpus_sees_none(supervise: Supervise) -> None:
    run = supervise(shell='printf "%s|" "${CUDA_VISIBLE_DEVICES-unset}"', gpus=(), env={"CUDA_VISIBLE_DEVICES": "0,1"})
    run.report()

    assert run.output() == b"|"


def test_o39_arguments_and_variables_reach_the_program_exactly(supervise: Supervise, tmp_path: Path) -> None:
    hostile = (";", "&& touch /tmp/x", "$(id)", "`id`", "*", "'\"", "a\nb", "", " ", "-e", "x" * 100_000, "é漢")
    code = script_folder(tmp_path, show="import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n")
    run = supervise(
        run=RunPlan(kind="script", script="show.py", args=hostile),
        code=code,
        python=sys.executable,
        env={f"HOSTILE_{index}": value for index, value in enumerate(hostile)} | {"odd.name-x": "kept"},
    )
    assert run.only_rank()["exit_code"] == 0

    arguments, variables = json.loads(run.output())
    assert tuple(arguments) == hostile
    assert tuple(variables[f"HOSTILE_{index}"] for index in range(len(hostile))) == hostile
    assert variables["odd.name-x"] == "kept"


def test_o39_an_argument_that_no_process_can_have_is_a_config_error(supervise: Supervise) -> None:
    too_large = supervise(run=RunPlan(kind="command", command=("true", "x" * 300_000))).report()
    with_nul = supervise(run=RunPlan(kind="command", command=("true", "a\0b"))).report()

    assert too_large["failure"]["outcome"] == with_nul["failure"]["outcome"] == "config_error"
    assert "too large" in too_large["failure"]["message"]
    assert "NUL" in with_nul["failure"]["message"]


def test_o54_a_rank_gets_nothing_of_the_agents_environment(
    tmp_path: Path, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_SECRET", "S3CR3T-7f")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    with Nursery() as nursery:
        run = Supervised(tmp_path / "agent", api, our_plan(1, shell="env; cat /proc/self/cmdline"), nursery).start()
        run.report()

    assert b"S3CR3T" not in run.output()
    assert b"gla_test" not in run.output()
    assert b"/somewhere" not in run.output()


# --- Code ------------------------------------------------------------------------------------------------------------


def test_a_bundle_is_fetched_unpacked_and_kept_for_the_next_attempt(supervise: Supervise, api: FakeApi) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        member = tarfile.TarInfo("hello.py")
        member.size = len(b"print('hello')")
        tar.addfile(member, io.BytesIO(b"print('hello')"))
    digest = f"sha256:{hashlib.sha256(archive.getvalue()).hexdigest()}"
    plan = {"script": "hello.py", "code": CodeSource(bundle=digest), "python": sys.executable}

    first = supervise(is_started=False, **plan)
    api.bundles[first.plan.attempt_id] = archive.getvalue()
    first.start().report()
    second = supervise(**plan)
    second.report()

    assert first.output() == second.output() == b"hello\n"


def test_a_bundle_that_arrives_changed_is_not_run(supervise: Supervise, api: FakeApi) -> None:
    run = supervise(
        is_started=False, script="x.py", code=CodeSource(bundle="sha256:" + "0" * 64), start_timeout_seconds=0.5
    )
    api.bundles[run.plan.attempt_id] = b"not what was asked for"
    failure = run.start().report()["failure"]

    assert failure["outcome"] == "launch_failed"
    assert "arrived as sha256:" in failure["message"]


def test_ranks_import_gangline_whatever_their_interpreter_has(supervise: Supervise) -> None:
    code = "import os, gangline, trainer; print(sorted(os.listdir(os.environ['PYTHONPATH'])))"
    run = supervise(run=RunPlan(kind="command", command=(sys.executable, "-c", code)), env={})

    assert run.only_rank()["exit_code"] == 0
    assert run.output() == b"['gangline', 'trainer']\n"
