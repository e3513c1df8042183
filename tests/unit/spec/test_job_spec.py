"""The stored spec is the same bytes for every attempt (O-23), and the schema describes what is accepted."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.spec import CodeSpec, Condition, Dependency, JobSpec, ResourceSpec, RetrySpec, RunSpec
from service.schemas.job_spec import job_schema
from trainer.plan.parallel_plan import ParallelRequest
from trainer.plan.training_plan import CheckpointSettings, RunTarget, TrainingSpec, TrainSettings

TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=10)
NUMBERS = st.floats(min_value=0, max_value=1e12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)
TRAININGS = st.builds(
    TrainingSpec,
    run=st.builds(
        RunTarget, recipe=st.none() | TEXT, entry=st.none() | TEXT, args=st.dictionaries(TEXT, JSON, max_size=3)
    ),
    parallel=st.builds(ParallelRequest, strategy=st.none() | TEXT, grad_accum_steps=st.integers(1, 9)),
    train=st.builds(TrainSettings, steps=st.none() | st.integers(1, 9), lr=NUMBERS, clip_norm=st.none() | NUMBERS),
    checkpoint=st.builds(CheckpointSettings, every_seconds=st.none() | NUMBERS, is_async=st.booleans()),
)
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
    training=st.none() | TRAININGS,
    resources=st.builds(
        ResourceSpec,
        num_nodes=st.none() | st.integers(1, 100),
        min_gpus=st.none() | st.integers(1, 100),
        cpus_per_node=st.none() | NUMBERS,
        memory_bytes_per_node=st.none() | st.integers(0, 2**60),
        time_limit_seconds=st.none() | NUMBERS,
        labels=st.dictionaries(TEXT, TEXT, max_size=3),
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
    start_after=st.none() | TEXT,
    after=st.lists(st.builds(Dependency, job=st.integers(1, 99), condition=st.sampled_from(Condition))).map(tuple),
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
        training=TrainingSpec(
            run=RunTarget(recipe="r", entry="e", args={"width": [1, 2.5, {"deep": None}]}),
            parallel=ParallelRequest(strategy="ddp", precision="bf16", grad_accum_steps=2, compile=True),
            train=TrainSettings(steps=3, clip_norm=1.0, seed=7),
            checkpoint=CheckpointSettings(every_steps=5, every_seconds=None, keep=9, is_async=False),
        ),
        resources=ResourceSpec(
            num_nodes=2,
            gpus_per_node=3,
            total_gpus=6,
            min_gpus=5,
            gpu_type="H100",
            gpu_memory_bytes=40,
            labels={"disk": "nvme"},
            exclusive=True,
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
        on_time_limit="requeue",
        hold=True,
        start_after="2026-11-01T01:30:00-05:00",
        zone="America/New_York",
        after=(Dependency(job=12), Dependency(job=13, condition=Condition.NOT_OK)),
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
    spec = JobSpec.from_json('{"name":"x","run":{"kind":"command","shell":"ls"}}')
    assert (spec.priority, spec.training) == (0, None)


def test_settings_of_a_training_that_were_added_since_take_their_default() -> None:
    text = '{"name":"x","run":{"kind":"recipe"},"training":{"run":{"recipe":"mlp"},"train":{"steps":5}}}'
    training = JobSpec.from_json(text).training

    assert training == TrainingSpec(run=RunTarget(recipe="mlp"), train=TrainSettings(steps=5))


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


def test_every_setting_of_a_training_has_a_key() -> None:
    """What the plan can say and a job file cannot would be a setting that nobody can use."""
    named = {f"hang_after{end}" for end in ("", "_seconds")} | {f"every{end}" for end in ("", "_seconds")}
    keys = {name for name, _ in properties(job_schema())}
    for part, settings in (
        ("TrainWire", TrainSettings),
        ("ParallelWire", ParallelRequest),
        ("CheckpointWire", CheckpointSettings),
    ):
        fields = {spec.name.replace("is_async", "async") for spec in dataclasses.fields(settings)}
        told = {name.partition(".")[2] for name in keys if name.startswith(f"{part}.")}
        assert fields - named == told - named


def test_the_schema_is_json_and_always_the_same() -> None:
    assert json.dumps(job_schema()) == json.dumps(job_schema())
    assert job_schema()["required"] == ["name", "run"]
