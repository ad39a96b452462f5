"""``fxround perplexity``: the arguments of the command.

The status is 0, or 130 after Ctrl-C, after which the report holds what was complete.
Example::

    $ fxround perplexity net.py:build --inputs tokens.pt --widths 4:12 --site first=transformer.h.0 --samples 5
"""

from __future__ import annotations

import argparse
from typing import Any

from fxround.cli.arguments import add_model, put, said
from fxround.cli.loading import loaded
from fxround.errors import shown
from fxround.interrupts import INTERRUPTED


def add_perplexity(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "perplexity", **said("measure the perplexity of a language model per width of significands, place and mode")
    )
    add_model(parser)
    parser.add_argument(
        "--widths", type=widths_of, metavar="FROM:TO|P,P,...", help="bits of a significand (default 2 to the dtype's)"
    )
    parser.add_argument(
        "--site",
        type=_site,
        action="append",
        metavar="NAME=GLOB[,GLOB]",
        help="modules that are narrowed together; may be repeated (default everything, attention, mlp and head)",
    )
    parser.add_argument("--samples", type=int, default=10, help="runs in a mode that draws random bits (default 10)")
    parser.add_argument(
        "--mode", action="append", metavar="NAME", help="a mode; may be repeated (default nearest_even and stochastic)"
    )
    parser.add_argument(
        "--accumulate", metavar="ROUNDING", help="of each step of an accumulator (default: the result's)"
    )
    parser.add_argument(
        "--rest", default="reproducible", help="the policy of everything outside of a site (default reproducible)"
    )
    parser.add_argument("--batch-size", type=int, help="split the inputs into batches of this many rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default 0)")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it and nothing else")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    model, inputs = loaded(arguments)
    from fxround.significance.perplexity import MODES, perplexity

    report = perplexity(
        model,
        inputs,
        arguments.widths,
        arguments.samples,
        sites=dict(arguments.site) if arguments.site else None,
        modes=tuple(arguments.mode or MODES),
        accumulate=arguments.accumulate,
        rest=arguments.rest,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        progress=False if arguments.json == "-" else None,
    )
    put(report, arguments.json)
    return 0 if report.complete else INTERRUPTED


def widths_of(text: str) -> tuple[int, ...]:
    """Return the widths of ``4:12``, both included, or of ``4,8,12``."""
    try:
        if ":" in text:
            low, high = map(int, text.split(":"))
            return tuple(range(low, high + 1))
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)}: expected widths as 4:12 or 4,8,12") from None


def _site(text: str) -> tuple[str, tuple[str, ...]]:
    name, equals, globs = text.partition("=")
    if not (name and equals and globs):
        raise argparse.ArgumentTypeError(f"{shown(text)}: expected NAME=GLOB, such as first=transformer.h.0")
    return name, tuple(globs.split(","))
