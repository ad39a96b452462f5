"""Gain of fusion: chains of rounded operations compared with stock PyTorch, and with one kernel per operation.

python -m benchmarks.fusion            # prints the tables of docs/measurements.md, heading "Fusion"
python -m benchmarks.fusion memory     # the second one alone
python -m benchmarks.fusion epilogues  # the gain of running a contraction and the map after it as one
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

import fxround
from benchmarks.harness import header, medians, table, vision_operators
from fxround.runtime.schedule import schedule
from fxround.runtime.schedule.epilogues import Epilogue


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return function(x)."""
        return self.function(x)


class Tail(nn.Module):
    """The operations between the products of a transformer block: layer norm, gelu and the residual addition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, width] to the same shape."""
        return x + nn.functional.gelu(self.norm(x), approximate="tanh")


class Causal(nn.Module):
    """A softmax of scores of which those of later tokens are masked, as in attention: about a half."""

    mask: Tensor

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(tokens, tokens).triu(1).bool())

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, tokens] to the same shape; rows is a multiple of tokens."""
        scores = x.view(-1, *self.mask.shape).masked_fill(self.mask, float("-inf"))
        return torch.softmax(scores, -1)


# Name, module, rows and columns of the input, and the goals for the time as a multiple of stock PyTorch's:
# reproducible, stochastic.
CHAINS: tuple[tuple[str, nn.Module, tuple[int, int], str], ...] = (
    ("relu(x * 2 + 1), 4096x1024", Applied(lambda x: torch.relu(x * 2 + 1)), (4096, 1024), "-"),
    ("gelu(tanh), 1e6", nn.GELU(approximate="tanh"), (1000, 1000), "1.5, -"),
    ("softmax 4096x1024", nn.Softmax(-1), (4096, 1024), "1.2, 3.5"),
    ("softmax 4096x1024, a causal mask", Causal(1024), (4096, 1024), "-"),
    ("layer_norm 4096x1024", nn.LayerNorm(1024), (4096, 1024), "1.2, 5"),
    ("x + gelu(layer_norm(x)), 1024x1024", Tail(1024), (1024, 1024), "-, 4"),
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
    memory()


def memory() -> None:
    """Print the table of peak memory."""
    print("\nPeak memory of three calls, MB, over that of the process before them:")
    skipped = [name for name in MEMORY if name.startswith("resnet") and find_spec("torchvision") is None]
    rows = ((name, *(f"{_peak(name, how):.0f}" for how in HOW)) for name in MEMORY if name not in skipped)
    print(table(("one thread", *HOW), rows), flush=True)
    for name in skipped:
        print(f"{name}: left out, torchvision is not installed")


HOW = ("stock", "reproducible", "unfused", "stochastic")


def _resnet() -> nn.Module:
    vision_operators()
    import torchvision

    model: nn.Module = torchvision.models.resnet50()
    return model


MEMORY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "20 times x - mean(x), 1e7": (lambda: CHAINS[-1][1], (1000, 10000)),
    "x + gelu(layer_norm(x)), 8192x1024": (lambda: Tail(1024), (8192, 1024)),
    "TransformerEncoderLayer, 8x256x512": (
        partial(nn.TransformerEncoderLayer, 512, 8, batch_first=True),
        (8, 256, 512),
    ),
    "resnet50, 4 images": (_resnet, (4, 3, 224, 224)),
}


def _peak(name: str, how: str) -> float:
    """Return the peak memory of three calls in a fresh process, in MB."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.fusion", name, how]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure(name: str, how: str) -> None:
    """Print how far three calls raise this process's peak resident memory above its resident memory before, in MB."""
    torch.set_num_threads(1)
    build, shape = MEMORY[name]
    model = build().eval()
    x = torch.randn(shape)
    policy = "reproducible" if how in ("stock", "unfused") else how
    run = model if how == "stock" else fxround.compile(model, policy, fuse=how != "unfused")
    with torch.no_grad():
        run(x[:2])
        gc.collect()
        # Resets the peak to the present resident memory, so that it does not include compilation.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        for _ in range(3):
            run(x)
    print((_status("VmHWM") - before) / 1024)


def _status(key: str) -> int:
    """Return a line of this process's status, in KB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def epilogues() -> None:
    """Print the gain of running a contraction and the map after it as one."""
    torch.set_num_threads(1)
    rows = []
    rng = torch.zeros(2, dtype=torch.int64)
    for name in list(MEMORY)[2:]:
        build, shape = MEMORY[name]
        x = torch.randn(shape)
        for policy in HOW[1::2]:
            with torch.no_grad():
                entry = fxround.compile(build().eval(), policy, example_inputs=x)._called
                inputs = (*entry._inputs([x]), rng)
                apart = schedule(entry.fused, fuse=False)
                calls = {"joined": partial(entry.running, *inputs), "apart": partial(apart, *inputs)}
                seconds = medians(calls, time.thread_time)
            joined = sum(isinstance(module, Epilogue) for module in entry.running.modules())
            saved = 100 * (1 - seconds["joined"] / seconds["apart"])
            figures = (f"{joined}", *(f"{1e3 * seconds[how]:.0f} ms" for how in ("apart", "joined")), f"{saved:.1f} %")
            rows.append((f"{name}, {policy}", *figures))
    print(table(("one thread", "maps joined", "apart", "joined", "saved"), rows))


if __name__ == "__main__":
    if sys.argv[1:] == ["memory"]:
        memory()
    elif sys.argv[1:] == ["epilogues"]:
        epilogues()
    elif sys.argv[1:]:
        measure(*sys.argv[1:])
    else:
        main()
