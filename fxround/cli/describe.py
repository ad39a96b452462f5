"""``fxround describe``: the numbers of a format, and how it treats special cases.

Example::

    $ fxround describe mxfp8
"""

from __future__ import annotations

import argparse
from typing import Any

from fxround.cli.arguments import said


def add_describe(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser("describe", **said("print the numbers of a format, and how it treats special cases"))
    parser.add_argument("format", metavar="FORMAT", help="a format, rounding or scaled format, for example mxfp8")
    parser.add_argument("--json", action="store_true", help="print the description as JSON and nothing else")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Describe, print, and return the exit status."""
    from fxround.views.descriptions import describe

    description = describe(arguments.format)
    print(description.to_json() if arguments.json else description)
    return 0
