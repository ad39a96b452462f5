"""The CUDA C++ table: every operator of the scalar IR as one expression of text.

``device_function`` writes a function as C++, one ``const`` for each node, and what only the rare side of a ``rarely``
needs in a branch; it knows nothing about rounding. The text is CUDA C++ and, where the intrinsics are defined, plain
C++: the tests run the GPU's text on any machine.

Each float operator is an intrinsic with its rounding in its name (``__fadd_rn``), which NVRTC neither contracts nor
reassociates. ``DEVICE_OPTIONS`` keep subnormal numbers. Integers are unsigned, so they wrap. Constants are written by
their encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any, Final

from fxround.numerics.arithmetic.branches import needed
from fxround.numerics.arithmetic.scalar import Expr, Function

TYPES: Final = MappingProxyType(
    {"bool": "bool", "u32": "unsigned int", "u64": "unsigned long long", "f32": "float", "f64": "double"}
)


def _lookup(index: str, *entries: str) -> str:
    """An entry by the bits of its index, the highest first: no memory access and no divergent branch."""
    if len(entries) == 1:
        return entries[0]
    half = len(entries) // 2
    return f"({index} & {half}u ? {_lookup(index, *entries[half:])} : {_lookup(index, *entries[:half])})"


# {0}, {1}, {2} are the operands. A row of several spellings is keyed by the type of the first operand.
TABLE: Final[Mapping[str, str | Mapping[str, str] | Callable[..., str]]] = MappingProxyType(
    {
        "add": "{0} + {1}",
        "sub": "{0} - {1}",
        "mul": "{0} * {1}",
        "and": "{0} & {1}",
        "or": "{0} | {1}",
        "xor": "{0} ^ {1}",
        "shl": "{0} << {1}",
        "shr": "{0} >> {1}",
        "eq": "{0} == {1}",
        "lt": "{0} < {1}",
        "le": "{0} <= {1}",
        "fadd": {"f32": "__fadd_rn({0}, {1})", "f64": "__dadd_rn({0}, {1})"},
        "fsub": {"f32": "__fsub_rn({0}, {1})", "f64": "__dsub_rn({0}, {1})"},
        "fmul": {"f32": "__fmul_rn({0}, {1})", "f64": "__dmul_rn({0}, {1})"},
        "fdiv": {"f32": "__fdiv_rn({0}, {1})", "f64": "__ddiv_rn({0}, {1})"},
        "sqrt": {"f32": "__fsqrt_rn({0})", "f64": "__dsqrt_rn({0})"},
        "fma": {"f32": "__fmaf_rn({0}, {1}, {2})", "f64": "__fma_rn({0}, {1}, {2})"},
        "toward_zero": (
            "__longlong_as_double(__double_as_longlong({0}) - ({1} < 0.0 ? {0} > 0.0 : {1} > 0.0 && {0} < 0.0))"
        ),
        "feq": "{0} == {1}",
        "flt": "{0} < {1}",
        "fle": "{0} <= {1}",
        "select": "{0} ? {1} : {2}",
        "rarely": "{0} ? {1} : {2}",
        "bits": {"f32": "__float_as_uint({0})", "f64": "(unsigned long long)__double_as_longlong({0})"},
        "from_bits": {"u32": "__uint_as_float({0})", "u64": "__longlong_as_double((long long){0})"},
        "widen": {"u32": "(unsigned long long){0}", "f32": "(double){0}"},
        "narrow": {"u64": "(unsigned int){0}", "f64": "__double2float_rn({0})"},
        "signed_to_f64": "__ll2double_rn((long long){0})",
        "signed_to_f32": "__int2float_rn((int){0})",
        "lookup": _lookup,
    }
)

# The defaults, written out: fast math would flush subnormal operands of intrinsics and comparisons. Warnings are of
# comparisons with zero, which a format's constants make.
DEVICE_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "ftz": False,
        "prec_div": True,
        "prec_sqrt": True,
        "fma": False,
        "std": "c++17",
        "use_fast_math": False,
        "disable_warnings": True,
    }
)


def constant(node: Expr) -> str:
    """A constant by its encoding."""
    code = int(node.attr or 0)
    spelling = {
        "bool": "true" if code else "false",
        "u32": f"0x{code:x}u",
        "u64": f"0x{code:x}ull",
        "f32": f"__uint_as_float(0x{code:x}u)",
        "f64": f"__longlong_as_double((long long)0x{code:x}ull)",
    }
    return spelling[node.type]


def expression(node: Expr, operands: list[str]) -> str:
    """One operator applied to named operands."""
    row = TABLE[node.op]
    if callable(row):
        return row(*operands)
    template = row if isinstance(row, str) else row[node.args[0].type]
    return template.format(*operands)


def signature(function: Function, name: str) -> str:
    """``inline T name(T a, ...)``; several results are reference parameters after the operands."""
    params = [f"const {TYPES[p.type]} {p.attr}" for p in function.params]
    results = [TYPES[r.type] for r in function.results]
    if len(results) > 1:
        params += [f"{type}& result{i}" for i, type in enumerate(results)]
    returned = results[0] if len(results) == 1 else "void"
    return f"__device__ __forceinline__ {returned} {name}({', '.join(params)})"


def device_function(function: Function, name: str | None = None) -> str:
    """The text of a function, under its own name or another one."""
    names: dict[Expr, str] = {p: str(p.attr) for p in function.params}
    lines = _statements(function.results, names, count())
    if len(function.results) == 1:
        lines.append(f"return {names[function.results[0]]};")
    else:
        lines += [f"result{i} = {names[r]};" for i, r in enumerate(function.results)]
    body = "".join(f"  {line}\n" for line in lines)
    return f"{signature(function, name or function.name)} {{\n{body}}}\n"


def _statements(roots: Sequence[Expr], names: dict[Expr, str], numbers: Iterator[int]) -> list[str]:
    """The statements that give the roots names. What only the rare side of a ``rarely`` needs is in a branch."""
    order = needed(roots, names)
    always, lines = set(order), []
    for node in order:
        if node in names:
            continue
        if node.op == "const":
            names[node] = constant(node)
            continue
        if node.op == "rarely" and node.args[1] not in always:
            lines += _branch(node, names, numbers, always)
            continue
        text = expression(node, [names[a] for a in node.args])
        names[node] = f"v{next(numbers)}"
        lines.append(f"const {TYPES[node.type]} {names[node]} = {text};")
    return lines


def _branch(node: Expr, names: dict[Expr, str], numbers: Iterator[int], always: set[Expr]) -> list[str]:
    """A ``rarely`` whose rare side is computed where it is wanted."""
    condition, rare, common = node.args
    # What both sides need is computed before the branch.
    lines = _statements([n for n in needed([rare], names) if n in always], names, numbers)
    inner = dict(names)
    inside = _statements([rare], inner, numbers)
    names[node] = result = f"v{next(numbers)}"
    lines.append(f"{TYPES[node.type]} {result} = {names[common]};")
    lines.append(f"if ({names[condition]}) {{")
    return [*lines, *(f"  {line}" for line in inside), f"  {result} = {inner[rare]};", "}"]
