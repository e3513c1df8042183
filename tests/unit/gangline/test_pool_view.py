"""The screen of `gang top`: bars, notes and sums of an overview, cut to what a terminal shows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gangline.cli.pool_view import cordon_note, frame, gpu_levels, summary
from gangline.client.pool_models import GoingJob, Node, NodeGPU, Overview, TeamShare
from gangline.client.queue_models import QueuedJob

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


def held(utilisation: float | None = 1.0, **changes: Any) -> NodeGPU:
    return NodeGPU(index=0, held=True, owner="priya", utilisation=utilisation, **changes)


def node(*gpus: NodeGPU, name: str = "gpu-01", **changes: Any) -> Node:
    return Node(name=name, state=changes.pop("state", "ready"), gpus=gpus, **changes)


def screen(overview: Overview, *, width: int | None = None, height: int | None = None) -> str:
    return "\n".join(frame(overview, NOW, width=width, height=height))


@pytest.mark.parametrize(
    ("gpu", "level"),
    [
        (held(0.0), "▁"),
        (held(0.5), "▅"),
        (held(0.999), "█"),
        (held(1.0), "█"),
        (held(None), "?"),
        (NodeGPU(index=0, utilisation=0.9), "·"),
        (NodeGPU(index=0, job_id=12, utilisation=0.9), "█"),
        (held(1.0, quarantined="left processes"), "x"),
    ],
)
def test_a_gpu_is_one_character(gpu: NodeGPU, level: str) -> None:
    assert gpu_levels([gpu]) == level


def test_the_first_line_sums_up_the_pool() -> None:
    overview = Overview(
        nodes=(
            node(held(1.0), held(0.5), NodeGPU(index=2), NodeGPU(index=3, quarantined="dust")),
            node(NodeGPU(index=0), cordoned="new driver"),
            node(NodeGPU(index=0), state="lost"),
        ),
        num_waiting=1,
        num_gpus_waited_for=8,
    )
    assert summary(overview) == (
        "2 of 6 GPUs held, 75 % busy · 1 free · 1 cordoned or draining · 1 quarantined · 1 job waits for 8"
    )
    assert summary(Overview()) == "0 of 0 GPUs held · 0 free"


def test_gpus_that_are_held_and_idle_for_long_are_pointed_out() -> None:
    idle = [held(0.0, idle_since=NOW - timedelta(minutes=minutes)) for minutes in (26, 30, 1)]
    assert "← 2 GPUs held, idle 26m00s" in screen(Overview(nodes=(node(*idle),)))
    assert "idle" not in screen(Overview(nodes=(node(idle[2], NodeGPU(index=1, idle_since=idle[0].idle_since)),)))


def test_a_cordon_is_told_with_its_end_and_a_drain_as_one() -> None:
    end = NOW + timedelta(hours=2)
    assert cordon_note(node(cordoned="dust", cordon_until=end, draining=True), NOW) == "draining until 14:00:00: dust"
    assert cordon_note(node(cordoned="dust"), NOW) == "cordoned: dust"


def test_teams_show_what_they_hold_of_their_quota_and_what_they_borrow() -> None:
    teams = (
        TeamShare(name="red", held_gpus=6, quota_gpus=4, quota_nodes=1, cap_gpus=8),
        TeamShare(name="blue", held_gpus=1),
    )
    *_, red, blue = screen(Overview(teams=teams)).splitlines()
    assert red.split() == ["red", "6", "4", "+", "1", "node", "8", "borrows", "2"]
    assert blue.split() == ["blue", "1", "–", "–"]


def test_a_terminal_shows_some_of_everything_and_says_how_much_more_there_is() -> None:
    overview = Overview(
        nodes=tuple(node(held(), name=f"gpu-{number:02}") for number in range(40)),
        running=tuple(GoingJob(id=number, name="x", state="running") for number in range(50)),
        num_running=70,
        waiting=tuple(QueuedJob(id=number, name="x", state="waiting") for number in range(50)),
        num_waiting=50,
        teams=(TeamShare(name="red", held_gpus=1),),
    )
    text = screen(overview, width=80, height=40)
    assert len(text.splitlines()) <= 40
    assert all(
        words in text for words in ("… 33 more nodes", "… 63 more running jobs", "… 43 more waiting jobs", "red")
    )
    assert max(map(len, text.splitlines()[1:])) <= 80
    assert "… 20 more running jobs" in screen(overview), "what the server left out is told in a pipe too"
