"""Fourier transforms against a textbook recursion over rational numbers, in the order that docs/complex.md declares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import mpmath
import numpy as np
import pytest
import torch
from formula_rationals import Arithmetic
from torch import Tensor, nn

import fxround
from fxround import Policy, Rule
from fxround.numerics.modes import Rounding
from fxround.numerics.roots_of_unity import roots_of_unity

Number = tuple[float, float | None]
POLICIES: Final = {
    "reproducible": ("binary32", "binary32"),
    "bfloat16": ("bfloat16", "binary32"),
    "tiny": ("ieee(5,5)", "ieee(5,5)"),
    "upward": ("binary32/toward_positive", "binary32/toward_positive"),
}


@cache
def root(k: int, n: int, precision: int) -> tuple[float, float]:
    """e^(-2 pi i k / n), each part rounded once by mpmath."""
    with mpmath.workprec(300):
        parts = mpmath.cospi(mpmath.mpf(2 * k) / n), -mpmath.sinpi(mpmath.mpf(2 * k) / n)
        # A quotient is not exact, so that neither is a zero.
        parts = tuple(mpmath.mpf(0) if abs(part) < 1e-60 else part for part in parts)
    with mpmath.workprec(precision):
        re, im = (float(+part) for part in parts)
    return re, im


class Textbook:
    """Decimation in frequency, with the factors 4, 2, 3, 5 and primes up to 31 in this order, and Bluestein's chirp."""

    def __init__(self, value: str, step: str, short: bool = True) -> None:
        self.o = Arithmetic(Rounding.parse(value), Rounding.parse(step), short)
        self.precision = 24 if short else 53

    def w(self, k: int, n: int) -> tuple[float, float]:
        return root(k % n, n, self.precision)

    def number(self, x: float) -> float:
        return float(np.float32(x)) if self.o.short else x

    def times(self, x: Number, w: tuple[float, float]) -> Number:
        (a, b), (c, d), o = x, w, self.o
        if b is None:
            return o.mul(a, c), o.mul(a, d)
        return o.sub(o.mul(a, c), o.mul(b, d)), o.add(o.mul(a, d), o.mul(b, c))

    def add(self, x: Number, y: Number) -> Number:
        return self.o.add(x[0], y[0]), None if x[1] is None or y[1] is None else self.o.add(x[1], y[1])

    def sub(self, x: Number, y: Number) -> Number:
        return self.o.sub(x[0], y[0]), None if x[1] is None or y[1] is None else self.o.sub(x[1], y[1])

    def scaled(self, x: Number, c: float) -> Number:
        c = self.number(c)
        return self.o.mul(x[0], c), None if x[1] is None else self.o.mul(x[1], c)

    def rotated(self, x: Number, y: Number, sign: int) -> Number:
        """x + sign i y."""
        (a, b), (c, d) = x, y
        if b is None or d is None:
            return a, self.o.kept(sign * c)
        if sign > 0:
            return self.o.sub(a, d), self.o.add(b, c)
        return self.o.add(a, d), self.o.sub(b, c)

    def butterfly(self, x: Sequence[Number]) -> list[Number]:
        add, sub, rotated, scaled = self.add, self.sub, self.rotated, self.scaled
        r = len(x)
        if r == 2:
            return [add(x[0], x[1]), sub(x[0], x[1])]
        if r == 4:
            s, t, u, v = add(x[0], x[2]), sub(x[0], x[2]), add(x[1], x[3]), sub(x[1], x[3])
            return [add(s, u), rotated(t, v, -1), sub(s, u), rotated(t, v, 1)]
        if r == 3:
            s, d = add(x[1], x[2]), sub(x[1], x[2])
            m, t = sub(x[0], scaled(s, 0.5)), scaled(d, -root(1, 3, self.precision)[1])
            return [add(x[0], s), rotated(m, t, -1), rotated(m, t, 1)]
        if r == 5:
            (c1, s1), (c2, s2) = root(1, 5, self.precision), root(2, 5, self.precision)
            p, q, u, v = add(x[1], x[4]), add(x[2], x[3]), sub(x[1], x[4]), sub(x[2], x[3])
            m1 = add(add(x[0], scaled(p, c1)), scaled(q, c2))
            m2 = add(add(x[0], scaled(p, c2)), scaled(q, c1))
            t1 = add(scaled(u, -s1), scaled(v, -s2))
            t2 = sub(scaled(u, -s2), scaled(v, -s1))
            first = add(x[0], add(p, q))
            return [first, rotated(m1, t1, -1), rotated(m2, t2, -1), rotated(m2, t2, 1), rotated(m1, t1, 1)]
        sums = []
        for k in range(r):
            terms = [self.times(x[j], self.w(j * k, r)) for j in range(r)]
            sums.append((self.o.total([t[0] for t in terms]), self.o.total([t[1] for t in terms])))  # type: ignore[misc]
        return sums  # type: ignore[return-value]

    def fft(self, x: list[Number]) -> list[Number]:
        n = len(x)
        primes = (4, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)
        rest = n
        for f in primes:
            while rest % f == 0:
                rest //= f
        return self.steps(x, primes) if rest == 1 else self.bluestein(x)

    def steps(self, x: list[Number], primes: Sequence[int]) -> list[Number]:
        n = len(x)
        if n == 1:
            return x
        r = next(f for f in primes if n % f == 0)
        m = n // r
        columns = [self.butterfly([x[p + m * j] for j in range(r)]) for p in range(m)]
        if m > 1:
            columns = [
                [y if k == 0 else self.times(y, self.w(p * k, n)) for k, y in enumerate(c)]
                for p, c in enumerate(columns)
            ]
        if any(im is not None for c in columns for _, im in c):
            columns = [[(re, 0.0 if im is None else im) for re, im in c] for c in columns]
        out: list[Any] = [None] * n
        for k in range(r):
            out[k::r] = self.steps([c[k] for c in columns], primes)
        return out

    def bluestein(self, x: list[Number]) -> list[Number]:
        n = len(x)
        size = 1
        while size < 2 * n - 1:
            size *= 2
        chirp = [self.w(j * j, 2 * n) for j in range(n)]
        spectrum = chirp_spectrum(n, size, self.precision)
        longer = [self.times(z, c) for z, c in zip(x, chirp, strict=True)] + [(0.0, 0.0)] * (size - n)
        product = [self.times(z, b) for z, b in zip(self.fft(longer), spectrum, strict=True)]
        turned = [(im, re) for re, im in self.fft([(im, re) for re, im in product])]  # type: ignore[misc]
        return [self.times(z, c) for z, c in zip(turned[:n], chirp, strict=True)]

    def ifft(self, x: list[Number]) -> list[Number]:
        return [(im, re) for re, im in self.fft([(0.0 if b is None else b, a) for a, b in x])]  # type: ignore[misc]

    def over(self, x: list[Number], divisor: float, n: int) -> list[Number]:
        if n == 1:
            return x
        d = self.number(divisor)
        return [(self.o.div(a, d), None if b is None else self.o.div(b, d)) for a, b in x]

    def irfft(self, x: list[Number], n: int) -> list[float]:
        kept = x[: n // 2 + 1]
        middle = (n - 1) // 2
        whole = [(a, 0.0 if k == 0 or 2 * k == n else b) for k, (a, b) in enumerate(kept)]
        whole += [(a, self.o.kept(-b)) for a, b in whole[middle:0:-1]]  # type: ignore[operator]
        return [a for a, _ in self.over(self.ifft(whole), n, n)]  # type: ignore[arg-type]


@cache
def chirp_spectrum(n: int, size: int, precision: int) -> list[tuple[float, float]]:
    """The transform of e^(i pi j^2 / n) / size and its mirror image, by its sum."""
    with mpmath.workprec(200):
        b = [mpmath.mpc(0)] * size
        for j in range(n):
            b[j] = b[-j] = mpmath.expjpi(mpmath.mpf(j * j % (2 * n)) / n) / size
        turns = [mpmath.expjpi(-mpmath.mpf(2 * k) / size) for k in range(size)]
        sums = [mpmath.fsum(b[j] * turns[j * k % size] for j in range(size) if b[j]) for k in range(size)]
        parts = [[mpmath.mpf(0) if abs(p) < 1e-45 else p for p in (z.real, z.imag)] for z in sums]
    with mpmath.workprec(precision):
        return [(float(+re), float(+im)) for re, im in parts]


def numbers(z: Tensor) -> list[Number]:
    if not z.is_complex():
        return [(x, None) for x in z.tolist()]
    return [(x.real, x.imag) for x in z.tolist()]


def assert_equal(got: Sequence[float], want: Sequence[float]) -> None:
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert (math.isnan(x) and math.isnan(y)) or (x == y and math.copysign(1, x) == math.copysign(1, y)), (x, y)


def assert_same(got: Tensor, want: Sequence[Number]) -> None:
    for i in (0, 1):
        assert_equal(torch.view_as_real(got)[..., i].tolist(), [0.0 if z[i] is None else z[i] for z in want])  # type: ignore[misc]


def drawn(n: int, rounding: str, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(2, n, 2, generator=torch.Generator().manual_seed(n), dtype=dtype)
    return torch.view_as_complex(fxround.round(x, f"{Rounding.parse(rounding).format}/nearest_even"))


def every(z: Tensor) -> Any:
    n = z.shape[-1]
    return (
        torch.fft.fft(z),
        torch.fft.ifft(z),
        torch.fft.rfft(z.real),
        torch.fft.irfft(z, n=n),
        torch.fft.fft(z, norm="ortho"),
    )


def check(n: int, value: str, step: str, dtype: torch.dtype = torch.float32) -> None:
    z = drawn(n, value, dtype)
    book = Textbook(value, step, dtype == torch.float32)
    compiled = fxround.compile(
        every, Policy("tested", (Rule(rounding=value, accumulate=step, optional=True),)), strict=True
    )
    forward, backward, half, real, ortho = compiled(z)
    for i, row in enumerate(z):
        x = numbers(row)
        assert_same(forward[i], book.fft(x))
        assert_same(backward[i], book.over(book.ifft(x), n, n))
        assert_same(ortho[i], book.over(book.fft(x), math.sqrt(n), n))
        assert_same(half[i], book.fft(numbers(row.real))[: n // 2 + 1])
        assert_equal(real[i].tolist(), book.irfft(x, n))


@pytest.mark.part(3)
@pytest.mark.parametrize("n", [*range(1, 17), 20, 31, 37])
def test_every_length_has_the_bits_of_the_textbook(n: int) -> None:
    check(n, "binary32", "binary32")


@pytest.mark.part(11)
@pytest.mark.parametrize("n", [*range(2, 17), 30, 37, 64])
@pytest.mark.parametrize("policy", ["bfloat16", "tiny", "upward", "float64"])
def test_policies_round_every_operation(policy: str, n: int) -> None:
    if policy == "float64":
        check(n, "binary64", "binary64", torch.float64)
    else:
        check(n, *POLICIES[policy])


@pytest.mark.parametrize("n, precision", [(1, 24), (7, 53), (12, 24), (360, 24), (1009, 53)])
def test_roots_of_unity_are_rounded_once(n: int, precision: int) -> None:
    assert list(roots_of_unity(n, precision)) == [root(k, n, precision) for k in range(n)]


# ---- several dimensions, gradients, other arguments ----


def compiled_under(value: str, step: str, function: Any) -> Any:
    return fxround.compile(
        function, Policy("tested", (Rule(rounding=value, accumulate=step, optional=True),)), strict=True
    )


def test_dimensions_are_transformed_one_by_one_from_the_last() -> None:
    book, x = Textbook("bfloat16", "binary32"), drawn(6, "bfloat16")  # (2, 6)
    x = torch.stack([x, x.flip(0), x.roll(1, 1)], 1)  # (2, 3, 6)

    def along(rows: list[list[Number]]) -> list[list[Number]]:
        """The first of two dimensions."""
        columns = [book.fft(list(c)) for c in zip(*rows, strict=True)]
        return [list(r) for r in zip(*columns, strict=True)]

    both, half, back, outer = compiled_under(
        "bfloat16",
        "binary32",
        lambda z: (
            torch.fft.fft2(z),
            torch.fft.rfft2(z.real),
            torch.fft.irfft2(z[..., :4], s=(3, 6)),
            torch.fft.fft(z, dim=1),
        ),
    )(x)
    for i, image in enumerate(x):
        rows = [numbers(r) for r in image]
        for got, want in zip(both[i], along([book.fft(r) for r in rows]), strict=True):
            assert_same(got, want)
        for got, want in zip(outer[i], along(rows), strict=True):
            assert_same(got, want)
        for got, want in zip(half[i], along([book.fft(numbers(r.real))[:4] for r in image]), strict=True):
            assert_same(got, want)
        columns = [book.ifft(list(c)) for c in zip(*(r[:4] for r in rows), strict=True)]
        for got, row in zip(back[i], zip(*columns, strict=True), strict=True):
            # One division by the number of all elements.
            whole = [(a, 0.0 if k in (0, 3) else b) for k, (a, b) in enumerate(row)]
            whole += [(a, -b) for a, b in whole[2:0:-1]]  # type: ignore[operator]
            assert_equal(got.tolist(), [a for a, _ in book.over(book.ifft(whole), 18, 18)])


@pytest.mark.parametrize("n", [6, 8])
def test_gradients_are_transforms_of_the_gradient(n: int) -> None:
    value, step = "bfloat16", "binary32"
    book, z = Textbook(value, step), drawn(n, value)[0].clone().requires_grad_()
    g, half = drawn(n, value)[1], n // 2 + 1

    def gradient(function: Any, x: Tensor, given: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(compiled_under(value, step, function)(x), x, given)
        return found

    assert_same(gradient(torch.fft.fft, z, g), book.ifft(numbers(g)))
    assert_same(gradient(torch.fft.ifft, z, g), book.over(book.fft(numbers(g)), n, n))
    x = z.detach().real.clone().requires_grad_()
    padded = [*numbers(g[:half]), *[(0.0, 0.0)] * (n - half)]
    assert_equal(gradient(torch.fft.rfft, x, g[:half]).tolist(), [a for a, _ in book.ifft(padded)])
    spectrum = z.detach()[:half].clone().requires_grad_()
    want = book.over(book.fft(numbers(g.real)), n, n)[:half]
    doubled = [book.scaled(w, 2.0) if 0 < k < n - half + 1 else w for k, w in enumerate(want)]
    assert_same(gradient(lambda y: torch.fft.irfft(y, n=n), spectrum, g.real), doubled)


@pytest.mark.part(2)
@pytest.mark.parametrize("n", [256, 1000, 1009, 4096])
def test_errors_are_within_the_bound_of_the_fast_transform(n: int) -> None:
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    got = fxround.compile(torch.fft.fft, "reproducible")(torch.view_as_complex(x))
    # Higham, Accuracy and Stability of Numerical Algorithms, theorem 24.2, for the norm. A chirp: three transforms.
    u = 2.0**-24
    transforms, length = (3, 2048) if n == 1009 else (1, n)
    bound = transforms * math.sqrt(n) * float(x.double().norm()) * math.log2(length) * (u + 4 * u * (math.sqrt(2) + u))
    with mpmath.workprec(100):
        turns = [mpmath.expjpi(-mpmath.mpf(2 * k) / n) for k in range(n)]
        for k in (0, 1, n // 3, n - 2):
            want = mpmath.fsum(mpmath.mpc(*z) * turns[j * k % n] for j, z in enumerate(x.tolist()))
            assert abs(want - complex(got[k])) < bound


def test_lengths_are_padded_and_cut_and_layouts_do_not_matter() -> None:
    z = drawn(8, "binary32")
    fft = fxround.compile(torch.fft.fft, "reproducible")
    cut = fxround.compile(lambda z: (torch.fft.fft(z, n=5), torch.fft.fft(z, n=12)), "reproducible")(z)
    longer = torch.cat([z, torch.zeros(2, 4, dtype=z.dtype)], 1)
    assert torch.equal(cut[0], fft(z[:, :5])) and torch.equal(cut[1], fft(longer))
    for given in (
        z.t().contiguous().t(),
        torch.stack([z, z], -1)[..., 0],
        z.conj().conj(),
        z.conj().resolve_conj().conj(),
    ):
        assert torch.equal(fft(given), fft(z))
    assert fft(z[:0]).shape == (0, 8) and fft(torch.zeros(3, 1)).shape == (3, 1)
    assert fft(torch.arange(4)).dtype == torch.complex64  # integers become real numbers
    spoiled = z.clone()
    spoiled[0, 3] = complex(math.nan, 0)
    assert fft(spoiled)[0].isnan().all() and torch.equal(fft(spoiled)[1], fft(z)[1])
    spoiled[0, 3] = math.inf
    assert not fft(spoiled)[0].isfinite().any()
    real = fxround.compile(torch.fft.rfft, "reproducible")
    assert real(z[0].real).shape == (5,) and real(z.real[:, :1]).imag.eq(0).all()
    with pytest.raises(Exception, match=r"Invalid number of data points \(0\)"):
        fft(torch.zeros(2, 0))


def test_random_roundings_are_the_same_for_every_batch_and_number_of_threads() -> None:
    x = torch.randn(5, 24)
    spectrum = fxround.compile(lambda x: torch.view_as_real(torch.fft.rfft(x)), "stochastic", seed=3)
    once = spectrum.reseed(3, sample=0)(x)
    assert torch.equal(spectrum.reseed(3, sample=0)(x[:2]), once[:2])
    assert not torch.equal(spectrum.reseed(3, sample=1)(x), once)
    fxround.check_invariance(torch.fft.rfft, x, ("batch", "stride", "threads"), policy="stochastic").check()


# ---- layers as users write them ----


class SpectralConvolution(nn.Module):
    """A layer of a Fourier neural operator in one dimension."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.rand(channels, channels, modes, dtype=torch.cfloat) / channels**2)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        out = torch.zeros(x.shape[0], x.shape[1], x.shape[-1] // 2 + 1, dtype=spectrum.dtype, device=x.device)
        out[:, :, : self.modes] = torch.einsum("bix,iox->box", spectrum[:, :, : self.modes], self.weight)
        return torch.fft.irfft(out, n=x.shape[-1])


class SpectralConvolution2d(nn.Module):
    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.low, self.high = (
            nn.Parameter(torch.rand(channels, channels, modes, modes, dtype=torch.cfloat) / channels**2)
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        m, spectrum = self.modes, torch.fft.rfft2(x)
        out = torch.zeros(*x.shape[:-1], x.shape[-1] // 2 + 1, dtype=torch.cfloat, device=x.device)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(out, s=x.shape[-2:])


class Operator(nn.Module):
    def __init__(self, spectral: nn.Module, convolution: type[nn.Module], channels: int) -> None:
        super().__init__()
        self.lift, self.spectral = convolution(1, channels, 1), spectral
        self.skip, self.out = convolution(channels, channels, 1), convolution(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        y: Tensor = self.out(nn.functional.gelu(self.spectral(h) + self.skip(h)))
        return y


class FrontEnd(nn.Module):
    """A masked spectrogram, its inverse, and its logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.mask = nn.Parameter(torch.rand(9, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.stft(x, 16, 4, window=self.window, return_complex=True) * self.mask
        return torch.istft(spectrum, 16, 4, window=self.window, length=x.shape[-1]), (spectrum.abs() ** 2 + 1e-6).log()


MODELS: Final[dict[str, Any]] = {
    "operator": lambda: (Operator(SpectralConvolution(3, 3), nn.Conv1d, 3), torch.randn(2, 1, 8)),
    "operator in two dimensions": lambda: (
        Operator(SpectralConvolution2d(2, 2), nn.Conv2d, 2),
        torch.randn(2, 1, 4, 6),
    ),
    "front end": lambda: (FrontEnd(), torch.randn(2, 64)),
}


@pytest.mark.part("operator", "front end")
@pytest.mark.parametrize("name", MODELS)
def test_spectral_layers_train_under_strict_policies(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]()

    def loss(result: Any) -> Tensor:
        return sum(y.square().mean() for y in (result if isinstance(result, tuple) else (result,)))  # type: ignore[return-value]

    loss(model(x)).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    fixed = fxround.compile(model, "reproducible", strict=True)
    for compiled in (fixed, fixed.with_policy("stochastic")):
        model.zero_grad()
        loss(compiled(x)).backward()
        assert not compiled.coverage().unrounded
        for p, want in zip(model.parameters(), wanted, strict=True):
            # Bits cannot be compared: stock transforms add in another order, and the second policy draws roundings.
            torch.testing.assert_close(p.grad, want, rtol=1e-3, atol=1e-4)
    one, all_of_them = fixed(x[:1]), fixed(x)
    pairs = zip(one, all_of_them, strict=True) if isinstance(one, tuple) else [(one, all_of_them)]
    assert all(torch.equal(a, b[:1]) for a, b in pairs)


def test_gradients_are_differentiated_through_complex_numbers() -> None:
    layer = SpectralConvolution(2, 3)

    class Residual(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh() + layer(x)

    x, found = torch.randn(2, 2, 8, dtype=torch.float64), []
    layer.to(torch.complex128)
    for function in (Residual(), fxround.compile(Residual(), "reproducible")):
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(function(y).square().sum(), y, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), y)[0])
    # Bits cannot be compared: stock transforms and products of complex numbers add in another order.
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_a_study_counts_the_digits_of_a_spectral_layer() -> None:
    model, x = MODELS["operator"]()
    report = fxround.variability(model, (x,), samples=4)
    assert all(figures.bits is not None and 8 < figures.bits <= 24 for figures in report.outputs)
