"""Exact sums of blocks: integers made by one binary64 addition each, gathered in 256-bit totals.

With |x| < 2^(u + 50) and M = 3 * 2^(51 + u), the binary64 sum t = x + M is M plus x rounded to a multiple of 2^u, so
bits(t) - bits(M) is that multiple as an integer, t - M its value, and x - (t - M) the exact rest. A rest is added in
turn, with a unit 51 bits lower. The largest exponent of a block is found first and gives its units; if some rest is
left at the end, the caller puts the block into bins instead (``exact_bins``).

    level 1   binary32 within 26 binades of the block's largest number; most blocks of numbers of one size
    level 2   binary32 within 77 binades, binary64 within 48
    level 3   binary64 within 99 binades

Every integer is exact or the block is rejected. A block's sums wrap modulo 2^64 and are at most 2^62 in magnitude.
An element is below 2^152 of its block's lowest unit, so totals of 2^35 elements whose units are up to ``_SPREAD`` bins
apart are below 2^247 and fit in 256 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from fxround.numerics.formats.carriers import CARRIERS
from fxround.runtime.cpu.llvm.exact_bins import Bins, Tables, encode
from fxround.runtime.cpu.llvm.loops import I64, Carried, at, count, scratch
from fxround.runtime.cpu.llvm.render import SCALARS, literal, llvm_type

I256: Final = ir.IntType(256)
_BITS: Final = 51
_SPREAD: Final = 60
_PIECE: Final = 26
# A loop over a block's vectors, which calls its argument with each vector of encodings.
Vectors = Callable[[Callable[[Any], None]], None]


def levels(bins: Bins) -> tuple[int, int]:
    """The numbers of units to try, in turn."""
    return (1, 2) if bins.carrier == "f32" else (2, 3)


def largest(b: ir.IRBuilder, bins: Bins, vectors: Vectors, lanes: int) -> Any:
    """The exponent fields of the largest magnitudes, in each lane."""
    code = llvm_type(CARRIERS[bins.carrier].code, lanes)
    mask = literal(CARRIERS[bins.carrier].code, (1 << (8 * bins.bytes - 1)) - 1, lanes)
    top = Carried(b, [ir.Constant(code, None)])

    def take(x: Any) -> None:
        # Encodings without their sign are ordered as the magnitudes are; NaNs and infinities are the largest.
        size, before = b.and_(x, mask), top.load()[0]
        top.store([b.select(b.icmp_unsigned("<", before, size), size, before)])

    vectors(take)
    return b.lshr(top.load()[0], literal(CARRIERS[bins.carrier].code, bins.trailing, lanes))


def ordinary(b: ir.IRBuilder, bins: Bins, field: Any) -> Any:
    """Whether a block's largest exponent field (i64) is small enough for M to be finite."""
    return b.icmp_unsigned("<", field, I64(255 if bins.carrier == "f32" else 2040))


def lowest_unit(b: ir.IRBuilder, bins: Bins, field: Any, level: int, lanes: int) -> Any:
    """The bin of the lowest of ``level`` units for blocks with these largest exponent fields (i64 lanes)."""
    # A number of field f is below 2^(f + trailing + 1 - bias), the highest unit 2^50 times smaller. No unit is below
    # bin 1, of which every number is a multiple.
    shift = bins.trailing + 1 - 50 - _BITS * (level - 1)
    wanted, one = b.add(field, literal("u64", shift % 2**64, lanes)), literal("u64", 1, lanes)
    return b.select(b.icmp_signed("<", wanted, one), one, wanted)


def units(b: ir.IRBuilder, bins: Bins, lowest: Any, level: int, lanes: int) -> list[Any]:
    """The encodings of the numbers M of the units, highest first."""
    # M = 1.5 * 2^(52 + lowest - bias) has the exponent field 1023 + 52 + lowest - bias; the bias is 150 or 1075.
    field = {"f32": 925, "f64": 0}[bins.carrier]
    patterns = []
    for i in reversed(range(level)):
        own = b.add(lowest, literal("u64", field + _BITS * i, lanes))
        patterns.append(b.or_(b.shl(own, literal("u64", 52, lanes)), literal("u64", 1 << 51, lanes)))
    return patterns


def add_up(b: ir.IRBuilder, magic: list[Any], vectors: Vectors, lanes: int) -> tuple[list[Any], Any]:
    """(the sums of bits(t) at each level, in each lane; the lanes that have a rest)."""
    number, wide = llvm_type("f64", lanes), llvm_type("u64", lanes)
    sums = Carried(b, [ir.Constant(wide, None)] * len(magic))
    left = Carried(b, [ir.Constant(llvm_type("bool", lanes), None)])
    values = [b.bitcast(m, number) for m in magic]

    def take(x: Any) -> None:
        rest = b.bitcast(x, number) if x.type == wide else b.fpext(b.bitcast(x, llvm_type("f32", lanes)), number)
        terms = []
        for m in values:
            moved = b.fadd(rest, m)
            terms.append(b.bitcast(moved, wide))
            # Both differences are exact: t - M is the multiple that was added, and x less its nearest multiple has
            # fewer bits.
            rest = b.fsub(rest, b.fsub(moved, m))
        sums.store([b.add(s, f) for s, f in zip(sums.load(), terms, strict=True)])
        # Unordered: a NaN counts as a rest, so that no block with one is accepted.
        something = b.fcmp_unordered("!=", rest, literal("f64", 0, lanes))
        left.store([b.or_(left.load()[0], something)])

    vectors(take)
    return sums.load(), left.load()[0]


def joined(b: ir.IRBuilder, sums: list[Any]) -> Any:
    """The sums of the levels (i64, highest first) as one integer in the lowest unit."""
    total = b.sext(sums[0], I256)
    for lower in sums[1:]:
        total = b.add(b.shl(total, I256(_BITS)), b.sext(lower, I256))
    return total


class Totals:
    """A 256-bit total for each line in the unit of a bin, and tables for what was rejected or became too wide."""

    def __init__(self, b: ir.IRBuilder, tables: Tables, lines: int) -> None:
        self.b, self.tables = b, tables
        self.total, self.unit, self.top, self.used = (scratch(b, t, lines) for t in (I256, I64, I64, I64))

    def clear(self, line: Any) -> None:
        """Set a line's total to zero and mark its tables as unused."""
        b = self.b
        b.store(I256(0), at(b, self.total, line, I256))
        for field in (self.unit, self.top, self.used):
            b.store(I64(0), at(b, field, line, I64))

    def _get(self, field: Any, line: Any) -> Any:
        return self.b.load(at(self.b, field, line, I64), typ=I64)

    def open(self, line: Any, tables: int) -> Any:
        """Clear the line's tables at their first use."""
        b = self.b
        with b.if_then(b.icmp_unsigned("==", self._get(self.used, line), I64(0))):
            self.tables.clear(line, tables)
            b.store(I64(1), at(b, self.used, line, I64))

    def add(self, line: Any, value: Any, unit: Any, tables: int = 1) -> None:
        """Add value * 2^unit to a line's total; a total that would become too wide moves to the table first."""
        b, place = self.b, at(self.b, self.total, line, I256)
        empty = b.icmp_unsigned("==", b.load(place, typ=I256), I256(0))
        own = b.select(empty, unit, self._get(self.unit, line))
        high = b.select(empty, unit, self._get(self.top, line))
        high = b.select(b.icmp_signed("<", high, unit), unit, high)
        low = b.select(b.icmp_signed("<", unit, own), unit, own)
        # Units of one total are at most ``_SPREAD`` bins apart, so no shift below loses a bit of the 256. An empty
        # total takes the unit of what is added.
        apart = b.icmp_signed("<", I64(_SPREAD), b.sub(high, low))
        with b.if_then(apart, likely=False):
            self.open(line, tables)
            self.spill(line)
        own, high, low = (b.select(apart, unit, v) for v in (own, high, low))
        old = b.shl(b.load(place, typ=I256), b.zext(b.sub(own, low), I256))
        b.store(b.add(old, b.shl(value, b.zext(b.sub(unit, low), I256))), place)
        for field, v in ((self.unit, low), (self.top, high)):
            b.store(v, at(b, field, line, I64))

    def spill(self, line: Any) -> None:
        """Move the line's total into its table, ``_PIECE`` bits for each bin."""
        b, place = self.b, at(self.b, self.total, line, I256)
        table, total = self.tables.table(line), b.load(place, typ=I256)
        negative = b.icmp_signed("<", total, I256(0))
        # Bins up to the table's end hold the leading bit of any sum that is allowed, so nothing is left after the loop.
        rest = Carried(b, [b.select(negative, b.sub(I256(0), total), total)])
        with count(b, self._get(self.unit, line), I64(self.tables.bins.number), _PIECE) as p:
            (magnitude,) = rest.load()
            piece = b.and_(b.trunc(magnitude, I64), I64((1 << _PIECE) - 1))
            slot = at(b, table, p, I64)
            b.store(b.add(b.load(slot, typ=I64), b.select(negative, b.sub(I64(0), piece), piece)), slot)
            rest.store([b.lshr(magnitude, I256(_PIECE))])
        b.store(I256(0), place)

    def value(self, line: Any, total: ir.Function) -> Any:
        """The line's sum as binary64, to be rounded."""
        b = self.b
        result = Carried(b, [ir.Constant(SCALARS["f64"], 0.0)])
        with b.if_else(b.icmp_unsigned("!=", self._get(self.used, line), I64(0)), likely=False) as (binned, short):
            with binned:
                self.spill(line)
                flags = self._get(self.tables.flags, line)
                result.store([b.call(total, [self.tables.table(line), flags])])
            with short:
                held = b.load(at(b, self.total, line, I256), typ=I256)
                result.store([b.call(b.module.globals["short"], [held, self._get(self.unit, line)])])
        return result.load()[0]


def short_function(module: ir.Module, bins: Bins, to_odd: bool) -> ir.Function:
    """The function short(total, unit): total * 2^unit as binary64, to odd or to nearest even."""
    function = ir.Function(module, ir.FunctionType(SCALARS["f64"], [I256, I64]), "short")
    function.linkage = "internal"
    b = ir.IRBuilder(function.append_basic_block("entry"))
    total, unit = function.args
    with b.if_then(b.icmp_unsigned("==", total, I256(0))):
        b.ret(ir.Constant(SCALARS["f64"], 0.0))
    negative = b.icmp_signed("<", total, I256(0))
    magnitude = b.select(negative, b.sub(I256(0), total), total)
    zeros = b.ctlz(magnitude, ir.IntType(1)(1))
    window = b.shl(magnitude, zeros)
    # As in ``exact_bins``: the leading 64 bits, the lowest set if any bit below is.
    below = b.icmp_unsigned("!=", b.trunc(window, ir.IntType(192)), ir.IntType(192)(0))
    significand = b.or_(b.trunc(b.lshr(window, I256(192)), I64), b.zext(below, I64))
    top = b.sub(b.add(unit, I64(255 - bins.bias)), b.trunc(zeros, I64))
    code = encode(b, significand, top, to_odd)
    b.ret(b.bitcast(b.or_(code, b.shl(b.zext(negative, I64), I64(63))), SCALARS["f64"]))
    return function


def wide(b: ir.IRBuilder, field: Any, lanes: int) -> Any:
    """Exponent fields as i64."""
    target = llvm_type("u64", lanes)
    return field if field.type == target else b.zext(field, target)
