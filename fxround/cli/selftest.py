"""``fxround selftest``: compare the kernels of this machine with the specification."""

from __future__ import annotations

import argparse
from typing import Any

from fxround.cli.arguments import said
from fxround.cli.loading import device_of


def add_selftest(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser("selftest", **said("compare the kernels of this machine with the specification"))
    parser.add_argument("--device", default="cpu", help="cpu (default), or a CUDA device such as cuda:0")
    parser.add_argument("--json", action="store_true", help="print the comparisons as JSON and nothing else")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return the exit status."""
    import fxround

    report = fxround.selftest(device_of(arguments.device))
    print(report.to_json() if arguments.json else report)
    return 0
