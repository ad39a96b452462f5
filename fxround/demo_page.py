"""Print the results of the demo with rich: the same numbers as its data, with a bar per layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fxround.demo import PRECISION, Bits, Demo
from fxround.significance.bits import PROBABILITY, penalty, require

BAR = 24


def demo(run: Demo, folder: Path) -> None:
    """Print a demo's findings and the paths of its files. Raises ImportError without rich."""
    console = require("rich.console", "report").Console(highlight=False)
    seconds = run.seconds
    console.print()
    console.print(f"[bold]fxround demo[/]  policy [bold cyan]{run.policy}[/], {run.samples} samples, seed {run.seed}")
    console.print(
        f"A CNN of {run.parameters:,} parameters learned {run.trained_on:,} digits with stock PyTorch in "
        f"{seconds['training']:.1f} s;\n"
        f"it was compiled in {seconds['compiling']:.1f} s and run on {run.images} test images.",
        style="dim",
    )
    console.print()
    console.print(_grid(_facts(run)))
    console.print()
    console.print(_layers(run))
    console.print()
    console.print(
        f"Bits: CNH's lower bound, probability and confidence {PROBABILITY:.0%};\n"
        f"{run.samples} samples lower every figure by {penalty(run.samples):.2f} bits.\n"
        "Evidence: elements whose samples differ; only these count.",
        style="dim",
    )
    console.print(f"Full table [bold]{folder / 'table.csv'}[/]", soft_wrap=True)
    console.print(f"Report     {folder / 'report.json'}\nGraph      {folder / 'graph.svg'}", soft_wrap=True)


def _facts(run: Demo) -> list[tuple[str, str]]:
    mean, spread = float(np.mean(run.accuracy)), float(np.std(run.accuracy))
    changed = f"{len(run.changed)} of {run.images} images"
    stock, perturbed = 1e3 * run.seconds["stock"], 1e3 * run.seconds["perturbed"]
    names = ", ".join(map(str, run.changed[:6])) + (", ..." if len(run.changed) > 6 else "")
    left = f"{len(run.unrounded)} left to stock kernels" if run.unrounded else "none left to stock kernels"
    unrounded = f"[bold red]{left}[/]" if run.unrounded and run.rounded else left
    return [
        ("Accuracy", f"[bold]{mean:.2f} %[/]  spread {spread:.2f}  [dim](stock {run.stock_accuracy:.2f} %)[/]"),
        ("Significant bits", _bits(run.bits)),
        ("Labels that changed", f"[bold]{changed}[/]" + (f"  [dim](images {names})[/]" if names else "")),
        ("Mean against stock", _agreement(run)),
        ("Slowdown", f"[bold]{run.slowdown:.1f}x[/]  [dim]({stock:.1f} ms stock, {perturbed:.1f} ms, one thread)[/]"),
        ("Operations rounded", f"[bold]{run.rounded}[/], {unrounded}"),
    ]


def _bits(bits: Bits) -> str:
    if bits.mean is None:
        return "no evidence: all samples are equal (is the policy deterministic?)"
    mean = f"[bold]{bits.mean:.1f}[/] of {PRECISION} in the mean of {bits.evidence:,} logits"
    return f"{mean}, [bold]{bits.worst:.1f}[/] in the worst"


def _agreement(run: Demo) -> str:
    return "equal" if run.agreement is None else f"{run.agreement:.1f} leading bits agree"


def _grid(rows: list[tuple[str, str]]) -> Any:
    grid = require("rich.table", "report").Table.grid(padding=(0, 3))
    for row in rows:
        grid.add_row(*row)
    return grid


def _layers(run: Demo) -> Any:
    rich = require("rich.table", "report")
    box = require("rich.box", "report")
    table = rich.Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("Layer")
    for heading in ("mean bits", "worst"):
        table.add_column(heading, justify="right")
    table.add_column("0" + " " * (BAR - 3) + str(PRECISION), no_wrap=True)
    table.add_column("evidence", justify="right")
    for name, bits in run.layers.items():
        share = f"{100 * bits.evidence / max(bits.elements, 1):.0f} %"
        if bits.mean is None or bits.worst is None:
            table.add_row(name, "-", "-", "", share)
        else:
            table.add_row(name, f"{bits.mean:.1f}", f"{bits.worst:.1f}", _bar(bits.mean), share)
    return table


def _bar(bits: float) -> str:
    filled = round(BAR * bits / PRECISION)
    return f"[cyan]{'█' * filled}[/][bright_black]{'░' * (BAR - filled)}[/]"
