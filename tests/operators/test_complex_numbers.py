"""Complex arithmetic against its definition in docs/complex.md, written again over rational numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

import numpy as np
import pytest
import torch
from array_rationals import Arrays, condition
from formula_rationals import Arithmetic
from rationals import Array
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import fxround
from fxround import Policy, Rule
from fxround.errors import UnsupportedOperator
from fxround.numerics.modes import Rounding

Parts = tuple[Array, Array]
ROUNDINGS: Final = [
    ("binary32", "binary32"),
    ("bfloat16", "binary32"),
    ("ieee(5,5)", "ieee(5,5)"),
    ("binary32/toward_positive", "binary32/toward_zero"),
]


def policy_of(value: str, step: str) -> Policy:
    return Policy("tested", (Rule(rounding=value, accumulate=step, optional=True),))


def arrays_of(value: str, step: str, dtype: torch.dtype = torch.float32) -> Arrays:
    return Arrays(Arithmetic(Rounding.parse(value), Rounding.parse(step), dtype == torch.float32))


def parts(z: Tensor) -> Parts:
    both = torch.view_as_real(z.detach().resolve_conj()).numpy().astype(object)
    return both[..., 0], both[..., 1]


def assert_parts(got: Tensor, want: Parts) -> None:
    for a, b in zip(parts(got), want, strict=True):
        for x, y in zip(a.flat, np.broadcast_to(b, a.shape).flat, strict=True):
            same = (
                math.isnan(x) and math.isnan(y)
                if math.isnan(y)
                else x == y and math.copysign(1, x) == math.copysign(1, y)
            )
            assert same, (x, y)


def times(o: Arrays, x: Parts, y: Parts) -> Parts:
    (a, b), (c, d) = x, y
    return o.sub(o.mul(a, c), o.mul(b, d)), o.add(o.mul(a, d), o.mul(b, c))


def over(o: Arrays, x: Parts, y: Parts) -> Parts:
    (a, b), (c, d) = x, y
    flat = condition(lambda u, v: abs(u) >= abs(v), c, d)

    def side(c: Array, d: Array, swapped: bool) -> Parts:
        r = o.div(d, c)
        s = o.add(c, o.mul(d, r))
        p, q = (b, a) if swapped else (a, b)
        m = o.mul(p, r)
        return o.div(o.add(p, o.mul(q, r)), s), o.div(o.sub(m, q) if swapped else o.sub(q, m), s)

    one, other = side(c, d, False), side(d, c, True)
    return tuple(np.where(flat.astype(bool), u, v) for u, v in zip(one, other, strict=True))  # type: ignore[return-value]


def mm(o: Arrays, x: Parts, y: Parts) -> Parts:
    (a, b), (c, d) = x, y
    return o.sub(o.mm(a, c), o.mm(b, d)), o.add(o.mm(a, d), o.mm(b, c))


def plus(o: Arrays, x: Parts, y: Parts) -> Parts:
    return o.add(x[0], y[0]), o.add(x[1], y[1])


def ones(x: Parts) -> Parts:
    return np.full(x[0].shape, 1.0, object), np.full(x[0].shape, 0.0, object)


def number(o: Arrays, z: complex) -> Parts:
    return np.array(z.real, object), np.array(z.imag, object)


CASES: Final[dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Arrays, Parts, Parts], Parts]]]] = {
    "add": (lambda z, w: z + w, lambda o, z, w: (o.add(z[0], w[0]), o.add(z[1], w[1]))),
    "sub": (lambda z, w: z - w, lambda o, z, w: (o.sub(z[0], w[0]), o.sub(z[1], w[1]))),
    "mul": (lambda z, w: z * w, times),
    "conj": (lambda z, w: z * w.conj(), lambda o, z, w: times(o, z, (w[0], -w[1]))),
    "div": (lambda z, w: z / w, over),
    "square": (lambda z, w: z**2, lambda o, z, w: times(o, z, z)),
    "power": (
        lambda z, w: z**7 * w**0 + w**1,
        lambda o, z, w: (lambda cube: plus(o, times(o, times(o, times(o, cube, cube), z), ones(w)), w))(
            times(o, times(o, z, z), z)
        ),
    ),
    "inverse power": (lambda z, w: w**-2, lambda o, z, w: over(o, number(o, 1.0), times(o, w, w))),
    "real": (lambda z, w: z * w.real + w.imag, lambda o, z, w: (o.add(o.mul(z[0], w[0]), w[1]), o.mul(z[1], w[0]))),
    "from real": (lambda z, w: z.real - w, lambda o, z, w: (o.sub(z[0], w[0]), -w[1])),
    "real divisor": (lambda z, w: z / w.real, lambda o, z, w: (o.div(z[0], w[0]), o.div(z[1], w[0]))),
    "number": (lambda z, w: (1.5 - 0.25j) * z, lambda o, z, w: times(o, number(o, 1.5 - 0.25j), z)),
    "mm": (lambda z, w: z @ w.t(), lambda o, z, w: mm(o, z, (w[0].T, w[1].T))),
    "adjoint": (lambda z, w: z @ w.mH, lambda o, z, w: mm(o, z, (w[0].T, -w[1].T))),
    "sum": (lambda z, w: z.sum(1), lambda o, z, w: (o.total(z[0], 1), o.total(z[1], 1))),
    "mean": (
        lambda z, w: z.mean(0),
        lambda o, z, w: (o.div(o.total(z[0], 0), len(z[0])), o.div(o.total(z[1], 0), len(z[0]))),
    ),
}


def drawn(rounding: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    z, w = (torch.randn(5, 7, 2, generator=generator, dtype=dtype) for _ in range(2))
    z[0, 0, 0], z[1, 1, 1], w[2, 2], w[0, 1, 0], z[3, 0, 1] = 0.0, -0.0, 0.0, math.inf, math.nan
    grid = f"{Rounding.parse(rounding).format}/nearest_even"
    return tuple(torch.view_as_complex(fxround.round(x, grid)) for x in (z, w))  # type: ignore[return-value]


@pytest.mark.part(5)
@pytest.mark.parametrize("name", CASES)
def test_every_operation_on_parts_is_rounded_once(name: str) -> None:
    function, want = CASES[name]
    for value, step in ROUNDINGS:
        z, w = drawn(value)
        compiled = fxround.compile(function, policy_of(value, step), strict=True)
        assert_parts(compiled(z, w), want(arrays_of(value, step), parts(z), parts(w)))
        assert not compiled.coverage().unrounded
    z, w = drawn("binary64", torch.float64)
    got = fxround.compile(function, "reproducible")(z, w)
    assert_parts(got, want(arrays_of("binary64", "binary64", torch.float64), parts(z), parts(w)))


@pytest.mark.parametrize("exponent", [-4, -2, -1, 0, 1, 2.0, 3 + 0j, 4, 9])
def test_powers_and_their_gradients_are_those_of_mathematics(exponent: complex) -> None:
    """z^n and n z^(n - 1), whose conjugate PyTorch's gradients have: of these numbers no operation rounds."""
    n = int(exponent.real)
    values = [1 + 1j, 2j, -0.5 + 0j, 4 - 4j, *([1 + 0.5j, -0.25 + 1j, 0.5 - 0.75j] if n >= 0 else [])]
    z = torch.tensor(values, dtype=torch.complex128, requires_grad=True)
    compiled = fxround.compile(lambda z: z**exponent, "reproducible")
    result = compiled(z)
    (gradient,) = torch.autograd.grad(result, z, torch.ones_like(z))
    powers, slopes = ([whole_power(v, m) for v in values] for m in (n, n - 1))
    assert fractions_of(result.detach()) == powers
    assert fractions_of(gradient) == [(n * a, -n * b) for a, b in slopes]
    assert not compiled.coverage().unrounded


def whole_power(z: complex, n: int) -> tuple[Fraction, Fraction]:
    """The parts of z^n, by n products of rational numbers; of a negative n, those of its reciprocal."""
    a, b = Fraction(z.real), Fraction(z.imag)
    p, q = Fraction(1), Fraction(0)
    for _ in range(abs(n)):
        p, q = p * a - q * b, p * b + q * a
    norm = p * p + q * q
    return (p, q) if n >= 0 else (p / norm, -q / norm)


def fractions_of(z: Tensor) -> list[tuple[Fraction, Fraction]]:
    return [(Fraction(v.real), Fraction(v.imag)) for v in z.tolist()]


FUNCTIONS: Final[dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor, Tensor], Any]]]] = {
    "abs": (torch.abs, torch.hypot),
    "angle": (torch.angle, lambda a, b: torch.atan2(b, a)),
    "exp": (torch.exp, lambda a, b: (a.exp() * b.cos(), a.exp() * b.sin())),
    "log": (torch.log, lambda a, b: (torch.hypot(a, b).log(), torch.atan2(b, a))),
    "norm": (torch.linalg.vector_norm, lambda a, b: torch.linalg.vector_norm(torch.stack([a, b], -1))),
    "isnan": (torch.isnan, lambda a, b: a.isnan() | b.isnan()),
    "isinf": (torch.isinf, lambda a, b: a.isinf() | b.isinf()),
    "equal": (lambda z: z == z.conj(), lambda a, b: (a == a) & (b == -b)),
    "sgn": (
        torch.sgn,
        lambda a, b: [torch.where(torch.hypot(a, b) == 0, 0.0, x / torch.hypot(a, b)) for x in (a, b)],
    ),
    "polar": (lambda z: torch.polar(z.real, z.imag), lambda a, b: (a * b.cos(), a * b.sin())),
}


@pytest.mark.part(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_complex_numbers_are_those_of_real_ones(name: str) -> None:
    function, of_parts = FUNCTIONS[name]
    for value, step in ROUNDINGS[:3]:
        z, _ = drawn(value)
        policy = policy_of(value, step)
        got = fxround.compile(function, policy, strict=True)(z)
        want = fxround.compile(of_parts, policy, strict=True)(*torch.view_as_real(z).unbind(-1))
        pairs = zip(torch.view_as_real(got).unbind(-1), want, strict=True) if got.is_complex() else [(got, want)]
        for a, b in pairs:
            assert a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def test_moves_of_complex_numbers_keep_their_bits() -> None:
    def moved(z: Tensor, w: Tensor) -> Any:
        padded = nn.functional.pad(z, (1, 2))
        filled = z.masked_fill(z.real > 0, 1 + 2j)
        slots = torch.zeros(4, 7, dtype=z.dtype)
        slots[1:3] = w[:2]
        return (
            *(
                torch.cat([z, w], 1).roll(1, 0).flip(0),
                torch.stack([z.t(), w.t()]),
                z[1:, ::2],
                z[torch.tensor([0, 2])],
            ),
            *(
                padded,
                filled,
                slots,
                torch.where(z.real > 0, z, w),
                z.tril(),
                z.unfold(1, 2, 1),
                w.expand(2, 5, 7).clone(),
            ),
            *(
                z.real.to(z.dtype),
                z.to(torch.complex128),
                z.imag,
                z.conj().mT,
                torch.ones_like(z),
                torch.full_like(w, 3j),
            ),
        )

    z, w = drawn("binary32")
    compiled = fxround.compile(moved, "reproducible")
    for a, b in zip(compiled(z, w), moved(z, w), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        first, second = ((torch.view_as_real(x.resolve_conj()) if x.is_complex() else x) for x in (a, b))
        assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))  # stock: exact (moves alone)


def test_gradients_are_products_with_conjugates() -> None:
    o = arrays_of("bfloat16", "binary32")
    z, w = (x[1:3, 2:5].nan_to_num().clone().requires_grad_() for x in drawn("bfloat16"))
    g = torch.view_as_complex(
        fxround.round(torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(1)), "bfloat16")
    )
    compiled = fxround.compile(lambda z, w: z * w, policy_of("bfloat16", "binary32"), strict=True)
    compiled(z, w).backward(g)
    for x, y in ((z, w), (w, z)):
        assert x.grad is not None
        (a, b) = parts(y)
        assert_parts(x.grad, times(o, parts(g), (a, -b)))
    z.grad = w.grad = None
    product = fxround.compile(lambda z, w: z @ w.t(), policy_of("bfloat16", "binary32"), strict=True)
    g = g[:, :2].contiguous()
    product(z, w).backward(g)
    assert z.grad is not None and w.grad is not None
    (a, b), (c, d), (e, f) = parts(z), parts(w), parts(g)
    assert_parts(z.grad, mm(o, (e, f), (c, -d)))
    assert_parts(w.grad, mm(o, (e.T, f.T), (a, -b)))


def test_a_buffer_that_is_a_conjugate_has_gradients_through_it() -> None:
    class Turned(nn.Module):
        w: Tensor

        def __init__(self, w: Tensor) -> None:
            super().__init__()
            self.register_buffer("w", w.conj())

        def forward(self, z: Tensor) -> Tensor:
            return z * self.w

    o = arrays_of("bfloat16", "binary32")
    z, w = (x[1:3, 2:5].nan_to_num().clone() for x in drawn("bfloat16"))
    g = z.flip(0).contiguous()
    (c, d), x = parts(w), z.requires_grad_()
    result = fxround.compile(Turned(w), policy_of("bfloat16", "binary32"), strict=True)(x)
    assert_parts(result, times(o, parts(z), (c, -d)))
    result.backward(g)
    assert x.grad is not None
    assert_parts(x.grad, times(o, parts(g), (c, d)))


@pytest.mark.parametrize("value, step", ROUNDINGS)
def test_a_loop_has_a_complex_state(value: str, step: str) -> None:
    """c * c + x for each row x, and a real result of the same loop, which reads c and x."""
    o = arrays_of(value, step)
    z = fxround.round(torch.linspace(-1, 1, 24).reshape(3, 4, 2), value)

    def loop(z: Tensor) -> Any:
        return scan(lambda c, x: (c * c + x, c.real + x.imag), z[0].clone(), z)

    compiled = fxround.compile(loop, policy_of(value, step), strict=True)
    last, rows = compiled(torch.view_as_complex(z))
    assert not compiled.coverage().unrounded
    state = parts(torch.view_as_complex(z[0]))
    for x, row in zip(torch.view_as_complex(z), rows, strict=True):
        re, im = parts(x)
        assert row.tolist() == o.add(state[0], im).tolist()
        square = times(o, state, state)
        state = o.add(square[0], re), o.add(square[1], im)
    assert_parts(last, state)


@pytest.mark.parametrize("policy", ["reproducible", "stochastic", "up_down"])
def test_rows_do_not_depend_on_the_batch(policy: str) -> None:
    def layer(z: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("bix,iox->box", z, w).abs()

    z, w = torch.randn(4, 3, 5, dtype=torch.cfloat), torch.randn(3, 2, 5, dtype=torch.cfloat)
    fxround.check_invariance(layer, (z, w), ("threads", "stride", "isa"), policy=policy).check()
    compiled = fxround.compile(layer, "reproducible")
    assert torch.equal(compiled(z[:1], w), compiled(z, w)[:1])


def test_what_has_no_formula_is_named() -> None:
    z = drawn("binary32")[0]
    for function, name in ((torch.sin, "sin"), (torch.prod, "prod"), (lambda z: z**0.5, "pow")):
        with pytest.raises(
            UnsupportedOperator, match=rf"aten\.{name}.*no formula for this operation on complex numbers"
        ):
            fxround.compile(function, "reproducible")(z)
