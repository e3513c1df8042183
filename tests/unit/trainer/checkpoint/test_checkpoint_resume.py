"""What is saved is what comes back, from the newest checkpoint that is whole; every other one is named and skipped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.checkpoint_cases import (
    ALONE,
    OPTIMIZERS,
    Told,
    at,
    checkpointer_for,
    damage,
    differences,
    path_of,
    plan_for,
    small_model,
    snapshot,
    train,
)
from trainer.checkpoint.checkpointer import CheckpointMismatch, NoUsableCheckpoint, Position, Restored
from trainer.checkpoint.layout import COMPLETE_FILE, MANIFEST_FILE
from trainer.failure import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one rank saves alone on purpose


def save_steps(root: Path, *steps: int, optimizer: str = "adamw", attempt: int = 1) -> dict[int, dict[str, object]]:
    """Train up to each of `steps` and save there; returns the states by step."""
    model = small_model()
    optimizer_ = OPTIMIZERS[optimizer](model)
    saver = checkpointer_for(ALONE, plan_for(root, attempt=attempt, keep=100), Told())
    states, done = {}, 0
    for step in steps:
        train(model, optimizer_, step - done, seed=step)
        done = step
        saver.save(model, optimizer_, at(step), is_async=step % 2 == 0)
        states[step] = snapshot(model, optimizer_)
    saver.wait()
    saver.close()
    return states


def restore(
    root: Path, told: Told, *, optimizer: str = "adamw", resume_from: list[tuple[str, int]] | None = None
) -> tuple[Restored | None, dict[str, object]]:
    """Into a model with other weights."""
    model = small_model(seed=9)
    optimizer_ = OPTIMIZERS[optimizer](model)
    restored = checkpointer_for(ALONE, plan_for(root, attempt=2, resume_from=resume_from), told).restore(
        model, optimizer_
    )
    return restored, snapshot(model, optimizer_)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_buffers_moments_and_settings_come_back_in_every_bit(tmp_path: Path, optimizer: str) -> None:
    states = save_steps(tmp_path, 7, optimizer=optimizer)

    restored, state = restore(tmp_path, Told(), optimizer=optimizer)

    assert restored == Restored(position=at(7), path=path_of(7), world_size=1)
    assert differences(state, states[7]) == []
    assert any(key.startswith("optimizer.state.") for key in state) == (optimizer != "sgd_plain")


def test_the_state_of_an_iterable_dataset_is_kept(tmp_path: Path) -> None:
    model = small_model()
    optimizer = OPTIMIZERS["sgd"](model)
    position = Position(step=3, samples_seen=48, data_state={"file": "a", "offsets": [1, 2]})
    checkpointer_for(ALONE, plan_for(tmp_path), Told()).save(model, optimizer, position, is_async=False)

    restored, _ = restore(tmp_path, Told(), optimizer="sgd")

    assert restored is not None
    assert restored.position == position


def test_a_state_that_is_no_json_is_refused_at_once(tmp_path: Path) -> None:
    model = small_model()
    position = Position(step=3, samples_seen=48, data_state={"seen": {1, 2}})
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        checkpointer_for(ALONE, plan_for(tmp_path), Told()).save(
            model, OPTIMIZERS["sgd"](model), position, is_async=True
        )


def test_without_checkpoints_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    for root, resume_from in ((tmp_path, None), (tmp_path / "missing", None), (tmp_path, [])):
        assert restore(root, Told(), resume_from=resume_from)[0] is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saving_before_the_first_step_changes_nothing(tmp_path: Path, optimizer: str) -> None:
    """torch's own way fills an empty AdamW by a step with zero gradients: its first real update is then another."""
    runs = {}
    for way in ("never saved", "saved", "resumed"):
        model = small_model(seed=9 if way == "resumed" else 0)
        optimizer_ = OPTIMIZERS[optimizer](model)
        checkpointer = checkpointer_for(ALONE, plan_for(tmp_path), Told())
        if way == "saved":
            checkpointer.save(model, optimizer_, at(0), is_async=False)
        if way == "resumed":
            restored = checkpointer.restore(model, optimizer_)
            assert restored is not None
            assert restored.position == at(0)
        train(model, optimizer_, 3)
        runs[way] = snapshot(model, optimizer_)

    assert differences(runs["saved"], runs["never saved"]) == []
    assert differences(runs["resumed"], runs["never saved"]) == []


def test_o42_resume_takes_the_newest_whole_checkpoint_by_number_and_says_why_others_were_skipped(
    tmp_path: Path,
) -> None:
    states = save_steps(tmp_path, 9, 10, 20, 30)
    (tmp_path / path_of(20) / COMPLETE_FILE).unlink()
    shard = tmp_path / path_of(30) / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    # No padding: only as numbers is 10 after 9
    for step in (9, 10, 20, 30):
        (tmp_path / path_of(step)).rename(tmp_path / "attempt-1" / f"step-{step}")
    told = Told()

    restored, state = restore(tmp_path, told)

    assert restored is not None
    assert (restored.position, restored.path) == (at(10), "attempt-1/step-10")
    assert differences(state, states[10]) == []
    assert len(told.notes) == 2
    assert "attempt-1/step-30 was skipped: it has a __0_0.distcp of" in told.notes[0]
    assert "attempt-1/step-20 was skipped: it has no COMPLETE mark" in told.notes[1]


def test_the_list_of_the_plan_is_tried_in_its_order_and_nothing_else(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    told = Told()

    restored, _ = restore(tmp_path, told, resume_from=[(path_of(15), 15), (path_of(10), 10), (path_of(20), 20)])

    assert restored is not None
    assert restored.path == path_of(10)
    assert told.notes == [f"Checkpoint {path_of(15)} was skipped: it is not there."]


def test_one_flipped_byte_is_found(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    shard = tmp_path / path_of(20) / "__0_0.distcp"
    damage(shard, at_byte=shard.stat().st_size // 2)
    told = Told()

    restored, _ = restore(tmp_path, told)

    assert restored is not None
    assert restored.path == path_of(10)
    assert "content is not what was written" in told.notes[0]


def test_a_manifest_that_was_edited_is_found(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    manifest = tmp_path / path_of(10) / MANIFEST_FILE
    data = json.loads(manifest.read_text())
    data["position"]["step"] = 11
    manifest.write_text(json.dumps(data))

    with pytest.raises(NoUsableCheckpoint, match="not the one it was completed with"):
        restore(tmp_path, Told())


def test_when_none_of_the_jobs_checkpoints_is_usable_training_does_not_start_from_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    for step in (10, 20):
        shutil.rmtree(tmp_path / path_of(step))

    with pytest.raises(NoUsableCheckpoint, match=r"none of the job's 2 checkpoints .*step-00000020 is not there\."):
        restore(tmp_path, Told(), resume_from=[(path_of(20), 20), (path_of(10), 10)])


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Sequential(nn.Linear(6, 8)), "unexpected in the checkpoint: model.1.weight"),
        (nn.Sequential(*small_model(), nn.Linear(8, 2)), "missing in the checkpoint: model.5.weight, model.5.bias"),
        (
            nn.Sequential(nn.Linear(6, 4), *list(small_model())[1:]),
            r"model.0.weight \(checkpoint float32\[8, 6\], model float32\[4, 6\]\)",
        ),
    ],
)
def test_another_model_is_a_configuration_error_that_names_the_keys(
    tmp_path: Path, model: nn.Module, text: str
) -> None:
    save_steps(tmp_path, 10)
    optimizer = OPTIMIZERS["adamw"](model)
    before = snapshot(model, optimizer)

    with pytest.raises(CheckpointMismatch, match=text) as caught:
        checkpointer_for(ALONE, plan_for(tmp_path), Told()).restore(model, optimizer)

    assert isinstance(caught.value, ConfigError)
    assert differences(snapshot(model, optimizer), before) == []


def test_another_optimizer_is_refused_not_reset(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, optimizer="sgd")

    with pytest.raises(CheckpointMismatch, match=r"state of torch\.optim\.sgd\.SGD, but the job trains with .*AdamW"):
        restore(tmp_path, Told(), optimizer="adamw")


def test_other_parameter_groups_are_refused_not_mixed(tmp_path: Path) -> None:
    model = small_model()
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:2], "weight_decay": 0.5}, {"params": parameters[2:]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    checkpointer_for(ALONE, plan_for(tmp_path), Told()).save(model, optimizer, at(1), is_async=False)
    before = snapshot(other := small_model(seed=9), one_group := torch.optim.AdamW(other.parameters(), lr=0.01))

    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight in one group|0\.weight and .* in one group"):
        checkpointer_for(ALONE, plan_for(tmp_path), Told()).restore(other, one_group)

    assert differences(snapshot(other, one_group), before) == []


def test_names_are_those_of_the_model_itself_under_torch_compile(tmp_path: Path) -> None:
    states = save_steps(tmp_path, 5)
    inner = small_model(seed=9)
    compiled: Any = torch.compile(inner)
    optimizer = OPTIMIZERS["adamw"](inner)

    restored = checkpointer_for(ALONE, plan_for(tmp_path), Told()).restore(compiled, optimizer)

    assert restored is not None
    assert differences(snapshot(compiled, optimizer), states[5]) == []


def test_a_checkpoint_that_cannot_be_loaded_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 10)
    model = small_model(seed=9)
    optimizer = OPTIMIZERS["adamw"](model)
    before = snapshot(model, optimizer)
    loaded: list[torch.Tensor] = []

    def load_a_part(*arguments: object, **settings: object) -> torch.Tensor:
        if len(loaded) == 5:
            raise OSError(5, "Input/output error")
        loaded.append(torch_load(*arguments, **settings))  # type: ignore[arg-type]  # passed through
        return loaded[-1]

    torch_load = torch.load
    monkeypatch.setattr(torch, "load", load_a_part)
    with pytest.raises(NoUsableCheckpoint, match="Input/output error"):
        checkpointer_for(ALONE, plan_for(tmp_path), Told()).restore(model, optimizer)

    assert len(loaded) == 5
    assert differences(snapshot(model, optimizer), before) == []
