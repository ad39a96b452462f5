"""Programs of scientists: filters, solvers and neural operators, against the same steps with one rounding each."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Final

import linear_rationals as exact
import pytest
import rationals
import torch
from linear_cases import assert_bits, each_policy, rows, values
from linear_rationals import Matrix, Steps
from torch import Tensor, nn

import fxround

# Both of one dtype, and thus of one capture.
NAMES: Final = ("bfloat16", "upwards")


def plus(a: Matrix, b: Matrix, steps: Steps) -> Matrix:
    pairs = zip(a, b, strict=True)
    return [[rationals.add(x, y, steps.rounding) for x, y in zip(*pair, strict=True)] for pair in pairs]


def minus(a: Matrix, b: Matrix, steps: Steps) -> Matrix:
    return plus(a, [[-x for x in row] for row in b], steps)


def kalman(a: Tensor, c: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The state and its covariance after the measurements y, of shape [steps, m]."""
    x, p = torch.zeros_like(a[:, :1]), torch.eye(len(a), dtype=a.dtype)
    for measured in y.unbind(0):
        x, p = a @ x, a @ p @ a.mT + torch.eye(len(a), dtype=a.dtype)
        cp = c @ p
        root = torch.linalg.cholesky(cp @ c.mT + torch.eye(len(c), dtype=a.dtype))
        gain = torch.cholesky_solve(cp, root).mT
        x, p = x + gain @ (measured.unsqueeze(1) - c @ x), p - gain @ cp
    return x, p


def test_a_kalman_filter() -> None:
    def arguments(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (
            torch.eye(3, dtype=dtype) + values(3, 3, seed=3, dtype=dtype) / 16,
            values(2, 3, seed=1, dtype=dtype),
            values(2, 2, dtype=dtype),
        )

    for steps, (a, c, y), found in each_policy(kalman, arguments, NAMES):
        a, c, p, x = rows(a), rows(c), exact.unit(3), [[0.0]] * 3
        for measured in rows(y):
            x = steps.product(a, x)
            p = plus(steps.product(steps.product(a, p), exact.transposed(a)), exact.unit(3), steps)
            cp = steps.product(c, p)
            root = exact.cholesky(plus(steps.product(cp, exact.transposed(c)), exact.unit(2), steps), steps)
            half = exact.solve_lower(root, cp, False, steps)
            gain = exact.transposed(exact.solve_upper(exact.transposed(root), half, False, steps))
            error = minus([[v] for v in measured], steps.product(c, x), steps)
            x, p = plus(x, steps.product(gain, error), steps), minus(p, steps.product(gain, cp), steps)
        for ours, theirs in zip(found, (x, p), strict=True):
            assert_bits(ours, theirs)


def heat(u: Tensor, k: Tensor) -> Tensor:
    """Three implicit steps on a line of points with fixed ends."""
    n = len(u)
    off = torch.diag(torch.ones(n - 1, dtype=u.dtype), 1)
    packed, pivots = torch.linalg.lu_factor(
        torch.eye(n, dtype=u.dtype) + k * (2 * torch.eye(n, dtype=u.dtype) - off - off.mT)
    )
    for _ in range(3):
        u = torch.linalg.lu_solve(packed, pivots, u)
    return u


def test_implicit_steps_of_heat() -> None:
    def arguments(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return values(7, 2, dtype=dtype), torch.tensor(0.75, dtype=dtype)

    for steps, (u, k), found in each_policy(heat, arguments, NAMES):
        each = [[2 * k.item() if i == j else -k.item() if abs(i - j) == 1 else 0.0 for j in range(7)] for i in range(7)]
        matrix, x = plus(exact.unit(7), each, steps), rows(u)
        for _ in range(3):
            x = exact.solve(matrix, x, steps)
        assert_bits(found, x)


def residual(x: Tensor, p: Tensor) -> Tensor:
    return torch.stack([x[0] * x[1] - p[0], x[1] * x[2] - p[1], x[2] * x[0] - p[2]])


def newton(x: Tensor, p: Tensor) -> Tensor:
    for _ in range(2):
        x = x - torch.linalg.solve(torch.func.jacfwd(residual)(x, p), residual(x, p))
    return x


def test_newtons_method() -> None:
    """The elements of the Jacobian are elements of x and zeros."""

    def arguments(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return torch.tensor([1.0, 1.25, 1.5], dtype=dtype), torch.tensor([2.0, 1.5, 3.0], dtype=dtype)

    for steps, (x, p), found in each_policy(newton, arguments, NAMES):
        at, wanted = x.tolist(), p.tolist()
        for _ in range(2):
            jacobian = [[at[1], at[0], 0.0], [0.0, at[2], at[1]], [at[2], 0.0, at[0]]]
            products = [[steps.mul(at[i], at[(i + 1) % 3])] for i in range(3)]
            right = minus(products, [[v] for v in wanted], steps)
            ((at),) = exact.transposed(minus([[v] for v in at], exact.solve(jacobian, right, steps), steps))
        assert_bits(found, [at])


def conjugate_gradients(a: Tensor, b: Tensor) -> Tensor:
    x, r, p, length = torch.zeros_like(b), b, b, b.square().sum()
    for _ in range(3):
        ap = a @ p
        alpha = length / (p * ap).sum()
        x, r = x + alpha * p, r - alpha * ap
        before, length = length, r.square().sum()
        p = r + length / before * p
    return x


def test_conjugate_gradients() -> None:
    def arguments(dtype: torch.dtype) -> tuple[Tensor, ...]:
        a = values(4, 4, dtype=dtype) / 4
        return a + a.mT + 8 * torch.eye(4, dtype=dtype), values(4, seed=1, dtype=dtype)

    for steps, (a, b), found in each_policy(conjugate_gradients, arguments, NAMES):

        def along(x: list[float], s: float, y: list[float], steps: Steps = steps) -> list[float]:
            """x + s * y"""
            return [rationals.add(u, steps.mul(s, v), steps.rounding) for u, v in zip(x, y, strict=True)]

        def inner(x: list[float], y: list[float], steps: Steps = steps) -> float:
            return steps.sum([steps.mul(u, v) for u, v in zip(x, y, strict=True)])

        x, r, p = [0.0] * 4, b.tolist(), b.tolist()
        length = inner(r, r)
        for _ in range(3):
            ap = [steps.dot(row, p) for row in rows(a)]
            alpha = steps.div(length, inner(p, ap))
            x, r = along(x, alpha, p), [steps.less(u, alpha, v) for u, v in zip(r, ap, strict=True)]
            before, length = length, inner(r, r)
            p = along(r, steps.div(length, before), p)
        assert_bits(found, [x])


class Operator(nn.Module):
    """A layer of a Fourier neural operator, and a solution of Poisson's equation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.local = nn.Parameter(torch.rand(2, 2, 3, dtype=torch.cfloat)), nn.Conv1d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, spectrum = x.shape[-1], torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[..., :3] = torch.einsum("bik,iok->bok", spectrum[..., :3], self.weight)
        k = torch.fft.rfftfreq(n, 1 / n)
        return nn.functional.gelu(torch.fft.irfft(out / (1 + k * k), n=n) + self.local(x))


class MelSpectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.window, self.bank = nn.Buffer(torch.hann_window(8)), nn.Buffer(torch.rand(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 8, 4, window=self.window, return_complex=True)
        return (spectrum.abs().square().mT @ self.bank).clamp(min=1e-10).log()


class GaussianProcess(nn.Module):
    """The log marginal likelihood of a batch of data sets."""

    def __init__(self) -> None:
        super().__init__()
        self.length = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        points, y = x[..., :2], x[..., 2]
        kernel = torch.exp(-0.5 * (torch.cdist(points, points) / self.length) ** 2)
        covariance = kernel + 0.1 * torch.eye(x.shape[-2], dtype=x.dtype)
        return torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Fourier neural operator": (Operator, (3, 2, 8)),
    "mel spectrum": (MelSpectrum, (3, 24)),
    "Gaussian process": (GaussianProcess, (3, 5, 3)),
}


def results(compiled: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """The results for x, and the gradients of their sum of squares."""
    leaf = x.clone().requires_grad_()
    y = compiled(leaf)
    yield y.detach()
    yield from torch.autograd.grad(y.square().sum(), [leaf, *compiled.parameters()])


@pytest.mark.part("Gaussian process")
@pytest.mark.parametrize("name", MODELS)
def test_models_are_rounded_and_reproducible(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    compiled = fxround.compile(model, "reproducible")
    whole, of_x, *_ = results(compiled, x)
    one, of_one, *_ = results(compiled, x[1:2])
    assert torch.equal(one[0], whole[1]) and torch.equal(of_one[0], of_x[1])
    drawn = compiled.with_policy("bfloat16/stochastic")
    first, again = (list(results(drawn.reseed(1), x)) for _ in range(2))
    assert all(map(torch.equal, first, again)) and not drawn.coverage().unrounded
    # A format of 8 bits moves a result, and by no more than a few of its last bits.
    assert 0 < (first[0] - whole).norm() < whole.norm() / 8


def test_a_refused_transform_leaves_pytorch_as_it_was() -> None:
    """PyTorch's compiler fails at this function, and leaves contexts that stop gradients when they are collected."""

    def jacobians(x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacfwd(lambda y: torch.stack([y[0] * y[1], y[0]])))(x)

    x = torch.ones(2, 2, requires_grad=True)
    try:
        fxround.compile(jacobians, "reproducible")(x)
    except fxround.CaptureError as error:
        assert "use torch.func.jacrev" in str(error)  # noqa: PT017 (other versions of torch trace it)
    gc.collect()
    assert jacobians(x).requires_grad
