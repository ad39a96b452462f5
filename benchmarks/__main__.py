"""Run every benchmark of the package, or the one that is named: each module that has a ``main``.

Modules that measure nothing (they write into docs/, or look for defects) run only if they are named. ``--isa`` runs
every kernel of fxround as code for an instruction set; with ``avx2``, the kernels of PyTorch, oneDNN and MKL are
limited to AVX2 too.

python -m benchmarks [--isa avx2] [NAME [its own arguments]]
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys

import benchmarks
from fxround.invariance.cases import STOCK_SETS
from fxround.runtime.cpu.code import instruction_set
from fxround.runtime.cpu.llvm.engine import instruction_sets

NAMED = ("pictures", "walk", "tables", "explore", "mutants", "graph_pages")


def main() -> None:
    """Run the benchmark that is named, with the arguments after its name; else run all of them, one after the other."""
    known = [info.name for info in pkgutil.iter_modules(benchmarks.__path__) if not info.name.startswith("__")]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", usage="%(prog)s [--isa ISA] [NAME [its own arguments]]"
    )
    parser.add_argument(
        "--isa", default="host", choices=instruction_sets(), help="instruction set of fxround's kernels"
    )
    parser.add_argument("named", nargs=argparse.REMAINDER, metavar="NAME", help=", ".join(known))
    chosen = parser.parse_args()
    if chosen.named and chosen.named[0] not in known:
        parser.error(f"no benchmark is named {chosen.named[0]!r}; there are {', '.join(known)}")
    names, sys.argv[1:] = chosen.named[:1], chosen.named[1:]
    if chosen.isa == "avx2":
        # PyTorch, oneDNN and MKL read these at the first use of a kernel.
        os.environ.update(STOCK_SETS[chosen.isa])
    with instruction_set(chosen.isa):
        for name in names or [name for name in known if name not in NAMED]:
            run = getattr(importlib.import_module(f"benchmarks.{name}"), "main", None)
            if run is not None:
                print(f"\n== {name} ==", flush=True)
                run()


if __name__ == "__main__":
    main()
