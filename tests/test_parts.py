"""``--long``: what a run takes of the tests marked ``part`` and ``long``, and what the summary says of the rest."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parent / "conftest.py"
FILE = """
import pytest
@pytest.mark.part(3)
@pytest.mark.parametrize("case", range(7))
def test_numbers(case): pass
@pytest.mark.part("b", "d")
@pytest.mark.parametrize("case", "abcd")
def test_names(case): pass
@pytest.mark.part(without=("b", "d"))
@pytest.mark.parametrize("case", "abcd")
def test_others(case): pass
@pytest.mark.long
def test_long(): pass
@pytest.mark.parametrize("case", ["a", pytest.param("b", marks=pytest.mark.long)])
def test_case(case): pass
def test_all(): pass
"""
UNKNOWN = """
import pytest
@pytest.mark.part("e")
@pytest.mark.parametrize("case", "abcd")
def test_names(case): pass
"""
# One process: PyTorch is imported once.
RUNS = {
    "usual": "test_file.py",
    "processes": "-n 1 test_file.py",
    "named": "test_file.py::test_names",
    "seeded": "--seed 5 test_file.py",
    "long": "--long test_file.py",
    "unknown": "test_unknown.py",
}
NUMBERS = [f"test_numbers[{i}]" for i in range(7)]
NAMES, OTHERS = ([f"{test}[{name}]" for name in "abcd"] for test in ("test_names", "test_others"))


def test_a_run_takes_the_part_and_a_long_run_all(tmp_path: Path) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_file.py").write_text(FILE)
    (tmp_path / "test_unknown.py").write_text(UNKNOWN)
    program = f"""
import pytest
for name, options in {RUNS}.items():
    print("RUN", name, flush=True)
    pytest.main(["-v", "-p", "no:cacheprovider", "--rootdir", ".", *options.split()])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    texts = dict(re.findall(r"^RUN (\w+)\n(.*?)(?=^RUN|\Z)", done.stdout, re.MULTILINE | re.DOTALL))
    assert texts.keys() == RUNS.keys(), done.stdout + done.stderr
    # A process of xdist reports "PASSED file::test".
    lines = {name: [line for line in text.splitlines() if "PASSED" in line] for name, text in texts.items()}
    passed = {name: re.findall(r"::(test_[\w[\]]+)", "\n".join(of_run)) for name, of_run in lines.items()}
    usual = [*NUMBERS[::3], NAMES[1], NAMES[3], OTHERS[0], OTHERS[2], "test_case[a]", "test_all"]
    assert passed["usual"] == passed["processes"] == usual
    assert "10 cases were left to --long" in texts["usual"] and "10 cases were left to --long" in texts["processes"]
    assert passed["named"] == NAMES and "left to --long" not in texts["named"]
    every = [*NUMBERS, *NAMES, *OTHERS, "test_long", "test_case[a]", "test_case[b]", "test_all"]
    assert passed["long"] == every and "left to --long" not in texts["long"]
    assert len(passed["seeded"]) == len(usual) and passed["seeded"] != usual
    assert "part() names ['e']; the cases are ['a', 'b', 'c', 'd']" in done.stderr + texts["unknown"]
