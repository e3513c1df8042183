"""A chosen plan as `gang check` and `python -m trainer plan` show it: for people, and as JSON. Pure."""

from __future__ import annotations

from typing import Any

from gangline.protocol.launch import encode
from trainer.plan.auto_plan import AutoChoice
from trainer.plan.axes import RankLayout
from trainer.plan.estimate_text import estimate_lines
from trainer.plan.model_profile import ModelProfile
from trainer.plan.plan_text import describe_plan


def choice_lines(
    profile: ModelProfile,
    choice: AutoChoice,
    layout: RankLayout,
    *,
    batch_size: int,
    gpu_memory_bytes: int | None = None,
) -> list[str]:
    """The layout of the ranks, bytes by kind, what is sent, why, what else there is, what may go wrong."""
    lines = [*describe_plan(choice.plan, layout), ""]
    lines += estimate_lines(
        profile, choice.plan, choice.memory, batch_size=batch_size, gpu_memory_bytes=gpu_memory_bytes
    )
    lines += ["", f"why: {choice.why}"]
    lines += [f"or: {one.text}" for one in choice.alternatives]
    lines += [f"warning: {one}" for one in choice.warnings]
    return [*lines, *(f"note: {one}" for one in profile.notes)]


def choice_as_dict(choice: AutoChoice) -> dict[str, Any]:
    """The choice as a JSON-ready dict: plan, why, alternatives, warnings, bytes of each rank of the pipeline."""
    return {
        "plan": encode(choice.plan),
        "why": choice.why,
        "alternatives": [encode(one) for one in choice.alternatives],
        "warnings": list(choice.warnings),
        "memory": {
            "samples_per_micro_batch": choice.memory.samples_per_micro_batch,
            "by_pp_rank": [{**encode(one), "total": one.total} for one in choice.memory.by_pp_rank],
        },
    }
