"""``fxround tune``: the arguments of the command, and its exit status for continuous integration.

The status is 0, 1 if no assignment that ran meets the budget, or 130 after Ctrl-C, after which the report holds what
is best so far. Example::

    $ fxround tune net.py:build --inputs net.py:batches --formats bfloat16 int8:channel --metric accuracy --budget 0.01
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final, get_args

from fxround.choices import PASSES, Cost, Per, Proof
from fxround.cli.arguments import add_metric_choices, add_model, metrics_of, put, said
from fxround.cli.loading import loaded
from fxround.interrupts import INTERRUPTED

FAILS: Final = 1


def add_tune(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser("tune", **said("find the cheapest format for each layer that keeps a metric"))
    add_model(parser)
    parser.add_argument(
        "--formats", nargs="+", required=True, help="formats, scaled formats, roundings or .toml files, at least two"
    )
    parser.add_argument(
        "--metric",
        default="sqnr",
        metavar="NAME|MODULE:FUNCTION",
        help="a metric, such as accuracy, or a function of (result, target) (default sqnr)",
    )
    add_metric_choices(parser)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument(
        "--budget", type=_budget, help="the largest loss of the metric, or a bound such as '>= 0.95' or '<= 0.1'"
    )
    budget.add_argument("--bits", type=float, help="the largest mean bits: find the best metric within them")
    parser.add_argument("--per", choices=get_args(Per), default="layer", help="what gets a format (default layer)")
    parser.add_argument(
        "--cost", choices=get_args(Cost), default="weights", help="what the mean bits are of (default weights)"
    )
    parser.add_argument(
        "--proof",
        choices=get_args(Proof),
        default="monotone",
        help="monotone: coarser formats are no better; all: run every better assignment (default monotone)",
    )
    parser.add_argument(
        "--runs", type=int, help=f"the most assignments to run (default: as needed, near {PASSES} passes over the data)"
    )
    parser.add_argument("--samples", type=int, default=1, help="runs of an assignment that draws (default 1)")
    parser.add_argument("--batch-size", type=int, help="split the inputs into batches of this many rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default 0)")
    parser.add_argument(
        "--path", type=Path, metavar="FILE", help="file for the runs, from which an interrupted search continues"
    )
    parser.add_argument("--policy", type=Path, metavar="FILE.toml", help="write the policy")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it and nothing else")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the metric against bits, in the format of the suffix"
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Search, print, and return the exit status."""
    from fxround.tuning.tune import tune

    model, inputs = loaded(arguments)
    asked = ("budget", "formats", "bits", "per", "cost", "proof", "runs", "samples", "batch_size", "seed", "path")
    report = tune(
        model,
        inputs,
        metrics_of([arguments.metric], arguments)[0],
        **{name: getattr(arguments, name) for name in asked},
        progress=False if arguments.json == "-" else None,
    )
    put(report, arguments.json)
    if arguments.policy and report.chosen is not None:
        report.save_policy(arguments.policy)
    if arguments.plot:
        report.plot(arguments.plot)
    if report.interrupted:
        return INTERRUPTED
    return FAILS if report.chosen is None or not report.chosen.keeps else 0


def _budget(text: str) -> float | str:
    """Return a number, or the text of a bound."""
    try:
        return float(text)
    except ValueError:
        return text
