"""A process that tests let save checkpoints in bad circumstances; it prints what it found as JSON lines.

    python -m tests.distributed.checkpoint_saver kill ROOT ROUNDS SEED   # children that save until they are killed
    python -m tests.distributed.checkpoint_saver fill ROOT BYTES         # until a file system of BYTES is full

torch is imported once; each round is a fork of that process. Not for: judging (the test does).
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.distributed.checkpoint_cases import ALONE, Told, at, checkpointer_for, differences, plan_for, snapshot
from tests.support.child import die_with_parent
from trainer.checkpoint.checkpointer import CheckpointFailed
from trainer.checkpoint.layout import TEMPORARY_PREFIX, BrokenCheckpoint, list_checkpoints, list_leftovers, verify

WIDTH = 256
MOST_SAVES = 4
"""Of a round before its kill. Counted, not timed: a busy machine makes as many."""
LONGEST_WAIT_SECONDS = 0.1
"""From the beginning of the last of them to the kill."""
MOST_STOPS = 50
"""Looks for a save in every other round; more than half of all moments are in one."""


def model_at(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer whose every value follows from the step, so that a mixture of two steps shows."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    move_to(model, optimizer, step)
    return model, optimizer


def move_to(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            for value in optimizer.state[parameter].values():
                value.fill_(step)


def broken_ones(root: Path) -> list[str]:
    """Checkpoints that carry a final name and are not whole."""
    broken = []
    for found in list_checkpoints(root):
        try:
            verify(root / found.path)
        except BrokenCheckpoint as error:
            broken.append(f"{found.path} {error}")
    return broken


def save_until_killed(root: Path, out: int, seed: int) -> None:
    """Continue from what is there, then save each step; tell each that begins and each that is complete."""
    die_with_parent()()
    chance = random.Random(seed)
    told = Told()
    checkpointer = checkpointer_for(ALONE, plan_for(root, keep=1), told)
    model, optimizer = model_at(-1)
    restored = checkpointer.restore(model, optimizer)
    step = 0 if restored is None else restored.position.step
    different = [] if restored is None else differences(snapshot(model, optimizer), snapshot(*model_at(step)))
    _tell(out, {"restored": step, "different": different, "notes": told.notes})
    while True:
        step += 1
        move_to(model, optimizer, step)
        _tell(out, {"began": step})
        checkpointer.save(model, optimizer, at(step), is_async=chance.random() < 0.5)
        if chance.random() < 0.5:
            checkpointer.wait()
            _tell(out, {"finished": step})


def kill_rounds(root: Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(rounds):
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(root, sender, seed + number)
            finally:
                sys.stderr.flush()
                os._exit(1)
        os.close(sender)
        text = b""
        while text.count(b"began") < 1 + number % MOST_SAVES:  # what comes before the first is not what is tested
            text += _read(receiver, 60.0)
        text += _read_for(receiver, chance.uniform(0, LONGEST_WAIT_SECONDS))
        for _ in range(MOST_STOPS if number % 2 else 0):  # any moment, but then one of a save
            if _is_stopped_in_a_save(child, root):
                break
            os.kill(child, signal.SIGCONT)
            text += _read_for(receiver, chance.uniform(0, LONGEST_WAIT_SECONDS))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        while part := os.read(receiver, 65536):
            text += part
        os.close(receiver)
        lines = [json.loads(line) for line in text.splitlines()]
        found = list_checkpoints(root)
        answer = {
            **lines[0],
            "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
            "finished": max(line.get("finished", lines[0]["restored"]) for line in lines),
            "newest": found[0].step if found else 0,
            "broken": broken_ones(root),
            "interrupted": [folder.name for folder in list_leftovers(root)],
        }
        print(json.dumps(answer), flush=True)


def fill(root: Path, num_bytes: int) -> None:
    """In a mount namespace of our own: what is mounted here goes with this process."""
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(root)], check=True)
    for is_async in (False, True):
        checkpointer = checkpointer_for(ALONE, plan_for(root, keep=100), Told())
        newest = max((one.step for one in list_checkpoints(root)), default=0)
        model, optimizer = model_at(newest)
        failure: CheckpointFailed | None = None
        while failure is None:
            newest += 1
            move_to(model, optimizer, newest)
            try:
                checkpointer.save(model, optimizer, at(newest), is_async=is_async)
                checkpointer.wait()
            except CheckpointFailed as error:
                failure = error
        model, optimizer = model_at(-1)
        told = Told()
        restored = checkpointer_for(ALONE, plan_for(root, keep=1), told).restore(model, optimizer)
        assert restored is not None
        answer = {
            "failure": str(failure),
            "is_storage_full": failure.is_storage_full,
            "failed_step": failure.step,
            "restored": restored.position.step,
            "different": differences(snapshot(model, optimizer), snapshot(*model_at(restored.position.step))),
            "notes": told.notes,
            "broken": broken_ones(root),
            "leftovers": [folder.name for folder in list_leftovers(root)],
        }
        print(json.dumps(answer), flush=True)
        for old in list_checkpoints(root)[1:]:  # room for the second round
            subprocess.run(["rm", "-r", str(root / old.path)], check=True)


def _tell(out: int, value: dict[str, Any]) -> None:
    os.write(out, json.dumps(value).encode() + b"\n")


def _is_stopped_in_a_save(child: int, root: Path) -> bool:
    """Stop the child; whether it stands while a checkpoint has not its final name yet."""
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    return any(folder.name.startswith(f"{TEMPORARY_PREFIX}step-") for folder in list_leftovers(root))


def _read_for(receiver: int, seconds: float) -> bytes:
    """What comes in so many seconds."""
    text, deadline = b"", time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        text += _read(receiver, left)
    return text


def _read(receiver: int, seconds: float) -> bytes:
    ready, _, _ = select.select([receiver], [], [], seconds)
    if not ready:
        return b""
    part = os.read(receiver, 65536)
    if not part:
        raise RuntimeError("the child ended by itself: see its traceback above")
    return part


def main(command: str, root: str, *numbers: str) -> None:
    torch.set_num_threads(1)  # no thread pool: this process forks
    commands: dict[str, Callable[..., None]] = {"kill": kill_rounds, "fill": fill}
    commands[command](Path(root), *map(int, numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
