"""What the agent decides, case by case: a row is one look at a node and the actions that must follow, and no others."""

from __future__ import annotations

import itertools

import pytest

from worker.reconcile import (
    NEVER_SUPERVISED,
    NODE_RESTARTED,
    SUPERVISOR_GONE,
    Action,
    Answer,
    FinishFenced,
    FinishLost,
    ForgetAttempt,
    KillProcessSet,
    Observed,
    ObservedAttempt,
    Phase,
    SpawnSupervisor,
    StartAttempt,
    SupervisorState,
    reconcile,
)

CLAIMING, CLAIMED, SUPERVISED, ENDED, UNREADABLE = Phase
NONE, STARTING, ALIVE, DEAD, REBOOTED = SupervisorState


def seen(attempt_id: int, phase: Phase, supervisor: SupervisorState) -> ObservedAttempt:
    return ObservedAttempt(attempt_id=attempt_id, phase=phase, supervisor=supervisor)


def start(attempt_id: int) -> Action:
    return StartAttempt(attempt_id=attempt_id)


def spawn(attempt_id: int) -> Action:
    return SpawnSupervisor(attempt_id=attempt_id)


def finish(attempt_id: int, message: str = SUPERVISOR_GONE) -> Action:
    return FinishLost(attempt_id=attempt_id, message=message)


def fenced(attempt_id: int) -> Action:
    return FinishFenced(attempt_id=attempt_id)


def kill(attempt_id: int) -> Action:
    return KillProcessSet(attempt_id=attempt_id)


def forget(attempt_id: int) -> Action:
    return ForgetAttempt(attempt_id=attempt_id)


# sentence: (attempts with folders, process sets, launch, fenced) -> actions in order
CASES: dict[str, tuple[list[ObservedAttempt], set[int], list[int], set[int], list[Action]]] = {
    "an idle node does nothing": ([], set(), [], set(), []),
    "a new attempt is started": ([], set(), [7], set(), [start(7)]),
    "several new attempts are started by id": ([], set(), [9, 7, 8], set(), [start(7), start(8), start(9)]),
    "an attempt listed twice is started once": ([], set(), [7, 7], set(), [start(7)]),
    "a claim whose answer was lost is made again": ([seen(7, CLAIMING, NONE)], set(), [7], set(), [start(7)]),
    "a claim is made again even when it is not listed": ([seen(7, CLAIMING, NONE)], set(), [], set(), [start(7)]),
    "claimed and never supervised: spawned": ([seen(7, CLAIMED, NONE)], set(), [], set(), [spawn(7)]),
    "claimed and still listed: spawned, not claimed": ([seen(7, CLAIMED, NONE)], set(), [7], set(), [spawn(7)]),
    "a supervisor that is starting is left alone": ([seen(7, CLAIMED, STARTING)], set(), [7], set(), []),
    "a claimed attempt with ranks but no supervisor is finished, never doubled": (
        [seen(7, CLAIMED, NONE)],
        {7},
        [],
        set(),
        [finish(7, NEVER_SUPERVISED)],
    ),
    "a running attempt is adopted": ([seen(7, SUPERVISED, ALIVE)], {7}, [], set(), []),
    "a running attempt that is listed again is not started again": ([seen(7, SUPERVISED, ALIVE)], {7}, [7], set(), []),
    "a lost supervisor is finished for": ([seen(7, SUPERVISED, DEAD)], {7}, [], set(), [finish(7)]),
    "a lost supervisor without ranks too": ([seen(7, SUPERVISED, DEAD)], set(), [], set(), [finish(7)]),
    "after a restart of the node all is lost": (
        [seen(7, SUPERVISED, REBOOTED), seen(8, SUPERVISED, REBOOTED)],
        set(),
        [],
        set(),
        [finish(7, NODE_RESTARTED), finish(8, NODE_RESTARTED)],
    ),
    "an ended attempt whose supervisor cleans up is left to it": ([seen(7, ENDED, ALIVE)], set(), [], set(), []),
    "the folder of an ended attempt is removed": ([seen(7, ENDED, DEAD)], set(), [], set(), [forget(7)]),
    "what an ended attempt left behind is killed first": (
        [seen(7, ENDED, DEAD)],
        {7},
        [],
        set(),
        [kill(7), forget(7)],
    ),
    "ranks without a folder are killed": ([], {7}, [], set(), [kill(7)]),
    "ranks without a folder are killed before the attempt can start": ([], {7}, [7], set(), [kill(7)]),
    "ranks with an unreadable state file are killed and forgotten": (
        [seen(7, UNREADABLE, NONE)],
        {7},
        [],
        set(),
        [kill(7), forget(7)],
    ),
    "fenced and running: ranks killed, the supervisor cleans up": (
        [seen(7, SUPERVISED, ALIVE)],
        {7},
        [],
        {7},
        [kill(7)],
    ),
    "fenced and lost: killed and forgotten, not reported": (
        [seen(7, SUPERVISED, DEAD)],
        {7},
        [],
        {7},
        [fenced(7)],
    ),
    "fenced while its supervisor cleans up anyway: left to it": ([seen(7, ENDED, ALIVE)], set(), [], {7}, []),
    "fenced before it was claimed: forgotten": ([seen(7, CLAIMING, NONE)], set(), [], {7}, [kill(7), forget(7)]),
    "fenced after the claim: never spawned": ([seen(7, CLAIMED, NONE)], set(), [7], {7}, [kill(7), forget(7)]),
    "fenced ranks without a folder are killed": ([], {7}, [], {7}, [kill(7)]),
    "fenced and listed at once: not started": ([], set(), [7], {7}, []),
    "shares are freed before new work is started": (
        [seen(3, SUPERVISED, DEAD), seen(4, CLAIMED, NONE), seen(5, ENDED, DEAD)],
        {3, 9},
        [1],
        set(),
        [kill(9), forget(5), finish(3), spawn(4), start(1)],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_case(case: tuple[list[ObservedAttempt], set[int], list[int], set[int], list[Action]]) -> None:
    attempts, process_sets, launch, fenced, expected = case

    actions = reconcile(
        Observed(attempts=tuple(attempts), process_sets=frozenset(process_sets)),
        Answer(launch=tuple(launch), fenced=frozenset(fenced)),
    )

    assert list(actions) == expected


EVERY_WORLD = list(itertools.product(Phase, SupervisorState, [False, True], [False, True], [False, True]))


@pytest.mark.parametrize(("phase", "supervisor", "has_ranks", "is_listed", "is_fenced"), EVERY_WORLD)
def test_rules_that_hold_in_every_world(
    phase: Phase, supervisor: SupervisorState, has_ranks: bool, is_listed: bool, is_fenced: bool
) -> None:
    actions = reconcile(
        Observed(attempts=(seen(7, phase, supervisor),), process_sets=frozenset({7} if has_ranks else ())),
        Answer(launch=(7,) if is_listed else (), fenced=frozenset({7} if is_fenced else ())),
    )
    kinds = [type(action) for action in actions]

    assert len(kinds) == len(set(kinds))
    if supervisor in (ALIVE, STARTING):
        assert not {StartAttempt, SpawnSupervisor, FinishLost, FinishFenced} & set(kinds), (
            "nobody may stand beside a living supervisor"
        )
    if is_fenced:
        assert set(kinds) <= {KillProcessSet, ForgetAttempt, FinishFenced}, (
            "what is fenced is never started or reported"
        )
    if is_fenced and (has_ranks or supervisor not in (ALIVE, STARTING)):
        assert KillProcessSet in kinds or FinishFenced in kinds, "what is fenced is killed, supervised or not"
    if has_ranks and supervisor not in (ALIVE, STARTING):
        assert {KillProcessSet, FinishLost, FinishFenced} & set(kinds), "ranks that nobody supervises are ended"
    if ForgetAttempt in kinds:
        assert not {FinishLost, FinishFenced} & set(kinds), (
            "a folder is not removed under the process that finishes for it"
        )
    if phase is SUPERVISED and supervisor is ALIVE and not is_fenced:
        assert actions == (), "a running attempt is never disturbed"
    if is_listed and not is_fenced and phase in (CLAIMING, CLAIMED) and supervisor is NONE:
        assert actions, "an attempt that waits for this node is never forgotten"


def test_deciding_twice_decides_the_same() -> None:
    observed = Observed(attempts=(seen(2, SUPERVISED, DEAD), seen(1, CLAIMED, NONE)), process_sets=frozenset({2, 5, 4}))
    answer = Answer(launch=(6, 3), fenced=frozenset({4}))

    assert reconcile(observed, answer) == reconcile(observed, answer)
    assert reconcile(Observed(attempts=observed.attempts[::-1], process_sets=observed.process_sets), answer) == (
        reconcile(observed, answer)
    )
