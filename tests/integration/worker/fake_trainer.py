"""A trainer without torch for tests of the supervisor: plays what the plan's `args` say, with the real pulse.

`args`: `{"all": [[action, …], …], "<rank>": […]}`; a rank of its own overrides `all`. Not for: tests of the trainer.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gangline.protocol.names import ENV_EVENTS_FILE, ENV_PULSE_FILE, ENV_RESULT_FILE
from gangline.protocol.pulse import Phase, Pulse

pulse = Pulse(Path(os.environ[ENV_PULSE_FILE]))
is_asked_to_stop = False


def ask_to_stop(number: int, frame: object) -> None:
    global is_asked_to_stop
    is_asked_to_stop = True


def say(text: str) -> None:
    print(text, flush=True)


def enter(phase: str, floor_seconds: float) -> None:
    pulse.enter(Phase[phase.upper()], floor_seconds)


def move(count: int, step: int | None = None, slowest_step_seconds: float | None = None) -> None:
    for _ in range(count):
        pulse.move(step, slowest_step_seconds)


def keep_moving(path: str) -> None:
    while not Path(path).exists():
        pulse.move()
        time.sleep(0.02)


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.02)


def touch(path: str) -> None:
    Path(path).touch()


def hang() -> None:
    while True:
        time.sleep(60)


def spin() -> None:
    """Hang where no Python signal handler runs: they wait for the main thread to return to the interpreter."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    hang()


def wait_for_stop() -> None:
    while not is_asked_to_stop:
        pulse.move()
        time.sleep(0.02)


def wait_still_for_stop() -> None:
    while not is_asked_to_stop:
        time.sleep(0.02)


def pause(seconds: float) -> None:
    time.sleep(seconds)


def stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def result(outcome: str) -> None:
    path = Path(os.environ[ENV_RESULT_FILE])
    path.write_text(json.dumps({"outcome": outcome, "step": 1}))


def event(kind: str) -> None:
    with open(os.environ[ENV_EVENTS_FILE], "a") as file:
        file.write(json.dumps({"seq": 1, "at": time.time(), "kind": kind}) + "\n")


def abort() -> None:
    os.abort()


def end(code: int) -> None:
    os._exit(code)


def allocate(num_bytes: int) -> None:
    """Touch so much memory, as the trainer would: 66 when Python cannot have it."""
    try:
        blocks = [bytearray(os.urandom(1) * (1 << 20)) for _ in range(num_bytes >> 20)]
    except MemoryError:
        os._exit(66)
    say(f"allocated {len(blocks)} MiB")


def leave_shared_memory(name: str) -> None:
    Path("/dev/shm", name.format(pid=os.getpid())).write_bytes(b"x")


def use_shared_memory(name: str) -> None:
    """As multiprocessing.shared_memory does, without its process that tidies up."""
    with open(f"/dev/shm/{name}", "w+b") as file:
        file.truncate(mmap.PAGESIZE)
        _kept.append(mmap.mmap(file.fileno(), 0))


_kept: list[mmap.mmap] = []


def load_by_worker(num_bytes: int) -> None:
    """A data loader's worker hands over a batch in a file of shared memory, or dies of it; the rank says as torch."""
    pid = os.fork()
    if pid == 0:
        name = f"/dev/shm/torch_{os.getpid()}_1_0"
        with open(name, "w+b") as file:
            file.truncate(num_bytes)
            batch = mmap.mmap(file.fileno(), 0)
            for start in range(0, num_bytes, mmap.PAGESIZE):
                batch[start] = 1
        Path(name).unlink()
        os._exit(0)
    if os.waitpid(pid, 0)[1] == 0:
        return
    error = f"RuntimeError: DataLoader worker (pid {pid}) is killed by signal: Bus error."
    record = {"message": {"message": error, "extraInfo": {"py_callstack": "", "timestamp": "0"}}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record))
    os._exit(65)


def bus_error() -> None:
    os.kill(os.getpid(), signal.SIGBUS)


ACTIONS: dict[str, Callable[..., None]] = {
    action.__name__: action
    for action in (
        *(say, enter, move, keep_moving, wait_for, touch, hang, spin, wait_for_stop, wait_still_for_stop, pause),
        *(stop_myself, result, event, abort, end, allocate, leave_shared_memory, bus_error),
        *(use_shared_memory, load_by_worker),
    )
}


def main(plan_file: str) -> None:
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGTERM, ask_to_stop)
    args: dict[str, Any] = json.loads(Path(plan_file).read_text())["run"]["args"]
    for name, *values in args.get(os.environ["RANK"], args.get("all", [])):
        ACTIONS[name](*values)


if __name__ == "__main__":
    main(sys.argv[-1])
