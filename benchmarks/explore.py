"""Look for defects with fresh seeds: what the tests judge with fixed ones, for any length of time.

    ./run explore [--minutes 3] [--seed N] [--jobs 2] [--only NAME ...] [--output FILE]

A unit is a command with a seed of its own:

graphs    random graphs and a random module (``benchmarks.random_models``)
tests     a few files of tests in one process, in a random order, with other draws and another order of sets
foreign   a file of tests under a PyTorch whose kernels are off by an ulp (``tests/support/foreign.py``)
texts     the texts of a GPU that several models need, for an architecture
models    training steps of a model through the texts of a GPU, as host code

Units run side by side until the time is over, or Ctrl-C. What still runs then is interrupted: it fails if it had found
something, and counts neither way otherwise. A unit that fails is printed at once with the command that repeats it from
the root of the repository in any shell, and stored in the file, one line of JSON each. The exit status is 1 if anything
failed. What is found becomes a fixed case of a test.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

ROOT: Final = Path(__file__).resolve().parents[1]
# Seconds after which a unit hangs.
LIMIT: Final = 1800.0
# The last lines of a unit that fails.
TOLD: Final = 60
# Seconds in which an interrupted unit tells what it has found.
GRACE: Final = 10.0
# pytest's statuses where a test failed, and where no test was chosen; random models have the first as well.
FOUND: Final = 1
NOTHING: Final = 5


def python(seed: int, *words: str, path: str = "") -> list[str]:
    """Return a command for this interpreter: the order of sets is drawn from the seed, as everything else."""
    own = Path(sys.executable)
    name = str(own.relative_to(ROOT)) if own.is_relative_to(ROOT) else str(own)
    variables = [f"PYTHONHASHSEED={seed % 2**32}", f"PYTHONPATH={path}"]
    return ["env", *variables, name, *words]


def pytest(seed: int, *words: str, path: str = "") -> list[str]:
    """Return a command that ends at the first test that fails, so that nothing is lost if it is cut off later."""
    return python(
        seed,
        *["-m", "pytest", "-x", "-q", "--tb=short", "-n", "0", "-p", "no:cacheprovider", "--seed"],
        str(seed),
        *words,
        path=path,
    )


def files(chosen: random.Random, count: int) -> list[str]:
    """Draw files of tests; those of the design have nothing to draw."""
    known = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_design.py")
    return [str(path.relative_to(ROOT)) for path in chosen.sample(known, count)]


def graphs(seed: int) -> list[str]:
    """A hundred graphs and a module."""
    return python(seed, *["-m", "benchmarks.random_models", "--graphs", "100", "--modules", "1", "--seed"], str(seed))


def tests(seed: int) -> list[str]:
    """Three files in one process, shuffled."""
    return pytest(seed, "--shuffle", str(seed), *files(random.Random(seed), 3))


def foreign(seed: int) -> list[str]:
    """A file under other kernels."""
    return pytest(seed, "-p", "foreign", *files(random.Random(seed), 1), path="tests/support")


def texts(seed: int) -> list[str]:
    """The texts of a GPU for one architecture."""
    from benchmarks.cuda import ARCHITECTURES

    return python(seed, *["-m", "benchmarks.cuda", "--compile", "--arch"], random.Random(seed).choice([*ARCHITECTURES]))


def models(seed: int) -> list[str]:
    """Training steps of one model through the texts of a GPU; a ResNet-18 takes too long."""
    known = ("digits_cnn", "unet", "recurrent", "encoder", "vit", "bert", "gpt2")
    return python(seed, "tests/support/host_models.py", random.Random(seed).choice(known), path=".")


Finder = Callable[[int], list[str]]
FINDERS: Final[dict[str, Finder]] = {f.__name__: f for f in (graphs, tests, foreign, texts, models)}
# One after the other, again and again: what is quick and draws most comes most often.
TURNS: Final = ("graphs", "tests", "foreign", "tests", "graphs", "tests", "models", "tests", "texts")


@dataclass
class Unit:
    """A command that runs, and what it prints."""

    kind: str
    seed: int
    command: list[str]
    printed: IO[bytes]
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, kind: str, seed: int, finder: Finder) -> Unit:
        """Start the unit of a seed in a session of its own, so that Ctrl-C reaches this process alone."""
        command = finder(seed)
        printed = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the unit)
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=printed,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_interruptible,
        )
        return cls(kind, seed, command, printed, process)

    def failure(self) -> str | None:
        """What went wrong with a unit that ended or hangs."""
        status = self.process.poll()
        if status is None:
            self.stop()
            return f"no end after {LIMIT:.0f} s\n{self.told()}"
        return None if status in (0, NOTHING) else f"exit status {status}\n{self.told()}"

    def interrupt(self) -> str | None:
        """End it early; return what it had found until then."""
        if self.process.poll() is not None:
            return self.failure()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        failed = self.process.poll() == FOUND
        self.stop()
        return f"found before it was cut off\n{self.told()}" if failed else None

    def told(self) -> str:
        """Return its last lines."""
        self.printed.seek(0)
        return "\n".join(self.printed.read().decode(errors="replace").splitlines()[-TOLD:])

    def stop(self) -> None:
        """Kill it and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _interruptible() -> None:
    """A process whose parent ignores Ctrl-C, as a job in the background, would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ended(running: list[Unit], until: float) -> Iterator[Unit]:
    """Wait until a unit ends or hangs, or the time is over; yield those that did, which run no longer."""
    while time.monotonic() < until:
        done = [u for u in running if u.process.poll() is not None or time.monotonic() > u.began + LIMIT]
        for unit in done:
            running.remove(unit)
            yield unit
        if done:
            return
        time.sleep(0.2)


def search(
    kinds: Sequence[str],
    seed: int,
    seconds: float,
    jobs: int,
    report: Callable[[Unit, str | None], None],
    finders: dict[str, Finder] = FINDERS,
) -> int:
    """Run units until the time is over or Ctrl-C; returns how many were cut off with nothing found."""
    until, running, number, cut = time.monotonic() + seconds, list[Unit](), 0, 0
    try:
        while time.monotonic() < until:
            while len(running) < jobs:
                kind = kinds[number % len(kinds)]
                running.append(Unit.start(kind, seed + number, finders[kind]))
                number += 1
            for unit in ended(running, until):
                report(unit, unit.failure())
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    for unit in running:
        lines = unit.interrupt()
        cut += lines is None
        if lines is not None:
            report(unit, lines)
    return cut


def main() -> None:
    """Search, show progress, print every failure with its command, then the counts."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="how long (3)")
    parser.add_argument("--seed", type=int, help="of the first unit; the next ones follow (drawn afresh, and printed)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="units at once (processors)")
    parser.add_argument("--only", nargs="+", choices=FINDERS, help="units of these kinds alone")
    parser.add_argument("--output", type=Path, help="a file to which failures are appended")
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(1, 2**31) if chosen.seed is None else chosen.seed
    kinds = tuple(kind for kind in TURNS if chosen.only is None or kind in chosen.only)
    counts, failed, began = Counter[str](), list[str](), time.monotonic()
    print(f"seed {seed}", flush=True)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("explore", total=None)

        def report(unit: Unit, failure: str | None) -> None:
            counts[unit.kind] += 1
            if failure is not None:
                command = shlex.join(unit.command)
                failed.append(command)
                print(f"\nFAILED {unit.kind}, seed {unit.seed}: {failure}\nagain: {command}\n", flush=True)
                if chosen.output is not None:
                    line = {"kind": unit.kind, "seed": unit.seed, "command": command, "failure": failure}
                    with chosen.output.open("a") as file:
                        file.write(json.dumps(line) + "\n")
            bar.update(task, description=f"{counts.total()} units, {len(failed)} failures")

        cut = search(kinds, seed, 60 * chosen.minutes, chosen.jobs, report)
    done = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"
    minutes = (time.monotonic() - began) / 60
    print(f"seed {seed}, {minutes:.1f} minutes: units {done}; {cut} cut off; {len(failed)} failures")
    for command in failed:
        print(f"  {command}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
