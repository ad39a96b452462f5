"""``--quick``: the core tests of all files, then first cases in turn; the rest is skipped by name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent
FILE = """
import pytest
@pytest.mark.parametrize("case", [1, 2, 3])
def test_first(case): assert case == 1
def test_second(): pass
def test_inspect_prints_summary_and_coverage(): pass
"""


def quick(place: Path, started: float) -> str:
    shutil.copy(TESTS / "conftest.py", place)
    (place / "cli").mkdir()
    for name in ("cli/test_cli", "test_other"):
        (place / f"{name}.py").write_text(FILE)
    command = [sys.executable, "-m", "pytest", "--quick", "-v", "-p", "no:cacheprovider", "--rootdir", str(place), "."]
    environment = os.environ | {"FXROUND_QUICK_STARTED": str(started)}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_first_cases_are_run_in_turn_the_core_of_every_file_first(tmp_path: Path) -> None:
    text = quick(tmp_path, time.time())
    assert re.findall(r"(test_\w+)\.py::(test_\w+)", text) == [
        ("test_cli", "test_inspect_prints_summary_and_coverage"),
        ("test_other", "test_first"),
        ("test_cli", "test_first"),
        ("test_other", "test_second"),
        ("test_cli", "test_second"),
        ("test_other", "test_inspect_prints_summary_and_coverage"),
    ]
    assert "6 passed, 4 deselected" in text and "--quick: 6 tests" in text


def test_when_time_is_over_the_cores_are_still_run(tmp_path: Path) -> None:
    assert "2 passed, 4 skipped, 4 deselected" in quick(tmp_path, 0.0)


def test_every_named_core_exists() -> None:
    cores = re.findall(r'^    "([\w/]+)": "(test_\w+)",$', (TESTS / "conftest.py").read_text(), re.MULTILINE)
    assert cores
    for file, name in cores:
        assert f"def {name}(" in (TESTS / f"{file}.py").read_text(), (file, name)
