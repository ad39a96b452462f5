"""Formulas of complex numbers: operations on their parts, each of which is rounded once.

A product, for example, is ``(a + b i) (c + d i) = (a * c - b * d) + (a * d + b * c) i``: four products, a difference
and a sum. A real operand has no imaginary part: ``x (c + d i) = x * c + (x * d) i``. No result is repaired where a
product of infinities is NaN. After these formulas the graph has real operations, ``aten.complex``, which joins parts,
and ``aten.view_as_real``, which parts are read from; a pass replaces what lies between by moves of the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxround.operators.formulas import activations, products
from fxround.operators.formulas.table import complex_formula, count, reduced_dims, total

aten = torch.ops.aten
# Of whole exponents: a formula has two products for each bit.
_LARGEST_POWER: Final = 1024
# The real and the imaginary part: tensors or Python numbers. None: of a real number, which has no imaginary part.
Parts = tuple[Any, Any]


def part_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the parts of complex numbers; a real dtype itself."""
    return dtype.to_real() if dtype.is_complex else dtype


def parts_of(x: Any, dtype: torch.dtype | None = None) -> Parts:
    """Return the parts of a tensor or of a Python number. dtype: of the parts of a tensor."""
    if not isinstance(x, Tensor):
        return (x.real, x.imag) if isinstance(x, complex) else (x, None)
    dtype = dtype or part_dtype(x.dtype)
    if not x.is_complex():
        return x.to(dtype), None
    both = torch.view_as_real(x.resolve_conj())
    return both.select(-1, 0).to(dtype), both.select(-1, 1).to(dtype)


def joined(re: Any, im: Any) -> Tensor:
    """Return the complex numbers of two parts, one of which may be a Python number, or None for zeros."""
    if not isinstance(im, Tensor):
        im = torch.full_like(re, 0.0 if im is None else im)
    if not isinstance(re, Tensor):
        re = torch.full_like(im, re)
    if re.shape != im.shape:
        re, im = torch.broadcast_tensors(re, im)
    return torch.complex(re, im)


def _operands(x: Any, y: Any) -> tuple[Parts, Parts] | None:
    """Return the parts of two operands in the dtype of the result; None if the result is real."""
    dtype = torch.result_type(x, y)
    if dtype not in (torch.complex64, torch.complex128):
        return None
    return parts_of(x, part_dtype(dtype)), parts_of(y, part_dtype(dtype))


def _is_complex(*values: Any) -> bool:
    """Whether a value is a tensor of complex numbers of float32 or float64."""
    return any(isinstance(x, Tensor) and x.dtype in (torch.complex64, torch.complex128) for x in values)


def _terms(x: Any, y: Any, alpha: Any) -> tuple[Parts, Parts] | None:
    """Return the parts of x and of alpha * y; None if their sum is real."""
    return _operands(x, y if alpha == 1 else y * alpha) if _mixes(x, y, alpha) else None


@complex_formula(aten.add.Tensor, aten.add.Scalar)
def add(x: Any, y: Any, alpha: Any = 1) -> Any:
    """(a + b i) + (c + d i) = (a + c) + (b + d) i, a part without a partner as it is"""
    pairs = _terms(x, y, alpha)
    if pairs is None:
        return NotImplemented
    (a, b), (c, d) = pairs
    return joined(a + c, d if b is None else b if d is None else b + d)


@complex_formula(aten.sub.Tensor, aten.sub.Scalar)
def sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    """(a + b i) - (c + d i) = (a - c) + (b - d) i, a part without a partner as it is, or -d"""
    pairs = _terms(x, y, alpha)
    if pairs is None:
        return NotImplemented
    (a, b), (c, d) = pairs
    return joined(a - c, b if d is None else -d if b is None else b - d)


@complex_formula(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    """rsub(x, y) = y - x"""
    return sub(y, x, alpha) if _mixes(x, y, alpha) else NotImplemented


def _mixes(*operands: Any) -> bool:
    return _is_complex(*operands) or any(isinstance(x, complex) for x in operands)


@complex_formula(aten.mul.Tensor, aten.mul.Scalar)
def mul(x: Any, y: Any) -> Any:
    """(a + b i) (c + d i) = (a * c - b * d) + (a * d + b * c) i; real x: x (c + d i) = x * c + (x * d) i"""
    pairs = _operands(x, y) if _mixes(x, y) else None
    if pairs is None:
        return NotImplemented
    return joined(*product(*pairs))


def product(x: Parts, y: Parts) -> Parts:
    """Return the parts of a product."""
    (a, b), (c, d) = x, y
    if b is None:
        return a * c, a * d
    if d is None:
        return a * c, b * c
    return a * c - b * d, a * d + b * c


@complex_formula(aten.div.Tensor, aten.div.Scalar)
def div(x: Any, y: Any) -> Any:
    """(a + b i) / (c + d i) = (a + b * r) / s + ((b - a * r) / s) i, r = d / c, s = c + d * r if |c| >= |d|"""
    pairs = _operands(x, y) if _mixes(x, y) else None
    if pairs is None:
        return NotImplemented
    (a, b), (c, d) = pairs
    if d is None:
        return joined(a / c, b / c)
    return joined(*_quotient((a, 0.0 if b is None else b), (c, d)))


def _quotient(x: Parts, y: Parts) -> Parts:
    """Return the parts of a quotient (R. L. Smith 1962, Algorithm 116: complex division, CACM 5)."""
    a, b, c, d = torch.broadcast_tensors(*_tensors(*x, *y))
    steep = c.abs() < d.abs()
    large, small = torch.where(steep, d, c), torch.where(steep, c, d)
    p, q = torch.where(steep, b, a), torch.where(steep, a, b)
    r = small / large
    s = large + small * r
    t = p * r
    return (p + q * r) / s, torch.where(steep, t - q, q - t) / s


def _tensors(*values: Any) -> list[Tensor]:
    like = next(x for x in values if isinstance(x, Tensor))
    return [x if isinstance(x, Tensor) else torch.full([], x, dtype=like.dtype, device=like.device) for x in values]


@complex_formula(aten.reciprocal.default)
def reciprocal(z: Tensor) -> Any:
    """1 / z = (1 + 0 i) / z"""
    return div(1.0, z) if _is_complex(z) else NotImplemented


@complex_formula(aten.pow.Tensor_Scalar)
def power(z: Tensor, exponent: Any) -> Any:
    """z^0 = 1 + 0 i, z^1 = z, z^(2 n) = z^n * z^n, z^(2 n + 1) = (z^n * z^n) * z, z^-n = 1 / z^n, for n up to 1024"""
    exponent = exponent.real if isinstance(exponent, complex) and exponent.imag == 0 else exponent
    whole = isinstance(exponent, int | float) and abs(exponent) <= _LARGEST_POWER and exponent == int(exponent)
    if not _is_complex(z) or not whole:
        return NotImplemented
    made = _power(z, abs(int(exponent)))
    return div(1.0, made) if exponent < 0 else made


def _power(z: Tensor, n: int) -> Tensor:
    if n < 2:
        return z.clone() if n else torch.ones_like(z)
    half = z if n < 4 else _power(z, n // 2)
    return (half * half) * z if n % 2 else half * half


@complex_formula(aten.neg.default)
def neg(z: Tensor) -> Any:
    """-(a + b i) = -a + (-b) i"""
    if not _is_complex(z):
        return NotImplemented
    a, b = parts_of(z)
    return joined(-a, -b)


@complex_formula(aten._conj.default, aten.conj_physical.default, aten._conj_physical.default)
def conj(z: Any) -> Any:
    """conj(a + b i) = a + (-b) i"""
    if isinstance(z, complex):
        # A number of the program, in the derivative of a product with it.
        return torch.full([], z.conjugate(), dtype=torch.complex128)
    if not _is_complex(z):
        return NotImplemented
    a, b = parts_of(z)
    return joined(a, -b)


@complex_formula(aten.abs.default)
def absolute(z: Tensor) -> Any:
    """|a + b i| = hypot(a, b)"""
    return torch.hypot(*parts_of(z)) if _is_complex(z) else NotImplemented


@complex_formula(aten.angle.default)
def angle(z: Tensor) -> Any:
    """angle(a + b i) = atan2(b, a); of a real x: NaN where x is, pi below zero, else 0"""
    if _is_complex(z):
        a, b = parts_of(z)
        return torch.atan2(b, a)
    if not z.is_floating_point():
        return NotImplemented
    return torch.where(z.isnan(), z, torch.where(z < 0, z.new_full([], math.pi), z.new_zeros([])))


@complex_formula(aten.sgn.default)
def sgn(z: Tensor) -> Any:
    """sgn(a + b i) = a / m + (b / m) i, m = hypot(a, b); 0 where m is 0"""
    if not _is_complex(z):
        return NotImplemented
    a, b = parts_of(z)
    m = torch.hypot(a, b)
    zero = m.new_zeros([])
    return joined(torch.where(m == 0, zero, a / m), torch.where(m == 0, zero, b / m))


@complex_formula(aten.exp.default)
def exp(z: Tensor) -> Any:
    """exp(a + b i) = exp(a) * cos(b) + (exp(a) * sin(b)) i"""
    if not _is_complex(z):
        return NotImplemented
    a, b = parts_of(z)
    return torch.polar(a.exp(), b)


@complex_formula(aten.log.default)
def log(z: Tensor) -> Any:
    """log(a + b i) = log(hypot(a, b)) + atan2(b, a) i"""
    return joined(z.abs().log(), z.angle()) if _is_complex(z) else NotImplemented


@complex_formula(aten.polar.default)
def polar(m: Tensor, angle: Tensor) -> Tensor:
    """polar(m, t) = m * cos(t) + (m * sin(t)) i"""
    return joined(m * angle.cos(), m * angle.sin())


# ---- products of matrices ----


def _contraction(contract: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Any]:
    def formula(x: Tensor, y: Tensor) -> Any:
        """mm(A + B i, C + D i) = (mm(A, C) - mm(B, D)) + (mm(A, D) + mm(B, C)) i"""
        if not _is_complex(x, y):
            return NotImplemented
        (a, b), (c, d) = parts_of(x), parts_of(y)
        return joined(contract(a, c) - contract(b, d), contract(a, d) + contract(b, c))

    return formula


mm = complex_formula(aten.mm.default)(_contraction(torch.mm))
bmm = complex_formula(aten.bmm.default)(_contraction(torch.bmm))


@complex_formula(aten.vdot.default)
def vdot(x: Tensor, y: Tensor) -> Any:
    """vdot(x, y) = dot(conj(x), y)"""
    return torch.dot(x.conj(), y) if _is_complex(x) else NotImplemented


def _of_either(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return a formula of real numbers that holds for complex ones."""
    body: Callable[..., Any] = formula.__wrapped__  # type: ignore[attr-defined]

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs) if _is_complex(*args) else NotImplemented

    return chosen


for _overload, _formula in (
    (aten.addmm.default, products.addmm),
    (aten.baddbmm.default, products.baddbmm),
    (aten.addbmm.default, products.addbmm),
    (aten.mv.default, products.mv),
    (aten.addmv.default, products.addmv),
    (aten.dot.default, products.dot),
    (aten.addr.default, products.addr),
    (aten.addcmul.default, activations.addcmul),
    (aten.addcdiv.default, activations.addcdiv),
    (aten.lerp.Scalar, activations.lerp_scalar),
):
    complex_formula(_overload)(_of_either(_formula))


# ---- what treats the two parts alike ----


def _by_parts(overload: Any) -> None:
    """Define an operator on complex numbers as itself on the real and on the imaginary parts."""

    def formula(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not _is_complex(*leaves):
            return NotImplemented
        halves = []
        for i in (0, 1):
            mapped = [_part(leaf, i) for leaf in leaves]
            own, named = pytree.tree_unflatten(mapped, spec)
            halves.append(overload(*own, **named))
        return joined(*halves)

    complex_formula(overload)(formula)


def _part(leaf: Any, i: int) -> Any:
    if isinstance(leaf, torch.dtype):
        return part_dtype(leaf)
    if not (isinstance(leaf, Tensor) and leaf.is_complex()):
        return leaf
    return parts_of(leaf)[i]


for _overload in (
    *(aten.sum.dim_IntList, aten.sum.default, aten.cumsum.default),
    *(aten.index_add.default, aten.scatter_add.default, aten.index_put.default, aten._unsafe_index_put.default),
    *(aten.embedding_dense_backward.default, aten.unfold_backward.default),
):
    _by_parts(_overload)


@complex_formula(aten.mean.default, aten.mean.dim)
def mean(z: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """mean(z) = sum(z) / n"""
    if not _is_complex(z):
        return NotImplemented
    dims = reduced_dims(z, dim)
    return total(z.to(dtype or z.dtype), dims, keepdim) / count(z, dims)


@complex_formula(aten.linalg_vector_norm.default)
def linalg_vector_norm(
    z: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """norm(z) = sqrt(sum(a * a, b * b, ...)) for ord 2, else norm(|z|)"""
    if not _is_complex(z):
        return NotImplemented
    kept = dtype and part_dtype(dtype)
    if ord != 2:
        return torch.linalg.vector_norm(z.abs(), ord, dim, keepdim, dtype=kept)
    both, dims = torch.view_as_real(z), reduced_dims(z, dim)
    norm = torch.linalg.vector_norm(both, 2, [*dims, z.dim()], keepdim, dtype=kept)
    return norm.squeeze(-1) if keepdim else norm


@complex_formula(aten.where.self)
def where(condition: Tensor, x: Tensor, y: Tensor) -> Any:
    """where(c, x, y) chooses both parts"""
    pairs = _operands(x, y) if _is_complex(x, y) else None
    if pairs is None:
        return NotImplemented
    (a, b), (c, d) = pairs
    b = torch.zeros_like(a) if b is None else b
    return joined(torch.where(condition, a, c), torch.where(condition, b, torch.zeros_like(c) if d is None else d))


@complex_formula(aten.eq.Tensor, aten.eq.Scalar)
def eq(x: Any, y: Any) -> Any:
    """x = y if both parts are equal"""
    pairs = _operands(x, y) if _mixes(x, y) else None
    if pairs is None:
        return NotImplemented
    (a, b), (c, d) = pairs
    return (a == c) & ((0 if b is None else b) == (0 if d is None else d))


@complex_formula(aten.ne.Tensor, aten.ne.Scalar)
def ne(x: Any, y: Any) -> Any:
    """x is not y if a part differs"""
    equal = eq(x, y)
    return NotImplemented if equal is NotImplemented else ~equal


def _of_a_part(overload: Any) -> None:
    """Define a condition on complex numbers as that on their parts, one of which has to meet it."""

    def formula(z: Tensor) -> Any:
        """isnan(a + b i) = isnan(a) or isnan(b), and isinf likewise"""
        if not _is_complex(z):
            return NotImplemented
        a, b = parts_of(z)
        return overload(a) | overload(b)

    complex_formula(overload)(formula)


_of_a_part(aten.isnan.default)
_of_a_part(aten.isinf.default)


@complex_formula(aten._to_copy.default)
def to_copy(x: Tensor, *, dtype: torch.dtype | None = None, **layout: Any) -> Any:
    """A real x becomes x + 0 i, each part is converted, and a conversion to real numbers keeps the real part"""
    wanted = dtype or x.dtype
    if wanted == x.dtype or not (_is_complex(x) or wanted in (torch.complex64, torch.complex128)):
        return NotImplemented
    if not wanted.is_complex:
        return aten._to_copy(parts_of(x)[0], dtype=wanted, **layout)
    a, b = parts_of(x)
    kind, device = part_dtype(wanted), layout.get("device") or x.device
    return joined(a.to(device=device, dtype=kind), None if b is None else b.to(device=device, dtype=kind))


@complex_formula(aten.copy.default)
def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    """A copy into complex numbers converts real ones first"""
    if target.dtype == source.dtype or not _is_complex(target, source):
        return NotImplemented
    return aten.copy(target, source.to(target.dtype))
