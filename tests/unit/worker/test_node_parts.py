"""Small parts of a node: process identity, cgroup homes, programs on PATH, atomic files, cached bundles."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from pathlib import Path

import pytest

from gangline.protocol.names import STATE_FILE
from worker.api import AttemptApi, Connection, Fenced, Refused, _problem
from worker.cgroup import CgroupHome, find_home, group_name
from worker.code_folder import MAX_CACHED_BUNDLES, WrongBundleError, fetch_bundle
from worker.directives import wait_seconds
from worker.environment_check import find_program
from worker.interfaces import interface_of
from worker.state import (
    AttemptState,
    StateError,
    current_boot_id,
    identify,
    is_alive,
    process_facts,
    read_state,
    write_state,
)

STATE = AttemptState(
    attempt_id=17, node_rank=None, token="gla_x", pool_id="p", node_name="n", server="http://127.0.0.1:1"
)


def test_the_state_file_comes_back_as_written_and_is_private(tmp_path: Path) -> None:
    state = dataclasses.replace(STATE, node_rank=1, supervisor=identify(os.getpid()), phase="supervised")
    write_state(tmp_path, state)

    assert read_state(tmp_path) == state
    assert stat.S_IMODE((tmp_path / STATE_FILE).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"attempt_id": "x"}', '{"attempt_id": 1}'])
def test_a_state_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE_FILE).write_text(text)

    with pytest.raises(StateError, match="is not a state file"):
        read_state(tmp_path)


def test_i16_a_process_is_itself_only_with_its_start_time_and_boot() -> None:
    own = identify(os.getpid())
    assert own is not None

    assert is_alive(own)
    assert not is_alive(dataclasses.replace(own, start_time=own.start_time + 1))
    assert not is_alive(dataclasses.replace(own, boot_id="another boot"))


def test_a_zombie_is_dead() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        assert process_facts(pid) is None
    finally:
        os.waitpid(pid, 0)
    assert len(current_boot_id()) == 36


MOUNTS = """cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0
cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0
"""


def test_groups_are_made_below_our_own_and_beside_the_agents_leaf() -> None:
    both = find_home(MOUNTS, "4:memory:/box\n0::/system.slice/gangline.service/agent\n")
    plain = find_home("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "0::/user.slice\n")

    assert both == CgroupHome(
        unified=Path("/sys/fs/cgroup/unified/system.slice/gangline.service"),
        memory_v1=Path("/sys/fs/cgroup/memory/box"),
    )
    assert plain == CgroupHome(unified=Path("/sys/fs/cgroup/user.slice"))
    assert find_home("", "") is None


def test_the_name_of_a_group_is_safe_and_unique_to_pool_node_and_attempt() -> None:
    names = {group_name(mark) for mark in ("p/n/1", "p/n/2", "p/m/1", "q/n/1", "p/../../x/1")}

    assert len(names) == 5
    assert not any("/" in name or ".." in name for name in names)


def test_a_program_is_found_as_a_shell_finds_it(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, mode in (("run", 0o755), ("data", 0o644)):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(mode)

    assert find_program("run", "/nowhere:bin", tmp_path) == tmp_path / "bin" / "run"
    assert find_program("./bin/run", "", tmp_path) == tmp_path / "bin" / "run"
    assert find_program("data", "bin", tmp_path) is None
    assert find_program("bin", "", tmp_path) is None


def test_o35_the_interface_of_an_address_is_found_without_any_resolver() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None
    assert interface_of("no-such-host.invalid") is None


def test_a_job_that_stops_when_cut_off_is_asked_for_more_often() -> None:
    assert wait_seconds(None) == 20.0
    assert wait_seconds(30.0) == 10.0
    assert wait_seconds(600.0) == 20.0


def test_problems_are_typed_by_what_the_caller_must_do() -> None:
    fenced = _problem(409, b'{"code": "attempt_fenced", "detail": "Over.", "fix": "None."}')

    assert isinstance(fenced, Fenced)
    assert str(fenced) == "HTTP 409 attempt_fenced: Over. Fix: None."
    assert isinstance(_problem(502, b"<html>bad gateway</html>"), Refused)
    assert not isinstance(_problem(401, b'{"code": "attempt_fenced"}'), Fenced)


def test_a_server_that_is_no_url_is_refused_with_the_form() -> None:
    with pytest.raises(ValueError, match="must be http://"):
        Connection("localhost:8000", "x")
    AttemptApi("https://pool.example/gangline/", "x", 1, 0)


def test_a_cached_bundle_is_not_fetched_again_and_a_wrong_one_not_kept(tmp_path: Path) -> None:
    fetched: list[Path] = []

    def download(target: Path) -> None:
        fetched.append(target)
        target.write_bytes(b"archive")

    digest = f"sha256:{hashlib.sha256(b'archive').hexdigest()}"
    first = fetch_bundle(digest, tmp_path / "bundles", download)

    assert fetch_bundle(digest, tmp_path / "bundles", download) == first
    assert len(fetched) == 1
    with pytest.raises(WrongBundleError, match="arrived as"):
        fetch_bundle("sha256:" + "0" * 64, tmp_path / "bundles", download)
    assert list((tmp_path / "bundles").iterdir()) == [first]


def test_the_bundles_used_longest_ago_make_room(tmp_path: Path) -> None:
    def download(target: Path) -> None:
        target.write_bytes(content)

    for number in range(MAX_CACHED_BUNDLES + 3):
        content = str(number).encode()
        path = fetch_bundle(f"sha256:{hashlib.sha256(content).hexdigest()}", tmp_path, download)
        os.utime(path, (number, number))

    kept = {path.read_bytes() for path in tmp_path.iterdir()}
    assert len(kept) == MAX_CACHED_BUNDLES
    assert b"0" not in kept


def test_a_digest_cannot_lead_out_of_the_cache(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a bundle's digest"):
        fetch_bundle("sha256:../../etc/passwd", tmp_path, lambda target: None)
