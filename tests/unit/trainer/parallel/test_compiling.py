"""Compiling layer by layer: the same results and names, however many kinds of layers there are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trainer.parallel.activation_checkpointing import checkpoint_activations
from trainer.parallel.compiling import compile_layers


class Widening(nn.Module):
    """Layers of one class, each of another width."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.linear = nn.Linear(before, before + 1, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(before + 1, dtype=torch.float64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(values)))


def gradients(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(inputs).square().mean().backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.full  # compiling takes minutes on a busy machine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_every_layer_is_compiled_and_computes_the_same(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Widening(width) for width in range(2, 12)])
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    inputs = torch.randn(6, 2, dtype=torch.float64)
    torch._dynamo.reset()

    checkpoint_activations(list(model), mode)
    compile_layers(list(model), backend="aot_eager")

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for one, same in zip(gradients(model, inputs), gradients(plain, inputs), strict=True):
            assert torch.allclose(one, same, rtol=0, atol=1e-12)
    assert list(model.state_dict()) == names
    for one, same in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(one, same, rtol=0, atol=1e-12)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_layers_of_a_kind_are_compiled_once_and_those_of_torch_are_too() -> None:
    torch.manual_seed(0)
    kinds = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.GELU()).double()
    model = nn.Sequential(*[copy.deepcopy(layer) for _ in range(4) for layer in kinds])
    plain = copy.deepcopy(model)
    inputs = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    compile_layers(list(model))

    for one, same in zip(gradients(model, inputs), gradients(plain, inputs), strict=True):
        assert torch.allclose(one, same, rtol=0, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
