"""The small pure parts of the agent: delays, hints, log lines, names and addresses."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from worker.agent_log import format_fact
from worker.celery_child import LONGEST_DELAY_SECONDS, SHORTEST_DELAY_SECONDS, STEADY_AFTER_SECONDS, next_delay
from worker.credential import (
    AgentError,
    Credential,
    address_towards,
    checked_node_name,
    load_credential,
    read_enrolment_token,
    save_credential,
)
from worker.doorbell import LARGEST_ATTEMPT_ID, Doorbell, launch_message, parse_message
from worker.enrolment import FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS, retry_delay

NOON = datetime(2026, 5, 1, 12, 0, 0, 250_000, tzinfo=UTC)

# --- Hints -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt_id", [1, 17, LARGEST_ATTEMPT_ID])
def test_a_hint_says_the_attempt_that_was_put_in(attempt_id: int) -> None:
    message = launch_message(attempt_id)

    assert message is not None
    assert parse_message(message) == attempt_id


@pytest.mark.parametrize("value", [None, "7", True, False, 0, -1, 7.0, [7], {"a": 1}, LARGEST_ATTEMPT_ID + 1])
def test_what_is_no_attempt_id_makes_no_hint(value: object) -> None:
    assert launch_message(value) is None


@pytest.mark.parametrize(
    "message", [b"", b"launch", b"launch ", b"launch 0", b"launch -1", b"launch 1 2", b"stop 1", b"launch 9" * 3]
)
def test_a_datagram_that_is_no_hint_names_no_attempt(message: bytes) -> None:
    assert parse_message(message) is None


def test_a_left_over_socket_of_a_killed_agent_is_replaced(tmp_path: Path) -> None:
    Doorbell(tmp_path)  # never closed, as after kill -9

    bell = Doorbell(tmp_path)

    assert bell.path.stat().st_mode & 0o777 == 0o600
    bell.close()
    assert list(tmp_path.iterdir()) == []


# --- Delays ----------------------------------------------------------------------------------------------------------


def test_a_child_that_keeps_dying_is_restarted_ever_later_and_a_steady_one_at_once_again() -> None:
    delays = [SHORTEST_DELAY_SECONDS]
    for _ in range(9):
        delays.append(next_delay(delays[-1], lived_seconds=1.0))

    assert delays == sorted(delays)
    assert delays[-1] == LONGEST_DELAY_SECONDS
    assert next_delay(LONGEST_DELAY_SECONDS, STEADY_AFTER_SECONDS) == SHORTEST_DELAY_SECONDS
    assert next_delay(0.0, 0.1) == SHORTEST_DELAY_SECONDS


def test_heartbeats_are_retried_ever_later_up_to_a_limit_and_nodes_are_spread() -> None:
    assert retry_delay(1, 1.0) == FIRST_RETRY_SECONDS
    assert retry_delay(3, 1.0) == 4 * FIRST_RETRY_SECONDS
    assert retry_delay(10_000, 1.0) == LONGEST_RETRY_SECONDS
    assert retry_delay(10_000, 1.0, longest_seconds=2.0) == 2.0
    assert retry_delay(10_000, 0.0) < retry_delay(10_000, 0.5) < LONGEST_RETRY_SECONDS


# --- Log -------------------------------------------------------------------------------------------------------------


def test_a_log_line_is_a_verb_and_facts() -> None:
    line = format_fact("claimed_attempt", {"attempt_id": 7, "address": "10.0.0.1:80", "interval": 0.5}, NOON)

    assert line == "claimed_attempt at=2026-05-01T12:00:00.250Z attempt_id=7 address=10.0.0.1:80 interval=0.5"


def test_no_value_can_break_out_of_its_line_or_field() -> None:
    hostile = 'a b="c"\nagent_started at=1 \x1b[2J'

    line = format_fact("said", {"text": hostile, "empty": ""}, NOON)

    assert "\n" not in line
    assert "\x1b" not in line
    assert line.endswith(' empty=""')
    assert json.loads(line.split("text=")[1].removesuffix(' empty=""')) == hostile


# --- Names, addresses, credentials -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "node-1", "gpu_07.rack-2", "A" * 63])
def test_names_that_a_node_may_have(name: str) -> None:
    assert checked_node_name(name) == name


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a.", "a b", "a\n", "ä", "a" * 64])
def test_names_that_a_node_may_not_have(name: str) -> None:
    with pytest.raises(AgentError, match="cannot be named"):
        checked_node_name(name)


@pytest.mark.parametrize("server", ["http://127.0.0.1:8080", "http://localhost:1", "http://127.8.9.10"])
def test_towards_a_server_on_this_machine_the_address_is_the_loopback_one(server: str) -> None:
    assert address_towards(server) == "127.0.0.1"


@pytest.mark.parametrize("server", ["nonsense", "http://name-that-resolves-nowhere.invalid"])
def test_no_way_to_the_server_is_an_error_with_a_fix(server: str) -> None:
    with pytest.raises(AgentError, match="Fix:"):
        address_towards(server)


def test_a_credential_is_read_as_it_was_saved_and_is_private(tmp_path: Path) -> None:
    credential = Credential(server="http://s", node_name="n", pool_id="p", credential="gln_x", address="10.0.0.1")

    assert load_credential(tmp_path) is None
    save_credential(tmp_path, credential)

    assert load_credential(tmp_path) == credential
    assert (tmp_path / "credential.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"server": 1}'])
def test_a_broken_credential_is_an_error_and_not_a_new_enrolment(tmp_path: Path, content: str) -> None:
    (tmp_path / "credential.json").write_text(content)

    with pytest.raises(AgentError, match="cannot be read"):
        load_credential(tmp_path)


@pytest.mark.parametrize("content", ["", "gln_node", "gle_a gle_b", "glu_user"])
def test_a_file_without_an_enrolment_token_is_refused_without_showing_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)

    with pytest.raises(AgentError, match="no enrolment token") as refusal:
        read_enrolment_token(path)

    assert not content or content not in str(refusal.value)
