"""The small parts of the trainer: schedules, rates, seeds, exit codes, the wish to stop."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from gangline.protocol.names import ENV_STOP_FILE
from gangline.protocol.outcomes import TrainerExit
from gangline.protocol.pulse import Pulse
from trainer import failure
from trainer.evaluation import Evaluator
from trainer.main import run
from trainer.optimizers import build_optimizer, lr_factor
from trainer.plan.problem import PlanError
from trainer.plan.training_plan import TrainSettings
from trainer.rates import Speedometer, dense_peak_flops, mfu, sync_interval
from trainer.seeds import derive
from trainer.step import checked_loss
from trainer.stop import StopFlag
from trainer.task import TrainTask

INIT_SEED = 3734278801248931457

# --- Learning rate ---------------------------------------------------------------------------------------------------


def factors(total: int, **settings: object) -> list[float]:
    """The factor at each step."""
    train = TrainSettings(steps=total, **settings)  # type: ignore[arg-type]  # settings of the test's own
    return [round(lr_factor(step, total, train), 6) for step in range(total)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "linear", "final_lr_ratio": 0.5}, [1, 0.9, 0.8, 0.7, 0.6]),
        ({"schedule": "cosine"}, [1, 0.904508, 0.654508, 0.345492, 0.095492]),
        ({"schedule": "cosine", "warmup_steps": 3}, [0.333333, 0.666667, 1, 1, 0.5]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1]),
    ],
)
def test_the_learning_rate_rises_and_falls_as_the_schedule_says(
    settings: dict[str, object], expected: list[float]
) -> None:
    assert factors(5, **settings) == expected


def test_weight_decay_spares_biases_and_norms() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))

    groups = build_optimizer(model, TrainSettings(steps=1, weight_decay=0.1)).param_groups

    decays = {id(one): group["weight_decay"] for group in groups for one in group["params"]}
    assert [decays[id(one)] for one in model.parameters()] == [0.1, 0.0, 0.0, 0.0]


# --- Rates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 3060", None),
        ("", None),
    ],
)
def test_the_peak_of_a_device_is_the_dense_one_or_unknown(name: str, peak: float | None) -> None:
    assert dense_peak_flops(name) == peak


def test_mfu_is_model_flops_over_the_peak_of_all_devices_and_absent_where_it_is_unknown() -> None:
    assert mfu(6e9, 1000.0, 1e12, 12) == pytest.approx(0.5)
    speed = Speedometer(tokens_per_sample=64, flops_per_sample=1.0, peak_flops=None, world_size=2)
    assert speed.rates(10.0) == {"tokens_per_second": 640.0}


def test_ranks_agree_about_twice_a_second_and_at_every_step_when_steps_are_slow() -> None:
    found = [sync_interval(seconds, last_interval=20) for seconds in (0.0, 1e-6, 0.01, 0.1, 0.5, 60.0)]

    assert found == [1, 20, 20, 5, 1, 1]


def test_seeds_of_different_purposes_and_numbers_differ_and_stay() -> None:
    found = [
        derive(0, "init"),
        derive(0, "data"),
        derive(1, "init"),
        derive(0, "dropout", 1, 2),
        derive(0, "dropout", 12),
    ]

    assert len(set(found)) == len(found)
    assert derive(0, "init") == INIT_SEED, "another number would change the weights of every job"
    assert all(0 <= seed < 2**63 for seed in found)


# --- Failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("boom"), TrainerExit.USER_ERROR),
        (PlanError([]), TrainerExit.CONFIG_ERROR),
        (failure.ConfigError("no task"), TrainerExit.CONFIG_ERROR),
        (failure.NonFiniteLossError("nan"), TrainerExit.NAN_LOSS),
        (failure.PeerFailedError("rank 1"), TrainerExit.COMMUNICATION_ERROR),
        (MemoryError(), TrainerExit.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), TrainerExit.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), TrainerExit.OUT_OF_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), TrainerExit.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "No space left on device"), TrainerExit.USER_ERROR),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), TrainerExit.COMMUNICATION_ERROR),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), TrainerExit.USER_ERROR),
        (KeyboardInterrupt(), TrainerExit.USER_ERROR),
    ],
)  # fmt: skip
def test_an_exception_means_an_exit_code(error: BaseException, code: TrainerExit) -> None:
    assert failure.exit_code_of(error) == code


def test_the_error_record_names_the_exception_and_holds_its_stack() -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        record = json.loads(json.dumps(failure.error_record(error, 12.7)))

    inner = record["message"]
    assert inner["message"] == "ValueError: boom"
    assert "test_small_parts.py" in inner["extraInfo"]["py_callstack"]
    assert inner["extraInfo"]["timestamp"] == "12"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3), r"returned a tensor of shape \(3,\)"),
        (1.5, "returned float"),
        ((torch.ones(()), "many"), r"returned \(sum, str\)"),
    ],
)
def test_a_loss_that_is_no_single_value_is_refused_with_what_it_was(value: object, message: str) -> None:
    with pytest.raises(failure.ConfigError, match=message):
        checked_loss(value)


def test_a_metric_that_would_take_the_place_of_the_loss_is_refused() -> None:
    metrics = {"loss": lambda output, target: torch.ones(())}
    task = TrainTask(model=nn.Identity(), loss=nn.functional.cross_entropy, data=[0], eval_data=[0], metrics=metrics)
    around: dict[str, Any] = {"model": None, "mesh": None, "is_stop_asked": lambda: False, "moved": lambda: None}

    with pytest.raises(failure.ConfigError, match=r"a metric 'loss', which is what the held-out loss is called"):
        Evaluator(task=task, **around)


def test_a_plan_file_that_is_not_there_is_the_callers_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_again(error: BaseException, environment: Mapping[str, str]) -> NoReturn:
        raise error

    monkeypatch.setattr("trainer.main.die", raise_again)

    with pytest.raises(failure.ConfigError, match=r"plan\.json cannot be read: No such file or directory") as error:
        run(tmp_path / "plan.json", StopFlag({}), Pulse(None), {})

    assert failure.exit_code_of(error.value) == TrainerExit.CONFIG_ERROR


# --- Stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "is_final"),
    [
        (None, False),
        ("preempt", False),
        ("drain", False),
        ("time_limit", False),
        ("cancel", True),
        ("admin_stop", True),
        ("fenced", True),
    ],
)
def test_only_who_will_not_go_on_stops_without_a_checkpoint(
    tmp_path: Path, content: str | None, is_final: bool
) -> None:
    stop_file = tmp_path / "stop"
    if content is not None:
        stop_file.write_text(content)
    flag = StopFlag({ENV_STOP_FILE: str(stop_file)})
    assert not flag.is_set and not flag.is_without_checkpoint

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    try:
        flag.install()
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR1), before, strict=True):
            signal.signal(number, handler)

    assert flag.is_set and flag.is_without_checkpoint is is_final
