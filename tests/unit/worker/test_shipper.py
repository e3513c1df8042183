"""Bytes by offset: nothing lost, nothing repeated, whatever is refused in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.api import Answered, Conflict, Fenced, Refused, Unavailable
from worker.courier import next_poll_seconds, retry_seconds
from worker.shipper import EVENTS, LOG, MAX_CHUNK_BYTES, Shipper, StreamFile, next_chunk


class Service:
    """Stores streams as the API does; `fail` is raised before or after it stored."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.fail_before: list[Exception] = []
        self.fail_after: list[Exception] = []

    def put(self, stream: str, rank: int, offset: int, data: bytes) -> int:
        if self.fail_before:
            raise self.fail_before.pop(0)
        key = f"{stream}/{rank}"
        size = len(self.stored.get(key, b""))
        if offset != size:
            raise Conflict(409, {"code": "offset_mismatch", "size": size})
        self.stored[key] = self.stored.get(key, b"") + data
        if self.fail_after:
            raise self.fail_after.pop(0)
        return size + len(data)


@pytest.fixture
def service() -> Service:
    return Service()


def a_shipper(tmp_path: Path, service: Service) -> Shipper:
    streams = [StreamFile(kind=kind, rank=0, path=tmp_path / kind) for kind in (EVENTS, LOG)]
    return Shipper(streams, tmp_path / "offsets.json", service.put)


def test_what_is_written_later_follows_what_was_sent(tmp_path: Path, service: Service) -> None:
    shipper = a_shipper(tmp_path, service)
    (tmp_path / LOG).write_bytes(b"a")
    assert shipper.ship_round().num_bytes == 1
    (tmp_path / LOG).write_bytes(b"ab\xff")

    assert shipper.ship_round().num_bytes == 2
    assert shipper.ship_round().num_bytes == 0
    assert service.stored == {"log/0": b"ab\xff"}
    assert shipper.is_all_sent()


def test_a_successor_goes_on_where_the_offsets_end(tmp_path: Path, service: Service) -> None:
    (tmp_path / LOG).write_bytes(b"abc")
    a_shipper(tmp_path, service).ship_round()
    (tmp_path / LOG).write_bytes(b"abcdef")

    successor = a_shipper(tmp_path, service)
    assert successor.offsets == {"events/0": 0, "log/0": 3}
    assert successor.ship_round().num_bytes == 3


@pytest.mark.parametrize("content", [None, "", "{", "[]"])
def test_without_readable_offsets_the_service_says_where_it_stands(
    tmp_path: Path, service: Service, content: str | None
) -> None:
    (tmp_path / LOG).write_bytes(b"abc")
    service.stored["log/0"] = b"ab"
    if content is not None:
        (tmp_path / "offsets.json").write_text(content)
    shipper = a_shipper(tmp_path, service)

    shipper.ship_round()
    shipper.ship_round()

    assert service.stored == {"log/0": b"abc"}


def test_an_answer_that_is_lost_repeats_nothing(tmp_path: Path, service: Service) -> None:
    (tmp_path / LOG).write_bytes(b"abc")
    service.fail_after = [Unavailable("cut")]
    shipper = a_shipper(tmp_path, service)

    with pytest.raises(Unavailable):
        shipper.ship_round()
    shipper.ship_round()

    assert service.stored == {"log/0": b"abc"}
    assert shipper.is_all_sent()


def test_a_refused_stream_keeps_no_other_back(tmp_path: Path, service: Service) -> None:
    (tmp_path / EVENTS).write_bytes(b"{}\n")
    (tmp_path / LOG).write_bytes(b"abc")
    service.fail_before = [Refused(507, {"code": "storage_full"})]
    shipper = a_shipper(tmp_path, service)

    result = shipper.ship_round()

    assert isinstance(result.refusal, Answered)
    assert service.stored == {"log/0": b"abc"}
    assert not shipper.is_all_sent()


def test_a_fence_is_not_taken_for_a_refusal(tmp_path: Path, service: Service) -> None:
    (tmp_path / LOG).write_bytes(b"abc")
    service.fail_before = [Fenced(409, {"code": "attempt_fenced"})]

    with pytest.raises(Fenced):
        a_shipper(tmp_path, service).ship_round()


def test_a_conflict_that_says_nothing_new_is_a_refusal_and_no_endless_loop(tmp_path: Path, service: Service) -> None:
    (tmp_path / LOG).write_bytes(b"abc")
    service.fail_before = [Conflict(409, {"code": "offset_mismatch", "size": 0})]

    assert a_shipper(tmp_path, service).ship_round().refusal is not None


def test_one_chunk_of_a_long_file_goes_at_a_time(tmp_path: Path, service: Service) -> None:
    (tmp_path / LOG).write_bytes(b"x" * (MAX_CHUNK_BYTES + 1))
    shipper = a_shipper(tmp_path, service)

    assert [shipper.ship_round().num_bytes for _ in range(3)] == [MAX_CHUNK_BYTES, 1, 0]


@pytest.mark.parametrize(
    ("kind", "data", "is_final", "expected"),
    [
        (LOG, b"half a line", False, b"half a line"),
        (EVENTS, b"{}\n{", False, b"{}\n"),
        (EVENTS, b"{", False, b""),
        (EVENTS, b"{}\n{", True, b"{}\n{"),
        (EVENTS, b"x" * MAX_CHUNK_BYTES, False, b"x" * MAX_CHUNK_BYTES),
    ],
)
def test_events_go_in_whole_lines(kind: str, data: bytes, is_final: bool, expected: bytes) -> None:
    assert next_chunk(kind, data, is_final) == expected


def test_retries_back_off_to_five_seconds() -> None:
    pauses = [retry_seconds(failures, 1.0) for failures in (1, 2, 3, 10, 10_000)]

    assert pauses == [0.2, 0.4, 0.8, 5.0, 5.0]
    assert retry_seconds(1, 0.0) < retry_seconds(1, 1.0)


def test_looks_at_quiet_files_grow_rarer_and_quick_again_with_output() -> None:
    assert next_poll_seconds(0.02, was_active=False) == pytest.approx(0.03)
    assert next_poll_seconds(5.0, was_active=False) == 0.1
    assert next_poll_seconds(0.1, was_active=True) == 0.02
