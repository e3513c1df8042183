"""The command line of the trainer: `python -m trainer run plan.json`, `python -m trainer export CHECKPOINT FILE`.

`run` is what the supervisor starts, once per rank, with the variables of torchrun; without them it trains on one rank.
Not for: training (`trainer.loop`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from gangline.protocol.names import ENV_EVENTS_FILE, ENV_RESULT_FILE
from gangline.protocol.outcomes import Outcome, TrainerExit
from gangline.protocol.pulse import Phase, Pulse
from trainer.assembly import assemble
from trainer.checkpoint.export import export_checkpoint
from trainer.events import EventWriter
from trainer.failure import PeerFailedError, die, leave_with
from trainer.loop import FLOOR_SECONDS, Ending, Surroundings, Training
from trainer.mesh import Mesh, join_mesh, pinned_threads
from trainer.plan.parallel_plan import check_parallel_plan
from trainer.plan.problem import PlanError
from trainer.plan.training_plan import TrainingPlan, batch_problems, read_plan
from trainer.stop import StopFlag

EXIT_CODES = {
    Outcome.SUCCEEDED: TrainerExit.SUCCEEDED,
    Outcome.PREEMPTED: TrainerExit.PREEMPTED,
    Outcome.CANCELLED: TrainerExit.CANCELLED,
}
CONTROL_TIMEOUT_SECONDS = 1800.0
"""Of what only coordinates: longer than rank 0 may take to check a large checkpoint while the others wait."""


def run(plan_file: Path, stop: StopFlag, pulse: Pulse, environment: Mapping[str, str]) -> int:
    """Train as `plan_file` says and end the process. Returns only when there is nothing to tear down."""
    try:
        plan = read_plan(plan_file.read_bytes())
        ending, mesh = _train(plan, stop, pulse, environment)
        _conclude(ending, mesh, environment)
    except BaseException as error:  # noqa: BLE001  # the last place to tell why this rank ends, whatever it was
        die(error, environment)
    return EXIT_CODES[ending.outcome]


def _train(plan: TrainingPlan, stop: StopFlag, pulse: Pulse, environment: Mapping[str, str]) -> tuple[Ending, Mesh]:
    world_size = int(environment.get("WORLD_SIZE", "1"))
    check_parallel_plan(plan.parallel, world_size)
    if problems := batch_problems(plan.train, plan.parallel):
        raise PlanError(problems)
    threads = pinned_threads(environment)
    if threads is not None:
        torch.set_num_threads(threads)
    pulse.enter(Phase.STARTING, max(FLOOR_SECONDS[Phase.STARTING], plan.train.hang_after_seconds))
    start_timeout = FLOOR_SECONDS[Phase.COMPILING] if plan.parallel.compile else FLOOR_SECONDS[Phase.STARTING]
    mesh = join_mesh(
        environment,
        start_timeout=max(start_timeout, 2 * plan.train.hang_after_seconds),
        timeout=max(CONTROL_TIMEOUT_SECONDS, 2 * plan.train.hang_after_seconds),
    )
    events = EventWriter(_path(environment, ENV_EVENTS_FILE) if mesh.is_leader else None)
    for note in plan.notes:
        events.notice(note)
    around = Surroundings(mesh=mesh, events=events, stop=stop, pulse=pulse, say=_say if mesh.is_leader else _keep_quiet)
    try:
        ending = Training(plan, assemble(plan, mesh, events, environment), around).run()
    except PeerFailedError:
        # Whose failure it is ends first, so that nobody takes that rank for one that was stopped.
        with contextlib.suppress(RuntimeError):
            mesh.barrier()
        raise
    finally:
        # What was told of checkpoints must not be lost, whatever ended the training.
        events.close()
    pulse.enter(Phase.ENDED, FLOOR_SECONDS[Phase.STOPPING])
    return ending, mesh


def _conclude(ending: Ending, mesh: Mesh, environment: Mapping[str, str]) -> None:
    """Write the result once all ranks are done, before any of them tears down: what then goes wrong is no failure."""
    mesh.barrier()
    path = _path(environment, ENV_RESULT_FILE)
    if path is not None and mesh.is_node_leader:
        _write_durably(path, json.dumps({"outcome": str(ending.outcome), "step": ending.step}))
    mesh.barrier()
    if mesh.is_leader:
        _say(f"{ending.outcome} at step {ending.step}")
    # gloo and NCCL may abort while they are torn down (pytorch/pytorch#190489): leave without.
    leave_with(EXIT_CODES[ending.outcome])


def _write_durably(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _path(environment: Mapping[str, str], name: str) -> Path | None:
    value = environment.get(name)
    return Path(value) if value else None


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed pipe ends the log, not the training
        print(text, flush=True)  # noqa: T201  # the rank's log


def _keep_quiet(text: str) -> None:
    return None


def main(arguments: list[str], stop: StopFlag, pulse: Pulse) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Train as a plan file says.")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="train; one process per rank, with the variables of torchrun")
    running.add_argument("plan", type=Path)
    exporting = commands.add_parser("export", help="write a checkpoint's weights as one safetensors file")
    exporting.add_argument("checkpoint", type=Path)
    exporting.add_argument("file", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "run":
        return run(given.plan, stop, pulse, os.environ)
    facts = export_checkpoint(given.checkpoint, given.file)
    _say(json.dumps(facts))
    return 0
