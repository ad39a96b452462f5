"""``fxround compare``: the arguments of the command, and its exit status for continuous integration.

The status is 0, 1 if a policy failed, or 130 after Ctrl-C, after which the report holds what was complete. Example::

    $ fxround compare net.py:build --inputs net.py:batches --policies bfloat16 int8 nvfp4 --metric accuracy
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, Final

from fxround.cli.arguments import add_metric_choices, add_model, metrics_of, put, said
from fxround.cli.loading import loaded
from fxround.errors import shown
from fxround.interrupts import INTERRUPTED

FAILS: Final = 1
# A name of the caller's in front of a policy. No policy begins like this.
_NAMED: Final = re.compile(r"([\w-]+)=(.+)")


def add_compare(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "compare", **said("compare policies: metrics of a model on data under each, bits of its values, multiply-adds")
    )
    add_model(parser)
    parser.add_argument(
        "--policies",
        nargs="+",
        required=True,
        metavar="POLICY|NAME=POLICY",
        help="presets, formats, scaled formats, roundings or .toml files, each with a name of its own in front or not",
    )
    parser.add_argument(
        "--metric",
        nargs="+",
        action="extend",
        metavar="NAME|MODULE:FUNCTION",
        help="a metric, such as accuracy, or a function of (result, target); may be several (default sqnr)",
    )
    add_metric_choices(parser)
    parser.add_argument("--samples", type=int, default=5, help="runs of a policy that draws random bits (default 5)")
    parser.add_argument("--batch-size", type=int, help="split the inputs into batches of this many rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="number of worker processes, -1 for all cores (default 1)")
    parser.add_argument(
        "--path", type=Path, metavar="FILE", help="file for the rows, from which an interrupted comparison continues"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it and nothing else")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one page")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw metrics against bits, in the format of the suffix"
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return the exit status."""
    from fxround.tuning.compare import compare

    model, inputs = loaded(arguments)
    report = compare(
        model,
        inputs,
        policies_of(arguments.policies),
        metrics_of(arguments.metric or ["sqnr"], arguments),
        samples=arguments.samples,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        path=arguments.path,
        n_jobs=arguments.jobs,
        progress=False if arguments.json == "-" else None,
    )
    put(report, arguments.json)
    if arguments.html:
        report.to_html(arguments.html)
    if arguments.plot:
        report.plot(arguments.plot)
    if report.interrupted:
        return INTERRUPTED
    return FAILS if any(row.error for row in report.policies) else 0


def policies_of(texts: list[str]) -> dict[str, str] | list[str]:
    """Return policies by their names if one has a name. Raises ValueError for two of one name."""
    pairs = [(match[1], match[2]) if (match := _NAMED.fullmatch(text)) else (text, text) for text in texts]
    if all(name == policy for name, policy in pairs):
        return texts
    twice = next((name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"--policies: two have the name {shown(twice)}; write NAME=POLICY for one of them")
    return dict(pairs)
