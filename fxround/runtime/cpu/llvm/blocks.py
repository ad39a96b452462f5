"""The Blocks shape as LLVM: the largest magnitudes, figures and elements of some blocks after each other, in the cache.

A tensor is (outer, length, inner) in memory, and a block is ``size`` of ``length``. With inner = 1 an item is some
blocks of consecutive elements: vectors of maxima, one for each block, are stored, and sixteen of them become one vector
of maxima of blocks. Otherwise an item is one block of every column, 64 columns at a time. The figures are computed in
vectors of blocks either way, with whatever else the elements need of a figure alone. A result may be in the memory of
x: an element is read for the last time before it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from llvmlite import ir

from fxround.kernels.kinds import Blocks, Map
from fxround.numerics.arithmetic.branches import needed
from fxround.numerics.arithmetic.scalar import (
    WIDTH,
    Expr,
    Function,
    Type,
    bits,
    const,
    from_bits,
    maximum,
    param,
    select,
)
from fxround.numerics.formats.carriers import CARRIERS
from fxround.numerics.formats.storage import CARRIER_OF, ELEMENT_OF, Storage, load
from fxround.runtime.cpu.llvm.engine import Machine
from fxround.runtime.cpu.llvm.fusions import fusions_for
from fxround.runtime.cpu.llvm.loops import (
    I32,
    I64,
    MEMORY,
    PTR,
    Carried,
    at,
    copy_elements,
    count,
    define,
    iota,
    least,
    load_vector,
    masked_load,
    masked_store,
    scratch,
    store_vector,
    with_sizes,
)
from fxround.runtime.cpu.llvm.render import SCALARS, bytes_of, emit, emit_results, literal, llvm_type, splat
from fxround.runtime.cpu.llvm.stages import lanes_of

# blocks: in the tensor. row_blocks: along length. per: the blocks of an item; 1 for columns.
LAYOUT: Final = ("blocks", "row_blocks", "length", "size", "inner", "per")
# The most blocks of an item, and the columns of a strip.
MOST: Final = 64


@dataclass(frozen=True)
class BlocksVariant:
    """Blocks specialised for a layout and a processor.

    columns: inner > 1. size: of every block, a multiple of 16; 0 if ``layout`` has it, and the last of a row is shorter
    """

    kernel: Blocks
    columns: bool
    size: int
    machine: Machine

    @property
    def digest(self) -> str:
        """The key of the compiled code."""
        return f"{self.kernel.digest}:{self.columns}:{self.size}"


def build_blocks(variant: BlocksVariant) -> str:
    """The LLVM text of ``blocks(begin, end, layout, pointers)`` over items.

    layout    int64: ``LAYOUT``
    pointers  x, the result, and the numbers that all blocks share
    """
    module = ir.Module("blocks")
    args = [("begin", I64), ("end", I64), ("layout", PTR), ("pointers", PTR)]
    b, a = define(module, "blocks", args)
    _Builder(variant, b, with_sizes(b, a, LAYOUT)).run()
    b.ret_void()
    return str(module)


@cache
def _magnitude(storage: Storage) -> Function:
    """The ordinal of a stored element; 0 if it is not finite."""
    element = param("x", ELEMENT_OF[storage])
    x = load(element, storage)
    carrier = CARRIERS[x.type]
    ordinal = bits(x) & ((1 << (WIDTH[carrier.code] - 1)) - 1)
    finite = select(ordinal < const(carrier.code, carrier.infinity), ordinal, 0)
    return Function("magnitude", (element,), (finite,))


@cache
def _larger(code: Type) -> Function:
    x, y = param("x", code), param("y", code)
    return Function("larger", (x, y), (maximum(x, y),))


@cache
def _decoded(code: Type) -> Function:
    x = param("x", code)
    return Function("decoded", (x,), (from_bits(x),))


def _of_figures(elements: Map) -> tuple[Expr, ...]:
    """The values that the elements need, and that depend on the figure alone."""
    x, figure = elements.body.params
    order = needed(elements.body.results, {x: None, figure: None})
    of_x, alone = {x}, {figure}
    for node in order:
        group = of_x if any(arg in of_x for arg in node.args) else alone
        if group is of_x or any(arg in alone for arg in node.args):
            group.add(node)
    read = {arg for node in order if node in of_x for arg in node.args}
    return tuple(node for node in order if node in alone and node in read and node.type != "bool")


class _Builder:
    """The function of a variant, while it is built."""

    def __init__(self, variant: BlocksVariant, b: ir.IRBuilder, a: Mapping[str, Any]) -> None:
        self.kernel, self.machine, self.variant, self.b, self.a = variant.kernel, variant.machine, variant, b, a
        (self.storage,) = self.kernel.loads
        self.carrier = CARRIERS[CARRIER_OF[self.storage]]
        self.code = self.carrier.code
        self.lanes = 64 // bytes_of(self.code)
        self.x, self.out, *shared = (
            b.load(at(b, a["pointers"], I64(i), PTR), typ=PTR) for i in range(1 + len(self.kernel.figure.loads))
        )
        self.shared = [
            load_vector(b, pointer, s, 1) for pointer, s in zip(shared, self.kernel.figure.loads[1:], strict=True)
        ]
        (self.result,) = self.kernel.figure.results
        self.maxima = self._zeros(self.carrier.type, MOST)
        self.figures = scratch(b, MEMORY[self.result], MOST)
        elements = self.kernel.elements
        # The vectors of maxima, one for each block of an item.
        self.wide = None if variant.columns else self._zeros(self.code, MOST * self.lanes)
        self.element_lanes = (
            1 if elements is None else lanes_of(elements.body.results, dict.fromkeys(elements.body.params))
        )
        self.kept = () if elements is None else _of_figures(elements)
        self.places = {value: scratch(b, SCALARS[value.type], MOST) for value in self.kept}

    def run(self) -> None:
        """Emit the loop over items."""
        with count(self.b, self.a["begin"], self.a["end"]) as item:
            if self.variant.columns:
                self._columns(item)
            else:
                self._rows(item)

    def _zeros(self, type: Type, length: int) -> Any:
        place = scratch(self.b, SCALARS[type], length)
        with count(self.b, I64(0), I64(length)) as i:
            self.b.store(literal(type, 0, 1), at(self.b, place, i, SCALARS[type]))
        return place

    # ---- blocks of consecutive elements ----

    def _rows(self, item: Any) -> None:
        b, a, wide = self.b, self.a, self.wide
        first = b.mul(item, a["per"])
        number = least(b, a["per"], b.sub(a["blocks"], first))
        with self._walk(first, number) as (k, start, length):
            largest = Carried(b, [literal(self.code, 0, self.lanes)])
            for i, mask in self._vectors(length, self.lanes):
                magnitudes = self._magnitudes(at(b, self.x, b.add(start, i), MEMORY[self.storage]), mask)
                largest.store([self._larger(largest.load()[0], magnitudes)])
            b.store(largest.load()[0], at(b, wide, b.mul(k, I64(self.lanes)), SCALARS[self.code]), align=64)
        with count(b, I64(0), number, self.lanes) as k:
            self._store_maxima(self._maxima_of_blocks(k), k)
        self._find_figures(number)
        if self.kernel.elements is None:
            copy_elements(b, at(b, self.out, first, MEMORY[self.result]), self.figures, number, MEMORY[self.result])
            return
        with self._walk(first, number) as (k, start, length):
            env = self._known(k, 1, self.element_lanes)
            for i, mask in self._vectors(length, self.element_lanes):
                self._elements(b.add(start, i), env, self.element_lanes, mask)

    @contextmanager
    def _walk(self, first: Any, number: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Loop over the blocks of an item: the number of each, its first element and its length."""
        b, a = self.b, self.a
        if self.variant.size:
            size = I64(self.variant.size)
            with count(b, I64(0), number) as k:
                yield k, b.mul(b.add(first, k), size), size
            return
        row = b.udiv(first, a["row_blocks"])
        before = b.mul(b.sub(first, b.mul(row, a["row_blocks"])), a["size"])
        state = Carried(b, [b.add(b.mul(row, a["length"]), before), b.sub(a["length"], before)])
        with count(b, I64(0), number) as k:
            start, rest = state.load()
            length = least(b, a["size"], rest)
            yield k, start, length
            rest = b.sub(rest, length)
            ended = b.icmp_signed("==", rest, I64(0))
            state.store([b.add(start, length), b.select(ended, a["length"], rest)])

    def _vectors(self, length: Any, lanes: int) -> Iterator[tuple[Any, Any]]:
        """Loop over vectors of a run: the place of each, and a mask for the last one; None for a whole vector."""
        b = self.b
        if isinstance(length, ir.Constant):
            with count(b, I64(0), length, lanes) as i:
                yield i, None
            return
        whole = b.and_(length, I64(-lanes))
        with count(b, I64(0), whole, lanes) as i:
            yield i, None
        with b.if_then(b.icmp_signed("<", whole, length)):
            yield whole, self._mask(b.sub(length, whole), lanes)

    def _mask(self, number: Any, lanes: int) -> Any:
        b = self.b
        return b.icmp_signed("<", iota(lanes, I32), splat(b, b.trunc(number, I32), lanes))

    def _maxima_of_blocks(self, k: Any) -> Any:
        """One vector of the maxima of as many blocks: pairs of vectors are interleaved and halved, log2(n) times."""
        b, n = self.b, self.lanes
        rows = [
            b.load(at(b, self.wide, b.mul(b.add(k, I64(r)), I64(n)), SCALARS[self.code]), typ=self._codes, align=64)
            for r in range(n)
        ]
        low = ir.Constant(ir.VectorType(I32, n), [I32(i // 2 + n * (i % 2)) for i in range(n)])
        high = ir.Constant(ir.VectorType(I32, n), [I32((n + i) // 2 + n * (i % 2)) for i in range(n)])
        while len(rows) > 1:
            half = len(rows) // 2
            pairs = [(rows[i], rows[i + half]) for i in range(half)]
            rows = [self._larger(b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high)) for x, y in pairs]
        return rows[0]

    # ---- blocks along columns ----

    def _columns(self, item: Any) -> None:
        b, a = self.b, self.a
        outer = b.udiv(item, a["row_blocks"])
        before = b.mul(b.sub(item, b.mul(outer, a["row_blocks"])), a["size"])
        rows = least(b, a["size"], b.sub(a["length"], before))
        base = b.mul(b.add(b.mul(outer, a["length"]), before), a["inner"])
        elements, lanes = self.kernel.elements, self.element_lanes
        with count(b, I64(0), a["inner"], MOST) as column:
            width = least(b, I64(MOST), b.sub(a["inner"], column))
            start = b.add(base, column)
            for i, mask in self._vectors(width, self.lanes):
                largest = Carried(b, [literal(self.code, 0, self.lanes)])
                with self._down(b.add(start, i), rows) as place:
                    magnitudes = self._magnitudes(at(b, self.x, place, MEMORY[self.storage]), mask)
                    largest.store([self._larger(largest.load()[0], magnitudes)])
                self._store_maxima(largest.load()[0], i)
            self._find_figures(width)
            if elements is None:
                to = at(b, self.out, b.add(b.mul(item, a["inner"]), column), MEMORY[self.result])
                copy_elements(b, to, self.figures, width, MEMORY[self.result])
            for i, mask in self._vectors(width, lanes) if elements else ():
                env = self._known(i, lanes, lanes)
                with self._down(b.add(start, i), rows) as place:
                    self._elements(place, env, lanes, mask)

    @contextmanager
    def _down(self, start: Any, rows: Any) -> Iterator[Any]:
        """Loop over the rows of a block: the place of each, from ``start`` on."""
        b = self.b
        with count(b, I64(0), rows) as row:
            yield b.add(start, b.mul(row, self.a["inner"]))

    # ---- what both have in common ----

    @property
    def _codes(self) -> Any:
        return llvm_type(self.code, self.lanes)

    def _larger(self, x: Any, y: Any) -> Any:
        return emit(_larger(self.code), self.b, [x, y], self.lanes)[0]

    def _magnitudes(self, address: Any, mask: Any) -> Any:
        return emit(_magnitude(self.storage), self.b, [self._load(address, self.lanes, mask)], self.lanes)[0]

    def _load(self, address: Any, lanes: int, mask: Any) -> Any:
        if mask is None:
            return load_vector(self.b, address, self.storage, lanes)
        value = masked_load(self.b, address, MEMORY[self.storage], mask, lanes)
        return self.b.zext(value, llvm_type("u32", lanes)) if ELEMENT_OF[self.storage] == "u32" else value

    def _store_maxima(self, codes: Any, place: Any) -> None:
        (values,) = emit(_decoded(self.code), self.b, [codes], self.lanes)
        kind = SCALARS[self.carrier.type]
        self.b.store(values, at(self.b, self.maxima, place, kind), align=bytes_of(self.code))

    def _find_figures(self, number: Any) -> None:
        """Compute the figures of this many maxima, and what else the elements need of a figure alone."""
        b, figure = self.b, self.kernel.figure
        lanes = lanes_of((*figure.body.results, *self.kept), dict.fromkeys(figure.body.params))
        fuse = fusions_for(self.machine, lanes)
        with count(b, I64(0), number, lanes) as k:
            maxima = load_vector(b, at(b, self.maxima, k, MEMORY[figure.loads[0]]), figure.loads[0], lanes)
            operands = [maxima, *(splat(b, one, lanes) for one in self.shared)]
            (value,) = emit_results(
                figure.body.results, b, dict(zip(figure.body.params, operands, strict=True)), lanes, fuse
            )
            store_vector(b, value, at(b, self.figures, k, MEMORY[self.result]), self.result, lanes)
            known = {} if self.kernel.elements is None else {self.kernel.elements.body.params[1]: value}
            for node, one in zip(self.kept, emit_results(self.kept, b, known, lanes, fuse), strict=True):
                b.store(one, at(b, self.places[node], k, SCALARS[node.type]), align=bytes_of(node.type))

    def _known(self, k: Any, number: int, lanes: int) -> dict[Expr, Any]:
        """The figure and what depends on it alone, of block k, or of as many blocks from k on as there are lanes."""
        assert self.kernel.elements is not None
        b = self.b

        def load(place: Any, type: Type) -> Any:
            here = at(b, place, k, SCALARS[type])
            loaded = b.load(here, typ=llvm_type(type, number), align=bytes_of(type))
            return splat(b, loaded, lanes) if number == 1 else loaded

        return {
            self.kernel.elements.body.params[1]: load(self.figures, self.carrier.type),
            **{node: load(self.places[node], node.type) for node in self.kept},
        }

    def _elements(self, place: Any, known: Mapping[Expr, Any], lanes: int, mask: Any) -> None:
        elements, b = self.kernel.elements, self.b
        assert elements is not None
        x = self._load(at(b, self.x, place, MEMORY[self.storage]), lanes, mask)
        env = {elements.body.params[0]: x, **known}
        (value,) = emit_results(elements.body.results, b, env, lanes, fusions_for(self.machine, lanes))
        (storage,) = elements.results
        target = at(b, self.out, place, MEMORY[storage])
        if mask is None:
            store_vector(b, value, target, storage, lanes)
            return
        if ELEMENT_OF[storage] == "u32":
            value = b.trunc(value, ir.VectorType(MEMORY[storage], lanes))
        masked_store(b, value, target, MEMORY[storage], mask, lanes)
