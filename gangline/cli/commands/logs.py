"""`gang logs`: print what a job has written, or follow it to the end.

Exactness is the client's (`gangline.client.follow`); here it is put on the screen. Ctrl-C only stops following.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import click

from gangline.cli import exit_codes
from gangline.cli.interrupts import HeldInterrupts
from gangline.cli.log_lines import LineAssembler
from gangline.cli.options import gang_command, job_argument
from gangline.cli.session import Session
from gangline.cli.waiting import say_how_it_ended
from gangline.cli.words import state_note
from gangline.client.follow import AttemptStarted, FollowEnd, FollowItem, LogChunk, LogFollower, parse_position
from gangline.client.log_models import Gap
from gangline.client.models import Job
from gangline.protocol.outcomes import ExitCode

_RANKS = re.compile(r"all|[0-9]+(,[0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What of the logs is wanted."""

    ranks: str
    tail: int | None
    start: int | None
    """Byte offset to begin at."""
    position: str | None
    """Exact place to resume, as printed on Ctrl-C."""
    raw: bool


@gang_command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Stay and print what comes, to the end of the job.")
@click.option("--rank", "ranks", default="all", show_default=True, metavar="RANKS", help="Only these ranks: 0 or 0,2.")
@click.option("--tail", type=click.IntRange(min=1), metavar="N", help="Only the last N lines of each rank.")
@click.option("--from", "begin", metavar="PLACE", help="Begin at a byte, or go on at a place that Ctrl-C printed.")
@click.option("--raw", is_flag=True, help="Leave control characters in. Only for logs you trust.")
@click.option("--exit-status", is_flag=True, help="With -f: exit as `gang wait` does.")
def logs(
    session: Session,
    job: str,
    follow: bool,
    ranks: str,
    tail: int | None,
    begin: str | None,
    raw: bool,
    exit_status: bool,
) -> ExitCode | None:
    """Print the logs of a JOB's latest attempt, or follow them.

    Without -f it never waits, whatever state the job is in. With several ranks each line begins with its rank.
    """
    choice = _choice(ranks, tail, begin, raw)
    if exit_status and not follow:
        raise click.UsageError("--exit-status needs -f: without it the command does not stay to the end.")
    with session.busy("Asking"):
        found = session.client.job(job)
    if not follow:
        _print_stored(session, found, choice)
        return None
    ended, end = _follow(session, found, choice)
    if end is None:
        return ExitCode.INTERRUPTED
    if ended is not None and not session.is_json:
        say_how_it_ended(session, ended, to_stderr=True)
    return exit_codes.of_ended_job(end.state, end.outcome) if exit_status else None


def _choice(ranks: str, tail: int | None, begin: str | None, raw: bool) -> Choice:
    words = ranks.replace(" ", "")
    if not _RANKS.fullmatch(words):
        raise click.BadParameter(f"{ranks!r}: expected `all`, or numbers with commas such as 0,2.", param_hint="--rank")
    start, position = None, None
    if begin is not None and begin.isdecimal():
        start = int(begin)
    elif begin is not None:
        try:
            parse_position(begin)
        except ValueError as error:
            raise click.BadParameter(f"{error}.", param_hint="--from") from error
        position = begin
    if tail is not None and begin is not None:
        raise click.UsageError("--tail and --from both say where to begin: give one of them.")
    return Choice(ranks=words, tail=tail, start=start, position=position, raw=raw)


# --- Stored --------------------------------------------------------------------------------------------------------


def _print_stored(session: Session, job: Job, choice: Choice) -> None:
    """What is stored now, rank after rank; answers at once in any state of the job."""
    ranks = ranks_of(job) if choice.ranks == "all" else tuple(int(part) for part in choice.ranks.split(","))
    if choice.raw and len(ranks) == 1 and choice.tail is None and not session.is_json:
        start = _start_of(choice, ranks[0])
        for data in session.client.log_bytes(job.id, rank=ranks[0], start=start):
            sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    assembler = LineAssembler(colour=session.has_colour, raw=choice.raw)
    assembler.show_ranks(ranks)
    is_empty = True
    pages = []
    for rank in ranks:
        for page in session.client.log_pages(job.id, rank=rank, start=_start_of(choice, rank), tail=choice.tail):
            is_empty = is_empty and not page.text
            if session.is_json:
                pages.append(page.raw)
            else:
                _print(session, assembler.feed(rank, page.text))
        _print(session, assembler.flush())
    if session.is_json:
        session.json({"items": pages})
    elif is_empty:
        note = state_note(job)
        session.note(f"Job {job.id} is {job.state}: it has written nothing here." + (f" {note}" if note else ""))


def _start_of(choice: Choice, rank: int) -> int | None:
    return parse_position(choice.position).offsets.get(rank) if choice.position else choice.start


def ranks_of(job: Job) -> tuple[int, ...]:
    """All ranks of a job's latest gang: one per node for a command, else its processes."""
    if job.size is not None:
        return tuple(range(job.size.nodes * job.size.processes_per_node))
    spec = job.spec or {}
    run = spec.get("run")
    is_command = isinstance(run, dict) and (run.get("command") is not None or run.get("shell") is not None)
    per_node = 1 if is_command else job.processes_per_node or max(1, job.resources.gpus_per_node)
    return tuple(range(job.resources.nodes * per_node))


def _print(session: Session, lines: list[str]) -> None:
    for line in lines:
        session.out(line)


# --- Following -----------------------------------------------------------------------------------------------------


def _follow(session: Session, job: Job, choice: Choice) -> tuple[Job | None, FollowEnd | None]:
    """Follow to the end: the ended job and the end event; both None when the user stopped following."""
    follower = session.client.follow(
        job.id, ranks=choice.ranks, start=choice.start, tail=choice.tail, position=choice.position
    )
    view = _JsonView(session, choice) if session.is_json else _LinesView(session, choice)
    if sys.stdout.isatty() and not session.is_json and not choice.raw and not session.debug:
        from gangline.cli.live import LiveProgress

        live = LiveProgress(session, job)
        view.show, view.remark = live.print, live.note
        session.client.on_trouble = lambda message: live.note(f"{message}; trying again")
        try:
            with live:
                end = _drain(follower, view)
        except KeyboardInterrupt:
            end = None
        job = live.job
    else:
        try:
            end = _drain(follower, view)
        except KeyboardInterrupt:
            end = None
    _print(session, view.rest())
    if end is None:
        session.still_there(job, "following", _resume_command(job, choice, view.position))
        return None, None
    return session.client.job(job.id), end


def _drain(follower: LogFollower, view: _LinesView | _JsonView) -> FollowEnd | None:
    with HeldInterrupts() as interrupts:
        for item in follower:
            # Shown and remembered as one: Ctrl-C inside would lose or repeat what the resumed command shows.
            with interrupts.held():
                view.take(item)
            if isinstance(item, FollowEnd):
                return item
    return None


class _LinesView:
    """Lines of text on stdout, remarks on stderr; `show` and `remark` are replaced when a progress line is drawn."""

    def __init__(self, session: Session, choice: Choice) -> None:
        self._assembler = LineAssembler(colour=session.has_colour, raw=choice.raw)
        if choice.ranks != "all":
            self._assembler.show_ranks(tuple(int(part) for part in choice.ranks.split(",")))
        elif choice.position:
            # A resumed stream does not announce its attempt again; the place names all its ranks.
            self._assembler.show_ranks(tuple(parse_position(choice.position).offsets))
        self._is_all = choice.ranks == "all"
        self.position = choice.position or ""
        """Right after the last chunk shown, which is where a resumed command goes on."""
        self.show = lambda lines: _print(session, lines)
        self.remark = session.note

    def take(self, item: FollowItem) -> None:
        """Show one item."""
        if isinstance(item, LogChunk):
            self.show(self._assembler.feed(item.rank, item.text))
            self.position = item.position or self.position
            return
        if isinstance(item, AttemptStarted):
            self.show(self._assembler.flush())
            if item.attempt > 1:
                self.remark(f"--- attempt {item.attempt} ---")
            if self._is_all and item.ranks:
                self._assembler.show_ranks(item.ranks)
        elif isinstance(item, Gap):
            self.remark(f"--- rank {item.rank}: {item.end - item.start} bytes are missing here ---")

    def rest(self) -> list[str]:
        """What is left of unfinished lines."""
        return self._assembler.flush()


class _JsonView:
    """One JSON object per line, with the fields of the stream's events."""

    def __init__(self, session: Session, choice: Choice) -> None:
        self.position = choice.position or ""
        self.show = lambda lines: _print(session, lines)
        self.remark = session.note

    def take(self, item: FollowItem) -> None:
        """Show one item."""
        import json

        name = _EVENT_NAMES[type(item)]
        fields = {_REST_NAMES.get(key, key): value for key, value in vars(item).items()}
        # ASCII alone: no character in it means anything to a terminal.
        self.show([json.dumps({"event": name, **fields})])
        if isinstance(item, LogChunk):
            self.position = item.position or self.position

    def rest(self) -> list[str]:
        """Nothing is held back."""
        return []


_EVENT_NAMES: dict[type, str] = {AttemptStarted: "attempt", LogChunk: "log", Gap: "gap", FollowEnd: "end"}
_REST_NAMES = {"start": "from", "end": "to"}


def _resume_command(job: Job, choice: Choice, position: str) -> str:
    """The command that goes on exactly here."""
    words = [f"gang logs -f {job.id}"]
    if choice.ranks != "all":
        words.append(f"--rank {choice.ranks}")
    if position:
        # With the attempt in it, not a bare byte: a new attempt may begin before somebody comes back.
        words.append(f"--from {position}")
    return " ".join(words)
