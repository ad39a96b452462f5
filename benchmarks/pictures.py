"""The pictures of the documents, drawn by fxround: ``python -m benchmarks.pictures [NAME ...]`` writes docs/pictures.

Weights and inputs are fractions of small integers and the roundings are fxround's, so that every machine draws the
same text. A picture has a white background of its own and can be read on a light page and on a dark one.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from html import escape
from itertools import pairwise
from pathlib import Path

import networkx as nx
import torch
from torch import Tensor, nn

import fxround
from fxround import demo
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.specification.exact import round_exact
from fxround.passes import LOWERING
from fxround.significance.report import plots
from fxround.significance.report.drawing import drawing
from fxround.views.colouring import STATUS_COLOURS
from fxround.views.graph_views import to_networkx
from fxround.views.pictures import drawn
from fxround.views.svg import Legend, svg

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"

# The number line: a format, its values that are shown, and the colours of the two directions.
FP4 = "e2m1fn"
LEFT, RIGHT = Fraction(-3), Fraction(3)
VALUES = [Fraction(v) for v in (-3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3)]
DOWN, UP = "#3b6fb6", "#f0a050"
WIDTH, PITCH, STEPS = 760, 24, 32

# Labels, fills and borders.
BLAME = {
    "blame": ("to blame", "#ffd0cc", "#c92a2a"),
    "amplifies": ("amplifies their errors", "#fff3bf", "#e6a700"),
    "passes": ("passes with the rest", "#e6f4ea", "#2b8a3e"),
    "silent": ("", "#f1f3f5", "#adb5bd"),
}
KINDS = {
    "code": ("a folder of fxround", "#e6f5ee", "#2b8a63"),
    "data": ("what it makes", "#e7effb", "#3b6fb6"),
    "user": ("what you pass or get", "#fdebd3", "#d9822b"),
}
ROOMS = {
    "model": ("user", "model", "and its arguments"),
    "policy": ("user", "policy", "a rounding for each value"),
    "capture": ("code", "capture", "Dynamo and AOTAutograd"),
    "operators": ("code", "operators", "formulas of composites"),
    "aten": ("data", "captured graph", "one graph of ATen operators"),
    "passes": ("code", "passes", f"{len(LOWERING)} passes, each verified"),
    "lowered": ("data", "lowered graph", "every rounding is a text"),
    "views": ("code", "views", "summary, coverage, drawing"),
    "optimizations": ("code", "optimizations", "choose, hoist, fuse"),
    "fused": ("data", "fused graph", "what export writes"),
    "schedule": ("code", "runtime.schedule", "rows, epilogues, memory"),
    "numerics": ("code", "numerics", "what rounding means"),
    "kernels": ("code", "kernels", "a kernel as data"),
    "cpu": ("code", "runtime.cpu", "LLVM code on threads"),
    "bits": ("user", "result", "the same bits everywhere"),
}
WAYS = [
    ("model", "capture"),
    ("operators", "capture"),
    ("capture", "aten"),
    ("aten", "passes"),
    ("policy", "passes"),
    ("passes", "lowered"),
    ("lowered", "views"),
    ("lowered", "optimizations"),
    ("optimizations", "fused"),
    ("fused", "schedule"),
    ("schedule", "cpu"),
    ("numerics", "kernels"),
    ("kernels", "cpu"),
    ("cpu", "bits"),
]


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


def modes() -> str:
    """Return the number line of a format of four bits, and what every mode does to the numbers on it."""
    top = 96
    height = top + PITCH * len(MODES) + 34
    parts = [
        _words(28, 32, "t", f"{len(MODES)} modes on the number line of {FP4} (four bits)"),
        *(_words(_x(v), 82, "v", f"{float(v):g}") for v in VALUES),
    ]
    for i, (text, colour) in enumerate((("goes down", DOWN), ("by chance", _mixed(Fraction(1, 2))), ("goes up", UP))):
        parts.append(f'<rect x="{28 + 150 * i}" y="44" width="14" height="14" rx="3" fill="{colour}"/>')
        parts.append(_words(49 + 150 * i, 55, "l", text))
    parts.append(_words(478, 55, "l", "triangle: where a tie goes"))
    for i, name in enumerate(MODES):
        parts += _row(Rounding.parse(f"{FP4}/{name}"), name, top + PITCH * i)
    lines = (f'<path d="M{_x(v):.1f} {top - 8}V{height - 34}" stroke="#212529"/>' for v in VALUES)
    style = (
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#212529}"
        ".t{font-size:16px;font-weight:600}.l,.m{font-size:12px}.v{font-size:12px;text-anchor:middle}"
    )
    note = "up_down goes up or down by one value after rounding to nearest, exact values too."
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}{"".join(lines)}'
        f"{_words(28, height - 12, 'l', note)}"
        "</svg>\n"
    )


def _row(rounding: Rounding, name: str, y: int) -> list[str]:
    """Return the name of a mode and its colours along the line: equal neighbours are one rectangle."""
    edges = [LEFT + Fraction(i, 2 * STEPS) for i in range(int((RIGHT - LEFT) * 2 * STEPS) + 1)]
    chances = [_chance((a + b) / 2, rounding) for a, b in pairwise(edges)]
    starts = [i for i in range(len(chances)) if i == 0 or chances[i] != chances[i - 1]]
    parts = [_words(28, y + 13, "m", name)]
    for first, last in pairwise([*starts, len(chances)]):
        x, width = _x(edges[first]), _x(edges[last]) - _x(edges[first])
        box = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="18" shape-rendering="crispEdges"'
        parts.append(f'<rect {box} fill="{_mixed(chances[first])}"/>')
    for a, b in pairwise(VALUES):
        middle = (a + b) / 2
        left, right, tie = (_chance(middle + d, rounding) for d in (-Fraction(1, 64), Fraction(1, 64), 0))
        if (left, right) == (0, 1) and name != "up_down":
            tip = 5 if tie else -5
            x = _x(middle)
            parts.append(f'<path d="M{x - tip} {y + 4}V{y + 14}L{x + tip} {y + 9}Z" fill="#ffffff"/>')
    return parts


def _chance(x: Fraction, rounding: Rounding) -> Fraction:
    """Return the share of 32 random words, spread evenly, with which x is rounded up."""
    words = range(0, 2**32, 2**32 if rounding.mode.deterministic else 2**27)
    return Fraction(sum(Fraction(round_exact(abs(x), x < 0, rounding, word)) > x for word in words), len(words))


def _mixed(chance: Fraction) -> str:
    """Return the colour between DOWN and UP."""
    pairs = ((int(DOWN[i : i + 2], 16), int(UP[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * chance):02x}" for a, b in pairs)


def _x(value: Fraction) -> float:
    return 170 + float((value - LEFT) / (RIGHT - LEFT)) * (WIDTH - 200)


def _words(x: float, y: float, kind: str, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}">{escape(text)}</text>'


class Standardize(nn.Module):
    """Rows of mean 0 and variance 1, by the textbook formula (docs/localize.md)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, m] to the same shape."""
        mean = x.mean(1, keepdim=True)
        variance = (x * x).mean(1, keepdim=True) - mean * mean
        return (x - mean) / torch.sqrt(variance)


def localization() -> str:
    """Return the graph of docs/localize.md with the operations that ``fxround.localize`` finds to blame."""
    linear = nn.Linear(16, 4)
    with torch.no_grad():
        linear.weight.copy_(fractions((4, 16), step=37, of=101, over=211))
        linear.bias.copy_(fractions((4,), step=3, of=5, over=7))
    model = nn.Sequential(OrderedDict(standardize=Standardize(), logits=linear)).eval()
    x = 100 + fractions((8, 16), step=29, of=97, over=97)
    report = fxround.localize(model, x, ("relative_error", 1e-3))
    failures = {site.node: len(c.failures) for c in report.sets for site in c.sites}
    (amplifier,) = {site.amplifier.partition(" at ")[0] for c in report.sets for site in c.sites}
    cancelled = max(site.cancelled for c in report.sets for site in c.sites)
    compiled = fxround.compile(model, "stochastic")
    compiled(x)
    graph = drawn(to_networkx(compiled.graph))
    amplifying = next(name for name, data in graph.nodes(data=True) if data["operator"] == amplifier)
    for name, data in graph.nodes(data=True):
        shown = {"placeholder": data["name"], "output": "result"}.get(data["op"]) or data["operator"]
        kind = "silent" if data["op"] != "call_function" else "blame" if name in failures else "passes"
        said = {
            "blame": f"fails in {failures.get(name)} of {report.runs} runs",
            "passes": "passes",
            "silent": data["type"],
        }
        if name == amplifying:
            kind, said["amplifies"] = "amplifies", f"passes; {cancelled:.0f} bits cancel"
        _, fill, stroke = BLAME[kind]
        lines = [shown.removeprefix("aten.").removesuffix(".default"), "" if shown == "result" else said[kind]]
        data.update(lines=lines, title="", input=data["op"] == "placeholder", fill=fill, stroke=stroke, stripe="")
    entries = tuple(BLAME[kind] for kind in ("blame", "amplifies", "passes"))
    return plain(svg(graph, Legend("Which roundings make the result wrong?", entries)))


def pipeline() -> str:
    """Return the way of a model through the folders of fxround."""
    graph = nx.DiGraph()
    for name, (kind, *lines) in ROOMS.items():
        _, fill, stroke = KINDS[kind]
        graph.add_node(
            name, lines=lines, title="", input=name in ("model", "policy"), fill=fill, stroke=stroke, stripe=""
        )
    graph.add_edges_from(WAYS)
    return plain(svg(graph, Legend("From a model to bits", tuple(KINDS.values()))))


def layers() -> str:
    """Return the plot of a study of the demo's network, which stock PyTorch trains: it differs between machines."""
    model, images = demo.build()
    return plots.svg(fxround.variability(model, images, samples=10, capture="layers", metrics=()))


class Segmenter(nn.Module):
    """A U-Net of two levels: a logit for each voxel, whether it belongs to a lesion."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.above, self.below = self._level(1, width), self._level(width, 2 * width)
        self.after = self._level(3 * width, width)
        self.head = nn.Conv3d(width, 1, 1)

    @staticmethod
    def _level(channels: int, width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv3d(channels, width, 3, padding=1), nn.InstanceNorm3d(width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [n, 1, depth, height, width], even sizes, to logits of the same shape."""
        fine = self.above(x)
        coarse = self.below(nn.functional.max_pool3d(fine, 2))
        wide = nn.functional.interpolate(coarse, scale_factor=2.0)
        return self.head(self.after(torch.cat([fine, wide], 1)))


def phantom(size: int) -> tuple[Tensor, Tensor]:
    """Return a volume like a head and the mask of its two lesions, each float32 [1, 1, size, size, size]."""
    z, y, x = torch.meshgrid(*[torch.linspace(-1, 1, size)] * 3, indexing="ij")
    skull, brain = ((x / a) ** 2 + (y / b) ** 2 + (z / a) ** 2 < 1 for a, b in ((0.82, 0.95), (0.72, 0.85)))
    folds = 0.45 + 0.12 * (9 * x).sin() * (8 * y).cos() * (7 * z).sin()
    lesions = ((x - 0.3) ** 2 + (y + 0.2) ** 2 + z**2 < 0.04) | ((x + 0.35) ** 2 + (y - 0.4) ** 2 + z**2 < 0.015)
    grey = torch.where(brain, folds, torch.where(skull, 0.9, 0.0))
    noise = torch.randn(grey.shape, generator=torch.Generator().manual_seed(0))
    return (torch.where(lesions, 0.7, grey) + 0.04 * noise)[None, None], lesions.float()[None, None]


def bits_over_anatomy() -> str:
    """Return a slice of the bits of a segmentation, which stock PyTorch trains: it differs between machines."""
    torch.manual_seed(0)
    model, (volume, mask) = Segmenter(), phantom(40)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(volume), mask).backward()
        optimizer.step()
    report = fxround.variability(model.eval(), volume, samples=10, reference=None, metrics=())
    return plots.svg_of(report.map())


PICTURES: dict[str, Callable[[], str]] = {
    "roundings": roundings,
    "modes": modes,
    "localization": localization,
    "pipeline": pipeline,
    "layers": layers,
    "map": bits_over_anatomy,
}
# What the test does not draw again.
UNREPEATABLE = ("layers", "map")


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
