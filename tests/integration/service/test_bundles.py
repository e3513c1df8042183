"""Bundles over REST: stored under the digest of their bytes, once; what is hostile, other or too large is refused."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from gangline.protocol.bundles import pack_folder
from service.db.tables import bundles
from tests.integration.service.api_server import BUNDLE_LIMIT, Api
from tests.support.wait import wait_until


def archive(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    """A tar.gz with one member."""
    buffer = io.BytesIO()
    header = tarfile.TarInfo(name)
    header.type, header.linkname, header.size = kind, link, len(data)
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as written:
        written.addfile(header, io.BytesIO(data))
    return buffer.getvalue()


# One of each kind; `tests/unit/protocol/test_hostile_bundles.py` has the whole corpus.
HOSTILE: dict[str, tuple[bytes, str]] = {
    "a name leading up": (archive("../x", b"x"), "leads out of the folder"),
    "an absolute name": (archive("/etc/cron.d/x", b"x"), "absolute name"),
    "a link leading up": (archive("l", kind=tarfile.SYMTYPE, link="../../etc"), "leads out of the folder"),
    "a hard link to a file outside": (archive("h", kind=tarfile.LNKTYPE, link="/etc/shadow"), "not to an earlier file"),
    "a device": (archive("null", kind=tarfile.CHRTYPE), "neither a file, a folder nor a link"),
    "a bomb": (archive("zeros", bytes(70 * 2**20)), "times its size"),
}


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A sound bundle with one script."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "train.py").write_text("print('hello')\n")
    bundle = pack_folder(folder)
    data = bundle.path.read_bytes()
    bundle.path.unlink()
    return data


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("trainer/__init__.py", True),
        ("trainer.py", True),
        ("trainer.pyc", True),
        ("trainer.cpython-311-x86_64-linux-gnu.so", True),
        ("my_trainer.py", False),
        ("trainer.yaml", False),
        ("src/trainer.py", False),
    ],
)
def test_code_that_would_hide_the_trainer_is_refused_for_an_entry_and_fine_for_a_script(
    api: Api, name: str, is_refused: bool
) -> None:
    data = archive(name, b"x")
    digest = digest_of(data)
    entry = {"name": "x", "run": {"entry": "a:b"}, "train": {"steps": 1}, "code": {"bundle": digest}}
    script = {"name": "x", "run": {"script": "train.py"}, "code": {"bundle": digest}}
    assert api.request("POST", "/jobs", json=entry, params={"dry_run": "true"}).status_code == 200, "not seen yet"
    assert put(api, data, digest).status_code == 201

    answers = [api.request("POST", "/jobs", json=entry, params={"dry_run": dry}) for dry in ("true", "false")]
    # A bundle of before this was looked at is looked at now.
    with api.database.write() as tx:
        tx.connection.execute(update(bundles).values(hides_trainer=None))
    answers.append(api.request("POST", "/jobs", json=entry))

    for answer in answers:
        assert (answer.status_code == 422) is is_refused, answer.text
        if is_refused:
            (problem,) = answer.json()["errors"]
            assert (problem["pointer"], "would hide" in problem["message"]) == ("code.bundle", True)
    assert api.request("POST", "/jobs", json=script).status_code == 201


def put(api: Api, data: Any, digest: str, who: str = "ann") -> httpx.Response:
    return api.request("PUT", f"/bundles/{digest}", who, content=data)


def files_of(api: Api) -> list[Path]:
    """Everything in the folder of bundles."""
    folder = api.state.settings.data_folder / "bundles"
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.fixture(autouse=True)
def _no_files(api: Api) -> None:
    for path in files_of(api):
        path.unlink(missing_ok=True)


def test_a_bundle_is_stored_once_under_the_digest_of_its_bytes(api: Api, packed: bytes) -> None:
    digest = digest_of(packed)
    assert api.request("HEAD", f"/bundles/{digest}").status_code == 404

    assert [put(api, packed, digest).status_code for _ in range(3)] == [201, 200, 200]

    assert api.request("HEAD", f"/bundles/{digest}").status_code == 200
    assert [path.read_bytes() for path in files_of(api)] == [packed]


def test_eight_uploads_of_one_bundle_at_once_are_one(api: Api, packed: bytes) -> None:
    statuses: list[int] = []
    senders = [
        threading.Thread(target=lambda: statuses.append(put(api, packed, digest_of(packed)).status_code))
        for _ in range(8)
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert set(statuses) <= {200, 201}
    assert [path.read_bytes() for path in files_of(api)] == [packed]


def test_the_claimant_of_a_job_gets_the_bytes_back_and_nobody_else(api: Api, packed: bytes) -> None:
    put(api, packed, digest_of(packed))
    node = api.node()
    code = {"bundle": digest_of(packed)}
    part = api.start(api.submit(code=code, run={"script": "train.py"}), node)[0]

    assert part.call("GET", "bundle").content == packed
    assert part.plan["code"]["bundle"] == digest_of(packed)
    other = api.start(api.submit(), node)[0]
    assert (other.call("GET", "bundle").status_code, other.call("GET", "bundle").json()["code"]) == (404, "not_found")


def refused(api: Api, answer: httpx.Response, status: int, code: str) -> None:
    """The upload was refused and left nothing behind."""
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert answer.json()["fix"]
    assert files_of(api) == []
    assert api.snapshot()["bundles"] == []


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_by_reason_and_not_kept(api: Api, name: str) -> None:
    data, reason = HOSTILE[name]
    answer = put(api, data, digest_of(data))
    refused(api, answer, 422, "unsafe_bundle")
    assert reason in answer.json()["detail"]


@pytest.mark.parametrize(
    "data", [b"", b"no archive", b"\x1f\x8b" + b"x" * 50], ids=["nothing", "a text", "a broken gzip"]
)
def test_what_is_no_archive_is_refused(api: Api, data: bytes) -> None:
    refused(api, put(api, data, digest_of(data)), 422, "unsafe_bundle")


def test_bytes_of_another_digest_are_refused(api: Api, packed: bytes) -> None:
    refused(api, put(api, packed, "sha256:" + "0" * 64), 422, "invalid_request")
    refused(api, put(api, packed[:-9], digest_of(packed)), 422, "invalid_request")


@pytest.mark.parametrize("is_chunked", [False, True], ids=["declared", "chunked"])
def test_a_bundle_over_the_limit_is_refused(api: Api, is_chunked: bool) -> None:
    data = b"x" * (BUNDLE_LIMIT + 1)
    chunks = (data[start : start + 8192] for start in range(0, len(data), 8192))
    answer = put(api, chunks if is_chunked else data, digest_of(data))
    refused(api, answer, 413, "body_too_large")
    assert answer.json()["limit"] == BUNDLE_LIMIT


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:" + "0" * 63,
        "sha256:" + "G" * 64,
        "sha256:" + "A" * 64,
        "md5:" + "0" * 64,
        "0" * 64,
        "x",
        "sha256:..%2f..%2fx",
    ],
)
@pytest.mark.parametrize("method", ["HEAD", "PUT"])
def test_a_digest_that_is_none_is_refused(api: Api, method: str, digest: str) -> None:
    assert api.request(method, f"/bundles/{digest}").status_code in (404, 422)
    assert files_of(api) == []


def test_an_upload_that_breaks_off_leaves_nothing(api: Api, packed: bytes) -> None:
    def broken() -> Any:
        yield packed[:10]
        raise ConnectionError("the cable was pulled")

    with pytest.raises((ConnectionError, httpx.HTTPError)):
        put(api, broken(), digest_of(packed))

    wait_until(lambda: not files_of(api), 60, lambda: f"{files_of(api)} is left")
    assert api.snapshot()["bundles"] == []
