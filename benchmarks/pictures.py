"""The pictures of the documents, drawn by fxround: ``python -m benchmarks.pictures [NAME ...]`` writes docs/pictures.

Weights and inputs are fractions of small integers and the roundings are fxround's, so that every machine draws the
same text. A picture has a white background of its own and can be read on a light page and on a dark one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import torch
from torch import Tensor, nn

import fxround
from fxround.significance.report.drawing import drawing
from fxround.views.graph_views import STATUS_COLOURS
from fxround.views.svg import Legend, svg

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"


def fractions(shape: tuple[int, ...], *, step: int, of: int, over: int) -> Tensor:
    """Return float32 numbers k/over, |k| <= of // 2, in an order without a short pattern; each is rounded once."""
    numbers = torch.arange(torch.Size(shape).numel()) * step % of - of // 2
    return (numbers / over).reshape(shape)


class Classifier(nn.Module):
    """Sixty-four numbers to the probabilities of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        with torch.no_grad():
            self.linear.weight.copy_(fractions((10, 64), step=37, of=101, over=101))
            self.linear.bias.copy_(fractions((10,), step=3, of=11, over=7))

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [n, 64] to float32 [n, 10]."""
        return torch.softmax(self.linear(x), 1)


def roundings() -> str:
    """Return a classifier as PyTorch runs it, beside the operations of fxround with the bits that survive them."""
    model, x = Classifier().eval(), fractions((16, 64), step=29, of=97, over=6)
    report = fxround.variability(model, x, samples=10, capture="nodes", metrics=(), reference=None)
    after = drawing(report, step=2, title="fxround: every rounding, and the bits that survive", columns=2)
    return beside(_kernels(model, x), plain(after))


def plain(text: str) -> str:
    """Return a drawing without tooltips, which name lines of this file, and with n for PyTorch's name of a size."""
    return re.sub(r"\[s\d+", "[n", re.sub(r"<title>.*?</title>", "", text, flags=re.DOTALL))


def _kernels(model: nn.Module, x: Tensor) -> str:
    """Return a drawing of the kernels that PyTorch calls."""
    graph = nx.DiGraph()
    for node in torch.export.export(model, (x,)).graph.nodes:
        if node.op == "placeholder" and node.target != "x":
            continue
        lines = {"placeholder": ["argument 0", f"float32[n, {x.shape[1]}]"], "output": ["result"]}
        shown = lines.get(node.op) or [str(node.target).split(".")[1], "stock kernel"]
        fill, stroke = STATUS_COLOURS[{"placeholder": "input", "output": "output"}.get(node.op, "native")]
        colours = {"fill": fill, "stroke": stroke, "stripe": ""}
        graph.add_node(node.name, lines=shown, title=shown[0], input=node.op == "placeholder", **colours)
        graph.add_edges_from((used.name, node.name) for used in node.all_input_nodes if used.name in graph)
    return svg(graph, Legend("PyTorch", (("roundings inside of a kernel", *STATUS_COLOURS["native"]),), columns=1))


def beside(*drawings: str) -> str:
    """Return one SVG text of drawings from left to right."""
    sizes = [tuple(float(part.split('"')[1]) for part in text.split()[2:4]) for text in drawings]
    width, height = sum(w for w, _ in sizes), max(h for _, h in sizes)
    parts, left = [], 0.0
    for text, (w, _) in zip(drawings, sizes, strict=True):
        parts.append(text.strip().replace("<svg ", f'<svg x="{left:.0f}" ', 1))
        left += w
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    background = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{background}{"".join(parts)}</svg>\n'


PICTURES: dict[str, Callable[[], str]] = {"roundings": roundings}


def main() -> None:
    """Write the pictures that are named on the command line; all of them where none is."""
    FOLDER.mkdir(exist_ok=True)
    names = sys.argv[1:] or list(PICTURES)
    if unknown := [name for name in names if name not in PICTURES]:
        sys.exit(f"no picture is named {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    for name in names:
        (FOLDER / f"{name}.svg").write_text(PICTURES[name](), encoding="utf-8")
        print(FOLDER / f"{name}.svg", flush=True)


if __name__ == "__main__":
    main()
