"""A corpus of hostile archives: each is refused by reason before anything is written."""

from __future__ import annotations

import gzip
import io
import os
import random
import stat
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gangline.protocol import bundle_checks
from gangline.protocol.bundle_checks import DEFAULT_LIMITS, BundleLimits, UnsafeBundle
from gangline.protocol.bundles import inspect_bundle, unpack_bundle

SMALL = replace(
    DEFAULT_LIMITS, max_members=10, max_unpacked_bytes=200_000, ratio_floor_bytes=50_000, max_archive_bytes=100_000
)


SPARSE: dict[str, Any] = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}


def member(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644, **pax: str
) -> tuple[tarfile.TarInfo, bytes]:
    header = tarfile.TarInfo(name)
    header.type, header.linkname, header.mode, header.size = kind, link, mode, len(data)
    header.pax_headers = dict(pax)
    return header, data


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for header, data in members:
            archive.addfile(header, io.BytesIO(data))
    return buffer.getvalue()


def with_size(data: bytes, size: bytes) -> bytes:
    """The tar `data` with another size in its first header, and the checksum put right."""
    header = bytearray(data[:512])
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data[512:]


LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE
FILE = member("a.txt", b"a")
HOSTILE: dict[str, tuple[bytes, str]] = {
    "an absolute name": (tar_of(member("/etc/cron.d/x", b"x")), "absolute name"),
    "an absolute name in an extended header": (tar_of(member("x", b"x", path="/etc/x")), "absolute name"),
    "a name leading up": (tar_of(member("../x", b"x")), "leads out of the folder"),
    "a name leading up in the middle": (tar_of(member("a/../../x", b"x")), "leads out of the folder"),
    "a name leading up and down again": (tar_of(member("a/../x", b"x")), "leads out of the folder"),
    "a folder leading up": (tar_of(member("..", kind=tarfile.DIRTYPE)), "leads out of the folder"),
    "a name of nothing": (tar_of(member("./", kind=tarfile.DIRTYPE)), "names nothing"),
    "a link with an absolute target": (tar_of(member("l", kind=LINK, link="/etc")), "leads out of the folder"),
    "a link leading up": (tar_of(member("a/l", kind=LINK, link="../../x")), "leads out of the folder"),
    "a link with an empty target": (tar_of(member("l", kind=LINK, link="")), "leads out of the folder"),
    "two links that together lead out": (
        tar_of(member("a/b/top", kind=LINK, link="../.."), member("out", kind=LINK, link="a/b/top/../x")),
        "'out' leads out of the folder",
    ),
    "a file written through a link": (
        tar_of(member("l", kind=LINK, link="a"), member("l/x", b"x")),
        "lies below 'l', which is a symlink",
    ),
    "a link in place of a folder": (
        tar_of(member("a/x", b"x"), member("a", kind=LINK, link="b")),
        "'a' occurs twice",
    ),
    "a hard link to a file outside": (tar_of(member("h", kind=HARD, link="/etc/shadow")), "not to an earlier file"),
    "a hard link leading up": (tar_of(FILE, member("h", kind=HARD, link="../a.txt")), "not to an earlier file"),
    "a hard link to a link": (
        tar_of(member("l", kind=LINK, link="x"), member("h", kind=HARD, link="l")),
        "not to an earlier file",
    ),
    "a hard link to a later file": (tar_of(member("h", kind=HARD, link="a.txt"), FILE), "not to an earlier file"),
    "a character device": (tar_of(member("null", kind=tarfile.CHRTYPE)), "neither a file, a folder nor a link"),
    "a block device": (tar_of(member("disk", kind=tarfile.BLKTYPE)), "neither a file, a folder nor a link"),
    "a pipe": (tar_of(member("pipe", kind=tarfile.FIFOTYPE)), "neither a file, a folder nor a link"),
    "a contiguous file": (tar_of(member("c", kind=tarfile.CONTTYPE)), "neither a file, a folder nor a link"),
    "an unknown type": (tar_of(member("u", kind=b"Z")), "neither a file, a folder nor a link"),
    "an old sparse file": (tar_of(member("s", kind=tarfile.GNUTYPE_SPARSE)), "neither a file, a folder nor a link"),
    "a sparse file": (
        tar_of(member("s", b"1\n0\n0\n".ljust(512, b"\0"), **SPARSE)),
        "neither a file, a folder nor a link",
    ),
    "a name given twice": (tar_of(FILE, FILE), "occurs twice"),
    "a name given twice in two spellings": (tar_of(FILE, member("./a.txt", b"b")), "occurs twice"),
    "a file below a file": (tar_of(member("a", b"x"), member("a/b", b"x")), "lies below 'a', which is a file"),
    "a part of a name too long": (tar_of(member("n" * 256, b"x")), "too long"),
    "a name too long": (tar_of(member("n/" * 600 + "x", b"x")), "too long"),
    "a name with a NUL": (tar_of(member("x", b"x", path="a\0b")), "NUL"),
    "too many members": (tar_of(*(member(f"f{n}") for n in range(11))), "more than 10 members"),
    "too many bytes": (tar_of(member("big", os.urandom(90_000)), member("big2", bytes(120_000))), "unpacks to"),
    "a bomb": (tar_of(member("zeros", bytes(150_000))), "times its size"),
    "a size that is only claimed": (with_size(tar_of(FILE), b"77777777777\0"), "unpacks to more than"),
    "a negative size": (with_size(tar_of(FILE), b"\xff" * 11 + b"\x00"), "states the size"),
    "a negative size in an extended header": (tar_of(member("x", b"x", size="-1024")), "states a negative size"),
    "a chain of extended headers": (
        b"".join(tar_of(member("x", b"3 =\n", kind=tarfile.XHDTYPE))[:1024] for _ in range(2_000)) + tar_of(FILE),
        "extended headers in a row",
    ),
    "a damaged header": (tar_of(FILE)[:1024] + b"x" * 512 + tar_of(FILE), "cut off or damaged"),
    "an archive cut off in a file": (tar_of(member("f", bytes(2_000)))[:1_500], "cut off|whole"),
    "an archive cut off after a file": (tar_of(FILE)[:1024], "cut off"),
    "an archive cut off in a header": (tar_of(FILE)[:300], "cut off"),
    "nothing": (b"", "cut off"),
    "text": (b"hello " * 200, "cut off"),
    "a second archive after the first": (tar_of(FILE) + tar_of(FILE), "something after the end"),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a bystander beside the target."""
    (tmp_path / "bystander").write_text("untouched")
    return tmp_path


def assert_only_bystander(place: Path) -> None:
    assert [path.name for path in place.iterdir() if path.name != "bundle.tar.gz"] == ["bystander"]
    assert (place / "bystander").read_text() == "untouched"


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_before_anything_is_written(name: str, place: Path) -> None:
    data, reason = HOSTILE[name]
    bundle = place / "bundle.tar.gz"
    bundle.write_bytes(gzip.compress(data))

    with pytest.raises(UnsafeBundle, match=reason) as caught:
        unpack_bundle(bundle, place / "target", SMALL)

    assert caught.value.reason
    assert caught.value.fix
    with pytest.raises(UnsafeBundle, match=reason):
        inspect_bundle(bundle, SMALL)
    assert_only_bystander(place)


@pytest.mark.parametrize(
    "data",
    [
        b"PK\x03\x04 something else",
        gzip.compress(tar_of(member("f", random.Random(1).randbytes(5_000))))[:2_000],
        gzip.compress(tar_of(FILE))[:-8] + bytes(8),
        gzip.compress(tar_of(FILE)) + b"garbage",
        b"",
    ],
    ids=["no gzip", "a gzip cut off", "a wrong checksum", "bytes after the end", "an empty file"],
)
def test_what_is_not_a_whole_gzip_is_refused(data: bytes, place: Path) -> None:
    bundle = place / "bundle.tar.gz"
    bundle.write_bytes(data)

    with pytest.raises(UnsafeBundle):
        unpack_bundle(bundle, place / "target")

    assert_only_bystander(place)


@pytest.mark.parametrize(
    "data",
    [
        tar_of(member("x", b"x", comment="c" * 1_500_000)),
        tar_of(member("s", b"99999999\n" + b"0\n" * 800_000, **SPARSE)),
    ],
    ids=["an extended header without end", "a sparse map without end"],
)
def test_headers_that_would_fill_the_memory_are_refused(data: bytes, place: Path) -> None:
    bundle = place / "bundle.tar.gz"
    bundle.write_bytes(gzip.compress(data))

    with pytest.raises(UnsafeBundle, match="headers of one member have more than 1048576 bytes"):
        inspect_bundle(bundle)


def test_an_archive_over_the_limit_is_refused_unread(place: Path) -> None:
    bundle = place / "bundle.tar.gz"
    bundle.write_bytes(bytes(1_001))

    with pytest.raises(UnsafeBundle, match="1001 bytes, more than the 1000 allowed"):
        inspect_bundle(bundle, BundleLimits(max_archive_bytes=1_000))


def test_setuid_and_other_bits_are_dropped(place: Path) -> None:
    bundle = place / "bundle.tar.gz"
    bundle.write_bytes(gzip.compress(tar_of(member("su", b"x", mode=0o6777), member("plain", b"x", mode=0o7666))))
    unpack_bundle(bundle, place / "target")

    assert stat.S_IMODE((place / "target" / "su").stat().st_mode) & 0o7022 == 0
    assert os.access(place / "target" / "su", os.X_OK)
    assert stat.S_IMODE((place / "target" / "plain").stat().st_mode) & 0o7133 == 0


def test_links_that_stay_inside_are_made(place: Path) -> None:
    bundle = place / "bundle.tar.gz"
    bundle.write_bytes(
        gzip.compress(
            tar_of(
                member("a/file", b"content"),
                member("a/b/link", kind=LINK, link="../file"),
                member("hard", kind=HARD, link="a/file"),
            )
        )
    )
    unpack_bundle(bundle, place / "target")

    assert (place / "target" / "a" / "b" / "link").readlink() == Path("../file")
    assert (place / "target" / "hard").read_bytes() == b"content"


def test_a_target_that_holds_something_is_refused(place: Path) -> None:
    bundle = place / "bundle.tar.gz"
    bundle.write_bytes(gzip.compress(tar_of(FILE)))

    with pytest.raises(FileExistsError, match="is not empty"):
        unpack_bundle(bundle, place)


def test_a_target_that_is_a_link_is_not_followed(place: Path) -> None:
    bundle = place / "bundle.tar.gz"
    bundle.write_bytes(gzip.compress(tar_of(FILE)))
    (place / "real").mkdir()
    (place / "target").symlink_to("real")

    with pytest.raises(OSError, match="target"):
        unpack_bundle(bundle, place / "target")

    assert list((place / "real").iterdir()) == []


def test_even_with_the_link_check_gone_nothing_is_written_through_a_link(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second line of defence: with the checks of names and links planted away, the writer itself stays inside."""
    outside = place / "outside"
    outside.mkdir()
    bundle = place / "bundle.tar.gz"
    bundle.write_bytes(gzip.compress(tar_of(member("l", kind=LINK, link="../outside"), member("l/x", b"x"))))
    monkeypatch.setattr(bundle_checks, "link_stays_inside", lambda parts, link: True)
    monkeypatch.setattr(bundle_checks.MemberRegister, "_check_place", lambda *arguments: None)

    with pytest.raises(OSError):
        unpack_bundle(bundle, place / "target")

    assert list(outside.iterdir()) == []


def test_the_corpus_turns_red_when_the_link_check_is_gone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_checks, "link_stays_inside", lambda parts, link: True)
    bundle = place / "bundle.tar.gz"
    bundle.write_bytes(gzip.compress(HOSTILE["a link leading up"][0]))

    inspect_bundle(bundle, SMALL)


def flip(data: bytes, changes: list[tuple[int, int]]) -> bytes:
    changed = bytearray(data)
    for position, value in changes:
        changed[position % len(changed)] = value
    return bytes(changed)


SOUND = tar_of(FILE, member("d/" + "n" * 120, b"b" * 700), member("d/l", kind=LINK, link="../a.txt"))


ONE_FOLDER_FOR_ALL = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
"""Each example makes a folder of its own in that of the test; how long one takes to make says nothing."""


@settings(max_examples=300, deadline=None, suppress_health_check=ONE_FOLDER_FOR_ALL)
@given(changes=st.lists(st.tuples(st.integers(0, len(SOUND)), st.integers(0, 255)), max_size=6))
def test_a_damaged_archive_is_unpacked_inside_or_refused(changes: list[tuple[int, int]], tmp_path: Path) -> None:
    check_inside_or_refused(gzip.compress(flip(SOUND, changes), 1), tmp_path)


@settings(max_examples=200, deadline=None, suppress_health_check=ONE_FOLDER_FOR_ALL)
@given(data=st.binary(max_size=3_000), make=st.sampled_from([bytes, gzip.compress]))
def test_arbitrary_bytes_are_refused(data: bytes, make: Callable[[bytes], bytes], tmp_path: Path) -> None:
    check_inside_or_refused(make(data), tmp_path)


def check_inside_or_refused(data: bytes, tmp_path: Path) -> None:
    place = Path(str(tmp_path)) / str(len(list(tmp_path.iterdir())))
    place.mkdir()
    (place / "bundle.tar.gz").write_bytes(data)
    try:
        unpack_bundle(place / "bundle.tar.gz", place / "target", SMALL)
    except UnsafeBundle:
        assert not (place / "target").exists()
    assert {path.name for path in place.iterdir()} <= {"bundle.tar.gz", "target"}
