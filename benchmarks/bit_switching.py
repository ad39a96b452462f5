"""One model of the digits CNN for 8, 6, 4 and 2 bits: ``python -m benchmarks.bit_switching --seeds 5``.

Each seed trains a network with stock PyTorch (``fxround.demo``), and then 20 epochs more by ``fxround.train_widths``:
all widths together with ALRS, without it, with HASB (threshold 0.5), and with widths drawn with equal probabilities,
and each width alone. Together, a batch makes a step for each width, alone one step. Weights are integers with a scale
for each output channel; activations are in float32. Alone, 2 bits begin with the better of the scales m and m / 2 for
the largest magnitude m of a channel, because m alone is a poor beginning. The figures are the accuracies on 500 test
images in percent, of which 0.2 are one image: means over the seeds, with the half width of their interval of 95 %
(Student's t). The differences are those of the same seed. ``mixtures`` are all 256 choices of a width for each of the
four layers: their mean, and the worst. ``--write`` stores them in benchmarks/results/bit_switching.json, after each
seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from itertools import product
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxround
from benchmarks.harness import conditions, table
from benchmarks.tables import RESULTS
from fxround import demo

WIDTHS = (8, 6, 4, 2)
EPOCHS = 20
TOGETHER: dict[str, dict[str, Any]] = {
    "together, ALRS": {},
    "together, without ALRS": {"adaptive": False},
    "HASB": {"threshold": 0.5},
    "equal draws": {"threshold": 0.5, "sensitive": False},
}
ALONE, STORED = "alone", "stored, not trained"
DIFFERENCES = [
    *((name, ALONE) for name in TOGETHER),
    ("together, ALRS", "together, without ALRS"),
    ("HASB", "together, ALRS"),
    ("HASB", "equal draws"),
]
COLUMNS = ["accuracy, %", *(f"{bits} bits" for bits in WIDTHS), "mixtures: mean", "mixtures: worst"]


def main() -> None:
    """Train, and print or store the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="store the figures under benchmarks/results")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    digits, figures, loads = demo.load_digits(), [], []
    for seed in range(chosen.seeds):
        loads.append(os.getloadavg()[0])
        figures.append(of_seed(digits, seed))
        print(f"seed {seed}: {figures[-1]}", flush=True)
        if chosen.write:
            path = RESULTS / "bit_switching.json"
            path.write_text(json.dumps({"bit-switching": stored(figures, loads)}, indent=1) + "\n", encoding="utf-8")
    print(table(COLUMNS, rows(figures)))


def of_seed(digits: demo.Digits, seed: int) -> dict[str, list[float]]:
    """Return the accuracies of one seed by the training: one for each width, then mean and worst of the mixtures."""
    loader = DataLoader(TensorDataset(*digits.train), demo.BATCH, shuffle=True)
    model, _ = demo.trained(digits, seed, lambda items, total, label: items)
    figures = {"float32": [accuracy(model, digits.test)] * len(WIDTHS)}
    figures[STORED] = served(fxround.store_integers(model, "int8:channel", loader, widths=WIDTHS), digits.test)
    settings: dict[str, Any] = {"epochs": EPOCHS, "seed": seed, "progress": False}
    for name, options in TOGETHER.items():
        together = fxround.train_widths(model, "int8:channel", loader, widths=WIDTHS, **settings, **options)
        figures[name] = served(together, digits.test)
    figures[ALONE] = []
    for bits in WIDTHS:
        policy = "int2:channel,fit=1:2" if bits == 2 else f"int{bits}:channel"
        alone = fxround.train_widths(model, policy, loader, widths=(bits,), adaptive=False, **settings)
        figures[ALONE].append(accuracy(alone, digits.test))
    return figures


def served(model: Any, test: tuple[Tensor, Tensor]) -> list[float]:
    """Return the accuracy in each width, and the mean and the worst one of all mixtures."""
    names, mixtures = list(model.switch.bits), []
    for widths in product(WIDTHS, repeat=len(names)):
        model.switch(dict(zip(names, widths, strict=True)))
        mixtures.append(accuracy(model, test))
    uniform = []
    for bits in WIDTHS:
        model.switch(bits)
        uniform.append(accuracy(model, test))
    return [*uniform, statistics.fmean(mixtures), min(mixtures)]


@torch.no_grad()
def accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """Return the share of test images with the right label, in percent."""
    images, labels = test
    return 100 * int((model.eval()(images).argmax(1) == labels).sum()) / len(labels)


def rows(figures: list[dict[str, list[float]]]) -> list[list[str]]:
    """Return the rows of the table: means over seeds, and of differences for the same seed."""
    made = [[name, *means([one[name] for one in figures])] for name in figures[0]]
    for name, other in DIFFERENCES:
        apart = [[a - b for a, b in zip(one[name], one[other], strict=False)] for one in figures]
        made.append([f"{name}, minus {other}", *means(apart, signed=True)])
    return made


def means(figures: list[list[float]], signed: bool = False) -> list[str]:
    """Return mean and half width of the interval of each column; empty for columns without figures."""
    cells = []
    for column in zip(*figures, strict=True):
        mean = f"{statistics.fmean(column):{'+' if signed else ''}.2f}"
        half = (
            stats.t.ppf(0.975, len(column) - 1) * statistics.stdev(column) / math.sqrt(len(column)) if column[1:] else 0
        )
        cells.append(f"{mean} ± {half:.2f}" if column[1:] else mean)
    return cells + [""] * (len(COLUMNS) - 1 - len(cells))


def stored(figures: list[dict[str, list[float]]], loads: list[float]) -> dict[str, Any]:
    """Return the table with its conditions, and the figures of each seed."""
    return {
        **conditions(
            f"python -m benchmarks.bit_switching --seeds {len(figures)}",
            loads,
            f", one thread, {len(figures)} seeds, mean ± half an interval of 95 %",
        ),
        "columns": COLUMNS,
        "numbers": list(range(1, len(COLUMNS))),
        "rows": rows(figures),
        "seeds": figures,
    }


if __name__ == "__main__":
    main()
