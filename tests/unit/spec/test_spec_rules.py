"""Rules of a job file beyond types: names (O-38), exact words (O-39), variables, and contradictions."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from service.domain.text import problem_with_name
from service.schemas.parse_spec import InvalidSpec, Problem, parse_spec

DIGEST = "sha256:" + "a" * 64
SCRIPT = {"name": "x", "run": {"script": "train.py"}, "code": {"bundle": DIGEST}}
COMMAND = {"name": "x", "run": {"command": ["true"]}}


def problems_of(document: dict[str, Any]) -> dict[str, Problem]:
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(json.dumps(document).encode(), "application/json", ())
    return {problem.pointer: problem for problem in caught.value.problems}


# --- O-38: names ---------------------------------------------------------------------------------------------------

GOOD_NAMES = [
    "gpt",
    "n" * 200,
    "Ünï/côdé 漢字",
    "😀",
    "👩‍👩‍👧 family",
    "-leading dash",
    "--help",
    "..",
    "../../etc/passwd",
    "a  b",
    "Robert'); DROP TABLE jobs;--",
    "$(id) `id` ; && | > *",
    '"quoted"',
    "<script>alert(1)</script>",
    "%s {} \\n",
    "עברית",
    "0",
    "e\u0301",
]
BAD_NAMES = [
    ("", "is empty"),
    ("n" * 201, "has 201 characters"),
    ("n" * 300, "has 300 characters"),
    ("a\nb", "a newline (U+000A, character 2)"),
    ("a\x00b", "a control character (U+0000"),
    ("a\tb", "a control character"),
    ("a\rb", "a control character"),
    ("\x1b[31mred", "a control character (U+001B"),
    ("\x7f", "a control character"),
    ("a\x85b", "a control character"),
    ("a\u202eb", "changes the direction of text (U+202E"),
    ("\u200fa", "changes the direction"),
    ("a\u2066b", "changes the direction"),
    ("a\u2028b", "a line separator"),
    ("a\ud800", "a lone surrogate"),
    (" a", "begins or ends with a space"),
    ("a ", "begins or ends with a space"),
    ("a\u3000", "begins or ends with a space"),
    (" ", "begins or ends with a space"),
    ("\u200b", "nothing that can be seen"),
    ("\u200d\ufe0f", "nothing that can be seen"),
]


@pytest.mark.parametrize("name", GOOD_NAMES)
@pytest.mark.parametrize("kind", ["application/json", "application/yaml"])
def test_o38_an_accepted_name_is_kept_unchanged(name: str, kind: str) -> None:
    document = {**COMMAND, "name": name, "team": name, "tags": {name: name}}
    text = json.dumps(document) if kind == "application/json" else yaml.safe_dump(document, allow_unicode=True)
    spec = parse_spec(text.encode(), kind, ())

    assert (spec.name, spec.team, spec.tags) == (name, name, {name: name})


@pytest.mark.parametrize(("name", "reason"), BAD_NAMES)
def test_o38_a_refused_name_is_refused_by_reason_wherever_it_stands(name: str, reason: str) -> None:
    problems = problems_of({**COMMAND, "name": name, "team": name})

    assert reason in problems["name"].message
    assert reason in problems["team"].message
    assert reason in next(iter(problems_of({**COMMAND, "tags": {name: "x"}}).values())).message


@pytest.mark.parametrize(("name", "reason"), BAD_NAMES)
def test_o38_the_rule_serves_user_names_too(name: str, reason: str) -> None:
    assert reason in (problem_with_name(name) or "")


def test_a_value_of_a_tag_may_be_empty() -> None:
    spec = parse_spec(json.dumps({**COMMAND, "tags": {"done": ""}}).encode(), "application/json", ())

    assert spec.tags == {"done": ""}


# --- O-39: words reach the program exactly --------------------------------------------------------------------------

WORDS = ["a;b", "x && y", "$(id)", "`id`", "*", "'single'", '"double"', "two\nlines", "", " ", "漢字", "\\", "\x01"]
WORDS += ["x" * 100_000]


@pytest.mark.parametrize("way", ["args", "command", "env"])
def test_o39_every_word_is_kept_exactly(way: str) -> None:
    document = {
        "args": {**SCRIPT, "run": {"script": "train.py", "args": WORDS}},
        "command": {**COMMAND, "run": {"command": ["prog", *WORDS]}},
        "env": {**COMMAND, "env": {f"W{number}": word for number, word in enumerate(WORDS)}},
    }[way]
    spec = parse_spec(json.dumps(document).encode(), "application/json", ())
    kept = {"args": spec.run.args, "command": (spec.run.command or ())[1:], "env": tuple(spec.env.values())}[way]

    assert kept == tuple(WORDS)


def test_o39_the_string_form_is_one_shell_script_as_it_was_written() -> None:
    text = "cd /tmp; echo '$(id)' && python train.py \\\n  --lr 3e-4 *\n"
    spec = parse_spec(json.dumps({**COMMAND, "run": {"command": text}}).encode(), "application/json", ())

    assert (spec.run.shell, spec.run.command) == (text, None)


def test_o39_a_megabyte_of_arguments_is_taken_and_more_is_not() -> None:
    words = ["x" * 99_999] * 10
    spec = parse_spec(json.dumps({**SCRIPT, "run": {"script": "a.py", "args": words}}).encode(), "application/json", ())

    assert spec.run.args == tuple(words)
    problems = problems_of({**SCRIPT, "run": {"script": "a.py", "args": words + words}})
    assert "at most 1048576 are allowed" in problems["run.args"].message


@pytest.mark.parametrize(
    ("parts", "pointer", "message"),
    [
        ({"run": {"script": "a.py", "args": ["a\0b"]}}, "run.args[0]", "NUL byte (character 2)"),
        ({"run": {"script": "a\0.py"}}, "run.script", "NUL byte"),
        ({"run": {"command": ["a", "é\0"]}}, "run.command[1]", "NUL byte"),
        ({"run": {"command": "a\0b"}}, "run.command", "NUL byte"),
        ({"env": {"A": "\0"}}, "env.A", "NUL byte"),
        ({"code": {"path": "/a\0b"}}, "code.path", "NUL byte"),
        ({"python": "py\0"}, "python", "NUL byte"),
        ({"run": {"script": "a.py", "args": ["\ud800"]}}, "run.args[0]", "lone surrogate"),
        ({"run": {"script": "a.py", "args": ["x" * 131_072]}}, "run.args[0]", "Linux hands at most 131071"),
        ({"run": {"command": ["é" * 70_000]}}, "run.command[0]", "has 140000 bytes"),
        ({"env": {"A": "x" * 131_070}}, "env.A", "Linux hands at most"),
        ({"env": {f"A{n}": "x" * 100_000 for n in range(6)}}, "env", "at most 524288"),
    ],
)
def test_o39_what_no_program_can_be_given_is_refused(parts: dict[str, Any], pointer: str, message: str) -> None:
    assert message in problems_of({**SCRIPT, **parts})[pointer].message


# --- Variables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1A", "A-B", "A B", "", "A=B", "é", "A\n", "A.B"])
def test_an_invalid_variable_name_is_refused(name: str) -> None:
    (problem,) = problems_of({**COMMAND, "env": {name: "x"}}).values()

    assert "is not a name for a variable" in problem.message


@pytest.mark.parametrize("name", ["GANGLINE_ATTEMPT", "GANGLINE_", "GANGLINE_MINE"])
def test_our_own_variables_cannot_be_set(name: str) -> None:
    assert "are set by Gangline" in problems_of({**COMMAND, "env": {name: "x"}})[f"env.{name}"].message


# --- Contradictions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "pointer", "message"),
    [
        ({"run": {}}, "run", "does not say what to run"),
        ({"run": {"script": "a.py", "command": "ls"}}, "run.command", "exclude each other"),
        ({"run": {"command": "ls", "args": ["a"]}}, "run.args", "belongs to run.script"),
        ({"run": {"command": []}}, "run.command", "names no program"),
        ({"run": {"command": ["", "x"]}}, "run.command", "names no program"),
        ({"run": {"command": "  "}}, "run.command", "is empty"),
        ({"run": {"command": ["ls", 1]}}, "run.command", "list of strings, or one string for the shell"),
        ({"run": {"script": "a.py"}, "code": None}, "run.script", "no code to find the script in"),
        ({"run": {"script": "/a.py"}}, "run.script", "relative to the code"),
        ({"run": {"script": "a/../../b.py"}}, "run.script", "leads out of the code folder"),
        ({"run": {"script": "-c"}}, "run.script", "is not a path of a script"),
        ({"run": {"script": ""}}, "run.script", "is empty"),
        ({"code": {"bundle": DIGEST, "path": "/a"}}, "code.path", "exclude each other"),
        ({"code": {"path": "relative"}}, "code.path", "absolute folder"),
        ({"resources": {"nodes": 2, "gpus_per_node": 2, "gpus": 5}}, "resources.gpus", "2 nodes × 2 GPUs are 4, not 5"),
        ({"resources": {"nodes": 2, "gpus": 3}}, "resources.gpus", "split evenly over 2 nodes"),
        ({"resources": {"gpus_per_node": 2, "gpus": 3}}, "resources.gpus", "split into nodes of 2"),
        ({"resources": {"gpus_per_node": 0, "gpus": 3}}, "resources.gpus", "split into nodes of 0"),
        ({"run": {"command": "ls"}, "processes_per_node": 2}, "processes_per_node", "a command runs once per node"),
        ({"run": {"script": "a.py", "args": {"lr": 1}}}, "run.args", "must be a list of strings for run.script"),
        ({"parallel": {"strategy": "ddp"}}, "parallel", "brings its own loop"),
        ({"parallel": {"strategy": "dpp", "x": 1}}, "parallel", "brings its own loop"),
        ({"train": {"steps": "x", "stesp": 1}}, "train", "brings its own loop"),
        ({"run": {"command": "ls"}, "checkpoint": {"every": "5m"}}, "checkpoint", "brings its own loop"),
    ],
)
def test_a_contradiction_is_the_one_problem(document: dict[str, Any], pointer: str, message: str) -> None:
    problems = problems_of({**SCRIPT, **document})

    assert message in problems[pointer].message
    assert list(problems) == [pointer]


@pytest.mark.parametrize(
    "document",
    [
        {"resources": {"nodes": 2, "gpus_per_node": 2, "gpus": 4}},
        {"resources": {"nodes": 2, "gpus": 0}},
        {"resources": {"gpus_per_node": 0, "gpus": 0}},
        {"run": {"script": "/shared/a.py"}, "code": {"path": "/shared"}},
        {"run": {"script": "../a.py"}, "code": {"path": "/shared/x"}},
        {"run": {"script": "a..b/c.py"}},
        {"run": {"command": "ls"}, "code": None},
        {"env": {"_a1": "x", "RANKS": "y"}},
        {"run": {"command": "ls", "args": []}},
    ],
    ids=repr,
)
def test_what_only_looks_like_a_contradiction_is_taken(document: dict[str, Any]) -> None:
    parse_spec(json.dumps({**SCRIPT, **document}).encode(), "application/json", ())


def test_all_that_is_wrong_with_a_range_of_gpus_is_told_at_once() -> None:
    problems = problems_of(
        {**COMMAND, "resources": {"gpus": {"min": 9, "max": 8, "mid": 1}, "nodes": 2, "gpus_per_node": 4}}
    )

    assert set(problems) == {
        "resources.gpus.min",
        "resources.gpus.mid",
        "resources.nodes",
        "resources.gpus_per_node",
    }
    assert "nodes and shares are chosen at each start" in problems["resources.nodes"].message
    assert "give resources.gpus as one number" in problems["resources.nodes"].suggestion


@pytest.mark.parametrize("run", [{"script": "a.py"}, {"command": "ls"}, {"recipe": "mlp"}, {"entry": "a:b"}], ids=repr)
def test_whatever_is_run_may_have_a_range_of_gpus(run: dict[str, Any]) -> None:
    train = {"train": {"steps": 1}} if "recipe" in run or "entry" in run else {}
    document = {**SCRIPT, "run": run, **train, "resources": {"gpus": {"min": 4, "max": 4}}}
    spec = parse_spec(json.dumps(document).encode(), "application/json", ())
    assert (spec.resources.min_gpus, spec.resources.total_gpus) == (4, 4)


def test_rules_and_types_are_reported_together() -> None:
    problems = problems_of(
        {
            "name": " x",
            "run": {"script": "a.py", "command": 3},
            "env": {"1": 2},
            "resources": {"gpus": "x", "nodes": -1},
            "surprise": 1,
        }
    )

    assert set(problems) == {
        "name",
        "run.command",
        "run.script",
        "env.1",
        "resources.gpus",
        "resources.nodes",
        "surprise",
    }
