"""Maps over CUDA tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fxround.graph.dialect import Fused, Pointwise
from fxround.graph.dtypes import dtype_of
from fxround.graph.geometry import broadcast
from fxround.kernels import from_text
from fxround.kernels.kinds import Map
from fxround.runtime import buffers
from fxround.runtime.cuda.arguments import key_of, layout
from fxround.runtime.cuda.cpp.common import preamble
from fxround.runtime.cuda.cpp.contract import SHAPE
from fxround.runtime.cuda.cpp.map import LAYOUT, MAX_DIMS, Access, CudaMapVariant, map_name, map_text
from fxround.runtime.cuda.launcher import Text, device_of, for_device, launch
from fxround.runtime.draw import Draw
from fxround.runtime.layouts import collapse, expanded
from fxround.runtime.operands import loads_of_call, writable

# A thread computes this many elements; where it computes seeds first, it takes more.
_EACH: Final = 4
_EACH_THAT_DRAWS: Final = 16


def pointwise(call: Pointwise[Tensor]) -> Tensor:
    """Run a program of rounded pointwise operations over operands that broadcast."""
    kernel = from_text.pointwise(call.program, loads_of_call(call), *call.results)
    draw = Draw.unread(call.rng, call.node) if kernel.draws else Draw()
    return run_kernel(kernel, call.xs, draw.words((draw.node,)), state=draw.state)[0]


def fused(call: Fused[Tensor]) -> list[Tensor]:
    """Run a chain of rounded pointwise operations in one pass over memory: the bits of one call for each operation."""
    call.require_nodes()
    kernel = from_text.fused(call.program, loads_of_call(call), call.stored)
    draw = Draw.unread(call.rng, 0) if kernel.draws else Draw()
    return run_kernel(kernel, call.xs, draw.words(call.nodes), state=draw.state)


@dataclass(frozen=True)
class MapLaunch:
    """A map's text for operands of given layouts, its first argument, the shape of a result, and the elements of it
    that a thread computes at once."""

    text: Text
    layout: Any
    shape: tuple[int, ...]
    total: int
    piece: int


# Integers as wide as a number.
CODES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def run_kernel(
    kernel: Map,
    operands: Sequence[Tensor],
    key: Sequence[int],
    outs: Sequence[Tensor | None] | None = None,
    state: Tensor | None = None,
) -> list[Tensor]:
    """Run a kernel over operands that broadcast.

    key: the words of ``Draw.words``. outs: row-major tensors of the result's shape to write into. state: the tensor
    (seed, sample) that the kernel reads, in place of those in the key.
    """
    if kernel.parts:
        raise ValueError("a map of a part of a result draws on the CPU alone: expected operands there")
    device = device_of(operands, "a pointwise operator")
    kernel = for_device(kernel, device)
    operands = [on_device(x, device) for x in operands]
    for out in outs or ():
        if out is not None and out.device != device:
            raise ValueError(f"a pointwise operator on {device} cannot write into a tensor on {out.device}")
    layouts = tuple((x.shape, x.stride()) for x in operands)
    aligned = _aligned(operands) and _aligned([out for out in outs or () if out is not None])
    written = {out.untyped_storage().data_ptr() for out in outs or () if out is not None}
    in_place = bool(written) and any(x.untyped_storage().data_ptr() in written for x in operands)
    call = _map_call(kernel, layouts, aligned, in_place)
    if call is None:
        shape = broadcast("a pointwise operator", *(x.shape for x in operands))
        return run_kernel(kernel, [x.expand(shape).contiguous() for x in operands], key, outs, state)
    results = [
        buffers.empty(call.shape, dtype_of(storage), device) if out is None else writable(out, call.shape, storage)
        for storage, out in zip(kernel.results, outs or (None,) * len(kernel.results), strict=True)
    ]
    if call.total:
        words = (*key, *[0] * (3 + kernel.nodes - len(key)))
        each = max(_EACH_THAT_DRAWS if kernel.draws else _EACH, call.piece)
        launch(
            call.text, -(-call.total // each), [call.layout, *results, *operands, *key_of(words, state, device)], device
        )
    return results


@lru_cache(maxsize=4096)
def _map_call(
    kernel: Map, layouts: tuple[tuple[Sequence[int], Sequence[int]], ...], aligned: bool, in_place: bool
) -> MapLaunch | None:
    """The call for operands of these shapes and strides; None if they have too many dimensions.

    aligned: whether all operands and results begin at multiples of 16 bytes. in_place: whether one shares memory with
    a result.
    """
    shape = broadcast("a pointwise operator", *(shape for shape, _ in layouts))
    total = math.prod(shape)
    sizes, steps = collapse(shape, [expanded(shape, *operand) for operand in layouts])
    if len(sizes) > MAX_DIMS:
        return None
    accesses, piece = tuple(access_of(sizes, own) for own in steps), 1
    if aligned:
        # A mask's bytes are never the widest.
        stored = [storage for storage in (*kernel.loads, *kernel.results) if storage != "mask"]
        whole = 16 // max(dtype_of(storage).itemsize for storage in stored)
        pieces = [_in_pieces(access, whole, sizes, own) for access, own in zip(accesses, steps, strict=True)]
        known = tuple(access for access in pieces if access is not None)
        accesses, piece = (known, whole) if len(known) == len(pieces) else (accesses, 1)
    variant = CudaMapVariant(kernel, accesses, len(sizes), total >= 1 << 31, piece, in_place)
    text = Text(map_name(variant), lambda: preamble(SHAPE) + LAYOUT + map_text(variant))
    return MapLaunch(text, layout(total, sizes, steps), shape, total, piece)


def _aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether pieces of 16 bytes may begin where tensors do. New memory and memory of one element always allow it."""
    return all(x.data_ptr() % 16 == 0 for x in tensors if x.dim())


def access_of(sizes: Sequence[int], steps: Sequence[int]) -> Access:
    """How an operand with these steps is read."""
    if all(step == 0 for step in steps):
        return "scalar"
    expected = 1
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        if step != expected:
            return "strided"
        expected *= size
    return "contiguous"


def _in_pieces(access: Access, piece: int, sizes: Sequence[int], steps: Sequence[int]) -> Access | None:
    """How an operand is read in pieces of the last dimension; None if it cannot be."""
    if access != "strided":
        return access
    if sizes[-1] % piece or steps[-1] not in (0, 1):
        return None
    if steps[-1] == 0:
        return "repeated"
    return None if any(step % piece for step in steps[:-1]) else "lines"


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """x, or the CPU's number x on the device. A copy would wait for the device, and a NaN must keep its bits."""
    if x.device == device:
        return x
    code = CODES[x.itemsize]
    return torch.full((), x.detach().view(code).item(), dtype=code, device=device).view(x.dtype)
