"""Check that training ends in the same bits: two experiments, two policies, and all variations that must not matter.

python -m benchmarks.reproducibility               # the table in docs/reproducibility.md, every variation checked
python -m benchmarks.reproducibility --matrix      # which operators of stock PyTorch and of fxround keep their bits
python -m benchmarks.reproducibility --run cnn --policy stochastic --steps 5    # one run, as JSON
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fxround
from benchmarks.experiments import EARLY, EXPERIMENTS
from benchmarks.harness import header, table
from fxround.runtime.cpu.llvm.engine import instruction_sets

POLICIES = ("reproducible", "stochastic")
STEPS = 100
HASHES = ("initial", "early", "weights", "logits")
SHOWN = 16


def run(name: str, policy: str, steps: int, *, threads: int = 1, isa: str = "host", **more: Any) -> dict[str, Any]:
    """Return an experiment's hashes with a number of threads and the code of an instruction set."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with fxround.instruction_set(isa):
            return EXPERIMENTS[name].run(policy, steps, **more)
    finally:
        torch.set_num_threads(before)


def elsewhere(name: str, policy: str, steps: int, begin: int = 0, checkpoint: Path | None = None) -> dict[str, Any]:
    """Return the same from another process."""
    command = [sys.executable, "-m", "benchmarks.reproducibility", "--run", name, "--policy", policy]
    command += ["--steps", str(steps), "--begin", str(begin)]
    command += ["--checkpoint", str(checkpoint)] if checkpoint else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    hashes: dict[str, Any] = json.loads(done.stdout)
    return hashes


def resumed(name: str, policy: str, steps: int) -> dict[str, Any]:
    """Run half of the steps in one process, and the rest in another that reads its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "checkpoint.pt")
        elsewhere(name, policy, steps // 2, checkpoint=checkpoint)
        return elsewhere(name, policy, steps, begin=steps // 2, checkpoint=checkpoint)


def variations(name: str, policy: str, steps: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every way to run an experiment that must not change a bit, and its result."""
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "1 thread": lambda: run(name, policy, steps),
        "2 threads": lambda: run(name, policy, steps, threads=2),
        **{isa: partial(run, name, policy, steps, isa=isa) for isa in instruction_sets() if isa != "host"},
        "another process": lambda: elsewhere(name, policy, steps),
        "stopped half-way, resumed in another process": lambda: resumed(name, policy, steps),
    }
    for way, make in ways.items():
        hashes = make()
        print(f"{name}, {policy}, {steps} steps, {way}: {hashes}", file=sys.stderr, flush=True)
        yield way, hashes


def rows(steps: int) -> Iterator[tuple[str, ...]]:
    """Yield a row per experiment and policy. Raises AssertionError if a variation has other bits."""
    for name in EXPERIMENTS:
        for policy in POLICIES:
            (_, first), *others = variations(name, policy, steps)
            for way, hashes in others:
                different = {what for what in first if what in hashes and hashes[what] != first[what]}
                assert not different, f"{name}, {policy}: {way} has other {', '.join(sorted(different))}"
            yield row(name, policy, first)


def row(name: str, policy: str, hashes: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table: the first 16 digits of each hash, and the share of right answers."""
    digits = (f"`{hashes[what].removeprefix('sha256:')[:SHOWN]}`" for what in HASHES)
    return (name, policy, *digits, f"{hashes['right']:.1%}")


def columns(steps: int) -> tuple[str, ...]:
    """Return the columns of a row."""
    ends = (f"weights after {EARLY} steps", f"after {steps}", f"logits after {steps}")
    return ("experiment", "policy", "initial weights", *ends, "right")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, the matrix or one run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reproducibility")
    parser.add_argument("--matrix", action="store_true", help="operators by axes, instead of training")
    parser.add_argument("--run", choices=EXPERIMENTS, help="one experiment, as JSON")
    parser.add_argument("--policy", default=POLICIES[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--begin", type=int, default=0, help="the step to go on from, with --checkpoint")
    parser.add_argument(
        "--checkpoint", type=Path, help="read before the first step unless that is 0, written at the end"
    )
    asked = parser.parse_args(argv)
    if asked.run:
        hashes = run(asked.run, asked.policy, asked.steps or EARLY, begin=asked.begin, checkpoint=asked.checkpoint)
        print(json.dumps(hashes))
        return
    print(header(("torch", "fxround", "llvmlite")))
    if asked.matrix:
        from benchmarks.determinism import matrix

        print(matrix())
        return
    print(table(columns(asked.steps or STEPS), rows(asked.steps or STEPS)))


if __name__ == "__main__":
    main()
