"""`Client`: everything a user can ask of the server, from Python.

    from gangline import Client
    client = Client()
    job = client.submit("gpt.yaml", set={"resources.nodes": 2})
    for line in job.logs(follow=True):
        print(line.text, end="")
    print(job.wait(timeout=3600).outcome)

Synchronous; errors are `gangline.client.errors`. A method imports the records that only it answers with: what is not
asked for costs nothing. Not for: rendering anything for a terminal (`gangline.cli`).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.client.admin_calls import AdminCalls
from gangline.client.base import items_of, new_key, query, segment
from gangline.client.errors import GanglineError, InvalidSpec, NotFound, TimedOut, Unreachable
from gangline.client.http import Call
from gangline.client.job_file import JobFile, folder_to_pack, missing_script, read_job_file, with_bundle
from gangline.client.log_calls import LogCalls
from gangline.client.models import Checkpoint, Job, JobEvent, Me, build
from gangline.client.pool_calls import PoolCalls
from gangline.client.references import ById, ByName, parse_reference
from gangline.protocol.durations import exact_duration
from gangline.protocol.names import IDEMPOTENCY_HEADER

if TYPE_CHECKING:
    from gangline.client.log_models import LogLine, Metrics
    from gangline.client.pool_models import Node
    from gangline.client.queue_models import QueuePage, Why
    from gangline.protocol.bundles import PackedBundle

LIST_PAGE = 50
EVENTS_PAGE = 100
HOLD_SECONDS = 30
"""How long the server may hold one long poll."""
UPLOAD_SECONDS = 600.0

JobRef = int | str | Job
Overrides = Mapping[str, Any] | tuple[tuple[str, str], ...] | None


class Client(LogCalls, AdminCalls, PoolCalls):
    """A connection to one server as one user. Safe to use from one thread at a time."""

    # --- Submitting ------------------------------------------------------------------------------------------------

    def submit(
        self,
        spec: str | Path | Mapping[str, Any] | JobFile,
        *,
        set: Overrides = None,
        key: str | None = None,
        on_step: Callable[[str], None] | None = None,
    ) -> Job:
        """Submit a job: a file's path, YAML text, or the spec as an object. Returns it as accepted.

        `set` overrides keys by dotted path. `key` is the Idempotency-Key: the same key and spec again answer with the
        same job, never a second one; by default each call has its own, kept over its retries. A relative `code.path`,
        or a job file that names no code, packs that folder and uploads it unless the server has it. `on_step` hears
        what is going on. Raises InvalidSpec with `.errors`, Refused, NotAllowed, Unreachable.
        """
        job_file = spec if isinstance(spec, JobFile) else read_job_file(spec, overrides(set))
        tell = on_step or (lambda message: None)
        folder = self._checked_folder(job_file)
        digest = None if folder is None else self.upload_bundle(folder, on_step=tell)
        body, content_type = with_bundle(job_file, digest)
        tell("Submitting")
        headers = {"Content-Type": content_type, IDEMPOTENCY_HEADER: key or new_key()}
        answer = self.transport.json(self._job_call(job_file, body, headers, dry_run=False))
        return self._job(answer)

    def check(self, spec: str | Path | Mapping[str, Any] | JobFile, *, set: Overrides = None) -> dict[str, Any]:
        """Validate a spec without submitting anything: the server's `{"valid", "spec", "resources", "plan", "reason"}`.

        The code folder is packed to see that it can be; it is sent only if the server insists. Raises as `submit` does.
        """
        job_file = spec if isinstance(spec, JobFile) else read_job_file(spec, overrides(set))
        folder = self._checked_folder(job_file)
        if folder is None:
            return self._dry_run(job_file, None)
        with _packed(folder) as bundle:
            digest = bundle.digest
        try:
            return self._dry_run(job_file, digest)
        except InvalidSpec as error:
            # A server that wants to see the code even for a check: give it, and let it judge the rest.
            if {problem.pointer for problem in error.errors} != {"code.bundle"}:
                raise
        return self._dry_run(job_file, self.upload_bundle(folder))

    def _checked_folder(self, job_file: JobFile) -> Path | None:
        """The folder to pack, once it holds the script that is to run; else all faults, the server's too, at once."""
        folder = folder_to_pack(job_file)
        missing = missing_script(job_file, folder) if folder is not None and folder.is_dir() else None
        if missing is None:
            return folder
        try:
            self._dry_run(job_file, NO_BUNDLE)
        except InvalidSpec as remote:
            # The server is right not to know that bundle; what else it found belongs beside our own fault.
            others = [item for item in remote.problem.get("errors", []) if item.get("pointer") != "code.bundle"]
            missing.problem["errors"] = [*missing.problem.get("errors", []), *others]
        except GanglineError as unknown:
            missing.problem["unchecked"] = unknown.detail
        raise missing

    def _dry_run(self, job_file: JobFile, digest: str | None) -> dict[str, Any]:
        body, content_type = with_bundle(job_file, digest)
        answer = self.transport.json(self._job_call(job_file, body, {"Content-Type": content_type}, dry_run=True))
        return answer if isinstance(answer, dict) else {}

    def upload_bundle(self, folder: str | Path, *, on_step: Callable[[str], None] | None = None) -> str:
        """Pack a folder and upload it unless the server has these very bytes. Returns `sha256:<hex>`."""
        tell = on_step or (lambda message: None)
        tell(f"Packing {Path(folder).resolve()}")
        with _packed(Path(folder)) as bundle:
            path = f"/bundles/{segment(bundle.digest)}"
            if self.transport.send(Call(method="HEAD", path=path), accept=frozenset({404})).status_code == 404:
                tell(f"Uploading {bundle.num_bytes / 2**20:.1f} MiB of code")
                self.transport.send(
                    Call(
                        method="PUT",
                        path=path,
                        headers={"Content-Type": "application/gzip"},
                        content_file=(str(bundle.path), bundle.num_bytes),
                        timeout_seconds=UPLOAD_SECONDS,
                    )
                )
            return bundle.digest

    def _job_call(self, job_file: JobFile, body: bytes, headers: dict[str, str], *, dry_run: bool) -> Call:
        params = query({"dry_run": True if dry_run else None, "set": [f"{name}={v}" for name, v in job_file.overrides]})
        return Call(method="POST", path="/jobs", params=params, headers=headers, content=body)

    # --- Reading ---------------------------------------------------------------------------------------------------

    def job(self, ref: JobRef) -> Job:
        """A job by id, by name (the latest of mine), or `-1` (my last), `-2`, …. Raises NotFound."""
        return self._job(self.get(f"/jobs/{self.job_id(ref)}"))

    def job_id(self, ref: JobRef) -> int:
        """The id that a reference means; asks the server only for a name or `-1`."""
        if isinstance(ref, Job):
            return ref.id
        try:
            reference = parse_reference(ref)
        except ValueError as error:
            raise GanglineError(str(error), code="usage", fix="`gang ls` lists the jobs") from error
        if isinstance(reference, ById):
            return reference.id
        if isinstance(reference, ByName):
            newest = self.jobs(name=reference.name, owner="me", limit=LIST_PAGE)
            found = [job for job in newest if job.name == reference.name]
            missing, fix = f"no job of yours has the name {reference.name!r}", "`gang ls --owner me` lists your jobs"
        else:
            found = list(self.jobs(owner="me", limit=reference.back))[reference.back - 1 :]
            missing, fix = f"you have fewer than {reference.back} jobs", "`gang submit FILE` makes one"
        if not found:
            raise NotFound(missing, fix=fix)
        return found[0].id

    def jobs(
        self,
        *,
        state: str | None = None,
        owner: str | None = None,
        team: str | None = None,
        name: str | None = None,
        tag: str | None = None,
        limit: int | None = None,
    ) -> Iterator[Job]:
        """Jobs, newest first, fetched page by page as they are read; at most `limit`. `owner="me"` works."""
        filters = {"state": state, "owner": owner, "team": team, "name": name, "tag": tag}
        page_limit = LIST_PAGE if limit is None else max(1, min(LIST_PAGE, limit))
        for count, item in enumerate(self.pages("/jobs", page_limit, **filters)):
            if limit is not None and count >= limit:
                return
            yield self._job(item)
            if limit is not None and count + 1 >= limit:
                return

    def why(self, ref: JobRef, *, variants: bool = False) -> Why:
        """Why a job waits (or what its stop waits for), what is ahead of it, when it starts, if it ever can.

        `variants`: also what it could ask for to start sooner.
        """
        from gangline.client.queue_models import Why

        return build(Why, self.get(f"/jobs/{self.job_id(ref)}/why", variants="true" if variants else None))

    def queue(self, *, after: int = 0, limit: int = 50) -> QueuePage:
        """The waiting jobs in the order of the policy, from after a position."""
        from gangline.client.queue_models import QueuePage

        return build(QueuePage, self.get("/queue", after=after or None, limit=limit))

    def events(self, ref: JobRef, *, after: int = 0) -> Iterator[JobEvent]:
        """A job's history, oldest first, page by page; only entries with an id above `after`."""
        job_id = self.job_id(ref)
        position: int | None = after
        while position is not None:
            page = self.get(f"/jobs/{job_id}/events", after=position, limit=EVENTS_PAGE)
            for item in page.get("items", ()):
                yield build(JobEvent, item)
            position = page.get("next")

    def logs(
        self, ref: JobRef, *, follow: bool = False, rank: int | str | None = None, tail: int | None = None
    ) -> Iterator[LogLine]:
        """Log lines (`LogLine`). Without `follow` what is stored now (rank 0 unless given), with it all to the end."""
        return self.log_lines(self.job_id(ref), ranks="all" if rank is None else str(rank), follow=follow, tail=tail)

    def metrics(self, ref: JobRef, *keys: str, attempt: int | None = None, points: int = 2000) -> Metrics:
        """Curves of the named metrics (all when none is named), at most `points` points each."""
        from gangline.client.log_models import Metrics

        params = {"keys": ",".join(keys) or None, "attempt": attempt, "points": points}
        return build(Metrics, self.get(f"/jobs/{self.job_id(ref)}/metrics", **params))

    def checkpoints(self, ref: JobRef) -> list[Checkpoint]:
        """The checkpoints that a job may resume from, the one it resumes from first."""
        return [build(Checkpoint, item) for item in items_of(self.get(f"/jobs/{self.job_id(ref)}/checkpoints"))]

    def nodes(self) -> list[Node]:
        """The machines of the pool."""
        from gangline.client.pool_models import Node

        return [build(Node, item) for item in self.pages("/nodes", 500)]

    def release_node(self, name: str) -> dict[str, Any]:
        """An admin's word that a machine which does not answer is off: what waits for it ends."""
        answer: dict[str, Any] = self.post(f"/nodes/{segment(name)}/release", {})
        return answer

    def me(self) -> Me:
        """Who this client's token belongs to."""
        return build(Me, self.get("/me"))

    # --- Acting and waiting ----------------------------------------------------------------------------------------

    def cancel(self, ref: JobRef, *, reason: str = "") -> Job:
        """Ask a job to stop; returns it as it is now. Doing it again, or to an ended job, changes nothing."""
        path = f"/jobs/{self.job_id(ref)}/cancel"
        # Idempotent by itself; the key only tells the transport (and the server) that a repeat is the same wish.
        return self._job(self.post(path, {"reason": reason}, key=new_key()))

    def requeue(self, ref: JobRef, *, reason: str = "", from_start: bool = False) -> Job:
        """Stop a running job at a checkpoint and have it start again from there when its turn comes; not charged.

        `from_start` gives up its checkpoints: it begins anew, and a waiting job is no longer bound to their place.
        Raises Refused for a job that has ended, is stopping for another reason, or waits already.
        """
        return self._job(self.post(f"/jobs/{self.job_id(ref)}/requeue", {"reason": reason, "from_start": from_start}))

    def extend(self, ref: JobRef, seconds: float) -> Job:
        """Give a job more time: its limit is `seconds` in all from now on, as counted from the start of an attempt.

        Raises Refused where it breaks what another job was promised, for less time than a running job has, and for a
        job that has ended or has no limit.
        """
        return self._job(self.post(f"/jobs/{self.job_id(ref)}/limit", {"seconds": seconds}, key=new_key()))

    def hold(self, ref: JobRef, *, reason: str = "") -> Job:
        """Keep a job from starting until it is released; a running one goes on and does not start again once it stops.

        Doing it again changes nothing. Raises Refused for a job that has ended.
        """
        return self._job(self.post(f"/jobs/{self.job_id(ref)}/hold", {"reason": reason}, key=new_key()))

    def release(self, ref: JobRef) -> Job:
        """Let a held job take its turn. Raises NotAllowed when an admin holds it and the caller is none."""
        return self._job(self.post(f"/jobs/{self.job_id(ref)}/release", {}, key=new_key()))

    def set_priority(self, ref: JobRef, priority: int | str) -> Job:
        """Change a job's priority: `low`, `normal`, `high`, -100 to 100, or `top` for whom an admin has granted it."""
        return self._job(self.post(f"/jobs/{self.job_id(ref)}/priority", {"priority": priority}, key=new_key()))

    def poll(self, job: Job, hold_seconds: float) -> Job:
        """`job` as soon as it has changed, or as it is after `hold_seconds`."""
        answer = self._poll(job.id, f'"{job.version}"', hold_seconds)
        return job if answer.status_code == 304 else self._job(self.transport.decoded(answer))

    def wait(self, ref: JobRef, *, timeout: float | None = None, on_change: Callable[[Job], None] | None = None) -> Job:
        """Wait until a job has ended, at most `timeout` seconds, and return it. Uses long polls.

        Outages of the server are waited out for ten minutes. Raises TimedOut when the time is over (the job goes on).
        `on_change` gets the job at the beginning and at each change.
        """
        started = time.monotonic()
        job = self.job(ref)
        while True:
            if on_change is not None:
                on_change(job)
            if job.is_terminal:
                return job
            job = self._next_version(job, started, timeout)

    def _next_version(self, job: Job, started: float, timeout: float | None) -> Job:
        """The job's next version, by as many long polls as it takes."""
        from gangline.client.follow import PATIENCE_SECONDS, PAUSES_SECONDS

        failures, failing_since = 0, 0.0
        while True:
            now = time.monotonic()
            left = math.inf if timeout is None else started + timeout - now
            if left <= 0:
                raise TimedOut(
                    f"job {job.id} has not ended within {exact_duration(timeout or 0.0)}, it is {job.state}",
                    fix=f"it goes on; wait again with `gang wait {job.id}`",
                )
            try:
                newer = self.poll(job, round(max(0.01, min(HOLD_SECONDS, left)), 2))
            except Unreachable as error:
                failing_since = now if failures == 0 else failing_since
                if now - failing_since > PATIENCE_SECONDS:
                    raise
                if failures == 0 and self.on_trouble is not None:
                    self.on_trouble(error.detail)
                time.sleep(min(left, PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS) - 1)]))
                failures += 1
                continue
            failures = 0
            if newer.version != job.version or newer.is_terminal:
                return newer
            if time.monotonic() - now < 0.2:
                time.sleep(min(left, 0.5))  # a server or proxy that does not hold the poll must not be hammered

    def _poll(self, job_id: int, tag: str, hold_seconds: float) -> Any:
        call = Call(
            method="GET",
            path=f"/jobs/{job_id}",
            params=query({"wait": hold_seconds}),
            headers={"If-None-Match": tag},
            timeout_seconds=hold_seconds + 15.0,
        )
        return self.transport.send(call, accept=frozenset({304}))

    def _job(self, answer: Any) -> Job:
        return build(Job, answer).of(self)


@contextlib.contextmanager
def _packed(folder: Path) -> Iterator[PackedBundle]:
    """A folder's bundle, removed afterwards."""
    from gangline.protocol.bundles import BundleError, pack_folder

    try:
        bundle = pack_folder(folder)
    except BundleError as error:
        raise GanglineError(error.reason, code="cannot_pack", fix=error.fix) from error
    try:
        yield bundle
    finally:
        bundle.path.unlink(missing_ok=True)


NO_BUNDLE = "sha256:" + "0" * 64
"""A digest that no server has."""


def overrides(values: Overrides) -> tuple[tuple[str, str], ...]:
    """`set` as pairs of dotted key and value text. Python values become JSON, which YAML reads the same way."""
    if values is None:
        return ()
    if isinstance(values, Mapping):
        return tuple((str(name), json.dumps(value)) for name, value in values.items())
    return tuple(values)
