"""The table of a study in words and as JSON. Pure.

Not for: the figures (`service.replay.metrics`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from service.replay.forecasts import ForecastFigures, forecast_figures
from service.replay.pool_size import offered_load
from service.replay.study import ORACLE, Row, Study

NOTHING: Final = "–"

Cell = Callable[[Row], str]


def _figure(name: str, form: str) -> Cell:
    def cell(row: Row) -> str:
        value = row.figures[name]
        return NOTHING if value is None else form.format(value)

    return cell


def _over(row: Row) -> str:
    least, most = row.over_range
    spread = f" ({least:.2f}-{most:.2f})" if len(row.by_seed) > 1 else ""
    return f"{row.over:.3f}{spread}"


def _late(row: Row) -> str:
    return NOTHING if row.late_percent is None else f"{row.late_percent:.1f}"


COLUMNS: Final[tuple[tuple[str, Cell], ...]] = (
    ("POLICY", lambda row: row.policy),
    ("JCT h", _figure("mean_jct_hours", "{:.2f}")),
    ("OVER", _over),
    ("P99", _figure("p99_jct_hours", "{:.0f}")),
    ("WAIT h", _figure("mean_wait_hours", "{:.2f}")),
    ("IDLE %", _figure("idle_percent", "{:.1f}")),
    ("STOPS", _figure("preemptions_per_job", "{:.2f}")),
    ("MOST", _figure("max_preemptions", "{:.0f}")),
    ("BIG>24h %", _figure("big_after_24h_percent", "{:.1f}")),
    ("STARVED %", _figure("starved_percent", "{:.2f}")),
    ("UTIL %", _figure("utilisation_percent", "{:.1f}")),
    ("SPAN d", _figure("span_days", "{:.1f}")),
    ("MEDIAN", _figure("median_jct_hours", "{:.2f}")),
    ("P95", _figure("p95_jct_hours", "{:.1f}")),
    ("MAX WAIT", _figure("max_wait_hours", "{:.0f}")),
    ("SLOWDOWN", _figure("mean_slowdown", "{:.2f}")),
    ("BIG>1h %", _figure("big_after_1h_percent", "{:.0f}")),
)
"""What matters most stands first: a narrow terminal shows no more than fits."""
TEAM_COLUMNS: Final[tuple[tuple[str, Cell], ...]] = (
    ("JAIN", _figure("jain", "{:.2f}")),
    ("WORST", _figure("worst_team_slowdown", "{:.1f}")),
)
ALONE_COLUMNS: Final[tuple[tuple[str, Cell], ...]] = (("LATE %", _late),)


def columns_of(study: Study, rows: Sequence[Row]) -> list[tuple[str, Cell]]:
    """Headers with what stands under them; those about teams only where there are several."""
    has_teams = any(row.figures["jain"] is not None for row in rows)
    return [*COLUMNS, *(TEAM_COLUMNS if has_teams else ()), *(ALONE_COLUMNS if study.with_alone else ())]


def heading_of(study: Study) -> str:
    """One line that says what was replayed, on what, under which assumptions."""
    trace, pool, assumed = study.trace, study.surroundings, study.assumptions
    load = offered_load(trace, pool.nodes, pool.gpus_per_node)
    seeds = f"seeds {study.seeds[0]} to {study.seeds[-1]}" if len(study.seeds) > 1 else f"seed {study.seeds[0]}"
    return (
        f"{trace.name}: {len(trace.jobs):,} jobs on {pool.nodes} x {pool.gpus_per_node} GPUs, {load:.0%} offered; "
        f"{_limits(study)}, {_share(*_reporting(study))} report (±{assumed.report_error:.0%}), "
        f"{_share(*_preemptible(study))} preemptible ({study.preemption}), grace {pool.grace_seconds} s, "
        f"restore {pool.restore_seconds} s, {seeds}"
    )


def _limits(study: Study) -> str:
    """`human limits`; of recorded ones also how many jobs have none."""
    kind = f"{study.assumptions.limits} limits"
    without = jobs_without_limit(study)
    return f"{kind} ({without:,} of {len(study.trace.jobs):,} jobs have none)" if without else kind


def jobs_without_limit(study: Study) -> int:
    """Jobs that are replayed without a time limit."""
    return sum(job.limit is None for job in study.trace.jobs) if study.assumptions.limits == "recorded" else 0


def _reporting(study: Study) -> tuple[float, bool]:
    """The share of jobs that report, and whether that is as recorded."""
    share = study.assumptions.reporting_share
    return (_mean(job.reports for job in study.trace.jobs), True) if share is None else (share, False)


def _preemptible(study: Study) -> tuple[float, bool]:
    """The share of jobs that may be preempted, and whether that is as recorded."""
    share = study.assumptions.preemptible_share
    return (_mean(job.is_preemptible for job in study.trace.jobs), True) if share is None else (share, False)


def _mean(flags: Iterable[bool | None]) -> float:
    known = [bool(flag) for flag in flags]
    return sum(known) / len(known)


def _share(share: float, is_recorded: bool) -> str:
    return f"{'recorded ' if is_recorded else ''}{share:.0%}"


def notes_of() -> list[str]:
    """What the headers mean, for those who see them for the first time."""
    return [
        f"OVER: mean JCT (submission to end) over that of {ORACLE}, which knows all run times and stops jobs for free: "
        "it is a bound for JCT alone.",
        "IDLE: free GPUs that waiting jobs ask for. STOPS: preemptions and moves per job, MOST of one job. "
        "BIG: jobs of 8 or more GPUs that first start later. STARVED: waited over 24 h and 3 times their run.",
    ]


def forecast_lines(rows: Sequence[Row]) -> list[str]:
    """How good the forecasts were, a line for each policy that made any."""
    lines = []
    for row in rows:
        figures = _forecasts_of(row)
        if figures is not None:
            lines.append(
                f"{row.policy}, forecasts at submission, {figures.jobs:,} jobs that waited over 10 min: "
                f"{figures.inside_percent:.1f} % started within the range, {figures.within_2x_percent:.1f} % within 2x "
                f"of its p50, {figures.unknown_percent:.1f} % unknown; median p90/p50 "
                f"{figures.median_p90_over_p50:.2f}, median width {figures.median_width_hours:.1f} h"
            )
    return lines


def _forecasts_of(row: Row) -> ForecastFigures | None:
    judged = [one for outcome in row.by_seed for one in outcome.judged]
    return forecast_figures(judged) if judged else None


def study_json(study: Study, rows: Sequence[Row]) -> dict[str, Any]:
    """The same for programs. Figures are means of the seeds, each seed's own stand in `by_seed`."""
    pool, assumed = study.surroundings, study.assumptions
    reports, is_reports_recorded = _reporting(study)
    preemptible, is_preemptible_recorded = _preemptible(study)
    return {
        "trace": study.trace.name,
        "jobs": len(study.trace.jobs),
        "nodes": pool.nodes,
        "gpus_per_node": pool.gpus_per_node,
        "offered_load": offered_load(study.trace, pool.nodes, pool.gpus_per_node),
        "limits": assumed.limits,
        "jobs_without_limit": jobs_without_limit(study),
        "reports": reports,
        "reports_recorded": is_reports_recorded,
        "report_error": assumed.report_error,
        "preemptible": preemptible,
        "preemptible_recorded": is_preemptible_recorded,
        "preemption": study.preemption,
        "grace_seconds": pool.grace_seconds,
        "restore_seconds": pool.restore_seconds,
        "seeds": list(study.seeds),
        "items": [row_json(row) for row in rows],
    }


def row_json(row: Row) -> dict[str, Any]:
    """One policy."""
    return {
        "policy": row.policy,
        **row.figures,
        "over": row.over,
        "over_least": row.over_range[0],
        "over_most": row.over_range[1],
        "late_percent": row.late_percent,
        "forecast": None if (forecasts := _forecasts_of(row)) is None else dataclasses.asdict(forecasts),
        "by_seed": [{"seed": one.task.seed, **dataclasses.asdict(one.figures)} for one in row.by_seed],
    }
