"""Following logs loses and repeats nothing, wherever the connection is cut (O-30, the client's half)."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import chain, repeat

import pytest

from gangline.client import Client, Gap, NotFound, Unreachable
from gangline.client.follow import AttemptStarted, FollowEnd, LogChunk, LogFollower
from tests.integration.client.fake_rest_server import FakeServer, a_job

LOG_0 = (
    "".join(f"step {step}  loss {7.0 / (step + 1):.3f}  é 漢 🚀\n" for step in range(60)) + "last line without an end"
)
LOG_1 = "".join(f"rank 1 line {number}\n" for number in range(90))


def follow(client: Client, **options: object) -> tuple[dict[int, str], list[object]]:
    """The text of each rank and all other items, followed to the end without pauses."""
    follower = LogFollower(client.transport, 12, sleep=lambda seconds: None, **options)  # type: ignore[arg-type]
    texts: defaultdict[int, list[str]] = defaultdict(list)
    others: list[object] = []
    for item in follower:
        if isinstance(item, LogChunk):
            texts[item.rank].append(item.text)
        else:
            others.append(item)
    return {rank: "".join(pieces) for rank, pieces in texts.items()}, others


@pytest.fixture
def two_ranks(server: FakeServer) -> FakeServer:
    server.add(a_job(12, state="succeeded", outcome="succeeded"))
    server.logs = {0: LOG_0.encode(), 1: LOG_1.encode()}
    return server


def test_an_undisturbed_stream_gives_every_byte_and_then_the_end(two_ranks: FakeServer, client: Client) -> None:
    texts, others = follow(client)

    assert texts == {0: LOG_0, 1: LOG_1}
    assert others == [
        AttemptStarted(attempt=1, ranks=(0, 1)),
        FollowEnd(state="succeeded", outcome="succeeded", exit_code=0),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_o30_cuts_at_arbitrary_bytes_lose_and_repeat_nothing(two_ranks: FakeServer, client: Client, seed: int) -> None:
    dice = random.Random(seed)
    two_ranks.stream_cuts = iter([dice.randrange(0, 1500) for _ in range(15)])
    two_ranks.stream_step = dice.choice([3, 17, 64, 500])

    texts, others = follow(client)

    assert texts == {0: LOG_0, 1: LOG_1}
    assert isinstance(others[-1], FollowEnd)
    assert len(two_ranks.requests_to("GET /jobs/12/logs/stream")) > 5


def test_a_cut_at_each_byte_of_the_first_events_is_survived(two_ranks: FakeServer, client: Client) -> None:
    two_ranks.logs = {0: b"hello\nworld\nlast"}
    two_ranks.stream_step = 6
    for cut in range(1, 330, 7):
        two_ranks.stream_cuts = iter([cut])
        assert follow(client)[0] == {0: "hello\nworld\nlast"}, f"cut after {cut} bytes"


def test_bytes_that_a_server_sends_again_are_given_once(two_ranks: FakeServer, client: Client) -> None:
    two_ranks.logs = {0: "aé\nbü\ncß\n".encode()}
    stream = two_ranks.stream
    resumptions = iter(["", "a1,r0:1"])  # the second connection begins before where the first one stopped

    def forgetful(request):  # type: ignore[no-untyped-def]  # a stand-in for the server's method
        request.headers["last-event-id"] = next(resumptions, "")
        return stream(request)

    two_ranks.stream = forgetful  # type: ignore[method-assign]
    two_ranks.stream_step = 5
    two_ranks.stream_cuts = iter([190])

    assert follow(client)[0] == {0: "aé\nbü\ncß\n"}


def test_bytes_that_are_skipped_are_reported_as_a_gap(two_ranks: FakeServer, client: Client) -> None:
    two_ranks.logs = {0: b"0123456789"}
    two_ranks.stream_step = 2
    stream = two_ranks.stream

    def purged(request):  # type: ignore[no-untyped-def]  # a stand-in for the server's method
        if "last-event-id" in request.headers:
            request.headers["last-event-id"] = "a1,r0:8"
        return stream(request)

    two_ranks.stream = purged  # type: ignore[method-assign]
    two_ranks.stream_cuts = iter([180])

    texts, others = follow(client)

    gap = next(item for item in others if isinstance(item, Gap))
    assert (gap.start, gap.end) == (len(texts[0]) - 2, 8)


def test_a_position_resumes_exactly_after_it(two_ranks: FakeServer, client: Client) -> None:
    follower = LogFollower(client.transport, 12)
    seen = {0: "", 1: ""}
    for item in follower:
        if isinstance(item, LogChunk):
            seen[item.rank] += item.text
            if len(seen[0]) > 500:
                break

    rest, _ = follow(client, position=follower.position)

    assert seen[0] + rest[0] == LOG_0
    assert seen[1] + rest[1] == LOG_1


def test_an_unknown_job_is_an_error_at_once(two_ranks: FakeServer, client: Client) -> None:
    from tests.integration.client.fake_rest_server import a_problem

    two_ranks.overrides["GET /jobs/12/logs/stream"] = lambda request: a_problem(404, "not_found", "no job 12")

    with pytest.raises(NotFound):
        follow(client)
    assert len(two_ranks.requests_to("GET /jobs/12/logs/stream")) == 1


def test_a_server_that_only_ever_cuts_is_given_up_in_the_end(two_ranks: FakeServer, client: Client) -> None:
    two_ranks.stream_cuts = chain([400], repeat(0))
    clock = iter(range(0, 100_000, 60))
    follower = LogFollower(client.transport, 12, sleep=lambda seconds: None, monotonic=lambda: float(next(clock)))

    with pytest.raises(Unreachable):
        list(follower)


def test_stored_lines_are_whole_across_pages(two_ranks: FakeServer, client: Client) -> None:
    lines = list(client.logs(12, rank=1))

    assert "".join(line.text for line in lines) == LOG_1
    assert len(lines) == 90
    assert [LOG_1.encode()[line.offset :].decode().splitlines()[0] for line in lines] == LOG_1.splitlines()
