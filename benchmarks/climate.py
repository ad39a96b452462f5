"""Climates in few significand bits: three chaotic models, rounded to nearest and stochastically, against binary64.

    python -m benchmarks.climate                                    # resumes what the file of results has
    python -m benchmarks.climate --output /tmp/climate.json --quick # few bits and samples: a few minutes

After Kimpson, Paxton, Chantry and Palmer, Climate-change modelling at reduced floating-point precision with stochastic
rounding, Quarterly Journal of the Royal Meteorological Society 149, 2023, and Paxton, Chantry, Kloewer, Saffin and
Palmer, Climate modeling in low precision: effects of both deterministic and stochastic rounding, Journal of Climate
35, 2022. A model makes an ensemble of long runs, whose states at all times after a spin-up are samples of its invariant
distribution. The figure is the Wasserstein-1 distance to the distribution of an ensemble in binary64, at every point
of the grid, in standard deviations of that point in binary64, and averaged over the grid.

Every ensemble has starts and random bits of its own, those in binary64 too. Nineteen others in binary64 have distances
from the reference because they are finite. The distance of an ensemble without rounding error is as likely as any of
theirs to be the largest of the twenty, so that it is above all of theirs with probability 1/20. A distance that is not
above them says that no rounding error was detected.

- Lorenz 63: the three variables of convection (Lorenz, Journal of the Atmospheric Sciences 20, 1963).
- Lorenz 96: 40 points on a circle of latitude with the forcing 8 (Lorenz, Predictability, ECMWF 1996).
- Shallow water: flow over a ridge on a doubly periodic square of 16 x 16 points, driven by bands of wind, with drag,
  viscosity and a rotation that varies from south to north, without units. Velocities are on the faces of cells
  (Arakawa's grid C), and the advection is Sadourny's, Journal of the Atmospheric Sciences 32, 1975.

All take steps of the fourth-order method of Runge and Kutta. Every operation of a step is rounded to ``sbits(t)``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import fxround
from benchmarks.harness import conditions
from fxround.atomic_files import write_file

RESULTS: Final = Path(__file__).parent / "results" / "climate.json"
PICTURE: Final = Path(__file__).parents[1] / "docs" / "pictures" / "climate.svg"
MEMBERS: Final = 10
# Independent ensembles in binary64 beside the reference, which is number 0; those in few bits follow.
OTHERS: Final = 19
MODES: Final = ("nearest", "stochastic")
MODEL_COLUMNS: Final = (
    "model",
    "numbers",
    "step",
    "decorrelation",
    "between samples",
    "spin-up",
    "samples",
    "median distance in binary64",
    "largest",
)
REFERENCE: Final = f"binary64, largest of {OTHERS}"
Step = Callable[[Any], Any]


def runge_kutta(derivative: Callable[[Tensor], Tensor], dt: float) -> Step:
    """Return a step of the fourth-order method of Runge and Kutta."""

    def step(s: Tensor) -> Tensor:
        a = derivative(s)
        b = derivative(s + dt / 2 * a)
        c = derivative(s + dt / 2 * b)
        d = derivative(s + dt * c)
        return s + dt / 6 * (a + 2 * (b + c) + d)

    return step


def lorenz63(s: Tensor) -> Tensor:
    """Return the derivative of a state [3]."""
    x, y, z = s.unbind(-1)
    return torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], -1)


def lorenz96(s: Tensor) -> Tensor:
    """Return the derivative of a state [40]."""
    return (s.roll(-1, -1) - s.roll(2, -1)) * s.roll(1, -1) - s + 8


POINTS: Final = 16
_SPACING: Final = 2 * torch.pi / POINTS
_PLACES: Final = torch.arange(POINTS, dtype=torch.float64) * _SPACING
_SOUTH: Final = _PLACES[:, None].expand(POINTS, POINTS)
WIND: Final = 0.05 * torch.sin(2 * _SOUTH)
ROTATION: Final = 1 + torch.cos(_SOUTH)
RIDGE: Final = (0.3 * torch.exp(-2 * (_PLACES - torch.pi) ** 2)).expand(POINTS, POINTS).contiguous()
GRAVITY, DRAG, VISCOSITY = 10.0, 0.01, 0.005


def shallow_water(s: Tensor) -> Tensor:
    """Return the derivative of [..., 3, south to north, west to east]: velocities on faces, surface in cells; depth 1.

    The velocities are those on a cell's eastern and northern face, the vorticity that at its corner between them.
    """
    east, west, north, south = s.roll(-1, -1), s.roll(1, -1), s.roll(-1, -2), s.roll(1, -2)
    u, v, surface = s.unbind(-3)
    depth = 1 + surface - RIDGE
    flow_u, flow_v = u * (depth + depth.roll(-1, -1)) / 2, v * (depth + depth.roll(-1, -2)) / 2
    squares = u * u + west.select(-3, 0).square() + v * v + south.select(-3, 1).square()
    energy = GRAVITY * surface + squares / 4
    v_east, u_north = east.select(-3, 1), north.select(-3, 0)
    turning = ROTATION + (v_east - v - u_north + u) / _SPACING
    turned_v, turned_u = turning * (v + v_east) / 4, turning * (u + u_north) / 4
    friction = (east + west + north + south - 4 * s) * (VISCOSITY / _SPACING**2)
    converging = flow_u - flow_u.roll(1, -1) + flow_v - flow_v.roll(1, -2)
    return torch.stack(
        [
            WIND
            + (turned_v + turned_v.roll(1, -2))
            - (energy.roll(-1, -1) - energy) / _SPACING
            - DRAG * u
            + friction.select(-3, 0),
            friction.select(-3, 1)
            - (turned_u + turned_u.roll(1, -1))
            - (energy.roll(-1, -2) - energy) / _SPACING
            - DRAG * v,
            -converging / _SPACING,
        ],
        -3,
    )


@dataclass(frozen=True)
class Model:
    """A model: its step, its state at rest, and how its distribution is sampled.

    dt           the time of a step
    spread       how far the members are from the state at rest when they begin
    spin_up      the steps before the first sample
    keep         the steps from one sample to the next
    samples      the samples of a member
    bits         the numbers of stored bits
    """

    title: str
    step: Step
    dt: float
    begin: Tensor
    spread: float
    spin_up: int
    keep: int
    samples: int
    bits: tuple[int, ...] = (*range(4, 17), 18, 20, 23)


CALM: Final = torch.zeros(3, POINTS, POINTS, dtype=torch.float64)
MODELS: Final[Mapping[str, Model]] = {
    "lorenz63": Model(
        "Lorenz 63", runge_kutta(lorenz63, 0.01), 0.01, torch.ones(3, dtype=torch.float64), 1.0, 2000, 100, 3000
    ),
    "lorenz96": Model(
        "Lorenz 96", runge_kutta(lorenz96, 0.02), 0.02, torch.full((40,), 8.0, dtype=torch.float64), 1.0, 1000, 50, 1000
    ),
    "shallow_water": Model(
        "shallow water",
        runge_kutta(shallow_water, 0.05),
        0.05,
        CALM,
        0.05,
        8000,
        440,
        150,
        (*range(4, 9), 10, 12, 14, 16, 23),
    ),
}


def quick(model: Model) -> Model:
    """Return a model with a few bits and a fifth of the samples."""
    return replace(model, samples=model.samples // 5, bits=(5, 8, 12, 23))


def number_of(bits: int, mode: str) -> int:
    """Return the number of the ensemble in few bits, which no other one has."""
    return 1 + OTHERS + len(MODES) * bits + MODES.index(mode)


def ensemble(model: Model, policy: str, number: int) -> Tensor:
    """Return the samples of all members: float64 of shape [samples, members, *grid].

    number: of the ensemble; each has starts and random bits of its own.
    """
    noise = torch.Generator().manual_seed(number)
    start = torch.randn(MEMBERS, *model.begin.shape, generator=noise, dtype=torch.float64)
    with torch.no_grad():
        state = model.begin + model.spread * start
        state = fxround.iterate(model.step, state, model.spin_up, policy, seed=number)
        steps = model.keep * model.samples
        path: Tensor = fxround.iterate(model.step, state, steps, policy, keep=model.keep, seed=number, sample=1)[1]
    return path


def distance(samples: Tensor, reference: Tensor) -> float:
    """Return the mean over the grid of the Wasserstein-1 distance, in standard deviations of the reference."""
    samples, reference = samples.flatten(0, 1), reference.flatten(0, 1)
    return float((fxround.wasserstein(samples, reference) / reference.std(0)).mean())


def decorrelation(model: Model) -> float:
    """Return the time after which the autocorrelation of states in binary64, averaged over the grid, is below 1/e."""
    lags = 20
    fine = replace(model, keep=model.keep // 10, samples=1000)
    path = ensemble(fine, "identity", 0)
    anomalies = path - path.mean((0, 1))
    variance = anomalies.square().mean((0, 1))
    products = [(anomalies[:-lag] * anomalies[lag:]).mean((0, 1)) / variance for lag in range(1, lags + 1)]
    correlated = [lag for lag, product in enumerate(products, 1) if abs(product.mean()) >= 1 / math.e]
    return (max(correlated, default=0) + 1) * fine.keep * fine.dt


def policy_of(bits: int, mode: str) -> str:
    """Return the policy of a number of stored bits."""
    return f"sbits({bits})" + ("/stochastic" if mode == "stochastic" else "")


class Results:
    """The file of results, which is written after each run: for each model a table with a row for each number of bits.

    A row has the distances to nearest and stochastically, and the seconds that the two ensembles took. Another table
    has a row for each model that was sampled in binary64.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tables: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def rows(self, model: Model, command: str) -> list[list[str]]:
        """Return the rows of a model, the sampling error first, with empty cells for what has not run."""
        rows = [[label, "", "", ""] for label in (REFERENCE, *(f"{t}" for t in model.bits))]
        sampled = f"{MEMBERS} x {model.samples:,}, every {model.keep} steps after {model.spin_up:,}"
        made = {
            "columns": ["stored bits t", *MODES, "seconds"],
            "numbers": [1, 2, 3],
            "samples": sampled,
            "rows": rows,
        } | conditions(command, where=", one thread")
        title = f"climate: {model.title}"
        known = self.tables.get(title)
        if known is None or known["samples"] != sampled or [r[0] for r in known["rows"]] != [r[0] for r in rows]:
            self.tables[title] = made
        kept: list[list[str]] = self.tables[title]["rows"]
        return kept

    def describe(self, model: Model, distances: list[float], command: str) -> None:
        """Put the row of a model, of which ensembles in binary64 have these distances, into the table of models."""
        made = {"columns": list(MODEL_COLUMNS), "numbers": list(range(1, len(MODEL_COLUMNS))), "rows": []}
        models = self.tables.setdefault("climate: models", made) | conditions(command, where=", one thread")
        row = [
            model.title,
            f"{model.begin.numel():,}",
            f"{model.dt:g}",
            f"{decorrelation(model):.2g}",
            f"{model.keep * model.dt:g}",
            f"{model.spin_up * model.dt:g}",
            f"{MEMBERS} x {model.samples:,}",
            f"{statistics.median(distances):.4f}",
            f"{max(distances):.4f}",
        ]
        models["rows"] = [*(r for r in models["rows"] if r[0] != model.title), row]
        self.tables["climate: models"] = models

    def write(self) -> None:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.path, json.dumps(self.tables, indent=1) + "\n")


def run(model: Model, results: Results, command: str) -> None:
    """Run what is missing of a model, and keep each distance when it is known."""
    rows = results.rows(model, command)
    if all(all(row) for row in rows):
        print(f"{model.title}: complete", flush=True)
        return
    began = time.thread_time()
    reference = ensemble(model, "identity", 0)
    if not all(rows[0]):
        distances = []
        for number in range(1, OTHERS + 1):
            distances.append(distance(ensemble(model, "identity", number), reference))
            print(f"{model.title}: binary64, {number} of {OTHERS}: {distances[-1]:.4f}", flush=True)
        rows[0][1:] = [f"{max(distances):.4f}"] * 2 + [f"{(time.thread_time() - began) / (OTHERS + 1):.1f}"]
        results.describe(model, distances, command)
        results.write()
    for row, bits in zip(rows[1:], model.bits, strict=True):
        if all(row):
            continue
        began, cells = time.thread_time(), []
        for mode in MODES:
            samples = ensemble(model, policy_of(bits, mode), number_of(bits, mode))
            cells.append(f"{distance(samples, reference):.4f}")
        row[1:] = [*cells, f"{time.thread_time() - began:.1f}"]
        results.write()
        print(f"{model.title}: {bits:2} bits, nearest {cells[0]}, stochastic {cells[1]}, {row[3]} s", flush=True)


# ---- the picture ----

_WIDTH, _HEIGHT, _LEFT, _TOP, _APART = 220, 200, 62, 64, 36
_COLOURS: Final = {"nearest": "#c92a2a", "stochastic": "#3b6fb6"}
_DECADES: Final = (-3, 0)


def picture(tables: Mapping[str, Any]) -> str:
    """Return the distances of all models over the stored bits as SVG; the line of dashes is the sampling error."""
    parts = []
    titles = [f"climate: {model.title}" for model in MODELS.values()]
    shown = [title for title in titles if title in tables and all(all(row) for row in tables[title]["rows"])]
    for i, title in enumerate(shown):
        parts.append(_panel(title.partition(": ")[2], tables[title]["rows"], _LEFT + i * (_WIDTH + _APART), i == 0))
    width = _LEFT + len(shown) * (_WIDTH + _APART)
    legend = [
        f'<path d="M{_LEFT + 150 * i} 24h26" stroke="{colour}" stroke-width="2"/>'
        f'<text x="{_LEFT + 150 * i + 32}" y="28">{"to nearest" if mode == "nearest" else mode}</text>'
        for i, (mode, colour) in enumerate(_COLOURS.items())
    ]
    legend.append(
        f'<path d="M{_LEFT + 300} 24h26" stroke="#212529" stroke-dasharray="4 3"/>'
        f'<text x="{_LEFT + 332}" y="28">largest of {OTHERS} ensembles in binary64</text>'
    )
    size = f'width="{width}" height="{_TOP + _HEIGHT + 48}" viewBox="0 0 {width} {_TOP + _HEIGHT + 48}"'
    style = (
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;font-size:12px;"
        "fill:#212529}path{fill:none}.t{font-weight:600}.e{text-anchor:end}.m{text-anchor:middle}"
    )
    label = (
        f'<text class="m" transform="translate(14 {_TOP + _HEIGHT / 2:.0f}) rotate(-90)">'
        "Wasserstein-1 distance, standard deviations</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(legend)}{label}{"".join(parts)}</svg>\n'
    )


def _panel(title: str, rows: list[list[str]], left: int, labelled: bool) -> str:
    low, high = _DECADES
    bits = [int(row[0]) for row in rows[1:]]

    def x(t: float) -> float:
        return left + (t - 4) / 19 * _WIDTH

    def y(value: str) -> float:
        exponent = min(max(torch.tensor(float(value)).log10().item(), low), high)
        return _TOP + (high - exponent) / (high - low) * _HEIGHT

    parts = [f'<text class="t" x="{left}" y="{_TOP - 10}">{title}</text>']
    for decade in range(low, high + 1):
        height = y(f"1e{decade}")
        parts.append(f'<path d="M{left} {height:.1f}h{_WIDTH}" stroke="#dee2e6"/>')
        if labelled:
            parts.append(f'<text class="e" x="{left - 6}" y="{height + 4:.1f}">{10.0**decade:g}</text>')
    for t in (4, 8, 12, 16, 20, 23):
        parts.append(f'<text class="m" x="{x(t):.1f}" y="{_TOP + _HEIGHT + 16}">{t}</text>')
    parts.append(f'<text class="m" x="{left + _WIDTH / 2}" y="{_TOP + _HEIGHT + 36}">stored bits t</text>')
    parts.append(f'<path d="M{left} {y(rows[0][1]):.1f}h{_WIDTH}" stroke="#212529" stroke-dasharray="4 3"/>')
    for column, mode in enumerate(MODES, 1):
        points = [(x(t), y(row[column])) for t, row in zip(bits, rows[1:], strict=True) if row[column] != "nan"]
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        parts.append(f'<path d="M{path}" stroke="{_COLOURS[mode]}" stroke-width="2"/>')
    return "".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Run what the file of results lacks, and write the picture if all of it is there."""
    parser = argparse.ArgumentParser(description="Climates of three models in few significand bits")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the file of results, which is resumed")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="only these models")
    parser.add_argument("--quick", action="store_true", help="few bits, and a fifth of the samples")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = Results(arguments.output)
    command = "python -m benchmarks.climate" + (" --quick" if arguments.quick else "")
    for name in arguments.models:
        run(quick(MODELS[name]) if arguments.quick else MODELS[name], results, command)
    if arguments.output.resolve() == RESULTS.resolve():
        PICTURE.write_text(picture(results.tables), encoding="utf-8")
        print(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
