"""Checkpoints of any plan load under any other: weights, moments and settings equal in every bit, on real ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.distributed.checkpoint_cases import at, path_of
from tests.distributed.checkpoint_plans import MAKERS, WAYS, problems_of, start, trained
from tests.support.ranks import TEST_SECONDS, Ranks
from trainer.checkpoint.export import export_checkpoint
from trainer.checkpoint.layout import verify
from trainer.checkpoint.state import local_part
from trainer.mesh import Mesh

pytestmark = [
    pytest.mark.timeout(TEST_SECONDS),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # an export is of one process
]

PLANS = ["whole", "replicated", "sharded", "hybrid", "tensor", "stages", "sharded_stages"]


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def save_under(mesh: Mesh, maker: str, way: str, root: str) -> None:
    """Beside the training: what a rank changes after `save` has returned is not in the checkpoint."""
    run = trained(mesh, maker, way)
    if run is not None:
        saver = run.checkpointer(Path(root))
        saver.save(run.model, run.optimizer, at(7), is_async=True)
        for value in (*run.parameters.values(), *(one["exp_avg"] for one in run.optimizer.state.values())):
            local_part(value.detach()).zero_()
        saver.wait()
        saver.close()
    mesh.barrier()


def load_under(mesh: Mesh, maker: str, ways: list[str], root: str) -> dict[str, list[str]]:
    """What is wrong, by the plan that it was loaded under."""
    found: dict[str, list[str]] = {}
    for way in ways:
        run = start(mesh, maker, way, seed=9)
        if run is not None:
            restored = run.checkpointer(Path(root)).restore(run.model, run.optimizer)
            assert restored is not None
            assert restored.position == at(7)
            found[way] = problems_of(run, mesh, maker, way)
        mesh.barrier()
    return found


def written_twice_or_never(folder: Path) -> list[str]:
    """Keys of tensors whose stored pieces are not as many values as the tensor has."""
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    return [
        key
        for key, one in stored.items()
        if isinstance(one, TensorStorageMetadata)
        and sum(math.prod(chunk.sizes) for chunk in one.chunks) != math.prod(one.size)
    ]


def nothing_wrong(ways: list[str]) -> list[dict[str, list[str]]]:
    return [{way: [] for way in ways if rank < WAYS[way].num_ranks} for rank in range(4)]


@pytest.mark.parametrize("saved", PLANS)
def test_a_checkpoint_of_one_plan_loads_under_every_other_in_every_bit(four: Ranks, tmp_path: Path, saved: str) -> None:
    four.run(save_under, "layers", saved, str(tmp_path))

    manifest = verify(tmp_path / path_of(7))
    assert manifest.world_size == WAYS[saved].num_ranks
    assert {key: text for key, text in manifest.keys.items() if key.startswith("model.")} == {
        f"model.{name}": f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for name, value in MAKERS["layers"](1).state_dict().items()
    }
    assert written_twice_or_never(tmp_path / path_of(7)) == []
    assert four.run(load_under, "layers", PLANS, str(tmp_path)) == nothing_wrong(PLANS)


@pytest.mark.parametrize("resumed", ["sharded_2", "sharded_3", "replicated", "whole"])
def test_o44_sharded_optimizer_state_is_not_lost_when_the_number_of_ranks_changes(
    four: Ranks, tmp_path: Path, resumed: str
) -> None:
    four.run(save_under, "layers", "sharded", str(tmp_path))

    assert four.run(load_under, "layers", [resumed], str(tmp_path)) == nothing_wrong([resumed])


# "sharded" makes two parameters of it on each rank, as a rank has that holds the first stage and the last
@pytest.mark.parametrize("saved", ["whole", "sharded", "stages", "tensor_stages"])
def test_a_weight_shared_over_stages_has_one_optimizer_state_and_both_names(
    four: Ranks, tmp_path: Path, saved: str
) -> None:
    four.run(save_under, "tied", saved, str(tmp_path))

    keys = verify(tmp_path / path_of(7)).keys
    assert {"model.embedding.weight", "model.head.weight", "optimizer.state.embedding.weight/exp_avg"} <= keys.keys()
    assert not [key for key in keys if key.startswith(("optimizer.state.head", "optimizer.group.head"))]
    ways = ["whole", "sharded_as_one", "sharded_3", "stages", "tensor_stages"]
    assert four.run(load_under, "tied", ways, str(tmp_path)) == nothing_wrong(ways)


@pytest.mark.parametrize(("maker", "saved"), [("layers", "tensor"), ("layers", "sharded_stages"), ("tied", "stages")])
def test_an_export_has_the_whole_weights(four: Ranks, tmp_path: Path, maker: str, saved: str) -> None:
    four.run(save_under, maker, saved, str(tmp_path))

    export_checkpoint(tmp_path / path_of(7), tmp_path / "model.safetensors")

    loaded = load_file(tmp_path / "model.safetensors")
    expected = MAKERS[maker](1).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
