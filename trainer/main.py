"""The command line of the trainer: `python -m trainer run plan.json`, and `export`, `profile` and `plan` beside it.

`run` is what the supervisor starts, once per rank, with the variables of torchrun; without them it trains on one rank.
`profile` counts what a task's model costs, `plan` says how it would be split, both without training anything.
Not for: training (`trainer.loop`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from gangline.protocol.names import ENV_EVENTS_FILE, ENV_RESULT_FILE
from gangline.protocol.outcomes import Outcome, TrainerExit
from gangline.protocol.pulse import Phase, Pulse
from trainer.assembly import assemble
from trainer.checkpoint.export import export_checkpoint
from trainer.checkpoint.layout import BrokenCheckpoint
from trainer.entries import load_task
from trainer.events import EventWriter
from trainer.failure import ConfigError, PeerFailedError, die, leave_with
from trainer.loop import FLOOR_SECONDS, Ending, Surroundings, Training
from trainer.mesh import Mesh, join_mesh, pinned_threads
from trainer.plan.choice_text import choice_as_dict
from trainer.plan.model_profile import ModelProfile, profile_as_dict, read_profile
from trainer.plan.parallel_plan import RankLayout, check_parallel_plan
from trainer.plan.planned_file import PlannedFile, parse_bytes, read_planned
from trainer.plan.planning import plan_on
from trainer.plan.problem import PlanError
from trainer.plan.recipe_profiles import recipe_profile
from trainer.plan.training_plan import TrainingPlan, TrainingSpec, TrainSettings, batch_problems, read_plan
from trainer.profile import profile_task
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
        plan = read_plan(_read(plan_file))
        ending, mesh = _train(plan, stop, pulse, environment)
        _conclude(ending, mesh, environment)
    except BaseException as error:  # noqa: BLE001  # the last place to tell why this rank ends, whatever it was
        die(error, environment)
    return EXIT_CODES[ending.outcome]


def _read(plan_file: Path) -> bytes:
    try:
        return plan_file.read_bytes()
    except OSError as error:
        raise ConfigError(f"the plan file {plan_file} cannot be read: {error.strerror}.") from error


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
        ending = Training(assemble(plan, mesh, events, environment), around).run()
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


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # a command line's error


def _keep_quiet(text: str) -> None:
    return None


def show_profile(file: Path, output: str) -> int:
    """Print the model profile of the task that a plan file or job file names."""
    profile = _profile_of(_planned(file), None)
    if output == "json":
        _say(json.dumps(profile_as_dict(profile), ensure_ascii=False))
        return 0
    _say(f"{profile.name}: {profile.num_parameters:,} parameters in {len(profile.layers)} layers")
    for layer in profile.layers:
        _say(f"  {layer.name:<24}{layer.num_parameters:>16,}{layer.flops_per_sample:>12.3g} FLOPs a sample")
    for note in profile.notes:
        _say(f"note: {note}")
    return 0


def show_plan(given: argparse.Namespace) -> int:
    """Print how the task of a plan file or job file would be split over the ranks that are named, and why."""
    planned = _planned(given.file)
    layout = RankLayout(
        num_nodes=given.nodes or planned.layout.num_nodes,
        ranks_per_node=given.ranks_per_node or planned.layout.ranks_per_node,
    )
    memory = None if given.gpu_memory is None else parse_bytes(given.gpu_memory)
    # As the API plans a job, so that what is printed here is what a job of this file gets, or is refused for.
    spec = TrainingSpec(
        run=planned.run,
        parallel=planned.request_on(layout, given.strategy),
        train=TrainSettings(
            steps=1,
            batch_size=planned.batch_size,
            optimizer=planned.optimizer.name,
            momentum=planned.optimizer.momentum,
        ),
    )
    found = plan_on(spec, layout, gpu_memory_bytes=memory, profile=_profile_of(planned, given.profile))
    assert found.choice is not None, "the model is known"
    if given.output == "json":
        _say(json.dumps(choice_as_dict(found.choice), ensure_ascii=False))
        return 0
    text = "\n".join(found.lines)
    notes = (one for one in found.plan.notes if one.removeprefix("Strategy auto: ") not in text)
    _say("\n".join((text, *(f"note: {one}" for one in notes))))
    return 0


def _planned(file: Path) -> PlannedFile:
    """What a file says: JSON, or YAML where that can be read."""
    text = file.read_text(encoding="utf-8")
    sys.path.insert(0, str(file.resolve().parent))  # a job file lies beside its code
    try:
        return read_planned(json.loads(text))
    except json.JSONDecodeError:
        import yaml  # where ranks run it need not be installed, and plan files are JSON

        return read_planned(yaml.safe_load(text))


def _profile_of(planned: PlannedFile, profile_file: Path | None) -> ModelProfile:
    """The profile in a file, else as the recipe's arguments say, else counted."""
    if profile_file is not None:
        return read_profile(profile_file.read_bytes())
    if planned.run.recipe is not None and (known := recipe_profile(planned.run.recipe, planned.run.args)):
        return known
    return profile_task(load_task(planned.run), name=planned.run.recipe or planned.run.entry or "")


def main(arguments: list[str], stop: StopFlag, pulse: Pulse) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Train as a plan file says.")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="train; one process per rank, with the variables of torchrun")
    running.add_argument("plan", type=Path)
    exporting = commands.add_parser("export", help="write a checkpoint's weights as one safetensors file")
    exporting.add_argument("checkpoint", type=Path)
    exporting.add_argument("file", type=Path)
    profiling = commands.add_parser("profile", help="count what the model of a plan file or job file costs")
    profiling.add_argument("file", type=Path)
    profiling.add_argument("-o", "--output", choices=("text", "json"), default="text")
    planning = commands.add_parser("plan", help="say how the model of a plan file or job file would be split, and why")
    planning.add_argument("file", type=Path)
    planning.add_argument("--nodes", type=int, help="default: as the file's resources say, else 1")
    planning.add_argument("--ranks-per-node", type=int, help="default: as the file's resources say, else 1")
    planning.add_argument("--gpu-memory", help="of one GPU, such as 80GB; left out: not known")
    planning.add_argument("--strategy", help="instead of the file's; auto chooses")
    planning.add_argument("--profile", type=Path, help="a model profile made before, instead of counting")
    planning.add_argument("-o", "--output", choices=("text", "json"), default="text")
    given = parser.parse_args(arguments)
    if given.command in ("profile", "plan"):
        try:
            return show_profile(given.file, given.output) if given.command == "profile" else show_plan(given)
        except (PlanError, ConfigError, OSError) as error:
            _complain(str(error))
            return TrainerExit.CONFIG_ERROR
    if given.command == "run":
        return run(given.plan, stop, pulse, os.environ)
    try:
        facts = export_checkpoint(given.checkpoint, given.file)
    except BrokenCheckpoint as broken:
        _complain(f"{given.checkpoint} {broken} Name the folder of one whole checkpoint: …/step-00000120.")
        return TrainerExit.CONFIG_ERROR
    except OSError as error:
        _complain(str(error))
        return TrainerExit.CONFIG_ERROR
    _say(json.dumps(facts))
    return 0
