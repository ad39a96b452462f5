"""Models whose weights are rounded: several kinds of layers, and those that cannot be rounded by themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxround.policy import Policy, Rule
from fxround.policy.policy import of_operands


class Mixed(nn.Module):
    """A convolution of groups, a transposed one, an attention layer and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.Conv1d(4, 8, 3, padding=1, groups=2)
        self.back = nn.ConvTranspose1d(8, 8, 3, groups=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.back(self.groups(x)).transpose(1, 2)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        result: Tensor = self.head(y.mean(1))
        return result


class Shared(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


class Unreached(nn.Module):
    """A linear layer, and a spare one."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(width, 8), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5))


def rows(count: int = 32) -> Tensor:
    return torch.randn(count, 24, generator=torch.Generator().manual_seed(1))


def only_weights(text: str) -> Policy:
    return of_operands(f"weights {text}", Rule(role="weight", operands=text))
