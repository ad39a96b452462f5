"""The seam between what a CUDA kernel is and where it runs.

A ``Text`` is one ``__global__`` function as CUDA C++; an operator gives it to ``launch`` with a number of blocks and
its arguments. The launcher of a GPU compiles the text with NVRTC (``driver``). ``launching`` replaces it for the
current thread, and all operators then run through the CUDA texts, whatever the device of their tensors: this is how the
texts run as host code where there is no GPU.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from fxround.runtime.cuda.driver import DeviceLauncher


@dataclass(frozen=True, eq=False)
class Text:
    """One kernel as CUDA C++.

    name        the name of the ``__global__`` function, unique among all texts: it names what the source depends on
    source      gives the translation unit
    threads     the threads of a block
    meets       whether the threads of a block wait for each other (``__syncthreads``)
    """

    name: str
    source: Callable[[], str]
    threads: int = 256
    meets: bool = False


class Launcher(Protocol):
    """What runs texts."""

    def launch(self, text: Text, blocks: int, arguments: Sequence[Any], device: torch.device) -> None:
        """Run ``text`` on a grid of ``blocks``; ``arguments`` are ctypes values, which are read before this returns."""

    def has_slow_binary64(self, device: torch.device) -> bool:
        """Whether binary64 is so slow on a device that steps in binary32 are faster than a few in binary64."""

    def copies_async(self, device: torch.device) -> bool:
        """Whether a device copies to shared memory asynchronously (``cp.async``)."""


class Kernel(Protocol):
    """A kernel that may have one with the same bits for devices whose binary64 is slow."""

    @property
    def single(self) -> Self | None:
        """That kernel."""


K = TypeVar("K", bound=Kernel)


class _Chosen(threading.local):
    launcher: Launcher | None = None


_CHOSEN = _Chosen()
_DEVICE = DeviceLauncher()


@contextmanager
def launching(launcher: Launcher) -> Iterator[None]:
    """Run this thread's operators through the CUDA texts with another launcher, on tensors of any device."""
    outer, _CHOSEN.launcher = _CHOSEN.launcher, launcher
    try:
        yield
    finally:
        _CHOSEN.launcher = outer


def runs_texts(tensors: Sequence[Any]) -> bool:
    """Whether an operator with these operands runs CUDA texts. Arguments that are no tensors do not count."""
    if _CHOSEN.launcher is not None:
        return True
    # Every call asks this, and ``any`` takes half as long again.
    for x in tensors:  # noqa: SIM110
        if isinstance(x, Tensor) and x.is_cuda:
            return True
    return False


def forces_texts() -> bool:
    """Whether this thread's operators run CUDA texts for tensors of any device."""
    return _CHOSEN.launcher is not None


def has_slow_binary64(device: torch.device) -> bool:
    """Whether texts for a device should avoid binary64, which changes no bit."""
    return (_CHOSEN.launcher or _DEVICE).has_slow_binary64(device)


def for_device(kernel: K, device: torch.device) -> K:
    """The kernel that has the bits of this one and suits a device's arithmetic."""
    return kernel.single if kernel.single is not None and has_slow_binary64(device) else kernel


def copies_async(device: torch.device) -> bool:
    """Whether texts for a device may copy to shared memory asynchronously, which changes no bit."""
    return (_CHOSEN.launcher or _DEVICE).copies_async(device)


def launch(text: Text, items: int, arguments: Sequence[Any], device: torch.device) -> None:
    """Run a text on enough blocks for ``items`` threads (for ``items`` blocks, if its threads meet).

    arguments: ctypes values; a tensor stands for the address of its element 0.
    """
    # 2^31 - 1 blocks are the most of a grid; every text visits what is left in further rounds.
    blocks = min(items if text.meets else -(-items // text.threads), 2**31 - 1)
    values = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in arguments]
    (_CHOSEN.launcher or _DEVICE).launch(text, blocks, values, device)


def device_of(tensors: Sequence[Tensor], what: str) -> torch.device:
    """The device of operands, all on one; a tensor of no dimensions may be on the CPU. Raises ValueError otherwise."""
    devices = {x.device for x in tensors if x.dim()} or {x.device for x in tensors}
    strangers = {x.device for x in tensors if x.device not in devices and not x.is_cpu}
    if len(devices) > 1 or strangers:
        listed = ", ".join(sorted(map(str, devices | strangers)))
        raise ValueError(f"{what}: got operands on {listed}; expected one device (move them with .to(device))")
    return devices.pop()


def device_among(values: Sequence[Any]) -> torch.device:
    """The CUDA device of the first tensor that is on one; that of the first tensor if none is."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    return next((x.device for x in tensors if x.is_cuda), tensors[0].device)
