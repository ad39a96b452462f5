"""Max pooling over the last two dimensions: the largest element of each window, and its index, as PyTorch's operator.

The elements of a window are compared in row-major order, and an element takes the place of the one before it if it is
larger or a NaN. So the last NaN is chosen if there is one, else the first of the largest elements; nothing is rounded.

Item i is row i mod ``rows`` of the result of plane i div ``rows``. Columns whose windows are not cut at the sides are
computed as vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir

from fxround.numerics.formats.storage import ELEMENT_OF, Storage
from fxround.runtime.cpu.llvm.loops import (
    I32,
    I64,
    MEMORY,
    PTR,
    Carried,
    at,
    count,
    define,
    least,
    load_vector,
    store_vector,
    with_sizes,
)
from fxround.runtime.cpu.llvm.render import literal, splat

# rows, columns    of a plane of the result
# height, width    of a plane of the operand
# kernel, step, padding, dilation of the windows' rows (_h) and columns (_w); the width of a kernel is the variant's
# first, vectors, inside   the columns from ``first`` to before ``inside`` have windows as wide as the kernel, and those
#                  before ``vectors`` are computed as vectors, the last one of which may begin before the end of another
LAYOUT: Final = (
    *("rows", "columns", "height", "width", "kernel_h", "step_h", "padding_h", "dilation_h"),
    *("step_w", "padding_w", "dilation_w", "first", "vectors", "inside"),
)
# The lanes of a vector, of which the most that a row has room for are used.
LANES: Final = (8, 4)
_LEAST: Final = {"f32": 0xFF80_0000, "f64": 0xFFF0_0000_0000_0000}


@dataclass(frozen=True)
class PoolVariant:
    """The code for a dtype and a width of the windows.

    step, dilation: of columns. Vectors are read at steps of 1 and 2 (``vector_reach``). lanes: 1 if there are none.
    """

    storage: Storage
    width: int
    step: int
    dilation: int
    lanes: int = 1

    @property
    def digest(self) -> str:
        """The key of the compiled code."""
        return f"pool:{self.storage}:{self.width}:{self.step}:{self.dilation}:{self.lanes}"

    @property
    def vector_reach(self) -> int | None:
        """The columns from a window's first one to the last one that a vector reads; None: there are no vectors."""
        if self.step > 2:
            return None
        return max(self._shift(k) + self.step - 1 for k in range(self.width))

    def _shift(self, k: int) -> int:
        """The columns from a window's first one to where a vector with the window's element k is read.

        At a step of 2 a vector reads twice its lanes: from the element on, or from the one before it.
        """
        return max(0, k * self.dilation - (self.step - 1))


def build_pool(variant: PoolVariant) -> str:
    """The LLVM text of ``pool(begin, end, layout, x, values, indices)``; layout: LAYOUT; indices: int64."""
    module = ir.Module("pool")
    names = ("layout", "x", "values", "indices")
    b, a = define(module, "pool", [("begin", I64), ("end", I64), *((name, PTR) for name in names)])
    _Rows(b, with_sizes(b, a, LAYOUT), variant).emit()
    b.ret_void()
    return str(module)


class _Rows:
    """The loop over rows of results."""

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], variant: PoolVariant) -> None:
        self.b, self.a, self.variant, self.memory = b, a, variant, MEMORY[variant.storage]
        self.chosen = {
            lanes: Carried(b, [self._least(lanes), splat(b, I32(0), lanes)]) for lanes in sorted({1, variant.lanes})
        }

    def _least(self, lanes: int) -> Any:
        element = ELEMENT_OF[self.variant.storage]
        return literal(element, _LEAST[element], lanes)

    def emit(self) -> None:
        """Emit the loop."""
        b, a = self.b, self.a
        with count(b, a["begin"], a["end"]) as item:
            plane = b.udiv(item, a["rows"])
            row = b.sub(item, b.mul(plane, a["rows"]))
            self.x = at(b, a["x"], b.mul(plane, b.mul(a["height"], a["width"])), self.memory)
            self.target = b.mul(item, a["columns"])
            self.top = b.sub(b.mul(row, a["step_h"]), a["padding_h"])
            self.rows = self._inside(self.top, a["dilation_h"], a["kernel_h"], a["height"])
            with count(b, I64(0), a["first"]) as column:
                self._window(column, 1, whole=False)
            lanes = self.variant.lanes
            if lanes > 1:
                last = b.sub(a["vectors"], I64(lanes))
                with count(b, a["first"], a["vectors"], lanes) as column:
                    self._window(least(b, column, last), lanes, whole=True)
            with count(b, a["vectors"], a["inside"]) as column:
                self._window(column, 1, whole=True)
            with count(b, a["inside"], a["columns"]) as column:
                self._window(column, 1, whole=False)

    def _inside(self, start: Any, dilation: Any, kernel: Any, size: Any) -> tuple[Any, Any]:
        """The range of a window's elements that are in the operand, along one dimension."""
        b = self.b
        up = b.sub(dilation, I64(1))
        before = b.sdiv(b.add(b.neg(start), up), dilation)
        low = b.select(b.icmp_signed("<", start, I64(0)), before, I64(0))
        return low, least(b, kernel, b.sdiv(b.add(b.sub(size, start), up), dilation))

    def _window(self, column: Any, lanes: int, whole: bool) -> None:
        """Emit the windows of ``lanes`` columns. whole: they are as wide as the kernel."""
        b, a, variant = self.b, self.a, self.variant
        left = b.sub(b.mul(column, a["step_w"]), a["padding_w"])
        width, dilation = I64(variant.width), I64(variant.dilation)
        low, high = (I64(0), width) if whole else self._inside(left, dilation, width, a["width"])
        first = b.add(self._start(self.rows[0]), b.add(left, b.mul(low, dilation)))
        self.chosen[lanes].store([self._least(lanes), self._places(first, lanes)])
        with count(b, *self.rows) as k_row:
            row = self._start(k_row)
            if whole:
                for k in range(variant.width):
                    self._compare(row, b.add(left, I64(k * variant.dilation)), k, lanes)
            else:
                with count(b, low, high) as k_column:
                    self._compare(row, b.add(left, b.mul(k_column, dilation)), 0, lanes)
        value, index = self.chosen[lanes].load()
        place = b.add(self.target, column)
        store_vector(b, value, at(b, a["values"], place, self.memory), variant.storage, lanes)
        wide = b.zext(index, I64 if lanes == 1 else ir.VectorType(I64, lanes))
        b.store(wide, at(b, a["indices"], place, I64), align=8)

    def _start(self, k_row: Any) -> Any:
        """The element of the plane that row ``k_row`` of a window begins with, but for its columns."""
        b, a = self.b, self.a
        return b.mul(b.add(self.top, b.mul(k_row, a["dilation_h"])), a["width"])

    def _places(self, first: Any, lanes: int) -> Any:
        """The elements of the plane that the windows' elements are, as i32."""
        b = self.b
        place = b.trunc(first, I32)
        if lanes == 1:
            return place
        steps = ir.Constant(ir.VectorType(I32, lanes), [I32(i * self.variant.step) for i in range(lanes)])
        return b.add(splat(b, place, lanes), steps)

    def _compare(self, row: Any, column: Any, k: int, lanes: int) -> None:
        """Emit the comparison of the windows' elements ``k`` of a row with what is chosen."""
        b, chosen = self.b, self.chosen[lanes]
        first = b.add(row, column)
        x = self._read(first, k, lanes)
        value, index = chosen.load()
        takes = b.or_(b.fcmp_ordered(">", x, value), b.fcmp_unordered("uno", x, x))
        chosen.store([b.select(takes, x, value), b.select(takes, self._places(first, lanes), index)])

    def _read(self, first: Any, k: int, lanes: int) -> Any:
        """The elements ``first``, ``first`` + step, ... of the plane."""
        b, variant = self.b, self.variant
        if lanes == 1 or variant.step == 1:
            return load_vector(b, at(b, self.x, first, self.memory), variant.storage, lanes)
        back = k * variant.dilation - variant._shift(k)
        address = at(b, self.x, b.sub(first, I64(back)), self.memory)
        both = load_vector(b, address, variant.storage, 2 * lanes)
        mask = ir.Constant(ir.VectorType(I32, lanes), [I32(2 * i + back) for i in range(lanes)])
        return b.shuffle_vector(both, ir.Constant(both.type, ir.Undefined), mask)
