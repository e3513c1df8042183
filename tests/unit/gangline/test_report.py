"""`gangline.report`: one JSON line per call, any number in a defined form, and never the end of a training."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import gangline
from gangline import report as report_function
from gangline.protocol.names import ENV_CHECKPOINT_FOLDER, ENV_EVENTS_FILE, ENV_STOP_FILE

report_module = sys.modules["gangline.report"]


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just begun."""
    for name, value in {
        "_num_reported": 0,
        "_is_line_torn": False,
        "_has_warned": False,
        "_stop_seen": False,
        "_stop_checked_at": -math.inf,
    }.items():
        monkeypatch.setattr(report_module, name, value)
    for name in (ENV_EVENTS_FILE, ENV_STOP_FILE, ENV_CHECKPOINT_FOLDER):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rank-0.jsonl"
    monkeypatch.setenv(ENV_EVENTS_FILE, str(path))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(text: str) -> Any:
        raise AssertionError(f"{text} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_call_appends_one_numbered_line(events: Path) -> None:
    gangline.report(1, 200, phase="training", loss=2.5)
    gangline.report(step=2, checkpoint=Path("/ckpt/step-2"), lr=1)

    first, second = read(events)
    assert isinstance(first.pop("at"), float)
    assert first == {
        "seq": 1,
        "kind": "progress",
        "step": 1,
        "total_steps": 200,
        "phase": "training",
        "metrics": {"loss": 2.5},
        "checkpoint": None,
    }
    assert (second["seq"], second["metrics"], second["checkpoint"]) == (2, {"lr": 1}, "/ckpt/step-2")


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (1e400, "Infinity"),
        (10**400, "Infinity"),
        (-(10**400), "-Infinity"),
        (2**53, 2**53),
        (2**53 + 1, float(2**53)),
        (True, 1),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
    ],
)
def test_every_number_has_a_defined_form(events: Path, value: Any, stored: Any) -> None:
    report_function(loss=value)

    (event,) = read(events)
    assert event["metrics"] == {"loss": stored}
    assert type(event["metrics"]["loss"]) is type(stored)


def test_numpy_and_torch_scalars_are_numbers(events: Path) -> None:
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")

    report_function(
        step=torch.tensor(3),
        a=numpy.float32(0.5),
        b=numpy.int64(7),
        c=torch.tensor(0.25),
        d=torch.tensor(float("nan")),
        e=torch.tensor([2.0]),
        f=torch.tensor(1.5, requires_grad=True).detach(),
        g=numpy.bool_(True),
    )

    (event,) = read(events)
    assert event["step"] == 3
    assert event["metrics"] == {"a": 0.5, "b": 7, "c": 0.25, "d": "NaN", "e": 2.0, "f": 1.5, "g": 1}


@pytest.mark.parametrize("value", ["0.5", None, [1.0], {"a": 1}, b"1", 1 + 2j, object()])
def test_what_is_no_number_is_refused_by_name(events: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="val_loss"):
        report_function(val_loss=value)
    assert not events.exists()


def test_a_tensor_of_several_values_is_refused_with_the_fix(events: Path) -> None:
    torch = pytest.importorskip("torch")

    with pytest.raises(TypeError, match=r"loss.*mean"):
        report_function(loss=torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({f"m{i}": 1 for i in range(10_000)}, "10000 metrics"),
        ({"m" * 1_000_000: 1}, "1000000 characters"),
        ({"m" * 201: 1}, "200"),
        ({"step": -1}, "step"),
        ({"step": 0.5}, "step"),
        ({"phase": "p" * 201}, "phase"),
        ({"checkpoint": "c" * 5000}, "checkpoint"),
        ({f"{i:03}" + "\x01" * 190: 1 for i in range(100)}, "bytes"),
    ],
)
def test_what_is_too_much_is_refused_with_a_short_message(events: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        report_function(**arguments)
    assert len(str(caught.value)) < 300
    assert not events.exists()


def test_the_largest_event_is_one_line_of_at_most_64_kib(events: Path) -> None:
    metrics: dict[str, Any] = {f"{i:03}" + "漢" * 197: 1.2345678901234567e-300 for i in range(90)}
    report_function(phase="é" * 200, **metrics)

    data = events.read_bytes()
    assert data.count(b"\n") == 1
    assert len(data) <= report_module.MAX_LINE_BYTES
    read(events)


def test_half_characters_do_no_harm(events: Path) -> None:
    report_function(phase="a\ud800b", loss=1)

    assert read(events)[0]["phase"] == "a?b"


def test_outside_a_job_nothing_happens_but_mistakes_show() -> None:
    gangline.report(1, loss=0.5)
    assert gangline.should_stop() is False
    assert gangline.stop_reason() is None
    assert gangline.checkpoint_dir() is None
    with pytest.raises(TypeError):
        gangline.report(loss="0.5")


def test_a_missing_folder_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ENV_EVENTS_FILE, str(tmp_path / "gone" / "rank-0.jsonl"))

    for step in range(5):
        gangline.report(step, loss=0.5)

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "Training goes on" in captured.err


def test_a_full_disk_costs_only_the_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    monkeypatch.setenv(ENV_EVENTS_FILE, "/dev/full")

    gangline.report(1, loss=0.5)

    assert "No space left" in capsys.readouterr().err


def test_a_line_that_the_disk_cut_short_spoils_no_other(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
    report_function(1, loss=1.0)
    monkeypatch.setattr(os, "write", write)
    report_function(2, loss=2.0)

    torn, whole = events.read_text().splitlines()
    assert len(torn) == 20
    assert json.loads(whole)["step"] == 2


def test_lines_of_several_threads_never_mix(events: Path) -> None:
    def work(number: int) -> None:
        for step in range(50):
            metrics: dict[str, Any] = {f"thread_{number}": step}
            report_function(step, **metrics)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(event["seq"] for event in read(events)) == list(range(1, 201))


def test_a_forked_child_counts_for_itself(events: Path) -> None:
    code = (
        "import os, gangline\n"
        "gangline.report(1)\n"
        "child = os.fork()\n"
        "gangline.report(2)\n"
        "child and os.waitpid(child, 0)\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

    assert sorted(event["seq"] for event in read(events)) == [1, 1, 2]


def test_the_stop_file_asks_to_stop_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = tmp_path / "stop"
    monkeypatch.setenv(ENV_STOP_FILE, str(stop))
    now = [100.0]
    monkeypatch.setattr(report_module.time, "monotonic", lambda: now[0])

    assert gangline.should_stop() is False
    stop.write_text("time_limit\n")
    assert gangline.should_stop() is False, "looked at the file system a moment ago"
    now[0] += 1
    assert gangline.should_stop() is True
    assert gangline.stop_reason() == "time_limit"
    stop.unlink()
    assert gangline.should_stop() is True, "a stop is never taken back"


def test_asking_to_stop_each_step_costs_next_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    stop = str(tmp_path / "stop")
    monkeypatch.setenv(ENV_STOP_FILE, stop)
    monkeypatch.setattr(report_module.time, "monotonic", lambda: 5.0)
    monkeypatch.setattr(os.path, "exists", lambda path: looks.append(path) is not None)  # type: ignore[func-returns-value]  # counts, and says no

    for _ in range(10_000):
        gangline.should_stop()

    assert looks.count(stop) == 1, "other threads of this process may look at files of their own"


def test_the_checkpoint_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_CHECKPOINT_FOLDER, str(tmp_path / "job" / "checkpoints"))

    assert gangline.checkpoint_dir() == tmp_path / "job" / "checkpoints"
    assert (tmp_path / "job" / "checkpoints").is_dir()


def test_importing_the_package_in_any_order_leaves_report_a_function() -> None:
    for statement in ("import gangline", "import gangline.report", "from gangline.report import should_stop"):
        code = f"{statement}\nimport gangline, gangline.report\ngangline.report(1, loss=0.5)\nprint('fine')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout == "fine\n"
