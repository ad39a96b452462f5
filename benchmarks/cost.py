"""What a policy costs: time of a forward pass over stock eager PyTorch's, one thread each, in the same run.

python benchmarks/cost.py            # prints the README's table
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

import fxround
from fxround.demo import DigitsCNN

POLICIES = ("identity", "reproducible", "bfloat16", "stochastic", "up_down")
SECONDS = 3.0


class Block(nn.Module):
    """A residual block of ResNet's, two 3x3 convolutions with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, channels, h, w] to the same."""
        return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()


def models() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Name, model and input."""
    torch.manual_seed(0)
    yield "digits CNN, 500 images 8x8", DigitsCNN(), torch.rand(500, 1, 8, 8)
    yield (
        "2 residual blocks, 64 channels, 4 images 56x56",
        nn.Sequential(Block(64), Block(64)),
        torch.rand(4, 64, 56, 56),
    )
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    yield "2 transformer layers, width 256, 8x128", nn.TransformerEncoder(layer, 2), torch.rand(8, 128, 256)


def least(call: Callable[[], object]) -> float:
    """The least seconds of a call, of as many as fit SECONDS, three at least: what disturbs a clock only adds."""
    call()
    times: list[float] = []
    while len(times) < 3 or sum(times) < SECONDS:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"| model | stock | {' | '.join(POLICIES)} |\n|---|---|{'---|' * len(POLICIES)}")
    with torch.no_grad():
        for name, model, x in models():
            model.eval()
            stock = least(partial(model, x))
            ratios = [least(partial(fxround.compile(model, policy), x)) / stock for policy in POLICIES]
            print(f"| {name} | {1e3 * stock:.1f} ms | {' | '.join(f'{ratio:.1f}x' for ratio in ratios)} |", flush=True)


if __name__ == "__main__":
    main()
