"""The pure parts of the client: references, positions, server-sent events, records, job files, settings, exit codes."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gangline.cli import exit_codes
from gangline.cli.errors import error_lines
from gangline.cli.log_lines import LineAssembler
from gangline.client.config import StoredConfig, normalise_url, read_config, resolve, write_config
from gangline.client.errors import CLASSES_BY_CODE, GanglineError, InvalidSpec, NotAllowed, ServerFailed, from_problem
from gangline.client.follow import Position, parse_position
from gangline.client.job_file import folder_to_pack, located, read_job_file, with_bundle
from gangline.client.log_models import Metrics
from gangline.client.models import Job, build
from gangline.client.references import ByAge, ById, ByName, parse_reference
from gangline.client.server_sent_events import EventParser
from gangline.protocol.outcomes import ExitCode, Outcome

# --- References and positions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        (12, ById(12)),
        ("12", ById(12)),
        ("#12", ById(12)),
        ("-1", ByAge(1)),
        (-2, ByAge(2)),
        ("~3", ByName("~3")),
        ("gpt-1b", ByName("gpt-1b")),
        ("Ünï/côdé 漢字", ByName("Ünï/côdé 漢字")),
        ("-leading-dash", ByName("-leading-dash")),
        ("..", ByName("..")),
    ],
)
def test_a_job_is_named_by_id_age_or_name(text: str | int, reference: object) -> None:
    assert parse_reference(text) == reference


@pytest.mark.parametrize("text", ["", "  ", "0", 0, "00", "-0", "-1000", "9" * 30])
def test_what_names_no_job_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match="job"):
        parse_reference(text)


def test_positions_are_read() -> None:
    assert parse_position("a1,r0:812,r1:640") == Position(attempt=1, offsets={0: 812, 1: 640})
    for text in ("", "812", "a1;r0:1", "r0", "r0:1:2", "a", "r-1:5", "a1,"):
        with pytest.raises(ValueError, match="position"):
            parse_position(text)


# --- Server-sent events --------------------------------------------------------------------------------------------

STREAM = (
    ": ping\n\n"
    "id: a1,r0:3\nevent: log\ndata: {\"text\": \"é\"}\n\n"
    "event: log\r\ndata: one\r\ndata: two\r\n\r\n"
    "data:no space\n\n"
    "id: 7\n\n"
    "event: end\ndata: {}\n\n"
    "event: log\ndata: cut off"
).encode()  # fmt: skip
EVENTS = [
    ("log", '{"text": "é"}', "a1,r0:3"),
    ("log", "one\ntwo", "a1,r0:3"),
    ("message", "no space", "a1,r0:3"),
    ("end", "{}", "7"),
]


@given(st.lists(st.integers(1, 40), max_size=60))
def test_events_are_the_same_in_whatever_pieces_they_come(sizes: list[int]) -> None:
    parser, events, rest = EventParser(), [], STREAM
    for size in [*sizes, len(STREAM)]:
        events += list(parser.feed(rest[:size]))
        rest = rest[size:]

    assert [(event.event, event.data, event.id) for event in events] == EVENTS


def test_a_long_event_in_small_pieces_is_read_in_linear_time() -> None:
    parser = EventParser()
    data = b"data: " + b"x" * 300_000 + b"\n\n"
    events = [event for begin in range(0, len(data), 100) for event in parser.feed(data[begin : begin + 100])]
    assert len(events[0].data) == 300_000


# --- Records -------------------------------------------------------------------------------------------------------


def test_a_record_takes_what_it_knows_and_keeps_the_rest_raw() -> None:
    data: dict[str, Any] = {"id": 1, "name": "gpt", "state": "running", "team": None, "version": None, "newer": 1}
    job = build(Job, data)
    assert (job.id, job.team, job.version, job.raw) == (1, None, 0, data)
    assert not job.is_terminal


@pytest.mark.parametrize("data", [None, [], {}, {"id": "x", "name": "n", "state": "s"}, {"id": 1, "name": "n"}])
def test_what_is_no_job_is_an_error_of_the_server(data: Any) -> None:
    with pytest.raises(ServerFailed, match="job"):
        build(Job, data)


def test_curves_keep_what_is_not_finite() -> None:
    keys = {"loss": {"step": [1, 2, 3], "last": [1.5, "NaN", "-Infinity"], "min": [1.5, None, None], "max": [1, 2, 3]}}
    series = build(Metrics, {"attempt": 1, "keys": keys}).keys["loss"]
    assert series.last[0] == 1.5
    assert math.isnan(series.last[1])
    assert series.last[2] == -math.inf
    assert math.isnan(series.min[1])


# --- Job files -----------------------------------------------------------------------------------------------------

DIGEST = "sha256:" + "0" * 64
FILES = [
    "name: a\nrun: {script: t.py}\n",
    "name: a\nrun: {script: t.py}",
    "# a comment\n\nname: a\nenv:\n  K: v\n# the end\n",
    "name: a\ncode:\nrun: {script: t.py}\n",
    "name: a\ncode: ~\nrun: {script: t.py}\n",
    "name: a\ncode: {path: ./x}   # why\nrun: {script: t.py}\n",
    "name: a\ncode:\n  # here\n  path: x\n\n\nrun: {script: t.py}\n",
    "name: a\ncode: {\n  path: x,\n}\nrun: {script: t.py}\n",
    "name: a\nrun:\n  command: |\n    echo hello\n    echo again\n",
    "  name: a\n  code:\n    path: x\n  run: {script: t.py}\n",
    "---\nname: a\nrun: {script: t.py}\n...\n",
    '{"name": "a", "run": {"script": "t.py"}}',
    '{\n  "name": "a",\n  "code": {"path": "x"}\n}\n',
]


@pytest.mark.parametrize("text", FILES)
def test_the_bundle_is_put_in_and_every_other_line_keeps_its_number(text: str) -> None:
    job_file = read_job_file(text)

    body, kind = with_bundle(job_file, DIGEST)

    before, after = yaml.safe_load(text), yaml.safe_load(body)
    assert after == {**before, "code": {"bundle": DIGEST}}
    assert kind == "application/yaml"
    for number, line in enumerate(text.split("\n")):
        if line.lstrip().startswith(("run:", "name:", "env:", '"name"')):
            assert body.decode().split("\n")[number].strip() == line.strip()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: a\n", "."),
        ("name: a\ncode: {path: sub}\n", "sub"),
        ("name: a\ncode: {path: ../up}\n", "../up"),
        ("name: a\ncode: {path: /shared}\n", None),
        ("name: a\ncode: {bundle: x}\n", None),
        ("name: a\ncode: {}\n", None),
        ("name: a\ncode: 5\n", None),
        ("", None),
        ("- a\n", None),
    ],
)
def test_which_folder_a_job_file_brings(tmp_path: Path, text: str, expected: str | None) -> None:
    (tmp_path / "job.yaml").write_text(text)
    job_file = read_job_file(tmp_path / "job.yaml")
    assert folder_to_pack(job_file) == (None if expected is None else tmp_path / expected)
    assert folder_to_pack(read_job_file(tmp_path / "job.yaml", (("code.path", "/x"),))) is None


def test_text_and_objects_without_code_bring_none() -> None:
    assert folder_to_pack(read_job_file("name: a\nrun: {command: [x]}\n")) is None
    assert folder_to_pack(read_job_file({"name": "a"})) is None
    assert folder_to_pack(read_job_file({"name": "a", "code": {"path": "x"}})) == Path("x")
    assert folder_to_pack(read_job_file({"run": {"recipe": "mlp"}, "code": {"path": "x"}})) == Path("x")
    assert (
        with_bundle(read_job_file({"name": "a"}), DIGEST)[0]
        == f'{{"name": "a", "code": {{"bundle": "{DIGEST}"}}}}'.encode()
    )


def test_faults_are_found_in_the_users_own_lines() -> None:
    job_file = read_job_file("name: a\nresources:\n  num_gpu: 4\nrun:\n  args:\n    - x\n    - 5\n")
    problems = [
        {"pointer": p, "message": "m"} for p in ("resources.num_gpu", "run.args.1", "run.args[0]", "run.gone", "x")
    ]
    error = InvalidSpec("bad", problem={"errors": problems})
    places = [(problem.line, problem.column) for problem in located(job_file, error.errors)]
    assert places == [(3, 3), (7, 7), (6, 7), (4, 1), (None, None)]


# --- Settings ------------------------------------------------------------------------------------------------------


def test_arguments_go_before_environment_before_file(tmp_path: Path) -> None:
    environ = {"GANGLINE_CONFIG_FOLDER": str(tmp_path)}
    with pytest.raises(NotAllowed, match="no server"):
        resolve(None, None, environ)
    write_config(tmp_path, StoredConfig(url="http://stored", token="glu_stored"))
    assert (resolve(None, None, environ).url, resolve(None, None, environ).token) == ("http://stored", "glu_stored")
    environ |= {"GANGLINE_URL": "http://env", "GANGLINE_TOKEN": "glu_env"}
    assert (resolve(None, None, environ).url, resolve(None, None, environ).token) == ("http://env", "glu_env")
    assert resolve("http://arg", "glu_arg", environ).url == "http://arg"
    assert (tmp_path / "config.json").stat().st_mode & 0o777 == 0o600
    assert read_config(tmp_path) == StoredConfig(url="http://stored", token="glu_stored")


def test_a_damaged_config_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(GanglineError) as caught:
        resolve(None, None, {"GANGLINE_CONFIG_FOLDER": str(tmp_path)})
    assert "gang login" in caught.value.fix
    assert resolve("http://x", "t", {"GANGLINE_CONFIG_FOLDER": str(tmp_path)}).url == "http://x"


@pytest.mark.parametrize(
    ("url", "address"),
    [("gpu:8800", "http://gpu:8800"), ("https://gpu.example/", "https://gpu.example"), (" http://x/y/ ", "http://x/y")],
)
def test_addresses_are_made_whole(url: str, address: str) -> None:
    assert normalise_url(url) == address


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "http://", "http://u:p@x", "http://x:99999999", "http://x y", "http://[::1"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(GanglineError, match="not a server address"):
        normalise_url(url)


# --- Errors and exit codes -----------------------------------------------------------------------------------------


def test_every_code_of_the_server_has_an_exit_code() -> None:
    for code in CLASSES_BY_CODE:
        assert exit_codes.of_error(from_problem(422, {"code": code})) is not ExitCode.UNEXPECTED


def test_every_outcome_has_an_exit_code_of_wait() -> None:
    codes = {outcome: exit_codes.of_ended_job("failed", outcome) for outcome in Outcome}
    assert {outcome for outcome, code in codes.items() if code == ExitCode.WAIT_LOST} == {
        Outcome.NODE_LOST,
        Outcome.SUPERVISOR_LOST,
        Outcome.TIME_LIMIT,
    }
    assert exit_codes.of_ended_job("succeeded", "succeeded") == ExitCode.DONE
    assert exit_codes.of_ended_job("cancelled", "cancelled") == ExitCode.WAIT_CANCELLED


def test_a_fault_reads_as_one_line() -> None:
    problem = {"errors": [{"pointer": "resources.num_gpu", "line": 7, "column": 3, "message": "unknown key",
                           "suggestion": "resources.gpus"}]}  # fmt: skip
    error = InvalidSpec("1 problem", fix="Correct it.", problem=problem)
    assert error_lines(error, label="gpt.yaml") == [
        "gpt.yaml:7:3  resources.num_gpu: unknown key. Did you mean resources.gpus?",
        "fix: Correct it.",
    ]


# --- Lines of logs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_chunks_of_any_size_give_the_same_lines(seed: int) -> None:
    text = "first\nsecond é\n\n 10%\r 20%\r 30%\nlast without an end"
    dice = random.Random(seed)
    assembler, lines = LineAssembler(colour=False, raw=False), []
    while text:
        size = dice.randrange(1, 12)
        lines += assembler.feed(0, text[:size])
        text = text[size:]
    assert lines + assembler.flush() == ["first", "second é", "", " 30%", "last without an end"]


def test_ranks_stand_in_front_and_do_not_mix() -> None:
    assembler = LineAssembler(colour=False, raw=False)
    assembler.show_ranks((0, 11))
    assert assembler.feed(0, "a") == []
    assert assembler.feed(11, "b\n") == ["r11 b"]
    assert assembler.feed(0, "c\n") == ["r0  ac"]


def test_a_bar_without_an_end_takes_no_memory() -> None:
    assembler = LineAssembler(colour=False, raw=False)
    for step in range(20_000):
        assert assembler.feed(0, f"\r{step} of many {'#' * 40}") == []
    assert sum(map(len, assembler._pending.values())) < 200
    long = assembler.feed(1, "x" * 100_000)
    assert sum(map(len, long)) == 100_000
