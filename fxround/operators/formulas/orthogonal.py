"""Formulas of Householder reflections, of the factorization QR, and of least squares.

A reflection is 1 - tau v v^T with v_j = 1, in the signs of LAPACK. The reflections of a block of ``BLOCK`` columns are
applied to it one after the other, in the steps of a loop, and to all that follows as 1 - V T V^T, by contractions.
Source: Golub and Van Loan, Matrix Computations, 4th edition, section 5.2; Schreiber and Van Loan, A storage-efficient
WY representation for products of Householder transformations, SIAM J. Sci. Stat. Comput. 10 (1989).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxround.capture.least_squares import DRIVERS, is_vector
from fxround.capture.loops import scan
from fxround.operators.formulas import triangular
from fxround.operators.formulas.table import formula
from fxround.operators.formulas.triangular import first_of, flat, numbers

aten = torch.ops.aten


def _reflect(c: Tensor, j: Tensor, rows: Tensor, columns: Tensor) -> list[Tensor]:
    """Reflect column j to a multiple of a unit vector; return the columns, tau and v in place of what is zero then."""
    column = c.index_select(2, j)
    alpha = column.index_select(1, j)
    tail = torch.where(rows > j, column, 0.0)
    squares = (tail * tail).sum(1, keepdim=True)
    length = (alpha * alpha + squares).sqrt()
    beta = torch.where(alpha < 0, length, -length)
    # A column of zeros below the diagonal is not reflected. Squares can be zero without that, by underflow.
    trivial = tail.abs().amax(1, keepdim=True) == 0
    tau = torch.where(trivial, 0.0, (beta - alpha) / beta)
    scaled = torch.where(trivial, 0.0, tail / (alpha - beta))
    v = torch.where(rows == j, 1.0, scaled)
    shares = torch.bmm(v.mT, c) * tau
    done = torch.where(rows == j, torch.where(trivial, alpha, beta), torch.where(rows > j, scaled, c))
    after = torch.where(rows >= j, c - v * shares, c)
    return [torch.where(columns > j, after, torch.where(columns == j, done, c)), tau]


def _panel(c: Tensor) -> tuple[Tensor, Tensor]:
    """Return R and V of a few columns in one, and tau: [matrices, columns]."""
    rows, columns = (torch.arange(n, device=c.device) for n in c.shape[1:])
    steps = min(c.shape[1:])
    packed, taus = scan(_reflect, [c], [numbers(steps, c)], [rows.unsqueeze(1), columns])
    return packed, taus.reshape(steps, c.shape[0]).mT


def _vectors(packed: Tensor) -> Tensor:
    """Return v of each reflection as a column, with its 1 and the zeros above it."""
    vectors = packed.tril(-1)
    unit = torch.eye(*vectors.shape[1:], dtype=torch.bool, device=packed.device)
    return torch.where(unit, 1.0, vectors)


def _join(t: Tensor, products: Tensor, tau: Tensor, j: Tensor, places: Tensor) -> list[Tensor]:
    """Put column j into T. products: of the earlier vectors with vector j, [matrices, columns, 1]."""
    earlier = torch.where(places.unsqueeze(1) < j, products, 0.0)
    column = -(torch.bmm(t, earlier) * tau)
    rows = places.unsqueeze(1)
    filled = torch.where(rows == j, tau, torch.where(rows < j, column, 0.0))
    return [torch.where(places == j, filled, t)]


def _triangle(v: Tensor, tau: Tensor) -> Tensor:
    """Return T of the product of reflections 1 - V T V^T: [matrices, columns, columns]."""
    count = tau.shape[1]
    if count == 1:
        return tau.unsqueeze(2)
    products = torch.bmm(v.mT, v).permute(2, 0, 1).unsqueeze(3)
    places = torch.arange(count, device=v.device)
    taus = tau.mT.reshape(count, tau.shape[0], 1, 1)
    zeros = v.new_zeros([v.shape[0], count, count])
    (t,) = scan(_join, [zeros], [products, taus, numbers(count, v)], [places])
    return t  # type: ignore[no-any-return]


def _applied(v: Tensor, t: Tensor, x: Tensor) -> Tensor:
    """Return (1 - V T V^T) x."""
    return x - torch.bmm(v, torch.bmm(t, torch.bmm(v.mT, x)))


def reflections(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return R and the vectors of the reflections in one, and tau. a: [matrices, m, n]; tau: [matrices, min(m, n)]."""
    matrices, m, n = a.shape
    rest, lower = a, a[:, :, :0]
    done, taus = [], []
    for begin in range(0, min(m, n), triangular.BLOCK):
        width = min(triangular.BLOCK, min(m, n) - begin)
        packed, tau = _panel(rest[:, :, :width])
        right = rest[:, :, width:]
        if right.shape[2]:
            v = _vectors(packed)
            right = _applied(v, _triangle(v, tau).mT, right)
        done.append(torch.cat([lower[:, :width], packed[:, :width], right[:, :width]], 2))
        taus.append(tau)
        lower, rest = torch.cat([lower[:, width:], packed[:, width:]], 2), right[:, width:]
    if not done:
        return a.clone(), a.new_zeros([matrices, 0])
    return torch.cat([*done, torch.cat([lower, rest], 2)], 1), torch.cat(taus, 1)


def _blocks(packed: Tensor, tau: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """Return the first row, the vectors and the triangle T of each block of reflections."""
    blocks = []
    for begin in range(0, tau.shape[1], triangular.BLOCK):
        end = min(begin + triangular.BLOCK, tau.shape[1])
        v = _vectors(packed[:, begin:, begin:end])
        blocks.append((begin, v, _triangle(v, tau[:, begin:end])))
    return blocks


def orthogonal(packed: Tensor, tau: Tensor, columns: int) -> Tensor:
    """Return the first columns of the product of the reflections."""
    matrices, m = packed.shape[:2]
    q = torch.eye(m, columns, dtype=packed.dtype, device=packed.device).expand(matrices, m, columns)
    for begin, v, t in reversed(_blocks(packed, tau)):
        inner = _applied(v, t, q[:, begin:, begin:])
        below = torch.cat([q[:, begin:, :begin], inner], 2)
        q = torch.cat([q[:, :begin], below], 1)
    return q


def multiplied(packed: Tensor, tau: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """Return the product of the reflections, or its transpose, times x."""
    blocks = _blocks(packed, tau)
    for begin, v, t in blocks if transposed else reversed(blocks):
        x = torch.cat([x[:, :begin], _applied(v, t.mT if transposed else t, x[:, begin:])], 1)
    return x


@formula(aten.linalg_qr.default)
def qr(a: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """qr(a) = (q, r): a = a - v * (tau * (v^T a)), v = x / (x_j - r_jj), tau = (r_jj - x_j) / r_jj, |r_jj| = norm(x)"""
    m, n = a.shape[-2:]
    packed, tau = reflections(flat(a))
    rows = m if mode == "complete" else min(m, n)
    r = packed[:, :rows].triu().reshape(*a.shape[:-2], rows, n)
    if mode == "r":
        return a.new_empty([0]), r
    return orthogonal(packed, tau, rows).reshape(*a.shape[:-2], m, rows), r


@formula(aten.geqrf.default)
def geqrf(a: Tensor) -> tuple[Tensor, Tensor]:
    """geqrf(a) = (r and v, tau) of qr(a)"""
    packed, tau = reflections(flat(a))
    return packed.reshape(a.shape), tau.reshape(*a.shape[:-2], tau.shape[1])


@formula(aten.linalg_householder_product.default)
def householder_product(packed: Tensor, tau: Tensor) -> Tensor:
    """householder_product(v, tau) = I - v (t (v^T I)), the last block first; t_ij = -(sum(t_ik (v^T v)_kj) * tau_j)"""
    q = orthogonal(flat(packed), tau.reshape(-1, tau.shape[-1]), packed.shape[-1])
    return q.reshape(packed.shape)


@formula(aten.ormqr.default)
def ormqr(packed: Tensor, tau: Tensor, x: Tensor, left: bool = True, transpose: bool = False) -> Tensor:
    """ormqr(v, tau, x) = x - v * (t * (v^T x)) for each block of reflections"""
    given = x if left else x.mT
    product = multiplied(flat(packed), tau.reshape(-1, tau.shape[-1]), flat(given), transpose == left).reshape(
        given.shape
    )
    return product if left else product.mT


@formula(torch.linalg.lstsq)
def lstsq(
    A: Tensor,
    B: Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
) -> Any:
    """lstsq(a, b) = solve_triangular(r, q^T b), (q, r) = qr(a); q solve_triangular(r^T, b) with qr(a^T) if a is wide"""
    m, n = A.shape[-2:]
    if driver not in DRIVERS:
        return NotImplemented
    vector = is_vector(A, B)
    b = B.unsqueeze(-1) if vector else B
    if m == 0 or n == 0:
        rank = A.new_zeros([0] if driver == "gels" else A.shape[:-2], dtype=torch.int64)
        return _least_squares(A.mT @ b, (b * b).sum(-2).detach() if driver == "gels" and m > n else None, rank, vector)
    q, r = torch.linalg.qr(A if m >= n else A.mT)
    diagonal = r.detach().diagonal(0, -2, -1).abs()
    least = torch.finfo(A.dtype).eps * max(m, n) if rcond is None or rcond < 0 else rcond
    # A column that is not finite says nothing of the rank.
    largest = torch.where(diagonal.isfinite(), diagonal, 0.0).amax(-1, keepdim=True)
    dependent = diagonal <= (0.0 if driver == "gels" else largest * least)
    aten._linalg_check_errors(first_of(dependent), "torch.linalg.lstsq", is_matrix=A.dim() == 2)
    if m >= n:
        x = torch.linalg.solve_triangular(r, q.mT @ b, upper=True)
    else:
        x = q @ torch.linalg.solve_triangular(r.mT, b, upper=False)
    rank = (~dependent).sum(-1) if driver != "gels" else dependent.new_empty([0], dtype=torch.int64)
    left = ((A @ x - b) ** 2).sum(-2).detach() if driver == "gels" and m > n else None
    return _least_squares(x, left, rank, vector)


def _least_squares(x: Tensor, left: Tensor | None, rank: Tensor, vector: bool) -> Any:
    empty = x.new_empty([0])
    fields = (x.squeeze(-1) if vector else x, empty if left is None else left, rank, empty.clone())
    return torch.return_types.linalg_lstsq(fields)  # type: ignore[attr-defined]
