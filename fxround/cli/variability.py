"""``fxround variability``: the significant bits of a model's results and layers, and checks of them.

The status is 0, 1 if a check fails, or 130 after Ctrl-C, after which the report holds what was complete. Example::

    $ fxround variability net.py:build --inputs images.npy --samples auto --html report.html --min-bits 10
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from fxround.cli.arguments import POLICY, add_metric_choices, add_model, metrics_of, put, said
from fxround.cli.loading import loaded
from fxround.errors import shown
from fxround.interrupts import INTERRUPTED

_CHECKS: Final = (
    ("--min-bits", "if a result has fewer bits in the mean"),
    ("--min-worst", "if an element of a result has fewer bits"),
    ("--max-flips", "if a larger share of labels, 0 to 1, changes"),
    ("--max-outside", "if in a larger share of elements, 0 to 1, the reference is beyond the spread"),
)


def add_variability(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "variability",
        **said("perturb the roundings of a model, and count the significant bits of its results and layers"),
    )
    add_model(parser)
    parser.add_argument("--policy", default="stochastic", help=POLICY)
    parser.add_argument(
        "--samples", type=_samples, default=10, metavar="N|auto", help="runs of every batch (default 10)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.5,
        help="for --samples auto: half width of the confidence interval, in bits (default 0.5)",
    )
    parser.add_argument(
        "--capture",
        choices=("outputs", "layers", "nodes"),
        default="layers",
        help="what to measure beside the results: nothing, layers or operations (default layers)",
    )
    parser.add_argument(
        "--isolate", choices=("layers", "operators"), help="also perturb layers or operators one at a time"
    )
    parser.add_argument(
        "--metric",
        nargs="+",
        action="extend",
        metavar="NAME|MODULE:FUNCTION",
        help="a metric, for example sqnr, or a function of (sample, unperturbed result); may be several (default: "
        "those that fit the results)",
    )
    add_metric_choices(parser)
    parser.add_argument(
        "--reference",
        choices=("binary64", "none"),
        default="binary64",
        help="what the mean of the samples is compared with (default binary64, a run in float64)",
    )
    parser.add_argument(
        "--method",
        choices=("cnh", "general"),
        default="cnh",
        help="how bits are estimated: cnh assumes normal samples, general nothing (default cnh)",
    )
    parser.add_argument("--batch-size", type=int, help="split the inputs into batches of this many rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="number of worker processes, -1 for all cores (default 1)")
    parser.add_argument(
        "--first-sample",
        type=int,
        metavar="N",
        help="measure the samples from N on, as one of several jobs, whose files fxround merge takes",
    )
    add_answers(parser)
    parser.set_defaults(command=run)


def add_answers(parser: Any) -> None:
    """Add the arguments that ``answer`` reads: the checks of a report, and where it is written."""
    for flag, what in _CHECKS:
        parser.add_argument(flag, type=float, help=f"exit with status 1 {what}")
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the report for fxround.load_report")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the report as one page")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it and nothing else")


def checks_of(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the checks that were asked for. Raises ValueError for a bound that no report can be held to."""
    from fxround.significance.report import require_bounds

    names = (flag[2:].replace("-", "_") for flag, _ in _CHECKS)
    asked = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    require_bounds(**asked)
    return asked


def answer(report: Any, checks: dict[str, float], arguments: argparse.Namespace) -> int:
    """Print a report, write it, check it, and return the exit status."""
    from fxround.significance.report import CheckFailed

    put(report, arguments.json)
    if arguments.save:
        report.save(arguments.save)
    if arguments.html:
        report.to_html(arguments.html)
    try:
        report.check(**checks, allow_nonfinite=not checks)
    except CheckFailed as error:
        print(f"fxround: {error}", file=sys.stderr)
        return 1 if report.complete else INTERRUPTED
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Perturb, print, and return the exit status."""
    import fxround

    checks = checks_of(arguments)
    model, inputs = loaded(arguments)
    report = fxround.variability(
        model,
        inputs,
        arguments.policy,
        arguments.samples,
        tolerance=arguments.tolerance,
        capture=arguments.capture,
        isolate=arguments.isolate,
        metrics=metrics_of(arguments.metric or (), arguments) or "auto",
        reference=None if arguments.reference == "none" else arguments.reference,
        method=arguments.method,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        n_jobs=arguments.jobs,
        first_sample=arguments.first_sample,
        progress=False if arguments.json == "-" else None,
    )
    return answer(report, checks, arguments)


def _samples(text: str) -> int | str:
    if text == "auto" or text.isdecimal():
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"{shown(text)}: expected a number of runs, or auto")
