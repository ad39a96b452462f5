"""``fxround demo``: train a digit classifier, perturb it, and write a report, a table and a drawing.

Example::

    $ fxround demo --policy up_down --samples 20
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any, Final

from fxround.atomic_files import write_file
from fxround.cli.arguments import POLICY, add_device, said
from fxround.cli.loading import device_of

FOLDER: Final = "fxround-demo"


def add_demo(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "demo", **said("train a digit classifier, perturb each of its operations, and count the significant bits")
    )
    parser.add_argument("--policy", default="stochastic", help=POLICY)
    parser.add_argument("--samples", type=int, default=10, help="number of perturbed runs (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training and of the samples (default 0)")
    parser.add_argument(
        "--output", type=Path, default=Path(FOLDER), help=f"folder for the files it writes (default {FOLDER})"
    )
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo, write its files, print, and return the exit status."""
    from fxround import demo, demo_page
    from fxround.significance.bits import require
    from fxround.significance.progress import tracked

    require("sklearn", "demo")
    arguments.output.mkdir(parents=True, exist_ok=True)
    progress = partial(tracked, shown=False if arguments.json else None)
    drawing = arguments.output / "graph.svg"
    device = device_of(arguments.device)
    result = demo.run(arguments.policy, arguments.samples, arguments.seed, progress, drawing=drawing, device=device)
    result.write_rows(arguments.output / "table.csv")
    text = json.dumps(result.to_dict() | {"table": str(arguments.output / "table.csv")}, indent=2)
    write_file(arguments.output / "report.json", text + "\n")
    print(text) if arguments.json else demo_page.demo(result, arguments.output)
    return 0
