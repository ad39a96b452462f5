"""``fxround merge``: the report of all samples of a study, from reports of its parts.

The status is 0, 1 if a check fails, or 2 if the reports are not all parts of one study. Example::

    $ fxround variability net.py:build --first-sample 0 --samples 5 --save part-0.report
    $ fxround variability net.py:build --first-sample 5 --samples 5 --save part-1.report
    $ fxround merge part-0.report part-1.report --samples 10 --html report.html
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fxround.cli.arguments import said
from fxround.cli.variability import add_answers, answer, checks_of


def add_merge(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "merge", **said("merge reports of variability --first-sample to that of all samples, bit for bit")
    )
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="a file of variability --save")
    parser.add_argument("--samples", type=int, help="exit with status 2 unless the reports have this many samples")
    add_answers(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Merge, print, and return the exit status."""
    from fxround.significance.parts import merge
    from fxround.significance.report import load_report

    checks = checks_of(arguments)
    return answer(merge(map(load_report, arguments.reports), samples=arguments.samples), checks, arguments)
