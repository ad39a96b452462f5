"""``fxround doctor``: the arguments of the command, and its exit status: 1 if the core of the installation is broken.

Example::

    $ fxround doctor --json
"""

from __future__ import annotations

import argparse
from typing import Any

from fxround.cli.arguments import said


def add_doctor(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "doctor", **said("print versions, processor and cache, and whether the installation works")
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON and nothing else")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Diagnose, print, and return the exit status: 1 if the core is broken."""
    from fxround.cli.diagnosis import diagnose

    diagnosis = diagnose()
    print(diagnosis.to_json() if arguments.json else diagnosis)
    return 1 if diagnosis.problems else 0
