"""The networks of the experiments: MLP, ResNet (CIFAR and ImageNet form), LSTM language model.

Each takes the sizes that make it large (the paper's) or small (a sibling for this machine). Weights are drawn
from torch's global generator, as torch does it: the training loop forks and seeds it around the call.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """Make a ReLU network with the given hidden layers."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        out = F.relu(self.norm1(self.conv1(images)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(images))


class ResNet(nn.Module):
    """A residual network; `blocks` per stage, `width` channels in the first stage, doubling.

    [2, 2, 2, 2] at width 64 is ResNet-18, [3, 4, 6, 3] is ResNet-34. The CIFAR form starts with a 3 x 3
    convolution, the ImageNet form (`large_images`) with 7 x 7, stride 2 and a pooling.
    """

    def __init__(
        self,
        blocks: Sequence[int] = (2, 2, 2, 2),
        width: int = 64,
        classes: int = 10,
        large_images: bool = False,
    ) -> None:
        super().__init__()
        stem: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
        if large_images:
            stem = [nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)]
        stem += [nn.BatchNorm2d(width), nn.ReLU()]
        if large_images:
            stem.append(nn.MaxPool2d(3, stride=2, padding=1))
        self.stem = nn.Sequential(*stem)
        stages: list[nn.Module] = []
        inputs = width
        for stage, depth in enumerate(blocks):
            outputs = width * 2**stage
            for block in range(depth):
                stages.append(ResidualBlock(inputs, outputs, 2 if stage and not block else 1))
                inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 3, h, w) to (batch, classes)."""
        features = self.stages(self.stem(images)).mean((2, 3))
        return cast(Tensor, self.head(features))


class LanguageModel(nn.Module):
    """An LSTM language model (Zaremba et al., 2014): embedding, two layers, dropout between, softmax.

    `tied` shares the embedding with the output layer. All weights start uniform in [-init, init].
    """

    def __init__(
        self, words: int, units: int = 1500, layers: int = 2, dropout: float = 0.65, tied: bool = True,
        init: float = 0.04,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(words, units)
        self.lstm = nn.LSTM(units, units, layers, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(units, words)
        if tied:
            self.output.weight = self.embedding.weight
        with torch.no_grad():
            for weight in self.parameters():
                weight.uniform_(-init, init)

    def forward(
        self, tokens: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Map tokens (time, batch) and a state to scores (time, batch, words) and the next state."""
        hidden, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        return self.output(self.dropout(hidden)), state


def parameter_count(model: nn.Module) -> int:
    """Count the trainable entries."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
