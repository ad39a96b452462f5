"""``fxround attribute``: which rounding costs how much of a result, from one run and its derivatives.

The status is 0, or 1 if ``--min-bits`` is given and the result has fewer bits, or its figures cannot be trusted, and
130 after Ctrl-C. Example::

    $ fxround attribute net.py:build --formats bfloat16 e4m3fn --check 10 --html report.html
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from fxround.cli.arguments import POLICY, add_model, put, said
from fxround.cli.loading import loaded, named
from fxround.interrupts import INTERRUPTED

FAILS: Final = 1


def add_attribute(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser("attribute", **said("say which rounding costs how much of a result, from one run"))
    add_model(parser)
    parser.add_argument("--policy", default="stochastic", help=POLICY)
    parser.add_argument(
        "--output", metavar="MODULE:FUNCTION", help="a differentiable function of the result: a logit, a margin"
    )
    parser.add_argument(
        "--loss", metavar="MODULE:FUNCTION", help="a loss of the result: attribute its gradients in place of the result"
    )
    parser.add_argument(
        "--probes", type=int, default=4, help="backward passes for results of many elements (default 4)"
    )
    parser.add_argument("--formats", nargs="+", default=[], help="formats to try on the result of each operation")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="compare the prediction with N samples")
    parser.add_argument("--min-bits", type=float, help="status 1 if the result has fewer significant bits")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default 0)")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it and nothing else")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as HTML")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw the graph by shares, as .html, .svg or .json")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Attribute, print, and return the exit status."""
    from fxround.attribution.attribute import attribute

    model, inputs = loaded(arguments)
    functions: dict[str, Any] = {name: named(text) for name in ("output", "loss") if (text := getattr(arguments, name))}
    asked = {name: getattr(arguments, name) for name in ("probes", "formats", "check", "seed")}
    report = attribute(model, inputs, arguments.policy, **functions, **asked)
    put(report, arguments.json)
    if arguments.formats and arguments.json != "-":
        print(report.sensitivity)
    if arguments.html:
        report.to_html(arguments.html)
    if arguments.draw:
        report.draw(arguments.draw)
    if report.interrupted:
        return INTERRUPTED
    least = arguments.min_bits
    return FAILS if least is not None and not (report.trusted and report.bits >= least) else 0
