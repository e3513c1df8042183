"""Finishes an attempt whose supervisor is gone: ends its processes, sends the rest, reports, removes the folder.

What was written before the death is not lost: the logs are on disk, and a report that was ready is sent as it is. Not
for: a supervisor that lives (it does this itself).
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Final

from gangline.protocol import names
from gangline.protocol.launch import LaunchPlan, NodeFailure, NodeReport, RankReport, decode
from worker import attempt_folder as folders
from worker.agent_log import log
from worker.api import AttemptApi
from worker.cgroup import AttemptCgroup
from worker.courier import Courier, DeliveredNotice, FencedNotice
from worker.endings import is_trainer
from worker.mailbox import Mailbox
from worker.node_report import read_result
from worker.process_set import end_marked, marked_pids
from worker.shared_memory import SharedMemoryTrace
from worker.shipper import Shipper, streams_of
from worker.state import (
    AttemptState,
    ProcessIdentity,
    current_boot_id,
    identify,
    read_state,
    write_state,
)

FENCED: Final = "fenced"
"""In the place of an outcome: nobody waits for a report; kill and forget."""


def finish_lost(attempt_folder: Path, outcome: str, message: str) -> None:
    """End and report the attempt. The caller holds the folder's lock. Returns when the server has the report, or has
    fenced the attempt. Raises StateError, FileNotFoundError."""
    state = read_state(attempt_folder)
    record = folders.read_record(attempt_folder)
    boot_id = current_boot_id()
    is_same_boot = state.supervisor is None or state.supervisor.boot_id == boot_id
    ranks = [ProcessIdentity(pid=rank.pid, start_time=rank.start_time, boot_id=boot_id) for rank in record.ranks]
    groups = tuple(Path(group) for group in record.cgroup_folders if Path(group).is_dir())
    cgroup = AttemptCgroup(groups) if is_same_boot and groups else None
    known = ranks if is_same_boot else []
    shared_memory = SharedMemoryTrace(since=min((rank.started_at for rank in record.ranks), default=time.time()))
    shared_memory.look(marked_pids(state.marker, recorded=known, cgroup=cgroup))
    killed, leftovers = end_marked(state.marker, recorded=known, cgroup=cgroup)
    _free_shared_memory(shared_memory)
    state = dataclasses.replace(state, supervisor=own_identity())
    _save_state(attempt_folder, state)
    log("finishing", attempt_id=state.attempt_id, outcome=outcome, killed=killed, leftovers=len(leftovers))
    if outcome != FENCED and state.node_rank is not None and state.phase != "ended":
        plan = _plan_or_none(attempt_folder)
        failure = NodeFailure(outcome=outcome, message=message, at=time.time())
        result = read_result(attempt_folder) if plan is not None and is_trainer(plan.run) else None
        report = _ready_report(attempt_folder) or _lost_report(record, failure, leftovers, result)
        _deliver(attempt_folder, state, state.node_rank, plan, report)
    clean_up(attempt_folder, state, record)


def _free_shared_memory(shared_memory: SharedMemoryTrace) -> None:
    try:
        shared_memory.clean()
    except OSError as error:
        log("shared_memory_not_freed", error=error)  # it takes memory, and hinders nothing else


def clean_up(attempt_folder: Path, state: AttemptState, record: folders.SupervisorRecord) -> None:
    """Remove what the attempt has on this node. The phase `ended` tells the agent that only this is left to do."""
    if record.scratch_folder is not None:
        _remove(Path(record.scratch_folder))
    _save_state(attempt_folder, dataclasses.replace(state, phase="ended"))
    _remove(attempt_folder)


def own_identity() -> ProcessIdentity:
    """Identity of this process."""
    identity = identify(os.getpid())
    assert identity is not None, "this process is not in /proc"
    return identity


def _deliver(
    attempt_folder: Path, state: AttemptState, node_rank: int, plan: LaunchPlan | None, report: NodeReport
) -> None:
    api = AttemptApi(state.server, state.token, state.attempt_id, node_rank)
    streams = streams_of(attempt_folder, plan) if plan is not None else ()
    shipper = Shipper(streams, attempt_folder / names.OFFSETS_FILE, api.put_stream)
    mailbox = Mailbox()
    courier = Courier(api, shipper, mailbox, gather_seconds=0.0)
    courier.finish(dataclasses.replace(report, stream_sizes=shipper.sizes()))
    courier.start()
    while True:
        mailbox.wait(None)
        for message in mailbox.drain():
            if isinstance(message, Exception):
                raise message
            if isinstance(message, DeliveredNotice | FencedNotice):
                return


def _lost_report(
    record: folders.SupervisorRecord, failure: NodeFailure, leftovers: tuple[str, ...], result: str | None
) -> NodeReport:
    now = time.time()
    ranks = tuple(
        RankReport(
            rank=rank.rank,
            local_rank=rank.local_rank,
            exit_code=None,  # whoever could have seen it is gone
            signal=None,
            stopped_by_us=True,
            killed_after_grace=False,
            started_at=rank.started_at,
            ended_at=now,
        )
        for rank in record.ranks
    )
    return NodeReport(
        ranks=ranks,
        failure=failure,
        stop_intent=None,
        process_set_empty=not leftovers,
        leftovers=leftovers,
        result=result,
    )


def _ready_report(attempt_folder: Path) -> NodeReport | None:
    """The report that the supervisor had made before it died: it saw the end, so it is the truth."""
    try:
        return decode(NodeReport, json.loads((attempt_folder / names.REPORT_FILE).read_bytes()))
    except FileNotFoundError:
        return None
    except ValueError as error:
        log("report_unreadable", error=error)
        return None


def _plan_or_none(attempt_folder: Path) -> LaunchPlan | None:
    try:
        return folders.read_plan(attempt_folder)
    except (FileNotFoundError, ValueError) as error:
        log("plan_unreadable", error=error)
        return None


def _save_state(attempt_folder: Path, state: AttemptState) -> None:
    try:
        write_state(attempt_folder, state)
    except OSError as error:
        log("state_not_saved", error=error)  # a full disk, or a folder that the agent has removed: go on to the end


def _remove(folder: Path) -> None:
    try:
        folders.remove_folder(folder)
    except OSError as error:
        log("folder_not_removed", folder=folder, error=error)
