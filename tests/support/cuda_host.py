"""CUDA texts on the host: compiled by g++ after ``cuda_host.hpp``, run for every thread of a grid.

``HostLauncher`` takes the place of a GPU's launcher: inside of ``launching(HostLauncher(folder))`` all operators of
fxround run through the texts of the GPU, on CPU tensors. ``prepare`` compiles all texts that a function needs at once.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from kernel_operands import stored
from neighbours import Array, encodings
from torch import Tensor

from benchmarks.cuda import texts_of
from fxround.numerics.arithmetic.scalar import DTYPES, Function
from fxround.runtime.cuda.cpp.table import TYPES, device_function
from fxround.runtime.cuda.launcher import Text

HEADER: Final = Path(__file__).with_suffix(".hpp")
INCLUDE: Final = f'#include "{HEADER.name}"\n'
# -ffp-contract=off: g++ contracts by default.
FLAGS: Final = (
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused",
)
# The texts of a translation unit: several, since each repeats the header.
_UNIT: Final = 12


class HostLauncher:
    """Runs texts as host code. seed: draws the order of blocks and threads; every order gives the same bits.
    slow_binary64, async_copies: whether the texts are those of a device whose binary64 is slow, and of one that copies
    to shared memory asynchronously.

    launched: the names of the texts that ran. most_blocks: the blocks of a grid at most, each of which does more then.
    last: how many blocks of a grid run, the last ones for the seed 0; None for all.

    An AssertionError names a race, a barrier that some threads do not meet, an access beyond a shared array, and a use
    of what an asynchronous copy has not brought yet.
    """

    def __init__(
        self, folder: Path, compiler: str, seed: int = 0, slow_binary64: bool = False, async_copies: bool = True
    ) -> None:
        self.folder, self.compiler, self.seed = folder, compiler, seed
        self.slow_binary64, self.async_copies = slow_binary64, async_copies
        self.functions: dict[str, Any] = {}
        self.launched: list[str] = []
        self.most_blocks = 2**31 - 1
        self.last: int | None = None
        put_header(compiler, folder)

    def launch(self, text: Text, blocks: int, arguments: Sequence[Any], device: torch.device) -> None:
        """Run a grid."""
        self.launched.append(text.name)
        blocks = min(blocks, self.most_blocks)
        if text.name not in self.functions:
            self.compile([text])
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        begin = 0 if self.last is None else max(0, blocks - self.last)
        problem = self.functions[text.name](blocks, text.threads, text.meets, self.seed, begin, blocks, addresses)
        assert not problem, f"{text.name}: {problem.decode()}"

    def has_slow_binary64(self, device: torch.device) -> bool:
        """Whether texts should avoid binary64."""
        return self.slow_binary64

    def copies_async(self, device: torch.device) -> bool:
        """Whether texts may copy asynchronously."""
        return self.async_copies

    def compile(self, texts: Iterable[Text]) -> None:
        """Compile the texts that are new, two translation units at a time."""
        new = list({t.name: t for t in texts if t.name not in self.functions}.values())
        units = [new[i : i + _UNIT] for i in range(0, len(new), _UNIT)]
        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(self._unit, units):
                self.functions |= found

    def _unit(self, texts: Sequence[Text]) -> dict[str, Any]:
        parts = [INCLUDE]
        for i, text in enumerate(texts):
            parts.append(f"namespace unit_{i} {{\n{text.source()}}}\n")
            parts.append(
                f'extern "C" const char* launch_{text.name}(unsigned blocks, unsigned threads, bool meets, '
                f"unsigned long long seed, unsigned begin, unsigned end, void** arguments) {{ return "
                f"host::launch(unit_{i}::{text.name}, blocks, threads, meets, seed, begin, end, arguments); }}\n"
            )
        library = compiled("".join(parts), self.compiler, self.folder, f"unit_{texts[0].name}")
        found = {}
        for text in texts:
            function = library[f"launch_{text.name}"]
            function.restype = ctypes.c_char_p
            sizes = ctypes.c_uint, ctypes.c_uint
            function.argtypes = (*sizes, ctypes.c_bool, ctypes.c_ulonglong, *sizes, ctypes.c_void_p)
            found[text.name] = function
        return found


def prepare(host: HostLauncher, *runs: Callable[[], object]) -> None:
    """Compile the texts that some functions need; they must not depend on their own results."""
    host.compile(texts_of(*runs, slow_binary64=host.slow_binary64, async_copies=host.async_copies))


def compiled(source: str, compiler: str, folder: Path, name: str) -> ctypes.CDLL:
    """A translation unit as a shared object; a warning is a failure."""
    (folder / f"{name}.cpp").write_text(source)
    _run([compiler, *FLAGS, "-o", f"{name}.so", f"{name}.cpp"], folder)
    return ctypes.CDLL(str(folder / f"{name}.so"))


def put_header(compiler: str, folder: Path) -> None:
    """Copy the header to a folder. g++ takes the precompiled one beside it; other compilers read the text."""
    shutil.copy(HEADER, folder)
    _run([compiler, *FLAGS, "-x", "c++-header", "-o", f"{HEADER.name}.gch", HEADER.name], folder)


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr[:3000]


# ---- results ----


def codes(x: Array) -> Array:
    """Bits, with one encoding for all NaNs if the IR does not define the NaN of an operation."""
    return encodings(x) if x.dtype.kind == "f" else x


def assert_same(got: Tensor, want: Array) -> None:
    """The bits of a result are those of the reference."""
    np.testing.assert_array_equal(codes(stored(got)), codes(want.reshape(got.shape)))


# ---- scalar functions ----


@dataclass(frozen=True)
class Functions:
    """A shared object of scalar functions, by name."""

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


def built(functions: dict[str, Function], compiler: str, folder: Path) -> Functions:
    """Scalar functions as one shared object."""
    wrapped = "".join(_wrapper(i, f) for i, f in enumerate(functions.values()))
    shutil.copy(HEADER, folder)
    return Functions(compiled(f"{INCLUDE}{wrapped}", compiler, folder, "functions"), functions)


def _wrapper(index: int, function: Function) -> str:
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
