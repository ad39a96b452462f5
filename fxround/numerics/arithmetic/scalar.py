"""The scalar IR: straight-line arithmetic on five types, written once and rendered per target.

An expression is a node of a hash-consed DAG: equal expressions are the same object, so common subexpressions are shared
without a pass. Every operator has one meaning, given by its NumPy function in ``OPS``. A target (LLVM, CUDA C++) is
another table over the same names and contains nothing about rounding. There are no loops, no memory and no calls.

Integers wrap modulo 2^width. A shift by the width or more is undefined on the targets, so evaluation raises an error.
Float operators are those of IEEE 754, to nearest even: no target may contract, reassociate or approximate them.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from fxround.numerics.lazy import cached_property

Type = Literal["bool", "u32", "u64", "f32", "f64"]
Array = npt.NDArray[Any]

DTYPES: Final[dict[Type, type[np.generic]]] = {
    "bool": np.bool_,
    "u32": np.uint32,
    "u64": np.uint64,
    "f32": np.float32,
    "f64": np.float64,
}
WIDTH: Final[dict[Type, int]] = {"bool": 1, "u32": 32, "u64": 64, "f32": 32, "f64": 64}
BITS_OF: Final[dict[Type, Type]] = {"f32": "u32", "f64": "u64"}
FLOAT_OF: Final[dict[Type, Type]] = {"u32": "f32", "u64": "f64"}


class Expr:
    """One value of the IR. The operators and the functions below make it; it has no constructor of its own."""

    __slots__ = ("__weakref__", "args", "attr", "op", "type")

    op: str
    type: Type
    args: tuple[Expr, ...]
    attr: str | int | None

    def __repr__(self) -> str:
        return f"<{self.op}:{self.type}>"

    def __add__(self, other: Expr | int | float) -> Expr:
        return _binary("fadd" if self.type in BITS_OF else "add", self, other)

    def __sub__(self, other: Expr | int | float) -> Expr:
        return _binary("fsub" if self.type in BITS_OF else "sub", self, other)

    def __mul__(self, other: Expr | int | float) -> Expr:
        return _binary("fmul" if self.type in BITS_OF else "mul", self, other)

    def __truediv__(self, other: Expr | float) -> Expr:
        return _binary("fdiv", self, other)

    def __radd__(self, other: int | float) -> Expr:
        return const(self.type, other) + self

    def __rsub__(self, other: int | float) -> Expr:
        return const(self.type, other) - self

    def __rmul__(self, other: int | float) -> Expr:
        return const(self.type, other) * self

    def __rtruediv__(self, other: float) -> Expr:
        return const(self.type, other) / self

    def __and__(self, other: Expr | int) -> Expr:
        return _binary("and", self, other)

    def __or__(self, other: Expr | int) -> Expr:
        return _binary("or", self, other)

    def __xor__(self, other: Expr | int) -> Expr:
        return _binary("xor", self, other)

    def __lshift__(self, other: Expr | int) -> Expr:
        return _binary("shl", self, other)

    def __rshift__(self, other: Expr | int) -> Expr:
        return _binary("shr", self, other)

    def __invert__(self) -> Expr:
        return self ^ ((1 << WIDTH[self.type]) - 1)

    def __lt__(self, other: Expr | int | float) -> Expr:
        return _binary("flt" if self.type in BITS_OF else "lt", self, other)

    def __le__(self, other: Expr | int | float) -> Expr:
        return _binary("fle" if self.type in BITS_OF else "le", self, other)

    def __gt__(self, other: Expr | int | float) -> Expr:
        return _lift(self.type, other) < self

    def __ge__(self, other: Expr | int | float) -> Expr:
        return _lift(self.type, other) <= self

    def equals(self, other: Expr | int | float) -> Expr:
        """Return bool: IEEE equality for floats (NaN differs from itself), bit equality for integers."""
        return _binary("feq" if self.type in BITS_OF else "eq", self, other)


_INTERNED: WeakValueDictionary[tuple[Any, ...], Expr] = WeakValueDictionary()


def _make(op: str, type: Type, args: tuple[Expr, ...], attr: str | int | None = None) -> Expr:
    key = (op, type, args, attr)
    expression = _INTERNED.get(key)
    if expression is None:
        expression = Expr.__new__(Expr)
        expression.op, expression.type, expression.args, expression.attr = op, type, args, attr
        _INTERNED[key] = expression
    return expression


def _apply(op: str, *args: Expr) -> Expr:
    """Check the types against the operator's row, fold integer constants, and intern the node."""
    row = OPS[op]
    types = tuple(a.type for a in args)
    result = row.types(*types)
    if result is None:
        raise TypeError(f"scalar IR: {op} does not take ({', '.join(types)})")
    node = _make(op, result, args)
    if any(a.op != "const" for a in args):
        return node
    # Floats are not folded: a constant must not depend on the host's libm or flush-to-zero state.
    if result in BITS_OF or any(t in BITS_OF for t in types):
        return node
    return const(result, int(evaluate_node(node, [constant_array(a) for a in args])))


def _lift(type: Type, value: Expr | int | float) -> Expr:
    return value if isinstance(value, Expr) else const(type, value)


def _binary(op: str, left: Expr, right: Expr | int | float) -> Expr:
    return _apply(op, left, _lift(left.type, right))


def param(name: str, type: Type) -> Expr:
    """Return a named argument of a function."""
    return _make("param", type, (), name)


def const(type: Type, value: int | float | bool) -> Expr:
    """Return a constant. A float is kept by its encoding, which preserves NaN and minus zero.

    Raises ValueError for an f32 constant that is no binary32 value.
    """
    if type in BITS_OF:
        code = "<f" if type == "f32" else "<d"
        if type == "f32" and ctypes.c_float(value).value != value and value == value:
            raise ValueError(f"{value!r} is not a binary32 value: round it where its error is accounted for")
        packed = struct.pack(code, float(value))
        return _make("const", type, (), int.from_bytes(packed, "little"))
    return _make("const", type, (), int(value) & ((1 << WIDTH[type]) - 1))


def select(condition: Expr, yes: Expr | int | float, no: Expr | int | float) -> Expr:
    """Return ``yes`` where ``condition`` holds, else ``no``. Both are evaluated."""
    if isinstance(yes, Expr):
        return _select(condition, yes, _lift(yes.type, no))
    if isinstance(no, Expr):
        return _select(condition, _lift(no.type, yes), no)
    raise TypeError("scalar IR: select needs at least one Expr among its values")


def rarely(condition: Expr, rare: Expr, common: Expr) -> Expr:
    """Return ``select``, with the promise that ``condition`` seldom holds: a target may skip ``rare`` elsewhere."""
    return _apply("rarely", condition, rare, common)


def _select(condition: Expr, yes: Expr, no: Expr) -> Expr:
    if condition.op == "const":
        return yes if condition.attr else no
    if yes is no:
        return yes
    return _apply("select", condition, yes, no)


def bits(x: Expr) -> Expr:
    """Return the encoding of a float as an unsigned integer of its width."""
    return _apply("bits", x)


def from_bits(x: Expr) -> Expr:
    """Return the float with this encoding."""
    return _apply("from_bits", x)


def widen(x: Expr) -> Expr:
    """Convert u32 to u64 (zero extension) or f32 to f64 (exact)."""
    return _apply("widen", x)


def narrow(x: Expr) -> Expr:
    """Convert u64 to u32 (modulo 2^32) or f64 to f32 (nearest even)."""
    return _apply("narrow", x)


def signed_to_f64(x: Expr) -> Expr:
    """Convert a u64, read as two's complement, to f64 (nearest even)."""
    return _apply("signed_to_f64", x)


def signed_to_f32(x: Expr) -> Expr:
    """Convert a u32, read as two's complement, to f32 (nearest even)."""
    return _apply("signed_to_f32", x)


def lookup(index: Expr, entries: Sequence[int]) -> Expr:
    """Return entry ``index`` (u32) modulo the number of entries, which is a power of two; each entry is a u32."""
    return _apply("lookup", index, *(const("u32", e) for e in entries))


def fma(a: Expr, b: Expr | float, c: Expr | float) -> Expr:
    """Return a * b + c, rounded once to nearest even."""
    return _apply("fma", a, _lift(a.type, b), _lift(a.type, c))


def toward_zero(nearest: Expr, lost: Expr) -> Expr:
    """Return a sum or a multiply-add of f64 values rounded towards zero, from the nearest value and what it lost.

    ``lost``, of which the sign alone counts, is the exact value minus ``nearest``. A target may compute an addition or
    a multiply-add without looking at ``lost``, which must therefore be right or not matter.
    """
    return _apply("toward_zero", nearest, lost)


def sqrt(x: Expr) -> Expr:
    """Return the square root, rounded to nearest even."""
    return _apply("sqrt", x)


def absolute(x: Expr) -> Expr:
    """Return |x| by clearing the sign bit (NaN stays NaN)."""
    return from_bits(bits(x) & ((1 << (WIDTH[x.type] - 1)) - 1))


def negate(x: Expr) -> Expr:
    """Return -x by flipping the sign bit (also of a NaN)."""
    return from_bits(bits(x) ^ (1 << (WIDTH[x.type] - 1)))


def is_nan(x: Expr) -> Expr:
    """Return bool: x differs from itself."""
    return ~x.equals(x)


def minimum(a: Expr, b: Expr | int) -> Expr:
    """Return the smaller of two unsigned integers."""
    other = _lift(a.type, b)
    return select(a < other, a, other)


def maximum(a: Expr, b: Expr | int) -> Expr:
    """Return the larger of two unsigned integers."""
    other = _lift(a.type, b)
    return select(a < other, other, a)


# ---- the operators: result type and NumPy meaning, the reference for every target ----


@dataclass(frozen=True)
class Op:
    """A row of the operator table: its type rule (None: types are refused) and its meaning on NumPy arrays."""

    types: Callable[..., Type | None]
    numpy: Callable[..., Array]


def _fma32(a: Array, b: Array, c: Array) -> Array:
    """Compute fma in binary32, rounded once.

    The product of two 24-bit significands fits 53 bits. The sum is rounded to odd in binary64, and 53 >= 24 + 2 makes
    the second rounding innocuous (Boldo and Melquiond 2008).
    """
    p, d = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    total = p + d
    part = total - p
    error = (p - (total - part)) + (d - part)
    code = np.asarray(total).view(np.uint64)
    fix = (error != 0) & ~np.isnan(error) & ((code & np.uint64(1)) == 0) & np.isfinite(total)
    outward = (error > 0) == (total > 0)
    moved = np.where(outward, code + np.uint64(1), code - np.uint64(1)).astype(np.uint64)
    return np.where(fix, moved, code).astype(np.uint64).view(np.float64).astype(np.float32)


def _fma64_one(a: float, b: float, c: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        # A finite product has no effect on an infinite or NaN addend, however large it is.
        return c if math.isfinite(a) and math.isfinite(b) else float(np.float64(a) * np.float64(b) + np.float64(c))
    product = Fraction(a) * Fraction(b)
    exact = product + Fraction(c)
    if exact == 0:
        # Zeros of one sign keep it; zeros of different signs, and a cancellation, give +0 (IEEE 754-2019, 6.3).
        sign = math.copysign(1.0, a) * math.copysign(1.0, b)
        return math.copysign(0.0, c) if product == 0 and sign == math.copysign(1.0, c) else 0.0
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


_fma64: Callable[..., Any] = np.frompyfunc(_fma64_one, 3, 1)


def _fma_numpy(a: Array, b: Array, c: Array) -> Array:
    if np.asarray(a).dtype == np.float32:
        return _fma32(a, b, c)
    return np.asarray(_fma64(a, b, c), dtype=np.float64)


def _toward_zero(nearest: Array, lost: Array) -> Array:
    code = np.asarray(nearest).view(np.uint64)
    inward = ((lost < 0) & (nearest > 0)) | ((lost > 0) & (nearest < 0))
    return np.asarray(np.where(inward, code - np.uint64(1), code).astype(np.uint64).view(np.float64))


def _checked_shift(shift: Callable[..., Array]) -> Callable[..., Array]:
    def apply(x: Array, n: Array) -> Array:
        if np.any(np.asarray(n) >= 8 * np.asarray(x).dtype.itemsize):
            raise ValueError("scalar IR: a shift by the width or more is undefined on the targets")
        return shift(x, n)

    return apply


def _same(*allowed: Type) -> Callable[..., Type | None]:
    return lambda *ts: ts[0] if len(set(ts)) == 1 and ts[0] in allowed else None


def _compare(*allowed: Type) -> Callable[..., Type | None]:
    return lambda *ts: "bool" if len(set(ts)) == 1 and ts[0] in allowed else None


def _convert(table: dict[Type, Type]) -> Callable[..., Type | None]:
    return lambda t: table.get(t)


def _view(x: Array) -> Array:
    kinds = {np.dtype(DTYPES[f]): DTYPES[u] for f, u in BITS_OF.items()}
    kinds |= {np.dtype(DTYPES[u]): DTYPES[f] for u, f in FLOAT_OF.items()}
    return np.asarray(x).view(kinds[np.asarray(x).dtype])


def _lookup_type(index: Type, *entries: Type) -> Type | None:
    power_of_two = len(entries) > 1 and not len(entries) & (len(entries) - 1)
    return "u32" if power_of_two and {index, *entries} == {"u32"} else None


def _lookup_numpy(index: Array, *entries: Array) -> Array:
    return np.asarray(np.stack(entries)[np.asarray(index) & np.uint32(len(entries) - 1)])


_INTEGERS: Final[tuple[Type, ...]] = ("u32", "u64")
_FLOATS: Final[tuple[Type, ...]] = ("f32", "f64")
_NARROW: Final[dict[Type, Type]] = {"u64": "u32", "f64": "f32"}
_WIDEN: Final[dict[Type, Type]] = {"u32": "u64", "f32": "f64"}

OPS: Final[dict[str, Op]] = {
    "add": Op(_same(*_INTEGERS), np.add),
    "sub": Op(_same(*_INTEGERS), np.subtract),
    "mul": Op(_same(*_INTEGERS), np.multiply),
    "and": Op(_same("bool", *_INTEGERS), np.bitwise_and),
    "or": Op(_same("bool", *_INTEGERS), np.bitwise_or),
    "xor": Op(_same("bool", *_INTEGERS), np.bitwise_xor),
    "shl": Op(_same(*_INTEGERS), _checked_shift(np.left_shift)),
    "shr": Op(_same(*_INTEGERS), _checked_shift(np.right_shift)),
    "eq": Op(_compare(*_INTEGERS), np.equal),
    "lt": Op(_compare(*_INTEGERS), np.less),
    "le": Op(_compare(*_INTEGERS), np.less_equal),
    "fadd": Op(_same(*_FLOATS), np.add),
    "fsub": Op(_same(*_FLOATS), np.subtract),
    "fmul": Op(_same(*_FLOATS), np.multiply),
    "fdiv": Op(_same(*_FLOATS), np.divide),
    "sqrt": Op(_same(*_FLOATS), np.sqrt),
    "fma": Op(_same(*_FLOATS), _fma_numpy),
    "toward_zero": Op(_same("f64"), _toward_zero),
    "feq": Op(_compare(*_FLOATS), np.equal),
    "flt": Op(_compare(*_FLOATS), np.less),
    "fle": Op(_compare(*_FLOATS), np.less_equal),
    "select": Op(lambda c, a, b: a if c == "bool" and a == b else None, np.where),
    "rarely": Op(lambda c, a, b: a if c == "bool" and a == b else None, np.where),
    "bits": Op(_convert(BITS_OF), _view),
    "from_bits": Op(_convert(FLOAT_OF), _view),
    "widen": Op(_convert(_WIDEN), lambda x: x),
    "narrow": Op(_convert(_NARROW), lambda x: x),
    "signed_to_f64": Op(_convert({"u64": "f64"}), lambda x: np.asarray(x).view(np.int64)),
    "signed_to_f32": Op(_convert({"u32": "f32"}), lambda x: np.asarray(x).view(np.int32)),
    "lookup": Op(_lookup_type, _lookup_numpy),
}


def constant_array(node: Expr) -> Array:
    """Return the 0-d NumPy array of a constant."""
    assert node.op == "const" and isinstance(node.attr, int)
    carrier = BITS_OF.get(node.type, node.type)
    value = np.array(node.attr, dtype=DTYPES[carrier])
    return value.view(DTYPES[node.type])


def evaluate_node(node: Expr, args: list[Array]) -> Array:
    """Evaluate one operator on NumPy arrays; the result has the node's dtype."""
    with np.errstate(all="ignore"):
        return np.asarray(OPS[node.op].numpy(*args)).astype(DTYPES[node.type], copy=False)


@dataclass(frozen=True, eq=False)
class Function:
    """A named scalar function: parameters in call order, one or more results."""

    name: str
    params: tuple[Expr, ...]
    results: tuple[Expr, ...]

    def __post_init__(self) -> None:
        known = set(self.params)
        free = [n.attr for n in self.schedule if n.op == "param" and n not in known]
        if free:
            raise ValueError(f"{self.name}: free parameters {free}, declared {[p.attr for p in self.params]}")

    @cached_property
    def schedule(self) -> tuple[Expr, ...]:
        """Every node once, operands before users, in an order that the expression alone determines."""
        order: dict[Expr, None] = {}
        stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(self.results)]
        while stack:
            node, ready = stack.pop()
            if node in order:
                continue
            if ready or not node.args:
                order[node] = None
                continue
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))
        return tuple(order)

    def text(self) -> str:
        """Return the listing, one operator a line. Equal functions have equal listings."""
        names: dict[Expr, str] = {p: f"%{p.attr}" for p in self.params}
        head = ", ".join(f"%{p.attr}: {p.type}" for p in self.params)
        lines = [f"{self.name}({head})"]
        for node in self.schedule:
            if node in names:
                continue
            if node.op == "const":
                names[node] = f"{node.type}:{node.attr:#x}"
                continue
            names[node] = f"%{len(lines)}"
            operands = ", ".join(names[a] for a in node.args)
            lines.append(f"  {names[node]}: {node.type} = {node.op} {operands}")
        lines.append("  return " + ", ".join(names[r] for r in self.results))
        return "\n".join(lines)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the listing, which identifies the function's code."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def evaluate(self, *args: npt.ArrayLike) -> tuple[Array, ...]:
        """Evaluate the function on NumPy arrays that broadcast against each other. This defines its meaning."""
        if len(args) != len(self.params):
            raise TypeError(f"{self.name} takes {len(self.params)} arrays, got {len(args)}")
        env: dict[Expr, Array] = {
            p: np.asarray(a, dtype=DTYPES[p.type]) for p, a in zip(self.params, args, strict=True)
        }
        for node in self.schedule:
            if node in env:
                continue
            if node.op == "const":
                env[node] = constant_array(node)
                continue
            env[node] = evaluate_node(node, [env[a] for a in node.args])
        return tuple(env[r] for r in self.results)


def substitute(roots: Iterable[Expr], values: dict[Expr, Expr]) -> tuple[Expr, ...]:
    """Return the same expressions with some nodes (usually parameters) replaced, which is inlining."""
    wanted = tuple(roots)
    done: dict[Expr, Expr] = dict(values)
    for node in Function("substitute", tuple(_parameters(wanted)), wanted).schedule:
        if node in done:
            continue
        if not node.args:
            done[node] = node
            continue
        args = tuple(done[a] for a in node.args)
        done[node] = node if args == node.args else _select(*args) if node.op == "select" else _apply(node.op, *args)
    return tuple(done[r] for r in wanted)


def _parameters(roots: tuple[Expr, ...]) -> list[Expr]:
    parameters: dict[Expr, None] = {}
    stack, seen = list(roots), set(roots)
    while stack:
        node = stack.pop()
        if node.op == "param":
            parameters[node] = None
        fresh = [a for a in node.args if a not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return list(parameters)
