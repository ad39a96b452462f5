"""Cost of a policy: time of a forward pass over stock eager PyTorch's, in the same run.

One thread each; the time is the thread's own processor time.

python -m benchmarks.cost            # prints the README's table
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import thread_time

import torch
from torch import nn

import fxround
from benchmarks.harness import header, medians, table
from fxround.demo import DigitsCNN

POLICIES = ("identity", "reproducible", "bfloat16", "stochastic", "up_down")


class Block(nn.Module):
    """A residual block of ResNet: two 3x3 convolutions with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, channels, h, w] to the same shape."""
        return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()


def models() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Yield name, model and input."""
    torch.manual_seed(0)
    yield "digits CNN, 500 images 8x8", DigitsCNN(), torch.rand(500, 1, 8, 8)
    yield (
        "2 residual blocks, 64 channels, 4 images 56x56",
        nn.Sequential(Block(64), Block(64)),
        torch.rand(4, 64, 56, 56),
    )
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    yield "2 transformer layers, width 256, 8x128", nn.TransformerEncoder(layer, 2), torch.rand(8, 128, 256)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = []
    with torch.no_grad():
        for name, model, x in models():
            calls = {"stock": partial(model.eval(), x)}
            calls |= {policy: partial(fxround.compile(model, policy), x) for policy in POLICIES}
            seconds = medians(calls, thread_time)
            ratios = (f"{seconds[policy] / seconds['stock']:.1f}x" for policy in POLICIES)
            rows.append((name, f"{1e3 * seconds['stock']:.1f} ms", *ratios))
    print(header(("torch",)))
    print(table(("model", "stock", *POLICIES), rows))


if __name__ == "__main__":
    main()
