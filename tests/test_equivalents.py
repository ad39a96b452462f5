"""docs/from-*.md: no row is left out, and rows that say equal have the results that were compared with the peers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.equivalents import MODULES, STORED, Equivalent, equivalents

DOCS = Path(__file__).parents[1] / "docs"
ROWS = list(equivalents())
# Rows that say something else than equal: modes that draw or that differ, models, and what peers lack.
OTHERS = {
    "pychop": (
        "`rmode=0`",
        "`rmode=5`",
        "`rmode=7`",
        "`rmode=9`",
        "no acc",
        "`p3109_quantize",
        "`FaultChop",
        "`subnormal",
        "`post_quantization",
    ),
    "qpytorch": (
        '`float_quantize(x, exp, man, rounding="stochastic',
        "`Quantizer",
        "`OptimLP",
        "no acc",
        "quantizers",
        "`examples/WAGE",
    ),
    "microxcaling": ("`MxSpecs",),
}


def first_cells(page: str) -> list[str]:
    text = (DOCS / f"from-{page}.md").read_text()
    return re.findall(r"^\| ((?!\s*\|)[^|]*) \|", text, re.MULTILINE)[1:]


@pytest.mark.parametrize("page", MODULES)
def test_every_row_of_a_table_is_compared_or_says_something_else(page: str) -> None:
    known = {row.row for row in ROWS if row.page == page} | set(OTHERS[page])
    cells = first_cells(page)
    assert len(cells) > 5
    for cell in cells:
        assert any(cell.startswith(start) for start in known), cell
    for start in known:
        assert any(cell.startswith(start) for cell in cells), start


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_results_are_those_that_were_compared_with_the_peer(row: Equivalent) -> None:
    x, stored = row.numbers(), json.loads(STORED.read_text())[row.name]
    found = row.digests(x)
    # PyTorch draws the same normal deviates with AVX2 and with AVX-512.
    assert found["x"] == stored["x"], "PyTorch drew other numbers: run benchmarks.equivalents --write beside the peers"
    assert found["ours"] == stored["ours"]
    if row.installed():
        assert row.differing(x) <= row.most


def test_no_row_is_stored_that_is_gone() -> None:
    assert list(json.loads(STORED.read_text())) == [row.name for row in ROWS]
