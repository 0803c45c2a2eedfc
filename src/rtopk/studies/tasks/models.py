"""The networks of the experiments: MLP, small convolutional net, ResNet (both forms), LSTM, small GPT.

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


def small_convnet(classes: int = 10, width: int = 32) -> nn.Sequential:
    """Make a net for 16 x 16 images, two convolutions and a hidden layer: 85,642 parameters for ten classes."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(2 * width * 16, 64), nn.ReLU(), nn.Linear(64, classes),
    )  # fmt: skip


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


class GptBlock(nn.Module):
    """Causal self-attention and a two-layer network, each with a norm before and a shortcut around."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        q, k, v = self.attention(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, width / heads)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, time, width))
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    """A small GPT: learned positions, blocks with the norm first, output tied to the embedding."""

    def __init__(
        self, words: int, width: int = 64, layers: int = 2, heads: int = 4, context: int = 64
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*[GptBlock(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: Tensor, fresh: bool = True) -> Tensor:
        """Map tokens (time, batch) to scores (time, batch, words); every window stands alone."""
        x = self.embedding(tokens.T) + self.position[: len(tokens)]  # (batch, time, width)
        return cast(Tensor, self.norm(self.blocks(x)).transpose(0, 1) @ self.embedding.weight.T)


def parameter_count(model: nn.Module) -> int:
    """Count the trainable entries."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
