"""Checkpoints of several ranks: loaded under another number of them, on nodes without a shared folder, and in failures.

Two nodes are two groups of ranks with a checkpoint root each.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gangline.protocol.outcomes import TrainerExit
from tests.distributed.checkpoint_cases import (
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
from tests.support.ranks import TEST_SECONDS, RankFailed, Ranks
from tests.support.wait import wait_until
from trainer.checkpoint import saving
from trainer.checkpoint.checkpointer import FAILED, Checkpointer, CheckpointFailed, NoUsableCheckpoint
from trainer.checkpoint.layout import list_checkpoints, list_leftovers, verify
from trainer.failure import exit_code_of
from trainer.mesh import Mesh

pytestmark = pytest.mark.timeout(TEST_SECONDS)

SOON_SECONDS = 40.0
"""Ranks that wait for one that does not come wait for 60."""
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Ranks]:
    with Ranks(4, ranks_per_node=2) as ranks:
        yield ranks


def smaller_mesh(mesh: Mesh, world_size: int) -> Mesh | None:
    """The first `world_size` ranks as a mesh of their own; None on the others. All ranks call it."""
    members = list(range(world_size))
    groups = {name: dist.new_group(members, backend="gloo") for name in ("control", "background", "node_group")}
    if mesh.rank >= world_size:
        return None
    return dataclasses.replace(mesh, world_size=world_size, local_world_size=world_size, **groups)


def replicated(mesh: Mesh, seed: int, optimizer: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    inner = small_model(seed)
    model = DistributedDataParallel(inner, process_group=mesh.control) if mesh.world_size > 1 else inner
    return model, OPTIMIZERS[optimizer](inner)


# --- O-44 ------------------------------------------------------------------------------------------------------------


def save_with_all_and_load_with_fewer(mesh: Mesh, root: str, optimizer: str) -> dict[int, list[str]]:
    """Differences from the saved state by the number of ranks that load it."""
    plan = plan_for(Path(root))
    model, optimizer_ = replicated(mesh, seed=0, optimizer=optimizer)
    train(model, optimizer_, 5, seed=mesh.rank)  # other samples on each rank, averaged gradients
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    saver = checkpointer_for(mesh, plan, Told())
    saver.save(model, optimizer_, at(5), is_async=True)
    saver.wait()
    expected = snapshot(model, optimizer_)
    found: dict[int, list[str]] = {}
    for world_size in (1, 2, 3, 4):
        some = smaller_mesh(mesh, world_size)
        if some is not None:
            other, other_optimizer = replicated(some, seed=9, optimizer=optimizer)
            assert differences(snapshot(other, other_optimizer), expected) != []
            restored = checkpointer_for(some, plan, Told()).restore(other, other_optimizer)
            assert restored is not None
            assert (restored.position, restored.world_size) == (at(5), 4)
            found[world_size] = differences(snapshot(other, other_optimizer), expected)
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_o44_weights_and_moments_are_the_same_in_every_bit_under_another_number_of_ranks(
    four: Ranks, tmp_path: Path, optimizer: str
) -> None:
    found = four.run(save_with_all_and_load_with_fewer, str(tmp_path), optimizer)

    assert found == [{number: [] for number in (1, 2, 3, 4) if number > rank} for rank in range(4)]
    # Every rank wrote a part, none of it twice
    manifest = verify(tmp_path / path_of(5))
    assert {file.name for file in manifest.files} == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}
    assert any(key.startswith("optimizer.state.0.weight/") for key in manifest.keys)


# --- Failures --------------------------------------------------------------------------------------------------------


def save_where_one_has_no_room(mesh: Mesh, root: str, is_async: bool) -> tuple[str, bool, int, float]:
    """Rank 1 may write small files only: a full disk that only it meets. The failure as each rank sees it."""
    model, optimizer = replicated(mesh, seed=0, optimizer="adamw")
    saver = checkpointer_for(mesh, plan_for(Path(root)), Told())
    saver.save(model, optimizer, at(1), is_async=False)
    train(model, optimizer, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    started = time.monotonic()
    try:
        saver.save(model, optimizer, at(2), is_async=is_async)
        saver.wait()
    except CheckpointFailed as failure:
        return str(failure), failure.is_storage_full, saver.finished_or_failed, time.monotonic() - started
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    raise AssertionError("the save succeeded")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks_with_its_cause(
    four: Ranks, tmp_path: Path, is_async: bool
) -> None:
    found = four.run(save_where_one_has_no_room, str(tmp_path), is_async)

    assert len({one[0] for one in found}) == 1
    text, is_storage_full, finished, _ = found[0]
    assert text.startswith("the checkpoint of step 2 could not be written: rank 1: ")
    assert "File too large" in text
    assert (is_storage_full, finished) == (True, FAILED)
    assert max(one[3] for one in found) < SOON_SECONDS
    assert [one.step for one in list_checkpoints(tmp_path)] == [1]
    assert list_leftovers(tmp_path) == []


def save_where_one_cannot_stage(mesh: Mesh, root: str) -> str:
    model, optimizer = replicated(mesh, seed=0, optimizer="adamw")
    saver = checkpointer_for(mesh, plan_for(Path(root)), Told())
    if mesh.rank == 2:
        optimizer.state["what"] = 1  # type: ignore[index]  # a key that is no parameter: an optimizer of the user's
    try:
        saver.save(model, optimizer, at(1), is_async=True)
        saver.wait()
    except CheckpointFailed as failure:
        return str(failure)
    raise AssertionError("the save succeeded")


def test_a_rank_that_cannot_copy_its_state_fails_the_save_on_all_ranks(four: Ranks, tmp_path: Path) -> None:
    texts = four.run(save_where_one_cannot_stage, str(tmp_path))

    assert len(set(texts)) == 1
    assert "rank 2: ConfigError" in texts[0]
    assert "keeps state under 'what'" in texts[0]


def save_where_one_dies(mesh: Mesh, root: str) -> None:
    """Rank 1 dies while all write."""
    model, optimizer = replicated(mesh, seed=0, optimizer="adamw")
    saver = checkpointer_for(mesh, plan_for(Path(root)), Told())
    saver.save(model, optimizer, at(1), is_async=False)
    if mesh.rank == 1:
        os._exit(1)
    leave_with_the_error(mesh, root, lambda: saver.save(model, optimizer, at(2), is_async=False))


def save_in_background_where_one_dies(mesh: Mesh, root: str) -> None:
    model, optimizer = replicated(mesh, seed=0, optimizer="adamw")
    saver = checkpointer_for(mesh, plan_for(Path(root)), Told())
    saver.save(model, optimizer, at(1), is_async=False)
    write_shards = saving._write_shards

    def die_instead(*arguments: Any) -> Any:
        if mesh.rank == 1:
            os._exit(1)
        return write_shards(*arguments)

    saving._write_shards = die_instead  # type: ignore[assignment]  # these processes end with the case
    saver.save(model, optimizer, at(2), is_async=True)
    leave_with_the_error(mesh, root, lambda: wait_until(lambda: saver.finished_step == 2, WAIT_SECONDS, "an end"))


def leave_with_the_error(mesh: Mesh, root: str, work: Callable[[], object]) -> None:
    """As a rank does: it ends with its error, and its end is what the ranks beside it see next."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  # whatever it is, the file tells
        code = exit_code_of(error)
        (Path(root) / f"rank-{mesh.rank}").write_text(f"{code.name} {type(error).__name__} {error}")
        os._exit(code)


@pytest.mark.parametrize("case", [save_where_one_dies, save_in_background_where_one_dies])
def test_when_a_rank_dies_the_others_fail_soon_and_the_older_checkpoint_stays(
    four: Ranks, tmp_path: Path, case: Any
) -> None:
    with pytest.raises(RankFailed) as caught:
        four.run(case, str(tmp_path), seconds=SOON_SECONDS)

    assert caught.value.types == dict.fromkeys(range(4), "died"), caught.value
    for rank in (0, 2, 3):
        assert (tmp_path / f"rank-{rank}").read_text().startswith(TrainerExit.COMMUNICATION_ERROR.name)
    assert [one.step for one in list_checkpoints(tmp_path)] == [1]
    verify(tmp_path / path_of(1))


# --- Nodes without a shared folder -----------------------------------------------------------------------------------


def node_saver(mesh: Mesh, root: str, told: Told, **plan: Any) -> Checkpointer:
    return checkpointer_for(mesh, plan_for(Path(root) / f"node-{mesh.node_rank}", is_shared=False, **plan), told)


def save_on_each_node(mesh: Mesh, root: str) -> list[str]:
    model, optimizer = replicated(mesh, seed=0, optimizer="adamw")
    told = Told(has_supervisor=True)
    saver = node_saver(mesh, root, told, keep=2)
    for step in (1, 2, 3, 4):
        train(model, optimizer, 1, seed=step)
        saver.save(model, optimizer, at(step), is_async=step % 2 == 0)
        # As the loop does: announced once the minimum over all ranks has got there
        finished = wait_until(lambda: saver.finished_step, WAIT_SECONDS, "this node's copy is complete")
        while -mesh.max([-finished])[0] < step:
            finished = saver.finished_step
        saver.announce(step)
        if mesh.is_leader:
            told.accept_all()
    saver.wait()
    saver.close()
    mesh.barrier()
    return [str(record["kind"]) for record in told.records]


def load_on_each_node(mesh: Mesh, root: str, listed: list[tuple[str, int]]) -> tuple[str, list[str], list[str]]:
    model, optimizer = replicated(mesh, seed=9, optimizer="adamw")
    told = Told()
    restored = node_saver(mesh, root, told, attempt=2, resume_from=listed).restore(model, optimizer)
    assert restored is not None
    expected_model, expected_optimizer = replicated(mesh, seed=0, optimizer="adamw")
    for step in range(1, restored.position.step + 1):
        train(expected_model, expected_optimizer, 1, seed=step)
    return (
        restored.path,
        told.notes,
        differences(snapshot(model, optimizer), snapshot(expected_model, expected_optimizer)),
    )


def test_without_a_shared_folder_each_node_has_a_whole_copy_and_all_use_the_same_step(
    two_nodes: Ranks, tmp_path: Path
) -> None:
    kinds = two_nodes.run(save_on_each_node, str(tmp_path))

    assert sorted(kinds[0]) == ["checkpoint"] * 4 + ["checkpoint_removed"]
    assert kinds[1:] == [[]] * 3
    for node in (0, 1):
        assert [one.step for one in list_checkpoints(tmp_path / f"node-{node}")] == [4, 3, 2]
        assert {file.name for file in verify(tmp_path / f"node-{node}" / path_of(4)).files} == {
            ".metadata",
            "__0_0.distcp",
            "__1_0.distcp",
        }

    damage(tmp_path / "node-1" / path_of(4) / "__1_0.distcp", at_byte=500)
    found = two_nodes.run(load_on_each_node, str(tmp_path), [(path_of(step), step) for step in (4, 3, 2)])

    assert [one[0] for one in found] == [path_of(3)] * 4
    assert [one[2] for one in found] == [[]] * 4
    assert len(found[0][1]) == 1
    assert f"{path_of(4)} was skipped" in found[0][1][0]
    assert "(Seen by rank 2.)" in found[0][1][0]
    assert [one[1] for one in found[1:]] == [[]] * 3


def save_where_one_node_is_full(mesh: Mesh, root: str, is_async: bool) -> tuple[str, int]:
    model, optimizer = replicated(mesh, seed=0, optimizer="adamw")
    saver = node_saver(mesh, root, Told())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        saver.save(model, optimizer, at(1), is_async=is_async)
        saver.wait()
    except CheckpointFailed as failure:
        return str(failure), saver.finished_or_failed
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    raise AssertionError("the save succeeded")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_node_that_cannot_write_its_copy_fails_the_save_on_all_nodes(
    two_nodes: Ranks, tmp_path: Path, is_async: bool
) -> None:
    found = two_nodes.run(save_where_one_node_is_full, str(tmp_path), is_async)

    assert {one[1] for one in found} == {FAILED}
    assert all("rank 3: " in one[0] and "File too large" in one[0] for one in found), found


def resume_where_a_node_has_nothing(mesh: Mesh, root: str) -> str:
    model, optimizer = replicated(mesh, seed=0, optimizer="adamw")
    saver = node_saver(mesh, root, Told())
    saver.save(model, optimizer, at(1), is_async=False)
    listed = [(path_of(1), 1)]
    elsewhere = str(Path(root) / "empty") if mesh.node_rank == 1 else root
    with pytest.raises(NoUsableCheckpoint) as caught:
        node_saver(mesh, elsewhere, Told(), attempt=2, resume_from=listed).restore(model, optimizer)
    return str(caught.value)


def test_a_checkpoint_that_one_node_has_not_is_used_by_none(two_nodes: Ranks, tmp_path: Path) -> None:
    texts = two_nodes.run(resume_where_a_node_has_nothing, str(tmp_path))

    assert len(set(texts)) == 1
    assert "is not there. (Seen by rank 2.)" in texts[0]
