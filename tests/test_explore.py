"""``./run explore``: every seed is one command, failures are told with it, and what is cut off counts neither way."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import explore

COUNTING = {
    "good": lambda seed: ["python", "-c", f"print({seed})"],
    "bad": lambda seed: ["python", "-c", f"raise SystemExit('seed {seed} is bad')"],
    "slow": lambda seed: ["python", "-c", "import time; time.sleep(60)"],
}


def found(kinds: list[str], seconds: float) -> tuple[list[tuple[str, int, str | None]], int]:
    told: list[tuple[str, int, str | None]] = []
    cut = explore.search(
        kinds, 7, seconds, 1, lambda unit, failure: told.append((unit.kind, unit.seed, failure)), COUNTING
    )
    return told, cut


def test_a_unit_that_fails_is_told_with_its_seed() -> None:
    told, _ = found(["good", "bad"], 3)
    assert told[:2] == [("good", 7, None), ("bad", 8, "exit status 1\nseed 8 is bad")]


def test_what_is_cut_off_counts_neither_way_and_is_killed() -> None:
    began = time.monotonic()
    assert found(["slow"], 0.5) == ([], 1)
    assert time.monotonic() - began < 30


def test_a_unit_that_hangs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "LIMIT", 0.5)
    told, _ = found(["slow"], 1.5)
    assert told and told[0][2] is not None and told[0][2].startswith("no end after")


def test_a_seed_is_a_command_and_another_seed_another() -> None:
    for name, finder in explore.FINDERS.items():
        assert finder(1) == finder(1), name
        assert len({shlex.join(finder(seed)) for seed in range(20)}) > 1, name
    assert set(explore.TURNS) == set(explore.FINDERS)


def test_a_test_draws_the_same_numbers_in_every_order_and_others_with_a_seed(tmp_path: Path) -> None:
    """Alone, after others, with a shared fixture first: the name decides."""
    (tmp_path / "conftest.py").write_text((explore.ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_draws.py").write_text(
        "import random, numpy as np, pytest, torch\n"
        "M = torch.rand(()).item()\n"
        "@pytest.fixture(scope='module')\n"
        "def shared(): return torch.rand(()).item()\n"
        "def drawn(): return torch.rand(()).item(), random.random(), float(np.random.rand())\n"
        "@pytest.mark.parametrize('case', range(3))\n"
        "def test_one(case, shared): print('DRAW one', case, M, shared, *drawn())\n"
        "def test_two(): print('DRAW two', *drawn())\n"
    )

    def lines(*options: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "-qs", "-p", "no:cacheprovider", "--rootdir", ".", *options, "."]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return {line[line.index("DRAW") :] for line in done.stdout.splitlines() if "DRAW" in line}

    usual = lines()
    assert len(usual) == 4 and len(lines("--shuffle", "3", "-k", "two or 2") & usual) == 2
    assert not lines("--seed", "5") & usual
