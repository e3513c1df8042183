"""Code bundles: a folder as one content-addressed tar.gz, and back.

Packing is deterministic: the same tree gives the same bytes, so an unchanged bundle is not sent again. (Another build
of zlib may compress differently; then the digest differs and the bundle is sent once more, nothing else.) Unpacking
writes member by member below the target and never through a link. What an archive may hold: `bundle_checks`.
Not for: storing bundles on the server or caching them on nodes.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from gangline.protocol.bundle_checks import (
    DEFAULT_LIMITS,
    BundleError,
    BundleLimits,
    CannotPack,
    Member,
    UnsafeBundle,
    link_stays_inside,
)
from gangline.protocol.bundle_reader import open_archive
from gangline.protocol.ignore import IGNORE_FILE, IgnoreRules, rules_of_text
from gangline.protocol.names import DATA_FOLDER_MARKER

__all__ = [
    "DEFAULT_LIMITS",
    "BundleError",
    "BundleFacts",
    "BundleLimits",
    "CannotPack",
    "PackedBundle",
    "UnsafeBundle",
    "file_digest",
    "inspect_bundle",
    "pack_folder",
    "unpack_bundle",
]

_LARGEST_SHOWN: Final = 5
_PROBLEMS_SHOWN: Final = 10


@dataclass(frozen=True, kw_only=True)
class PackedBundle:
    """A packed folder. The file is temporary; the caller removes it."""

    digest: str
    """`sha256:<hex>` of the archive's bytes."""
    path: Path
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class BundleFacts:
    """What `inspect_bundle` found in a sound archive."""

    digest: str
    num_bytes: int
    """Of the archive."""
    num_members: int
    total_bytes: int
    """Of the files in it."""
    top_level: tuple[str, ...]
    """Names at the top, sorted."""


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A path of the folder that goes into the bundle."""

    name: str
    kind: str
    """`file`, `folder` or `symlink`."""
    size: int = 0
    is_executable: bool = False
    link: str = ""


def file_digest(path: Path) -> str:
    """`sha256:<hex>` of a file's bytes."""
    with path.open("rb") as stream:
        return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"


# --- Packing -------------------------------------------------------------------------------------------------------


def pack_folder(folder: Path, *, limit_bytes: int = DEFAULT_LIMITS.max_archive_bytes) -> PackedBundle:
    """Pack `folder`, without what `.ganglineignore` at its top leaves out, into a temporary file.

    Raises CannotPack when the folder holds what a bundle cannot (a link leading out, a device, an unreadable file) or
    the archive would exceed `limit_bytes`. What it returns is accepted by `unpack_bundle`.
    """
    if not folder.is_dir():
        raise CannotPack(f"{folder} is not a folder.", "Give the folder that holds the job's code.")
    root = folder.resolve()
    if (root / DATA_FOLDER_MARKER).exists():
        raise CannotPack(
            f"{folder} is a data folder of Gangline, with its tokens.", "Keep code and job file elsewhere."
        )
    entries = _list_entries(root)
    if sum(entry.size for entry in entries) > DEFAULT_LIMITS.max_unpacked_bytes:
        raise _too_large(entries, DEFAULT_LIMITS.max_unpacked_bytes, "")
    descriptor, name = tempfile.mkstemp(prefix="gangline-bundle-", suffix=".tar.gz")
    path = Path(name)
    try:
        with open(descriptor, "wb") as stream:
            _write_archive(root, entries, stream, limit_bytes)
        facts = inspect_bundle(path, BundleLimits(max_archive_bytes=limit_bytes))
    except UnsafeBundle as error:
        path.unlink()
        raise CannotPack(error.reason, error.fix) from error
    except BaseException:
        path.unlink()
        raise
    return PackedBundle(digest=facts.digest, path=path, num_bytes=facts.num_bytes)


def _list_entries(root: Path) -> list[_Entry]:
    """Every path that goes in, in the order of the archive: a folder before what is in it, names sorted by bytes."""
    ignore_file = root / IGNORE_FILE
    text = ignore_file.read_text(encoding="utf-8", errors="surrogateescape") if ignore_file.is_file() else None
    entries: list[_Entry] = []
    problems: list[str] = []
    for entry in _walk(root, "", rules_of_text(text), problems):
        entries.append(entry)
        if len(entries) > DEFAULT_LIMITS.max_members:
            raise CannotPack(
                f"{root} holds more than {DEFAULT_LIMITS.max_members} files and folders.",
                f"Leave data and build output out with {IGNORE_FILE}.",
            )
    if problems:
        shown = "; ".join(problems[:_PROBLEMS_SHOWN])
        more = len(problems) - _PROBLEMS_SHOWN
        raise CannotPack(
            f"{root} cannot be packed: {shown}{f'; and {more} more' if more > 0 else ''}.",
            f"Remove them, or leave them out with {IGNORE_FILE}.",
        )
    return entries


def _walk(root: Path, prefix: str, rules: IgnoreRules, problems: list[str]) -> Iterator[_Entry]:
    try:
        with os.scandir(root / prefix) as listing:
            children = sorted(listing, key=lambda child: os.fsencode(child.name))
    except PermissionError:
        problems.append(f"folder {prefix!r} cannot be read")
        return
    for child in children:
        name = prefix + child.name
        is_folder = child.is_dir(follow_symlinks=False)
        if rules.is_ignored(name, is_folder=is_folder):
            continue
        if is_folder and (root / name / DATA_FOLDER_MARKER).exists():
            continue  # `gang up` keeps its data, tokens among them, in the folder where it is started
        if is_folder:
            yield _Entry(name=name, kind="folder")
            yield from _walk(root, f"{name}/", rules, problems)
        elif child.is_symlink():
            link = _link_text(root, name)
            if link is None:
                problems.append(f"link {name!r} leads out of the folder, to {str((root / name).readlink())!r}")
            else:
                yield _Entry(name=name, kind="symlink", link=link)
        elif child.is_file(follow_symlinks=False):
            facts = child.stat(follow_symlinks=False)
            yield _Entry(name=name, kind="file", size=facts.st_size, is_executable=bool(facts.st_mode & 0o100))
        else:
            problems.append(f"{name!r} is a device, pipe or socket")


def _link_text(root: Path, name: str) -> str | None:
    """The link as it goes into the archive: as written where that is safe, else rewritten; None when it leads out."""
    path = root / name
    written = str(path.readlink())
    resolved = Path(os.path.realpath(path))
    if not resolved.is_relative_to(root):
        return None
    if link_stays_inside(tuple(name.split("/")), written):
        return written
    # An absolute link to a place inside means nothing on a node.
    return os.path.relpath(resolved, path.parent)


def _write_archive(root: Path, entries: list[_Entry], stream: BinaryIO, limit_bytes: int) -> None:
    compressed = gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=stream, mtime=0)
    with compressed, tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            header = tarfile.TarInfo(entry.name)  # Owner and time are 0 unless set.
            header.mode = 0o755 if entry.kind == "folder" or entry.is_executable else 0o644
            header.linkname = entry.link
            if entry.kind == "file":
                header.size = entry.size
                with _open_to_pack(root, entry) as content:
                    archive.addfile(header, content)
            else:
                header.type = tarfile.DIRTYPE if entry.kind == "folder" else tarfile.SYMTYPE
                archive.addfile(header)
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep every header
            if stream.tell() > limit_bytes:
                raise _too_large(entries, limit_bytes, " packed")
    if stream.tell() > limit_bytes:
        raise _too_large(entries, limit_bytes, " packed")


def _open_to_pack(root: Path, entry: _Entry) -> BinaryIO:
    try:
        # A pipe or a link put in the file's place since the listing must neither block us nor be followed.
        descriptor = os.open(root / entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CannotPack(
            f"{entry.name!r} cannot be read ({error.strerror}).",
            f"Make it readable, or leave it out with {IGNORE_FILE}.",
        ) from error
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size < entry.size:
        os.close(descriptor)
        raise CannotPack(f"{entry.name!r} changed while it was packed.", "Run the command again.")
    return open(descriptor, "rb")


def _too_large(entries: list[_Entry], limit_bytes: int, what: str) -> CannotPack:
    largest = sorted((entry for entry in entries if entry.size), key=lambda entry: (-entry.size, entry.name))
    shown = ", ".join(f"{entry.name} ({_readable(entry.size)})" for entry in largest[:_LARGEST_SHOWN])
    return CannotPack(
        f"The code folder is larger than {_readable(limit_bytes)}{what}. Its largest files: {shown}.",
        f"Leave what the job does not need out with {IGNORE_FILE}, and read data from shared storage.",
    )


def _readable(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


# --- Unpacking -----------------------------------------------------------------------------------------------------


def inspect_bundle(path: Path, limits: BundleLimits = DEFAULT_LIMITS) -> BundleFacts:
    """Read an archive through, writing nothing. Raises UnsafeBundle; FileNotFoundError when there is none."""
    with open_archive(path, limits) as archive:
        for _ in archive:
            pass
        register = archive.register
    return BundleFacts(
        digest=file_digest(path),
        num_bytes=path.stat().st_size,
        num_members=register.num_members,
        total_bytes=register.total_bytes,
        top_level=register.top_level,
    )


def unpack_bundle(archive: Path, target: Path, limits: BundleLimits = DEFAULT_LIMITS) -> None:
    """Unpack into `target`, which is made, or is an empty folder.

    The whole archive is checked before the first byte is written, and each member again when its turn comes. Only the
    executable bit of a mode is kept. Raises UnsafeBundle (nothing written); FileExistsError when `target` is not empty.
    """
    with open_archive(archive, limits) as checked:
        for _ in checked:
            pass
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; a bundle is unpacked into an empty folder")
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with open_archive(archive, limits) as checked:
            for member in checked:
                _write_member(root, member, checked.content(member))
    finally:
        os.close(root)


def _write_member(root: int, member: Member, content: Iterator[bytes]) -> None:
    if member.kind == "folder":
        os.close(_open_folder(root, member.parts))
        return
    folder = _open_folder(root, member.parts[:-1])
    name = member.parts[-1]
    try:
        if member.kind == "symlink":
            os.symlink(member.link, name, dir_fd=folder)
        elif member.kind == "hardlink":
            *above, linked = member.link.split("/")
            source = _open_folder(root, tuple(above))
            try:
                os.link(linked, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
            finally:
                os.close(source)
        else:
            mode = 0o755 if member.is_executable else 0o644
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(name, flags, mode, dir_fd=folder), "wb") as stream:
                for piece in content:
                    stream.write(piece)
    finally:
        os.close(folder)


def _open_folder(root: int, parts: tuple[str, ...]) -> int:
    """Descriptor of a folder below `root`, made on the way. No step goes through a link."""
    current = os.dup(root)
    for part in parts:
        try:
            # An earlier member may have made it; opening it shows whether it is a folder.
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=current)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
        finally:
            os.close(current)
        current = below
    return current
