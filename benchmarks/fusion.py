"""What fusion gains: chains of rounded operations beside stock PyTorch, and beside one kernel an operation.

python -m benchmarks.fusion            # prints the tables of docs/performance.md, heading "Fusion"
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import fxround
from benchmarks.harness import header, medians, table


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """function(x)."""
        return self.function(x)


class Tail(nn.Module):
    """What stands between the products of a transformer block: layer norm, gelu and the residual addition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        return x + nn.functional.gelu(self.norm(x), approximate="tanh")


# Name, module, rows and columns of the input, and what the time should be as a multiple of stock PyTorch's:
# reproducible, stochastic.
CHAINS: tuple[tuple[str, nn.Module, tuple[int, int], str], ...] = (
    ("relu(x * 2 + 1), 4096x1024", Applied(lambda x: torch.relu(x * 2 + 1)), (4096, 1024), "-"),
    ("gelu(tanh), 1e6", nn.GELU(approximate="tanh"), (1000, 1000), "1.5, -"),
    ("softmax 4096x1024", nn.Softmax(-1), (4096, 1024), "1.2, 3"),
    ("layer_norm 4096x1024", nn.LayerNorm(1024), (4096, 1024), "1.2, 3"),
    ("x + gelu(layer_norm(x)), 1024x1024", Tail(1024), (1024, 1024), "-, 2.5"),
    ("20 times x - mean(x), 1e7", Applied(lambda x: _steps(x)), (1000, 10000), "-"),
)


def _steps(x: Tensor) -> Tensor:
    for _ in range(20):
        x = x - x.mean(-1, keepdim=True)
    return x


def main() -> None:
    """Print the tables."""
    rows = []
    torch.set_num_threads(1)
    with torch.no_grad():
        for name, model, shape, goal in CHAINS:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            calls: dict[str, Callable[[], object]] = {"stock": partial(model.eval(), x)}
            for policy in ("reproducible", "stochastic"):
                for fuse in (True, False):
                    calls[f"{policy} {fuse}"] = partial(fxround.compile(model, policy, fuse=fuse), x)
            seconds = medians(calls, time.thread_time)
            stock = seconds.pop("stock")
            rows.append((name, goal, f"{1e3 * stock:.2f} ms", *(f"{s / stock:.2f}" for s in seconds.values())))
    print(header(("torch",)))
    columns = ("reproducible", "unfused", "stochastic", "unfused")
    print(table(("chain, one thread", "goal", "stock", *columns), rows))
    print("\nPeak memory of a process, MB, over that of the imports and the input (20 times x - mean(x), 1e7):")
    print(table(("stock", "reproducible", "unfused"), [[f"{_peak(how):.0f}" for how in ("stock", "fused", "unfused")]]))


def _peak(how: str) -> float:
    """What a fresh process needs at most for a few calls, in MB."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.fusion", how], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure(how: str) -> None:
    """Print the growth of this process's peak memory in three calls, in MB."""
    name, model, shape, _ = CHAINS[-1]
    x = torch.randn(shape)
    small = torch.randn(8, 16)
    compiled = fxround.compile(model, "reproducible", fuse=how == "fused")
    run: Callable[[Tensor], object] = model if how == "stock" else compiled
    with torch.no_grad():
        run(small)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(3):
            run(x)
    print(name, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
