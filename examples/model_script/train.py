"""Model parallelism by hand: the first half of the layers on one GPU, the second on another, in one process."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gangline.report import report

STEPS, BATCH_SIZE = 200, 64


def devices() -> list[torch.device]:
    """Two GPUs; without GPUs the CPU twice."""
    if torch.cuda.device_count() >= 2:
        return [torch.device("cuda", 0), torch.device("cuda", 1)]
    return [torch.device("cpu")] * 2


def main() -> None:
    torch.manual_seed(0)
    first_device, second_device = devices()
    first = nn.Sequential(nn.Linear(64, 128), nn.ReLU()).to(first_device)
    second = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(second_device)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-3)
    images, labels = (torch.as_tensor(one) for one in load_digits(return_X_y=True))
    images = images.float() / 16
    for step in range(1, STEPS + 1):
        chosen = torch.randint(len(images), (BATCH_SIZE,))
        hidden = first(images[chosen].to(first_device))
        output = second(hidden.to(second_device))  # the activations travel; autograd sends the gradients back
        loss = nn.functional.cross_entropy(output, labels[chosen].to(second_device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            report(step=step, total_steps=STEPS, loss=float(loss))
            print(f"step {step} loss {float(loss):.3f}", flush=True)


if __name__ == "__main__":
    main()
