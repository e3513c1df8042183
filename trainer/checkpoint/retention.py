"""Which checkpoints may be deleted: those older than the newest few that are accepted. Pure, but for `Retention`.

Not for: deleting (`layout.remove`), or what a job resumes from (the API).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class KnownCheckpoint:
    """A checkpoint of the job on disk, of this attempt or an earlier one."""

    path: str
    """Relative to the root."""
    is_accepted: bool
    """The API knows it: a new attempt may resume from it."""
    is_broken: bool = False
    """Found unusable: it does not count among those that are kept."""


def removable(checkpoints: Sequence[KnownCheckpoint], keep: int) -> list[KnownCheckpoint]:
    """What may be deleted of `checkpoints`, oldest first: all before the newest `keep` usable accepted ones.

    Order is the order they were made in, not the step: a job that went back to step 10 makes its step 15 after the
    step 30 it could not use. Nothing goes while fewer than `keep` usable ones are accepted.
    """
    good = [index for index, one in enumerate(checkpoints) if one.is_accepted and not one.is_broken]
    return list(checkpoints[: good[-keep]]) if len(good) >= keep else []


class Retention:
    """Keeps count of a job's checkpoints for the rank that tells the API of them."""

    def __init__(self, keep: int, accepted_bytes: Callable[[], int | None]) -> None:
        self._keep = keep
        self._accepted_bytes = accepted_bytes
        self._known: list[KnownCheckpoint] = []
        self._ends: dict[str, Callable[[], int | None]] = {}
        """Where the event that tells of a checkpoint ends in the events file, until it is accepted."""

    def start(self, paths: Sequence[str]) -> None:
        """The accepted checkpoints that there were before, oldest first."""
        self._known = [KnownCheckpoint(path=path, is_accepted=True) for path in paths]

    def mark_broken(self, path: str) -> None:
        """A checkpoint turned out to be unusable."""
        self._known = [replace(one, is_broken=True) if one.path == path else one for one in self._known]

    def add(self, path: str, end: Callable[[], int | None]) -> None:
        """A new one is complete; `end` answers with the end of its event in the events file, once that is written."""
        self._known = [one for one in self._known if one.path != path]
        self._known.append(KnownCheckpoint(path=path, is_accepted=False))
        self._ends[path] = end

    def take_removable(self) -> list[str]:
        """Paths to delete now, oldest first. They are forgotten here."""
        accepted = self._accepted_bytes()
        for path, end in list(self._ends.items()):
            if is_accepted(end(), accepted):
                del self._ends[path]
                self._known = [replace(one, is_accepted=True) if one.path == path else one for one in self._known]
        doomed = [one.path for one in removable(self._known, self._keep)]
        self._known = [one for one in self._known if one.path not in doomed]
        for path in doomed:
            self._ends.pop(path, None)
        return doomed


def is_accepted(end: int | None, accepted_bytes: int | None) -> bool:
    """Whether the API has the event that ends at byte `end` of the stream of which it has `accepted_bytes`.

    `accepted_bytes` None: there is no supervisor and no API, so complete is accepted.
    """
    if accepted_bytes is None:
        return True
    return end is not None and end <= accepted_bytes
