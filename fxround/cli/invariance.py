"""``fxround invariance``: the arguments of the command, and its exit status for continuous integration.

The status is 0 if every axis that applies has one distinct result, 1 otherwise; a wrong argument raises an exception,
which the command line prints. Example::

    $ fxround invariance net.py:build --shape 4,3,32,32 --axes batch,threads --gradients
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from fxround.choices import INVARIANCE_AXES, REPRODUCIBLE
from fxround.cli.arguments import add_model, put, said
from fxround.cli.loading import loaded, named
from fxround.errors import shown

STOCK: Final = "none"


def add_invariance(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "invariance", **said("test whether a model's bits change with batch, threads or machine code")
    )
    add_model(parser)
    parser.add_argument(
        "--policy", default=REPRODUCIBLE, help=f"a policy, or {STOCK} for stock PyTorch (default {REPRODUCIBLE})"
    )
    axes = ",".join(INVARIANCE_AXES)
    parser.add_argument("--axes", default=axes, help=f"some of {axes} (default all)")
    parser.add_argument("--gradients", action="store_true", help="compare gradients as well")
    parser.add_argument(
        "--parallelize",
        metavar="MODULE:CALLABLE",
        help="for the axis world_size: a function of (model, mesh) that shares the model, as parallelize_module does",
    )
    parser.add_argument(
        "--world-sizes", metavar="N,N,...", help="numbers of processes of the axis world_size (default 2,4,8)"
    )
    parser.add_argument("--dim", type=int, default=0, help="batch dimension of the arguments (default 0)")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it and nothing else")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, print, and return the exit status."""
    from fxround.invariance.check import check_invariance

    model, inputs = loaded(arguments)
    shared: dict[str, Any] = {}
    if arguments.world_sizes is not None:
        shared["world_sizes"] = sizes_of(arguments.world_sizes)
    if arguments.parallelize is not None:
        shared["parallelize"] = named(arguments.parallelize)
    report = check_invariance(
        model,
        inputs,
        [name.strip() for name in arguments.axes.split(",")],
        None if arguments.policy == STOCK else arguments.policy,
        gradients=arguments.gradients,
        dim=arguments.dim,
        **shared,
    )
    put(report, arguments.json)
    return 0 if report.invariant else 1


def sizes_of(text: str) -> tuple[int, ...]:
    """Return the numbers of ``--world-sizes``. Raises ValueError for a text that has none."""
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise ValueError(f"--world-sizes {shown(text)}: expected numbers of processes, like 2,4,8") from None
