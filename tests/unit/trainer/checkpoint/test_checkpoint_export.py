"""Export: the weights of a checkpoint as one safetensors file that another program loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from gangline.protocol.outcomes import TrainerExit
from gangline.protocol.pulse import Pulse
from tests.distributed.checkpoint_cases import (
    ALONE,
    OPTIMIZERS,
    Told,
    at,
    checkpointer_for,
    damage,
    path_of,
    plan_for,
    small_model,
    train,
)
from trainer.checkpoint.export import export_checkpoint
from trainer.checkpoint.layout import BrokenCheckpoint
from trainer.main import main
from trainer.stop import StopFlag

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one rank saves alone on purpose


def saved(root: Path) -> tuple[torch.nn.Module, Path]:
    model = small_model()
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, 2)
    checkpointer_for(ALONE, plan_for(root), Told()).save(model, optimizer, at(2), is_async=False)
    return model, root / path_of(2)


def test_the_file_loads_strictly_with_shared_weights_under_each_name(tmp_path: Path) -> None:
    model, folder = saved(tmp_path)
    target = tmp_path / "model.safetensors"
    target.write_text("an older export")

    summary = export_checkpoint(folder, target)

    loaded = load_file(target)
    other = small_model(seed=9)
    other.load_state_dict(loaded)
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    assert {"3.weight", "4.weight", "1.running_mean"} <= loaded.keys()
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "2", "samples_seen": "32"}
    assert summary == {
        "step": 2,
        "samples_seen": 32,
        "num_tensors": len(loaded),
        "num_bytes": target.stat().st_size,
        "skipped": [],
    }
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["model.safetensors"]


def test_a_broken_checkpoint_is_refused_and_the_older_export_stays(tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    damage(folder / "__0_0.distcp", at_byte=1000)
    target = tmp_path / "model.safetensors"
    target.write_text("an older export")

    with pytest.raises(BrokenCheckpoint, match="SHA-256"):
        export_checkpoint(folder, target)

    assert target.read_text() == "an older export"


@pytest.mark.parametrize(
    ("checkpoint", "target", "message"),
    [
        ("absent", "model.safetensors", r"absent is not there\. Name the folder of one whole checkpoint"),
        (".", "model.safetensors", r"has no COMPLETE mark.*Name the folder of one whole checkpoint: …/step-"),
        (path_of(2), "absent/model.safetensors", r"absent is no folder\. Make it first"),
    ],
)
def test_the_command_says_what_it_cannot_export_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: str, target: str, message: str
) -> None:
    saved(tmp_path)
    arguments = ["export", str(tmp_path / checkpoint), str(tmp_path / target)]

    assert main(arguments, StopFlag({}), Pulse(None)) == TrainerExit.CONFIG_ERROR

    told = capsys.readouterr().err
    assert re.search(message, told)
    assert "Traceback" not in told
