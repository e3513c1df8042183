"""A checkpoint on disk: names, manifest, how it becomes complete, how a broken one is told. Standard library only.

    <root>/<attempt's folder>/step-00000120/{*.distcp, .metadata, manifest.json, COMPLETE}

It is written in `.tmp-…` beside its final name and renamed once every byte is durable, so nothing partial ever carries
the final name. Not for: what is inside the shards (`saving`, `restoring`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gangline.protocol.launch import decode, encode

FORMAT_VERSION: Final = 1
COMPLETE_FILE: Final = "COMPLETE"
"""Holds the SHA-256 of the manifest, which holds those of all other files."""
MANIFEST_FILE: Final = "manifest.json"
TEMPORARY_PREFIX: Final = ".tmp-"
_REMOVED_PREFIX: Final = f"{TEMPORARY_PREFIX}removed-"
_STEP_FOLDER: Final = re.compile(r"step-(\d+)")
_NUMBERS: Final = re.compile(r"(\d+)")


class BrokenCheckpoint(Exception):
    """A checkpoint cannot be used; the message completes the sentence "<path> …"."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """What a checkpoint holds besides weights and optimizer: where the training stands."""

    step: int
    """Optimizer updates done."""
    samples_seen: int
    """Training samples used, over all ranks."""
    data_state: dict[str, Any] | None = None
    """State of an iterable dataset, JSON values; the leader's is written. None: `samples_seen` says it all."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file that the manifest vouches for."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself."""

    version: int = FORMAT_VERSION
    position: Position
    world_size: int
    """Ranks that saved it."""
    optimizer: str
    """Class of the optimizer, with its module."""
    torch_version: str
    plan: dict[str, Any]
    """The plan file of the run that saved it."""
    files: tuple[StoredFile, ...]
    keys: dict[str, str] = field(default_factory=dict)
    """Each stored value by its key: `float32[64, 128]` for a tensor, `object` for anything else."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the manifest itself."""
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A folder that carries a checkpoint's name; whether it is one, `verify` says."""

    path: str
    """Relative to the root."""
    step: int


def step_folder(step: int) -> str:
    """Name of the folder of the checkpoint of `step`."""
    return f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """The step in a folder's name; None for any other name."""
    match = _STEP_FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


def list_checkpoints(root: Path) -> list[FoundCheckpoint]:
    """Checkpoints below `root`, whatever their state, newest first: by step as a number, then by attempt as one."""
    found = [
        FoundCheckpoint(path=folder.relative_to(root).as_posix(), step=step)
        for parent in _attempt_folders(root)
        for folder in _folders(parent)
        if (step := step_of(folder.name)) is not None
    ]
    return sorted(found, key=lambda one: (one.step, _natural(one.path)), reverse=True)


def list_leftovers(root: Path) -> list[Path]:
    """Folders of saves and removals that were interrupted."""
    return [
        folder
        for parent in _attempt_folders(root)
        for folder in _folders(parent)
        if folder.name.startswith(TEMPORARY_PREFIX)
    ]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint that is marked complete. Raises BrokenCheckpoint; reads the two small files only."""
    try:
        mark = (folder / COMPLETE_FILE).read_text(encoding="ascii").strip()
        data = (folder / MANIFEST_FILE).read_bytes()
    except FileNotFoundError as error:
        raise BrokenCheckpoint(_what_is_missing(folder)) from error
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"cannot be read: {error}.") from error
    if hashlib.sha256(data).hexdigest() != mark:
        raise BrokenCheckpoint(f"has a {MANIFEST_FILE} that is not the one it was completed with.")
    try:
        manifest = decode(Manifest, json.loads(data))
    except ValueError as error:
        raise BrokenCheckpoint(f"has a {MANIFEST_FILE} that cannot be read: {error}.") from error
    if manifest.version != FORMAT_VERSION:
        raise BrokenCheckpoint(f"has format {manifest.version}, but this version of Gangline reads {FORMAT_VERSION}.")
    return manifest


def verify(folder: Path, part: int = 0, parts: int = 1) -> Manifest:
    """The manifest, once every file is there, of its size and with its SHA-256. Raises BrokenCheckpoint.

    Reads all of the checkpoint: about a second per gigabyte for the hash, or what the disk gives if that is slower.
    What it read stays in the page cache, which the ranks of the node then load from. Of `parts` callers that share the
    work, number `part` reads every `parts`-th file.
    """
    manifest = read_manifest(folder)
    for file in manifest.files[part::parts]:
        try:
            stored = describe_file(folder / file.name)
        except OSError as error:
            raise BrokenCheckpoint(f"has no readable file {file.name}: {error.strerror}.") from error
        if stored.num_bytes != file.num_bytes:
            raise BrokenCheckpoint(f"has a {file.name} of {stored.num_bytes} bytes, not {file.num_bytes}.")
        if stored.sha256 != file.sha256:
            raise BrokenCheckpoint(f"has a {file.name} whose content is not what was written (SHA-256).")
    return manifest


def describe_file(path: Path) -> StoredFile:
    """Size and SHA-256 of a file, by reading it. Raises OSError."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return StoredFile(name=path.name, num_bytes=file.tell(), sha256=digest.hexdigest())


def begin(final: Path) -> Path:
    """An empty folder to write the checkpoint `final` in, in place of one that an earlier try left. Raises OSError."""
    make_folder(final.parent)
    temporary = temporary_of(final)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    return temporary


def complete(final: Path, manifest: Manifest) -> None:
    """Give the checkpoint in the temporary folder its manifest, its mark and its final name, durably. Raises OSError.

    The shards are durable already. The order is the promise: data, manifest, mark, folder, name.
    """
    temporary = temporary_of(final)
    data = (json.dumps(encode(manifest), indent=1) + "\n").encode()
    _write_durably(temporary / MANIFEST_FILE, data)
    _write_durably(temporary / COMPLETE_FILE, (hashlib.sha256(data).hexdigest() + "\n").encode("ascii"))
    sync_folder(temporary)
    temporary.rename(final)
    sync_folder(final.parent)


def remove(folder: Path) -> None:
    """Delete a checkpoint (or a leftover), its name first, so that no partial one carries a name. Raises OSError."""
    shutil.rmtree(retire(folder))


def retire(folder: Path) -> Path:
    """Take a checkpoint's (or a leftover's) name away, at once; returns the folder, to be deleted. Raises OSError."""
    if folder.name.startswith(_REMOVED_PREFIX):
        return folder
    retired = folder.with_name(_REMOVED_PREFIX + folder.name.removeprefix(TEMPORARY_PREFIX))
    if retired.exists():
        shutil.rmtree(retired)
    return folder.rename(retired)


def temporary_of(final: Path) -> Path:
    """Where the checkpoint `final` is written."""
    return final.with_name(TEMPORARY_PREFIX + final.name)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably. Raises OSError."""
    for parent in reversed([folder, *folder.parents]):
        if not parent.exists():
            parent.mkdir(exist_ok=True)
            sync_folder(parent.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no fsync of folders: their renames are durable
            raise
    finally:
        os.close(descriptor)


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _what_is_missing(folder: Path) -> str:
    if not folder.is_dir():
        return "is not there."
    if not (folder / COMPLETE_FILE).exists():
        return f"has no {COMPLETE_FILE} mark: it was never finished."
    return f"has no {MANIFEST_FILE}."


def _attempt_folders(root: Path) -> Iterator[Path]:
    yield root
    yield from (folder for folder in _folders(root) if not folder.name.startswith(".") and step_of(folder.name) is None)


def _folders(parent: Path) -> Iterable[Path]:
    try:
        return [entry for entry in parent.iterdir() if entry.is_dir()]
    except FileNotFoundError:  # it went while we looked, or was never made
        return []


def _natural(text: str) -> list[tuple[int, str]]:
    """A sort key by which attempt-17 comes after attempt-9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBERS.split(text)]
