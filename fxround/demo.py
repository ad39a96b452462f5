"""The demo: how many bits of a digit classifier survive the rounding of every operation.

A small CNN is trained on scikit-learn's handwritten digits with stock PyTorch; the same weights then run ``samples``
times over the test images under a policy. The demo reports accuracy, changed labels, significant bits of the logits and
of every layer, and the time compared with stock PyTorch in the same process. A sample is a function of (seed, sample):
the same command prints the same numbers, except times. Bits are CNH's lower bound, and an element whose samples are all
equal counts as no evidence.
"""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx, nn

from fxround.atomic_files import write_file
from fxround.module import compile
from fxround.module.rounded_module import RoundedModule
from fxround.policy import Policy
from fxround.significance.bits import require, significant_bits
from fxround.views.graph_views import summary

IMAGES: Final = 500
EPOCHS: Final = 12
BATCH: Final = 64
PRECISION: Final = 24
TIMED: Final = 5


class DigitsCNN(nn.Module):
    """Two convolutions with batch norm, pooling, and two linear layers: 8x8 images to 10 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(32)
        self.hidden = nn.Linear(32 * 4, 64)
        self.logits = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float32 images [n, 1, 8, 8] with values in 0..1 to float32 logits [n, 10]."""
        x = nn.functional.max_pool2d(self.norm1(self.conv1(x)).relu(), 2)
        x = nn.functional.avg_pool2d(self.norm2(self.conv2(x)).relu(), 2)
        y: torch.Tensor = self.logits(self.hidden(x.flatten(1)).relu())
        return y


@dataclass(frozen=True)
class Digits:
    """Images [n, 1, 8, 8] in 0..1 and labels [n], for training and for the test."""

    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Bits:
    """Significant bits over the elements of one value: mean, worst, and the number of elements with evidence."""

    mean: float | None
    worst: float | None
    evidence: int
    elements: int

    @staticmethod
    def of(samples: NDArray[Any]) -> Bits:
        """Compute the bits of samples of shape (n, ...)."""
        bits = significant_bits(samples, PRECISION)
        seen = bits[~np.isnan(bits)]
        mean, worst = (float(seen.mean()), float(seen.min())) if seen.size else (None, None)
        return Bits(mean, worst, int(seen.size), int(bits.size))


@dataclass(frozen=True)
class Demo:
    """The results of one run; ``layers`` maps a module path to the bits of its last value."""

    policy: str
    samples: int
    seed: int
    parameters: int
    trained_on: int
    images: int
    stock_accuracy: float
    accuracy: tuple[float, ...]
    changed: tuple[int, ...]
    bits: Bits
    layers: dict[str, Bits]
    agreement: float | None
    rounded: int
    unrounded: tuple[str, ...]
    seconds: dict[str, float]
    rows: tuple[tuple[Any, ...], ...] = field(repr=False, default=())

    @property
    def slowdown(self) -> float:
        """Time of a perturbed forward pass over time of a stock one, the least of each in the same run."""
        return self.seconds["perturbed"] / self.seconds["stock"]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the rows of the full table, with slowdown and the mean and spread of accuracy."""
        data = asdict(self)
        del data["rows"]
        spread = float(np.std(self.accuracy))
        return data | {
            "slowdown": self.slowdown,
            "accuracy_mean": float(np.mean(self.accuracy)),
            "accuracy_spread": spread,
        }

    def write_rows(self, path: Path) -> None:
        """Write the full table as CSV, one row per logit."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(("image", "label", "class", "stock", "mean", "sigma", "bits", "predicted"))
        writer.writerows(self.rows)
        write_file(path, text.getvalue())


def run(
    policy: str | Policy = "stochastic",
    samples: int = 10,
    seed: int = 0,
    progress: Callable[[Iterator[Any], int, str], Iterator[Any]] = lambda items, total, label: items,
    drawing: Path | None = None,
    device: torch.device | str = "cpu",
) -> Demo:
    """Train on the CPU, compile, sample on a device, and return the results.

    progress: wraps iterators that take time. drawing: a path for the graph. Raises ValueError for fewer than two
    samples, ImportError naming the extra for a missing package.
    """
    if samples < 2:
        raise ValueError(f"samples is {samples}: a spread needs at least 2 (10 or more are recommended)")
    chosen = Policy.parse(policy)
    digits = load_digits()
    model, training = trained(digits, seed, progress)
    model, images = model.to(device), digits.test[0].to(device)
    with torch.no_grad():
        started = time.perf_counter()
        for _ in progress(iter(range(1)), 1, "compiling"):
            compiled = compile(model, chosen, seed=seed)
            compiled(images)
        compiling = time.perf_counter() - started
        stock = model(images).cpu()
        values = [*progress(_samples(compiled, images, seed, samples), samples, f"{chosen.name}: {samples} samples")]
        seconds = {"training": training, "compiling": compiling} | _times(model, compiled, images)
    if drawing is not None:
        compiled.draw(drawing)
    return _found(chosen.name, seed, digits, compiled, stock, values, seconds)


def build(images: int = 100) -> tuple[DigitsCNN, torch.Tensor]:
    """Return the trained classifier and test images, for ``fxround variability fxround.demo:build``."""
    digits = load_digits()
    return trained(digits, 0, lambda items, total, label: items)[0], digits.test[0][:images]


def load_digits() -> Digits:
    """Return scikit-learn's digits (1,797 images, no download); the last 500 are the test and are not trained on."""
    images, labels = require("sklearn.datasets", "demo").load_digits(return_X_y=True)
    x = torch.from_numpy(images.astype(np.float32) / np.float32(16)).reshape(-1, 1, 8, 8)
    y = torch.from_numpy(labels.astype(np.int64))
    return Digits((x[:-IMAGES], y[:-IMAGES]), (x[-IMAGES:], y[-IMAGES:]))


def trained(
    digits: Digits, seed: int, progress: Callable[[Iterator[Any], int, str], Iterator[Any]]
) -> tuple[DigitsCNN, float]:
    """Return the CNN after a few epochs of stock PyTorch, in eval mode, and the seconds that it took.

    One thread trains: it is faster for small batches, and the weights do not depend on the number of cores.
    """
    started = time.perf_counter()
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        model = DigitsCNN()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for _ in progress(iter(range(EPOCHS)), EPOCHS, "training"):
            for batch in torch.randperm(len(digits.train[0])).split(BATCH):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(digits.train[0][batch]), digits.train[1][batch])
                loss.backward()
                optimizer.step()
    return model.eval(), time.perf_counter() - started


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _samples(
    compiled: RoundedModule, images: torch.Tensor, seed: int, samples: int
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Yield the logits and each layer's last value, sample by sample."""
    ends = layer_ends(compiled.graph)
    for sample in range(samples):
        compiled.reseed(seed, sample=sample)
        yield observe(compiled, images, ends)


def layer_ends(graph: fx.GraphModule) -> dict[str, str]:
    """Return the name of the last operation of every module but the root, by module path, in graph order."""
    return {str(row["module"]): str(row["node"]) for row in summary(graph) if row["module"]}


def observe(
    compiled: RoundedModule, images: torch.Tensor, ends: dict[str, str]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the result of a call, and the values of the nodes that ``ends`` names, under its keys."""
    wanted = {*ends.values(), "output"}
    seen = {name: value.cpu() for name, value in compiled.observe(images) if name in wanted}
    return seen["output"], {key: seen[node] for key, node in ends.items()}


def _times(model: nn.Module, compiled: RoundedModule, images: torch.Tensor) -> dict[str, float]:
    """Return seconds of a forward pass to a result on the CPU, with one thread: the least of many passes."""
    seconds = {"stock": math.inf, "perturbed": math.inf}
    with _one_thread():
        for name, call in (("stock", model), ("perturbed", compiled)) * TIMED:
            for _ in range(TIMED):
                started = time.perf_counter()
                call(images).cpu()
                seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds


def _found(
    name: str,
    seed: int,
    digits: Digits,
    compiled: RoundedModule,
    stock: torch.Tensor,
    values: list[tuple[torch.Tensor, dict[str, torch.Tensor]]],
    seconds: dict[str, float],
) -> Demo:
    labels = digits.test[1]
    logits = torch.stack([value for value, _ in values])
    predicted = logits.argmax(-1)
    changed = (predicted != stock.argmax(-1)).any(0).nonzero().flatten()
    layers = {path: Bits.of(np.stack([at[path].numpy() for _, at in values])) for path in values[0][1]}
    coverage = compiled.coverage()
    return Demo(
        policy=name,
        samples=len(values),
        seed=seed,
        parameters=sum(p.numel() for p in compiled.parameters()),
        trained_on=len(digits.train[0]),
        images=len(labels),
        stock_accuracy=_accuracy(stock.argmax(-1), labels),
        accuracy=tuple(_accuracy(row, labels) for row in predicted),
        changed=tuple(changed.tolist()),
        bits=Bits.of(logits.numpy()),
        layers=layers,
        agreement=_agreement(logits, stock),
        rounded=sum(int(row["nodes"] or 0) for row in coverage if row["status"] == "rounded"),
        unrounded=coverage.unrounded,
        seconds=seconds,
        rows=tuple(_rows(labels, stock, logits)),
    )


def _accuracy(predicted: torch.Tensor, labels: torch.Tensor) -> float:
    return 100 * float((predicted == labels).double().mean())


def _agreement(logits: torch.Tensor, stock: torch.Tensor) -> float | None:
    """Return the leading bits that the samples' mean shares with the stock result, averaged; None if equal."""
    mean, stock = logits.double().mean(0), stock.double()
    bits = -torch.log2(((mean - stock) / stock).abs())
    apart = bits[mean != stock].clamp(0, PRECISION)
    return float(apart.mean()) if len(apart) else None


def _rows(labels: torch.Tensor, stock: torch.Tensor, logits: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    bits = significant_bits(logits.numpy(), PRECISION)
    mean, sigma = logits.double().mean(0), logits.double().std(0, correction=0)
    predicted = [sorted(set(column)) for column in logits.argmax(-1).T.tolist()]
    for (image, label), significant in zip(np.ndindex(*bits.shape), bits.flat, strict=True):
        evidence = "" if np.isnan(significant) else f"{significant:.2f}"
        value, middle, spread = stock[image, label], mean[image, label], sigma[image, label]
        classes = " ".join(map(str, predicted[image]))
        yield image, int(labels[image]), label, f"{value:.9g}", f"{middle:.12g}", f"{spread:.6g}", evidence, classes
