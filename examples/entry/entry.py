"""The port of `train.py`: what is trained. How (steps, ranks, precision, checkpoints) is in `job.yaml`."""

from torch import nn
from train import DigitNet, accuracy, load_data

from trainer.task import TrainTask


def build(channels: int = 16) -> TrainTask:
    """Called once on every rank, with `run.args` of the job file."""
    train_data, held_out = load_data()
    return TrainTask(
        model=lambda: DigitNet(channels),
        loss=nn.functional.cross_entropy,
        data=train_data,
        eval_data=held_out,
        metrics={"accuracy": accuracy},
    )
