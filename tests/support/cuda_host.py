"""CUDA texts on the host: compiled as C++ with the intrinsics of ``HOST_PRELUDE``, run for every thread of a grid."""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from neighbours import Array

from fxround.kernels.shapes import Kernel
from fxround.numerics.scalar import DTYPES, Function
from fxround.runtime.cuda.cpp.loops import MAX_DIMS, SHAPE, kernel_name, kernel_source
from fxround.runtime.cuda.cpp.table import HOST_FLAGS, HOST_PRELUDE, TYPES, device_function


def function_wrapper(index: int, function: Function) -> str:
    """``run<i>(count, parameters..., results...)``: the function over arrays."""
    params = [f"const {TYPES[p.type]}* {p.attr}" for p in function.params]
    results = [f"{TYPES[r.type]}* result{i}" for i, r in enumerate(function.results)]
    arguments = [f"{p.attr}[i]" for p in function.params]
    outputs = [f"result{i}[i]" for i in range(len(results))]
    call = f"f{index}({', '.join([*arguments, *outputs])})" if len(results) > 1 else ""
    body = call or f"result0[i] = f{index}({', '.join(arguments)})"
    head = ", ".join(["unsigned long long count", *params, *results])
    text = device_function(function, f"f{index}")
    return f'{text}extern "C" void run{index}({head}) {{ for (unsigned long long i = 0; i < count; ++i) {body}; }}\n'


# A grid on the host: every thread in turn. Arguments come as cuLaunchKernel takes them, an array of their addresses.
LAUNCH = """
#include <utility>
template <class... P, std::size_t... I>
static void walk(void (*kernel)(P...), u32 blocks, u32 threads, void** arguments, std::index_sequence<I...>) {
  gridDim = {blocks};
  blockDim = {threads};
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(*(P*)arguments[I]...);
}
template <class... P> static void launch(void (*kernel)(P...), u32 blocks, u32 threads, void** arguments) {
  walk(kernel, blocks, threads, arguments, std::index_sequence_for<P...>());
}
"""


def kernel_wrapper(kernel: Kernel) -> str:
    """``launch_<kernel>(blocks, threads, arguments)``: the kernel over a grid."""
    name = kernel_name(kernel)
    head = f'extern "C" void launch_{name}(u32 blocks, u32 threads, void** arguments)'
    return f"{head} {{ launch({name}, blocks, threads, arguments); }}\n"


@dataclass(frozen=True)
class Host:
    """A shared object of functions, by name, and of kernels."""

    library: ctypes.CDLL
    functions: dict[str, Function]

    def run(self, name: str, *args: Array) -> list[Array]:
        """A function over arrays of one length."""
        function = self.functions[name]
        count = len(args[0])
        arrays = [np.ascontiguousarray(a, DTYPES[p.type]) for a, p in zip(args, function.params, strict=True)]
        results = [np.empty(count, DTYPES[r.type]) for r in function.results]
        call = self.library[f"run{list(self.functions).index(name)}"]
        call(ctypes.c_ulonglong(count), *(a.ctypes.data_as(ctypes.c_void_p) for a in (*arrays, *results)))
        return results

    def launch(self, kernel: Kernel, grid: tuple[int, int], *arguments: Any) -> None:
        """arguments: ctypes values and structures, or arrays (passed as pointers)."""
        boxed = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
        addresses = (ctypes.c_void_p * len(boxed))(*(ctypes.addressof(b) for b in boxed))
        self.library[f"launch_{kernel_name(kernel)}"](*map(ctypes.c_uint, grid), addresses)


def built(functions: dict[str, Function], kernels: Sequence[Kernel], compiler: str, folder: Path) -> Host:
    """The texts of functions and kernels as one shared object in this folder; a warning is a failure."""
    text = HOST_PRELUDE + kernel_source(kernels) + LAUNCH + "".join(map(kernel_wrapper, _unique(kernels)))
    text += "".join(function_wrapper(i, f) for i, f in enumerate(functions.values()))
    (folder / "host.cpp").write_text(text)
    command = [compiler, *HOST_FLAGS, "-Wall", "-Wno-unknown-pragmas", "-o", "host.so", "host.cpp"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr[:3000]
    return Host(ctypes.CDLL(str(folder / "host.so")), functions)


def _unique(kernels: Sequence[Kernel]) -> list[Kernel]:
    return list({kernel_name(k): k for k in kernels}.values())


class Key(ctypes.Structure):
    _fields_ = tuple((n, ctypes.c_uint32) for n in ("seed_low", "seed_high", "sample", "node"))


class Shape(ctypes.Structure):
    _fields_ = tuple((n, ctypes.c_int64) for n in SHAPE)


def layout(shape: tuple[int, ...], operands: list[Array]) -> ctypes.Structure:
    """Layout<N> of ``loops``: sizes of the result, steps in elements of operands broadcast to it."""

    class Layout(ctypes.Structure):
        _fields_ = (
            ("count", ctypes.c_uint64),
            ("dims", ctypes.c_uint64),
            ("sizes", ctypes.c_uint64 * MAX_DIMS),
            ("steps", (ctypes.c_int64 * MAX_DIMS) * len(operands)),
        )

    found = Layout(count=math.prod(shape), dims=len(shape))
    found.sizes[: len(shape)] = shape
    for n, x in enumerate(operands):
        steps = [s // x.itemsize for s in np.broadcast_to(x, shape).strides]
        found.steps[n][: len(shape)] = steps
    return found
