"""``fxround localize``: the arguments of the command, and its exit status for continuous integration.

The status is 0 if the check passes with everything perturbed, 1 if culprits were found, 130 after Ctrl-C; a wrong
argument raises an exception, which the command line prints. The report is written to standard output, as JSON with
``--json -``. Example::

    $ fxround localize net.py:build --min-bits 10 --level modules --cache .localize
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

from fxround.choices import LEVELS, QUIET
from fxround.cli.arguments import POLICY, add_metric_choices, add_model, metrics_of, put, said
from fxround.cli.loading import loaded, named
from fxround.interrupts import INTERRUPTED

FAILS: Final = 1


def add_localize(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser("localize", **said("find the operations whose roundings make a result wrong"))
    add_model(parser)
    right = parser.add_mutually_exclusive_group(required=True)
    right.add_argument(
        "--check", metavar="MODULE:FUNCTION", help="a function of the output that returns True if it passes"
    )
    right.add_argument(
        "--min-bits", type=float, help="every element must agree with the quiet run in this many leading bits"
    )
    right.add_argument(
        "--metric",
        nargs=2,
        metavar=("NAME|MODULE:FUNCTION", "BOUND"),
        help="a metric, or a function of (result, reference), and the worst value that passes, for example label_flips "
        "0, or sqnr 40",
    )
    add_metric_choices(parser)
    parser.add_argument("--policy", default="stochastic", help=POLICY)
    parser.add_argument(
        "--quiet",
        default=QUIET,
        help=f"the policy of all operations that are not in the set that is tried (default {QUIET})",
    )
    parser.add_argument(
        "--level", choices=LEVELS, default="nodes", help="what a set consists of (default nodes, the operations)"
    )
    parser.add_argument("--runs", type=int, default=5, help="number of samples per set (default 5)")
    parser.add_argument("--limit", type=int, metavar="N", help="stop after N sets")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="number of worker processes, -1 for all cores (default 1)")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="FOLDER",
        help="folder for the verdicts, from which an interrupted search continues",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it and nothing else")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Search, print, and return the exit status."""
    from fxround.localization.localize import NothingFails, localize

    model, inputs = loaded(arguments)
    metrics = metrics_of(arguments.metric[:1] if arguments.metric else (), arguments)
    named_check = named(arguments.check) if arguments.check else None
    check = (metrics[0], _bound(*arguments.metric)) if metrics else named_check
    asked = {
        name: getattr(arguments, name) for name in ("quiet", "level", "min_bits", "runs", "limit", "seed", "cache")
    }
    quietly = arguments.json == "-"
    asked |= {"n_jobs": arguments.jobs, "progress": False if quietly else None}
    try:
        report = localize(model, inputs, check, arguments.policy, **asked)
    except NothingFails as answer:
        print(json.dumps({"sets": [], "reason": str(answer)}) if quietly else f"Nothing to localize: {answer}")
        return 0
    put(report, arguments.json)
    return INTERRUPTED if report.ended == "interrupted" else FAILS


def _bound(name: str, text: str) -> float:
    """Return the worst value that passes."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--metric {name} {text}: expected a number as the bound, like --metric sqnr 40") from None
