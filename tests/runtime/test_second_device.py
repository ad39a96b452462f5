"""Models on a device that is not the CPU, without a GPU: the CPU's bits, on the device, from every study and command.

``second_device`` says how. It runs in a process of its own, since PyTorch keeps a device that was registered.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import second_device

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The traceback of each case, "" for none."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler: install g++ to run models on a second device")
    folder = str(tmp_path_factory.mktemp("second"))
    command = [sys.executable, second_device.__file__, folder, *second_device.CASES, *second_device.ALONE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests/support")))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("case", [*second_device.CASES, *second_device.ALONE])
def test_a_model_runs_on_a_second_device_with_the_cpus_bits(problems: dict[str, str], case: str) -> None:
    assert problems[case] == ""
