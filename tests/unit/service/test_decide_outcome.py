"""Why an attempt ended: a table of sentences, each with what the nodes reported and the one cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from gangline.protocol.outcomes import Outcome, StopIntent, TrainerExit
from service.domain.decide_outcome import CANCELS, NodeEnding, decide_outcome
from tests.unit.service.endings import failure, lost, node, rank, silent

STOPPED: dict[str, Any] = {"signal": "SIGTERM", "stopped": True}
PEER: dict[str, Any] = {"error": ("DistBackendError", "Connection closed by peer"), "peer_loss": True}
NO_MODULE = ("ModuleNotFoundError", "No module named 'torchvision'")
WORKER_KILLED = ("DataWorkerDied", "Data worker 4711 was killed by SIGKILL. Shared memory (/dev/shm) has 64 MiB")
FULL = ("OSError", "[Errno 28] No space left on device")
QUOTA = (
    "CheckpointFailed",
    "the checkpoint of step 5 could not be written: rank 0: OSError: [Errno 122] Disk quota exceeded",
)
OLD_TUTORIAL = ("ValueError", "device_ids can only be None or contain a single element.")
UNUSED = ("RuntimeError", "Expected to have finished reduction in the prior iteration before starting a new one.")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What was reported, what we had asked for, and what must come out."""

    ends: tuple[NodeEnding, ...]
    outcome: Outcome
    intent: StopIntent | None = None
    kind: str = "script"
    cause: dict[str, Any]
    """Expected fields of the cause; `says`, `fixes`: parts of detail and fix."""


def case(outcome: str, *ends: NodeEnding, **more: Any) -> Case:
    intent, kind = more.pop("intent", None), more.pop("kind", "script")
    return Case(ends=ends, outcome=Outcome(outcome), intent=intent, kind=kind, cause=more)


TABLE: dict[str, Case] = {
    "all ranks exit 0": case("succeeded", node(1, rank(0), rank(1)), node(2, rank(2)), exit_code=0, rank=None),
    "one rank exits 1": case("user_error", node(1, rank(0, 1)), rank=0, exit_code=1, says="exit code 1"),
    "exit 255 is told exactly": case("user_error", node(1, rank(0, 255)), exit_code=255),
    "a signal that we did not send is named": case(
        "user_error", node(1, rank(0, signal="SIGSEGV")), signal="SIGSEGV", exit_code=None, says="SIGSEGV"
    ),
    "a rank raises": case(
        "user_error",
        node(1, rank(0, 1, error=("ValueError", "bad batch 17\nmore"))),
        says="rank 0 on node-1: ValueError: bad batch 17",
    ),
    "the first failure names the cause, ranks that we stopped never do": case(
        "user_error", node(1, rank(0, **STOPPED), rank(1, **STOPPED)), node(2, rank(2, 7), rank(3, **STOPPED)),
        rank=2, node_name="node-2", exit_code=7,
    ),
    "two ranks fail 50 ms apart: the earlier one": case(
        "user_error", node(1, rank(0, 3, at=100.05)), node(2, rank(2, 4, at=100.0)), rank=2, exit_code=4
    ),
    "two ranks fail at the same moment: the lower rank": case(
        "user_error", node(1, rank(1, 3)), node(2, rank(2, 4)), rank=1, exit_code=3
    ),
    "a clock that runs 60 s ahead does not make a failure the later one": case(
        "user_error", node(1, rank(0, 3, at=101.0)), node(2, rank(2, 4, at=160.0), offset=-60.0), rank=2
    ),
    "a clock that runs behind does not make a failure the earlier one": case(
        "user_error", node(1, rank(0, 3, at=101.0)), node(2, rank(2, 4, at=50.0), offset=60.0), rank=0
    ),
    "the loss of a peer is secondary even when it is earlier": case(
        "user_error", node(1, rank(0, 1, at=90.0, **PEER)), node(2, rank(2, 9, at=95.0)), rank=2, exit_code=9
    ),
    "only losses of peers": case(
        "communication_error", node(1, rank(0, 1, **PEER)), node(2, rank(2, 1, at=101, **PEER)),
        rank=0, says="lost its peers",
    ),
    "a lost node explains the losses of its peers": case(
        "node_lost", node(1, rank(0, 1, **PEER)), lost(2), node_name="node-2", rank=None
    ),
    "a lost node while its peers were stopped": case(
        "node_lost", node(1, rank(0, **STOPPED)), lost(2), intent=StopIntent.PEER_FAILURE, says="node-2 gave no sign"
    ),
    "a failure of user code wins over a lost node": case("user_error", node(1, rank(0, 5)), lost(2), rank=0),
    "all nodes lost": case("node_lost", lost(1), lost(2), says="node-1, node-2"),
    "a node that never claimed its part": case("launch_failed", node(1, rank(0)), silent(2), says="node-2 never"),
    "a command that exits 127": case("config_error", node(1, rank(0, 127)), kind="command", exit_code=127, says="127"),
    "a script that exits 127 by itself": case("user_error", node(1, rank(0, 127)), exit_code=127),
    "a missing package": case("environment_error", node(1, rank(0, 1, error=NO_MODULE)), says="torchvision"),
    "Python ran out of memory": case("out_of_memory", node(1, rank(0, 1, error=("MemoryError", "")))),
    "the GPU ran out of memory": case(
        "out_of_memory", node(1, rank(0, 1, error=("OutOfMemoryError", "CUDA out of memory."))), says="CUDA"
    ),
    "killed by the kernel for memory": case(
        "out_of_memory", node(1, rank(0, signal="SIGKILL"), oom_kills=1), signal="SIGKILL", says="1 out-of-memory kill"
    ),
    "the kernel took a process that loaded data": case(
        "out_of_memory", node(1, rank(0, 65, error=WORKER_KILLED), oom_kills=1), says="SIGKILL", exit_code=65
    ),
    "somebody killed a process that loaded data": case(
        "user_error", node(1, rank(0, 65, error=WORKER_KILLED)), says="SIGKILL", exit_code=65
    ),
    "killed from outside without an OOM kill": case("user_error", node(1, rank(0, signal="SIGKILL")), signal="SIGKILL"),
    "an OOM kill on another node explains nothing here": case(
        "user_error", node(1, rank(0, signal="SIGKILL")), node(2, rank(2, **STOPPED), oom_kills=1), signal="SIGKILL"
    ),
    "an error whose text only mentions memory": case(
        "user_error", node(1, rank(0, 1, error=("RuntimeError", "CUDA out of memory, said the tutorial")))
    ),
    "the disk is full": case("storage_full", node(1, rank(0, 1, error=FULL)), says="No space left"),
    "the device_ids of the old tutorial": case(
        "user_error", node(1, rank(0, 1, error=OLD_TUTORIAL)), fixes="LOCAL_RANK"
    ),
    "unused parameters under DDP": case(
        "user_error", node(1, rank(0, 1, error=UNUSED)), fixes="find_unused_parameters=True"
    ),
    "a missing script, found before the start": case(
        "config_error", node(1, failure=failure("config_error", "trian.py is missing", fix="Correct run.script.")),
        says="node-1: trian.py is missing", fix="Correct run.script.",
    ),
    "what a node found explains the losses of its peers": case(
        "environment_error",
        node(1, rank(0, 1, at=90, **PEER)), node(2, failure=failure("environment_error", at=95.0)), node_name="node-2",
    ),
    "the supervisor died": case(
        "supervisor_lost", node(1, failure=failure("supervisor_lost")), node(2, rank(2, **STOPPED)), node_name="node-1"
    ),
    "an outcome that only a newer node knows keeps its message": case(
        "user_error", node(1, failure=failure("gpu_on_fire", "the GPU burns")), says="the GPU burns"
    ),
    "a cancel, whatever the ranks then did": case(
        "cancelled", node(1, rank(0, 3), rank(1, **STOPPED)), intent=StopIntent.CANCEL, rank=None
    ),
    "an admin's stop": case("cancelled", node(1, rank(0, **STOPPED)), intent=StopIntent.ADMIN_STOP, rank=None),
    "an admin's stop that met a training just done": case(
        "cancelled", node(1, rank(0), result="succeeded"), intent=StopIntent.ADMIN_STOP, kind="recipe"
    ),
    "a cancel that met a job just done": case("cancelled", node(1, rank(0)), intent=StopIntent.CANCEL),
    "a cancel and a lost node": case("cancelled", node(1, rank(0, **STOPPED)), lost(2), intent=StopIntent.CANCEL),
    "the time limit": case(
        "time_limit", node(1, rank(0, **STOPPED), failure=failure("time_limit")), intent=StopIntent.TIME_LIMIT
    ),
    "the time limit that met a job just done": case("succeeded", node(1, rank(0)), intent=StopIntent.TIME_LIMIT),
    "a failure before the time limit of the same node": case(
        "user_error", node(1, rank(0, 3, at=99), failure=failure("time_limit", at=100)), rank=0
    ),
    "a failure after the time limit of the same node": case(
        "time_limit", node(1, rank(0, 3, at=101), failure=failure("time_limit", at=100)), rank=None
    ),
    "preempted": case("preempted", node(1, rank(0, **STOPPED)), intent=StopIntent.PREEMPT),
    "drained": case("preempted", node(1, rank(0, **STOPPED)), intent=StopIntent.DRAIN),
    "the start deadline": case(
        "launch_failed", node(1, rank(0, **STOPPED)), silent(2), intent=StopIntent.START_DEADLINE
    ),
    "the start deadline of a job whose code had failed": case(
        "user_error", node(1, rank(0, 4)), silent(2), intent=StopIntent.START_DEADLINE, exit_code=4
    ),
    "cut off, and stopped by on_disconnect": case(
        "node_lost", node(1, rank(0, **STOPPED), stop_intent="disconnected"), says="on_disconnect", node_name="node-1"
    ),
    "a machine that goes down stops its own ranks": case(
        "preempted", node(1, rank(0, **STOPPED), stop_intent="drain"), node(2, rank(2, 1, **PEER)), node_name="node-1"
    ),
    "ranks stopped by nobody's word": case("supervisor_lost", node(1, rank(0, **STOPPED))),
    "killed after the grace is noted": case(
        "cancelled", node(1, rank(0, signal="SIGKILL", stopped=True, killed=True)), intent=StopIntent.CANCEL,
        note="killed after grace",
    ),
    "what could not be ended is noted": case(
        "user_error", node(1, rank(0, 1), leftovers=("17 python",)), note="left over: 17 python"
    ),
}  # fmt: skip
ABORTED: dict[str, Any] = {"signal": "SIGABRT"}
BOOM = ("ValueError", "boom")
TRAINED: dict[str, Case] = {
    "a training that is done": case("succeeded", node(1, rank(0), rank(1), result="succeeded"), exit_code=0),
    "done, and aborted in teardown": case(
        "succeeded", node(1, rank(0), rank(1, **ABORTED), result="succeeded"), node(2, rank(2), result="succeeded")
    ),
    "done, and aborted in teardown, its peers stopped for it": case(
        "succeeded", node(1, rank(0, **ABORTED), result="succeeded"), node(2, rank(1, **STOPPED), result="succeeded"),
        intent=StopIntent.PEER_FAILURE,
    ),
    "done before it could be preempted": case(
        "succeeded", node(1, rank(0, **STOPPED), result="succeeded"), intent=StopIntent.PREEMPT
    ),
    "done before it could be drained": case("succeeded", node(1, rank(0), result="succeeded"), intent=StopIntent.DRAIN),
    "done at the time limit": case(
        "succeeded", node(1, rank(0, **STOPPED), result="succeeded", failure=failure("time_limit")),
        intent=StopIntent.TIME_LIMIT,
    ),
    "done, and cancelled": case(
        "cancelled", node(1, rank(0), result="succeeded"), intent=StopIntent.CANCEL
    ),
    "done on one node, the other lost": case(
        "node_lost", node(1, rank(0), result="succeeded"), lost(2), node_name="node-2"
    ),
    "done on one node, another failed": case(
        "user_error", node(1, rank(0, **ABORTED), result="succeeded"), node(2, rank(1, 65, error=BOOM)),
        rank=1, exit_code=65,
    ),
    "left by the user's code with 0": case(
        "user_error", node(1, rank(0), rank(1)), rank=0, says="exit code 0 before the training was done", fixes="exit",
    ),
    "the plan cannot run": case("config_error", node(1, rank(0, 64, error=("ConfigError", "no such recipe"))), rank=0,
                                says="no such recipe"),
    "the user's code raised": case(
        "user_error", node(1, rank(0, 65, error=BOOM)), says="ValueError: boom", exit_code=65
    ),
    "a package is missing": case("environment_error", node(1, rank(0, 65, error=NO_MODULE)), says="torchvision"),
    "a disk is full": case("storage_full", node(1, rank(0, 65, error=FULL))),
    "a quota is used up by a checkpoint": case("storage_full", node(1, rank(0, 65, error=QUOTA))),
    "out of memory, by its exit code": case(
        "out_of_memory", node(1, rank(0, 66, error=("RuntimeError", "DefaultCPUAllocator: can't allocate memory")))
    ),
    "the loss is NaN": case("nan_loss", node(1, rank(0, 67, error=("NonFiniteLossError", "step 7"))), says="step 7"),
    "peers that lost each other": case(
        "communication_error", node(1, rank(0, 68)), node(2, rank(1, 68, at=99)), rank=1
    ),
    "a lost peer is secondary to an error that came later": case(
        "user_error", node(1, rank(0, 68, at=90)), node(2, rank(1, 65, at=95, error=BOOM)), rank=1
    ),
    "a lost peer is secondary to a kill": case(
        "user_error", node(1, rank(0, 68, at=90)), node(2, rank(1, signal="SIGKILL", at=95)), signal="SIGKILL"
    ),
    "an error of the user's that reads like a lost peer, by the log alone": case(
        "nan_loss", node(1, rank(0, 67, error=("NonFiniteLossError", "x"), peer_loss=True))
    ),
    "asked from outside to make room": case("preempted", node(1, rank(0, 75), rank(1, 75), result="preempted")),
    "asked from outside, aborted in teardown": case("preempted", node(1, rank(0, **ABORTED), result="preempted")),
    "asked from outside, its peers stopped for it": case(
        "preempted", node(1, rank(0, 75), result="preempted"), node(2, rank(1, **STOPPED)),
        intent=StopIntent.PEER_FAILURE,
    ),
    "a failure while others make room": case(
        "user_error", node(1, rank(0, 75, at=90)), node(2, rank(1, 65, at=95, error=BOOM)), rank=1
    ),
    "making room for us": case("preempted", node(1, rank(0, 75), result="preempted"), intent=StopIntent.PREEMPT,
                               says="asked"),
    "the time limit, with a last checkpoint": case(
        "time_limit", node(1, rank(0, 75, **STOPPED), result="preempted"), intent=StopIntent.TIME_LIMIT
    ),
    "a cancel": case("cancelled", node(1, rank(0, 76), result="cancelled"), intent=StopIntent.CANCEL),
    "all end with 0, with a result that nobody asked for": case(
        "user_error", node(1, rank(0), result="cancelled"), rank=0, exit_code=0, says="before the training was done"
    ),
    "all end with 0, and the nodes' results differ": case(
        "user_error", node(1, rank(0), result="succeeded"), node(2, rank(1), result="preempted"), exit_code=0
    ),
    "a hang, found by the watchdog": case(
        "hang", node(1, rank(0, **STOPPED), rank(1, **STOPPED), failure=failure("hang", "rank 1 stands", rank=1)),
        rank=1, node_name="node-1", says="rank 1 stands",
    ),
    "a hang that several nodes see: all wait for the rank with the fewest moves": case(
        "hang",
        node(1, rank(0, **STOPPED), failure=failure("hang", at=90, rank=0, moves=70)),
        node(2, rank(2, **STOPPED), failure=failure("hang", at=91, rank=2, moves=69)),
        rank=2, node_name="node-2",
    ),
    "a hang, and peers that lost their connection by the kill": case(
        "hang", node(1, rank(0, 68, at=101)), node(2, failure=failure("hang", at=100, rank=2)), rank=2
    ),
    "a kill from outside before the others hung": case(
        "user_error", node(1, rank(0, signal="SIGKILL", at=10)), node(2, failure=failure("hang", at=310, rank=2)),
        rank=0,
    ),
}  # fmt: skip
TABLE |= {
    f"{kind}: {sentence}": Case(
        ends=given.ends, outcome=given.outcome, intent=given.intent, kind=kind, cause=given.cause
    )
    for kind in ("recipe", "entry")
    for sentence, given in TRAINED.items()
}


@pytest.mark.parametrize("kind", ["script", "command"])
@pytest.mark.parametrize("code", sorted({*TrainerExit, 69, 74}))
def test_a_scripts_exit_code_is_just_its_code(kind: str, code: int) -> None:
    cause = decide_outcome([node(1, rank(0, code), result="succeeded")], None, kind=kind)
    assert (cause.outcome, cause.exit_code) == (Outcome.USER_ERROR if code else Outcome.SUCCEEDED, code)


@pytest.mark.parametrize("kind", ["recipe", "entry"])
@pytest.mark.parametrize("code", range(1, 256))
def test_every_exit_code_of_a_training_has_one_outcome(kind: str, code: int) -> None:
    stated: dict[int, Outcome] = {
        TrainerExit.CONFIG_ERROR: Outcome.CONFIG_ERROR,
        TrainerExit.OUT_OF_MEMORY: Outcome.OUT_OF_MEMORY,
        TrainerExit.NAN_LOSS: Outcome.NAN_LOSS,
        TrainerExit.COMMUNICATION_ERROR: Outcome.COMMUNICATION_ERROR,
        TrainerExit.PREEMPTED: Outcome.PREEMPTED,
    }
    cause = decide_outcome([node(1, rank(0, code))], None, kind=kind)
    assert cause.outcome is stated.get(code, Outcome.USER_ERROR)


@pytest.mark.parametrize("intent", [None, *StopIntent])
@pytest.mark.parametrize("code", [0, 65, 75, 76])
def test_a_finished_training_is_a_success_under_every_intent_but_a_cancel(intent: StopIntent | None, code: int) -> None:
    ends = [node(1, rank(0, code), rank(1, **ABORTED), result="succeeded"), node(2, rank(2, 68), result="succeeded")]
    expected = Outcome.CANCELLED if intent in CANCELS else Outcome.SUCCEEDED
    assert decide_outcome(ends, intent, kind="recipe").outcome is expected


@pytest.mark.parametrize("sentence", TABLE)
def test_decide_outcome(sentence: str) -> None:
    given = TABLE[sentence]
    expected = dict(given.cause)

    cause = decide_outcome(given.ends, given.intent, intent_detail="asked", kind=given.kind)

    assert cause.outcome is given.outcome
    assert expected.pop("says", "") in cause.detail
    assert expected.pop("fixes", "") in (cause.fix or "")
    assert {name: getattr(cause, name) for name in expected} == expected


@pytest.mark.parametrize("sentence", TABLE)
def test_the_order_in_which_nodes_are_listed_changes_no_outcome(sentence: str) -> None:
    given = TABLE[sentence]
    decided = [decide_outcome(ends, given.intent, kind=given.kind) for ends in (given.ends, given.ends[::-1])]
    assert decided[0].outcome == decided[1].outcome
    assert decided[0].rank == decided[1].rank


@pytest.mark.parametrize("intent", [None, *StopIntent])
def test_a_failed_rank_is_a_success_under_no_intent(intent: StopIntent | None) -> None:
    assert decide_outcome([node(1, rank(0, 1))], intent).outcome is not Outcome.SUCCEEDED


def test_every_outcome_of_this_version_can_come_out() -> None:
    not_yet = {Outcome.GPU_FAULT}
    assert {given.outcome for given in TABLE.values()} == set(Outcome) - not_yet
