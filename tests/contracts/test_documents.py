"""The documents say what the code does: pages made from the code are up to date, every code and setting is in them."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

from gangline.protocol.outcomes import Outcome
from service.domain.outcomes import OUTCOME_RULES
from service.errors import ServiceError
from service.settings import Settings
from tests.contracts.documents import FOLDER, MACHINES, OTHER_CODES, PAGES, diagram, error_classes


@pytest.mark.parametrize("name", PAGES)
def test_a_page_made_from_the_code_is_up_to_date(name: str) -> None:
    text = (FOLDER / name).read_text() if (FOLDER / name).exists() else ""
    assert text == PAGES[name](), f"deploy/docs/{name} has drifted: run `python -m tests.contracts.documents`"


@pytest.mark.parametrize("machine", MACHINES)
def test_a_diagram_holds_every_move_of_the_table_and_no_other(machine: str) -> None:
    transitions = MACHINES[machine]
    drawn = set(re.findall(r"^    (\w+) --> (\w+)$", diagram(transitions, "waiting"), re.MULTILINE))
    assert drawn == {(str(source), str(target)) for source, targets in transitions.items() for target in targets}


@pytest.mark.parametrize("error", error_classes(), ids=lambda error: error.__name__)
def test_every_error_has_a_code_a_status_a_meaning_and_a_fix_and_is_documented(error: type[ServiceError]) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", error.code)
    assert 400 <= error.status < 600
    assert inspect.getdoc(error) != inspect.getdoc(ServiceError) or error is ServiceError
    assert error.default_fix.endswith(".")
    assert f"`{error.code}`" in (FOLDER / "errors.md").read_text()


def test_no_two_errors_share_a_code() -> None:
    codes = [error.code for error in error_classes()] + [code for code, *_ in OTHER_CODES]
    assert sorted(codes) == sorted(set(codes))


def test_every_setting_says_what_it_means_and_is_documented() -> None:
    page = (FOLDER / "settings.md").read_text()
    for spec in dataclasses.fields(Settings):
        assert spec.metadata["meaning"].endswith("."), spec.name
        assert f"GANGLINE_SERVER_{spec.name.upper()}`" in page


def test_every_outcome_has_a_rule_and_is_documented() -> None:
    assert set(OUTCOME_RULES) == set(Outcome)
    page = (FOLDER / "outcomes.md").read_text()
    assert all(f"`{outcome}`" in page for outcome in Outcome)
