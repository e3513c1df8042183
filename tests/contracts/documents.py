"""The pages of `deploy/docs` that are made from the code: states, outcomes, errors, settings, commands, keys, routes.

`python -m tests.contracts.documents` writes them; `test_documents.py` fails when one is not what the code says.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from service import errors
from service.domain import states
from service.domain.outcomes import OUTCOME_RULES, OutcomeRule
from service.domain.reasons import REASON_MEANINGS, ReasonCode
from service.errors import ServiceError
from service.settings import ENV_PREFIX, Settings
from tests.contracts.interface_documents import command_rows, job_file_rows, route_rows

FOLDER: Final = Path(__file__).parents[2] / "deploy" / "docs"
MADE_BY: Final = "<!-- Made from the code by `python -m tests.contracts.documents`. Change the code, then run that. -->"

MACHINES: Final[Mapping[str, Mapping[Any, frozenset[Any]]]] = {
    "Job": states.JOB_TRANSITIONS,
    "Attempt": states.ATTEMPT_TRANSITIONS,
    "Attempt on one node": states.ATTEMPT_NODE_TRANSITIONS,
    "Node": states.NODE_TRANSITIONS,
}
FIRST_STATES: Final = {
    "Job": "waiting",
    "Attempt": "allocated",
    "Attempt on one node": "allocated",
    "Node": "unreachable",
}

OTHER_CODES: Final = (
    ("method_not_allowed", 405, "The path is known, but not with this method.", "Look at the routes in the README."),
    ("http_error", 400, "The request could not be read as HTTP.", "Look at the routes in the README."),
)
"""Codes of errors that the web framework raises itself."""


def diagram(transitions: Mapping[Any, frozenset[Any]], first: str) -> str:
    """A state machine as a Mermaid diagram: every move of the table and no other."""
    lines = ["stateDiagram-v2", f"    [*] --> {first}"]
    lines += [f"    {source} --> {target}" for source, targets in transitions.items() for target in sorted(targets)]
    lines += [f"    {state} --> [*]" for state in transitions if state in states.terminal_states(transitions)]
    return "\n".join(lines)


def states_page() -> str:
    """All state machines."""
    parts = ["# States", MADE_BY, "A state that leads to the end is final, in the database too."]
    for name, transitions in MACHINES.items():
        parts += [f"## {name}", f"```mermaid\n{diagram(transitions, FIRST_STATES[name])}\n```"]
    rows = [("Code", "Meaning"), ("---", "---"), *((f"`{code}`", REASON_MEANINGS[code]) for code in ReasonCode)]
    parts += ["## Why a job waits", "Codes of `reason`.", "\n".join(f"| {' | '.join(row)} |" for row in rows)]
    return "\n\n".join(parts) + "\n"


def outcomes_page() -> str:
    """Every outcome with what follows from it."""
    rows = [
        (
            f"`{outcome}`",
            rule.job_state,
            _retried(rule),
            _yes(rule.is_charged),
            rule.fault,
            rule.sentence,
            rule.fix,
        )
        for outcome, rule in OUTCOME_RULES.items()
    ]
    head = ("Outcome", "Job ends as", "Retried by itself", "Retry is charged", "Fault", "Sentence", "What to do")
    return _page("Outcomes", "Why an attempt ended, and what follows from it.", head, rows)


def error_classes() -> list[type[ServiceError]]:
    """All errors that a caller may see, by name."""
    return [value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, ServiceError)]


def errors_page() -> str:
    """Every code of a problem document."""
    listed = [
        (error.code, error.status, inspect.getdoc(error) or "", error.default_fix) for error in error_classes()
    ] + list(OTHER_CODES)
    rows = [(f'<a id="{code}"></a>`{code}`', status, meaning, fix) for code, status, meaning, fix in sorted(listed)]
    lead = (
        "Every error of the API is a problem document (RFC 9457, `application/problem+json`) with `code`, `detail`, "
        "`fix` and `request_id`; where single fields are at fault, `errors` lists all of them."
    )
    return _page("Error codes", lead, ("Code", "Status", "Meaning", "What to do, unless `fix` says more"), rows)


def settings_page() -> str:
    """Every setting of the server."""
    rows = [
        (f"`{ENV_PREFIX}{spec.name.upper()}`", f"`{_shown(spec.default)}`", spec.metadata["meaning"])
        for spec in dataclasses.fields(Settings)
    ]
    lead = "Environment variables of the server. Combinations that would break a promise refuse to start."
    return _page("Settings", lead, ("Variable", "Default", "Meaning"), rows)


def commands_page() -> str:
    """Every command of `gang`."""
    lead = "All commands of `gang`; `--help` on each lists its options. Exit codes: see the README."
    return _page("Commands", lead, ("Command", "What it does"), list(command_rows()))


def job_file_page() -> str:
    """Every key of a job file."""
    lead = "Every key of a job file (version 1), YAML or JSON. Unknown keys are errors."
    return _page("Job file", lead, ("Key", "Meaning"), list(job_file_rows()))


def routes_page() -> str:
    """Every route of the API."""
    lead = "Every route. Errors are `application/problem+json` with `code` and `fix`: see [errors](errors.md)."
    return _page("Routes", lead, ("Method", "Path", "For", "What it does"), list(route_rows()))


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "states.md": states_page,
    "outcomes.md": outcomes_page,
    "errors.md": errors_page,
    "settings.md": settings_page,
    "commands.md": commands_page,
    "job-file.md": job_file_page,
    "routes.md": routes_page,
}


def _page(title: str, lead: str, head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in (head, ("---",) * len(head), *rows)]
    return f"# {title}\n\n{MADE_BY}\n\n{lead}\n\n" + "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ") or "–"


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text or "(empty)"


def _retried(rule: OutcomeRule) -> str:
    return _yes(rule.is_retried) + (
        f", {rule.retry_limit} time{'s' * (rule.retry_limit > 1)}" if rule.retry_limit else ""
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())
