"""Training in 8 bits: stochastic against nearest rounding, of tensors and of an optimizer's weights.

A small CNN is trained on scikit-learn's digits (1200 images for training, 597 for the test) by SGD with momentum.
Weights, activations, errors and gradients are e5m2, as in QPyTorch: products by the stock kernels, each tensor rounded
once, saturating, unscaled. Master weights, which the optimizer keeps, have 8 bits (e5m2) or 16 (six exponent bits,
precision 10), and are rounded at every update. Everything else, momentum and loss included, is binary32.

    python -m benchmarks.low_precision [--seeds 5] [--epochs 30] [--results FILE]

Ctrl-C prints the table of the finished trainings; with --results they are stored in FILE, from which the next run
continues.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from benchmarks.harness import header, table
from fxround import Policy, Rule
from fxround.training import RoundedOptimizer, compile_optimizer

TRAINING: Final = 1200
BATCH: Final = 64
RATE: Final = 0.05
MOMENTUM: Final = 0.9
TENSORS: Final = "e5m2"
MASTERS: Final = {"8": "e5m2", "16": "ieee(6,10)"}


@dataclass(frozen=True)
class Scheme:
    """The rounding of tensors (None: not at all), the bits of the master weights, and the rounding of an update."""

    tensors: str | None
    bits: str = "32"
    update: str = ""

    @property
    def name(self) -> str:
        """Text for the table."""
        tensors = f"8 bits, {self.tensors}" if self.tensors else "32 bits"
        return f"{tensors} | {self.bits} bits{f', {self.update}' if self.update else ''}"

    @property
    def policy(self) -> Policy:
        """The policy of the model and of its optimizer."""
        if self.tensors is None:
            return Policy.preset("identity")
        text = f"{TENSORS}/{MODES[self.tensors]}/saturate"
        rules = [
            Rule(rounding="dtype", accumulate="dtype"),
            Rule(operator="contraction", accumulate="native", optional=True),
            *(Rule(role=role, direction="forward", rounding=text) for role in ("weight", "activation")),
            *(Rule(role=role, direction="backward", rounding=text) for role in ("error", "gradient")),
        ]
        if self.update:
            held = f"{MASTERS[self.bits]}/{MODES[self.update]}/saturate"
            rules.append(Rule(role="weight", direction="update", rounding=held))
        return Policy(self.name, tuple(rules))


MODES: Final = {"nearest": "nearest_even", "SR": "stochastic"}
SCHEMES: Final = (
    Scheme(None),
    *(Scheme(tensors) for tensors in MODES),
    *(Scheme(tensors, bits, update) for tensors in MODES for bits in ("16", "8") for update in MODES),
)


class Net(nn.Module):
    """Two convolutions, a hidden layer, ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(32 * 4, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, 10) of images (N, 1, 8, 8)."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


@dataclass(frozen=True)
class Data:
    """Images (N, 1, 8, 8) from 0 to 1 and their digits; the first TRAINING are trained on."""

    images: Tensor
    digits: Tensor

    @staticmethod
    def load() -> Data:
        """Load the digits that are part of scikit-learn."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        return Data(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target))


class Trainer:
    """A scheme's model and optimizer, compiled once and trained from any seed."""

    def __init__(self, scheme: Scheme, data: Data) -> None:
        self.scheme, self.data = scheme, data
        self.net = Net()
        self.compiled = fxround.compile(self.net, scheme.policy)
        plain = torch.optim.SGD(self.net.parameters(), lr=RATE, momentum=MOMENTUM)
        self.optimizer: RoundedOptimizer = compile_optimizer(plain, scheme.policy)

    def start(self, seed: int) -> None:
        """Set the weights of a seed, in the scheme's format, and clear the state of an earlier training."""
        torch.manual_seed(seed)
        self.net.load_state_dict(Net().state_dict())
        if self.scheme.update:
            for p in self.net.parameters():
                p.data = fxround.round(p.data, f"{MASTERS[self.scheme.bits]}/nearest_even/saturate")
        self.optimizer.state.clear()
        self.optimizer.reseed(seed)
        self.compiled.reseed(seed)

    def train(self, seed: int, epochs: int) -> float:
        """Return the accuracy on the test images after the last epoch."""
        self.start(seed)
        self.compiled.train()
        shuffled = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            for batch in torch.randperm(TRAINING, generator=shuffled).split(BATCH):
                self.optimizer.zero_grad()
                F.cross_entropy(self.compiled(self.data.images[batch]), self.data.digits[batch]).backward()
                self.optimizer.step()
        self.compiled.eval()
        with torch.no_grad():
            predicted = self.compiled(self.data.images[TRAINING:]).argmax(1)
        return (predicted == self.data.digits[TRAINING:]).double().mean().item()


Results = dict[str, list[float]]


def trainings(results: Results, seeds: int, epochs: int) -> Iterator[tuple[Scheme, int]]:
    """Run the trainings missing in ``results``; yields scheme and seed before each training."""
    data = Data.load()
    for scheme in SCHEMES:
        done = results.setdefault(scheme.name, [])
        trainer = Trainer(scheme, data) if len(done) < seeds else None
        for seed in range(len(done), seeds):
            assert trainer is not None
            yield scheme, seed
            done.append(trainer.train(seed, epochs))


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table: accuracies in percent."""
    for scheme in SCHEMES:
        percents = [100 * accuracy for accuracy in results.get(scheme.name, ())]
        if not percents:
            continue
        tensors, master = scheme.name.split(" | ")
        deviation = statistics.stdev(percents) if len(percents) > 1 else float("nan")
        figures = (statistics.mean(percents), min(percents), max(percents), deviation)
        yield tensors, master, *(f"{value:.1f}" for value in figures), str(len(percents))


def run(results: Results, seeds: int, epochs: int, keep: Any) -> None:
    """Train with a progress bar; ``keep()`` is called after every training."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr)) as progress:
        task = progress.add_task("", total=len(SCHEMES) * seeds, completed=sum(map(len, results.values())))
        for scheme, seed in trainings(results, seeds, epochs):
            keep()
            done = sum(map(len, results.values()))
            progress.update(task, completed=done, description=f"{scheme.name}, seed {seed}")
        keep()


def main() -> None:
    """Train and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--results", type=Path, help="a JSON file that keeps what is done")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept: Results = json.loads(options.results.read_text()) if options.results and options.results.exists() else {}

    def keep() -> None:
        if options.results:
            options.results.write_text(json.dumps(kept, indent=1))

    began = time.process_time()
    try:
        run(kept, options.seeds, options.epochs, keep)
    except KeyboardInterrupt:
        print("interrupted: the table holds what is done", file=sys.stderr)
    print(f"{datetime.date.today()}, {header(('torch',))}, {time.process_time() - began:.0f} s of processor time")
    print(f"{options.epochs} epochs; accuracy in percent on {1797 - TRAINING} images; deviation over the seeds")
    columns = ("tensors", "master weights, update", "mean", "least", "most", "deviation", "seeds")
    print(table(columns, rows(kept)))


if __name__ == "__main__":
    main()
