"""Run every benchmark of the package: each module that has a ``main``."""

from __future__ import annotations

import importlib
import pkgutil

import benchmarks


def main() -> None:
    """One after the other, in the order of their names."""
    for info in pkgutil.iter_modules(benchmarks.__path__):
        if info.name.startswith("__"):
            continue
        run = getattr(importlib.import_module(f"benchmarks.{info.name}"), "main", None)
        if run is not None:
            print(f"\n== {info.name} ==", flush=True)
            run()


if __name__ == "__main__":
    main()
