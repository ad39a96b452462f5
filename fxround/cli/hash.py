"""``fxround hash`` and ``fxround diff``: golden hashes and reports of a model for continuous integration.

The status of ``hash --check`` and of ``diff`` is 0 if all values are equal, and 1 otherwise; with ``diff --lost BITS``,
for reports, it is 1 if a place has lost more bits. Example::

    $ fxround hash net.py:build --gradients --save golden.json       # once, kept with the code
    $ fxround hash net.py:build --gradients --check golden.json      # at every commit
    $ fxround diff golden.json new.json                              # files of two commits, side by side
    $ fxround diff golden.report new.report --lost 1                 # the same for reports of variability --save
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from fxround.choices import REPRODUCIBLE
from fxround.cli.arguments import add_model, put, said
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
    parser = commands.add_parser(
        "diff", **said("compare two files of hash --save, or of variability --save, such as those of two commits")
    )
    parser.add_argument("files", nargs=2, type=Path, metavar="FILE", help="a file of hash --save or variability --save")
    parser.add_argument(
        "--lost",
        type=float,
        metavar="BITS",
        help="of reports: exit with status 1 only if a result, a layer or an operation has lost more mean bits",
    )
    parser.add_argument("--json", metavar="FILE", help="of reports: write the comparison as JSON; - prints it alone")
    parser.set_defaults(command=run_diff)


def run_diff(arguments: argparse.Namespace) -> int:
    """Compare two files, print both side by side, and return the exit status."""
    from fxround.invariance.golden import Comparison, read

    one, other = arguments.files
    kinds = [_is_archive(path) for path in arguments.files]
    if all(kinds):
        return _diff_reports(arguments)
    if any(kinds):
        report, hashes = (one, other) if kinds[0] else (other, one)
        raise ValueError(
            f"{report} is a report of variability --save, and {hashes} is none; expected two reports, or two files of "
            "hash --save"
        )
    if arguments.lost is not None or arguments.json is not None:
        raise ValueError(f"--lost and --json compare reports of variability --save; {one} and {other} are none")
    comparison = Comparison(read(one), read(other), str(one), str(other))
    print(comparison.table())
    return _said(comparison)


def _is_archive(path: Path) -> bool:
    """Whether a file is an archive of PyTorch, as reports are. Raises OSError for a file that cannot be read."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _diff_reports(arguments: argparse.Namespace) -> int:
    from fxround.significance.report import load_report

    one, other = arguments.files
    if arguments.lost is not None and not arguments.lost >= 0:
        raise ValueError(f"--lost is {arguments.lost}; expected a number of bits, 0 or more")
    difference = load_report(one).difference(load_report(other), (str(one), str(other)))
    put(difference, arguments.json)
    if arguments.lost is None:
        return _said(difference)
    lost = difference.lost(arguments.lost)
    if lost:
        print(f"fxround: more than {arguments.lost:g} bits are lost in {', '.join(lost)}", file=sys.stderr)
    return DIFFERS if lost else 0


def _said(comparison: Any) -> int:
    if not comparison.differing:
        return 0
    print(f"fxround: {comparison.first}", file=sys.stderr)
    return DIFFERS
