"""Kernels over CPU tensors: shapes are checked and layouts found here, before any pointer is passed.

What is true here. Every result is new (or the caller's ``out``) and row-major. Operands may have any strides,
broadcast, or be empty. Layout is the only thing decided here; a kernel's meaning is its own.

Why it is safe. A pointer is taken only from a CPU tensor of a dtype that the kernel was built for,
and every size that a kernel reads by comes from the shapes checked here.

    before   lib.add(a.data_ptr(), b.data_ptr(), n)
    after    run_map(program, (a, b), torch.float32, draw)
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fxround.kernel import Map
from fxround.numerics.randomness import BLOCK
from fxround.numerics.storage import Storage
from fxround.program import Program
from fxround.runtime import buffers
from fxround.runtime.compiled import native, signature
from fxround.runtime.llvm.map import MAX_DIMS, Access, MapVariant, build_map
from fxround.runtime.threads import split
from fxround.specialize import fused_kernel, map_kernel

STORAGES: Final[dict[torch.dtype, Storage]] = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
}
_MAP: Final = signature(4, 5)
_WORD: Final = (1 << 32) - 1
# A thread is worth waking for this many scalar steps.
_ENOUGH: Final = 1 << 15


@dataclass(frozen=True)
class Draw:
    """What a kernel's random bits depend on: seed, sample, and the number of the node."""

    seed: int = 0
    sample: int = 0
    node: int = 0

    def __post_init__(self) -> None:
        for name, value, bits in (("seed", self.seed, 63), ("sample", self.sample, 32)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is a {type(value).__name__}; expected an int")
            if not 0 <= value < 2**bits:
                raise ValueError(f"{name} is {value}; expected 0 to 2^{bits} - 1")

    @staticmethod
    def of(rng: Tensor, node: int) -> Draw:
        """From the run-time tensor (seed, sample), int64 of shape [2]."""
        if rng.dtype != torch.int64 or rng.shape != (2,):
            raise ValueError(f"rng is a {rng.dtype} tensor of shape {tuple(rng.shape)}; expected int64 (seed, sample)")
        seed, sample = rng.tolist()
        return Draw(seed, sample, node)

    def key(self) -> Any:
        """Four u32 words, as a C array."""
        return self.keys((self.node,))

    def keys(self, nodes: Sequence[int]) -> Any:
        """Seed and sample in three u32 words, then a word for each of the nodes (at least one), as a C array."""
        words = (self.seed & _WORD, self.seed >> 32 & _WORD, self.sample & _WORD, *(n & _WORD for n in nodes or (0,)))
        return (ctypes.c_uint32 * len(words))(*words)


def storage_of(x: Tensor, what: str) -> Storage:
    """The storage of a dense CPU tensor of a real floating dtype; a clear error for anything else."""
    if x.layout != torch.strided or x.is_quantized:
        raise TypeError(f"{what}: got a {x.layout} {x.dtype} tensor; expected a dense one (call .to_dense() first)")
    if x.dtype not in STORAGES:
        names = ", ".join(str(d).removeprefix("torch.") for d in STORAGES)
        raise TypeError(f"{what}: got dtype {x.dtype}; expected one of {names}")
    if x.device.type != "cpu":
        raise ValueError(f"{what}: got a tensor on {x.device}; kernels run on the CPU (call .cpu() first)")
    return STORAGES[x.dtype]


def _array(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def _collapse(shape: Sequence[int], strides: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Merge neighbouring dimensions that every operand walks as one, and drop those of size 1."""
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for d, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(m[-1] == s[d] * size for m, s in zip(merged, strides, strict=True)):
            sizes[-1] *= size
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[d]
            continue
        sizes.append(size)
        for m, s in zip(merged, strides, strict=True):
            m.append(s[d])
    return sizes, merged


def _access(sizes: list[int], strides: list[int]) -> Access:
    if all(s == 0 for s in strides):
        return "scalar"
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if stride != expected:
            return "strided"
        expected *= size
    return "contiguous"


def run_map(
    program: Program,
    operands: Sequence[Tensor],
    dtype: torch.dtype,
    draw: Draw,
    out: Tensor | None = None,
) -> Tensor:
    """The program over operands that broadcast; ``out``: a row-major tensor to write into."""
    kernel = map_kernel(program, _loads(operands), _result_storage(dtype))
    (result,) = _run_map(kernel, operands, draw.key(), (out,))
    return result


def run_fused(
    program: Program,
    operands: Sequence[Tensor],
    results: tuple[Storage, ...],
    draw: Draw,
    nodes: Sequence[int],
    outs: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """A fused program: a node number for each statement that draws, and one tensor a result.

    outs: row-major tensors to write into, None for a new one; an operand of the same shape and dtype may be one.
    """
    kernel = fused_kernel(program, _loads(operands), results)
    if len(nodes) < len(kernel.draws):
        raise ValueError(f"{program} draws {len(kernel.draws)} times, got {len(nodes)} node numbers")
    return _run_map(kernel, operands, draw.keys(nodes), outs or (None,) * len(results))


def _loads(operands: Sequence[Tensor]) -> tuple[Storage, ...]:
    return tuple(storage_of(x, f"operand {i}") for i, x in enumerate(operands))


def _result_storage(dtype: torch.dtype) -> Storage:
    if dtype not in STORAGES:
        raise TypeError(f"result dtype {dtype}: expected one of {', '.join(map(str, STORAGES))}")
    return STORAGES[dtype]


def _run_map(kernel: Map, operands: Sequence[Tensor], key: Any, outs: Sequence[Tensor | None]) -> list[Tensor]:
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    results = [
        buffers.empty(shape, dtype_of(storage)) if out is None else out
        for storage, out in zip(kernel.results, outs, strict=True)
    ]
    total = math.prod(shape)
    if total == 0:
        return results
    views = [x.detach().expand(shape) for x in operands]
    sizes, strides = _collapse(shape, [list(v.stride()) for v in views])
    if len(sizes) > MAX_DIMS:
        views = [v.contiguous() for v in views]
        sizes, strides = _collapse(shape, [list(v.stride()) for v in views])
    access = tuple(_access(sizes, s) for s in strides)
    variant = MapVariant(kernel, access)
    run = native(variant.digest, build_map, variant, "map", _MAP)
    pointers, targets = _array([v.data_ptr() for v in views]), _array([r.data_ptr() for r in results])
    shape_, steps = _array(sizes), _array([s for operand in strides for s in operand])
    addresses = (shape_, pointers, steps, targets, key)
    blocks = -(-total // BLOCK)
    split(lambda lo, hi: run(lo, hi, total, len(sizes), *addresses), blocks, _ENOUGH // BLOCK)
    return results


def dtype_of(storage: Storage) -> torch.dtype:
    """The inverse of ``STORAGES``."""
    return next(d for d, s in STORAGES.items() if s == storage)
