"""The commands of ``fxround``.

They are demo, inspect, variability, merge, perplexity, compare, tune, attribute, localize, invariance, hash, diff,
describe, selftest and doctor. A command is a file of this folder, with its arguments and ``run``, and a line in
``_parser``. Commands parse arguments, call the library and print; the same results are available as data (``--json``).
A wrong argument prints a message on standard error and exits with status 2, without a traceback; a failed check exits
with status 1, a command interrupted by Ctrl-C with 130. Examples::

    $ fxround demo --policy up_down --samples 20
    $ fxround inspect fxround.demo:DigitsCNN --shape 4,1,8,8 --policy bfloat16
    $ fxround variability net.py:build --inputs images.npy --samples auto --html report.html --min-bits 10
    $ fxround merge part-0.report part-1.report --samples 20
    $ fxround perplexity net.py:build --inputs tokens.pt --widths 4:12 --samples 5
    $ fxround compare net.py:build --inputs images.npy --policies bfloat16 int8:channel nvfp4 --path rows.json
    $ fxround tune net.py:build --inputs images.npy --formats bfloat16 int8:channel --budget '>= 30' --policy t.toml
    $ fxround attribute net.py:build --inputs images.npy --formats bfloat16 e4m3fn
    $ fxround localize net.py:build --inputs images.npy --metric label_flips 0 --level modules
    $ fxround invariance net.py:build --inputs images.npy --axes batch,threads
    $ fxround hash net.py:build --inputs images.npy --check golden.json
    $ fxround describe mxfp8
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from fxround.cli.attribute import add_attribute
from fxround.cli.compare import add_compare
from fxround.cli.demo import add_demo
from fxround.cli.describe import add_describe
from fxround.cli.doctor import add_doctor
from fxround.cli.hash import add_diff, add_hash
from fxround.cli.inspect import add_inspect
from fxround.cli.invariance import add_invariance
from fxround.cli.loading import first_line
from fxround.cli.localize import add_localize
from fxround.cli.merge import add_merge
from fxround.cli.perplexity import add_perplexity
from fxround.cli.selftest import add_selftest
from fxround.cli.tune import add_tune
from fxround.cli.variability import add_variability
from fxround.errors import FxroundError
from fxround.interrupts import INTERRUPTED, SAID, interruptible
from fxround.version import VERSION


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for a failed check, 2 for a wrong argument, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or a pipe that lacks the characters of tables shows "?"
            stream.reconfigure(errors="replace")
    arguments = _parser().parse_args(argv)
    # Here Ctrl-C still ends the process at once. An import that it interrupts may turn it into an error of its own.
    import_module("fxround.module")
    try:
        with interruptible():
            status: int = arguments.command(arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (FxroundError, ValueError, TypeError, ImportError, OSError) as error:
        print(f"fxround: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        from fxround.compiler.signature import REFUSED

        if REFUSED not in getattr(error, "__notes__", ()):
            raise
        print(f"fxround: the model refuses these inputs: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(SAID, file=sys.stderr)
        return INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fxround", description="A rounding compiler for PyTorch.")
    parser.add_argument("--version", action="version", version=f"fxround {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_demo(commands)
    add_inspect(commands)
    add_variability(commands)
    add_merge(commands)
    add_perplexity(commands)
    add_compare(commands)
    add_tune(commands)
    add_localize(commands)
    add_attribute(commands)
    add_invariance(commands)
    add_hash(commands)
    add_diff(commands)
    add_describe(commands)
    add_selftest(commands)
    add_doctor(commands)
    return parser
