"""Maps over CUDA tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fxround.graph.dialect import Fused, Pointwise, ProgramCall
from fxround.graph.dtypes import dtype_of
from fxround.graph.geometry import broadcast
from fxround.kernels import parsed
from fxround.kernels.shapes import Map
from fxround.runtime import buffers
from fxround.runtime.cuda.arguments import key_of, layout
from fxround.runtime.cuda.cpp.common import preamble
from fxround.runtime.cuda.cpp.contract import SHAPE
from fxround.runtime.cuda.cpp.map import LAYOUT, MAX_DIMS, Access, MapVariant, map_name, map_text
from fxround.runtime.cuda.launcher import Text, device_of, launch
from fxround.runtime.draw import NO_KEY, Draw
from fxround.runtime.layouts import collapse, expanded
from fxround.runtime.operands import loads_of, writable

# A thread computes this many elements; where it computes seeds first, it takes more.
_EACH: Final = 4
_EACH_THAT_DRAWS: Final = 16


def pointwise(call: Pointwise[Tensor]) -> Tensor:
    """Run a program of rounded pointwise operations over operands that broadcast."""
    kernel = parsed.pointwise(call.program, _loads(call), *call.results)
    return run_kernel(kernel, call.xs, Draw.of(call.rng, call.node).key() if kernel.draws else NO_KEY)[0]


def fused(call: Fused[Tensor]) -> list[Tensor]:
    """Run a chain of rounded pointwise operations in one pass over memory: the bits of one call for each operation."""
    call.require_nodes()
    kernel = parsed.fused(call.program, _loads(call), call.stored)
    return run_kernel(kernel, call.xs, Draw.of(call.rng, 0).keys(call.nodes) if kernel.draws else NO_KEY)


def _loads(call: ProgramCall[Tensor]) -> Any:
    """How the operands are stored; raises for what cannot be an operand."""
    return loads_of(call.xs) if call.xs else call.loads()


@dataclass(frozen=True)
class MapCall:
    """A map's text for operands of given layouts, its first argument, and the shape of a result."""

    text: Text
    layout: Any
    shape: tuple[int, ...]
    total: int


# Integers as wide as a number.
_CODES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def run_kernel(
    kernel: Map, operands: Sequence[Tensor], key: Any, outs: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """Run a kernel over operands that broadcast. ``outs`` are row-major tensors of the result's shape to write into."""
    device = device_of(operands, "a pointwise operator")
    operands = [on_device(x, device) for x in operands]
    for out in outs or ():
        if out is not None and out.device != device:
            raise ValueError(f"a pointwise operator on {device} cannot write into a tensor on {out.device}")
    call = _map_call(kernel, tuple((x.shape, x.stride()) for x in operands))
    if call is None:
        shape = broadcast("a pointwise operator", *(x.shape for x in operands))
        return run_kernel(kernel, [x.expand(shape).contiguous() for x in operands], key, outs)
    results = [
        buffers.empty(call.shape, dtype_of(storage), device) if out is None else writable(out, call.shape, storage)
        for storage, out in zip(kernel.results, outs or (None,) * len(kernel.results), strict=True)
    ]
    if call.total:
        words = (*key, *[0] * (3 + kernel.nodes - len(key)))
        each = _EACH_THAT_DRAWS if kernel.draws else _EACH
        launch(call.text, -(-call.total // each), [call.layout, *results, *operands, *key_of(words)], device)
    return results


@lru_cache(maxsize=4096)
def _map_call(kernel: Map, layouts: tuple[tuple[Sequence[int], Sequence[int]], ...]) -> MapCall | None:
    """The call for operands of these shapes and strides; None if they have too many dimensions."""
    shape = broadcast("a pointwise operator", *(shape for shape, _ in layouts))
    total = math.prod(shape)
    sizes, steps = collapse(shape, [expanded(shape, *operand) for operand in layouts])
    if len(sizes) > MAX_DIMS:
        return None
    variant = MapVariant(kernel, tuple(_access(sizes, own) for own in steps), len(sizes), total >= 1 << 31)
    text = Text(map_name(variant), lambda: preamble(SHAPE) + LAYOUT + map_text(variant))
    return MapCall(text, layout(total, sizes, steps), shape, total)


def _access(sizes: Sequence[int], steps: Sequence[int]) -> Access:
    """How an operand with these steps is read."""
    if all(step == 0 for step in steps):
        return "scalar"
    expected = 1
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        if step != expected:
            return "strided"
        expected *= size
    return "contiguous"


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """x, or the CPU's number x on the device. A copy would wait for the device, and a NaN must keep its bits."""
    if x.device == device:
        return x
    code = _CODES[x.itemsize]
    return torch.full((), x.detach().view(code).item(), dtype=code, device=device).view(x.dtype)
