"""Reads a bundle once, forward and bounded, and gives out its members checked. Writes nothing.

`tarfile` parses the headers; what it would read into memory, pass over in silence, loop on or recurse into is refused
here first. Not for: what a member may be (`bundle_checks`).
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from gangline.protocol.bundle_checks import (
    REPACK,
    BundleLimits,
    Member,
    MemberRegister,
    UnsafeBundle,
    unpacks_to_too_much,
)

MAX_HEADER_BYTES: Final = 2**20
"""Of all headers of one member together; a name never needs more."""
MAX_EXTENDED_HEADERS_IN_A_ROW: Final = 8
_COPY_BYTES: Final = 2**16
_EXTENDED_TYPES: Final = frozenset(
    {
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    }
)
_DAMAGE: Final = (gzip.BadGzipFile, EOFError, zlib.error)


class _ForwardReader:
    """Decompressed bytes of an archive, read once and forward; raises UnsafeBundle as soon as they are too many.

    `read`, `seek` and `tell` are what `tarfile` calls for headers: what it may read between two members is bounded,
    since it keeps all of it in memory. File content goes through `content` and is never held.
    """

    def __init__(self, source: gzip.GzipFile, packed_bytes: int, limits: BundleLimits) -> None:
        self._source = source
        self._packed_bytes = packed_bytes
        self._limits = limits
        self._position = 0
        self._header_bytes_left = MAX_HEADER_BYTES

    def start_member(self) -> None:
        """Allow the header bytes of one more member."""
        self._header_bytes_left = MAX_HEADER_BYTES

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        self._header_bytes_left -= max(size, 0)
        if size < 0 or self._header_bytes_left < 0:
            raise UnsafeBundle(f"The headers of one member have more than {MAX_HEADER_BYTES} bytes.", REPACK)
        data = b""
        while len(data) < size and (piece := self._take(size - len(data))):
            data += piece
        return data

    def seek(self, position: int) -> None:
        if position < self._position:
            raise UnsafeBundle("A header leads back to bytes that were already read.", REPACK)
        while self._position < position and self._take(min(position - self._position, _COPY_BYTES)):
            pass

    def content(self, size: int) -> Iterator[bytes]:
        """The next `size` bytes in pieces."""
        left = size
        while left:
            piece = self._take(min(left, _COPY_BYTES))
            if not piece:
                raise UnsafeBundle("The archive is cut off in the middle of a file.", REPACK)
            left -= len(piece)
            yield piece

    def finish(self) -> None:
        """Read what is left, so that the checksum at the end is looked at too. Only padding may be there."""
        while piece := self._take(_COPY_BYTES):
            if any(piece):
                raise UnsafeBundle("There is something after the end of the archive.", REPACK)

    def _take(self, size: int) -> bytes:
        data = self._source.read(size)
        self._position += len(data)
        if self._position > self._limits.max_unpacked_bytes:
            raise unpacks_to_too_much(self._limits)
        is_large = self._position > self._limits.ratio_floor_bytes
        if is_large and self._position > self._limits.max_ratio * self._packed_bytes:
            raise UnsafeBundle(
                f"The archive of {self._packed_bytes} bytes unpacks to over {self._limits.max_ratio} times its size.",
                "Leave files of repeated bytes out with .ganglineignore and make them in the job.",
            )
        return data


def _header_class() -> type[tarfile.TarInfo]:
    """A header type for one archive that refuses what `tarfile` would pass over, loop on or recurse into."""

    class CheckedHeader(tarfile.TarInfo):
        extended_in_a_row = 0

        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
            try:
                header = super().frombuf(buf, encoding, errors)
            except tarfile.HeaderError as error:
                if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                    raise  # The block of zeros that ends an archive.
                # `tarfile` takes a broken header after the first for the end, and would drop the rest in silence.
                raise UnsafeBundle(f"The archive is cut off or damaged ({error}).", REPACK) from error
            is_extended = header.type in _EXTENDED_TYPES
            cls.extended_in_a_row = cls.extended_in_a_row + 1 if is_extended else 0
            if cls.extended_in_a_row > MAX_EXTENDED_HEADERS_IN_A_ROW:
                raise UnsafeBundle(f"More than {MAX_EXTENDED_HEADERS_IN_A_ROW} extended headers in a row.", REPACK)
            if header.size < 0:
                raise UnsafeBundle(f"{header.name[:80]!r} states the size {header.size}.", REPACK)
            if header.type == tarfile.GNUTYPE_SPARSE:
                raise _wrong_type(header)
            return header

    return CheckedHeader


def _wrong_type(header: tarfile.TarInfo) -> UnsafeBundle:
    return UnsafeBundle(
        f"{header.name!r} is neither a file, a folder nor a link (type {header.type!r}).",
        "Remove devices, pipes, sockets and sparse files from the archive.",
    )


def _kind_of(header: tarfile.TarInfo) -> str:
    if header.isdir():
        return "folder"
    if header.issym():
        return "symlink"
    if header.islnk():
        return "hardlink"
    if header.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not header.issparse():
        return "file"
    raise _wrong_type(header)


class CheckedArchive:
    """An open archive whose members come out checked, in order. Made by `open_archive`."""

    def __init__(self, reader: _ForwardReader, limits: BundleLimits) -> None:
        self._reader = reader
        self._archive: tarfile.TarFile | None = None
        self.register = MemberRegister(limits)

    def __iter__(self) -> Iterator[Member]:
        while (header := self._next_header()) is not None:
            kind = _kind_of(header)
            size = header.size if kind == "file" else 0
            member = self.register.admit(header.name, kind, size=size, mode=header.mode, link=header.linkname)
            yield member

    def content(self, member: Member) -> Iterator[bytes]:
        """The bytes of the file that iteration stands at, in pieces. Raises UnsafeBundle when it breaks off."""
        try:
            yield from self._reader.content(member.size)
        except _DAMAGE as error:
            raise _not_whole(error) from error

    def _next_header(self) -> tarfile.TarInfo | None:
        self._reader.start_member()
        try:
            if self._archive is None:
                # Opening reads the first header.
                self._archive = tarfile.TarFile(fileobj=self._reader, tarinfo=_header_class())  # type: ignore[arg-type]  # reads with read, seek and tell only
            header = self._archive.next()
            if header is None:
                self._reader.finish()
        except (*_DAMAGE, tarfile.TarError, ValueError, IndexError, RecursionError) as error:
            # `tarfile` lets errors of its number parsing through.
            raise _not_whole(error) from error
        self._archive.members.clear()  # type: ignore[attr-defined]  # it would keep every header
        return header


def _not_whole(error: BaseException) -> UnsafeBundle:
    return UnsafeBundle(f"This is not a whole tar.gz archive ({error or type(error).__name__}).", REPACK)


@contextmanager
def open_archive(path: Path, limits: BundleLimits) -> Iterator[CheckedArchive]:
    """Open a bundle for reading. Whatever is wrong with its bytes is raised as UnsafeBundle, here or in iteration."""
    packed_bytes = path.stat().st_size
    if packed_bytes > limits.max_archive_bytes:
        raise UnsafeBundle(
            f"The archive has {packed_bytes} bytes, more than the {limits.max_archive_bytes} allowed.",
            "Leave data out with .ganglineignore and read it from shared storage.",
        )
    with gzip.open(path, "rb") as source:
        yield CheckedArchive(_ForwardReader(source, packed_bytes, limits), limits)
