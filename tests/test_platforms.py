"""What other systems lack: fxround does without it. These tests take parts of Linux away; they are no run elsewhere."""

from __future__ import annotations

from fxround import new_process

# PyTorch keeps what it found when it was imported.
_WITHOUT = """
import os, sys
import torch
import torch._dynamo
del os.geteuid, os.getuid, os.register_at_fork, os.sched_getaffinity
sys.modules.update(pwd=None, resource=None, fcntl=None)

import fxround
from fxround.cli.diagnosis import diagnose
from fxround.runtime import disk_cache
from fxround.significance.provenance import peak_memory

assert disk_cache.directory() is None
found = diagnose()
assert found.problems == () and found.cache["directory"] == "", found
model = torch.nn.Linear(2, 1)
compiled = fxround.compile(model, "bfloat16/toward_zero")
with torch.no_grad():
    model.weight.copy_(torch.tensor([[1.0, 2.0**-8]]))
    model.bias.zero_()
assert compiled(torch.ones(1, 2)).item() == 1.0
sys.platform = "win32"
assert peak_memory() == 0
"""


def test_a_system_without_owners_forks_and_resource_limits_works_without_a_cache() -> None:
    ran = new_process.run(_WITHOUT)
    assert ran.returncode == 0, ran.stderr
