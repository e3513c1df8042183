"""Checks a finished replay, from its runs alone: no GPU held twice, gangs whole, no work lost, nothing before its time.

Pure. Independent of the event loop on purpose: a mistake there must not hide itself here.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Final

from service.replay.run_record import RunInterval, RunRecord

TOLERANCE_SECONDS: Final = 1e-3
"""Of sums of times that may have decimals."""


def faults_of(record: RunRecord) -> list[str]:
    """A sentence for each thing that is wrong with a run; empty: nothing is."""
    return [*_faults_of_gpus(record), *_faults_of_jobs(record)]


def _faults_of_gpus(record: RunRecord) -> list[str]:
    jobs, faults = record.trace.jobs, []
    gpus_per_node, nodes = record.surroundings.gpus_per_node, record.surroundings.nodes
    uses: defaultdict[int, list[tuple[float, float, int]]] = defaultdict(list)
    for run in record.runs:
        taken = set()
        for share in run.shares:
            for index in share.gpu_indices:
                if not (1 <= share.node_id <= nodes and 0 <= index < gpus_per_node):
                    faults.append(f"job {jobs[run.place].job_id} ran on GPU {index} of node {share.node_id}, not there")
                gpu = share.node_id * gpus_per_node + index
                taken.add(gpu)
                uses[gpu].append((run.started_at, run.left_at, run.place))
        if len(taken) != jobs[run.place].gpus:
            faults.append(f"job {jobs[run.place].job_id} ran on {len(taken)} of its {jobs[run.place].gpus} GPUs")
    for gpu, intervals in uses.items():
        intervals.sort()
        for (_, left_at, first), (started_at, _, second) in itertools.pairwise(intervals):
            if started_at < left_at:
                faults.append(
                    f"GPU {gpu % gpus_per_node} of node {gpu // gpus_per_node} was held by jobs {jobs[first].job_id} "
                    f"and {jobs[second].job_id} at {started_at:g}"
                )
    return faults


def _faults_of_jobs(record: RunRecord) -> list[str]:
    faults = []
    runs_of: defaultdict[int, list[RunInterval]] = defaultdict(list)
    for run in record.runs:
        runs_of[run.place].append(run)
    for place, job in enumerate(record.trace.jobs):
        runs, ended_at = sorted(runs_of[place], key=lambda run: run.started_at), record.ended_at[place]
        if ended_at is None or not runs:
            faults.append(f"job {job.job_id} never ended")
            continue
        if runs[0].started_at < job.submitted_at:
            faults.append(f"job {job.job_id} started at {runs[0].started_at:g}, before its submission")
        if any(one.left_at > other.started_at for one, other in itertools.pairwise(runs)):
            faults.append(f"two runs of job {job.job_id} overlap")
        useful = sum(max(0.0, run.left_at - run.started_at - run.restore_seconds) for run in runs)
        if abs(useful - job.duration) > TOLERANCE_SECONDS:
            faults.append(f"job {job.job_id} got {useful:g} s of work done, it has {job.duration} s")
        if runs[-1].left_at != ended_at:
            faults.append(f"job {job.job_id} ended at {ended_at:g}, its last run at {runs[-1].left_at:g}")
    return faults
