"""`gang check`: would the server take this job file, and what would become of it? Submits nothing.

Not for: packing (only looked at) or waiting.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from gangline.cli import job_files
from gangline.cli.model_profile import profile_option, profiled
from gangline.cli.options import gang_command, set_option
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.cli.start_words import names, start_sentence, variant_line
from gangline.cli.words import NOTHING, count, duration
from gangline.client.models import build
from gangline.client.queue_models import BlockingJob, LimitAdvice, StartRange, StartVariant

MAX_SIZES_SHOWN = 16


@gang_command()
@click.argument("file")
@set_option
@profile_option
@click.option(
    "--when", "wants_when", is_flag=True, help="Also: when it would start, whom it would stop, what is sooner."
)
def check(session: Session, file: str, overrides: tuple[str, ...], wants_profile: bool, wants_when: bool) -> None:
    """Validate a job FILE (`-` for stdin) on the server; submit nothing.

    Every fault is listed with its line, and the exit code is 2.
    """
    job_file = job_files.load(session, file, overrides)
    if wants_profile:
        job_file = profiled(session, file, job_file)
    with session.busy("Checking"), job_files.faults_located(job_file):
        answer = session.client.check(job_file)
    if session.is_json:
        session.json(answer)
        return
    spec, resources = answer.get("spec") or {}, answer.get("resources") or {}
    session.out(f"{session.job_file_label} is valid: {clean_inline(str(spec.get('name', NOTHING)))}")
    session.out(f"  resources  {_resources(resources)}")
    plan = answer.get("plan") or {}
    if plan:
        session.out(f"  plan       {_plan(plan)}")
    for line in plan.get("lines") or ():
        session.out(f"             {clean_inline(str(line))}".rstrip())
    told = " ".join(str(line) for line in plan.get("lines") or ())
    for note in plan.get("notes") or ():
        if str(note).removeprefix("Strategy auto: ") in told:
            continue
        session.out(f"  note       {clean_inline(str(note))}")
    reason = answer.get("reason") or {}
    if reason.get("text"):
        session.out(f"  now        {clean_inline(str(reason['text']))}")
    if reason.get("fix"):
        session.out(f"  sooner     {clean_inline(str(reason['fix']))}")
    if wants_when:
        for line in when_lines(answer, session.now()):
            session.out(f"  {clean_inline(line)}")
    session.note(f"  submit     gang submit {file}")


def when_lines(answer: dict[str, Any], now: datetime) -> list[str]:
    """When the job would start, whom it would stop for that, and what would be sooner."""
    soon = answer.get("starts_in_seconds")
    stops = tuple(build(BlockingJob, job) for job in answer.get("would_stop") or ())
    if answer.get("starts_now"):
        lines = ["start      now"]
    elif isinstance(soon, int | float):
        lines = [f"start      in about {duration(soon)}: running jobs get as long to end by themselves"]
    elif isinstance(answer.get("start"), dict):
        lines = [f"start      {start_sentence(build(StartRange, answer['start']), now)}"]
    else:
        lines = ["start      unknown: this server does not foretell"]
    if stops:
        lines.append(f"stops      {names(stops)}")
    variants = [build(StartVariant, variant) for variant in answer.get("variants") or ()]
    lines += [f"sooner     {variant_line(variant)}" for variant in variants]
    if isinstance(answer.get("advice"), dict):
        lines.append(f"limit      {build(LimitAdvice, answer['advice']).text}")
    return lines


def _plan(plan: dict[str, Any]) -> str:
    """How a training is split, such as `ddp over 4 ranks, batch 32 (8 per rank), fp32`."""
    words = {name: clean_inline(str(plan.get(name, NOTHING))) for name in ("strategy", "batch_size", "precision")}
    ranks, batch, parts = plan.get("ranks"), plan.get("batch_size"), plan.get("grad_accum_steps")
    axes = plan.get("parallel") or {}
    copies = axes.get("dp_replicate", 1) * axes.get("dp_shard", 1)
    if words["strategy"] == "auto":
        return f"auto: chosen when the ranks start, batch {words['batch_size']}, {words['precision']}"
    shown = f"{words['strategy']} over {count(ranks, 'rank') if isinstance(ranks, int) else NOTHING}"
    shown += f", batch {words['batch_size']}"
    if isinstance(batch, int) and copies > 1:
        shown += f" ({batch / copies:g} per {'rank' if copies == ranks else 'copy of the model'})"
    if isinstance(parts, int) and parts > 1:
        shown += f" in {parts} parts"
    return f"{shown}, {words['precision']}"


def _choice(sizes: list[Any]) -> str:
    """`8, 6, 4 or 2`; of many numbers the ends."""
    words = [clean_inline(str(size)) for size in sizes]
    if len(words) > MAX_SIZES_SHOWN:
        return f"one of {len(words)} numbers from {words[-1]} to {words[0]}"
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _resources(resources: dict[str, Any]) -> str:
    nodes, per_node = resources.get("nodes"), resources.get("gpus_per_node")
    if not isinstance(nodes, int) or not isinstance(per_node, int):
        return NOTHING
    kind = f" of {clean_inline(str(resources['gpu']))}" if resources.get("gpu") else ""
    sizes = resources.get("sizes")
    if isinstance(sizes, list) and sizes:
        return f"{_choice(sizes)} GPUs{kind}, the most that are free at each start"
    return f"{count(nodes, 'node')} × {count(per_node, 'GPU')}{kind}"
