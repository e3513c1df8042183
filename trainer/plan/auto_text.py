"""What `auto` says of its choice: why, at what price something else, what is wrong when nothing can run. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.plan.axes import ParallelPlan, RankLayout
from trainer.plan.candidates import Candidate, Subject
from trainer.plan.estimate import OptimizerKind, states_of
from trainer.plan.estimate_text import bytes_text
from trainer.plan.problem import PlanProblem
from trainer.plan.schedules import bubble_of


def why_chosen(
    subject: Subject, chosen: Candidate, tried: Sequence[Candidate], gpu_memory_bytes: int, *, has_fit: bool
) -> str:
    """One paragraph: what the model needs, what fits, and what did not."""
    usable = bytes_text(0.9 * gpu_memory_bytes)
    each = "each of " if subject.layout.world_size > 1 else ""
    sentences = [f"{_needs(subject)}; {each}{_on(subject.layout)} can use {usable} of {bytes_text(gpu_memory_bytes)}."]
    others = [one for one in tried if one is not chosen]
    if has_fit:
        sentences.append(f"Chosen is {way_text(chosen.plan)}: {_memory(chosen)}.")
    else:
        sentences.append(f"Nothing is sure to fit; nearest is {way_text(chosen.plan)}: {_memory(chosen)}.")
    if has_fit and (failed := _first_of_each_kind(others)):
        told = "; ".join(f"{way_text(one.plan)} would need {bytes_text(one.total)}" for one in failed)
        sentences.append(f"Not taken, for want of memory: {told}.")
    if chosen.plan.pp > 1:
        sentences.append(f"Of each step {bubble_of(chosen.plan):.0%} is bubble.")
    if chosen.plan.data_parallel_size < subject.layout.world_size and subject.batch_size < subject.layout.world_size:
        sentences.append(f"A batch of {subject.batch_size} has no sample for each of {subject.layout.world_size} GPUs.")
    return " ".join(sentences)


def why_unknown_memory(subject: Subject, chosen: Candidate) -> str:
    """As `why_chosen`, where nobody knows how much memory there is."""
    return (
        f"{_needs(subject)}. How much memory a GPU has is not known here (CPU slots, say), so {way_text(chosen.plan)} "
        f"was chosen by batch and layers alone: it needs {bytes_text(chosen.total)} on each rank."
    )


def too_large_warning(chosen: Candidate, gpu_memory_bytes: int) -> str:
    """That a plan may run out of memory, or must."""
    states = chosen.memory.largest_states
    if states > gpu_memory_bytes:
        return (
            f"{way_text(chosen.plan)} cannot fit: parameters, gradients and optimizer state take {bytes_text(states)} "
            f"on a GPU of {bytes_text(gpu_memory_bytes)}, whatever the batch."
        )
    return (
        f"{way_text(chosen.plan)} may run out of memory: it is estimated to need {bytes_text(chosen.total)} of "
        f"{bytes_text(gpu_memory_bytes)} on a GPU ({chosen.total / gpu_memory_bytes:.0%}; 90 % is safe)."
    )


def told_alternative(other: Candidate, layout: RankLayout, relative_step_time: float) -> str:
    """Another way with its price: `4 GPUs with a pipeline of stages …: 61 GB a GPU, steps about 2.4 times as long`."""
    gpus = f"{layout.world_size} GPU{'s' if layout.world_size > 1 else ''}"
    where = f" on {layout.num_nodes} nodes" if layout.num_nodes > 1 else ""
    bubble = f", {bubble_of(other.plan):.0%} bubble" if other.plan.pp > 1 else ""
    return (
        f"{gpus}{where} with {way_text(other.plan)}: {bytes_text(other.total)} a GPU{bubble}, "
        f"steps about {relative_step_time:.2g} times as long (without what is sent)"
    )


def cannot_fit(subject: Subject, least: Candidate, gpu_memory_bytes: int) -> PlanProblem:
    """The refusal of a job whose states fit under no split."""
    total = sum(states_of(subject.profile.layers, ParallelPlan(), subject.optimizer))
    gpus = math.ceil(total / (0.9 * gpu_memory_bytes))
    return PlanProblem(
        key="resources.gpus",
        message=(
            f"are {subject.layout.world_size} of {bytes_text(gpu_memory_bytes)}, but {_needs(subject)}: "
            f"{way_text(least.plan)}, the way that needs least, has {bytes_text(least.memory.largest_states)} of that "
            "on a GPU, whatever the batch."
        ),
        fix=f"Ask for {gpus} GPUs of this size or more, or for larger ones"
        f"{_cheaper(subject, least, gpu_memory_bytes)}.",
    )


def no_way(subject: Subject) -> PlanProblem:
    """That no plan can use all the ranks."""
    profile, world_size = subject.profile, subject.layout.world_size
    reasons = [f"a batch of {subject.batch_size} has no sample for each of {world_size} ranks"]
    if not profile.can_split:
        reasons.append("the model does not list its layers")
    elif len(profile.layers) < 2:
        reasons.append("the model is one layer")
    if not profile.has_tensor_parallel_plan:
        reasons.append("its layers say nothing of how they could be split")
    return PlanProblem(
        key="train.batch_size",
        message=f"leaves {_on(subject.layout)} without a way to share the work: {'; '.join(reasons)}.",
        fix=f"Set it to {world_size} or more, or ask for {max(1, subject.batch_size)} GPUs or fewer.",
    )


def way_text(plan: ParallelPlan) -> str:
    """A plan in some words: `tensor 8 × dp_shard 8 with full activation checkpointing`."""
    axes = [
        f"{axis} {getattr(plan, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "tp") if getattr(plan, axis) > 1
    ]
    text = f"{plan.strategy}" + (f" ({' × '.join(axes)})" if len(axes) > 1 else "")
    details = []
    if plan.pp > 1:
        details.append(f"{plan.schedule}, {plan.micro_batches} micro-batches")
    if plan.grad_accum_steps > 1:
        details.append(f"gradients accumulated over {plan.grad_accum_steps} parts")
    if plan.activation_checkpointing != "none":
        details.append(f"{plan.activation_checkpointing} activation checkpointing")
    return text + (f" with {' and '.join(details)}" if details else "")


def _needs(subject: Subject) -> str:
    profile = subject.profile
    total = sum(states_of(profile.layers, ParallelPlan(), subject.optimizer))
    return (
        f"{profile.name} has {_count(profile.num_parameters)} parameters, which with gradients and the state of "
        f"{_optimizer_text(subject.optimizer)} take {bytes_text(total)}"
    )


def _memory(chosen: Candidate) -> str:
    worst = chosen.memory.worst
    samples = chosen.memory.samples_per_micro_batch
    return (
        f"{bytes_text(worst.total)} on the fullest GPU, {bytes_text(worst.states)} of them parameters, gradients and "
        f"optimizer, {bytes_text(worst.activations)} activations of micro-batches of {samples}"
    )


def _first_of_each_kind(tried: Sequence[Candidate]) -> list[Candidate]:
    """Of each strategy that was tried and did not fit, the form that needs least."""
    least: dict[str, Candidate] = {}
    for one in tried:
        if one.plan.strategy not in least or one.total < least[one.plan.strategy].total:
            least[one.plan.strategy] = one
    return list(least.values())


def _cheaper(subject: Subject, least: Candidate, gpu_memory_bytes: int) -> str:
    """SGD with momentum keeps three quarters of what AdamW does: parameters, gradients and one moment of two."""
    would_fit = 0.75 * least.memory.largest_states <= gpu_memory_bytes
    return ", or set train.optimizer to sgd (a quarter less)" if subject.optimizer.name == "adamw" and would_fit else ""


def _optimizer_text(optimizer: OptimizerKind) -> str:
    return {"adamw": "AdamW", "sgd": "SGD"}.get(optimizer.name, "the task's own optimizer (counted as AdamW)")


def _on(layout: RankLayout) -> str:
    gpus = f"{layout.world_size} GPU{'s' if layout.world_size > 1 else ''}"
    return f"{gpus} on {layout.num_nodes} nodes" if layout.num_nodes > 1 else gpus


def _count(number: int) -> str:
    for unit, size in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
