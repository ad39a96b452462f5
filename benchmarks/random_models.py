"""Random models for any length of time: the search that tests/test_random_models.py makes for a minute.

    python -m benchmarks.random_models --minutes 60 [--graphs N] [--seed 0] [--modules 20] [--output FILE]

Graphs are drawn by Hypothesis, a hundred for each seed, and judged as in the tests: fused, unfused, in later calls
and between guard words they must have the bits of the NumPy reference, and every node must be near binary64. After
every --modules hundreds, a whole module is tested with ``fxround.compile``, a file and ``torch.compile``. A failure is
shrunk, printed, and stored in the file, one line of JSON each; the search continues with the next seed. Ctrl-C ends it
and keeps the failures found.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from random_builder import Recipe
from random_graphs import RECIPES
from random_judge import as_if_large, judge, numpy_maps
from random_modules import FUNCTIONS, Drawn, judge_module
from random_reference import quickly

HUNDRED = 100


class Shrinking(KeyboardInterrupt):
    """Ctrl-C while a failure was made smaller; its text tells the smallest that is known."""


def search(number: int, counts: Counter[str]) -> str | None:
    """Judge a hundred graphs; return the smallest that fails with its recipe as text, or None."""
    failed: list[Recipe] = []

    @seed(number)
    @settings(
        max_examples=HUNDRED,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(recipe=RECIPES)
    def hold(recipe: Recipe) -> None:
        maps.errors.clear()
        counts["graphs"] += 1
        try:
            with as_if_large(recipe.small):
                judge(recipe, maps)
        except Exception:
            failed[:] = [recipe]
            raise

    with quickly(), numpy_maps() as maps:
        try:
            hold()
        except KeyboardInterrupt as stop:
            raise (Shrinking(f"interrupted before it was made smaller\n{failed[0]}") if failed else stop) from None
        except Exception as error:  # any exception of a model is a finding
            return f"{''.join(map(str, failed))}\n{type(error).__name__}: {error}"
    return None


def module(number: int, counts: Counter[str]) -> str | None:
    """Judge a module in all ways of calling it; return what failed, or None."""
    chosen = random.Random(number)
    steps = tuple((chosen.randrange(len(FUNCTIONS)), chosen.randrange(4), chosen.randrange(6)) for _ in range(7))
    policy = chosen.choice(("reproducible", "stochastic", "up_down", "bfloat16", "identity"))
    counts["modules"] += 1
    with quickly(graphs=False), as_if_large(), tempfile.TemporaryDirectory() as folder:
        try:
            judge_module(Drawn(steps, 2), policy, Path(folder))
        except Exception as error:  # as above
            return f"Drawn({steps}, 2), {policy!r}\n{type(error).__name__}: {error}"
    return None


def main() -> None:
    """Search until the time is over, or N graphs were judged; exit with status 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (1)")
    parser.add_argument("--graphs", type=int, default=0, help="end after N graphs, a hundred a seed (0: by the time)")
    parser.add_argument("--seed", type=int, default=0, help="of the first hundred; the next ones follow (0)")
    parser.add_argument("--modules", type=int, default=5, help="one module after N hundreds of graphs (5)")
    parser.add_argument("--output", type=Path, help="a file to which failures are appended")
    given_ = parser.parse_args()
    counts: Counter[str] = Counter()
    begin, worked, failures = time.monotonic(), time.process_time(), 0
    number, name = given_.seed, ""

    def tell(failure: str) -> None:
        nonlocal failures
        failures += 1
        print(f"\nseed {number}: {failure}\n", flush=True)
        if given_.output is not None:
            with given_.output.open("a") as file:
                file.write(json.dumps({"seed": number, "kind": name, "failure": failure}) + "\n")

    try:
        while counts["graphs"] < given_.graphs or (
            not given_.graphs and time.monotonic() < begin + 60 * given_.minutes
        ):
            kinds: list[Any] = [search] + ([module] if (number - given_.seed + 1) % given_.modules == 0 else [])
            for kind in kinds:
                name = kind.__name__
                told = kind(number, counts)
                if told is not None:
                    tell(told)
            number += 1
            minutes = (time.monotonic() - begin) / 60
            print(
                f"{minutes:6.1f} min  {counts['graphs']:,} graphs, {counts['modules']} modules, {failures} failures",
                flush=True,
            )
    except KeyboardInterrupt as stop:
        if isinstance(stop, Shrinking):
            tell(str(stop))
        print("interrupted")
    print(
        f"seeds {given_.seed} to {number - 1}: {counts['graphs']:,} graphs, {counts['modules']} modules, "
        f"{failures} failures in {(time.monotonic() - begin) / 60:.1f} minutes of one process, "
        f"{(time.process_time() - worked) / 60:.1f} of its processor's"
    )
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
