"""A training script as many write it: one process, one loop, everything in one file. It knows nothing of Gangline.

    python train.py

`entry.py` beside it ports it: model, data and loss stay as they are here, the loop goes.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DigitNet(nn.Module):
    """Two convolutions and a linear layer for 8 × 8 images."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * channels, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.features(images))
        return scores


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images (N, 1, 8, 8) with their digits."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    is_held_out = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~is_held_out], labels[~is_held_out]), TensorDataset(
        images[is_held_out], labels[is_held_out]
    )


def accuracy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Part of the batch that is right."""
    return (scores.argmax(1) == labels).float().mean()


def main() -> None:
    """Train, and say how good it got."""
    torch.manual_seed(0)
    train_data, held_out = load_data()
    model = DigitNet(channels=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(6):
        for images, labels in DataLoader(train_data, batch_size=64, shuffle=True):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            images, labels = held_out.tensors
            print(f"epoch {epoch}  loss {loss:.3f}  accuracy {accuracy(model(images), labels):.3f}")
        model.train()


if __name__ == "__main__":
    main()
