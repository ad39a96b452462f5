"""``Format``: the values of a floating-point format, as data, and the texts that name one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np

from fxround.errors import shown
from fxround.numerics.formats.names import ALIASES, FLUSH, SPELT, UNSURE, other_numbers, own_name
from fxround.numerics.formats.posit_codes import are_posits, posit_value
from fxround.numerics.formats.text import description
from fxround.short_reprs import Short

Overflow = Literal["inf", "saturate", "nan", "wrap"]
OVERFLOWS: Final[tuple[Overflow, ...]] = ("inf", "saturate", "nan")


def number(text: str) -> float:
    """Parse a float in hexadecimal (0x1.8p+0) or decimal spelling; ValueError for anything else or beyond binary64."""
    try:
        value = float.fromhex(text) if "x" in text.lower() else float(text)
    except OverflowError:
        raise ValueError(f"{shown(text)} is outside the range of binary64") from None
    except ValueError:
        raise ValueError(f"{shown(text)} is not a number") from None
    return value


def spelt(value: Any) -> Any:
    """Return the text of a format, or of a dtype of PyTorch or NumPy; return anything else unchanged."""
    if isinstance(value, Format):
        return str(value)
    # This module does not import torch. A dtype of PyTorch spells itself: str(torch.half) is "torch.float16".
    if (type(value).__module__, type(value).__name__) == ("torch", "dtype"):
        return str(value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    return value


@dataclass(frozen=True, repr=False)
class Format(Short):
    """A floating-point format: the set of numbers that it can represent.

    name        the text that ``Format.parse`` reads
    precision   p, the bits of the significand including the implicit one (1 to 53)
    emin        the exponent of the smallest normal number, 2^emin
    maximum     the largest finite value, exact in binary64
    signed      False: no value is below zero
    inf, nan    whether the format has infinities and NaN; rounding keeps a NaN in either case, as a NaN of the tensor
    zero        False: the smallest magnitude is 2^emin
    subnormals  False: no value lies between 0 and 2^emin
    minus_zero  False: every zero is +0, as in the formats named "fnuz"; no effect in a format without a sign or a zero
    even_codes  where ties go in a format of precision 1; True: to the even code, that of the value whose exponent
                differs from emin by an odd number; False: to the larger magnitude
    values      all values of a table (``Format.table``), ascending; () for other formats
    posit       the number of bits and of exponent bits of a posit (``Format.posit_of``); None for other formats
    span        the least and the largest value of fixed point (``Format.fixed_point``); None for other formats

    Raises ValueError if a value of the format is outside of binary64, or if the maximum needs more than ``precision``
    bits. Example::

        fxround.Format.ieee(exponent_bits=5, precision=3).maximum      # as e5m2
    """

    name: str
    precision: int
    emin: int
    maximum: float
    signed: bool = True
    inf: bool = True
    nan: bool = True
    zero: bool = True
    subnormals: bool = True
    minus_zero: bool = True
    even_codes: bool = False
    values: tuple[float, ...] = ()
    posit: tuple[int, int] | None = None
    span: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not -1074 <= self.emin <= 1023:
            raise ValueError(f"{self.name}: 2^{self.emin} is outside the range of binary64, the widest carrier")
        if self.precision < 1 or self.precision > 53:
            raise ValueError(f"{self.name}: precision {self.precision} is not in 1..53 (binary64 has 53)")
        if not math.isfinite(self.maximum) or self.maximum < math.ldexp(1.0, self.emin):
            raise ValueError(f"{self.name}: the maximum {self.maximum} must be finite and at least 2^{self.emin}")
        significand = math.ldexp(self.maximum, self.precision - 1 - self.emax)
        if significand != int(significand):
            raise ValueError(f"{self.name}: the maximum {self.maximum} does not fit {self.precision} bits")

    def __str__(self) -> str:
        return self.name

    @property
    def said(self) -> str:
        """What messages call the format: its name, or for a long table the number of its values."""
        return self.name if len(self.name) <= 60 else f"a table of {len(self.values)} values"

    @property
    def is_grid(self) -> bool:
        """Whether the values of a binade are the multiples of one quantum: the format is no table and no posit."""
        return not self.values and self.posit is None

    @property
    def emax(self) -> int:
        """The exponent of the maximum: 2^emax <= maximum < 2^(emax + 1)."""
        return math.frexp(self.maximum)[1] - 1

    @property
    def quantum_exponent(self) -> int:
        """The exponent of the smallest positive value, which is also the spacing below 2^emin."""
        return self.emin - self.precision + 1 if self.subnormals else self.emin

    @property
    def boundary_precision(self) -> int:
        """The bits that values and midpoints of neighbours need: one more than the precision, or more in a table."""
        if not self.values:
            return self.precision + 1
        middles = (Fraction(a) + Fraction(b) for a, b in pairwise(self.values))
        return max(_significant_bits(v) for v in (*middles, *map(Fraction, self.values)))

    @property
    def has_minus_zero(self) -> bool:
        """Whether a zero keeps its sign."""
        return self.signed and self.zero and self.minus_zero

    @property
    def default_overflow(self) -> Overflow:
        """The overflow of a rounding whose text has none, as in ml_dtypes.

        It is "inf" if the format has infinities, else "nan" if it has a NaN, else "saturate".
        """
        return "inf" if self.inf else "nan" if self.nan and self.is_grid else "saturate"

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """The overflow behaviours that the format can express."""
        if not self.is_grid:
            return ("saturate",)
        if self.span is not None:
            return ("saturate", "wrap")
        return tuple(o for o in OVERFLOWS if o == "saturate" or (o == "inf" and self.inf) or (o == "nan" and self.nan))

    def without_subnormals(self) -> Format:
        """Return the same format with no value between zero and 2^emin (flush)."""
        if self.span is not None:
            raise ValueError(f"{self.name} has one quantum and no subnormals; leave {FLUSH} out")
        return self if not self.subnormals else replace(self, name=self.name + FLUSH, subnormals=False)

    def with_range_of(self, other: Format) -> Format:
        """Return the format with this precision and the exponents of ``other``."""
        if (self.emin, self.emax) == (other.emin, other.emax):
            return self
        maximum = math.ldexp(2.0 - math.ldexp(1.0, 1 - self.precision), other.emax)
        return Format.custom(precision=self.precision, emin=other.emin, maximum=maximum)

    def within(self, other: Format) -> bool:
        """Whether every finite value of this format is a value of ``other``, minus zero included."""
        if self.values or other.values:
            return bool(self.values) and bool(np.all(other.contains(self.values)))
        if other.posit:
            return self.posit is not None and self.posit[0] <= other.posit[0] and self.posit[1] == other.posit[1]
        low, high = self.span or (-self.maximum if self.signed else 0.0, self.maximum)
        if other.span and not other.span[0] <= low <= high <= other.span[1]:
            return False
        return (
            self.precision <= other.precision
            and self.quantum_exponent >= other.quantum_exponent
            and (other.subnormals or self.emin >= other.emin)
            and self.maximum <= other.maximum
            and (other.signed or low >= 0)
            and (other.zero or not self.zero)
            and (other.has_minus_zero or not self.has_minus_zero)
        )

    def contains(self, values: Any) -> Any:
        """Return for each number of an array whether it is a value of the format: a bool array of the same shape.

        values: numbers that binary64 holds. -0 counts as 0, and a NaN as a value of every format, because every
        rounding keeps it. No rounding is used: a finite value is a multiple of the quantum at its magnitude.
        """
        if self.values:
            return np.isin(values, self.values) | np.isnan(values)
        if self.posit:
            return are_posits(values, *self.posit)
        x = np.abs(np.asarray(values, dtype=np.float64))
        finite = np.where(np.isfinite(x), x, 0.0)
        exponent = np.maximum(np.frexp(finite)[1] - 1, self.emin) - self.precision + 1
        with np.errstate(under="ignore"):  # a number far below the quantum becomes zero, and differs from itself
            multiple = np.ldexp(np.rint(np.ldexp(finite, -exponent)), exponent) == finite
        tiny = (finite > 0) if self.subnormals and self.zero else finite >= math.ldexp(1.0, self.emin)
        low, high = self.span or (-self.maximum, self.maximum)
        held = (
            multiple & (low <= np.asarray(values)) & (np.asarray(values) <= high) & (tiny | ((finite == 0) & self.zero))
        )
        positive = (x == 0) | ~np.signbit(np.asarray(values, dtype=np.float64))
        return np.where(np.isnan(x), True, np.where(np.isinf(x), self.inf, held) & (self.signed | positive))

    def magnitudes(self) -> Iterator[float]:
        """Yield every finite magnitude in ascending order, for small formats."""
        if self.values:
            yield from sorted({abs(v) for v in self.values})
            return
        if self.posit:
            yield 0.0
            yield from (posit_value(code, *self.posit) for code in range(1, 2 ** (self.posit[0] - 1)))
            return
        if self.zero:
            yield 0.0
        step = math.ldexp(1.0, self.quantum_exponent)
        value = step if self.subnormals else math.ldexp(1.0, self.emin)
        while value <= self.maximum:
            yield value
            exponent = max(math.frexp(value)[1] - 1, self.emin)
            value += math.ldexp(1.0, exponent - self.precision + 1)

    def describe(self) -> str:
        """Return the format's parameters, and how it treats ties, subnormals, minus zero and overflow, as text."""
        return description(self)

    @staticmethod
    def ieee(*, exponent_bits: int, precision: int, subnormals: bool = True) -> Format:
        """Return the IEEE 754-style format with these widths, whose highest exponent is reserved for inf and NaN.

        exponent_bits: 2 to 11. precision: 2 to 53, including the implicit bit. subnormals: False leaves them out.
        Raises ValueError for other widths.
        Source: IEEE 754-2019, section 3.3 (emax = 2^(w-1) - 1, emin = 1 - emax).
        """
        if not 2 <= exponent_bits <= 11:
            raise ValueError(f"exponent_bits is {exponent_bits}: expected 2 to 11 (binary64 has 11)")
        if not 2 <= precision <= 53:
            raise ValueError(f"precision is {precision}: expected 2 to 53, the implicit bit counted (binary64 has 53)")
        emax = 2 ** (exponent_bits - 1) - 1
        maximum = math.ldexp(2.0 - math.ldexp(1.0, 1 - precision), emax)
        fmt = Format(f"ieee({exponent_bits},{precision})", precision, 1 - emax, maximum)
        return fmt if subnormals else fmt.without_subnormals()

    @staticmethod
    def custom(
        *,
        precision: int,
        emin: int,
        maximum: float,
        signed: bool = True,
        inf: bool = True,
        nan: bool = True,
        zero: bool = True,
        subnormals: bool = True,
        minus_zero: bool = True,
    ) -> Format:
        """Return a format with any precision, emin, maximum and set of special values.

        Arguments and errors are those of ``Format``. The name contains all of them, so that ``Format.parse`` reads it.
        """
        held = {"signed": signed, "inf": inf, "nan": nan, "zero": zero, "unsigned_zero": not minus_zero}
        flags = "+".join(k for k, v in held.items() if v)
        name = f"custom({precision},{emin},{float(maximum).hex()},{flags})"
        fmt = Format(name, precision, emin, float(maximum), signed, inf, nan, zero, minus_zero=minus_zero)
        return fmt if subnormals else fmt.without_subnormals()

    @staticmethod
    def p3109(*, bits: int, precision: int, signed: bool = True, extended: bool = True) -> Format:
        """Return a format of IEEE P3109, which has one zero and one NaN.

        bits: 3 to 16. precision: 1 to bits - 1, without a sign 1 to bits. signed: ``s`` in the name, as in
        ``binary8p3se``; ``u`` is unsigned. extended: ``e``, with infinities; ``f`` has none. Raises ValueError for
        other numbers, and for a range that exceeds binary64's. Source: IEEE P3109 interim report.
        """
        if not 3 <= bits <= 16 or not 1 <= precision <= bits - signed:
            raise ValueError(
                f"binary{bits}p{precision}: expected 3 to 16 bits, and a precision of 1 to bits - 1 with a sign, 1 to "
                "bits without"
            )
        bias = 2 ** (bits - precision - signed)
        # Without a sign the last code is the NaN; the last code before it, or of the positive ones, is infinity.
        code = 2 ** (bits - signed) - 1 - (not signed) - extended
        field, tail = code >> (precision - 1), code & ((1 << (precision - 1)) - 1)
        significand = Fraction(tail, 1 << (precision - 1)) + (field > 0)
        maximum = significand * Fraction(2) ** (max(field, 1) - bias)
        name = f"binary{bits}p{precision}{'s' if signed else 'u'}{'e' if extended else 'f'}"
        if not Fraction(2) ** (1 - bias) <= maximum < Fraction(2) ** 1024:
            raise ValueError(f"{name}: its values are not those of a format within binary64")
        return Format(
            name,
            precision,
            1 - bias,
            float(maximum),
            signed=signed,
            inf=extended,
            subnormals=precision > 1,
            minus_zero=False,
            even_codes=precision == 1,
        )

    @staticmethod
    def posit_of(bits: int, exponent_bits: int) -> Format:
        """Return the posits of this size, ``posit(16,2)`` for example.

        bits: 3 to 32. exponent_bits: 0 to 4. Raises ValueError for other numbers. In every mode, a nonzero number is
        never rounded to zero, nor a finite number to NaR. Source: Standard for Posit Arithmetic (2022), which has 2
        exponent bits.
        """
        if not 3 <= bits <= 32 or not 0 <= exponent_bits <= 4:
            raise ValueError(f"posit({bits},{exponent_bits}): expected 3 to 32 bits and 0 to 4 exponent bits")
        last = (bits - 2) << exponent_bits
        return Format(
            f"posit({bits},{exponent_bits})",
            precision=max(bits - 2 - exponent_bits, 1),
            emin=-last,
            maximum=math.ldexp(1.0, last),
            inf=False,
            subnormals=False,
            minus_zero=False,
            posit=(bits, exponent_bits),
        )

    @staticmethod
    def fixed_point(bits: int, fraction: int, *, signed: bool = True) -> Format:
        """Return the two's complement numbers of ``bits`` bits, multiples of 2^-fraction: ``fixed(16,8)``.

        bits: 2 to 52, or 51 if not signed (``ufixed``). fraction: -200 to 200. Raises ValueError. A zero is +0.
        """
        most_bits = 51 + signed
        if not 2 <= bits <= most_bits or abs(fraction) > 200:
            raise ValueError(
                f"fixed point of {bits} bits and 2^{-fraction}: expected 2 to {most_bits} bits, 2^-200 to 2^200"
            )
        digits, unit = max(2, bits - signed), 2.0**-fraction
        span = (-(2.0 ** (bits - 1)) * unit if signed else 0.0, (2.0 ** (bits - signed) - 1) * unit)
        largest, name = max(-span[0], span[1]), f"{'' if signed else 'u'}fixed({bits},{fraction})"
        return Format(name, digits, digits - 1 - fraction, largest, inf=False, nan=False, minus_zero=False, span=span)

    @staticmethod
    def table(values: Iterable[float], *, name: str | None = None) -> Format:
        """Return the format that has exactly these values.

        Rounding to it replaces a number beyond the first or last value by that value. A zero is +0. ``nearest_even``
        resolves a tie to the value with the even position in ``values``, counted from 0.

        values: 2 to 256 finite numbers in ascending order, of magnitudes up to 2^1000. name: the name of a row of
        ``fxround.numerics.formats.TABLES``; None makes the name ``table(...)`` of the values. Raises ValueError for
        other values, TypeError for what are no numbers. Example::

            fxround.round(x, fxround.table([-1, -0.5, 0, 0.5, 1]))
        """
        if not isinstance(values, Iterable):
            raise TypeError(f"values is {shown(values)}; expected 2 to 256 numbers in ascending order")
        listed = tuple(float(v) + 0.0 for v in values)
        if not 2 <= len(listed) <= 256:
            raise ValueError(f"a table has 2 to 256 values, got {len(listed)}")
        if not all(abs(v) <= 2.0**1000 for v in listed):
            raise ValueError("a table has finite values of magnitudes up to 2^1000")
        for a, b in pairwise(listed):
            if not a < b:
                raise ValueError(f"the values of a table ascend, each once: {b!r} follows {a!r}")
        spelling = ",".join(repr(v).removesuffix(".0") for v in listed)
        return Format(
            name or f"table({spelling})",
            precision=max(_significant_bits(Fraction(v)) for v in listed),
            emin=min(math.frexp(v)[1] - 1 for v in listed if v),
            maximum=max(map(abs, listed)),
            signed=listed[0] < 0,
            inf=False,
            nan=False,
            zero=0.0 in listed,
            subnormals=False,
            minus_zero=False,
            values=listed,
        )

    @staticmethod
    def parse(text: Any) -> Format:
        """Parse a format's name, or a floating-point dtype of PyTorch or NumPy.

        A name is a key of ``fxround.formats``, another name of one of these (``"half"``), ``"nf4"``,
        ``ieee(exponent_bits,precision)``, ``custom(...)``, ``table(value,value,...)``, ``posit(bits,exponent_bits)``,
        ``fixed(bits,fraction)`` or ``binary8p3se`` (``Format.p3109``). ``-flush`` after it leaves out subnormals.
        Raises ValueError for an unknown name and for a dtype of integers or complex numbers; else TypeError.
        """
        text = spelt(text)
        if not isinstance(text, str):
            raise TypeError(f"a format is a text like 'e4m3fn' or a floating-point dtype, got {type(text).__name__}")
        base = own_name(text.strip())
        row = base.removesuffix(FLUSH)
        return Format._row(row, text) if row == base else Format._row(row, text).without_subnormals()

    @staticmethod
    def _row(base: str, text: str) -> Format:
        """Return the format of a name without ``-flush``. text: what a message shows."""
        if base in NAMED or base in NAMED_TABLES:
            return NAMED.get(base) or NAMED_TABLES[base]
        ieee = re.fullmatch(r"ieee\(([0-9]{1,4}),\s*([0-9]{1,4})\)", base)
        if ieee:
            return Format.ieee(exponent_bits=int(ieee[1]), precision=int(ieee[2]))
        custom = re.fullmatch(r"custom\(([0-9]{1,4}),(-?[0-9]{1,5}),([^,]{1,40}),([a-z_+]*)\)", base)
        if custom:
            flags = set(custom[4].split("+"))
            return Format.custom(
                precision=int(custom[1]),
                emin=int(custom[2]),
                maximum=number(custom[3]),
                signed="signed" in flags,
                inf="inf" in flags,
                nan="nan" in flags,
                zero="zero" in flags,
                minus_zero="unsigned_zero" not in flags,
            )
        if listed := re.fullmatch(r"table\(([^()]{1,8000})\)", base):
            return Format.table(map(number, listed[1].split(",")))
        standard = re.fullmatch(r"binary([0-9]{1,2})p([0-9]{1,2})([su])([ef])", base)
        if standard:
            bits, precision = int(standard[1]), int(standard[2])
            return Format.p3109(bits=bits, precision=precision, signed=standard[3] == "s", extended=standard[4] == "e")
        posit = re.fullmatch(r"posit\(([0-9]{1,2}),\s*([0-9])\)", base)
        if posit:
            return Format.posit_of(int(posit[1]), int(posit[2]))
        fixed = re.fullmatch(r"(u?)fixed\(([0-9]{1,2}),\s*(-?[0-9]{1,4})\)", base)
        if fixed:
            return Format.fixed_point(int(fixed[2]), int(fixed[3]), signed=not fixed[1])
        if numbers := other_numbers(base):
            raise ValueError(
                f"{shown(text)} is a dtype of {numbers}, which are not rounded: expected a floating-point format, like "
                "'bfloat16', 'float16' or 'e4m3fn'"
            )
        if re.fullmatch(r"sbits\(-?[0-9]{1,4}\)", base):
            raise ValueError(
                f"{shown(text)} has the exponents of the values' dtype, which is not known here: name it in a policy, "
                "a rule or fxround.round, or write ieee(exponent_bits,precision)"
            )
        if "(" in base and (spelt := SPELT.get(base.partition("(")[0])):
            raise ValueError(f"no format is named {shown(text)}; expected {spelt} with numbers")
        near = candidates(base) or get_close_matches(base[:40], NAMED, n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        known = ", ".join((*NAMED, *NAMED_TABLES, *SPELT.values(), "binary8p3se"))
        raise ValueError(f"no format is named {shown(text)}{hint} Known: {known}")


# The named formats and tables. ``rows`` fills them, and shows them as FORMATS and TABLES.
NAMED: Final[dict[str, Format]] = {}
NAMED_TABLES: Final[dict[str, Format]] = {}


def candidates(name: str) -> tuple[str, ...]:
    """Return the formats that an unknown name may mean, for messages."""
    low = name.lower().removeprefix("torch.")
    known = low if low in NAMED else ALIASES.get(low)
    written = (SPELT[low],) if low in SPELT else ()
    return (known,) if known else UNSURE.get(low, written)


def _significant_bits(x: Fraction) -> int:
    """Return the number of binary digits from the first to the last that is not 0; 0 for zero. x: a dyadic rational."""
    digits = abs(x.numerator)
    return digits.bit_length() - (digits & -digits).bit_length() + 1 if digits else 0
