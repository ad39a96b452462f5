"""The parts of this installation, and whether it works: what ``fxround doctor`` prints.

It reads versions, the processor, threads, the cache of machine code, GPUs and optional packages, and computes three
roundings whose results are known. The core is broken if one of the checks in ``problems`` fails; a missing extra or
an unusable cache breaks nothing.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any, Final

import torch

from fxround.compiler.torch_version import Standing, standing_of
from fxround.eager.round import round
from fxround.errors import FxroundError
from fxround.float_state import require_ieee_arithmetic
from fxround.runtime import disk_cache
from fxround.runtime.cpu.code import current_set
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.cuda.driver import devices_found, problem_of
from fxround.significance.provenance import processor, version_of
from fxround.version import VERSION
from fxround.views.table import Table, Tabled

# The packages that fxround cannot work without.
CORE: Final = ("torch", "numpy", "networkx", "llvmlite")
# Extras for work on fxround itself.
_WORK: Final = ("dev", "docs", "test")
_STANDING: Final = {"tested": "tested", "warned": "not tested: it works, with a warning", "refused": "refused"}
# A value, a format, and the rounded value: a tie to even, an overflow, a float below half of the least number.
_KNOWN: Final = ((1 + 2.0**-8, "bfloat16", 1.0), (1e6, "e5m2", float("inf")), (2.0**-11, "e4m3fn", 0.0))


@dataclass(frozen=True, repr=False)
class Diagnosis(Tabled):
    """The findings of ``fxround doctor``.

    versions        of Python, fxround and the packages of the core; "" for a missing package
    torch           whether the version of PyTorch is tested, and the probe's answer if it is not
    machine         the system, the processor, its cores, PyTorch's threads, the instruction sets of kernels
    cache           the directory ("" if it is off), its entries, their bytes, and why it cannot be written to, if so
    gpus            names, each with the reason why kernels cannot run on it; "" if they can
    missing         by extra, the packages that are not installed; empty if fxround itself is not an installed package
    problems        the defects of the core, each with what to do; empty if it works
    """

    versions: dict[str, str]
    torch: Standing
    machine: dict[str, Any]
    cache: dict[str, Any]
    gpus: dict[str, str]
    missing: dict[str, tuple[str, ...]]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        return asdict(self)

    def table(self) -> Table:
        """Return a table with one row per fact."""
        versions = {**self.versions, "torch": f"{self.torch.version}, {_STANDING[self.torch.verdict]}"}
        rows: list[tuple[str, str]] = [(name, version or "missing") for name, version in versions.items()]
        rows += [(name, str(value)) for name, value in self.machine.items()]
        rows.append(("cache", self._cached()))
        rows += [("GPU", f"{name}: {problem or 'usable'}") for name, problem in self.gpus.items()]
        rows += [] if self.gpus else [("GPU", devices_found())]
        for extra, packages in self.missing.items():
            what = f"{', '.join(packages)} missing: pip install 'fxround[{extra}]'" if packages else "complete"
            rows.append((f"extra {extra}", what))
        note = "\n".join(f"BROKEN: {problem}" for problem in self.problems) or "The core works."
        if self.torch.verdict == "warned":
            note = f"{note}\n{self.torch.reason}"
        return Table(("what", "found"), tuple(rows), note=note)

    def _cached(self) -> str:
        if not self.cache["directory"]:
            return f"off ({disk_cache.VARIABLE})"
        limit = disk_cache.LIMIT_BYTES >> 20
        size = f"{self.cache['entries']:,} entries, {self.cache['bytes'] / 2**20:.1f} of {limit} MiB"
        return f"{self.cache['directory']}: {size}, {self.cache['problem'] or 'writable'}"


def diagnose() -> Diagnosis:
    """Examine this installation. Raises nothing, and writes nothing except the cache of machine code.

    A version of PyTorch that is not tested is probed first, which takes some seconds, once.
    """
    usage, standing = disk_cache.usage(), standing_of(str(torch.__version__))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = {
        "system": platform.platform(),
        "processor": processor() or platform.machine(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "instruction sets": ", ".join(instruction_sets()),
    }
    return Diagnosis(
        {"python": platform.python_version(), "fxround": VERSION, **{name: version_of(name) for name in CORE}},
        standing,
        machine,
        asdict(usage) | {"directory": str(usage.directory or "")},
        {f"cuda:{i}, {torch.cuda.get_device_name(i)}": problem_of(i) for i in range(torch.cuda.device_count())},
        {extra: tuple(name for name in packages if not version_of(name)) for extra, packages in _extras().items()},
        tuple(_problems(standing)),
    )


def _problems(standing: Standing) -> Iterator[str]:
    """Yield the defects of the core."""
    if standing.verdict == "refused":
        yield standing.reason
    try:
        require_ieee_arithmetic()
    except FxroundError as error:
        yield str(error)
    missing = [name for name in CORE if not version_of(name)]
    if missing:
        yield f"{', '.join(missing)} not installed: pip install fxround"
    try:
        for value, form, right in _KNOWN:
            result = round(torch.tensor([value]), form).item()
            if result != right:
                yield (
                    f"{value} rounded to {form} is {result} and should be {right}, by code for {current_set()}: "
                    "call fxround.selftest(), and report its message"
                )
    except Exception as error:  # any error of LLVM, the linker or the system is a finding
        yield f"no kernel can be compiled and run: {type(error).__name__}: {error}"


def _extras() -> dict[str, tuple[str, ...]]:
    """Return the packages of each extra for users, as the installed package declares them."""
    try:
        declared = metadata("fxround")
    except PackageNotFoundError:
        return {}
    lines = declared.get_all("Requires-Dist") or []

    def names(extra: str) -> Iterator[str]:
        for line in lines:
            if f'extra == "{extra}"' in line:
                nested = re.match(r"fxround\[(\w+)\]", line)
                yield from names(nested[1]) if nested else re.findall(r"^[\w.-]*\w", line)

    return {extra: tuple(names(extra)) for extra in declared.get_all("Provides-Extra") or [] if extra not in _WORK}
