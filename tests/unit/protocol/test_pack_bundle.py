"""A folder becomes a bundle: the same tree, the same digest; what cannot be packed is named with a fix."""

from __future__ import annotations

import os
import socket
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gangline.protocol.bundles import (
    BundleFacts,
    CannotPack,
    PackedBundle,
    file_digest,
    inspect_bundle,
    pack_folder,
    unpack_bundle,
)
from gangline.protocol.ignore import IGNORE_FILE
from gangline.protocol.names import DATA_FOLDER_MARKER


@pytest.fixture(autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where packed bundles go, so that what is left behind is seen."""
    folder = tmp_path_factory.mktemp("packed")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "code"
    (root / "package" / "empty").mkdir(parents=True)
    (root / "train.py").write_text("print('hello')\n")
    (root / "package" / "tool.sh").write_text("#!/bin/sh\n")
    (root / "package" / "tool.sh").chmod(0o755)
    return root


def names_of(bundle: PackedBundle) -> list[str]:
    with tarfile.open(bundle.path) as archive:
        return archive.getnames()


# --- Determinism ---------------------------------------------------------------------------------------------------


def test_the_digest_is_that_of_the_bytes(folder: Path) -> None:
    bundle = pack_folder(folder)

    assert bundle.digest == file_digest(bundle.path)
    assert bundle.num_bytes == bundle.path.stat().st_size


def test_the_data_folder_of_a_pool_is_never_packed(folder: Path) -> None:
    before = pack_folder(folder).digest
    data = folder / "any name"
    data.mkdir()
    (data / DATA_FOLDER_MARKER).touch()
    (data / "admin.token").write_text("glu_secret")

    assert pack_folder(folder).digest == before
    with pytest.raises(CannotPack, match="data folder"):
        pack_folder(data)


def test_times_owners_and_other_mode_bits_do_not_change_the_digest(folder: Path) -> None:
    before = pack_folder(folder).digest
    os.utime(folder / "train.py", (1, 1))
    os.utime(folder / "package", (2, 2))
    (folder / "train.py").chmod(0o600)
    (folder / "package" / "tool.sh").chmod(0o700)
    (folder / "package").chmod(0o700)

    assert pack_folder(folder).digest == before


def test_a_copy_made_in_another_order_and_place_has_the_same_digest(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "other name"
    (copy / "package").mkdir(parents=True)
    (copy / "package" / "tool.sh").write_text("#!/bin/sh\n")
    (copy / "package" / "tool.sh").chmod(0o755)
    (copy / "train.py").write_text("print('hello')\n")
    (copy / "package" / "empty").mkdir()

    assert pack_folder(copy).digest == pack_folder(folder).digest


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "train.py").write_text("print('hallo')\n"),
        lambda root: (root / "train.py").rename(root / "train2.py"),
        lambda root: (root / "train.py").chmod(0o755),
        lambda root: (root / "package" / "empty").rmdir(),
        lambda root: (root / "link").symlink_to("train.py"),
    ],
    ids=["content", "name", "executable", "empty folder", "link"],
)
def test_what_a_job_could_notice_changes_the_digest(folder: Path, change: object) -> None:
    before = pack_folder(folder).digest
    change(folder)  # type: ignore[operator]  # a callable from the table above

    assert pack_folder(folder).digest != before


def test_the_digest_is_the_same_in_every_release(tmp_path: Path) -> None:
    """A change of the format sends every bundle once more: this makes it a decision. (Bytes before compression.)"""
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").symlink_to("../a.txt")
    bundle = pack_folder(tmp_path)
    with tarfile.open(bundle.path) as archive:
        found = [(m.name, m.type, m.mode, m.size, m.mtime, m.uid, m.gid, m.uname, m.linkname) for m in archive]

    assert found == [
        ("a.txt", tarfile.REGTYPE, 0o644, 1, 0, 0, 0, "", ""),
        ("b", tarfile.DIRTYPE, 0o755, 0, 0, 0, 0, "", ""),
        ("b/c", tarfile.SYMTYPE, 0o644, 0, 0, 0, 0, "", "../a.txt"),
    ]
    assert bundle.path.read_bytes()[4:8] == bytes(4), "time in the gzip header"


# --- What goes in --------------------------------------------------------------------------------------------------


def test_what_the_ignore_file_names_stays_out(folder: Path) -> None:
    (folder / ".ganglineignore").write_text("# data\ndata/\n*.pt\n!keep.pt\n")
    (folder / "data").mkdir()
    (folder / "data" / "keep.pt").write_text("below a folder that is out")
    (folder / "model.pt").write_text("x")
    (folder / "keep.pt").write_text("x")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "train.cpython-311.pyc").write_text("x")
    (folder / ".git").mkdir()

    assert names_of(pack_folder(folder)) == [
        ".ganglineignore",
        "keep.pt",
        "package",
        "package/empty",
        "package/tool.sh",
        "train.py",
    ]


@pytest.mark.parametrize(
    ("place", "link", "stored"),
    [
        ("link", "train.py", "train.py"),
        ("package/link", "../train.py", "../train.py"),
        ("package/link", "empty", "empty"),
        ("dangling", "not/there", "not/there"),
        ("package/link", "{root}/train.py", "../train.py"),
        ("link", "package/../train.py", "train.py"),
        ("top", ".", "."),
    ],
)
def test_a_link_to_a_place_inside_is_kept(folder: Path, place: str, link: str, stored: str) -> None:
    (folder / place).symlink_to(link.format(root=folder))
    bundle = pack_folder(folder)

    with tarfile.open(bundle.path) as archive:
        assert archive.getmember(place).linkname == stored


def test_links_that_lead_out_are_all_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (folder / "first").symlink_to("/etc/passwd")
    (folder / "package" / "second").symlink_to("../../secret")

    with pytest.raises(CannotPack) as caught:
        pack_folder(folder)

    assert "'first' leads out of the folder, to '/etc/passwd'" in caught.value.reason
    assert "'package/second' leads out of the folder, to '../../secret'" in caught.value.reason
    assert ".ganglineignore" in caught.value.fix


def test_a_link_through_another_link_that_leads_out_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "up").symlink_to("package/..")
    (folder / "out").symlink_to("up/../secret")
    (tmp_path / "secret").write_text("x")

    with pytest.raises(CannotPack, match="'out' leads out of the folder"):
        pack_folder(folder)


def test_pipes_and_sockets_are_refused_by_name(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(".", os.O_RDONLY)
        try:
            os.chdir(folder)  # The path of a socket must be short.
            listener.bind("socket")
        finally:
            os.fchdir(here)
            os.close(here)

        with pytest.raises(CannotPack, match="'pipe' is a device, pipe or socket; 'socket' is a device"):
            pack_folder(folder)


def test_an_ignored_pipe_is_no_obstacle(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / ".ganglineignore").write_text("pipe\n")

    assert "pipe" not in names_of(pack_folder(folder))


def test_a_path_that_is_no_folder_is_refused(folder: Path) -> None:
    with pytest.raises(CannotPack, match="is not a folder"):
        pack_folder(folder / "train.py")


def test_a_name_that_is_not_unicode_survives(folder: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (folder / name).write_text("x")

    unpack_bundle(pack_folder(folder).path, tmp_path / "out")

    assert (tmp_path / "out" / name).read_text() == "x"


# --- Size ----------------------------------------------------------------------------------------------------------


def test_too_much_is_refused_with_the_largest_files_and_the_way_out(folder: Path, temporary_files: Path) -> None:
    (folder / "weights.bin").write_bytes(os.urandom(300_000))
    (folder / "notes.bin").write_bytes(os.urandom(100_000))

    with pytest.raises(CannotPack) as caught:
        pack_folder(folder, limit_bytes=200_000)

    assert "larger than 195.3 KiB packed" in caught.value.reason
    assert "weights.bin (293.0 KiB), notes.bin (97.7 KiB), train.py (15 bytes)" in caught.value.reason
    assert ".ganglineignore" in caught.value.fix
    assert list(temporary_files.iterdir()) == [], "a temporary file was left behind"


def test_a_file_that_shrinks_while_it_is_packed_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def truncate_first(path: object, flags: int, *args: object, **keywords: object) -> int:
        if str(path).endswith("train.py"):
            (folder / "train.py").write_text("")
        return real_open(path, flags, *args, **keywords)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(os, "open", truncate_first)

    with pytest.raises(CannotPack, match=r"'train.py' changed while it was packed"):
        pack_folder(folder)


# --- There and back ------------------------------------------------------------------------------------------------

WITH_A_MEANING = (".", "..", IGNORE_FILE, DATA_FOLDER_MARKER)
"""Names that no tree here has. Hypothesis draws words of the sources too, so these would come one day."""
NAMES = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="/\0"), min_size=1, max_size=20).filter(
    lambda name: name not in WITH_A_MEANING and len(name.encode()) <= 255
)
FILES = st.tuples(st.binary(max_size=2_000), st.booleans())
TREES = st.recursive(
    st.dictionaries(NAMES, FILES, max_size=4), lambda inner: st.dictionaries(NAMES, FILES | inner, max_size=3)
)


def write_tree(root: Path, tree: dict[str, Any]) -> None:
    root.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            write_tree(root / name, content)
        else:
            data, is_executable = content
            (root / name).write_bytes(data)
            (root / name).chmod(0o755 if is_executable else 0o644)


def read_tree(root: Path) -> dict[str, object]:
    return {
        path.name: read_tree(path) if path.is_dir() else (path.read_bytes(), bool(path.stat().st_mode & stat.S_IXUSR))
        for path in root.iterdir()
    }


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(tree=TREES)
def test_any_tree_comes_back_as_it_was(tree: dict[str, object], tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as place:
        source, target = Path(place) / "source", Path(place) / "target"
        write_tree(source, tree)
        (source / IGNORE_FILE).write_text("!*\n")
        bundle = pack_folder(source)
        unpack_bundle(bundle.path, target)

        assert read_tree(target) == read_tree(source)
        assert pack_folder(target).digest == bundle.digest


def test_the_facts_of_a_bundle(folder: Path) -> None:
    bundle = pack_folder(folder)

    assert inspect_bundle(bundle.path) == BundleFacts(
        digest=bundle.digest,
        num_bytes=bundle.num_bytes,
        num_members=4,
        total_bytes=25,
        top_level=("package", "train.py"),
    )
