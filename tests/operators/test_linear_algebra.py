"""``torch.linalg`` under policies: factorizations, solutions and gradients, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import linear_rationals as exact
import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from linear_cases import NARROW, SOME, WIDE, assert_bits, each_policy, policy_of, rows, steps_of, values
from torch import Tensor

import fxround
from fxround.operators.formulas import triangular


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 columns, so that small matrices have several."""
    monkeypatch.setattr(triangular, "BLOCK", 4)


def definite(n: int, seed: int = 0, dtype: torch.dtype = NARROW) -> Tensor:
    x = values(n, n, seed=seed, dtype=dtype).sign() / 4
    return x + x.mT + 6 * torch.eye(n, dtype=dtype)


def test_triangular_systems() -> None:
    def systems(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        solve = torch.linalg.solve_triangular
        return (
            solve(a, b, upper=False),
            solve(a, b, upper=True),
            solve(a, b, upper=True, unitriangular=True),
            solve(a, b.mT, upper=False, left=False),
        )

    def arguments(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return values(11, 11, dtype=dtype) / 8 + 2 * torch.eye(11, dtype=dtype), values(11, 3, seed=1, dtype=dtype)

    for steps, (a, b), found in each_policy(systems, arguments):
        matrix, right = rows(a), rows(b)
        turned = exact.solve_upper(exact.transposed(matrix), right, False, steps)
        expected = (
            exact.solve_lower(matrix, right, False, steps),
            exact.solve_upper(matrix, right, False, steps),
            exact.solve_upper(matrix, right, True, steps),
            exact.transposed(turned),
        )
        for ours, theirs in zip(found, expected, strict=True):
            assert_bits(ours, theirs)


@pytest.mark.part(2)
@pytest.mark.parametrize("n", [10, 16])
def test_cholesky(n: int) -> None:
    def factors(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        lower = torch.linalg.cholesky(a.tril())
        upper = torch.linalg.cholesky(a.triu(), upper=True)
        return lower, upper, torch.cholesky_solve(b, lower), torch.cholesky_inverse(lower)

    def arguments(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return definite(n, dtype=dtype), values(n, 2, dtype=dtype)

    for steps, (a, b), (lower, upper, x, inverse) in each_policy(factors, arguments, SOME):
        expected = exact.cholesky(rows(a), steps)
        assert_bits(lower, expected)
        assert_bits(upper, exact.transposed(expected))
        for found, right in ((x, rows(b)), (inverse, exact.unit(n))):
            y = exact.solve_lower(expected, right, False, steps)
            assert_bits(found, exact.solve_upper(exact.transposed(expected), y, False, steps))


@pytest.mark.part(3)
@pytest.mark.parametrize("shape", [(13, 13), (16, 16), (11, 6), (6, 11), (1, 1), (3, 1), (1, 3)])
def test_elimination(shape: tuple[int, int]) -> None:
    """Small multiples of 1/4 have many pivots of equal magnitudes, of which the first is taken."""

    def arguments(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (values(*shape, dtype=dtype),)

    for steps, (a,), (packed, pivots) in each_policy(torch.linalg.lu_factor, arguments):
        expected, places, _ = exact.lu(rows(a), steps)
        assert pivots.tolist() == places
        assert_bits(packed, expected)


@pytest.mark.part(2)
@pytest.mark.parametrize("n, seed", [(6, 3), (16, 6)])
def test_solutions_inverses_and_determinants(n: int, seed: int) -> None:
    def solutions(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        packed, pivots = torch.linalg.lu_factor(a)
        return (
            torch.linalg.solve(a, b),
            torch.linalg.solve(a.mT.contiguous().mT, b[:, 0]),
            torch.linalg.lu_solve(packed, pivots, b),
            torch.linalg.lu_solve(packed, pivots, b, adjoint=True),
            torch.linalg.inv(a),
            torch.linalg.solve(a, b.mT, left=False),
            torch.linalg.det(a),
            *torch.linalg.slogdet(a),
        )

    def arguments(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return values(n, n, seed=seed, dtype=dtype), values(n, 2, dtype=dtype)

    for steps, (a, b), found in each_policy(solutions, arguments, SOME):
        matrix, right = rows(a), rows(b)
        x = exact.solve(matrix, right, steps)
        turned = exact.solve_transposed(matrix, right, steps)
        inverse = exact.solve(matrix, exact.unit(n), steps)
        expected = (x, [[row[0] for row in x]], x, turned, inverse, exact.transposed(turned))
        for ours, theirs in zip(found, expected, strict=False):
            assert_bits(ours, theirs)
        packed, pivots, _ = exact.lu(matrix, steps)
        product = 1.0
        for i in range(n):
            product = exact.rationals.mul(product, packed[i][i], steps.step)
        odd = sum(p != i + 1 for i, p in enumerate(pivots)) % 2
        product = exact.rationals.round_float(product, steps.rounding)
        assert found[6].item() == (-product if odd else product)
        assert found[7].item() == (0.0 if product == 0 else 1.0 if found[6] > 0 else -1.0)


@pytest.mark.part(2)
@pytest.mark.parametrize("shape", [(9, 5), (16, 16), (5, 6), (1, 3), (3, 1)])
def test_reflections(shape: tuple[int, int]) -> None:
    least = min(shape)

    def arguments(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (values(*shape, seed=2, dtype=dtype),)

    def factors(a: Tensor) -> tuple[Tensor, ...]:
        return *torch.geqrf(a), *torch.linalg.qr(a)

    for steps, (a,), (packed, tau, q, r) in each_policy(factors, arguments, SOME):
        expected, taus = exact.reflections(rows(a), steps)
        assert_bits(packed, expected)
        assert_bits(tau, [taus])
        assert_bits(r, [[x if j >= i else 0.0 for j, x in enumerate(row)] for i, row in enumerate(expected[:least])])
        assert_bits(q, exact.orthogonal(expected, taus, least, steps))


@pytest.mark.parametrize("shape", [(6, 3), (3, 5)])
def test_least_squares(shape: tuple[int, int]) -> None:
    def arguments(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return values(*shape, seed=2, dtype=dtype), values(shape[0], 2, dtype=dtype)

    for steps, (a, b), x in each_policy(lambda a, b: torch.linalg.lstsq(a, b).solution, arguments, SOME):
        tall, right = (rows(a), rows(b)) if shape[0] > shape[1] else (exact.transposed(rows(a)), rows(b))
        packed, taus = exact.reflections(tall, steps)
        q = exact.orthogonal(packed, taus, min(shape), steps)
        if shape[0] > shape[1]:
            product = steps.product(exact.transposed(q), right)
            assert_bits(x, exact.solve_upper(packed[: min(shape)], product, False, steps))
        else:
            lower = exact.transposed(packed[: min(shape)])
            assert_bits(x, steps.product(q, exact.solve_lower(lower, right, False, steps)))


def gradients(function: Callable[..., Tensor], g: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in xs]
    return torch.autograd.grad(function(*leaves), leaves, g)


@pytest.mark.part(3)
@pytest.mark.parametrize("name", ["reproducible", "bfloat16", "ieee(5,5)", "upwards"])
def test_the_gradient_of_a_solution(name: str) -> None:
    """The solution for the transposed matrix by the same factors, and its outer product with x."""
    steps, compiled = steps_of(name), fxround.compile(torch.linalg.solve, policy_of(name))
    a, b, g = values(6, 6, seed=3), values(6, 2), values(6, 2, seed=1)
    x = exact.solve(rows(a), rows(b), steps)
    turned = exact.solve_transposed(rows(a), rows(g), steps)
    outer = [[-v for v in row] for row in steps.product(turned, exact.transposed(x))]
    for matrix in (a, a.mT.contiguous().mT):
        of_a, of_b = gradients(compiled, g, matrix, b)
        assert_bits(of_b, turned)
        assert_bits(of_a, outer)


EVERY: dict[str, Callable[[Tensor], Any]] = {
    "solve_triangular": lambda a: torch.linalg.solve_triangular(a, a[..., :2], upper=True),
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(a.shape[-1], dtype=a.dtype)),
    "cholesky_solve": lambda a: torch.cholesky_solve(a[..., :1], a),
    "cholesky_inverse": torch.cholesky_inverse,
    "lu_factor": lambda a: torch.linalg.lu_factor(a)[0],
    "lu": lambda a: torch.linalg.lu(a)[1] + torch.linalg.lu(a)[2],
    "lu_solve": lambda a: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), a[..., :2]),
    "solve": lambda a: torch.linalg.solve(a, a[..., :2].sin()),
    "right": lambda a: torch.linalg.solve(a, a.sin(), left=False),
    "inv": torch.linalg.inv,
    "tensorsolve": lambda a: torch.linalg.tensorsolve(a, a[0].sin()),
    "qr": lambda a: torch.linalg.qr(a[:, :3])[0] + torch.linalg.qr(a[:, :3])[1].sum(),
    "qr of a wide matrix": lambda a: torch.linalg.qr(a[:, :3].mT)[1],
    "householder_product": lambda a: torch.linalg.householder_product(a[:, :3], a[0, :3].sin()),
    "ormqr": lambda a: torch.ormqr(a[:, :3].detach(), a[0, :3].detach().sin(), a),
    "lstsq": lambda a: torch.linalg.lstsq(a[:, :3], a[:, 3:].sin()).solution,
    "lstsq of a wide matrix": lambda a: torch.linalg.lstsq(a[:, :3].mT, a[:1, :3].mT.sin()).solution,
    "det": torch.det,
    "slogdet": lambda a: a.slogdet()[1],
    "logdet": lambda a: torch.logdet(a @ a.mT),
}


@pytest.mark.part(5)
@pytest.mark.parametrize("name", EVERY)
def test_results_and_gradients_are_those_of_mathematics(name: str) -> None:
    """In binary64 against PyTorch's kernels, which take other orders: hence the tolerance. Strides change no bit."""
    function, generator = EVERY[name], torch.Generator().manual_seed(7)
    a = torch.randn(5, 5, dtype=WIDE, generator=generator)
    compiled = fxround.compile(function, "reproducible")
    expected = function(a)
    g = torch.randn(expected.shape, dtype=WIDE, generator=generator)
    (found,) = gradients(compiled, g, a)
    assert not compiled.coverage().unrounded
    # Bits cannot be compared: LAPACK adds in orders of its own. Orders, forward and backward, are compared above.
    torch.testing.assert_close(compiled(a), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found, gradients(function, g, a)[0], rtol=1e-10, atol=1e-10)
    (turned,) = gradients(compiled, g, a.mT.contiguous().mT)
    assert torch.equal(found, turned)


VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda a: a[1:6, 2:7],
    lambda a: a[::2, 1::2],
    lambda a: a[1:6, 2:7].mT,
    lambda a: a[1:6, 2:7].expand(2, 5, 5),
    lambda a: a.as_strided((5, 5), (11, 2), 3),
)
OF_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "qr of rows": lambda a: torch.linalg.qr(a[..., :2, :])[1],
    "qr of columns": lambda a: torch.linalg.qr(a[..., :3])[0],
    "solve": lambda a: torch.linalg.solve(a, a[..., :2]),
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT),
    "solve_triangular": lambda a: torch.linalg.solve_triangular(a, a[..., :2], upper=True),
    "lstsq": lambda a: torch.linalg.lstsq(a[..., :3], a[..., 3:]).solution,
}


@pytest.mark.part(2)
@pytest.mark.parametrize("name", OF_VIEWS)
def test_views_have_the_bits_and_gradients_of_their_copies(name: str) -> None:
    """The offset of a view in memory is no size of the graph."""
    compiled = fxround.compile(OF_VIEWS[name], "reproducible")
    whole = torch.randn(10, 11, dtype=WIDE, generator=torch.Generator().manual_seed(2))
    for view in (make(whole) for make in VIEWS):
        results = []
        for a in (view.detach().requires_grad_(), view.contiguous().clone().requires_grad_()):
            y = compiled(a)
            results.append((y, *torch.autograd.grad(y.square().sum(), a)))
        for of_view, of_copy in zip(*results, strict=True):
            assert torch.equal(of_view, of_copy)


@pytest.mark.parametrize("policy", ["reproducible", "stochastic"])
def test_integers_are_eliminated_exactly(policy: str) -> None:
    """What needs no rounding is not moved by a rounding, also where its factors have several blocks."""
    lower = values(9, 9).mul(4).clamp(-1, 1).tril(-1) + torch.eye(9)
    x = values(9, 3, seed=1) * 4
    b, square = ((lower.long() @ other.long()).float() for other in (x, lower.mT))
    with torch.no_grad():
        solved = fxround.compile(lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), policy)(lower, b)
        factor = fxround.compile(torch.linalg.cholesky, policy)(square)
    assert torch.equal(solved, x) and torch.equal(factor, lower)


def test_samples_differ_and_every_stream_is_its_own() -> None:
    compiled = fxround.compile(torch.linalg.lu_factor, "stochastic", seed=3)
    a = torch.rand(10, 10, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        one, again, other = (compiled.reseed(3, sample=s)(a)[0] for s in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)
    # About half of all elements differ, in every block, and none by more than the growth of a rounding allows.
    assert all((one != other)[i:, i:].any() for i in range(2, 9))


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.det, torch.linalg.lu_factor])
def test_a_batch_has_the_bits_of_its_matrices(function: Callable[..., Any]) -> None:
    a = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    compiled = fxround.compile(function, "bfloat16")
    with torch.no_grad():
        whole, one = compiled(a), compiled(a[1, 2])
    for many, single in zip(pytree.tree_leaves(whole), pytree.tree_leaves(one), strict=True):
        assert torch.equal(many[1, 2], single)


def lower_system(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(a, b, upper=False)


OUTCOMES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "singular": (torch.linalg.solve, (torch.ones(3, 3), torch.ones(3, 1))),
    "singular in a batch": (torch.linalg.inv, (torch.stack([torch.eye(3), torch.ones(3, 3)]),)),
    "singular, determinant": (torch.linalg.slogdet, (torch.ones(3, 3),)),
    "singular, factors": (torch.linalg.lu, (torch.ones(3, 3),)),
    "indefinite": (torch.linalg.cholesky, (-torch.eye(3),)),
    **({"indefinite, old": (torch.cholesky, (-torch.eye(3),))} if hasattr(torch, "cholesky") else {}),
    "a NaN": (torch.linalg.inv, (torch.full((2, 2), torch.nan),)),
    "a NaN, definite": (torch.linalg.cholesky, (torch.full((2, 2), torch.nan),)),
    "a NaN, determinant": (torch.linalg.slogdet, (torch.full((2, 2), torch.nan),)),
    "empty": (torch.linalg.solve, (torch.zeros(0, 0), torch.zeros(0, 2))),
    "no right side": (torch.linalg.solve, (torch.eye(3), torch.zeros(3, 0))),
    "no matrices": (torch.linalg.solve, (torch.zeros(0, 3, 3), torch.zeros(0, 3, 2))),
    "empty determinant": (torch.linalg.slogdet, (torch.zeros(2, 0, 0),)),
    "empty factors": (torch.linalg.lu, (torch.zeros(0, 3),)),
    "empty definite": (torch.linalg.cholesky, (torch.zeros(0, 0),)),
    "empty, orthogonal": (torch.linalg.qr, (torch.zeros(3, 0),)),
    "no equations": (torch.linalg.lstsq, (torch.zeros(0, 2), torch.zeros(0, 1))),
    "rank of least squares": (torch.linalg.lstsq, (torch.eye(3, 2), torch.ones(3, 1))),
    "a height of least squares": (torch.linalg.lstsq, (torch.eye(3, 2), torch.ones(4, 1))),
    "a zero column": (torch.linalg.qr, (torch.zeros(3, 2),)),
    "one element": (torch.linalg.inv, (torch.full((1, 1), 2.0),)),
    "not square": (torch.linalg.inv, (torch.ones(3, 2),)),
    "another height": (torch.linalg.solve, (torch.eye(3), torch.ones(4, 1))),
    "another dtype": (torch.linalg.solve, (torch.eye(3), torch.ones(3, 1).double())),
    "integers": (torch.linalg.det, (torch.eye(3).long(),)),
    "a vector": (torch.linalg.inv, (torch.ones(3),)),
    "negative": (torch.logdet, (torch.tensor([[0.0, 1.0], [1.0, 0.0]]),)),
    "an infinity": (torch.linalg.inv, (torch.tensor([[torch.inf, 0.0], [0.0, 1.0]]),)),
    "an infinity, factors": (torch.linalg.lu_factor, (torch.tensor([[1.0, torch.inf], [2.0, 1.0]]),)),
    "an infinity, determinant": (torch.linalg.slogdet, (torch.tensor([[torch.inf, 0.0], [0.0, 2.0]]),)),
    "an infinity, indefinite": (torch.linalg.cholesky, (torch.tensor([[1.0, torch.inf], [torch.inf, 1.0]]),)),
    "a NaN, orthogonal": (torch.linalg.qr, (torch.full((3, 2), torch.nan),)),
    "a NaN, triangular": (lower_system, (torch.tensor([[torch.nan, 0.0], [1.0, 2.0]]), torch.ones(2, 1))),
    "singular, triangular": (lower_system, (torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.ones(2, 1))),
    "singular, factor": (torch.cholesky_solve, (torch.ones(2, 1), torch.zeros(2, 2))),
    "indefinite in a batch": (torch.linalg.cholesky, (torch.stack([torch.eye(3), -torch.eye(3)]),)),
    "one element, zero": (torch.linalg.solve, (torch.zeros(1, 1), torch.ones(1, 1))),
    "one element, definite": (torch.linalg.cholesky, (torch.full((2, 1, 1), 4.0),)),
    "one element, equations": (torch.linalg.lstsq, (torch.full((1, 1), 2.0), torch.ones(1, 2))),
    "empty, triangular": (lower_system, (torch.zeros(2, 0, 0), torch.zeros(2, 0, 3))),
    "no definite matrices": (torch.linalg.cholesky, (torch.zeros(0, 3, 3),)),
    "not square, definite": (torch.linalg.cholesky, (torch.ones(2, 3, 2),)),
    "not square, determinant": (torch.linalg.slogdet, (torch.ones(2, 3),)),
    "not square, triangular": (lower_system, (torch.ones(2, 3), torch.ones(2, 1))),
    "not square, solution": (torch.linalg.solve, (torch.ones(2, 2, 3), torch.ones(2, 2, 1))),
    "a batch of right sides": (lower_system, (torch.eye(2).expand(3, 2, 2), torch.ones(2, 2, 1))),
    "half": (torch.linalg.lu, (torch.eye(2).half(),)),
    "half, determinant": (torch.linalg.det, (torch.eye(2).bfloat16(),)),
    "half, triangular": (lower_system, (torch.eye(2).half(), torch.ones(2, 1).half())),
    "half, orthogonal": (torch.linalg.qr, (torch.eye(2).half(),)),
    "half, equations": (torch.linalg.lstsq, (torch.eye(2).half(), torch.ones(2, 1).half())),
    "integers, triangular": (lower_system, (torch.eye(2).long(), torch.ones(2, 1))),
    "another driver": (lambda a, b: torch.linalg.lstsq(a, b, driver="svd"), (torch.eye(2), torch.ones(2, 1))),
}


def outcome(function: Callable[..., Any], args: tuple[Tensor, ...]) -> Any:
    try:
        return function(*args)
    except RuntimeError as error:
        return error


@pytest.mark.part(8)
@pytest.mark.parametrize("name", OUTCOMES)
def test_bad_matrices_have_pytorchs_outcome(name: str) -> None:
    function, args = OUTCOMES[name]
    compiled = fxround.compile(function, "reproducible")
    expected = outcome(function, args)
    with torch.no_grad():
        found = outcome(compiled, args)
    if isinstance(expected, RuntimeError):
        assert type(found) is type(expected) and str(expected)[:60] in str(found)
        return
    # Small integers, infinities and NaNs: no result is rounded.
    for ours, theirs in zip(*map(pytree.tree_leaves, (found, expected)), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_an_infinity_is_divided_as_a_number() -> None:
    """LAPACK multiplies by a reciprocal, which is 0, where the formula divides 0 by an infinity."""
    a = torch.tensor([[torch.inf, 0.0], [0.0, 1.0]])
    factor, info = fxround.compile(torch.linalg.cholesky_ex, "reproducible")(a)
    assert torch.equal(factor, a) and info == 0


@pytest.mark.parametrize(
    "a, x",
    [
        ([[torch.inf, 0.0], [0.0, 4.0]], [[0.0], [0.25]]),
        ([[torch.nan, 0.0], [0.0, 4.0]], [[torch.nan], [0.25]]),
        ([[1.0, 0.0], [0.0, torch.inf]], [[torch.nan], [torch.nan]]),
    ],
)
def test_least_squares_take_numbers_that_are_not_finite(a: list[list[float]], x: list[list[float]]) -> None:
    """They say nothing of the rank. The last matrix has an infinity times 0 in a reflection."""
    compiled = fxround.compile(lambda a, b: torch.linalg.lstsq(a, b).solution, "reproducible")
    with torch.no_grad():
        np.testing.assert_array_equal(compiled(torch.tensor(a), torch.ones(2, 1)), torch.tensor(x))


def test_a_system_of_two_dtypes_and_least_squares_by_singular_values_are_refused() -> None:
    """PyTorch converts B without a word, and a graph cannot have a shape that depends on a rank."""
    a, b = torch.eye(2), torch.ones(2, 1)
    with pytest.raises(fxround.CaptureError, match=r"got torch\.float32 and torch\.float64\n.*B\.to\(A\.dtype\)"):
        fxround.compile(lower_system, "reproducible")(a, b.double())
    with pytest.raises(fxround.CaptureError, match="pass driver='gelsy' or 'gels'"):
        fxround.compile(lambda a, b: torch.linalg.lstsq(a, b, driver="gelsd"), "reproducible")(a, b)


def test_pivots_are_rows_under_policies_that_perturb_operands() -> None:
    """A comparison of magnitudes with their maximum would read both with another noise each."""
    torch.manual_seed(1)
    a = torch.randn(3, 6, 6)
    for policy in (fxround.policy.monte_carlo(20), fxround.policy.monte_carlo(8, "pb"), "up_down"):
        p, lower, upper = fxround.compile(lambda a: tuple(torch.linalg.lu(a)), policy, seed=1)(a)
        assert torch.equal((p == 1).sort(1).values[:, -1], torch.ones(3, 6).bool())
        assert int((p == 1).count_nonzero()) == int(p.count_nonzero()) == 18
        # Noise of 8 bits in products of six terms of numbers below 10.
        assert (p @ lower @ upper - a).abs().max() < 0.5


def test_squares_that_underflow_are_no_zeros_below_the_diagonal() -> None:
    a = torch.tensor([[1.0, 2], [3, 4], [5, 7]])
    q, r = fxround.compile(lambda a: tuple(torch.linalg.qr(a)), "reproducible")(a * 2.0**-90)
    assert q.isnan().all() and not r.isfinite().all()
    diagonal = torch.tensor([[1.0, 2], [0, 3], [0, 0]]) * 2.0**-90
    q, r = fxround.compile(lambda a: tuple(torch.linalg.qr(a)), "reproducible")(diagonal)
    assert torch.equal(q, torch.eye(3, 2)) and torch.equal(r, diagonal[:2])


def test_least_squares_refuse_a_matrix_without_full_rank() -> None:
    a, b = torch.ones(3, 2), torch.ones(3, 1)
    with torch.no_grad(), pytest.raises(torch.linalg.LinAlgError, match="does not have full rank"):
        fxround.compile(torch.linalg.lstsq, "reproducible")(a, b)


class Solving(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(values(5, 5, seed=3) + 8 * torch.eye(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(self.matrix, x)


def test_other_views_of_a_model_see_the_steps(tmp_path: Path) -> None:
    model, x = Solving().eval(), values(5, 2)
    compiled = fxround.compile(model, "bfloat16")
    with torch.no_grad():
        y = compiled(x)
        assert torch.equal(y, fxround.compile(model, "bfloat16", unroll_loops=True)(x))
        compiled.export(tmp_path / "model.pt2", x)
        assert torch.equal(y, fxround.load(tmp_path / "model.pt2")(x))
    assert {"scan.step.div", "scan.step.sub"} <= {o.node for o in compiled.summary().operations}
    assert len(list(fxround.attribute(model, x).table())) > 5
    quiet = fxround.compile(model, "reproducible")(x)
    assert fxround.localize(model, x, lambda y: torch.equal(y, quiet)).undrawn == ()
