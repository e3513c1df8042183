"""A client that follows a job's log in a thread while the test breaks things.

Not for: judging what it saw; that is the test's.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from types import TracebackType

from gangline.client import Client
from gangline.client.follow import AttemptStarted, FollowEnd, LogChunk


class Follower:
    """Follows every rank from the first byte, over lost connections. Use as a context manager."""

    def __init__(self, url: str, token: str, job_id: int) -> None:
        self.end: FollowEnd | None = None
        self.attempts: list[int] = []
        self.num_troubles = 0
        self.error: Exception | None = None
        self._job_id = job_id
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._client = Client(url, token, on_trouble=self._note_trouble)
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def join(self, timeout: float) -> None:
        """Wait for the end mark; raises what the client raised."""
        self._thread.join(timeout)
        if self.error is not None:
            raise self.error
        assert not self._thread.is_alive(), f"the follower got no end mark within {timeout:g} s"

    def texts(self) -> dict[int, bytes]:
        """What was shown of each rank, as UTF-8."""
        return {rank: "".join(pieces).encode() for rank, pieces in self._texts.items()}

    def _note_trouble(self, _message: str) -> None:
        self.num_troubles += 1

    def _run(self) -> None:
        try:
            for item in self._client.follow(self._job_id):
                match item:
                    case LogChunk():
                        self._texts[item.rank].append(item.text)
                    case AttemptStarted():
                        self.attempts.append(item.attempt)
                    case FollowEnd():
                        self.end = item
        except Exception as error:  # noqa: BLE001  # handed to the test's thread by `join`
            self.error = error
