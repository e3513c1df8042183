"""Records between service and worker survive the wire, and a peer one release apart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gangline.protocol.launch import (
    AssignedGPU,
    CodeSource,
    Directive,
    ErrorRecord,
    LaunchPlan,
    NodeFailure,
    NodeReport,
    RankReport,
    Rendezvous,
    RunPlan,
    StopOrder,
    decode,
    encode,
)

PLAN = LaunchPlan(
    attempt_id=17,
    job_id=12,
    job_name='漢字 "quoted"; rm -rf /',
    attempt_number=2,
    pool_id="pool",
    node_name="node-1",
    node_rank=1,
    num_nodes=2,
    node_address="192.0.2.7",
    processes_per_node=2,
    first_rank=2,
    world_size=4,
    gpus=(AssignedGPU(index=0, uuid="GPU-a"), AssignedGPU(index=3, uuid="slot-3", kind="cpu_slot")),
    cpus=2.5,
    memory_bytes=None,
    run=RunPlan(kind="command", command=("prog", "", "$(id)", "a;b\n")),
    code=CodeSource(bundle="sha256:" + "0" * 64),
    python=None,
    env={"KEY": "value;`id`"},
    time_limit_seconds=60.0,
    stop_grace_seconds=30.0,
    start_timeout_seconds=300.0,
    disconnect_stop_seconds=None,
    gather_seconds=0.05,
    start_reason="node_lost",
)
REPORT = NodeReport(
    ranks=(
        RankReport(
            rank=2,
            local_rank=0,
            exit_code=None,
            signal="SIGKILL",
            stopped_by_us=True,
            killed_after_grace=True,
            started_at=1.5,
            ended_at=2.25,
            error=ErrorRecord(type="ValueError", message="no", traceback="…"),
        ),
    ),
    failure=NodeFailure(outcome="storage_full", message="No space left.", fix="Delete files.", at=2.0),
    stop_intent="cancel",
    process_set_empty=True,
    leftovers=("42 sleep",),
    stream_sizes={"log/2": 812},
)
RECORDS = [
    PLAN,
    REPORT,
    Directive(version=1),
    Directive(
        version=2,
        stop=StopOrder(intent="cancel", grace_seconds=30.0),
        rendezvous=Rendezvous(address="192.0.2.7", port=29500),
    ),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_the_same_after_the_wire(record: Any) -> None:
    assert decode(type(record), json.loads(json.dumps(encode(record)))) == record


def test_keys_that_a_newer_peer_added_are_ignored_at_every_depth() -> None:
    wire = encode(PLAN)
    wire["added"] = {"later": 1}
    wire["run"]["added"] = [1]
    wire["gpus"][0]["added"] = None

    assert decode(LaunchPlan, wire) == PLAN


def test_keys_with_a_default_may_be_missing_from_an_older_peer() -> None:
    wire = encode(PLAN)
    del wire["run_as"]
    del wire["gpus"][0]["kind"]

    assert decode(LaunchPlan, wire) == PLAN


def test_a_whole_number_will_do_where_seconds_are_wanted() -> None:
    decoded = decode(StopOrder, {"intent": "cancel", "grace_seconds": 30})

    assert decoded.grace_seconds == 30.0
    assert isinstance(decoded.grace_seconds, float)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (None, "LaunchPlan"),
        ([], "LaunchPlan"),
        ({}, "attempt_id"),
        ({"attempt_id": "17"}, "LaunchPlan.attempt_id"),
        ({"attempt_id": True}, "LaunchPlan.attempt_id"),
        ({"attempt_id": None}, "LaunchPlan.attempt_id"),
        ({"job_name": 3}, "LaunchPlan.job_name"),
        ({"gpus": {}}, "LaunchPlan.gpus"),
        ({"gpus": [3]}, "AssignedGPU"),
        ({"gpus": [{"index": 0}]}, "uuid"),
        ({"run": None}, "RunPlan"),
        ({"run": {"kind": "command", "command": [1]}}, "RunPlan.command"),
        ({"env": []}, "LaunchPlan.env"),
        ({"cpus": "2"}, "LaunchPlan.cpus"),
        ({"cpus": False}, "LaunchPlan.cpus"),
        ({"code": "sha256"}, "CodeSource"),
    ],
    ids=repr,
)
def test_a_wrong_record_raises_value_error_that_names_the_field(wrong: Any, named: str) -> None:
    wire = {**encode(PLAN), **wrong} if wrong else wrong

    with pytest.raises(ValueError, match=named):
        decode(LaunchPlan, wire)
