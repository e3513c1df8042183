"""A job file becomes a spec, or a list of all its problems with line, column and what to write instead."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.domain.spec import CodeSpec, Condition, Dependency, JobSpec, ResourceSpec, RetrySpec, RunSpec
from service.errors import FieldProblem
from service.schemas.parse_spec import InvalidSpec, parse_spec

DIGEST = "sha256:" + "a" * 64
WHOLE = f"""\
version: 1
name: gpt
team: vision
private: true
code: {{bundle: "{DIGEST}"}}
python: python3
run: {{script: train.py, args: ["--lr", "3e-4"]}}
resources:
  {{nodes: 2, gpus_per_node: 2, gpu: H100, gpu_memory: 40GiB, labels: {{disk: nvme}}, exclusive: true, cpus: 4,
   memory: 32GiB, time: 4h}}
processes_per_node: 3
env: {{KEY: "value"}}
retry: {{max: 2, on: [user_error], exit_codes: [75, 143]}}
preemptible: true
on_disconnect: stop
stop_grace: 45s
tags: {{project: x}}
priority: -5
on_time_limit: requeue
hold: true
start_after: 2026-11-01T01:30:00-05:00
after: [12, {{job: 13, condition: any}}]
"""
WHOLE_SPEC = JobSpec(
    name="gpt",
    team="vision",
    private=True,
    code=CodeSpec(bundle=DIGEST),
    python="python3",
    run=RunSpec(kind="script", script="train.py", args=("--lr", "3e-4")),
    resources=ResourceSpec(
        num_nodes=2,
        gpus_per_node=2,
        gpu_type="H100",
        gpu_memory_bytes=40 * 2**30,
        labels={"disk": "nvme"},
        exclusive=True,
        cpus_per_node=4.0,
        memory_bytes_per_node=32 * 2**30,
        time_limit_seconds=14_400.0,
    ),
    processes_per_node=3,
    env={"KEY": "value"},
    retry=RetrySpec(max_retries=2, outcomes=("user_error",), exit_codes=(75, 143)),
    preemptible=True,
    on_disconnect="stop",
    stop_grace_seconds=45.0,
    tags={"project": "x"},
    priority=-5,
    on_time_limit="requeue",
    hold=True,
    start_after="2026-11-01T01:30:00-05:00",
    zone="-05:00",
    after=(Dependency(job=12), Dependency(job=13, condition=Condition.ANY)),
)
SMALLEST = {"name": "x", "run": {"command": ["true"]}}


def parse(document: Any, *overrides: str) -> JobSpec:
    return parse_spec(json.dumps(document).encode(), "application/json", overrides)


def parse_yaml(text: str, *overrides: str) -> JobSpec:
    return parse_spec(textwrap.dedent(text).encode(), "application/yaml", overrides)


def problems_of(document: Any, *overrides: str) -> dict[str, FieldProblem]:
    """The problems of a document, or of a YAML text, by pointer."""
    with pytest.raises(InvalidSpec) as caught:
        if isinstance(document, str):
            parse_yaml(document, *overrides)
        else:
            parse(document, *overrides)
    return {problem.pointer: problem for problem in caught.value.problems}


def smallest(**parts: Any) -> dict[str, Any]:
    return {**SMALLEST, **parts}


# --- Sound files ---------------------------------------------------------------------------------------------------


def test_every_key_arrives_in_the_spec() -> None:
    assert parse_spec(WHOLE.encode(), "application/yaml; charset=utf-8", ()) == WHOLE_SPEC


def test_json_and_yaml_say_the_same() -> None:
    document = json.loads(WHOLE_SPEC.to_json())
    wire = {
        **{key: document[key] for key in ("name", "team", "private", "python", "env", "preemptible", "tags")},
        **{key: document[key] for key in ("on_disconnect", "processes_per_node", "priority")},
        **{key: document[key] for key in ("on_time_limit", "hold", "start_after")},
        "after": [12, {"job": 13, "condition": "any"}],
        "code": {"bundle": DIGEST},
        "run": {"script": "train.py", "args": ["--lr", "3e-4"]},
        "resources": {
            "nodes": 2,
            "gpus_per_node": 2,
            "gpu": "H100",
            "gpu_memory": 40 * 2**30,
            "labels": {"disk": "nvme"},
            "exclusive": True,
            "cpus": 4,
            "memory": 34359738368,
            "time": 14400,
        },
        "retry": {"max": 2, "on": ["user_error"], "exit_codes": [75, 143]},
        "stop_grace": 45,
    }

    assert parse(wire) == WHOLE_SPEC


def test_what_is_left_out_takes_the_defaults() -> None:
    assert parse(SMALLEST) == JobSpec(name="x", run=RunSpec(kind="command", command=("true",)))


def test_null_means_not_given() -> None:
    spec = parse_yaml("""
        name: x
        run: {command: ls -l | wc}
        team:
        env:
        # KEY: value
        resources: {gpus: }
        tags: ~
        stop_grace: null
        """)

    assert spec == JobSpec(name="x", run=RunSpec(kind="command", shell="ls -l | wc"))


def test_the_gpu_type_any_is_no_type() -> None:
    assert parse(smallest(resources={"gpu": "Any"})).resources.gpu_type is None


def test_a_byte_order_mark_is_no_obstacle() -> None:
    assert parse_spec(b"\xef\xbb\xbf" + json.dumps(SMALLEST).encode(), "application/json", ()).name == "x"


def test_a_few_aliases_are_taken() -> None:
    spec = parse_yaml("""
        name: &name x
        run: {command: [echo, *name]}
        tags: {a: *name}
        """)

    assert (spec.run.command, spec.tags) == (("echo", "x"), {"a": "x"})


# --- Types: O-37 and its like --------------------------------------------------------------------------------------


BAD_NUMBERS: list[Any] = [-1, 0.5, 1.0, "two", "2", "2-8", 10**9, True, [1]]


@pytest.mark.parametrize(
    ("key", "value"),
    [*((key, value) for key in ("gpus", "gpus_per_node") for value in BAD_NUMBERS), ("gpus_per_node", {})],
)
def test_o37_a_bad_number_of_gpus_is_refused_with_the_field_named(key: str, value: Any) -> None:
    assert list(problems_of(smallest(resources={key: value}))) == [f"resources.{key}"]


def test_o37_no_gpu_can_be_asked_for() -> None:
    assert parse(smallest(resources={"gpus": 0})).resources.total_gpus == 0


def test_a_range_of_gpus_is_kept_as_it_was_asked() -> None:
    asked = parse(smallest(resources={"gpus": {"min": 2, "max": 8}, "gpu": "H100"})).resources
    assert asked == ResourceSpec(min_gpus=2, total_gpus=8, gpu_type="H100")


def test_o37_absent_stays_absent() -> None:
    assert parse(SMALLEST).resources == ResourceSpec()


@pytest.mark.parametrize(
    ("parts", "pointer", "message", "suggestion"),
    [
        ({"resources": {"gpus": "2"}}, "resources.gpus", 'whole number, not "2"', "Write 2 without quotes."),
        ({"resources": {"gpus": {"min": 2}}}, "resources.gpus.max", "is missing", "Add it."),
        ({"resources": {"gpus": {"min": 0, "max": 2}}}, "resources.gpus.min", "at least 1, not 0", ""),
        ({"resources": {"gpus": {"min": 1, "max": 9999}}}, "resources.gpus.max", "at most 1024, not 9999", ""),
        ({"resources": {"gpus": {"min": "1", "max": 2}}}, "resources.gpus.min", 'not "1"', "Write 1 without quotes."),
        ({"resources": {"gpus": {"max": 4, "min": 8}}}, "resources.gpus.min", "is 8, more than max, which is 4", "4"),
        ({"resources": {"nodes": 0}}, "resources.nodes", "at least 1, not 0", ""),
        ({"resources": {"cpus": 0}}, "resources.cpus", "more than 0", ""),
        ({"resources": {"cpus": True}}, "resources.cpus", "must be a number, not true", ""),
        ({"resources": {"time": 0}}, "resources.time", "more than 0", ""),
        ({"resources": []}, "resources", "must be a mapping", "{key: value}"),
        ({"private": "yes"}, "private", 'true or false, not "yes"', "without quotes"),
        ({"private": 1}, "private", "true or false, not 1", ""),
        ({"priority": 101}, "priority", "at most 100", ""),
        ({"version": 2}, "version", "at most 1", ""),
        ({"version": True}, "version", "whole number", ""),
        ({"version": 1.0}, "version", "whole number", ""),
        ({"name": 7}, "name", "must be a string; 7 without quotes is a number", 'Write "7" in quotes.'),
        ({"on_disconnect": "stopp"}, "on_disconnect", 'cannot be "stopp"', "Did you mean stop?"),
        ({"retry": {"max": -1}}, "retry.max", "at least 0, not -1", ""),
        ({"retry": {"on": ["node_lots"]}}, "retry.on[0]", "cannot be", "Did you mean node_lost?"),
        ({"retry": {"on": ["cancelled"]}}, "retry.on[0]", "cannot be", "Choose one of: user_error"),
        ({"retry": {"exit_codes": [0]}}, "retry.exit_codes[0]", "at least 1", ""),
        ({"retry": {"exit_codes": [1] * 300}}, "retry.exit_codes", "has 300 entries", ""),
        ({"env": {"N": 3}}, "env.N", "must be a string", 'Write "3" in quotes.'),
        ({"tags": {"t": {}}}, "tags.t", "must be a string, not a mapping", ""),
        ({"code": {"bundle": "sha256:abc"}}, "code.bundle", "not the digest of a bundle", "64"),
        ({"stop_grace": -1}, "stop_grace", "must not be negative", ""),
        ({"processes_per_node": 0}, "processes_per_node", "at least 1", ""),
    ],
)
def test_a_wrong_value_is_refused_with_what_to_write(
    parts: dict[str, Any], pointer: str, message: str, suggestion: str
) -> None:
    document = {"name": "x", "run": {"script": "train.py"}, "code": {"path": "/shared"}}
    problems = problems_of({**document, **parts})
    problem = problems[pointer]

    assert message in problem.message
    assert suggestion in problem.suggestion
    assert set(problems) <= {pointer, "run.script"}


@pytest.mark.parametrize("missing", ["name", "run"])
def test_what_is_missing_is_named(missing: str) -> None:
    document = {key: value for key, value in SMALLEST.items() if key != missing}

    assert "is missing" in problems_of(document)[missing].message


# --- Unknown keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "pointer", "meant"),
    [
        (smallest(nmae="x"), "nmae", "name"),
        (smallest(resources={"num_gpu": 1}), "resources.num_gpu", "resources.gpus"),
        (smallest(resources={"gpus": {"min": 1, "mx": 2}}), "resources.gpus.mx", "resources.gpus.max"),
        (smallest(resources={"gpus_per_nod": 1}), "resources.gpus_per_nod", "resources.gpus_per_node"),
        (smallest(resources={"Nodes": 1}), "resources.Nodes", "resources.nodes"),
        (smallest(resources={"gpus-per-node": 1}), "resources.gpus-per-node", "resources.gpus_per_node"),
        (smallest(gpus=1), "gpus", "resources.gpus"),
        (smallest(script="train.py"), "script", "run.script"),
        (smallest(timeout="4h"), "timeout", "resources.time"),
        (smallest(environment={}), "environment", "env"),
        (smallest(labels={}), "labels", "tags"),
        (smallest(exit_codes=[1]), "exit_codes", "retry.exit_codes"),
        (smallest(run={"command": "ls", "env": {}}), "run.env", "env"),
        (smallest(retry={"retries": 1}), "retry.retries", "retry.max"),
        (smallest(retry={"true": []}), "retry.true", "retry.on"),
        (smallest(memroy="1GiB"), "memroy", "resources.memory"),
    ],
)
def test_an_unknown_key_is_refused_with_the_key_that_was_meant(document: Any, pointer: str, meant: str) -> None:
    problem = problems_of(document)[pointer]

    assert problem.message == "unknown key."
    assert problem.suggestion.startswith(f"Did you mean {meant}?")


def test_a_key_like_no_other_is_answered_with_the_keys_there_are() -> None:
    suggestion = problems_of(smallest(retry={"zzz": 1}))["retry.zzz"].suggestion

    assert suggestion == "Keys here: max, on, exit_codes."


# --- Places --------------------------------------------------------------------------------------------------------

CROOKED = """\
name: x
run:
  script: train.py
  args: [a, 2]
resources:
  nodes: 1
  num_gpu: 4
  gpus: two
nmae: y
"""


def test_all_problems_come_at_once_in_the_order_of_the_file() -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_yaml(CROOKED)

    assert [(p.line, p.column, p.pointer) for p in caught.value.problems] == [
        (3, 11, "run.script"),
        (4, 13, "run.args[1]"),
        (7, 3, "resources.num_gpu"),
        (8, 9, "resources.gpus"),
        (9, 1, "nmae"),
    ]


def test_json_has_places_too() -> None:
    body = b'{"name": "\\ud83d\\ude00",\n "run": {"command": "ls"},\n "resources": {\n  "gpus": "2", "x": [1,\n2]}}'
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(body, "application/json", ())

    assert [(p.line, p.column, p.pointer) for p in caught.value.problems] == [
        (4, 11, "resources.gpus"),
        (4, 16, "resources.x"),
    ]


@pytest.mark.parametrize(
    ("body", "kind", "line", "column", "message"),
    [
        (b'{"name": "x",\n}', "json", 2, 1, "a key in double quotes is missing"),
        (b'{"name": "x"\n "run": 1}', "json", 2, 2, "a comma or } is missing"),
        (b'{"name" 1}', "json", 1, 9, "a colon is missing"),
        (b'{"name": }', "json", 1, 10, "a value is missing"),
        (b'{"name": [1 2]}', "json", 1, 13, "a comma or ] is missing"),
        (b'{"name": True}', "json", 1, 10, "True is not a JSON value"),
        (b'{"name": "x', "json", 1, 10, "unterminated string"),
        (b'{"priority": NaN}', "json", 1, 14, "NaN is not a JSON value"),
        (b'{"priority": -Infinity}', "json", 1, 14, "-Infinity is not a JSON value"),
        (b'{"name": "x"} {}', "json", 1, 15, "after the end"),
        (b"[" * 1_000_000, "json", 1, 32, "nested deeper than 30"),
        (b'{"priority": ' + b"1" * 5_000 + b"}", "json", 1, 14, "5000 digits"),
        (b"[1]", "json", 1, 1, "must be a mapping, not a list"),
        (b"null", "json", 1, 1, "must be a mapping, not null"),
        (b"", "json", 1, 1, "a value is missing"),
        (b"", "yaml", 1, 1, "is empty"),
        (b"# nothing\n", "yaml", 1, 1, "is empty"),
        (b"just text", "yaml", 1, 1, "must be a mapping"),
        (b"name: x\n  run: y", "yaml", 2, 6, "mapping values are not allowed"),
        (b"name: [x", "yaml", 2, 1, "did not find expected"),
        (b"name: x\n---\nname: y", "yaml", 2, 1, "second document"),
        (b"- " * 1_000, "yaml", 1, 61, "nested deeper than 30"),
        (b"{" * 500_000, "yaml", 1, None, "nest"),
        (b"name: !!python/object/apply:os.system [id]", "yaml", 1, 7, "uses the YAML tag"),
        (b"a: &a {<<: *a}", "yaml", 1, 8, "merge key"),
        (b"a: &a [*a]", "yaml", 1, 8, "from inside itself"),
        (b"a: *b", "yaml", 1, 4, "not defined"),
        (b"a: [" + b"&a x, " * 101 + b"]", "yaml", 1, None, "more than 100 anchors"),
        (b"a: [&a x, " + b"*a, " * 101 + b"]", "yaml", 1, None, "more than 100 aliases"),
        (b"? [a]\n: b", "yaml", 1, 3, "where a key must stand"),
        (b"\xff\xfe", "yaml", None, None, "is not UTF-8 (byte 1)"),
        (b"name: \x00", "yaml", None, None, "is not YAML"),
        (b"x", "xml", None, None, "has the content type"),
    ],
)
def test_what_is_no_document_is_said_with_its_place(
    body: bytes, kind: str, line: int | None, column: int | None, message: str
) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(body, f"application/{kind}", ())
    (problem,) = caught.value.problems

    assert message in problem.message
    assert problem.line == line
    assert column is None or problem.column == column


@pytest.mark.parametrize("kind", ["json", "yaml"])
def test_a_key_given_twice_is_a_problem(kind: str) -> None:
    body = b'{"name": "x",\n "run": {"command": "ls",\n "command": "id"}}'
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(body, f"application/{kind}", ())
    (problem,) = caught.value.problems

    assert (problem.pointer, problem.line, problem.column) == ("run.command", 3, 2)
    assert "first in line 2" in problem.message


def test_an_alias_bomb_is_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 11)]

    with pytest.raises(InvalidSpec, match="values"):
        parse_yaml("\n".join(lines))


def test_a_hundred_problems_are_shown_and_the_rest_counted() -> None:
    problems = problems_of(smallest(**{f"key{number}": 1 for number in range(150)}))

    assert len(problems) == 101
    assert problems[""].message == "has 50 further problems."


# --- YAML 1.1 ------------------------------------------------------------------------------------------------------


def test_words_that_yaml_1_1_takes_for_something_else_are_words() -> None:
    spec = parse_yaml("""
        name: on
        run: {command: [no, off, y, 010, 1_000, 1:30, 2024-01-01, 0x1f, 3e-4, =, 0o7]}
        retry: {max: 1, on: [hang]}
        tags: {no: yes}
        """)

    assert spec.name == "on"
    assert spec.run.command == ("no", "off", "y", "010", "1_000", "1:30", "2024-01-01", "0x1f", "3e-4", "=", "0o7")
    assert spec.retry.outcomes == ("hang",)
    assert spec.tags == {"no": "yes"}


@pytest.mark.parametrize("written", ["true", "0.0003", "3.0e-4", "10", "-1", ".inf", ".nan", "+5", "1."])
def test_an_argument_that_yaml_reads_as_no_string_is_refused_as_it_was_written(written: str) -> None:
    text = f"name: x\ncode: {{path: /c}}\nrun: {{script: a.py, args: [--lr, {written}]}}\n"
    problem = problems_of(text)["run.args[1]"]

    assert problem.message.startswith(f"must be a string; {written} without quotes is")
    assert problem.suggestion == f'Write "{written}" in quotes.'


# --- Overrides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("resources.gpus=2", {"resources": ResourceSpec(total_gpus=2)}),
        ("resources.gpus={min: 2, max: 4}", {"resources": ResourceSpec(min_gpus=2, total_gpus=4)}),
        ("resources.memory=1GiB", {"resources": ResourceSpec(memory_bytes_per_node=2**30)}),
        ("resources={nodes: 2, gpus: 4}", {"resources": ResourceSpec(num_nodes=2, total_gpus=4)}),
        ("private=true", {"private": True}),
        ("name=7", {"name": "7"}),
        ("name=a=b: c # d", {"name": "a=b: c # d"}),
        ("env.STEPS=10", {"env": {"STEPS": "10"}}),
        ("env.EMPTY=", {"env": {"EMPTY": ""}}),
        ('env.JSON={"a": [1]}', {"env": {"JSON": '{"a": [1]}'}}),
        ("tags.a.b=true", {"tags": {"a.b": "true"}}),
        ('tags.q="a b"', {"tags": {"q": "a b"}}),
        ("team=null", {}),
        ("run.command.0=false # not a comment", {"run": RunSpec(kind="command", command=("false # not a comment",))}),
        ('run.command=["a", "b"]', {"run": RunSpec(kind="command", command=("a", "b"))}),
        ("run.command=10", {"run": RunSpec(kind="command", shell="10")}),
        ("retry.on=[hang]", {"retry": RetrySpec(outcomes=("hang",))}),
    ],
)
def test_set_changes_one_key(override: str, changed: dict[str, Any]) -> None:
    expected = {"name": "x", "run": RunSpec(kind="command", command=("true",)), **changed}

    assert parse(SMALLEST, override) == JobSpec(**expected)


def test_the_last_set_wins() -> None:
    assert parse(SMALLEST, "priority=1", "priority=2").priority == 2


@pytest.mark.parametrize(
    ("override", "pointer", "message"),
    [
        ("resources.gpus=two", "--set resources.gpus", "must be a whole number"),
        ("resources.num_gpu=2", "--set resources.num_gpu", "unknown key"),
        ("resources={gpus: 1, x: 2}", "--set resources.x", "unknown key"),
        ("resources.gpus", "--set resources.gpus", "is not of the form"),
        ("=2", "--set =2", "is not of the form"),
        ("a..b=2", "--set a..b=2", "is not of the form"),
        ("name.x=2", "--set name.x", "name is a single value"),
        ("run.command.5=x", "--set run.command.5", "list of 1 and has no place 5"),
        ("resources=[1, [", "--set resources", "is not YAML"),
        ("retry.on=[a, [[b]]]", "--set retry.on[1]", "cannot be"),
        ("name=a\nb", "--set name", "holds a newline"),
    ],
)
def test_a_problem_of_an_override_says_set(override: str, pointer: str, message: str) -> None:
    assert message in problems_of(SMALLEST, override)[pointer].message


# --- Never anything else than InvalidSpec ---------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
PARTS = ["name", "run", "resources", "env", "tags", "retry", "code", "priority", "version", "x"]
PARTS += ["train", "parallel", "checkpoint"]
DETAILS = [
    "script",
    "args",
    "command",
    "entry",
    "recipe",
    "steps",
    "batch_size",
    "strategy",
    "async",
    "every",
    "gpus",
    "nodes",
    "gpus_per_node",
    "memory",
    "time",
    "on",
    "max",
    "path",
]
KEYS = st.sampled_from([*PARTS, *DETAILS])
DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=5)
)
OVERRIDES = st.lists(st.text(max_size=20) | st.builds("{}={}".format, KEYS, st.text(max_size=8)), max_size=2)
KINDS = st.sampled_from(["application/json", "application/yaml"])


def check_spec_or_invalid(body: bytes, kind: str, overrides: list[str]) -> None:
    try:
        spec = parse_spec(body, kind, overrides)
    except InvalidSpec as invalid:
        assert invalid.problems
        assert all(problem.message for problem in invalid.problems)
    else:
        assert JobSpec.from_json(spec.to_json()) == spec
        spec.to_json().encode()


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=200), kind=KINDS, overrides=OVERRIDES)
def test_arbitrary_bytes_raise_nothing_but_invalid_spec(body: bytes, kind: str, overrides: list[str]) -> None:
    check_spec_or_invalid(body, kind, overrides)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("{}[]:,-&*!|>?#'\"\\ \n\tab01.<~%@`"), max_size=60), kind=KINDS)
def test_arbitrary_punctuation_raises_nothing_but_invalid_spec(text: str, kind: str) -> None:
    check_spec_or_invalid(text.encode(), kind, [])


@settings(max_examples=400, deadline=None)
@given(document=DOCUMENTS, kind=KINDS, overrides=OVERRIDES)
def test_arbitrary_documents_raise_nothing_but_invalid_spec(document: Any, kind: str, overrides: list[str]) -> None:
    check_spec_or_invalid(json.dumps(document).encode(), kind, overrides)


@settings(max_examples=200, deadline=None)
@given(parts=st.dictionaries(KEYS, DOCUMENTS, max_size=4))
def test_a_sound_file_with_arbitrary_parts_raises_nothing_but_invalid_spec(parts: dict[str, Any]) -> None:
    check_spec_or_invalid(json.dumps({**SMALLEST, **parts}).encode(), "application/json", [])


@settings(max_examples=200, deadline=None)
@given(parts=st.dictionaries(KEYS, DOCUMENTS, max_size=4), args=DOCUMENTS, settings_=DOCUMENTS)
def test_a_training_with_arbitrary_parts_raises_nothing_but_invalid_spec(
    parts: dict[str, Any], args: Any, settings_: Any
) -> None:
    training = {"name": "x", "run": {"entry": "a:b", "args": args}, "code": {"path": "/c"}, "train": settings_}
    check_spec_or_invalid(json.dumps({**training, **parts}).encode(), "application/json", [])
    recipe = {"name": "x", "run": {"recipe": "mlp", "args": args}, "train": {"steps": 1}, "checkpoint": settings_}
    check_spec_or_invalid(json.dumps({**recipe, **parts}).encode(), "application/json", [])
