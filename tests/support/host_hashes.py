"""The stored hashes of docs/reproducibility.md through the texts of a GPU, run as host code.

``PYTHONPATH=. python tests/support/host_hashes.py [STEPS]`` trains every experiment under every policy and compares the
hashes of the weights after 5 steps, and for 100 steps those at the end. It prints a line for each, and fails if one
differs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cuda_host import HostLauncher
from host_gpu import COMPILER

from benchmarks.experiments import EARLY, EXPERIMENTS
from benchmarks.reproducibility import HASHES, POLICIES, SHOWN, STEPS, run
from fxround.runtime.cuda.launcher import launching

PAGE = Path(__file__).parents[2] / "docs/reproducibility.md"


def stated() -> dict[tuple[str, str, str], str]:
    """The first digits of each hash that the document states, by experiment, policy and what was hashed."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return {
        (row[0], row[1], what): cell.strip("`")
        for row in rows
        if row[0] in EXPERIMENTS
        for what, cell in zip(HASHES, row[2:], strict=False)
    }


def differing(name: str, policy: str, found: dict[str, Any], kinds: tuple[str, ...]) -> list[str]:
    """The hashes of a run that are not the document's."""
    table = stated()
    return [what for what in kinds if found[what].removeprefix("sha256:")[:SHOWN] != table[name, policy, what]]


def main(steps: int) -> int:
    """Run everything; returns the number of runs that differ."""
    kinds = HASHES if steps == STEPS else ("initial", "early")
    failed = 0
    with TemporaryDirectory() as folder, launching(HostLauncher(Path(folder), COMPILER)):
        for name in EXPERIMENTS:
            for policy in POLICIES:
                began = time.process_time()
                wrong = differing(name, policy, run(name, policy, steps), kinds)
                failed += bool(wrong)
                took = f"{time.process_time() - began:.0f} s without the compiler's"
                print(f"{name}, {policy}, {steps} steps: {wrong or 'equal'} ({took})", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else EARLY))
