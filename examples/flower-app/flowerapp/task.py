"""What is learned: which of four centres a noisy point belongs to. Each client has its own points."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, WIDTH = 4, 32


def make_model() -> nn.Module:
    """Build the network, always with the same first weights."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def points(owner: int, count: int = 500) -> tuple[Tensor, Tensor]:
    """Draw the points of one owner."""
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(1000 + owner)
    labels = torch.randint(CLASSES, (count,), generator=rng)
    return centres[labels] + 2 * torch.randn(count, WIDTH, generator=rng), labels


def train(model: nn.Module, inputs: Tensor, labels: Tensor, steps: int, rate: float) -> float:
    """Take some steps of SGD, return the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return the part of the points that the model gets right."""
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).float().mean())
