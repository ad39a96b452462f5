"""Cost of a training step: forward, backward and SGD, compared with stock PyTorch in time, memory and compile time.

    python -m benchmarks.training                               # the tables of docs/performance.md, "A training step"
    python -m benchmarks.training --models mnist --threads 2    # some of them

Stock PyTorch is the eager model, loss, backward and ``torch.optim.SGD`` with its defaults. A policy's step is the
model compiled together with its loss, and a compiled SGD of the same policy. Steps of all are interleaved and medians
are taken: on one thread of the thread's own processor time, on more of wall time, which includes other processes.
Memory and compile time are those of a separate process; the peak is the greatest resident size of the whole process,
PyTorch and compiled code included, while it takes steps after the first three.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from benchmarks.harness import header, medians, table
from benchmarks.scale import MnistCNN, forget_peak, peak_megabytes
from fxround import Policy, Rule
from fxround.runtime.cpu.code import origins
from fxround.training import compile_optimizer

FP8 = Policy(
    "fp8, native contractions",
    (
        Rule(rounding="dtype", accumulate="native"),
        Rule(role="weight", direction="forward", rounding="e4m3fn/nearest_even/saturate", accumulate="native"),
        Rule(role="activation", rounding="e4m3fn/nearest_even/saturate", accumulate="native"),
        Rule(role="error", rounding="e5m2/nearest_even", accumulate="native"),
        Rule(role="gradient", direction="backward", rounding="e5m2/nearest_even", accumulate="native"),
    ),
)
# Policies, and the goal for a step's time as a multiple of stock PyTorch's.
POLICIES: dict[str, tuple[Policy, str]] = {
    "reproducible": (Policy.preset("reproducible"), "2"),
    "stochastic": (Policy.preset("stochastic"), "7"),
    "fp8": (FP8, "2"),
}
STOCK = "stock"


class Images(nn.Module):
    """PyTorch's MNIST example and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MnistCNN()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Map [n, 1, 28, 28] and classes [n] to a scalar."""
        return F.nll_loss(self.model(x), target)


class Language(nn.Module):
    """A causal language model over bytes: ``layers`` transformer layers (no dropout), and its loss."""

    def __init__(self, width: int = 256, layers: int = 4, length: int = 128) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Map bytes and their next bytes, both int64 [n, length], to a scalar."""
        y = self.layers(self.bytes(x) + self.places.weight, mask=self.mask)
        return F.cross_entropy(self.logits(self.norm(y)).flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Work:
    """A model with its loss, and arguments for a batch of n."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    batch: int


WORKS = {
    "mnist": Work("MNIST CNN, 64 images", Images, lambda n: (torch.rand(n, 1, 28, 28), torch.randint(10, (n,))), 64),
    "transformer": Work(
        "transformer of 4 layers, width 256, 8x128",
        Language,
        lambda n: (torch.randint(256, (n, 128)), torch.randint(256, (n, 128))),
        8,
    ),
}


class Training:
    """A model in training: ``step()`` takes one step on its own batch."""

    def __init__(self, work: Work, how: str) -> None:
        torch.manual_seed(0)
        self.work, self.model = work, work.build()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.module: nn.Module = self.model
        if how != STOCK:
            policy, _ = POLICIES[how]
            self.module = fxround.compile(self.model, policy)
            self.optimizer = compile_optimizer(self.optimizer, policy, model=self.model)
        self.inputs = work.inputs(work.batch)

    def step(self) -> None:
        """Run forward, backward, and the optimizer's step."""
        self.optimizer.zero_grad()
        self.module(*self.inputs).backward()
        self.optimizer.step()


def _ratios(work: Work, threads: int) -> list[str]:
    """Return stock PyTorch's milliseconds per step, and each policy's as a multiple."""
    torch.set_num_threads(threads)
    load = os.getloadavg()[0]
    steps = {how: Training(work, how).step for how in (STOCK, *POLICIES)}
    seconds = medians(steps, time.thread_time if threads == 1 else time.perf_counter)
    stock = seconds.pop(STOCK)
    return [f"{1e3 * stock:.1f}", *(f"{s / stock:.2f}" for s in seconds.values()), f"{load:.1f}"]


def measure(name: str, how: str, threads: int) -> dict[str, float]:
    """Measure this process: seconds of the first step beyond a later one, peak megabytes, kernels for a short batch."""
    torch.set_num_threads(threads)
    work = WORKS[name]
    times = [time.process_time()]
    training = Training(work, how)
    for _ in range(3):
        training.step()
        times.append(time.process_time())
    first, *later = (after - before for before, after in pairwise(times))
    forget_peak()
    for _ in range(3):
        training.step()
    peak = peak_megabytes()
    made = origins()
    training.inputs = work.inputs(work.batch // 2 + 1)
    training.step()
    new = sum(origins().values()) - sum(made.values())
    graphs = len(getattr(training.module, "_entries", {}))
    return {"compiling": first - min(later), "peak": peak, "kernels": new, "graphs": graphs}


def _in_a_process(name: str, how: str, threads: int, place: str) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.training", "--measure", name, how, str(threads)]
    environment = {**os.environ, "FXROUND_CACHE_DIR": place}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _costs(name: str, threads: int) -> Iterator[list[str]]:
    """Yield one row per policy: peak memory, compile time, and the kernels that a short last batch compiles."""
    with tempfile.TemporaryDirectory() as place:
        stock = _in_a_process(name, STOCK, threads, place)["peak"]
    for policy in POLICIES:
        with tempfile.TemporaryDirectory() as place:
            cold, warm = (_in_a_process(name, policy, threads, place) for _ in range(2))
        seconds = [f"{run['compiling']:.1f}" for run in (cold, warm)]
        memory = [f"{stock:.0f}", f"{cold['peak']:.0f}", f"{cold['peak'] / stock:.2f}"]
        yield [f"{WORKS[name].name}, {policy}", *memory, *seconds, f"{cold['graphs']:.0f}, {cold['kernels']:.0f}"]


def main() -> None:
    """Print the tables."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--times-only", action="store_true", help="leave out memory and compile time")
    options = parser.parse_args()
    print(header(("torch", "llvmlite", "fxround")))
    goals = [f"{name} (goal {goal})" for name, (_, goal) in POLICIES.items()]
    rows = [
        [f"{WORKS[name].name}, {threads} thread{'s' * (threads > 1)}", *_ratios(WORKS[name], threads)]
        for name in options.models
        for threads in options.threads
    ]
    print(table(["a step", "stock, ms", *goals, "load"], rows), flush=True)
    if options.times_only:
        return
    costs = [row for name in options.models for row in _costs(name, max(options.threads))]
    head = ["process", "stock's peak, MB", "peak, MB", "ratio (goal 1.5)", "first step, s: cold", "warm"]
    print(table([*head, "graphs, kernels for a short batch"], costs))


if __name__ == "__main__":
    main()
