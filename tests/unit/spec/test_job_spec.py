"""The stored spec is the same bytes for every attempt (O-23), and the schema describes what is accepted."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.spec import CodeSpec, JobSpec, ResourceSpec, RetrySpec, RunSpec
from service.schemas.job_spec import job_schema

TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=10)
NUMBERS = st.floats(min_value=0, max_value=1e12)
SPECS = st.builds(
    JobSpec,
    name=TEXT,
    team=st.none() | TEXT,
    private=st.booleans(),
    code=st.builds(CodeSpec, bundle=st.none() | TEXT, path=st.none() | TEXT),
    python=st.none() | TEXT,
    run=st.builds(
        RunSpec,
        kind=st.sampled_from(["script", "command"]),
        script=st.none() | TEXT,
        args=st.lists(TEXT, max_size=3).map(tuple),
        command=st.none() | st.lists(TEXT, max_size=3).map(tuple),
        shell=st.none() | TEXT,
    ),
    resources=st.builds(
        ResourceSpec,
        num_nodes=st.none() | st.integers(1, 100),
        cpus_per_node=st.none() | NUMBERS,
        memory_bytes_per_node=st.none() | st.integers(0, 2**60),
        time_limit_seconds=st.none() | NUMBERS,
    ),
    env=st.dictionaries(TEXT, TEXT, max_size=3),
    retry=st.builds(
        RetrySpec,
        max_retries=st.integers(0, 100),
        outcomes=st.lists(TEXT, max_size=2).map(tuple),
        exit_codes=st.lists(st.integers(1, 255), max_size=2).map(tuple),
    ),
    stop_grace_seconds=NUMBERS,
    tags=st.dictionaries(TEXT, TEXT, max_size=3),
    priority=st.integers(-100, 100),
)


@given(spec=SPECS)
def test_o23_a_spec_is_byte_for_byte_the_same_however_often_it_is_stored(spec: JobSpec) -> None:
    stored = spec.to_json()
    read = JobSpec.from_json(stored)

    assert read == spec
    assert read.to_json().encode() == stored.encode()


def test_o23_nothing_of_a_spec_with_every_field_set_is_lost() -> None:
    spec = JobSpec(
        name="漢字",
        team="t",
        private=True,
        code=CodeSpec(bundle="b", path="p"),
        python="py",
        run=RunSpec(kind="script", script="s", args=("a",), command=("c",), shell="sh"),
        resources=ResourceSpec(
            num_nodes=2,
            gpus_per_node=3,
            total_gpus=6,
            gpu_type="H100",
            cpus_per_node=1.5,
            memory_bytes_per_node=7,
            time_limit_seconds=8.5,
        ),
        processes_per_node=9,
        env={"B": "1", "A": "2"},
        retry=RetrySpec(max_retries=1, outcomes=("hang",), exit_codes=(75,)),
        preemptible=True,
        on_disconnect="stop",
        stop_grace_seconds=1.0,
        tags={"k": "v"},
        priority=5,
    )
    changed = [f.name for f in dataclasses.fields(spec) if getattr(spec, f.name) == f.default]

    assert changed == [], "a field of this example has its default; give it another value"
    assert JobSpec.from_json(spec.to_json()) == spec


def test_the_stored_text_is_canonical() -> None:
    spec = JobSpec(name="é", run=RunSpec(kind="command", shell="ls"), env={"B": "1", "A": "2"})
    text = spec.to_json()

    assert '"env":{"A":"2","B":"1"}' in text
    assert '"name":"é"' in text
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def test_a_spec_stored_before_a_field_existed_takes_its_default() -> None:
    assert JobSpec.from_json('{"name":"x","run":{"kind":"command","shell":"ls"}}').priority == 0


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"name":"x"}', '{"name":"x","run":{}}', '{"run":3}'])
def test_what_is_no_stored_spec_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        JobSpec.from_json(text)


# --- The schema ----------------------------------------------------------------------------------------------------


def properties(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    parts = [("", schema), *schema["$defs"].items()]
    return [(f"{name}.{key}", value) for name, part in parts for key, value in part["properties"].items()]


def test_every_key_of_the_schema_has_a_title_and_a_description() -> None:
    bare = [name for name, value in properties(job_schema()) if not value.get("description")]
    untitled = [name for name, value in properties(job_schema()) if not value.get("title") and "anyOf" not in value]

    assert bare == []
    assert [name for name in untitled if name != ".run"] == []


def test_no_part_of_the_schema_takes_unknown_keys() -> None:
    schema = job_schema()

    assert all(part["additionalProperties"] is False for part in [schema, *schema["$defs"].values()])


def test_recipe_entry_and_parallel_have_their_place() -> None:
    names = {name for name, _ in properties(job_schema())}

    assert {"RunWire.recipe", "RunWire.entry", ".parallel", "ParallelWire.strategy"} <= names


def test_the_schema_is_json_and_always_the_same() -> None:
    assert json.dumps(job_schema()) == json.dumps(job_schema())
    assert job_schema()["required"] == ["name", "run"]
