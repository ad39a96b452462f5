"""Models on PyTorch's device "cuda" without a GPU: the CPU's bits, on the device, in training, studies and checks.

``host_gpu`` makes the device. It runs in a process of its own, since PyTorch keeps a device that was registered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import host_gpu
import pytest
import torch
from host_gpu_cases import ALONE, CASES

# Layers for which PyTorch has other kernels or formulas on a GPU.
# Every layer runs by ``python tests/support/host_gpu.py FOLDER layers``.
LAYERS = ["Upsample2d_bicubic", "GRUCell", "index_put"]
NAMES = [*CASES, *ALONE, *LAYERS]
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="a build of PyTorch with CUDA has this device")


@pytest.fixture(scope="module")
def problems(request: pytest.FixtureRequest, compiler: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The traceback of each case that this run takes, "" for none."""
    items = [item for item in request.session.items if item.path == request.path]
    names = [item.name.partition("[")[2].removesuffix("]") for item in items]
    folder = str(tmp_path_factory.mktemp("gpu"))
    command = [sys.executable, host_gpu.__file__, folder, *names]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests/support")))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.part(
    "training, stochastic",
    "torch_compile",
    "exported",
    "state_on_the_device",
    "moved",
    "autocast",
    "replayed",
    "captured_step",
    "two_devices",
    "mixed",
    "GRUCell",
    "index_put",
)
@pytest.mark.parametrize("case", NAMES)
def test_a_model_runs_on_a_host_gpu_with_the_cpus_bits(problems: dict[str, str], case: str) -> None:
    assert problems[case] == ""
