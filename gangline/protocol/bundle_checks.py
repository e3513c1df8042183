"""What a code bundle may hold: limits, and the rules for names, links, kinds and places of its members.

An archive comes from a user and is unpacked on the server's and the nodes' disks, so nothing in it is believed. Not
for: reading archives (`bundle_reader`), making or writing files (`bundles`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final


class BundleError(Exception):
    """A bundle cannot be used: `reason` says what is wrong with which file, `fix` what to do about it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason} {fix}")
        self.reason = reason
        self.fix = fix


class CannotPack(BundleError):
    """The folder cannot become a bundle."""


class UnsafeBundle(BundleError):
    """The archive holds something that is never unpacked, or is not a whole archive."""


@dataclass(frozen=True, kw_only=True)
class BundleLimits:
    """Bounds of an archive. Sizes in bytes."""

    max_archive_bytes: int = 512 * 2**20
    max_unpacked_bytes: int = 4 * 2**30
    """Of the whole tar stream, headers included."""
    max_members: int = 50_000
    max_ratio: int = 200
    """Unpacked to packed size, looked at only above `ratio_floor_bytes`: small text can compress very well."""
    ratio_floor_bytes: int = 64 * 2**20
    max_name_bytes: int = 1024
    max_part_bytes: int = 255
    """Of one part of a name: the limit of the usual file systems."""


DEFAULT_LIMITS: Final = BundleLimits()
REPACK: Final = "Pack the folder again with `gang submit`, or make a plain tar.gz of files and folders."


def unpacks_to_too_much(limits: BundleLimits) -> UnsafeBundle:
    """The error for an archive that is too large once unpacked."""
    return UnsafeBundle(
        f"The archive unpacks to more than {limits.max_unpacked_bytes} bytes.",
        "Leave data out with .ganglineignore and read it from shared storage.",
    )


@dataclass(frozen=True, kw_only=True)
class Member:
    """One checked member of an archive."""

    parts: tuple[str, ...]
    """Its name, cut at `/`: never empty, without `.` and `..`."""
    kind: str
    """`file`, `folder`, `symlink` or `hardlink`."""
    size: int
    is_executable: bool
    link: str = ""
    """`symlink`: the text of the link. `hardlink`: the name of an earlier file of the archive."""

    @property
    def name(self) -> str:
        """The name with `/` between its parts."""
        return "/".join(self.parts)


def link_stays_inside(parts: tuple[str, ...], link: str) -> bool:
    """Whether the symbolic link `link` at `parts` can only lead to a place inside the folder.

    `..` is taken at the start only and never beyond the top. After a name it would be applied to wherever that name
    leads, were it a link itself, and two harmless links could together lead outside.
    """
    if not link or "\0" in link or link.startswith("/"):
        return False
    steps = [step for step in link.split("/") if step not in ("", ".")]
    ups = 0
    while ups < len(steps) and steps[ups] == "..":
        ups += 1
    return ups <= len(parts) - 1 and ".." not in steps[ups:]


class MemberRegister:
    """Checks members in the order of the archive. Feed every one through `admit`; the first bad one raises."""

    def __init__(self, limits: BundleLimits) -> None:
        self._limits = limits
        self._kinds: dict[tuple[str, ...], str] = {}
        """Kind by name; `implied` for folders that only occur as the parent of something."""
        self.num_members = 0
        self.total_bytes = 0

    @property
    def top_level(self) -> tuple[str, ...]:
        """Names at the top of the archive, sorted."""
        return tuple(sorted({parts[0] for parts in self._kinds}))

    def admit(self, name: str, kind: str, *, size: int, mode: int, link: str = "") -> Member:
        """The member as checked. Raises UnsafeBundle."""
        self.num_members += 1
        if self.num_members > self._limits.max_members:
            raise UnsafeBundle(
                f"The archive has more than {self._limits.max_members} members.",
                "Leave data and build output out with .ganglineignore.",
            )
        parts = self._check_name(name)
        if size < 0:
            raise UnsafeBundle(f"{name!r} states a negative size.", REPACK)
        self.total_bytes += size
        if self.total_bytes > self._limits.max_unpacked_bytes:
            raise unpacks_to_too_much(self._limits)
        self._check_place(name, parts, kind)
        link = self._check_link(name, parts, kind, link)
        return Member(parts=parts, kind=kind, size=size, is_executable=bool(mode & 0o100), link=link)

    def _check_name(self, name: str) -> tuple[str, ...]:
        if name.startswith("/"):
            raise UnsafeBundle(f"{name!r} is an absolute name.", REPACK)
        if "\0" in name:
            raise UnsafeBundle(f"{name!r} holds a NUL byte.", REPACK)
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if ".." in parts:
            raise UnsafeBundle(f"{name!r} leads out of the folder with '..'.", REPACK)
        if not parts:
            raise UnsafeBundle(f"{name!r} names nothing.", REPACK)
        try:
            longest = max(len(os.fsencode(part)) for part in parts)
            length = len(os.fsencode("/".join(parts)))
        except UnicodeEncodeError as error:
            raise UnsafeBundle(f"{name!r} cannot be a file name.", REPACK) from error
        if longest > self._limits.max_part_bytes or length > self._limits.max_name_bytes:
            raise UnsafeBundle(
                f"The name {name[:80]!r}… is too long ({length} bytes, its longest part {longest}; at most "
                f"{self._limits.max_name_bytes} and {self._limits.max_part_bytes}).",
                "Shorten it, or leave it out with .ganglineignore.",
            )
        return parts

    def _check_place(self, name: str, parts: tuple[str, ...], kind: str) -> None:
        known = self._kinds.get(parts)
        if known is not None and not (known == "implied" and kind == "folder"):
            raise UnsafeBundle(f"{name!r} occurs twice.", REPACK)
        for length in range(len(parts) - 1, 0, -1):
            above = self._kinds.get(parts[:length])
            if above in ("folder", "implied"):
                break
            if above is not None:
                raise UnsafeBundle(f"{name!r} lies below {'/'.join(parts[:length])!r}, which is a {above}.", REPACK)
            self._kinds[parts[:length]] = "implied"
        self._kinds[parts] = kind

    def _check_link(self, name: str, parts: tuple[str, ...], kind: str, link: str) -> str:
        if kind == "symlink" and not link_stays_inside(parts, link):
            raise UnsafeBundle(f"The link {name!r} leads out of the folder, to {link!r}.", REPACK)
        if kind == "hardlink":
            target = tuple(part for part in link.split("/") if part not in ("", "."))
            if link.startswith("/") or self._kinds.get(target) != "file":
                raise UnsafeBundle(f"The hard link {name!r} leads to {link!r}, not to an earlier file.", REPACK)
            return "/".join(target)
        return link
