"""A residual network for small images, trained with stock PyTorch."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPOCHS: Final = 8
WIDTH: Final = 32
BLOCKS: Final = 8


class Block(nn.Module):
    """Two convolutions with norms, added to their argument: (N, 32, height, width) to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)
        self.conv2, self.norm2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum, through a ReLU."""
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Residual(nn.Module):
    """A convolution, eight blocks, and a linear layer: images (N, channels, height, width) to logits (N, classes)."""

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.logits = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.logits(self.blocks(F.relu(self.norm(self.conv(x)))).mean((2, 3)))
        return logits


def trained(images: Tensor, labels: Tensor, seed: int) -> Residual:
    """Train by Adam on batches of 64, the rate falling to zero."""
    torch.manual_seed(seed)
    model = Residual(images.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, EPOCHS * -(-len(images) // 64))
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()
