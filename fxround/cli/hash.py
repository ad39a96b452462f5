"""``fxround hash`` and ``fxround diff``: golden hashes of a model for continuous integration.

The status of ``hash --check`` and of ``diff`` is 0 if all values are equal, and 1 otherwise. Example::

    $ fxround hash net.py:build --gradients --save golden.json       # once, kept with the code
    $ fxround hash net.py:build --gradients --check golden.json      # at every commit
    $ fxround diff golden.json new.json                              # files of two commits, side by side
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from fxround.choices import REPRODUCIBLE
from fxround.cli.arguments import add_model, said
from fxround.cli.loading import loaded

DIFFERS: Final = 1


def add_hash(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser("hash", **said("hash the results of a model, and compare them with a file of hashes"))
    add_model(parser)
    parser.add_argument("--policy", default=REPRODUCIBLE, help=f"the policy (default {REPRODUCIBLE})")
    parser.add_argument("--gradients", action="store_true", help="hash gradients as well")
    parser.add_argument("--seed", type=int, default=0, help="seed of a policy that draws (default 0)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the hashes as JSON")
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="exit with status 1 unless the hashes are the file's"
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Hash, print, compare, and return the exit status."""
    from fxround.invariance.golden import Comparison, hashes_of, read, write

    golden = read(arguments.check) if arguments.check else None
    model, inputs = loaded(arguments)
    hashes = hashes_of(model, inputs, arguments.policy, gradients=arguments.gradients, seed=arguments.seed)
    for name, text in hashes.values.items():
        print(f"{text}  {name}")
    if arguments.save:
        write(hashes, arguments.save)
    if golden is None:
        return 0
    return _said(Comparison(golden, hashes, str(arguments.check), "this run"))


def add_diff(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser("diff", **said("compare two files of hash --save, such as those of two commits"))
    parser.add_argument("files", nargs=2, type=Path, metavar="FILE", help="a file of hash --save")
    parser.set_defaults(command=run_diff)


def run_diff(arguments: argparse.Namespace) -> int:
    """Compare two files, print both side by side, and return the exit status."""
    from fxround.invariance.golden import Comparison, read

    one, other = arguments.files
    comparison = Comparison(read(one), read(other), str(one), str(other))
    print(comparison.table())
    return _said(comparison)


def _said(comparison: Any) -> int:
    if not comparison.differing:
        return 0
    print(f"fxround: {comparison.first}", file=sys.stderr)
    return DIFFERS
