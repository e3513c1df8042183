"""What ranks that each hold a part of a model agree on: all of it or nothing, one verdict, whole copies per node."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.checkpoint_cases import Told, at, damage, path_of
from tests.distributed.checkpoint_plans import Run, expected, is_same, problems_of, start, trained
from tests.support.ranks import TEST_SECONDS, Ranks
from trainer.checkpoint.checkpointer import CheckpointMismatch, NoUsableCheckpoint
from trainer.checkpoint.layout import list_checkpoints, verify
from trainer.checkpoint.restoring import load_own_state
from trainer.checkpoint.state import flat_state, local_part, model_values
from trainer.failure import ConfigError
from trainer.mesh import Mesh

pytestmark = [
    pytest.mark.timeout(TEST_SECONDS),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Ranks]:
    with Ranks(4, ranks_per_node=2) as ranks:
        yield ranks


def saved(mesh: Mesh, way: str, root: str, *steps: int) -> Run:
    run = trained(mesh, "layers", way)
    assert run is not None
    saver = run.checkpointer(Path(root))
    for step in steps:
        saver.save(run.model, run.optimizer, at(step), is_async=False)
    saver.close()
    return run


def fresh(mesh: Mesh, way: str) -> Run:
    run = start(mesh, "layers", way, seed=9)
    assert run is not None
    return run


def is_unchanged(run: Run, mesh: Mesh, way: str) -> bool:
    values = model_values(run.model)
    weights = expected(mesh, "layers", way, 9)
    return not run.optimizer.state and all(is_same(values[name].detach(), one) for name, one in weights.items())


# --- All of it or nothing --------------------------------------------------------------------------------------------


def restore_where_one_cannot_read(mesh: Mesh, root: str, way: str, num_failures: int) -> tuple[str, bool, list[str]]:
    """Rank 2 fails to read, so many times."""
    saved(mesh, way, root, 7, 8)
    run = fresh(mesh, way)
    told = Told()
    load, left = torch.load, [num_failures if mesh.rank == 2 else 0]

    def fail_at_first(*arguments: Any, **settings: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(5, "Input/output error")
        return load(*arguments, **settings)

    torch.load = fail_at_first
    try:
        restored = run.checkpointer(Path(root), told).restore(run.model, run.optimizer)
    except NoUsableCheckpoint as error:
        return str(error), is_unchanged(run, mesh, way), told.notes
    finally:
        torch.load = load
    assert restored is not None
    return restored.path, problems_of(run, mesh, "layers", way) == [], told.notes


@pytest.mark.parametrize("way", ["sharded", "sharded_stages"])
def test_when_one_rank_cannot_read_its_part_all_take_the_next_checkpoint(four: Ranks, tmp_path: Path, way: str) -> None:
    found = four.run(restore_where_one_cannot_read, str(tmp_path), way, 1)

    assert [one[:2] for one in found] == [(path_of(7), True)] * 4
    assert len(found[0][2]) == 1
    assert f"{path_of(8)} was skipped: it cannot be loaded: OSError" in found[0][2][0]
    assert "(Seen by rank 2.)" in found[0][2][0]


@pytest.mark.parametrize("way", ["sharded", "sharded_stages"])
def test_when_one_rank_can_read_none_the_model_and_optimizer_of_all_ranks_are_as_they_were(
    four: Ranks, tmp_path: Path, way: str
) -> None:
    found = four.run(restore_where_one_cannot_read, str(tmp_path), way, 2)

    assert len({one[0] for one in found}) == 1
    assert "Input/output error" in found[0][0]
    assert [one[1] for one in found] == [True] * 4


def test_a_damaged_shard_is_found_by_the_rank_that_checks_it_and_used_by_none(four: Ranks, tmp_path: Path) -> None:
    four.run(save_twice, str(tmp_path))
    damage(tmp_path / path_of(8) / "__3_0.distcp", at_byte=400)

    assert four.run(restored_path, str(tmp_path)) == [path_of(7)] * 4


def save_twice(mesh: Mesh, root: str) -> None:
    saved(mesh, "sharded", root, 7, 8)


def restored_path(mesh: Mesh, root: str) -> str:
    run = fresh(mesh, "hybrid")
    restored = run.checkpointer(Path(root)).restore(run.model, run.optimizer)
    assert restored is not None
    assert problems_of(run, mesh, "layers", "hybrid") == []
    return restored.path


# --- One verdict over the whole model --------------------------------------------------------------------------------


def restore_another_model(mesh: Mesh, root: str, change: str) -> tuple[str, bool]:
    """Two stages over two ranks each; what is another one lies in the last stage."""
    way = "sharded_stages"
    saved(mesh, way, root, 7)
    run = fresh(mesh, way)
    if change == "layer":
        less = {name: text for name, text in run.names.descriptions.items() if not name.startswith("4")}
        if mesh.rank >= 2:
            run.model._modules.pop("4")  # `del model[-1]` would number the others anew
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01)
        run = dataclasses.replace(run, optimizer=optimizer, names=dataclasses.replace(run.names, descriptions=less))
    if change == "frozen" and mesh.rank >= 2:
        optimizer = torch.optim.AdamW([one for name, one in run.parameters.items() if name != "3.weight"], lr=0.01)
        run = dataclasses.replace(run, optimizer=optimizer)
    if change == "groups" and mesh.rank >= 2:
        run = dataclasses.replace(run, optimizer=torch.optim.AdamW(run.model.parameters(), lr=0.01))
    before = {name: local_part(value.detach()).clone() for name, value in model_values(run.model).items()}
    with pytest.raises(CheckpointMismatch) as caught:
        run.checkpointer(Path(root)).restore(run.model, run.optimizer)
    values = model_values(run.model)
    is_as_before = all(torch.equal(local_part(values[name].detach()), one) for name, one in before.items())
    return str(caught.value), is_as_before and not run.optimizer.state


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("layer", "unexpected in the checkpoint: model.4.weight, optimizer.group.4.weight"),
        ("frozen", "unexpected in the checkpoint: optimizer.group.3.weight"),
        ("groups", "3.weight in one group"),
    ],
)
def test_a_checkpoint_that_does_not_fit_one_stage_is_refused_on_all_ranks_alike(
    four: Ranks, tmp_path: Path, change: str, text: str
) -> None:
    found = four.run(restore_another_model, str(tmp_path), change)

    assert len({one[0] for one in found}) == 1
    assert text in found[0][0]
    assert [one[1] for one in found] == [True] * 4


# --- Each rank reads its part ----------------------------------------------------------------------------------------


def bytes_in_memory(mesh: Mesh, root: str, way: str) -> tuple[int, int, bool]:
    """Of what this rank loads, and of the whole state; and whether it lies as the model and optimizer do."""
    run = saved(mesh, way, root, 7)
    loaded = load_own_state(Path(root) / path_of(7), run.model, run.optimizer, run.names)
    own = flat_state(run.model, run.optimizer, run.names)
    tensors = {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}
    whole = sum(value.numel() * value.element_size() for value in tensors.values())
    here = sum(local_part(value).numel() * value.element_size() for value in tensors.values())
    return here, whole, loaded.keys() == own.keys() and all(is_same(value, own[key]) for key, value in tensors.items())


def test_a_rank_holds_no_more_than_its_part_of_what_it_restores(four: Ranks, tmp_path: Path) -> None:
    found = four.run(bytes_in_memory, str(tmp_path), "sharded")

    assert all(one[2] for one in found)
    assert len({one[1] for one in found}) == 1
    assert max(one[0] for one in found) < 0.4 * found[0][1]  # 5 rows over 4 ranks are 2, 2, 1, 0


# --- Nodes without a shared folder -----------------------------------------------------------------------------------


def save_and_load_on_nodes(mesh: Mesh, root: str, way: str) -> list[str]:
    folder = Path(root) / f"node-{mesh.node_rank}"
    run = dataclasses.replace(started(trained(mesh, "layers", way)), mesh=mesh)
    saver = run.checkpointer(folder, is_shared=False)
    saver.save(run.model, run.optimizer, at(7), is_async=True)
    saver.wait()
    saver.close()
    other = dataclasses.replace(fresh(mesh, way), mesh=mesh)
    assert other.checkpointer(folder, is_shared=False).restore(other.model, other.optimizer) is not None
    return problems_of(other, mesh, "layers", way)


def started(run: Run | None) -> Run:
    assert run is not None
    return run


def refuse_on_nodes(mesh: Mesh, root: str, way: str) -> tuple[str, list[str]]:
    folder = Path(root) / f"node-{mesh.node_rank}"
    run = dataclasses.replace(started(trained(mesh, "layers", way)), mesh=mesh)
    texts = []
    with pytest.raises(ConfigError) as caught:
        run.checkpointer(folder, is_shared=False).restore(run.model, run.optimizer)
    texts.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        run.checkpointer(folder, is_shared=False).save(run.model, run.optimizer, at(7), is_async=True)
    texts.append(str(caught.value))
    assert texts[0] == texts[1]
    return texts[0], [one.path for one in list_checkpoints(folder)]


def test_a_plan_that_splits_the_model_inside_each_node_writes_a_whole_copy_on_each(
    two_nodes: Ranks, tmp_path: Path
) -> None:
    assert two_nodes.run(save_and_load_on_nodes, str(tmp_path), "hybrid") == [[]] * 4

    for node in (0, 1):
        keys = verify(tmp_path / f"node-{node}" / path_of(7)).keys
        assert "model.0.weight" in keys
        assert "optimizer.state.4.weight/exp_avg" in keys


@pytest.mark.parametrize("way", ["sharded", "sharded_stages"])
def test_a_plan_that_splits_the_model_over_nodes_is_refused_before_it_trains(
    two_nodes: Ranks, tmp_path: Path, way: str
) -> None:
    found = two_nodes.run(refuse_on_nodes, str(tmp_path), way)

    assert len({one[0] for one in found}) == 1
    assert "the ranks of node 0 do not have all of " in found[0][0]
    assert "--shared-folder), or a plan that keeps a whole copy inside each node, such as hsdp" in found[0][0]
    assert [one[1] for one in found] == [[]] * 4
