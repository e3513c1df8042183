"""Tasks that the distributed tests train: small, in float64, without dropout."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.data import IterableDataset, Subset, TensorDataset

from trainer.recipes.registry import build_recipe
from trainer.task import TrainTask


def table(num_samples: int = 97, num_features: int = 12, num_classes: int = 5) -> TensorDataset:
    """Samples and classes, always the same."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(num_samples, num_features, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(num_classes, (num_samples,), generator=generator))


def mlp() -> TrainTask:
    """A classifier of a table."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)).double()

    return TrainTask(model=build, loss=nn.functional.cross_entropy, data=table(), eval_data=table(41))


def mlp_with_dropout() -> TrainTask:
    """One that draws random numbers in each step."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 5)).double()

    return TrainTask(model=build, loss=nn.functional.cross_entropy, data=table(), eval_data=table(41))


def _sequences() -> TensorDataset:
    """Sequences of 6 features in which only the first 1 to 6 places count: the target is 0 or 1 there, -1 elsewhere."""
    generator = torch.Generator().manual_seed(8)
    inputs = torch.randn(97, 6, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(2, (97, 6), generator=generator)
    lengths = torch.randint(1, 7, (97, 1), generator=generator)
    return TensorDataset(inputs, targets.masked_fill(torch.arange(6) >= lengths, -1))


def _masked(reduction: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda output, target: nn.functional.cross_entropy(
        output.flatten(0, 1), target.flatten(), ignore_index=-1, reduction=reduction
    )


def _sequence_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def masked() -> TrainTask:
    """Its loss is a sum over the places that count, with their number."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _masked("sum")(output, target), (target >= 0).sum()

    return TrainTask(model=_sequence_model, loss=loss, data=_sequences())


def masked_mean() -> TrainTask:
    """The same for one process: the mean over the places of the whole batch."""
    return TrainTask(model=_sequence_model, loss=_masked("mean"), data=_sequences())


def images(num_samples: int = 53) -> TensorDataset:
    """Small images whose brightness drifts from sample to sample."""
    generator = torch.Generator().manual_seed(9)
    inputs = torch.randn(num_samples, 3, 5, 5, generator=generator, dtype=torch.float64)
    drift = torch.linspace(-3, 3, num_samples, dtype=torch.float64).view(-1, 1, 1, 1)
    return TensorDataset(inputs + drift, torch.randint(4, (num_samples,), generator=generator))


def batch_norm() -> TrainTask:
    """A small net with BatchNorm over images and over features. A bias before one would have a gradient of zero."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(54, 8, bias=False),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Linear(8, 4),
        ).double()

    return TrainTask(model=build, loss=nn.functional.cross_entropy, data=images(), eval_data=images(29))


class PartlyUsed(nn.Module):
    """A model of which `extra` is used on the ranks that `uses_extra` says only."""

    def __init__(self, uses_extra: Callable[[int], bool]) -> None:
        super().__init__()
        self.used, self.extra = nn.Linear(12, 5).double(), nn.Linear(12, 5).double()
        self._uses_extra = uses_extra

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.used(inputs)
        return output + self.extra(inputs) if self._uses_extra(torch.distributed.get_rank()) else output


def unused_layer() -> TrainTask:
    """One layer is used nowhere."""
    return TrainTask(model=PartlyUsed(lambda rank: False), loss=nn.functional.cross_entropy, data=table())


def layer_of_odd_ranks() -> TrainTask:
    """One layer is used on odd ranks only."""
    return TrainTask(
        model=lambda: PartlyUsed(lambda rank: rank % 2 == 1), loss=nn.functional.cross_entropy, data=table()
    )


class UnevenStream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """10 batches of 4 on rank 0, 13 on every other; it can say where it stands."""

    def __init__(self) -> None:
        self._num_read = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        samples = table(52)
        while self._num_read < (40 if torch.distributed.get_rank() == 0 else 52):
            self._num_read += 1
            yield samples[self._num_read - 1]

    def state_dict(self) -> dict[str, int]:
        return {"num_read": self._num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._num_read = state["num_read"]


def uneven_stream() -> TrainTask:
    """Trained on it."""
    return TrainTask(model=lambda: nn.Linear(12, 5).double(), loss=nn.functional.cross_entropy, data=UnevenStream())


def not_finite_on_rank_1() -> TrainTask:
    """Its loss becomes NaN on rank 1 after some steps."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss.calls += 1  # type: ignore[attr-defined]  # a counter of the function's own
        value = nn.functional.cross_entropy(output, target)
        is_bad = torch.distributed.get_rank() == 1 and loss.calls == 4  # type: ignore[attr-defined]
        return value * float("nan") if is_bad else value

    loss.calls = 0  # type: ignore[attr-defined]
    return TrainTask(model=lambda: nn.Linear(12, 5).double(), loss=loss, data=table())


class Frozen(nn.Module):
    """A backbone that stays in evaluation mode, and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5)).double().eval().requires_grad_(False)
        self.head = nn.Linear(12, 5).double()
        self.modes: list[bool] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.backbone.training)
        output: torch.Tensor = self.head(self.backbone(inputs))
        return output


def frozen_backbone() -> TrainTask:
    """Trains on top of it."""
    return TrainTask(model=Frozen, loss=nn.functional.cross_entropy, data=table(), eval_data=table(9))


def batch_norm_without_statistics() -> TrainTask:
    """A BatchNorm that keeps no running statistics, so it uses those of the batch in evaluations too."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(12, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), nn.Linear(8, 5)
        ).double()

    return TrainTask(model=build, loss=nn.functional.cross_entropy, data=table(), eval_data=table(13))


class Recomputed(nn.Module):
    """Its middle is computed again in backward, in the old, reentrant way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(a, b).double() for a, b in ((12, 16), (16, 16), (16, 5)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.middle, self.first(inputs), use_reentrant=True)
        output: torch.Tensor = self.last(hidden)
        return output


def recomputed() -> TrainTask:
    """Trains it."""
    return TrainTask(model=Recomputed, loss=nn.functional.cross_entropy, data=table())


def longer_on_rank_1() -> TrainTask:
    """The ranks see datasets of other lengths."""
    return dataclasses.replace(mlp(), data=table(97 + torch.distributed.get_rank()))


class EmptyStream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Nothing on rank 1."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        samples = table(0 if torch.distributed.get_rank() == 1 else 97)
        return (samples[index] for index in range(len(samples)))


def empty_stream() -> TrainTask:
    """Trained on it."""
    return dataclasses.replace(uneven_stream(), data=EmptyStream())


SLOW_EVALUATION_SECONDS = 3600.0


def slow_evaluation() -> TrainTask:
    """Its evaluation takes long, its steps do not. For a clock that a sleep moves on at once."""

    def wait(output: torch.Tensor, target: torch.Tensor) -> float:
        time.sleep(SLOW_EVALUATION_SECONDS)
        return 0.0

    return dataclasses.replace(mlp(), eval_data=table(2), metrics={"wait": wait})


def shaped_metric() -> TrainTask:
    """Its metric and its count have a shape of one."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.cross_entropy(output, target, reduction="sum"), torch.tensor([len(target)])

    metrics = {"shaped": lambda output, target: output.mean().reshape(1)}
    return dataclasses.replace(mlp(), loss=loss, metrics=metrics)


def shared_linears() -> TrainTask:
    """Two layers with one weight, which tensor parallelism is told to split."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 12).double(), nn.Linear(12, 12).double()
            self.second.weight = self.first.weight
            self.head = nn.Linear(12, 5).double()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.head(self.second(self.first(inputs)))
            return output

    task = TrainTask(model=Shared, loss=nn.functional.cross_entropy, data=table())
    return dataclasses.replace(task, tensor_parallel_plan={"first": "colwise", "second": "rowwise"})


def drawn_by_numpy() -> TrainTask:
    """Its weights come from a generator that nobody seeds."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 5)).double()
        with torch.no_grad():
            next(model.parameters()).copy_(torch.as_tensor(np.random.default_rng().normal(size=(12, 12))))
        return model

    return TrainTask(model=build, loss=nn.functional.cross_entropy, data=table())


class IdlePart(nn.Module):
    """A layer of which one half is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.extra = nn.Linear(12, 12).double(), nn.Linear(12, 12).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.used(inputs)
        return output


def idle_part() -> TrainTask:
    """Trained with a weight decay."""

    def build() -> nn.Module:
        return nn.Sequential(IdlePart(), nn.Tanh(), nn.Linear(12, 5).double())

    return TrainTask(model=build, loss=nn.functional.cross_entropy, data=table())


def seven_held_out() -> TrainTask:
    """Evaluated on 7 samples."""
    task = mlp()
    return dataclasses.replace(task, eval_data=table(7))


def _recipe(name: str, *, num_held_out: int = 0, **args: object) -> Callable[[], TrainTask]:
    """A recipe in float64 with so many held-out samples."""

    def build() -> TrainTask:
        task = build_recipe(name, {"dtype": "float64", **args})
        held_out = None if num_held_out == 0 else Subset(task.eval_data, range(num_held_out))
        return dataclasses.replace(task, eval_data=held_out)

    return build


TASKS: dict[str, Callable[[], TrainTask]] = {
    "mlp": mlp,
    "mlp_with_dropout": mlp_with_dropout,
    "recipe_transformer": _recipe(
        "transformer", num_layers=2, width=32, num_heads=2, tokens_per_sample=16, tied_embeddings=True
    ),
    "recipe_transformer_fp32": _recipe(
        "transformer", dtype="float32", num_layers=2, width=32, num_heads=2, tokens_per_sample=16
    ),
    "split_transformer": _recipe("transformer", num_layers=5, width=16, num_heads=4, tokens_per_sample=8),
    "evaluated_transformer": _recipe(
        "transformer", num_held_out=13, num_layers=5, width=16, num_heads=4, tokens_per_sample=8
    ),
    "tied_transformer": _recipe(
        "transformer", num_layers=2, width=16, num_heads=4, tokens_per_sample=8, tied_embeddings=True
    ),
    "recipe_mlp": _recipe("mlp", data="digits"),
    "recipe_resnet": _recipe("resnet", data="digits", norm="group", width=16),
    "shared_linears": shared_linears,
    "drawn_by_numpy": drawn_by_numpy,
    "idle_part": idle_part,
    "frozen_backbone": frozen_backbone,
    "batch_norm_without_statistics": batch_norm_without_statistics,
    "recomputed": recomputed,
    "longer_on_rank_1": longer_on_rank_1,
    "empty_stream": empty_stream,
    "slow_evaluation": slow_evaluation,
    "shaped_metric": shaped_metric,
    "seven_held_out": seven_held_out,
    "masked": masked,
    "batch_norm": batch_norm,
    "unused_layer": unused_layer,
    "layer_of_odd_ranks": layer_of_odd_ranks,
    "uneven_stream": uneven_stream,
    "not_finite_on_rank_1": not_finite_on_rank_1,
    "masked_mean": masked_mean,
}
