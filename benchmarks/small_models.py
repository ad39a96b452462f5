"""Time of a call that is Python's alone, for models of a few hundred numbers, on one thread.

python -m benchmarks.small_models
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import nn

import fxround
from benchmarks.harness import header, table

POLICIES = ("identity", "reproducible", "stochastic", "up_down", "bfloat16")
CALLS, TIMES = 300, 9


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [1, 4, 16] to the same shape."""
        q, k, v = (part.reshape(4, 4, 4).transpose(0, 1) for part in self.heads(self.norm(x)).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-1, -2) / 2, -1)
        return x + self.out((weights @ v).transpose(0, 1).reshape(1, 4, 16))


def _mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.Tanh())))


def _cnn() -> nn.Module:
    first, second = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "5 linear layers with tanh, 16 numbers, batch of 1": (_mlp, (1, 16)),
    "attention of 4 heads with a norm, 4 tokens of 16 numbers": (_Attention, (1, 4, 16)),
    "2 convolutions of 8 channels, 1 image 8x8": (_cnn, (1, 1, 8, 8)),
}


def microseconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call: the processor time of the thread."""
    for _ in range(20):
        call()
    times = []
    for _ in range(TIMES):
        began = thread_time()
        for _ in range(CALLS):
            call()
        times.append((thread_time() - began) / CALLS * 1e6)
    return median(times)


@torch.no_grad()
def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(header(["torch"]))
    rows = []
    for name, (build, shape) in MODELS.items():
        torch.manual_seed(0)
        model, x = build().eval(), torch.rand(shape)
        calls = [model, *(fxround.compile(model, policy, seed=0) for policy in POLICIES)]
        rows.append([name, *(f"{microseconds(partial(call, x)):.0f}" for call in calls)])
    print(table(["us a call", "stock", *POLICIES], rows))


if __name__ == "__main__":
    main()
