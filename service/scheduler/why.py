"""Why each waiting job waits: from the test that failed to a code, a sentence with numbers, and what to do. Pure.

Found once for each lane. Not for: deciding (`service.scheduler.policies`), nor holds that a person set (`holds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from service.domain.reasons import Reason, ReasonCode
from service.scheduler.capability import JOB, ask_of, reason_of_pool
from service.scheduler.facts import Nomination, WaitingJob
from service.scheduler.free_index import FreeIndex
from service.scheduler.jobs import Entry
from service.scheduler.placement import find_gang
from service.scheduler.queue import Lane
from service.scheduler.quota import Standing, borrowed_gpus, standing_of
from service.scheduler.scheduling_pass import Pass, Refusal
from service.scheduler.world import World


def reason_for(
    pass_: Pass, lane: Lane, entries: Sequence[Entry], refusal: Refusal | None
) -> Iterator[tuple[Entry, Reason]]:
    """The reason of each job of a lane."""
    found = _of_lane(pass_, lane, entries[0].job, refusal)
    for entry in entries:
        yield entry, _for(entry.id, found)


def reason_of_nomination(world: World, nomination: Nomination, now: float) -> Reason:
    """Of a job that waits for GPUs which are being freed for it."""
    names = ", ".join(sorted(world.nodes[share.node_id].view.name for share in nomination.gang.shares))
    leaving = [job_id for job_id in sorted(nomination.after) if job_id in world.runs]
    return Reason(
        code=ReasonCode.NOMINATED,
        text=f"{_gpus_on(nomination.gang.layout.num_gpus, names)} kept for it; " + _leaving(leaving),
        fix="Nothing to do: it starts as soon as they are free.",
    )


def _leaving(job_ids: Sequence[int]) -> str:
    if not job_ids:
        return "they are being freed."
    does = "writes its checkpoint and leaves" if len(job_ids) == 1 else "write their checkpoints and leave"
    return f"{_jobs(job_ids)} {does}."


def back_off(seconds: float) -> Reason:
    """Of a job whose last start failed by the pool's fault."""
    return Reason(
        code=ReasonCode.BACK_OFF,
        text=f"Its last start failed by the pool's fault; it is tried again within {max(1, round(seconds))} s.",
        fix="Nothing to do.",
    )


def _for(job_id: int, reason: Reason) -> Reason:
    """A reason that holds for all jobs of a lane, with this one's id in its commands: never another job's."""
    return replace(reason, fix=reason.fix.replace(JOB, str(job_id))) if JOB in reason.fix else reason


def _of_lane(pass_: Pass, lane: Lane, job: WaitingJob, refusal: Refusal | None) -> Reason:
    pool = reason_of_pool(pass_.world, job)
    if pool is not None:
        return pool
    code = "behind" if refusal is None else refusal.code
    numbers: dict[str, Any] = {} if refusal is None else {**refusal.numbers, "num_given": refusal.num_given}
    maker = _MAKERS.get(code, _no_room)
    reason = maker(pass_, lane, job, numbers)
    return _not_given_back(pass_, lane, job, reason) if code in _TRIED else reason


def _not_free(pass_: Pass, lane: Lane, job: WaitingJob, *_: Any) -> Reason:
    num_free = _free_for(lane.index, job)
    if num_free < job.least.num_gpus:
        return Reason(
            code=ReasonCode.NEEDS_GPUS,
            text=f"It needs {ask_of(job)}, {num_free} {'is' if num_free == 1 else 'are'} free.",
            fix=_when_free(job),
        )
    if not job.least.num_gpus:
        return Reason(
            code=ReasonCode.NEEDS_NODES,
            text=f"It needs {ask_of(job)}: no node has as many CPUs and as much memory free.",
            fix="It starts when one has; fewer CPUs or less memory may start sooner.",
        )
    share, num_nodes = job.least.gpus_per_node, job.least.num_nodes
    have = _nodes_with(lane.index, share)
    if have < num_nodes:
        best = max((number for number, bucket in enumerate(lane.index.buckets) if bucket), default=0)
        nobody = f"no node has {share} of them (the best has {best})."
        some = f"only {have} of {num_nodes} nodes {'has' if have == 1 else 'have'} {share} of them."
        return Reason(
            code=ReasonCode.SCATTERED,
            text=f"It needs {ask_of(job)}: {num_free} GPUs are free, but {some if have else nobody}",
            fix="It starts when whole shares are free; smaller parts per node may start sooner.",
        )
    if job.is_exclusive:
        return Reason(
            code=ReasonCode.NEEDS_NODES,
            text=f"It needs {ask_of(job)}: {num_free} GPUs are free, but something else runs on their nodes, and it "
            "wants nodes for itself.",
            fix="It starts when nodes are idle; without resources.exclusive it may start sooner.",
        )
    return Reason(
        code=ReasonCode.NEEDS_NODES,
        text=f"It needs {ask_of(job)}: {num_free} GPUs are free, but not together with enough CPUs and memory.",
        fix="It starts when whole shares are free; fewer CPUs or less memory per node may start sooner.",
    )


def _no_room(pass_: Pass, lane: Lane, job: WaitingJob, numbers: dict[str, Any]) -> Reason:
    """It did not fit: because of what this pass gave to others before it, or because too little was free."""
    nodes = lane.index.nodes
    num_places, num_nominations = numbers.get("num_given", (None, None))
    gangs = [one.gang for one in pass_.places[:num_places]]
    gangs += [one.gang for one in pass_.nominations[:num_nominations]]
    given = sum(
        len(share.gpu_indices)
        for gang in gangs
        for share in gang.shares
        if share.node_id in nodes and job.may_run_on(nodes[share.node_id].view)
    )
    if (given or (pass_.places and not job.least.num_gpus)) and _free_for(
        lane.index, job
    ) + given >= job.least.num_gpus:
        return Reason(
            code=ReasonCode.BEHIND,
            text=f"It needs {ask_of(job)}; jobs ahead of it in the queue take what is free.",
            fix="It starts when they end: gang why shows them.",
        )
    if find_gang(lane.index, job) is not None:
        return Reason(
            code=ReasonCode.BEHIND,
            text=f"It needs {ask_of(job)}, which are free; a job ahead of it that needs more goes first.",
            fix="It starts once that one has: gang why shows it.",
        )
    return _not_free(pass_, lane, job)


def _too_costly(pass_: Pass, lane: Lane, job: WaitingJob, numbers: dict[str, Any]) -> Reason:
    protected = pass_.num_protected
    if protected:
        return _protected(pass_, lane, job, protected)
    if not pass_.num_open:
        reason = _no_room(pass_, lane, job, numbers)
        return reason if reason.code is ReasonCode.BEHIND else _nobody_resumes(pass_, lane, job, reason)
    return _with(pass_, lane, job, ReasonCode.TOO_COSTLY,
                 "those running end within 3 times its own time left, or stopping them costs more than it gains",
                 _when_free(job, "a shorter limit"))  # fmt: skip


def _nobody_resumes(pass_: Pass, lane: Lane, job: WaitingJob, missing: Reason) -> Reason:
    count = sum(
        not run.is_stopping
        and run.started_at < pass_.now
        and any(node_id in lane.index.nodes for node_id, _ in run.masks)
        for run in pass_.world.runs.values()
    )
    if not count:
        return missing
    does = "the job that runs does" if count == 1 else f"the {count} jobs that run do"
    return _with(pass_, lane, job, ReasonCode.NOT_RESUMABLE,
                 f"{does} not resume, or may not be stopped once more, so nothing is stopped for it",
                 _when_free(job))  # fmt: skip


def _not_given_back(pass_: Pass, lane: Lane, job: WaitingJob, reason: Reason) -> Reason:
    """Whether its team's quota is lent to scripts that have not shown yet that they resume; else the reason given."""
    world = pass_.world
    if not world.has_quotas or not job.least.num_gpus or standing_of(world, lane) is not Standing.IN_QUOTA:
        return reason
    borrowers = sorted(
        run.id
        for run in world.runs.values()
        if run.job.may_borrow
        and not run.job.is_preemptible
        and run.job.team_id != lane.team_id
        and borrowed_gpus(world, run.job.team_id)
        and any(node_id in lane.index.nodes for node_id, _ in run.masks)
    )
    if not borrowers:
        return reason
    does = "borrows and has" if len(borrowers) == 1 else "borrow and have"
    back = "it is asked back as soon as it does" if len(borrowers) == 1 else "they are asked back as soon as they do"
    return _with(pass_, lane, job, ReasonCode.NOT_RESUMABLE,
                 f"{_jobs(borrowers)} {does} not reported a checkpoint yet: {back}",
                 "Nothing to do; or ask an admin to requeue what borrows: gang requeue "
                 f"{' '.join(map(str, borrowers[:3]))}.")  # fmt: skip


def _patience(pass_: Pass, lane: Lane, job: WaitingJob, numbers: dict[str, Any]) -> Reason:
    if not pass_.num_open and not pass_.num_protected:
        return _no_room(pass_, lane, job, numbers)
    return _with(pass_, lane, job, ReasonCode.PATIENCE, "running jobs are given up to 5 minutes to end by themselves",
                 "Nothing to do.")  # fmt: skip


def _protected(pass_: Pass, lane: Lane, job: WaitingJob, count: int) -> Reason:
    return _with(pass_, lane, job, ReasonCode.PROTECTED,
                 f"of those running, {count} started too recently to be stopped, and stopping others does not pay",
                 "It starts when enough are free, or when their protected run is over.")  # fmt: skip


def _quorum(pass_: Pass, lane: Lane, job: WaitingJob, numbers: dict[str, Any]) -> Reason:
    return _with(pass_, lane, job, ReasonCode.QUORUM,
                 f"stopping job {numbers['job']} would idle {numbers['gpus'] - job.least.num_gpus} GPUs for it",
                 "It starts when enough are free, or when more jobs like it wait.")  # fmt: skip


def _reserved(pass_: Pass, lane: Lane, job: WaitingJob, numbers: dict[str, Any]) -> Reason:
    if find_gang(lane.index, job) is not None:
        return Reason(
            code=ReasonCode.RESERVED,
            text=f"It needs {ask_of(job)}: {_free_for(lane.index, job)} GPUs are free, and kept for a job ahead of it "
            "that it could delay.",
            fix="It starts earlier with a limit that ends before that reservation: resources.time.",
        )
    return _with(pass_, lane, job, ReasonCode.RESERVED, "what is free is reserved for a job ahead of it",
                 "It starts earlier with a limit that ends before that reservation: resources.time.")  # fmt: skip


def _with(pass_: Pass, lane: Lane, job: WaitingJob, code: ReasonCode, why: str, fix: str) -> Reason:
    """What is missing, and why nobody is stopped for it."""
    missing = _not_free(pass_, lane, job)
    return Reason(code=code, text=f"{missing.text[:-1]}; {why}.", fix=fix)


def _team_cap(pass_: Pass, lane: Lane, job: WaitingJob, numbers: dict[str, Any]) -> Reason:
    return _cap("Its team", f"gang admin quota {_team_name(pass_, job)} --cap N", numbers)


def _user_cap(pass_: Pass, lane: Lane, job: WaitingJob, numbers: dict[str, Any]) -> Reason:
    return _cap("Its owner", f"gang admin cap {pass_.world.users[job.user_id].name} --gpus N", numbers)


def _cap(whose: str, command: str, numbers: dict[str, Any]) -> Reason:
    used, limit, asked = numbers["used"], numbers["limit"], numbers["asked"]
    if asked > limit:
        return Reason(
            code=ReasonCode.CAP,
            text=f"It asks for {asked} GPUs, and {whose.lower()} may hold at most {limit}: it cannot start so.",
            fix=f"Ask for less, or have an admin raise the cap: {command}.",
        )
    return Reason(
        code=ReasonCode.CAP,
        text=f"{whose} holds {used} of at most {limit} GPUs; it asks for {asked} more.",
        fix=f"It starts when others of them end; an admin can raise the cap: {command}.",
    )


def _cannot_borrow(pass_: Pass, lane: Lane, job: WaitingJob, numbers: dict[str, Any]) -> Reason:
    return _beyond_quota(pass_, job, numbers, "GPUs", "--gpus N")


def _cannot_borrow_nodes(pass_: Pass, lane: Lane, job: WaitingJob, numbers: dict[str, Any]) -> Reason:
    return _beyond_quota(pass_, job, numbers, "whole nodes", "--nodes N")


def _beyond_quota(pass_: Pass, job: WaitingJob, numbers: dict[str, Any], what: str, option: str) -> Reason:
    used, limit, asked = numbers["used"], numbers["limit"], numbers["asked"]
    resume = "Let it resume from checkpoints and say so (preemptible: true)"
    if asked > limit:
        return Reason(
            code=ReasonCode.NOT_RESUMABLE,
            text=f"It asks for {asked} {what}, its team's quota is {limit}, and only jobs that resume may borrow: "
            "it cannot start so.",
            fix=f"{resume}, or have an admin raise the quota: gang admin quota {_team_name(pass_, job)} {option}.",
        )
    return Reason(
        code=ReasonCode.NOT_RESUMABLE,
        text=f"Its team holds {used} of {limit} {what} of its quota and would have to borrow for the {asked} it asks "
        "for; only jobs that resume may borrow.",
        fix=f"{resume}, or wait until its team's quota has room.",
    )


def _team_name(pass_: Pass, job: WaitingJob) -> str:
    team = pass_.world.teams.get(job.team_id)
    return "TEAM" if team is None else team.name


_MAKERS: Final = {
    "patience": _patience,
    "too_costly": _too_costly,
    "quorum": _quorum,
    "reserved": _reserved,
    "team_cap": _team_cap,
    "user_cap": _user_cap,
    "cannot_borrow": _cannot_borrow,
    "cannot_borrow_nodes": _cannot_borrow_nodes,
}


_TRIED: Final = ("patience", "too_costly", "quorum", "no_room")
"""Codes of jobs whose turn came and whom neither a free GPU nor a quota given back could help."""


# --- Words ---------------------------------------------------------------------------------------------------------


def _when_free(job: WaitingJob, *others: str) -> str:
    """When it starts, and with what it might sooner: nothing asks for less than one GPU."""
    helps = [*(["fewer GPUs"] if job.least.num_gpus > 1 else []), *others]
    return "It starts when enough are free" + (f"; with {' or '.join(helps)} it may start sooner." if helps else ".")


def _gpus_on(count: int, names: str) -> str:
    if not count:
        return f"Room on {names} is"
    return f"1 GPU on {names} is" if count == 1 else f"{count} GPUs on {names} are"


def _jobs(ids: Sequence[int]) -> str:
    words = [f"job {job_id}" for job_id in ids[:3]]
    return ", ".join(words) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")


def _free_for(index: FreeIndex, job: WaitingJob) -> int:
    if job.home is None:
        return index.num_free
    return sum(index.free_mask(node).bit_count() for node in index.nodes.values() if job.may_run_on(node.view))


def _nodes_with(index: FreeIndex, count: int) -> int:
    return sum(len(bucket) for bucket in index.buckets[count:])
