"""Run every benchmark of the package, or the one that is named: each module that has a ``main``.

Modules that write into docs/ and measure nothing run only if they are named.

python -m benchmarks [NAME [its own arguments]]
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import benchmarks

WRITERS = ("pictures", "walk")


def main() -> None:
    """Run the benchmark that is named, with the arguments after its name; else run all of them, one after the other."""
    known = [info.name for info in pkgutil.iter_modules(benchmarks.__path__) if not info.name.startswith("__")]
    named = sys.argv.pop(1) if len(sys.argv) > 1 else None
    if named is not None and named not in known:
        sys.exit(f"no benchmark is named {named!r}; there are {', '.join(known)}")
    for name in [name for name in known if name not in WRITERS] if named is None else [named]:
        run = getattr(importlib.import_module(f"benchmarks.{name}"), "main", None)
        if run is not None:
            print(f"\n== {name} ==", flush=True)
            run()


if __name__ == "__main__":
    main()
