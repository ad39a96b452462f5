"""A format for each layer of the digits CNN and of a two-layer transformer: ``python -m benchmarks.tuning``.

The CNN is trained with stock PyTorch (``fxround.demo``, seed 0); the data are its 500 test images in batches of 100.
The transformer has random weights (seed 0), two encoder layers of width 64, 4 heads and 128 hidden units between an
embedding of 32 tokens and a head; the data are a batch of 16 x 24 tokens. Searches have the defaults of
``fxround.tune``. Beside each result is the model with all layers in the finest format. ``--write`` stores the figures
in benchmarks/results/tuning.json, after each search.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
from torch import Tensor, nn

import fxround
from benchmarks.harness import conditions, table
from benchmarks.tables import RESULTS
from fxround import demo

COLUMNS = (
    *("model, metric", "without roundings", "budget", "formats", "metric", "bits a weight", "finest: metric"),
    *("finest: bits", "assignments", "passes", "attributions", "proved"),
)
INTEGERS = ("bfloat16", "int4:channel", "int3:channel")
BLOCKS = ("bfloat16", "mxfp8", "mxfp4")


class Transformer(nn.Module):
    """Two encoder layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape [n, time, 32]."""
        logits: Tensor = self.head(self.encoder(self.embed(tokens)))
        return logits


def main() -> None:
    """Search, and print or store the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the figures under benchmarks/results")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    loads: list[float] = []
    for asked in searches():
        loads.append(os.getloadavg()[0])
        rows.append(row_of(fxround.tune(*asked, progress=False)))
        loads.append(os.getloadavg()[0])
        print(table(COLUMNS, rows), flush=True)
        if chosen.write:
            text = json.dumps({"tuning": stored(rows, loads)}, indent=1)
            (RESULTS / "tuning.json").write_text(text + "\n", encoding="utf-8")


def searches() -> Any:
    """Yield the arguments of each search."""
    torch.manual_seed(0)
    yield Transformer().eval(), (torch.randint(0, 32, (16, 24)),), "sqnr", ">= 25", BLOCKS
    digits = demo.load_digits()
    model, _ = demo.trained(digits, 0, lambda items, total, label: items)
    data = list(zip(digits.test[0].split(100), digits.test[1].split(100), strict=True))
    yield model, data, "kl", "<= 0.02", INTEGERS
    yield model, data, "accuracy", 0.005, INTEGERS


def row_of(report: fxround.TuningReport) -> list[str]:
    """Return the cells of a search."""
    finest = next(one for one in report.evaluated if set(one.trial.formats) == {report.base})
    proved = {"all": "all ran", "monotone": "monotone", "": "no"}[report.proved]
    return [
        *(f"{report.model}, {report.metric}", f"{report.unrounded:.4g}", report.goal, ", ".join(report.formats)),
        *(f"{report.value:.4g}", f"{report.bits:.2f}", f"{finest.trial.value:.4g}", f"{finest.bits:.2f}"),
        *(str(len(report.evaluated)), str(report.passes), str(report.attributions), proved),
    ]


def stored(rows: list[list[str]], loads: list[float]) -> dict[str, Any]:
    """Return the table of results with its conditions."""
    return {
        "columns": list(COLUMNS),
        "numbers": [1, 4, 5, 6, 7, 8, 9, 10],
        "rows": rows,
        **conditions("python -m benchmarks.tuning", loads, ", one thread"),
    }


if __name__ == "__main__":
    main()
