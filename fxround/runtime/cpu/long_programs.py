"""Programs that are too long for one kernel (``kernels.long_programs``), run statement by statement.

Each statement draws the bits that it draws in the whole program, and a value between two statements is stored
in the carrier, which holds it exactly: the results are those of the one kernel, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fxround.graph.dtypes import dtype_of
from fxround.graph.geometry import broadcast
from fxround.kernels import from_text
from fxround.kernels.kinds import Map
from fxround.kernels.long_programs import parts
from fxround.numerics.arithmetic.scalar import Function, param
from fxround.numerics.formats.storage import CARRIER_OF, ELEMENT_OF, Storage, load, store
from fxround.runtime import buffers
from fxround.runtime.cpu.code import current_set
from fxround.runtime.cpu.pointwise import MapCall, addresses, array
from fxround.runtime.draw import Draw
from fxround.runtime.operands import loads_of


def run_parts(
    text: str, operands: Sequence[Tensor], results: Sequence[Storage], draw: Draw, nodes: Sequence[int] | None
) -> list[Tensor]:
    """Run the program over operands that broadcast. ``nodes``: one for each draw; None if all are ``draw``'s."""
    shape = broadcast("a pointwise operator", *(x.shape for x in operands))
    carrier = CARRIER_OF[results[0]]
    values = {f"x{i}": x for i, x in enumerate(operands)}
    own = None if nodes is None else iter(nodes)
    for number, part in enumerate(parts(text)):
        xs = [values[o] if isinstance(o, str) else _number(o.hex(), carrier) for o in part.read]
        # A statement draws for each element of the program's result, also where its own operands are smaller.
        xs[0] = xs[0].expand(shape)
        kernel = from_text.fused(part.text, loads_of(xs), carrier)
        words = draw.key()
        if kernel.draws:
            node, which = (draw.node, number) if own is None else (next(own), 0)
            words = (ctypes.c_uint32 * 5)(*replace(draw, node=node).key(), which)
        values[part.target] = _run(kernel, xs, words)
        for name in part.dead:
            values.pop(name, None)
    returned = zip(from_text.program(text).results, results, strict=True)
    return [_run(_conversion(carrier, storage), [values[name]], draw.key()) for name, storage in returned]


@lru_cache(maxsize=256)
def _number(value: str, carrier: Storage) -> Tensor:
    """A number as a tensor of no dimensions."""
    return torch.tensor(float.fromhex(value), dtype=dtype_of(carrier), device="cpu")


def _run(kernel: Map, operands: Sequence[Tensor], key: Any) -> Tensor:
    """Run a kernel of one result; a key for a kernel that draws has the draw's number after the node's."""
    call = _call(kernel, tuple((x.shape, x.stride()) for x in operands), current_set())
    if call is None:
        return _run(kernel, [x.contiguous() for x in torch.broadcast_tensors(*operands)], key)
    result = buffers.empty(call.shape, dtype_of(kernel.results[0]))
    if call.total:
        sources, targets = array(addresses(operands)), array(addresses([result]))
        call.over(range(call.blocks), sources, targets, key)
    return result


@lru_cache(maxsize=256)
def _call(kernel: Map, layout: tuple[tuple[Sequence[int], Sequence[int]], ...], isa: str) -> MapCall | None:
    """``MapCall.of``, remembered; the key of a kernel that draws has the number of the draw."""
    return MapCall.of(kernel, layout, bool(kernel.draws))


@lru_cache(maxsize=16)
def _conversion(carrier: Storage, storage: Storage) -> Map:
    """The kernel from a value of the storage's format in the carrier to the stored element."""
    value = param("x0", ELEMENT_OF[carrier])
    return Map(Function("map", (value,), (store(load(value, carrier), storage),)), (carrier,), (storage,), ())
