"""``./run explore``: every seed is one command, failures are told with it, and what is cut off counts neither way."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import explore

WAITING = """
import time
try:
    print('{0}', flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    {1}
"""
COUNTING = {
    "good": lambda seed: [sys.executable, "-c", f"print({seed})"],
    "bad": lambda seed: [sys.executable, "-c", f"raise SystemExit('seed {seed} is bad')"],
    "slow": lambda seed: [sys.executable, "-c", "import time; time.sleep(60)"],
    "found": lambda seed: [
        sys.executable,
        "-c",
        WAITING.format(f"seed {seed} is bad", "raise SystemExit(1) from None"),
    ],
    "quiet": lambda seed: [
        sys.executable,
        "-c",
        WAITING.format(f"seed {seed} is good", "raise SystemExit(0) from None"),
    ],
    "deaf": lambda seed: [sys.executable, "-c", WAITING.format(f"seed {seed} hangs", "time.sleep(60)")],
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


@pytest.mark.parametrize(
    "kind, told", [("found", "found before it was cut off\nseed 7 is bad"), ("quiet", None), ("deaf", None)]
)
def test_what_is_cut_off_tells_what_it_had_found(kind: str, told: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "GRACE", 0.5 if kind == "deaf" else 60.0)
    unit = explore.Unit.start(kind, 7, COUNTING[kind])
    while not os.fstat(unit.printed.fileno()).st_size:
        time.sleep(0.05)
    assert unit.interrupt() == told
    assert unit.process.poll() is not None


def test_ctrl_c_is_heard_in_the_background_and_keeps_what_was_found() -> None:
    """A shell's job in the background ignores Ctrl-C, and so would its children."""
    code = (
        "import os, signal, sys, threading\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from benchmarks import explore\n"
        "start, finder = explore.Unit.start.__func__, lambda seed: [sys.executable, '-c', sys.argv[1]]\n"
        "def started(cls, *given):\n"
        "    unit = start(cls, *given)\n"
        "    while not os.fstat(unit.printed.fileno()).st_size: pass\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    return unit\n"
        "explore.Unit.start = classmethod(started)\n"
        "print(explore.search(['it'], 7, 600, 1, lambda unit, failure: print(failure), {'it': finder}))\n"
    )
    command = [sys.executable, "-c", code, COUNTING["found"](7)[-1]]
    done = subprocess.run(command, cwd=explore.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "interrupted\nfound before it was cut off\nseed 7 is bad\n0\n"


@pytest.mark.parametrize("kind", explore.FINDERS)
def test_a_command_fixes_what_a_run_depends_on(kind: str) -> None:
    """In any shell: the interpreter, the path, and the order of sets."""
    words = explore.FINDERS[kind](7)
    assert words[:2] == ["env", "PYTHONHASHSEED=7"] and words[2].startswith("PYTHONPATH=")
    printed = subprocess.run(
        [*words[:4], "-c", "import sys; print(sys.executable)"],
        cwd=explore.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(printed.stdout.strip()) == Path(sys.executable)


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

    # Forks: PyTorch is imported once, and the file by each.
    runs = [[], ["--shuffle", "3", "-k", "two or 2"], ["--seed", "5"]]
    program = f"""
import os, sys, hypothesis, pytest, torch
for options in {runs}:
    print("RUN", flush=True)
    child = os.fork()
    if not child:
        status = pytest.main(["-qs", "-p", "no:cacheprovider", "--rootdir", ".", *options, "."])
        sys.stdout.flush()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    usual, shuffled, seeded = (set(re.findall("DRAW.*", text)) for text in done.stdout.split("RUN\n")[1:])
    assert len(usual) == 4 and len(shuffled) == len(shuffled & usual) == 2
    assert len(seeded) == 4 and not seeded & usual
