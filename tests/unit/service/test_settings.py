"""Settings that would break a promise refuse to start, by the name of the rule, the values and the fix."""

from __future__ import annotations

import dataclasses
import re

import pytest

from service.errors import SettingsError
from service.scheduler import scheduling_pass
from service.scheduler.policies import DEFAULT_POLICY, POLICIES
from service.settings import (
    ENV_PREFIX,
    POLICY_NAMES,
    PREEMPTION_KINDS,
    SMALL_POOL_NODES,
    Settings,
    interval_seconds,
    silent_seconds,
    unreachable_seconds,
)


def problems_of(**values: str) -> list[str]:
    """What is wrong with these variables, a line each; empty when they are accepted."""
    try:
        Settings.from_environment({ENV_PREFIX + name.upper(): value for name, value in values.items()})
    except SettingsError as error:
        return str(error).splitlines()
    return []


def test_the_defaults_are_accepted() -> None:
    Settings().check()


UNSAFE: dict[str, tuple[dict[str, str], str]] = {
    "heartbeat equal to the death threshold": (
        {"heartbeat_seconds": "15", "heartbeat_large_pool_seconds": "15"}, "heartbeat_seconds × 3 ≤ unreachable_seconds"
    ),
    "heartbeat over the death threshold": (
        {"heartbeat_seconds": "20", "heartbeat_large_pool_seconds": "20"}, "heartbeat_seconds × 3 ≤ unreachable_seconds"
    ),
    "two missed heartbeats only": ({"heartbeat_seconds": "6"}, "heartbeat_seconds × 3 ≤ unreachable_seconds"),
    "unreachable equal to lost": ({"unreachable_seconds": "120"}, "unreachable_seconds < lost_seconds"),
    "unreachable over lost": ({"lost_seconds": "10"}, "unreachable_seconds < lost_seconds"),
    "a small pool that beats slower than a large one": (
        {"heartbeat_seconds": "4", "heartbeat_large_pool_seconds": "3"},
        "heartbeat_seconds ≤ heartbeat_large_pool_seconds"
    ),
    "a large pool lost after three missed heartbeats": (
        {"heartbeat_large_pool_seconds": "40"}, "heartbeat_large_pool_seconds × 3 < lost_seconds"
    ),
    "a claim deadline over the start deadline": ({"claim_seconds": "300"}, "claim_seconds < start_seconds"),
    "a claim deadline within one heartbeat": ({"claim_seconds": "2"}, "claim_seconds > heartbeat_seconds"),
    "a sweep slower than what it looks for": ({"sweep_seconds": "6"}, "sweep_seconds × 3 ≤ unreachable_seconds"),
    "another host than loopback without TLS": ({"host": "0.0.0.0"}, "host 0.0.0.0 is not loopback"),
    "an unknown durability": ({"sqlite_synchronous": "OFF"}, "sqlite_synchronous is NORMAL or FULL"),
    "two processes on a SQLite file": ({"run_scheduler": "false"}, "run_scheduler=false needs PostgreSQL"),
    "a port that is none": ({"port": "70000"}, "port 70000 is not in 0..65535"),
    "a negative port": ({"port": "-1"}, "port -1 is not in 0..65535"),
    "a word for a number": ({"lost_seconds": "long"}, "expected float"),
    "a fraction for a whole number": ({"body_limit_bytes": "1.5"}, "expected int"),
    "a word for a truth": ({"behind_proxy": "maybe"}, "expected bool"),
    "a misspelt setting": ({"hartbeat_seconds": "1"}, "unknown setting"),
}  # fmt: skip


@pytest.mark.parametrize("sentence", UNSAFE)
def test_o28_an_unsafe_combination_refuses_to_start_with_the_rule_named(sentence: str) -> None:
    values, rule = UNSAFE[sentence]
    problems = problems_of(**values)
    assert any(rule in line for line in problems), problems


DURATIONS = [spec.name for spec in dataclasses.fields(Settings) if spec.name.endswith(("_seconds", "_bytes"))]


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "-inf"])
@pytest.mark.parametrize("name", DURATIONS)
def test_o28_no_interval_deadline_or_size_is_zero_negative_or_endless(name: str, value: str) -> None:
    problems = problems_of(**{name: value})
    assert problems, f"{name}={value} was accepted"
    assert any(name in line.lower() for line in problems)


def test_o28_all_problems_are_told_at_once_with_their_values() -> None:
    problems = problems_of(heartbeat_seconds="30", lost_seconds="5", host="10.0.0.1", port="99999")

    assert len(problems) >= 4
    assert any("30 × 3 > 15" in line for line in problems)
    assert any("10.0.0.1" in line and "behind_proxy" in line for line in problems)


@pytest.mark.parametrize("num_nodes", [1, SMALL_POOL_NODES, SMALL_POOL_NODES + 1, 1_000])
def test_o28_a_pool_of_any_size_may_miss_two_heartbeats_before_a_node_is_unreachable(num_nodes: int) -> None:
    settings = Settings()
    interval = interval_seconds(settings, num_nodes)

    assert unreachable_seconds(settings, num_nodes) >= 3 * interval
    assert unreachable_seconds(settings, num_nodes) >= settings.unreachable_seconds
    assert interval * 2 < silent_seconds(settings, num_nodes) <= unreachable_seconds(settings, num_nodes)
    assert unreachable_seconds(settings, num_nodes) < settings.lost_seconds


def test_the_policies_that_can_be_set_are_those_that_are_registered() -> None:
    assert set(POLICY_NAMES) == set(POLICIES)
    assert Settings().policy == DEFAULT_POLICY
    assert set(PREEMPTION_KINDS) == set(scheduling_pass.PREEMPTION_KINDS)
    assert problems_of(policy="sjf") == ["policy is one of time-left, fifo, fifo+easy, not 'sjf'."]
    assert problems_of(preemption="some") == ["preemption is one of all, reclaim_only, none, not 'some'."]


def test_a_healthy_set_of_short_deadlines_is_accepted() -> None:
    short = {"heartbeat_seconds": "0.4", "heartbeat_large_pool_seconds": "1", "unreachable_seconds": "2"}
    assert problems_of(**short, lost_seconds="5", claim_seconds="4", sweep_seconds="0.2") == []


def test_arguments_win_over_the_environment_and_types_are_converted() -> None:
    settings = Settings.from_environment(
        {"GANGLINE_SERVER_PORT": "1234", "GANGLINE_SERVER_BEHIND_PROXY": "TRUE", "PATH": "/bin"}, port=0, host=None
    )
    assert (settings.port, settings.behind_proxy, settings.host) == (0, True, "127.0.0.1")


def test_only_names_with_the_prefix_are_settings() -> None:
    assert all(re.fullmatch(r"[a-z_]+", spec.name) for spec in dataclasses.fields(Settings))
    assert problems_of() == []
