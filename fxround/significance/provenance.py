"""Provenance: the policy, seed, model, versions and machine that are needed to repeat a study, and its cost."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from torch import nn

from fxround.fingerprint import hash
from fxround.policy import Policy

_PACKAGES: Final = ("fxround", "torch", "numpy", "llvmlite", "significantdigits", "scipy")
_MISSING: Final = "not installed as a package"


def provenance(
    model: nn.Module, policy: Policy, seed: int, n_jobs: int, seconds: float, parts: dict[str, float]
) -> dict[str, Any]:
    """Return policy, seed, model, versions, machine, and the study's seconds and memory as plain data."""
    return {
        "policy": policy.to_dict(),
        "seed": seed,
        "model": {
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "parameters": sum(p.numel() for p in model.parameters()),
            "hash": hash(model),
        },
        "versions": {"python": platform.python_version(), **{name: version_of(name) or _MISSING for name in _PACKAGES}},
        "machine": {
            "platform": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "workers": n_jobs,
        },
        "seconds": {"all": seconds, **parts},
        "peak_memory_mb": peak_memory() / 1e6,
    }


def peak_memory() -> int:
    """Return the most bytes that this process has had resident since its start; 0 on Windows, which does not say."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def processor() -> str:
    """Return the name of the processor, as the operating system reports it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, "") or platform.processor() or platform.machine()
    except OSError:
        return platform.processor()


def version_of(package: str) -> str:
    """Return the version of an installed package, "" if it is missing."""
    if package == "torch":  # its metadata leaves out the build, such as +cu130
        return str(torch.__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
