"""The versions of PyTorch that fxround works with.

Capture uses interfaces that are private to PyTorch, which every version may change. The suite was run with the versions
of ``TESTED``. Any other version is probed once (``torch_probe``): a new interpreter compiles two small models, and
compares their results and gradients, bit for bit, with what they must be. The answer is kept on disk with the machine
code, under the version of PyTorch and the digest of fxround's source. A version that passes warns; a version that fails
is refused.
"""

from __future__ import annotations

import platform
import re
import subprocess
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import torch

from fxround import new_process
from fxround.errors import CaptureError
from fxround.runtime import disk_cache
from fxround.version import VERSION

# docs/platforms.md has the results and their dates. ``./run torch VERSION`` makes them.
TESTED: Final = ("2.11", "2.12", "2.13", "2.14", "2.15")
_PROBE: Final = "from fxround import torch_probe; torch_probe.answer()"
_SECONDS: Final = 300.0
# The probe's last line.
PASSED: Final = "fxround: the probe passed"
FAILED: Final = "fxround: the probe failed: "
# Not empty in the probe's own process, which must not start another one.
PROBING: Final[list[bool]] = []


@dataclass(frozen=True)
class Standing:
    """What is known of a version of PyTorch: "tested", "warned" (its probe passed) or "refused", and why."""

    version: str
    verdict: Literal["tested", "warned", "refused"]
    reason: str = ""


def require_working_torch() -> None:
    """Warn, once in a process, of a PyTorch that is not among the tested versions; raise CaptureError if it fails."""
    standing = standing_of(str(torch.__version__))
    if standing.verdict == "refused":
        raise CaptureError(standing.reason)
    if standing.verdict == "warned":
        _warn(standing.reason)


def is_tested(version: str) -> bool:
    """Whether the suite was run with this minor version. Pre-releases and nightly builds are not tested."""
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\.post\d+)?(\+.*)?", version)
    return release is not None and release[1] in TESTED


@cache
def standing_of(version: str) -> Standing:
    """Return what is known of a version. One that is not tested is probed, unless an earlier process did."""
    if is_tested(version) or PROBING:
        return Standing(version, "tested")
    tested = f"fxround {VERSION} is tested with torch {TESTED[0]} to {TESTED[-1]}; this is torch {version}"
    failure = _probed(version)
    if not failure:
        return Standing(
            version,
            "warned",
            f"{tested}. Two small models and their gradients have the right bits with it; other models may be refused.",
        )
    above = f"{TESTED[-1].partition('.')[0]}.{int(TESTED[-1].partition('.')[2]) + 1}"
    return Standing(
        version,
        "refused",
        f"{tested}, with which a small model fails: {failure}. Install torch>={TESTED[0]},<{above}.",
    )


@cache
def _warn(reason: str) -> None:
    warnings.warn(reason, stacklevel=3)


def _probed(version: str) -> str:
    """Return why the probe failed, "" if it passed."""
    parts = "torch probe", version, str(torch.version.git_version), platform.python_version(), platform.machine()
    try:
        answer, _ = disk_cache.fetch(disk_cache.key(disk_cache.EVERYTHING, *parts), _run)
    except _UnansweredError as error:
        return str(error)
    return answer.decode()


class _UnansweredError(Exception):
    """Raised if the probe ended without an answer. That may be due to the machine, and is not kept on disk."""


def _run() -> bytes:
    """Return why the probe failed, "" if it passed, from a new interpreter."""
    try:
        ran = new_process.run(_PROBE, timeout=_SECONDS)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise _UnansweredError(f"its probe did not run: {error}") from error
    said = (ran.stdout.strip().splitlines() or [""])[-1]
    if said == PASSED:
        return b""
    if said.startswith(FAILED):
        return said.removeprefix(FAILED).encode()
    last = (ran.stderr.strip().splitlines() or [""])[-1]
    raise _UnansweredError(f"its probe ended with status {ran.returncode}: {last}")
