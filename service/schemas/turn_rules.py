"""Rules of a job file about its turn: its start time, the jobs that it needs, the end of its time, labels of its nodes.

Pure, like `spec_rules`: raw document, wrong types passed over. Not for: whether the jobs named exist and may be seen,
or who may use the top priority (`service.operations.submit_job`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from service.domain.start_time import load_zone, read_start_time
from service.domain.text import problem_with_name
from service.schemas.spec_messages import shown
from service.schemas.spec_rules import Document, Finding, is_trained, part_of


def turn_findings(document: Document) -> Iterator[Finding]:
    """Every broken rule about a job's turn."""
    for rule in _RULES:
        yield from rule(document)


def _start_rule(document: Document) -> Iterator[Finding]:
    start, zone = document.get("start_after"), document.get("zone")
    if start is None and isinstance(zone, str):
        yield Finding(("zone",), "says in which zone start_after is, and there is no start_after.", "Remove it.")
    if isinstance(zone, str):
        try:
            load_zone(zone)
        except ValueError as error:
            yield _finding("zone", zone, error)
            return
    if isinstance(start, str) and (zone is None or isinstance(zone, str)):
        try:
            read_start_time(start, zone)
        except ValueError as error:
            yield _finding("start_after", start, error)


def _finding(key: str, written: str, error: ValueError) -> Finding:
    what, _, hint = str(error).partition("; ")
    return Finding((key,), f"{shown(written)} {what}.", f"{hint[:1].upper()}{hint[1:]}.")


def _after_rule(document: Document) -> Iterator[Finding]:
    after = document.get("after")
    seen: dict[int, int] = {}
    for index, one in enumerate(after if isinstance(after, list) else ()):
        job = one.get("job") if isinstance(one, dict) else one
        if isinstance(job, bool) or not isinstance(job, int):
            continue
        if job in seen:
            yield Finding(("after", index), f"job {job} is named already, as after[{seen[job]}].", "Keep one of them.")
        seen.setdefault(job, index)


def _time_limit_rule(document: Document) -> Iterator[Finding]:
    if document.get("on_time_limit") != "requeue":
        return
    if part_of(document, "resources").get("time") is None:
        yield Finding(("on_time_limit",), "there is no time limit to reach.", "Give resources.time, or remove it.")
    if not is_trained(document) and document.get("preemptible") is not True:
        yield Finding(
            ("on_time_limit",),
            "would start a script or command from its beginning each time: it does not say that it resumes.",
            "Set preemptible: true if it resumes by itself, else remove on_time_limit.",
        )


def _labels_rule(document: Document) -> Iterator[Finding]:
    for label, value in part_of(part_of(document, "resources"), "labels").items():
        if problem := problem_with_name(label):
            yield Finding(("resources", "labels", label), f"the label {problem}.", "Use printable characters.")
        if isinstance(value, str) and value and (problem := problem_with_name(value)):
            yield Finding(("resources", "labels", label), f"{problem}.", "Write it as gang node ls shows it.")


def _gpu_memory_rule(document: Document) -> Iterator[Finding]:
    resources = part_of(document, "resources")
    has_no_gpus = any(_is_zero(resources.get(key)) for key in ("gpus", "gpus_per_node"))
    if resources.get("gpu_memory") is not None and has_no_gpus:
        yield Finding(("resources", "gpu_memory"), "the job asks for no GPU.", "Remove it, or ask for GPUs.")


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 0


_RULES: Final[tuple[Callable[[Document], Iterator[Finding]], ...]] = (
    _start_rule,
    _after_rule,
    _time_limit_rule,
    _labels_rule,
    _gpu_memory_rule,
)
