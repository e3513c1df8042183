"""Where a job's code lies on this node: the named shared folder, an unpacked bundle, or an empty folder.

Bundles are kept by digest in `<agent data>/bundles`, so that a second attempt, or a second job with the same code,
fetches nothing. Not for: the archive format and its safety (`gangline.protocol.bundles`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gangline.protocol import names
from gangline.protocol.bundles import file_digest, unpack_bundle
from gangline.protocol.launch import CodeSource

MAX_CACHED_BUNDLES: Final = 32
MAX_CACHED_BYTES: Final = 4 << 30

Download = Callable[[Path], None]
"""Writes the archive of the attempt to a path; raises ApiError."""


class WrongBundleError(OSError):
    """What was downloaded is not what the plan names: cut short or changed on the way."""


def code_path(source: CodeSource, attempt_folder: Path) -> Path:
    """The folder that the ranks start in. Pure."""
    return Path(source.path) if source.path is not None else attempt_folder / names.CODE_FOLDER


def provide_code(source: CodeSource, attempt_folder: Path, cache: Path, download: Download) -> None:
    """Make the code folder ready. Raises ApiError, OSError (disk), WrongBundleError, UnsafeBundle, ValueError."""
    if source.bundle is None:
        return
    archive = fetch_bundle(source.bundle, cache, download)
    unpack_bundle(archive, attempt_folder / names.CODE_FOLDER)


def is_cached(source: CodeSource, cache: Path) -> bool:
    """Whether providing the code needs no network."""
    return source.bundle is None or _cache_file(source.bundle, cache).exists()


def fetch_bundle(digest: str, cache: Path, download: Download) -> Path:
    """The archive with this digest, from the cache, else downloaded, checked and kept there."""
    archive = _cache_file(digest, cache)
    if archive.exists():
        os.utime(archive)
        return archive
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = archive.with_name(f".{archive.name}.{os.getpid()}")
    try:
        download(temporary)
        actual = file_digest(temporary)
        if actual != digest:
            raise WrongBundleError(f"bundle {digest} arrived as {actual} ({temporary.stat().st_size} bytes)")
        temporary.replace(archive)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    _trim(cache, keep=archive)
    return archive


def _cache_file(digest: str, cache: Path) -> Path:
    algorithm, _, digits = digest.partition(":")
    if algorithm != "sha256" or len(digits) != 64 or not set(digits) <= set("0123456789abcdef"):
        raise ValueError(f"{digest!r} is not a bundle's digest (sha256: and 64 hexadecimal digits)")
    return cache / digits


def _trim(cache: Path, keep: Path) -> None:
    """Remove the bundles used longest ago. One that another attempt unpacks just now stays readable: it is open."""
    found: list[tuple[float, int, Path]] = []
    for path in cache.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another supervisor trims as well
            facts = path.stat()
            found.append((facts.st_mtime, facts.st_size, path))
    total = 0
    for count, (_, size, path) in enumerate(sorted(found, reverse=True)):
        total += size
        if path != keep and (count >= MAX_CACHED_BUNDLES or total > MAX_CACHED_BYTES):
            path.unlink(missing_ok=True)
