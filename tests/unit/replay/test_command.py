"""`gang replay` as typed: one table with yardstick, policies and oracle; the same as JSON; and its faults."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gangline.cli.errors import error_lines
from gangline.cli.exit_codes import of_error
from gangline.client.errors import GanglineError
from gangline.protocol.outcomes import ExitCode
from service.replay.command import replay
from service.replay.engine import ProductionEngine
from service.scheduler.plan import Plan
from tests.support.child import hear_interrupts
from tests.support.wait import wait_until

TRACES = Path(__file__).resolve().parents[2] / "data" / "traces"


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A trace of two teams, with a queue."""
    draw = random.Random(7)
    lines = [
        f"j{row},{row * 300},{draw.randint(600, 9000)},{draw.choice((1, 1, 2, 8, 8))},{'ab'[row % 2]}"
        for row in range(80)
    ]
    path = tmp_path / "small.csv"
    path.write_text("\n".join(["job_id,submit_s,duration_s,gpus,team", *lines]))
    return str(path)


def gang(*words: str) -> Result:
    """Run `gang replay` in this process."""
    return CliRunner().invoke(replay, [*words], catch_exceptions=True, prog_name="gang replay")


def items(result: Result) -> dict[str, dict[str, float]]:
    """The rows of the JSON by policy."""
    assert result.exit_code == 0, result.output
    return {row["policy"]: row for row in json.loads(result.stdout)["items"]}


def test_it_prints_one_table_with_yardstick_policies_and_oracle(small: str) -> None:
    result = gang(small, "--nodes", "3", "--policy", "fifo,time-left", "--jobs", "1")
    assert result.exit_code == 0, result.output
    heading, header, *rows = result.stdout.splitlines()
    assert heading.startswith("small.csv: 80 jobs on 3 x 8 GPUs, ")
    assert "human limits, 100% report (±20%), 100% preemptible (all), grace 0 s, restore 60 s, seed 1" in heading
    assert header.split()[:3] == ["POLICY", "JCT", "h"]
    assert [row.split()[0] for row in rows] == ["fifo+easy", "fifo", "time-left", "srtf"]
    assert "JAIN" in header, "teams are compared where there are several"
    assert "LATE" not in header


def test_the_json_has_the_same_rows_and_every_seed(small: str) -> None:
    result = gang(small, "--nodes", "3", "--jobs", "1", "--seeds", "2", "--first-seed", "5", "-o", "json")
    told = json.loads(result.stdout)
    assert (told["trace"], told["jobs"], told["nodes"], told["seeds"]) == ("small.csv", 80, 3, [5, 6])
    rows = items(result)
    assert list(rows) == ["fifo+easy", "time-left", "srtf"]
    ours, bound = rows["time-left"], rows["srtf"]
    by_seed = [one["mean_jct_hours"] for one in ours["by_seed"]]  # type: ignore[attr-defined]
    assert ours["mean_jct_hours"] == pytest.approx(sum(by_seed) / 2)
    assert ours["over"] == pytest.approx(ours["mean_jct_hours"] / bound["mean_jct_hours"])
    assert ours["over_least"] <= ours["over"] <= ours["over_most"]
    assert bound["over"] == 1.0


def test_replays_in_processes_side_by_side_print_the_same(small: str) -> None:
    words = (small, "--nodes", "3", "--seeds", "2", "--alone", "-o", "json")
    assert gang(*words, "--jobs", "2").stdout == gang(*words, "--jobs", "1").stdout


def test_a_team_alone_on_its_part_is_the_measure_of_late_jobs(small: str) -> None:
    rows = items(gang(small, "--nodes", "3", "--jobs", "1", "--alone", "-o", "json"))
    assert all(0.0 <= row["late_percent"] < 100.0 for row in rows.values())


def test_the_assumptions_reach_the_replay(small: str) -> None:
    def jct(*words: str) -> float:
        return items(gang(small, "--nodes", "3", "--jobs", "1", "-o", "json", *words))["time-left"]["mean_jct_hours"]

    usual = jct()
    for words in (("--preemptible", "0"), ("--preemption", "none"), ("--reports", "0%"), ("--restore", "10m"),
                  ("--grace", "60"), ("--limits", "true"), ("--report-error", "90%")):  # fmt: skip
        assert jct(*words) != usual, words


def test_without_preemption_nothing_is_stopped(small: str) -> None:
    for words in (("--preemptible", "0%"), ("--preemption", "none")):
        rows = items(gang(small, "--nodes", "3", "--jobs", "1", "-o", "json", *words))
        assert rows["time-left"]["preemptions_per_job"] == 0


def test_all_faults_are_told_at_once_with_what_each_takes(small: str) -> None:
    error = gang(small, "--nodes", "0", "--policy", "fivo", "--reports", "lots").exception
    assert isinstance(error, GanglineError)
    assert of_error(error) == ExitCode.USAGE
    assert error_lines(error) == [
        "--policy: there is no 'fivo', did you mean fifo? There are time-left, fifo, fifo+easy, srtf",
        "--nodes: '0' is no whole number from 1 to 100,000",
        "--reports: 'lots' is no share from 0% to 100%; write it like 30%",
        "fix: gang replay --help shows what it takes",
    ]


def test_faults_of_the_file_and_of_the_options_are_told_together(tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("submit_s,duration_s,gpus\n0,0,1\n")
    result = gang(str(bad), "--seeds", "none")
    messages = [problem.message for problem in result.exception.errors]  # type: ignore[union-attr]
    assert messages[0] == "'none' is no whole number from 1 to 1,000"
    assert "line 2: duration_s is '0'" in messages[1]


def test_a_scheduler_that_loses_a_job_is_reported_as_a_defect(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProductionEngine, "decide", lambda self, now: Plan(stops=(), places=(), nominations=()))
    result = gang(small, "--nodes", "3", "--jobs", "1")
    assert "80 jobs wait for ever" in str(result.exception)
    assert "defect of the scheduler" in result.exception.fix  # type: ignore[union-attr]


def test_each_run_is_checked_before_its_figures_are_shown(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.replay.study.faults_of", lambda record: ["GPU 0 was held twice"])
    result = gang(small, "--nodes", "3", "--jobs", "1")
    assert "fifo+easy, seed 1: 1 faults: GPU 0 was held twice" in str(result.exception)


def test_ctrl_c_ends_every_process_without_a_dump() -> None:
    words = [str(TRACES / "itp03.csv.gz"), "--seeds", "500", "--jobs", "2", "--nodes", "20"]
    code = f"from gangline.cli import main; from service.replay.command import replay; replay({words})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=hear_interrupts,
    )  # fmt: skip
    try:
        wait_until(lambda: len(group_of(process.pid)) >= 4, 60, "two replays beside this one")
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1, "as click says it; `gang` makes it 130"
    assert said.strip() == "Aborted!"
    wait_until(lambda: not group_of(process.pid), 60, "the last process of the group gone")


def group_of(leader: int) -> list[int]:
    """The processes of a process group that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            found += [int(stat.parent.name)] if int(group) == leader and state != "Z" else []
    return found
