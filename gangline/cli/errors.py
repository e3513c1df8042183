"""How an error reads on the terminal: what happened, one line per fault of a job file, and `fix:`. Pure.

Not for: choosing the exit code (`gangline.cli.exit_codes`).
"""

from __future__ import annotations

from gangline.cli.sanitise import clean, clean_inline
from gangline.client.errors import GanglineError, SpecProblem


def error_lines(error: GanglineError, *, label: str = "", overridden: frozenset[str] = frozenset()) -> list[str]:
    """The lines to print. `label` is the job file's name, `overridden` the keys given by --set."""
    faults = [fault_line(problem, label, overridden) for problem in error.errors]
    lines = faults or [f"error: {clean(error.detail)}"]
    if error.fix:
        lines.append(f"fix: {clean(error.fix)}")
    if error.status is not None and error.status >= 500 and error.problem.get("request_id"):
        lines.append(f"request: {clean_inline(str(error.problem['request_id']))}")
    return lines


def fault_line(problem: SpecProblem, label: str, overridden: frozenset[str]) -> str:
    """`gpt.yaml:7:3  resources.num_gpu: unknown key. Did you mean resources.gpus?`"""
    pointer, message = clean_inline(problem.pointer), clean_inline(problem.message)
    where = _where(problem, label, overridden)
    text = f"{pointer}: {message}" if pointer and not message.startswith(f"{pointer}:") else message
    if problem.suggestion:
        suggestion = clean_inline(problem.suggestion)
        # A bare key is a likely one; anything longer is a sentence already.
        hint = suggestion if " " in suggestion else f"Did you mean {suggestion}?"
        text = text if hint in text else f"{text.rstrip('.')}. {hint}"
    return f"{where}  {text}" if where else text


def _where(problem: SpecProblem, label: str, overridden: frozenset[str]) -> str:
    if problem.pointer.startswith("--set "):
        return ""
    if any(problem.pointer == key or problem.pointer.startswith(f"{key}.") for key in overridden):
        return "--set"
    place = [clean_inline(label) or "job file"] if label or problem.line else []
    if problem.line is not None:
        place += [str(problem.line), str(problem.column or 1)]
    return ":".join(place)
