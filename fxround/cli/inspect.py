"""``fxround inspect``: how a policy rounds each operation of a model.

Example::

    $ fxround inspect fxround.demo:DigitsCNN --shape 4,1,8,8 --policy bfloat16
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fxround.cli.arguments import POLICY, add_model, said
from fxround.cli.loading import loaded


def add_inspect(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser("inspect", **said("show how a policy rounds each operation of a model"))
    add_model(parser)
    parser.add_argument("--policy", default="stochastic", help=POLICY)
    parser.add_argument("--graph", action="store_true", help="also print the graph")
    parser.add_argument(
        "--leaks", action="store_true", help="also print the values that are not in their declared format"
    )
    parser.add_argument("--draw", metavar="FILE", type=Path, help="also draw the graph, as .html, .svg or .json")
    parser.add_argument("--json", action="store_true", help="print summary and coverage as JSON and nothing else")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Compile, print, and return the exit status."""
    import fxround

    model, inputs = loaded(arguments)
    compiled = fxround.compile(model, arguments.policy, example_inputs=inputs)
    tables = {"summary": compiled.summary(), "coverage": compiled.coverage()}
    tables |= {"leaks": compiled.leaks()} if arguments.leaks else {}
    if arguments.draw:
        compiled.draw(arguments.draw)
    if arguments.json:
        print(json.dumps({name: table.to_dict() for name, table in tables.items()}, indent=2))
        return 0
    texts = [compiled.graph_text()] if arguments.graph else []
    print("\n\n".join([*texts, *map(str, tables.values())]))
    return 0
