"""The LLVM table: every operator of the scalar IR as one builder call, on scalars or on vectors.

``emit`` walks a function's schedule and looks each operator up in ``TABLE``; it knows nothing about rounding. With
lanes > 1 every value is a vector and every operator works lane by lane, so one listing gives the same bits at any
width. No fast-math flag is ever set, no float operator is contracted (LLVM contracts only where a flag allows it), and
division, square root and fma are the IEEE operations.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

from llvmlite import ir

from fxround.numerics.arithmetic.branches import needed
from fxround.numerics.arithmetic.scalar import WIDTH, Expr, Function, Type
from fxround.numerics.formats.carriers import CARRIERS
from fxround.runtime.cpu.llvm.lookups import lookup

SCALARS: Final = MappingProxyType(
    {
        "bool": ir.IntType(1),
        "u32": ir.IntType(32),
        "u64": ir.IntType(64),
        "f32": ir.FloatType(),
        "f64": ir.DoubleType(),
    }
)

Emit = Callable[[ir.IRBuilder, list[Any], Any], Any]
# Several operators as one: the value of a node, or None if the table's row is to be used.
Fusion = Callable[[Expr, ir.IRBuilder, dict[Expr, Any]], Any]


def llvm_type(type: Type, lanes: int) -> Any:
    """The LLVM type of a scalar type, or of a vector of ``lanes`` of it."""
    return SCALARS[type] if lanes == 1 else ir.VectorType(SCALARS[type], lanes)


def constant(node: Expr, lanes: int) -> ir.Constant:
    """A constant node, repeated over the lanes."""
    return literal(node.type, int(node.attr or 0), lanes)


def literal(type: Type, encoding: int, lanes: int) -> ir.Constant:
    """The constant with this encoding, repeated over the lanes."""
    value: Any = encoding
    if type == "f32":
        value = struct.unpack("<f", encoding.to_bytes(4, "little"))[0]
    if type == "f64":
        value = struct.unpack("<d", encoding.to_bytes(8, "little"))[0]
    one = ir.Constant(SCALARS[type], value)
    return one if lanes == 1 else ir.Constant(ir.VectorType(SCALARS[type], lanes), [one] * lanes)


def _suffix(type: Any) -> str:
    element = type.element if isinstance(type, ir.VectorType) else type
    name = "f32" if isinstance(element, ir.FloatType) else "f64"
    return f"v{type.count}{name}" if isinstance(type, ir.VectorType) else name


def _intrinsic(name: str) -> Emit:
    def emit(b: ir.IRBuilder, args: list[Any], result: Any) -> Any:
        symbol = f"llvm.{name}.{_suffix(result)}"
        module = b.module
        callee = module.globals.get(symbol)
        if callee is None:
            callee = ir.Function(module, ir.FunctionType(result, [result] * len(args)), symbol)
        return b.call(callee, args)

    return emit


def _narrow(b: ir.IRBuilder, args: list[Any], result: Any) -> Any:
    element = result.element if isinstance(result, ir.VectorType) else result
    return b.fptrunc(args[0], result) if isinstance(element, ir.FloatType) else b.trunc(args[0], result)


def _widen(b: ir.IRBuilder, args: list[Any], result: Any) -> Any:
    element = result.element if isinstance(result, ir.VectorType) else result
    return b.fpext(args[0], result) if isinstance(element, ir.DoubleType) else b.zext(args[0], result)


def _toward_zero(b: ir.IRBuilder, args: list[Any], result: Any) -> Any:
    lanes = result.count if isinstance(result, ir.VectorType) else 1
    code, lost = (b.bitcast(x, llvm_type("u64", lanes)) for x in args)
    outward = b.bitcast(b.xor(lost, b.and_(code, literal("u64", 1 << 63, lanes))), result)
    inward = b.fcmp_ordered("<", outward, literal("f64", 0, lanes))
    return b.bitcast(b.add(code, b.sext(inward, code.type)), result)


TABLE: Final[dict[str, Emit]] = {
    "add": lambda b, a, t: b.add(*a),
    "sub": lambda b, a, t: b.sub(*a),
    "mul": lambda b, a, t: b.mul(*a),
    "and": lambda b, a, t: b.and_(*a),
    "or": lambda b, a, t: b.or_(*a),
    "xor": lambda b, a, t: b.xor(*a),
    "shl": lambda b, a, t: b.shl(*a),
    "shr": lambda b, a, t: b.lshr(*a),
    "eq": lambda b, a, t: b.icmp_unsigned("==", *a),
    "lt": lambda b, a, t: b.icmp_unsigned("<", *a),
    "le": lambda b, a, t: b.icmp_unsigned("<=", *a),
    "fadd": lambda b, a, t: b.fadd(*a),
    "fsub": lambda b, a, t: b.fsub(*a),
    "fmul": lambda b, a, t: b.fmul(*a),
    "fdiv": lambda b, a, t: b.fdiv(*a),
    "sqrt": _intrinsic("sqrt"),
    "fma": _intrinsic("fma"),
    "toward_zero": _toward_zero,
    "feq": lambda b, a, t: b.fcmp_ordered("==", *a),
    "flt": lambda b, a, t: b.fcmp_ordered("<", *a),
    "fle": lambda b, a, t: b.fcmp_ordered("<=", *a),
    "select": lambda b, a, t: b.select(*a),
    "rarely": lambda b, a, t: b.select(*a),
    "bits": lambda b, a, t: b.bitcast(a[0], t),
    "from_bits": lambda b, a, t: b.bitcast(a[0], t),
    "widen": _widen,
    "narrow": _narrow,
    "signed_to_f64": lambda b, a, t: b.sitofp(a[0], t),
    "signed_to_f32": lambda b, a, t: b.sitofp(a[0], t),
    "lookup": lambda b, a, t: lookup(b, a[0], a[1:], t),
}


def emit(
    function: Function, b: ir.IRBuilder, args: Sequence[Any], lanes: int, fuse: Fusion | None = None
) -> tuple[Any, ...]:
    """Append the function's operators to the builder's block; its parameters are ``args``. Returns its results.

    fuse: gives a node's value by other means than the table, or None. Operators that only the rare side of a ``rarely``
    needs are put in a block that is skipped unless some lane wants it.
    """
    return emit_results(function.results, b, dict(zip(function.params, args, strict=True)), lanes, fuse)


def emit_results(
    results: Sequence[Expr], b: ir.IRBuilder, known: dict[Expr, Any], lanes: int, fuse: Fusion | None
) -> tuple[Any, ...]:
    """Append what computes these nodes from the known ones, as ``emit`` does for a whole function."""
    env = dict(known)
    _emit(results, b, env, lanes, fuse)
    return tuple(env[r] for r in results)


def _emit(roots: Sequence[Expr], b: ir.IRBuilder, env: dict[Expr, Any], lanes: int, fuse: Fusion | None) -> None:
    order = needed(roots, env)
    always = set(order)
    for node in order:
        if node in env:
            continue
        if node.op == "const":
            env[node] = constant(node, lanes)
            continue
        if node.op == "rarely" and node.args[1] not in always:
            env[node] = _branch(node, b, env, lanes, always, fuse)
            continue
        fused = fuse(node, b, env) if fuse else None
        if fused is None and node.op == "lt":
            fused = _is_nan(node, b, env)
        if fused is not None:
            env[node] = fused
            continue
        env[node] = TABLE[node.op](b, [env[a] for a in node.args], llvm_type(node.type, lanes))


def _is_nan(node: Expr, b: ir.IRBuilder, env: dict[Expr, Any]) -> Any:
    """Whether a float is a NaN, by one comparison, for an ordinal above infinity's; None for any other node."""
    bound, ordinal = node.args
    if bound.op != "const" or ordinal.op != "and" or ordinal.args[0].op != "bits":
        return None
    (x,) = ordinal.args[0].args
    carrier = CARRIERS[x.type]
    if x not in env or bound.attr != carrier.infinity or ordinal.args[1].attr != (1 << (WIDTH[carrier.code] - 1)) - 1:
        return None
    return b.fcmp_unordered("uno", env[x], env[x])


def _branch(
    node: Expr, b: ir.IRBuilder, env: dict[Expr, Any], lanes: int, always: set[Expr], fuse: Fusion | None
) -> Any:
    """Emit a ``rarely``: the rare side in a block of its own, selected lane by lane."""
    condition, rare, common = node.args
    # What both sides need must dominate both, so it is emitted before the branch.
    _emit([n for n in needed([rare], env) if n in always], b, env, lanes, fuse)
    wanted = env[condition]
    if lanes > 1:
        whole = ir.IntType(lanes)
        wanted = b.icmp_unsigned("!=", b.bitcast(wanted, whole), whole(0))
    before = b.block
    with b.if_then(wanted, likely=False):
        inner = dict(env)
        _emit([rare], b, inner, lanes, fuse)
        chosen = b.select(inner[condition], inner[rare], inner[common])
        inside = b.block
    merged = b.phi(llvm_type(node.type, lanes))
    merged.add_incoming(env[common], before)
    merged.add_incoming(chosen, inside)
    return merged


def splat(b: ir.IRBuilder, value: Any, lanes: int) -> Any:
    """One scalar in every lane."""
    if lanes == 1:
        return value
    vector = ir.VectorType(value.type, lanes)
    seed = b.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [ir.IntType(32)(0)] * lanes)
    return b.shuffle_vector(seed, ir.Constant(vector, ir.Undefined), mask)


def bytes_of(type: Type) -> int:
    """The size of a scalar in memory, in bytes."""
    return max(1, WIDTH[type] // 8)
