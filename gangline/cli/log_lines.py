"""From log chunks to lines ready to print: whole lines, made safe, with the rank in front. Pure.

Not for: fetching (`gangline.client.follow`) or the screen (`gangline.cli.live`).
"""

from __future__ import annotations

from gangline.cli.sanitise import clean_log, fold_carriage_returns

MAX_PENDING_CHARS = 65536
"""A longer line is printed in pieces, so that one without an end takes no memory."""
RANK_COLOURS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)
"""SGR colours of the rank prefixes, in turn."""


class LineAssembler:
    """Joins chunks of several ranks into lines. With `raw` text passes untouched; else it is made safe."""

    def __init__(self, *, colour: bool, raw: bool, prefix_width: int = 0) -> None:
        self._colour = colour
        self._raw = raw
        self._prefix_width = prefix_width
        """Digits of the largest rank; 0: no prefix, there is one rank only."""
        self._pending: dict[int, str] = {}

    def show_ranks(self, ranks: tuple[int, ...]) -> None:
        """Put the rank in front of lines from now on, when there is more than one."""
        self._prefix_width = len(str(max(ranks))) if len(ranks) > 1 else 0

    def feed(self, rank: int, text: str) -> list[str]:
        """The lines that `text` completes, without their line ends."""
        whole, line_end, rest = (self._pending.pop(rank, "") + text).rpartition("\n")
        lines = whole.split("\n") if line_end else []
        if not self._raw:
            rest = _without_overwritten(rest)
        if len(rest) > MAX_PENDING_CHARS:
            lines.append(rest)
            rest = ""
        if rest:
            self._pending[rank] = rest
        return [self._line(rank, line) for line in lines]

    def flush(self) -> list[str]:
        """The unfinished lines, at the end or before leaving."""
        pending, self._pending = self._pending, {}
        return [self._line(rank, text) for rank, text in sorted(pending.items())]

    def _line(self, rank: int, text: str) -> str:
        shown = text if self._raw else clean_log(fold_carriage_returns(text), colour=self._colour)
        if not self._prefix_width:
            return shown
        prefix = f"r{rank}".ljust(self._prefix_width + 1)
        if self._colour:
            prefix = f"\x1b[{RANK_COLOURS[rank % len(RANK_COLOURS)]}m{prefix}\x1b[0m"
        return f"{prefix} {shown}"


def _without_overwritten(rest: str) -> str:
    """An unfinished line without what its writer has already gone back over: a progress bar stays one bar long."""
    end = len(rest.rstrip("\r"))
    return rest[rest.rfind("\r", 0, end) + 1 :]
