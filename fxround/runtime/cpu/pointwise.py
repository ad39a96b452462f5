"""Maps over CPU tensors, and what all kernels share: shapes are checked and layouts found before a pointer is passed.

A result is new (or the caller's ``out``) and row-major. Operands may have any strides, broadcast, or be empty. A
pointer is taken only from a CPU tensor of a dtype that the kernel was built for, whose memory holds its values (no view
with the negative bit), and every size that a kernel reads by comes from the shapes that are checked here.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final

from torch import Tensor, nn

from fxround.graph.dtypes import dtype_of
from fxround.graph.geometry import broadcast
from fxround.kernels.kinds import Map
from fxround.numerics.arithmetic.randomness import BLOCK
from fxround.runtime import buffers
from fxround.runtime.cpu.code import current_machine, current_set, native, signature
from fxround.runtime.cpu.llvm.map import MAX_DIMS, Access, MapVariant, build_map
from fxround.runtime.cpu.threads import pieces_of, spread
from fxround.runtime.layouts import collapse, expanded
from fxround.runtime.operands import writable

_MAP: Final = signature(4, 5)
# The elements that make another thread worth its start.
ENOUGH: Final = 1 << 16


def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The addresses of elements 0. ValueError for a tensor whose memory is gone (a freed storage, a symbolic zero)."""
    pointers = tuple(map(Tensor.data_ptr, tensors))
    if 0 in pointers:
        for x, address in zip(tensors, pointers, strict=True):
            if not address and x.numel():
                if type(x) not in (Tensor, nn.Parameter):
                    raise ValueError(
                        f"a {type(x).__name__} of shape {tuple(x.shape)} has no memory of its own: pass a plain "
                        "tensor, such as the local or the full one of a DTensor (.to_local(), .full_tensor()), or "
                        "the numbers of a quantized one (.dequantize())"
                    )
                if x._is_zerotensor():
                    raise ValueError(
                        f"a {x.dtype} tensor of shape {tuple(x.shape)} is zeros without memory "
                        "(torch._efficientzerotensor): pass torch.zeros(x.shape, dtype=x.dtype)"
                    )
                raise ValueError(f"a {x.dtype} tensor of shape {tuple(x.shape)} has no memory: its storage was freed")
    return pointers


def array(values: Sequence[int]) -> Any:
    """int64 numbers as a C array of at least one element."""
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def _access(sizes: list[int], strides: list[int]) -> Access:
    """How a map reads an operand with these strides (``llvm.map.Access``)."""
    if all(s == 0 for s in strides):
        return "scalar"
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if stride != expected:
            break
        expected *= size
    else:
        return "contiguous"
    if sizes[-1] % BLOCK == 0 and strides[-1] in (0, 1):
        # Rows are whole blocks, so no block crosses from one row to the next.
        return "inner" if strides[-1] else "row"
    return "strided"


def run_part(
    kernel: Map, x: Tensor, parts: Sequence[Tensor], out: Tensor, key: Any, d: int, start: int, size: int
) -> None:
    """Run a kernel over ``size`` rows of x from ``start`` on along d, with the numbers that elements have in x.

    d is the first dimension of more than one element, and the rows begin with a block of elements. parts: the other
    operands, of the rows alone. out: a row-major tensor of x's shape, of which these rows are written.
    """
    layout: list[tuple[Sequence[int], Sequence[int]]] = [(x.shape, x.stride())]
    shifts = [0]
    for part in parts:
        wide = part.shape[d] == size > 1  # one row is read by all
        layout.append(((*part.shape[:d], x.shape[d], *part.shape[d + 1 :]) if wide else part.shape, part.stride()))
        shifts.append(start * part.stride(d) * part.itemsize if wide else 0)
    call = map_call(kernel, tuple(layout), current_set())
    assert call is not None and call.shape == out.shape
    row = x.numel() // x.shape[d]
    blocks = range(start * row // BLOCK, -(-(start + size) * row // BLOCK))
    starts = zip(addresses((x, *parts)), shifts, strict=True)
    call.over(blocks, array([at - shift for at, shift in starts]), array(addresses((out,))), key)


def run_kernel(
    kernel: Map, operands: Sequence[Tensor], key: Any, outs: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """Run a kernel over operands that broadcast. ``outs`` are row-major tensors to write into, None for a new one."""
    call = call_for(kernel, operands)
    if call is None:
        shape = broadcast("a pointwise operator", *(x.shape for x in operands))
        return run_kernel(kernel, [x.expand(shape).contiguous() for x in operands], key, outs)
    results = [
        buffers.empty(call.shape, dtype_of(storage)) if out is None else writable(out, call.shape, storage)
        for storage, out in zip(kernel.results, outs or (None,) * len(kernel.results), strict=True)
    ]
    if call.total == 0:
        return results
    sources, targets = array(addresses(operands)), array(addresses(results))
    call.over(range(call.blocks), sources, targets, key)
    return results


def call_for(kernel: Map, operands: Sequence[Tensor]) -> MapCall | None:
    """The call of a kernel for operands of these layouts; None if they have too many dimensions."""
    return map_call(kernel, tuple((x.shape, x.stride()) for x in operands), current_set())


@lru_cache(maxsize=4096)
def map_call(kernel: Map, layout: tuple[tuple[Sequence[int], Sequence[int]], ...], isa: str) -> MapCall | None:
    """``MapCall.of``, once for each layout and instruction set."""
    return MapCall.of(kernel, layout)


@dataclass(frozen=True)
class MapCall:
    """A map's code for operands of given layouts; addresses are given for each call.

    function    the code
    shape       the shape of a result
    total       elements of a result
    dims        the number of dimensions after neighbours are merged
    sizes       their sizes, a C array
    steps       strides in elements, operand by operand, a C array
    """

    function: Any
    shape: tuple[int, ...]
    total: int
    dims: int
    sizes: Any
    steps: Any

    unit: ClassVar[int] = BLOCK

    @staticmethod
    def of(
        kernel: Map, layout: Sequence[tuple[Sequence[int], Sequence[int]]], numbered: bool = False
    ) -> MapCall | None:
        """The code for operands of these shapes and strides; None if they have too many dimensions.

        numbered: whether a key has the number of each draw after the number of its node (``MapVariant``).
        """
        shape = broadcast("a pointwise operator", *(shape for shape, _ in layout))
        total = math.prod(shape)
        if total == 0:
            return MapCall(None, shape, 0, 0, None, None)
        sizes, strides = collapse(shape, [expanded(shape, *operand) for operand in layout])
        if len(sizes) > MAX_DIMS:
            return None
        variant = MapVariant(kernel, tuple(_access(sizes, s) for s in strides), current_machine(), numbered)
        function = native(variant.digest, build_map, variant, "map", _MAP)
        steps = [s for operand in strides for s in operand]
        return MapCall(function, shape, total, len(sizes), array(sizes), array(steps))

    @property
    def blocks(self) -> int:
        """The number of blocks of elements; the last one may be short."""
        return -(-self.total // BLOCK)

    def arguments(self, sources: Any, targets: Any, key: Any) -> tuple[int, ...]:
        """The arguments of ``function`` after the range of blocks; the caller keeps the arrays alive."""
        at = ctypes.addressof
        return self.total, self.dims, at(self.sizes), at(sources), at(self.steps), at(targets), at(key)

    def over(self, blocks: range, sources: Any, targets: Any, key: Any) -> None:
        """Run some blocks, split over threads; ``sources`` and ``targets`` are arrays of addresses of elements 0."""
        spread(self.function, blocks, pieces_of(len(blocks), ENOUGH // BLOCK), self.arguments(sources, targets, key))
