"""Bins for exact sums: one 64-bit integer for each exponent, added up once at the end.

A finite x is m * 2^(e - bias) with an integer m. Bin e of a table of 64-bit integers holds the sum of the m of exponent
e (a 53-bit m in two halves, the upper one 26 bins higher), so that all bins together hold the exact sum. At the end
they are added up, with carries, into one long integer; its leading 64 bits and whether anything is below them make the
binary64 value to be rounded. Only integers are added, so the order of the elements cannot change the result.

    binary32 carrier    320 bins, 24-bit m      no bin overflows before 2^38 elements
    binary64 carrier   2144 bins, 27-bit m      no bin overflows before 2^35 elements

A table has bins beyond the leading bit of a sum of 2^35 of the largest numbers. Compare Neal, "Fast exact summation
using small and large superaccumulators", 2015.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir

from fxround.kernels.kinds import Exact
from fxround.numerics.formats.carriers import CARRIERS
from fxround.runtime.cpu.llvm.loops import (
    I32,
    I64,
    MEMORY,
    PTR,
    Carried,
    at,
    copy_elements,
    count,
    load_vector,
    scratch,
)
from fxround.runtime.cpu.llvm.render import SCALARS, emit, literal, llvm_type, splat

# Elements that are added together.
LANES: Final = 8
_I128: Final = ir.IntType(128)
_NAN, _PLUS, _MINUS = 4, 1, 2
_HALF: Final = 26


@dataclass(frozen=True)
class Bins:
    """The bins of a carrier: bin p counts in units of 2^(p - bias)."""

    carrier: str

    @property
    def trailing(self) -> int:
        """The number of bits of the trailing significand."""
        return CARRIERS[self.carrier].trailing

    @property
    def bytes(self) -> int:
        """The size of an element in bytes."""
        return 4 if self.carrier == "f32" else 8

    @property
    def bias(self) -> int:
        """The number p of the bin whose unit is 1."""
        return CARRIERS[self.carrier].bias + self.trailing

    @property
    def exponents(self) -> int:
        """The number of exponent fields; the last one is that of infinities and NaNs."""
        return 256 if self.carrier == "f32" else 2048

    @property
    def number(self) -> int:
        """The number of bins of a table, a multiple of 32."""
        return 320 if self.carrier == "f32" else 2144


class Tables:
    """Several tables of bins and their flags; ``add`` spreads a vector over the tables, or puts it into one."""

    def __init__(self, b: ir.IRBuilder, kernel: Exact, bins: Bins, number: int) -> None:
        self.b, self.kernel, self.bins, self.number = b, kernel, bins, number
        self.memory = MEMORY[kernel.loads[0]]
        self.code = llvm_type(CARRIERS[bins.carrier].code, 1)
        self.bin = scratch(b, I64, number * bins.number)
        self.flags = scratch(b, I64, number)
        self.buffer = scratch(b, self.memory, LANES)
        self.places = scratch(b, I64, LANES)
        self.parts = [scratch(b, I64, LANES) for _ in range(1 if bins.carrier == "f32" else 2)]

    def table(self, lane: Any) -> Any:
        """The address of a table."""
        return at(self.b, self.bin, self.b.mul(lane, I64(self.bins.number)), I64)

    def clear(self, first: Any = 0, number: int | None = None) -> None:
        """Set the bins and flags of ``number`` tables from ``first`` on to zero; of all, if no number is given."""
        b, first, number = self.b, I64(first) if isinstance(first, int) else first, number or self.number
        begin = b.mul(first, I64(self.bins.number))
        with count(b, begin, b.add(begin, I64(number * self.bins.number)), LANES) as i:
            b.store(literal("u64", 0, LANES), at(b, self.bin, i, I64), align=64)
        with count(b, first, b.add(first, I64(number))) as table:
            b.store(I64(0), at(b, self.flags, table, I64))

    def fold(self) -> None:
        """Add all tables to the first one, and join their flags."""
        b, vector = self.b, ir.VectorType(I64, LANES)
        with count(b, I64(0), I64(self.bins.number), LANES) as i:
            # The bound on a bin counts elements of all tables together, so the sum of tables does not overflow.
            places = [at(b, self.table(I64(t)), i, I64) for t in range(self.number)]
            whole = b.load(places[0], typ=vector, align=64)
            for place in places[1:]:
                whole = b.add(whole, b.load(place, typ=vector, align=64))
            b.store(whole, places[0], align=64)
        flags = [b.load(at(b, self.flags, I64(t), I64), typ=I64) for t in range(self.number)]
        for other in flags[1:]:
            flags[0] = b.or_(flags[0], other)
        b.store(flags[0], self.flags)

    def padded(self, source: Any, number: Any) -> Any:
        """Copy ``number`` elements to a buffer, followed by zeros."""
        b, zero = self.b, 0 if isinstance(self.memory, ir.IntType) else 0.0
        with count(b, I64(0), I64(LANES)) as i:
            b.store(ir.Constant(self.memory, zero), at(b, self.buffer, i, self.memory))
        copy_elements(b, self.buffer, source, number, self.memory)
        return self.buffer

    def add(self, address: Any, table: Any | None = None) -> None:
        """Add eight elements to ``table``; without one, the element of lane l to table l mod their number."""
        b, bins, code = self.b, self.bins, self.code
        (x,) = emit(self.kernel.read, b, [load_vector(b, address, self.kernel.loads[0], LANES)], LANES)

        def each(value: int) -> Any:
            return splat(b, code(value), LANES)

        field = b.and_(b.lshr(x, each(bins.trailing)), each(bins.exponents - 1))
        fraction = b.and_(x, each((1 << bins.trailing) - 1))
        # A subnormal has field 0, no implicit bit and the unit of field 1; ``total_function`` moves bin 0 to bin 1.
        # Infinities and NaNs add nothing here and are noted in the flags.
        implicit = b.select(b.icmp_unsigned("==", field, each(0)), each(0), each(1 << bins.trailing))
        special = b.icmp_unsigned("==", field, each(bins.exponents - 1))
        magnitude = b.select(special, each(0), b.or_(fraction, implicit))
        sign = b.ashr(x, each(code.width - 1))
        whole = ir.IntType(LANES)
        with b.if_then(b.icmp_unsigned("!=", b.bitcast(special, whole), whole(0)), likely=False):
            self._mark(special, fraction, sign, table)
        wide = ir.VectorType(I64, LANES)
        low, high = [b.sext(v, wide) if code.width < 64 else v for v in (magnitude, sign)]
        pieces = [low]
        if len(self.parts) == 2:
            # m = low + 2^26 high: the halves of 26 and 27 bits go to bins e and e + 26.
            pieces = [b.and_(low, each((1 << _HALF) - 1)), b.lshr(low, each(_HALF))]
        b.store(b.zext(field, wide) if code.width < 64 else field, self.places, align=64)
        for piece, part in zip(pieces, self.parts, strict=True):
            # ``high`` is 0 or -1: this negates the pieces of negative elements.
            b.store(b.sub(b.xor(piece, high), high), part, align=64)
        for lane in range(LANES):
            # One lane after the other: two elements may share a bin. Neighbouring lanes add to different tables, so
            # that an addition seldom waits for the store of the one before.
            place = b.load(at(b, self.places, I64(lane), I64), typ=I64)
            for i, part in enumerate(self.parts):
                own = self.table(I64(lane % self.number) if table is None else table)
                slot = at(b, own, b.add(place, I64(i * _HALF)), I64)
                value = b.load(at(b, part, I64(lane), I64), typ=I64)
                b.store(b.add(b.load(slot, typ=I64), value), slot)

    def _mark(self, special: Any, fraction: Any, sign: Any, table: Any | None) -> None:
        """Note infinities and NaNs in the flags of their tables."""
        b = self.b
        for lane in range(LANES):
            here = I32(lane)
            number = b.icmp_unsigned("==", b.extract_element(fraction, here), self.code(0))
            minus = b.icmp_signed("<", b.extract_element(sign, here), self.code(0))
            kind = b.select(number, b.select(minus, I64(_MINUS), I64(_PLUS)), I64(_NAN))
            kind = b.select(b.extract_element(special, here), kind, I64(0))
            slot = at(b, self.flags, I64(lane % self.number) if table is None else table, I64)
            b.store(b.or_(b.load(slot, typ=I64), kind), slot)


def total_function(module: ir.Module, bins: Bins, to_odd: bool) -> ir.Function:
    """The function total(table, flags): the sum in a table as binary64, to odd or to nearest even.

    The 64 leading bits carry a sticky lowest bit, more than ten places below the 53 that are kept: either rounding of
    them is that of the exact sum.
    """
    function = ir.Function(module, ir.FunctionType(SCALARS["f64"], [PTR, I64]), "total")
    function.linkage = "internal"
    b = ir.IRBuilder(function.append_basic_block("entry"))
    # A table is read once: moving bin 0 changes it.
    table, flags = function.args
    groups = bins.number // 32
    size = groups + 4
    # Two words of zeros below the lowest one, which ``_window`` reads if the leading word is among the lowest.
    words = scratch(b, I64, size + 2)
    for i in range(2):
        b.store(I64(0), at(b, words, I64(i), I64))
    with b.if_then(b.icmp_unsigned("!=", flags, I64(0)), likely=False):
        b.ret(_special(b, flags))
    # Field 0 has the unit of field 1. With bin 0 empty, ``encode`` never shifts by more than 63.
    first = at(b, table, I64(1), I64)
    b.store(b.add(b.load(first, typ=I64), b.load(table, typ=I64)), first)
    b.store(I64(0), table)
    negative = _carry(b, table, words, groups)
    _negate_if(b, words, size, negative)
    leading = _leading(b, words, size)
    with b.if_then(b.icmp_signed("<", leading, I64(2)), likely=False):
        b.ret(ir.Constant(SCALARS["f64"], 0.0))
    significand, top = _window(b, words, leading)
    code = encode(b, significand, b.sub(top, I64(bins.bias)), to_odd)
    b.ret(b.bitcast(b.or_(code, b.shl(b.zext(negative, I64), I64(63))), SCALARS["f64"]))
    return function


def _special(b: ir.IRBuilder, flags: Any) -> Any:
    """The infinity or NaN that the flags stand for: infinities of both signs, or a NaN, give a NaN."""
    nan, infinity, sign = (0x7FF8 << 48), (0x7FF << 52), 1 << 63
    code = b.select(b.icmp_unsigned("==", flags, I64(_PLUS)), I64(infinity), I64(nan))
    code = b.select(b.icmp_unsigned("==", flags, I64(_MINUS)), I64(infinity | sign), code)
    return b.bitcast(code, SCALARS["f64"])


def _carry(b: ir.IRBuilder, table: Any, words: Any, groups: int) -> Any:
    """Add the bins up into 32-bit words, two's complement; returns whether the sum is negative."""
    carried = Carried(b, [_I128(0)])
    with count(b, I64(0), I64(groups)) as g:
        (total,) = carried.load()
        base = at(b, table, b.mul(g, I64(32)), I64)
        for t in range(32):
            # 32 bins of 64 bits, shifted by up to 31, are below 2^100 together: 128 bits hold them and the carry.
            value = b.sext(b.load(at(b, base, I64(t), I64), typ=I64), _I128)
            total = b.add(total, b.shl(value, _I128(t)))
        b.store(b.and_(b.trunc(total, I64), I64(0xFFFFFFFF)), at(b, words, b.add(g, I64(2)), I64))
        carried.store([b.ashr(total, _I128(32))])
    (total,) = carried.load()
    for i in range(4):
        word = b.and_(b.trunc(b.ashr(total, _I128(32 * i)), I64), I64(0xFFFFFFFF))
        b.store(word, at(b, words, I64(groups + 2 + i), I64))
    return b.icmp_signed("<", total, _I128(0))


def _negate_if(b: ir.IRBuilder, words: Any, size: int, negative: Any) -> None:
    """Replace the long integer by its magnitude."""
    with b.if_then(negative):
        carried = Carried(b, [I64(1)])
        with count(b, I64(2), I64(size + 2)) as i:
            place = at(b, words, i, I64)
            # -n is the complement of n plus 1, with carries from word to word.
            word = b.add(b.xor(b.load(place, typ=I64), I64(0xFFFFFFFF)), carried.load()[0])
            b.store(b.and_(word, I64(0xFFFFFFFF)), place)
            carried.store([b.lshr(word, I64(32))])


def _leading(b: ir.IRBuilder, words: Any, size: int) -> Any:
    """The index of the highest word that is not zero; less than 2 if all are zero."""
    leading = Carried(b, [I64(0)])
    with count(b, I64(2), I64(size + 2)) as i:
        here = b.icmp_unsigned("!=", b.load(at(b, words, i, I64), typ=I64), I64(0))
        leading.store([b.select(here, i, leading.load()[0])])
    return leading.load()[0]


def _window(b: ir.IRBuilder, words: Any, leading: Any) -> tuple[Any, Any]:
    """(the leading 64 bits, the lowest set if any bit below is; the bin number of the leading bit)."""
    # Three words have the 64 leading bits wherever the first of them begins; ``rest`` is what is below these words.
    parts = [b.load(at(b, words, b.sub(leading, I64(i)), I64), typ=I64) for i in range(3)]
    rest = Carried(b, [I64(0)])
    with count(b, I64(2), b.sub(leading, I64(2))) as i:
        rest.store([b.or_(rest.load()[0], b.load(at(b, words, i, I64), typ=I64))])
    zeros = b.sub(b.ctlz(parts[0], ir.IntType(1)(0)), I64(32))
    upper = b.or_(b.shl(parts[0], I64(32)), parts[1])
    window = b.or_(b.shl(b.zext(upper, _I128), _I128(32)), b.zext(parts[2], _I128))
    window = b.shl(window, b.zext(zeros, _I128))
    below = b.or_(b.and_(b.trunc(window, I64), I64(0xFFFFFFFF)), rest.load()[0])
    lost = b.zext(b.icmp_unsigned("!=", below, I64(0)), I64)
    top = b.sub(b.add(b.mul(b.sub(leading, I64(2)), I64(32)), I64(31)), zeros)
    return b.or_(b.trunc(b.lshr(window, _I128(32)), I64), lost), top


def encode(b: ir.IRBuilder, significand: Any, exponent: Any, to_odd: bool) -> Any:
    """The binary64 encoding of significand * 2^(exponent - 63), rounded once; bit 63 of the significand is set."""
    low = b.icmp_signed("<", exponent, I64(-1022))
    places = b.add(I64(11), b.select(low, b.sub(I64(-1022), exponent), I64(0)))
    kept = b.lshr(significand, places)
    lost = b.and_(significand, b.sub(b.shl(I64(1), places), I64(1)))
    if to_odd:
        # Beyond the range, rounding to odd gives the largest finite number, whose significand is odd.
        kept = b.or_(kept, b.zext(b.icmp_unsigned("!=", lost, I64(0)), I64))
        beyond = I64((0x7FF << 52) - 1)
    else:
        # A carry out of ``kept`` runs into the exponent field, which is the encoding of the next binade, or of
        # infinity.
        half = b.shl(I64(1), b.sub(places, I64(1)))
        tie = b.and_(b.icmp_unsigned("==", lost, half), b.trunc(kept, ir.IntType(1)))
        kept = b.add(kept, b.zext(b.or_(b.icmp_unsigned(">", lost, half), tie), I64))
        beyond = I64(0x7FF << 52)
    field = b.select(low, I64(0), b.add(exponent, I64(1022)))
    code = b.add(kept, b.shl(field, I64(52)))
    return b.select(b.icmp_signed(">", exponent, I64(1023)), beyond, code)
