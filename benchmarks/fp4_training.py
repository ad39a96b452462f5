"""Training in FP4: choices of scales, tensor scaling, Hadamard transform and stochastic rounding on two small models.

    python -m benchmarks.fp4_training                        # all policies, two models; ten minutes on two free cores
    python -m benchmarks.fp4_training --write                # also replace the stored figures and pictures
    python -m benchmarks.fp4_training --models digits --seeds 8 --jobs 1 --folder rows      # resumes what rows/ has

The base rounds the operands of products, forward and backward, to e2m1fn in blocks of 16; the first and the last layer,
attention, norms and the optimizer stay in float32. The models are the digits CNN (scikit-learn's digits, 1,297 for
training and 500 for the test) and a transformer of characters (a layer of width 64 on Python's own documentation,
``pydoc_data.topics``, of which the last tenth is the test). The metric is the loss of the test data in nats, evaluated
under the policy. Each seed gives weights and batches, the same for all policies.

``overhead`` counts the operations that a policy adds for each value that it rounds, in the products of one training
step. Each value takes part in the maximum of its block (1 operation), is multiplied by the inverse scale (1) and is
rounded (1); a block takes a division and a rounding for its scale (2). Tensor scaling takes a further maximum for each
value (1) and a multiplication for each block (1); stochastic rounding adds random bits to a value (1); the Hadamard
transform of n values takes log2(n) additions and a change of the sign for each (log2(n) + 1).
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import sys
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from benchmarks.harness import conditions, header
from fxround import Policy, Rule, demo
from fxround.capture.leftovers import computed_once
from fxround.graph.dialect import BlockExpand, Pointwise, graphs_of, read
from fxround.graph.site import float_value, site
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.policy.policy import of_operands
from fxround.significance.bits import student_half_width
from fxround.tuning.sweep_report import UNROUNDED

RESULTS: Final = Path(__file__).parent / "results" / "fp4_training.json"
PICTURES: Final = Path(__file__).parents[1] / "docs" / "pictures"
AXES: Final[Mapping[str, Any]] = {
    "scale": ["e4m3fn", "ue5m3", "e8m0fnu"],
    "tensor": {"absolute": False, "tensor": True},
    "hadamard": {"plain": None, "Hadamard": 16},
    "errors": {"RNE": "nearest_even", "SR": "stochastic"},
}
TEXT: Final = 200_000
LENGTH: Final = 64


def base(kept: str) -> Policy:
    """Return the policy that the axes vary; kept: a glob of modules that stay as they are."""
    rounded = Rule(operands="scaled(e2m1fn;16,e4m3fn,nearest)")
    return of_operands("fp4", rounded, *(Rule(glob, operands="identity") for glob in kept.split()))


@cache
def digits() -> demo.Digits:
    """Return the images."""
    return demo.load_digits()


@cache
def text() -> tuple[Tensor, Tensor, int]:
    """Return the numbers of the characters for training and test, and how many different ones there are."""
    topics = pydoc_data.topics.topics
    whole = "\n".join(topics[name] for name in sorted(topics))[:TEXT]
    letters = sorted(set(whole))
    numbers = torch.tensor([letters.index(letter) for letter in whole])
    end = 9 * len(numbers) // 10
    return numbers[:end], numbers[end:], len(letters)


class Attention(nn.Module):
    """Causal attention of [n, heads, time, width] tensors."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Layer(nn.Module):
    """A layer of a transformer, with norms before attention and feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, time, width] to the same shape."""
        n, time_, width = x.shape
        q, k, v = (
            part.reshape(n, time_, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).reshape(n, time_, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Characters(nn.Module):
    """A transformer that predicts characters: [n, time] numbers to logits [n, time, letters]."""

    def __init__(self, letters: int, width: int = 64, heads: int = 4, layers: int = 1) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next characters."""
        y = self.embed(x) + self.place(torch.arange(x.shape[1]))
        for layer in self.layers:
            y = layer(y)
        logits: Tensor = self.head(self.norm(y))
        return logits


def make_digits(seed: int) -> nn.Module:
    """Return the CNN; PyTorch's generator has the seed."""
    return demo.DigitsCNN()


def train_digits(compiled: Any, seed: int, epochs: int = 6) -> dict[str, float]:
    """Train by Adam on all images in batches of 64; returns loss and accuracy of the test images."""
    images, labels = digits().train
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(compiled.parameters(), lr=2e-3)
    compiled.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=generator).split(64)[:-1]:  # the last one is short
            optimizer.zero_grad()
            F.cross_entropy(compiled(images[batch]), labels[batch]).backward()
            optimizer.step()
    compiled.eval()
    with torch.no_grad():
        logits = compiled(digits().test[0])
    loss = float(F.cross_entropy(logits, digits().test[1]))
    return {"loss": loss, "accuracy": float((logits.argmax(1) == digits().test[1]).double().mean())}


def make_text(seed: int) -> nn.Module:
    """Return the transformer; PyTorch's generator has the seed."""
    return Characters(text()[2])


def train_text(compiled: Any, seed: int, steps: int = 120) -> dict[str, float]:
    """Train by AdamW on 8 pieces of the text a step, the rate falling to zero; returns the loss of the test text."""
    train, test, _ = text()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    compiled.train()
    for _ in range(steps):
        starts = torch.randint(len(train) - LENGTH - 1, (8, 1), generator=generator)
        pieces = train[starts + torch.arange(LENGTH + 1)]
        optimizer.zero_grad()
        F.cross_entropy(compiled(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()
    compiled.eval()
    whole = test[: len(test) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)[:128]
    with torch.no_grad():
        logits = compiled(whole[:, :-1])
    return {"loss": float(F.cross_entropy(logits.flatten(0, 1), whole[:, 1:].flatten()))}


# Function of a seed, training, modules that stay in float32, and the argument of a step for the overhead.
MODELS: Final[Mapping[str, Any]] = {
    "digits": (make_digits, train_digits, "conv1 logits", lambda: digits().train[0][:64]),
    "text": (make_text, train_text, "*attention* head", lambda: text()[0][: 8 * LENGTH].reshape(8, LENGTH)),
}


def overhead(compiled: fxround.RoundedModule) -> float:
    """Return the operations for each value that the products of a captured training step round."""
    values, count = 0.0, 0.0
    for graph in graphs_of(compiled.lowered):
        for node in graph.graph.nodes:
            place, call, value = site(node), read(node), float_value(node)
            rounding = place.assignment.scaled if place is not None and place.assignment is not None else None
            if rounding is None or not isinstance(call, Pointwise) or value is None:
                continue
            scales = [expand.scales for x in call.xs[1:] if isinstance(expand := read(x), BlockExpand)]
            if not scales or call.xs[0] is None:
                continue
            elements, blocks = value.numel(), float_value(scales[0])
            assert blocks is not None
            values += elements
            count += elements * _of_value(rounding) + blocks.numel() * _of_block(rounding)
    return count / values


def _of_value(rounding: ScaledRounding) -> float:
    scaling = rounding.format.scaling
    transform = 0.0 if rounding.hadamard is None else math.log2(rounding.hadamard.size) + 1
    return 3 + transform + (not rounding.mode.deterministic) + (scaling is not None and scaling.whole is not None)


def _of_block(rounding: ScaledRounding) -> float:
    scaling = rounding.format.scaling
    return 2 + (scaling is not None and scaling.whole is not None)


def overheads(make: Any, example: Tensor, policies: Mapping[str, Policy]) -> dict[str, float]:
    """Return the overhead of each policy of a sweep."""
    whole = fxround.compile(make(0), "identity").train().prepare(example)
    counted = {}
    with computed_once():
        for name, policy in policies.items():
            counted[name] = float(overhead(whole.with_policy(policy).prepare(example)))
    return counted


def main() -> None:
    """Print a table, the effects and the best policies of each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3, help="how many (default 3)")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, one thread each (default 2)")
    parser.add_argument("--folder", type=Path, help="folder of files with what has run, which another run resumes")
    parser.add_argument("--write", action="store_true", help="replace the stored figures and pictures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(header(("torch", "scikit-learn", "numpy")), flush=True)
    stored: dict[str, Any] = {}
    for name in arguments.models:
        make, train, kept, example = MODELS[name]
        began = time.perf_counter()
        path = None if arguments.folder is None else arguments.folder / f"{name}.json"
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        asked = {
            "train": train,
            "model": make,
            "seeds": arguments.seeds,
            "n_jobs": arguments.jobs,
            "path": path,
        }
        report = fxround.sweep(base(kept), AXES, **asked)
        seconds = time.perf_counter() - began
        counted = overheads(make, example(), report.sweep)
        print(
            f"\n{name}\n{report}\n\n{report.effects('loss')}\n\n{trade_offs(report, counted)}\n{seconds:.0f} s",
            flush=True,
        )
        if report.interrupted:
            sys.exit(130)
        stored |= tables_of(name, report, counted)
        if arguments.write:
            label = "overhead: operations for each rounded value"
            report.plot(counted, PICTURES / f"fp4_{name}.svg", metric="loss", label=label)
    if arguments.write:
        held = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**held, **stored}, indent=1) + "\n")


def trade_offs(report: fxround.SweepReport, counted: Mapping[str, float]) -> str:
    """Return the policies by overhead of which none with less or equal overhead has a smaller mean loss."""
    lines = ["overhead  loss    no policy of less or equal overhead has a smaller mean loss"]
    for name in report.frontier(counted, "loss"):
        losses = report.values(name, "loss").values()
        said = " ".join(report.sweep.choices[name].values())
        lines.append(f"{counted[name]:8.2f}  {sum(losses) / len(losses):.4f}  {said}")
    return "\n".join(lines)


def tables_of(name: str, report: fxround.SweepReport, counted: Mapping[str, float]) -> dict[str, Any]:
    """Return what is stored of a model: a row for each policy, with the losses of the seeds, and the effects."""
    told = conditions("python -m benchmarks.fp4_training")
    rows = []
    for policy in (UNROUNDED, *report.sweep):
        label = " ".join(report.sweep.choices[policy].values()) if policy != UNROUNDED else "float32, unrounded"
        cells = [_interval(report.values(policy, metric).values()) for metric in report.metrics]
        losses = ", ".join(f"{loss:.3f}" for loss in report.values(policy, "loss").values())
        rows.append([label, f"{counted[policy]:.2f}" if policy in counted else "", *cells, losses])
    effects = [
        [str(row["axis"]), str(row["change"]), f"{row['loss']:+.3f} ± {row['±']:.3f}", str(row["pairs"])]
        for row in report.effects("loss")
    ]
    columns = ["scale, tensor scaling, Hadamard, errors", "overhead", *report.metrics, "losses by seed"]
    return {
        f"fp4-{name}": {**told, "columns": columns, "numbers": [1], "rows": rows},
        f"fp4-{name}-effects": {
            **told, "columns": ["axis", "change", "loss", "pairs"], "numbers": [3], "rows": effects,
        },
    }  # fmt: skip


def _interval(values: Iterable[float]) -> str:
    """Return mean and half of Student's interval."""
    numbers = list(values)
    half = student_half_width(numbers)
    return f"{sum(numbers) / len(numbers):.3f}" + ("" if half is None else f" ± {half:.3f}")


if __name__ == "__main__":
    # The workers import the functions of this module by its name.
    from benchmarks import fp4_training

    fp4_training.main()
