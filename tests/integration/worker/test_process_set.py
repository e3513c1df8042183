"""The process set with real processes: everything an attempt started is found and ended, and nothing else is touched.

Each case runs in a process of its own (`SUPERVISING`), since a subreaper adopts for good.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gangline.protocol.names import ENV_ATTEMPT
from tests.support.processes import is_alive
from tests.support.wait import wait_until
from worker.cgroup import AttemptCgroup, current_home
from worker.process_set import _signal, kill_marked, marked_attempts
from worker.state import ProcessFacts, process_facts

SUPERVISING = """
import os, signal, sys, time
from pathlib import Path
from worker.cgroup import AttemptCgroup, current_home
from worker.process_set import ProcessSet, become_subreaper
from worker.spawn import spawn

folder, mark, program, use_cgroup = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "True"
become_subreaper()
group = AttemptCgroup.create(current_home(), mark) if use_cgroup else None
members = ProcessSet(group)
leader = spawn(program=sys.executable, arguments=(sys.executable, "-c", program), environment=dict(os.environ),
    working_folder=folder, log_file=folder / "log", cgroup_folders=members.cgroup_folders)
members.add()
while not (folder / "ready").exists(): time.sleep(0.01)
assert not members.is_empty()
members.signal_groups(signal.SIGTERM, [leader])
deadline = time.monotonic() + 60
while not members.is_empty():
    members.kill_all()
    time.sleep(0.02)
    members.reap()
    assert time.monotonic() < deadline, members.members()
assert members.members() == []
assert members.close() == []
"""

HIDDEN = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pids = [os.getpid()]
for generation in range(3):
    pid = os.fork()
    if pid: time.sleep(3600)
    os.setsid()
    if os.fork(): os._exit(0)
    os.setsid()
    os.environ.clear()
    with open('pids', 'a') as file: file.write(f'{os.getpid()}\\n')
pathlib.Path('ready').touch()
time.sleep(3600)
"""


def has_cgroups() -> bool:
    home = current_home()
    return home is not None and os.access(home.unified, os.W_OK)


@pytest.mark.parametrize("use_cgroup", [False, True])
def test_o10_children_in_sessions_of_their_own_are_ended(tmp_path: Path, use_cgroup: bool) -> None:
    if use_cgroup and not has_cgroups():
        pytest.skip("no cgroup v2 can be made here")
    mark = f"pool-{os.getpid()}/node/{use_cgroup:d}"
    arguments = [str(tmp_path), mark, HIDDEN, str(use_cgroup)]
    done = subprocess.run([sys.executable, "-P", "-c", SUPERVISING, *arguments], timeout=120, capture_output=True)

    assert done.returncode == 0, done.stderr.decode()
    hidden = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(hidden) == 3
    assert not any(is_alive(pid) for pid in hidden)
    home = current_home()
    assert home is None or AttemptCgroup.existing(home, mark) is None


def test_o53_a_mark_is_compared_whole_and_only_in_the_environment() -> None:
    mark = f"pool-{os.getpid()}/node/17"
    sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
    ours = subprocess.Popen(sleep, env={ENV_ATTEMPT: mark})
    foreign = [
        subprocess.Popen([*sleep, f"{ENV_ATTEMPT}={mark}"], env={}),
        subprocess.Popen(sleep, env={ENV_ATTEMPT: f"{mark}8"}),
        subprocess.Popen(sleep, env={ENV_ATTEMPT: f"x{mark}"}),
        subprocess.Popen(sleep, env={f"X{ENV_ATTEMPT}": mark}),
        subprocess.Popen(sleep, env={"X": f"{ENV_ATTEMPT}={mark}"}),
    ]
    try:
        # A process that is becoming another program shows no environment for a while.
        wait_until(lambda: len(marked_attempts(f"pool-{os.getpid()}", "node")) > 1, 60, "a process is not found")
        assert marked_attempts(f"pool-{os.getpid()}", "node") == {17, 178}

        assert kill_marked(mark) == 1

        assert ours.wait(60) == -9
        assert [process.poll() for process in foreign] == [None] * len(foreign)
    finally:
        for process in (ours, *foreign):
            process.kill()
            process.wait()


def test_o53_a_process_that_got_the_pid_later_is_not_signalled() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        facts = process_facts(process.pid)
        assert facts is not None
        earlier = ProcessFacts(**{**vars(facts), "start_time": facts.start_time - 1})

        assert not _signal(earlier, signal.SIGKILL)

        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_set_that_is_empty_is_killed_at_once() -> None:
    began = time.monotonic()

    assert kill_marked(f"pool-{os.getpid()}/node/404", seconds=3600.0) == 0
    assert time.monotonic() - began < 60
