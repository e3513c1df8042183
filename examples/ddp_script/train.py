"""A small language model trained with plain PyTorch DistributedDataParallel: what a user's own script looks like.

It learns to predict the next byte of `pydoc_data/topics.py`, 757 kB of English that ships with Python, so it needs no
download. It is written against the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT), which Gangline sets too, so the same file runs in three ways:

    gang submit job.yaml                              4 ranks on 2 nodes
    torchrun --nproc-per-node 2 train.py              without Gangline
    python train.py                                   one process

What Gangline adds is optional: `report()` feeds the progress bar, the ETA and the loss curve; `should_stop()` says that
the job was cancelled or reached its limit. Without the package both do nothing.

Data order: the batch of a step is a pure function of (seed, step), drawn for all ranks at once (`global_batch`); rank r
of n takes rows [r * size/n, (r+1) * size/n). So `python train.py` is the reference of every multi-rank run: the same
samples in the same steps, the same losses up to the rounding of the all-reduce (below 1e-4 after 20 steps), and there
is no sampler state to save: a resumed run needs the step number only.

Not for: checkpoints (this run takes seconds), or speed. Shapes: B rows of a batch, T bytes of context, D width.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

try:
    import gangline

    HAS_GANGLINE = True
except ModuleNotFoundError:  # a machine without it: train all the same
    HAS_GANGLINE = False

VOCABULARY = 256
COLLECTIVE_TIMEOUT = timedelta(seconds=120)
"""The default of 30 minutes would let a dead peer hold the GPUs that long."""
EXIT_STOPPED = 75
"""EX_TEMPFAIL: stopped on request before the last step. Exit 0 would claim that the training is complete."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    device: torch.device

    def share(self, rows: Tensor) -> Tensor:
        """The rows of a global batch that belong to this rank."""
        count = rows.shape[0] // self.size
        return rows[self.rank * count : (self.rank + 1) * count].to(self.device)


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, length, width = x_BTD.shape
        heads = self.query_key_value(self.attention_norm(x_BTD)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, T, D / heads)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x_BTD + self.perceptron(x_BTD)


class ByteModel(nn.Module):
    """Predicts the next byte; its output is the mean cross-entropy in nats per byte."""

    def __init__(self, *, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, windows: Tensor) -> Tensor:
        """`windows` (B, T + 1): each byte but the last is an input, each but the first a target."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        logits_BTV = self.out(self.blocks(self.bytes(inputs) + self.positions(positions)))
        return functional.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten())


def load_corpus() -> tuple[Tensor, Tensor]:
    """Training and validation bytes: the first nine tenths and the rest of the installed pydoc topics file."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"this Python has no pydoc_data/topics.py ({sys.prefix}): install its full library")
    corpus = torch.frombuffer(bytearray(Path(spec.origin).read_bytes()), dtype=torch.uint8)
    border = len(corpus) * 9 // 10
    return corpus[:border], corpus[border:]


def windows_at(corpus: Tensor, starts: Tensor, context: int) -> Tensor:
    """Rows (B, T + 1) of `corpus` that begin at `starts`."""
    return corpus[starts[:, None] + torch.arange(context + 1)].long()


def global_batch(corpus: Tensor, *, seed: int, step: int, size: int, context: int) -> Tensor:
    """The batch of all ranks in `step`: depends on nothing else, so every world size sees the same samples."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return windows_at(corpus, torch.randint(len(corpus) - context - 1, (size,), generator=generator), context)


def join_world() -> World:
    """Meet the peers that the environment names; alone when it names none."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=COLLECTIVE_TIMEOUT)
    return World(rank=rank, size=size, device=device)


def mean_over_ranks(values: list[float], world: World) -> list[float]:
    """Each value averaged over the ranks; one collective for all of them."""
    if world.size == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(total)
    return [float(value) for value in total / world.size]


@torch.no_grad()
def validation_loss(model: nn.Module, windows: Tensor, world: World) -> float:
    """Mean loss over the validation windows; each rank computes its share. The same value on every rank."""
    return mean_over_ranks([float(model(world.share(windows)))], world)[0]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level language model with DDP.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a step, over all ranks")
    parser.add_argument("--context", type=int, default=64, help="bytes that a prediction may look at")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of AdamW")
    parser.add_argument("--validate-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--validation-rows", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    for option in ("batch_size", "validation_rows"):
        if getattr(arguments, option) % world_size:
            name = option.replace("_", "-")
            parser.error(f"--{name} {getattr(arguments, option)} does not divide by {world_size} ranks")
    return arguments


def train(arguments: argparse.Namespace, world: World) -> bool:
    """The whole run. False when it was stopped on request before its last step."""
    torch.manual_seed(arguments.seed)  # the same initial weights on every rank
    model: nn.Module = ByteModel(
        width=arguments.width, layers=arguments.layers, heads=arguments.heads, context=arguments.context
    ).to(world.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    raw_model = model  # validation runs without DDP's hooks
    if world.size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, total_steps=max(arguments.steps, 2))

    train_bytes, validation_bytes = load_corpus()
    starts = torch.linspace(0, len(validation_bytes) - arguments.context - 2, arguments.validation_rows).long()
    validation_windows = windows_at(validation_bytes, starts, arguments.context)

    first_val_loss = val_loss = validation_loss(raw_model, validation_windows, world)
    say(world, f"{num_parameters:,} parameters, {world.size} ranks on {world.device.type}, {arguments.steps} steps")
    say(world, f"step    0  val_loss {val_loss:.4f}")
    tell(0, arguments.steps, val_loss=val_loss)

    for step in range(1, arguments.steps + 1):
        started = time.monotonic()
        batch = global_batch(
            train_bytes, seed=arguments.seed, step=step, size=arguments.batch_size, context=arguments.context
        )
        optimizer.zero_grad(set_to_none=True)
        loss = model(world.share(batch))
        loss.backward()
        optimizer.step()
        schedule.step()

        # The stop flag rides on the collective of the loss, so that all ranks leave at the same step.
        mean_loss, stop_votes = mean_over_ranks([loss.item(), float(is_asked_to_stop())], world)
        metrics = {
            "loss": mean_loss,
            "tokens_per_second": arguments.batch_size * arguments.context / (time.monotonic() - started),
        }
        if stop_votes > 0:
            tell(step, arguments.steps, **metrics)
            say(world, f"asked to stop: leaving after step {step} of {arguments.steps}")
            return False
        if step % arguments.validate_every == 0 or step == arguments.steps:
            val_loss = metrics["val_loss"] = validation_loss(raw_model, validation_windows, world)
            shown = f"loss {mean_loss:.4f}  val_loss {val_loss:.4f}  {metrics['tokens_per_second']:.0f} tokens/s"
            say(world, f"step {step:4d}  {shown}")
        tell(step, arguments.steps, **metrics)
    say(world, f"done: val_loss {first_val_loss:.4f} -> {val_loss:.4f}")
    return True


def tell(step: int, total_steps: int, **metrics: Any) -> None:
    """Tell Gangline how far the training is. Outside a job `report` itself does nothing."""
    if HAS_GANGLINE:
        gangline.report(step, total_steps, **metrics)


def is_asked_to_stop() -> bool:
    """Whether the job was cancelled, preempted, or reached its limit."""
    return HAS_GANGLINE and gangline.should_stop()


def say(world: World, text: str) -> None:
    """One line of the log, from rank 0 only."""
    if world.rank == 0:
        print(text, flush=True)


def leave(world: World, exit_code: int) -> None:
    """End together and at once: gloo's threads may abort a process that returns from main while peers still talk."""
    if world.size > 1:
        dist.barrier()
        dist.destroy_process_group()
    end_process(exit_code)


def end_process(exit_code: int) -> None:
    """Exit without the interpreter's teardown, with nothing left in a buffer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


@record  # writes an exception to TORCHELASTIC_ERROR_FILE, so that the rank that failed first is named with its error
def main() -> None:
    torch.set_num_threads(1)  # the thread count alone changes rounding, and ranks share the cores
    arguments = parse_arguments()
    world = join_world()
    complete = train(arguments, world)
    leave(world, 0 if complete else EXIT_STOPPED)


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001  # printed, and the process ends: an orderly teardown could die in gloo and mask it
        traceback.print_exc()
        end_process(1)
