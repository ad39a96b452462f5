"""Texts on a GPU: compiled by NVRTC for the device's architecture, launched on PyTorch's current stream.

NVRTC comes with the wheel ``cuda-core[cu13]`` (the extra ``cuda``), so no compiler is needed. Binaries are kept in the
disk cache under the architecture's name and NVRTC's version, and in memory for each device. A launch allocates nothing,
copies nothing and waits for nothing: it may be captured in a CUDA graph, but a text must have run once before, since a
module cannot be loaded during a capture.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from fxround.errors import FxroundError
from fxround.locks import waited_for
from fxround.runtime import disk_cache
from fxround.runtime.cuda.cpp.table import DEVICE_OPTIONS

if TYPE_CHECKING:
    from fxround.runtime.cuda.launcher import Text

# The modules that write a kernel as CUDA C++, and those that compose a text.
SOURCES: Final = (*disk_cache.SOURCES_OF_KERNELS, "runtime/cuda/cpp/*.py", "runtime/cuda/*.py")
# NVRTC 13 compiles for no older architecture.
_OLDEST: Final = (7, 5)
# The compute capabilities whose multiprocessors do 32 or more operations in binary64 in the time of 64 in binary32; the
# others do 2 (CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions").
_FAST_BINARY64: Final = frozenset({(8, 0), (9, 0), (10, 0)})
# The first architecture with cp.async (PTX ISA, "cp.async").
_ASYNC: Final = (8, 0)
_INSTALL: Final = "install fxround with the extra 'cuda': pip install 'fxround[cuda]'"


FORCE_BINARY64: Final = "FXROUND_CUDA_BINARY64"
"""The environment variable that says how fast binary64 is taken to be, "slow" or "fast", whatever the device."""


class DeviceLauncher:
    """Launches texts on CUDA devices. Raises FxroundError where that is impossible, with the reason."""

    def __init__(self) -> None:
        self.functions: dict[tuple[int, str], Any] = {}
        self.lock = waited_for()

    def launch(self, text: Text, blocks: int, arguments: Sequence[Any], device: torch.device) -> None:
        """Run a text on PyTorch's current stream of the device."""
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(index):
            loaded = self.functions.get((index, text.name)) or self._load(index, text)
            stream = torch.cuda.current_stream(index).cuda_stream
            addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
            driver = _bindings()
            if not int(driver.cuCtxGetCurrent()[1]):
                _bind(index)
            grid, block = (blocks, 1, 1), (text.threads, 1, 1)
            code = loaded[1], *grid, *block, 0, stream, ctypes.addressof(addresses), 0
            (status,) = driver.cuLaunchKernel(*code)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise FxroundError(f"the launch of {text.name} on {device} with {blocks} blocks failed: {status.name}")

    def has_slow_binary64(self, device: torch.device) -> bool:
        """Whether the device does two operations in binary64 in the time of 64 or 128 in binary32."""
        forced = os.environ.get(FORCE_BINARY64, "")
        if forced not in ("", "slow", "fast"):
            raise FxroundError(f"{FORCE_BINARY64} is {forced!r}; expected 'slow', 'fast', or nothing")
        return forced == "slow" or (not forced and torch.cuda.get_device_capability(device) not in _FAST_BINARY64)

    def copies_async(self, device: torch.device) -> bool:
        """Whether the device has ``cp.async``."""
        return torch.cuda.get_device_capability(device) >= _ASYNC

    def _load(self, index: int, text: Text) -> Any:
        """Compile or read the text's binary, and load it."""
        with self.lock:
            loaded = self.functions.get((index, text.name))
            if loaded is None:
                if torch.cuda.is_current_stream_capturing():
                    raise FxroundError(
                        f"{text.name} was never launched on cuda:{index}, and a CUDA graph is being captured: run the "
                        "model once with inputs of these shapes before the capture"
                    )
                require_driver()
                arch = architecture(torch.cuda.get_device_capability(index))
                from cuda.core import ObjectCode

                code = binary(text, arch)
                virtual = arch.startswith("compute")
                module = ObjectCode.from_ptx(code) if virtual else ObjectCode.from_cubin(code)
                # The module must live as long as its function.
                loaded = self.functions[index, text.name] = module, int(module.get_kernel(text.name).handle)
            return loaded


def devices_found() -> str:
    """What PyTorch finds, and what to do where that is nothing."""
    count = torch.cuda.device_count()
    if count:
        return f"PyTorch finds {count} CUDA device{'s' if count > 1 else ''} here"
    if torch.version.cuda is None:
        return (
            "PyTorch finds no CUDA device here: this build of PyTorch is one without CUDA (pytorch.org has the others)"
        )
    return "PyTorch finds no CUDA device here: see whether nvidia-smi lists one, which NVIDIA's driver brings"


def problem_of(index: int) -> str:
    """Why kernels cannot run on a CUDA device; "" if they can."""
    try:
        require_driver()
        architecture(torch.cuda.get_device_capability(index))
    except FxroundError as error:
        return str(error)
    return ""


def require_driver() -> None:
    """Raise FxroundError for a driver that is older than NVRTC, whose binaries it may not load."""
    version, (wanted, _) = int(_bindings().cuDriverGetVersion()[1]), map(int, _version().split("."))
    offered = f"{version // 1000}.{version % 1000 // 10}"
    if version < 1000 * wanted:
        raise FxroundError(
            f"the driver of this machine is one for CUDA {offered}, and fxround's kernels are compiled by NVRTC "
            f"{_version()}: install a driver for CUDA {wanted} or later"
        )


def _bind(index: int) -> None:
    """Make the device's primary context current in this thread, which PyTorch does only when it needs it."""
    from cuda.core import Device

    Device(index).set_current()


def architecture(capability: tuple[int, int]) -> str:
    """The name of an architecture for NVRTC: ``sm_90``.

    For a GPU that this NVRTC does not know, it is the newest virtual architecture before it, ``compute_90``, whose PTX
    the driver compiles. Raises FxroundError for a GPU that is too old.
    """
    major, minor = capability
    if capability < _OLDEST:
        raise FxroundError(f"this GPU has compute capability {major}.{minor}; fxround needs 7.5 or later")
    known, wanted = _known(), 10 * major + minor
    return f"sm_{wanted}" if wanted in known else f"compute_{max(n for n in known if n < wanted)}"


@cache
def _known() -> tuple[int, ...]:
    """The architectures that NVRTC compiles for: 75, 80, ..."""
    _bindings()
    from cuda.bindings import nvrtc

    return tuple(nvrtc.nvrtcGetSupportedArchs()[1])


def binary(text: Text, arch: str) -> bytes:
    """The text's binary for an architecture, or PTX for a virtual one, from the disk cache or compiled."""
    key = disk_cache.key(SOURCES, "cuda", arch, _version(), text.name)
    code, _ = disk_cache.fetch(key, lambda: compiled(text.source(), arch)[0])
    return code


def compiled(source: str, arch: str) -> tuple[bytes, str]:
    """A translation unit's binary and the compiler's notes: registers, spills and shared memory of each function.

    For a virtual architecture, its PTX and no notes. Raises FxroundError if NVRTC refuses the text, which it names with
    the first error.
    """
    _bindings()
    if arch.startswith("compute"):
        return intermediate(source, arch), ""
    import io

    from cuda.core import Program, ProgramOptions

    notes = io.StringIO()
    options = ProgramOptions(arch=arch, ptxas_options=["-v"], **DEVICE_OPTIONS)
    try:
        code = Program(source, "c++", options).compile("cubin", logs=notes)
    except Exception as error:
        # cuda-core has no common class of errors.
        raise FxroundError(f"NVRTC cannot compile a kernel for {arch}: {str(error)[:2000]}") from error
    return bytes(code.code), notes.getvalue()


def intermediate(source: str, arch: str) -> bytes:
    """A translation unit as PTX for a virtual architecture. It asks no driver for its version, as cuda-core would."""
    from cuda.bindings import nvrtc
    from cuda.core import ProgramOptions

    options = ProgramOptions(arch=arch, **DEVICE_OPTIONS).as_bytes("nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"texts", 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise FxroundError(f"NVRTC cannot compile a kernel for {arch}: {status.name}")
        ptx: bytes = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
        nvrtc.nvrtcGetPTX(program, ptx)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return ptx


@cache
def _version() -> str:
    """NVRTC's version."""
    _bindings()
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


@cache
def _bindings() -> Any:
    """The driver's interface. Raises FxroundError without cuda-core."""
    try:
        from cuda.bindings import driver
        from cuda.core import Program  # noqa: F401  (cuda-core too must be there)
    except ImportError as error:
        raise FxroundError(f"CUDA tensors need the packages cuda-core and NVRTC ({error}); {_INSTALL}") from error
    return driver
