"""Programs that are too long for one kernel, run statement by statement.

The time of a compilation grows with a kernel's length. A program of more than ``MOST`` operators of the scalar IR runs
as one kernel for each kind of statement: numbers are operands, so statements that differ only in what they read share a
kernel. Each statement draws the bits that it draws in the whole program, and a value between two statements is stored
in the carrier, which holds it exactly: the results are those of the one kernel, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fxround.kernels import parsed
from fxround.kernels.program import Statement
from fxround.kernels.shapes import Map
from fxround.kernels.specialize import check_program
from fxround.numerics.scalar import Function, param
from fxround.numerics.storage import CARRIER_OF, ELEMENT_OF, Storage, load, store
from fxround.runtime.cpu import buffers
from fxround.runtime.cpu.code import current_set
from fxround.runtime.cpu.pointwise import Draw, MapCall, addresses, array, broadcast, dtype_of, loads_of

# LLVM takes up to 0.2 ms for an operator of a kernel, and half of that where it does not optimize (``llvm.map``).
MOST: Final = 12_000
# No statement has more operators than MOST divided by this.
_FEW: Final = 4


@lru_cache(maxsize=4096)
def is_long(text: str, loads: tuple[Storage, ...], results: tuple[Storage, ...]) -> bool:
    """Whether a program is to be run in parts. Raises ValueError for a program that no kernel runs."""
    program = parsed.program(text)
    if len(program.statements) <= _FEW:
        return False
    carrier = check_program(program, loads, results)
    return sum(len(parsed.fused(p.text, (carrier,) * len(p.read), carrier).body.schedule) for p in _parts(text)) > MOST


def run_parts(
    text: str, operands: Sequence[Tensor], results: Sequence[Storage], draw: Draw, nodes: Sequence[int] | None
) -> list[Tensor]:
    """Run the program over operands that broadcast. ``nodes``: one for each draw; None if all are ``draw``'s."""
    shape = broadcast("a pointwise operator", *(x.shape for x in operands))
    carrier = CARRIER_OF[results[0]]
    values = {f"x{i}": x for i, x in enumerate(operands)}
    own = None if nodes is None else iter(nodes)
    for number, part in enumerate(_parts(text)):
        xs = [values[o] if isinstance(o, str) else _number(o.hex(), carrier) for o in part.read]
        # A statement draws for each element of the program's result, also where its own operands are smaller.
        xs[0] = xs[0].expand(shape)
        kernel = parsed.fused(part.text, loads_of(xs), carrier)
        words = draw.key()
        if kernel.draws:
            node, which = (draw.node, number) if own is None else (next(own), 0)
            words = (ctypes.c_uint32 * 5)(*replace(draw, node=node).key(), which)
        values[part.target] = _run(kernel, xs, words)
        for name in part.dead:
            values.pop(name, None)
    returned = zip(parsed.program(text).results, results, strict=True)
    return [_run(_conversion(carrier, storage), [values[name]], draw.key()) for name, storage in returned]


@dataclass(frozen=True)
class _Part:
    """A statement over x0, x1, ...: its text, its target, the values or numbers it reads, and values not read later."""

    text: str
    target: str
    read: tuple[str | float, ...]
    dead: tuple[str, ...]


@lru_cache(maxsize=64)
def _parts(text: str) -> tuple[_Part, ...]:
    """The program as statements of their own, in order."""
    program = parsed.program(text)
    alive, found = set(program.results), []
    for statement in reversed(program.statements):
        names = {o for o in statement.operands if isinstance(o, str)} | {statement.target}
        read = _read(statement)
        places = {o: f"x{i}" for i, o in enumerate(read) if isinstance(o, str)}
        numbers = (f"x{i}" for i, o in enumerate(read) if not isinstance(o, str))
        operands = tuple(places[o] if isinstance(o, str) else next(numbers) for o in statement.operands)
        alone = str(replace(statement, target="t0", operands=operands))
        found.append(_Part(alone, statement.target, read, tuple(names - alive)))
        alive |= names
    return tuple(found[::-1])


def _read(statement: Statement) -> tuple[str | float, ...]:
    """The values that a statement reads, each once, then its numbers."""
    values = dict.fromkeys(o for o in statement.operands if isinstance(o, str))
    return (*values, *(o for o in statement.operands if not isinstance(o, str)))


@lru_cache(maxsize=256)
def _number(value: str, carrier: Storage) -> Tensor:
    """A number as a tensor of no dimensions."""
    return torch.tensor(float.fromhex(value), dtype=dtype_of(carrier))


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
