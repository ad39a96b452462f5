"""Predicted against sampled: how well one run and its derivatives foretell what a thousand samples measure.

    python -m benchmarks.attribution [--models mlp resnet18 ...] [--samples N] [--output attribution.json] [--write]

For each model, under ``"stochastic"``: the deviation of the result, predicted from one run, over that of N samples, and
the median of the same ratio over elements; the rank correlation of the variances of sites with those of N/50 samples in
which one site alone is rounded, and all else is computed in binary64; the processor time of an attribution without its
capture beside that of a plain stochastic run, of a backward pass, and of ``variability`` with ten samples, on one
thread (these alone with ``--samples 0``); and for ResNet-18 on
eight images of 128 x 128, in processes of their own, the memory of an attribution beside that of a training step. The
last three models are built so that derivatives say little: their reports must say so. ``--write`` stores the tables of
attribution.md under benchmarks/results; ``python -m benchmarks.tables`` writes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from benchmarks.harness import conditions, header, vision_operators
from benchmarks.tables import RESULTS
from fxround.attribution.states import is_float
from fxround.attribution.subject import Subject
from fxround.policy import Policy

Build = Callable[[], "Case"]


@dataclass(frozen=True)
class Case:
    """A model in eval mode, its inputs, and the function of the result that is attributed; None for all of it."""

    model: nn.Module
    inputs: Any
    output: Callable[[Any], Any] | None = None
    breaks: bool = False


class DigitsCNN(nn.Module):
    """conv, relu, pool, twice, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


class Sequence(nn.Module):
    """An LSTM over 32 steps and a classifier of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return self.head(y[:, -1])


class UNet(nn.Module):
    """Down, bottom, up, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU())
        self.bottom = nn.Sequential(nn.Conv2d(6, 12, 3, padding=1), nn.GroupNorm(2, 12), nn.SiLU())
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.out = nn.Sequential(nn.Conv2d(12, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.down(x)
        b = self.bottom(F.avg_pool2d(a, 2))
        return torch.sigmoid(self.out(torch.cat([self.up(b), a], 1)))


class Cancelling(nn.Module):
    """A quotient whose divisor is as large as its error: a sum with a large number from which that is subtracted."""

    def forward(self, x: Tensor) -> Tensor:
        return 1 / ((x + 1e6) - 1e6 - x + 0.05)


class Saturated(nn.Module):
    """A softmax that saturates, of two scores that only rounding errors distinguish."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.stack([x.sum(1), x.flip(1).sum(1)], 1) * 1e7, 1)


class AtZero(nn.Module):
    """A relu of sums that are zero but for rounding errors."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x) * torch.sin(x) + torch.cos(x) * torch.cos(x)
        return F.relu(y - 1.0)


def _mlp() -> Case:
    return Case(
        nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10)), torch.randn(8, 64)
    )


def _resnet() -> Case:
    vision_operators()
    import torchvision

    model = torchvision.models.resnet18(num_classes=10).eval()
    return Case(model, torch.randn(2, 3, 32, 32))


def _transformer() -> Case:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
    return Case(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 8, 32))


def _gpt2() -> Case:
    vision_operators()
    import transformers

    config = transformers.GPT2Config(vocab_size=200, n_positions=32, n_embd=48, n_layer=3, n_head=4)
    tokens = torch.randint(0, 200, (2, 16))
    model = transformers.GPT2LMHeadModel(config)
    return Case(model, {"input_ids": tokens, "labels": tokens, "use_cache": False}, lambda result: result.loss)


MODELS: dict[str, Build] = {
    "mlp": _mlp,
    "digits_cnn": lambda: Case(DigitsCNN(), torch.rand(8, 1, 8, 8)),
    "resnet18": _resnet,
    "transformer": _transformer,
    "lstm": lambda: Case(Sequence(), torch.randn(4, 32, 8)),
    "gpt2": _gpt2,
    "unet": lambda: Case(UNet(), torch.randn(1, 1, 12, 12)),
    "cancellation": lambda: Case(Cancelling(), torch.rand(64) + 1, breaks=True),
    "saturated": lambda: Case(Saturated(), torch.randn(8, 64), breaks=True),
    "relu_at_zero": lambda: Case(AtZero(), torch.randn(64), breaks=True),
}


def built(name: str) -> Case:
    """Return a case, with the same weights and inputs every time."""
    torch.manual_seed(7)
    case = MODELS[name]()
    case.model.eval()
    return case


def alone(subject: Subject, case: Case, site: str, samples: int) -> float:
    """Return the variance, summed over elements, of samples in which one node alone is rounded."""
    results = []
    for sample in range(samples):
        leaves, _ = subject.evaluated(exact=True, later=sample, rounded=(site,))
        made = pytree.tree_unflatten([leaf.double() for leaf in leaves], subject.spec)
        made = made if case.output is None else case.output(made)
        results.append(torch.cat([leaf.reshape(-1) for leaf in pytree.tree_leaves(made)]))
    return float(torch.stack(results).var(0).sum())


def seconds(*calls: Callable[[], object], passes: int = 11) -> list[float]:
    """Return the median processor time of calls, which take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(passes):
        for call, own in zip(calls, times, strict=True):
            started = time.process_time()
            call()
            own.append(time.process_time() - started)
    return [statistics.median(own) for own in times]


def costs(case: Case, subject: Subject) -> dict[str, float]:
    """Return the processor times of an attribution on one thread, beside those of a run and of ``variability``."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    row: dict[str, float] = {}
    run, states = subject.linearized(torch.Generator().manual_seed(0), (), ())
    result = torch.cat([state.derived.reshape(-1) for state in states if is_float(state.derived)])
    row["plain_s"], row["linearized_s"], row["backward_s"] = seconds(
        lambda: subject.evaluated(),
        lambda: subject.linearized(torch.Generator().manual_seed(0), (), ()),
        lambda: run.backward(result, torch.ones(result.numel())),
    )
    row["attribute_s"], row["variability_s"] = seconds(
        lambda: fxround.attribute(case.model, case.inputs, output=case.output),
        lambda: fxround.variability(
            case.model, case.inputs, samples=10, capture="layers", reference=None, progress=False
        ),
        passes=3,
    )
    torch.set_num_threads(threads)
    return row


def measured(name: str, samples: int) -> dict[str, Any]:
    """Return the figures of a model; its costs alone for no samples."""
    case = built(name)
    if not samples:
        subject = Subject.of(case.model, case.inputs, Policy.parse("stochastic"), None, None, 0, 0)
        return {"model": name} | ({} if case.breaks else costs(case, subject))
    report = fxround.attribute(case.model, case.inputs, output=case.output, check=samples)
    row: dict[str, Any] = {
        "model": name,
        "samples": samples,
        "deviation": report.deviation,
        "measured": report.measured,
    }
    row |= {"ratio": report.ratio, "uncertainty": report.uncertainty, "trusted": report.trusted, "bits": report.bits}
    row |= {"doubt": report.doubt, "layers": [layer.ratio for layer in report.layers], "sites": len(report.rows)}
    if case.breaks:
        return row
    subject = Subject.of(case.model, case.inputs, Policy.parse("stochastic"), None, None, 0, 0)
    variances = [(row.deviation**2, alone(subject, case, row.node, max(2, samples // 50))) for row in report.rows]
    row["rank_correlation"] = float(spearmanr(*zip(*variances, strict=True)).statistic)
    return row | costs(case, subject)


LABELS = {
    "mlp": "MLP",
    "digits_cnn": "digits CNN",
    "transformer": "transformer, 2 layers",
    "lstm": "LSTM, 32 steps",
    "gpt2": "GPT-2, 3 layers, its loss",
    "unet": "U-Net",
    "resnet18": "ResNet-18",
    "cancellation": "cancelled divisor",
    "saturated": "saturated softmax",
    "relu_at_zero": "relu at zero",
}
PREDICTED = ("model", "sites", "predicted", "samples", "ratio", "rank correlation", "trusted")
COSTS = (
    *("model", "a stochastic run, node by node, ms", "run with derivatives, ms", "backward pass, ms", "ratio"),
    *("ten samples of each layer by variability, with capture, s", "attribute, with capture, s"),
)


def predicted_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a model's prediction."""
    correlation = f"{row['rank_correlation']:.3f}" if "rank_correlation" in row else ""
    figures = [f"{row['deviation']:.3g}", f"{row['measured']:.3g}", f"{row['ratio']:.3f}", correlation]
    return [LABELS[row["model"]], str(row["sites"]), *figures, "yes" if row["trusted"] else "no"]


def cost_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a model's costs."""
    times = [f"{1000 * row[f'{name}_s']:.1f}" for name in ("plain", "linearized", "backward")]
    others = [f"{row[f'{name}_s']:.1f}" for name in ("variability", "attribute")]
    return [LABELS[row["model"]], *times, f"{row['linearized_s'] / row['plain_s']:.1f}", *others]


def stored(rows: list[dict[str, Any]], samples: int, loads: list[float]) -> dict[str, Any]:
    """Return the tables of results with their conditions."""
    told = conditions("python -m benchmarks.attribution" + ("" if samples else " --samples 0"), loads)
    timed = [cost_cells(row) for row in rows if "plain_s" in row]
    tables = {"attribution-cost": {"columns": list(COSTS), "numbers": [1, 2, 3, 4, 5, 6], "rows": timed} | told}
    if samples:
        columns = [f"{samples:,} samples" if name == "samples" else name for name in PREDICTED]
        cells = [predicted_cells(row) for row in rows]
        tables["attribution"] = {"columns": columns, "numbers": [1, 2, 3, 4, 5], "rows": cells} | told
    return tables


LARGE = (8, 3, 128, 128)


def peak(kind: str) -> int:
    """Return the bytes by which this process grows in an attribution of ResNet-18, or in a training step of it.

    Both are done with one small image first, so that captures and kernels do not count.
    """
    case = built("resnet18")
    compiled = fxround.compile(case.model, "stochastic")
    images = torch.randn(LARGE)

    def work(x: Tensor) -> None:
        if kind == "attribute":
            fxround.attribute(case.model, x, probes=1)
        else:
            compiled.train()(x).sum().backward()

    work(images[:2, :, :32, :32])
    case.model.zero_grad()
    # Linux forgets the largest size that the process had.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work(images)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Return a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def main() -> None:
    """Measure the models, print a table, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--output", type=Path, help="a JSON file for the rows")
    parser.add_argument("--write", action="store_true", help="store the tables under benchmarks/results")
    parser.add_argument("--peak", choices=["attribute", "train"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak(arguments.peak))
        return
    measured = header(["torch", "numpy", "fxround"])
    print(measured)
    rows, loads = [], [os.getloadavg()[0]]
    for name in arguments.models:
        row = measured(name, arguments.samples)
        if name == "resnet18":
            for kind in ("attribute", "train"):
                command = [sys.executable, "-m", "benchmarks.attribution", "--peak", kind]
                row[f"{kind}_bytes"] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps({"header": measured, "rows": rows}, indent=1) + "\n")
        loads.append(os.getloadavg()[0])
    if arguments.write:
        path = RESULTS / "attribution.json"
        known = json.loads(path.read_text(encoding="utf-8")) | stored(rows, arguments.samples, loads)
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
