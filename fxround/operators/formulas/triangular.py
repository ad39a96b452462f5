"""Formulas of triangular systems and of the Cholesky factorization.

A matrix is cut into blocks of ``BLOCK`` columns. What all columns before a block contribute to an element is one
contraction, k ascending, which is then subtracted. Inside of a block, one column after the other is subtracted, a
product and a difference at a time, in the steps of a loop. Source: Golub and Van Loan, Matrix Computations, 4th
edition, sections 3.1 (column-oriented substitution in blocks) and 4.2 (the block Cholesky factorization).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxround.capture.loops import scan
from fxround.operators.formulas.table import formula

aten = torch.ops.aten
# The columns of a block. Bits depend on it: docs/linear-algebra.md declares it.
BLOCK = 64


def flat(x: Tensor) -> Tensor:
    """Return the matrices of x as [matrices, rows, columns]. Raises for dtypes that PyTorch does not factor either."""
    if x.dtype not in (torch.float32, torch.float64):
        raise NotImplementedError(
            f"linear algebra of {x.dtype} is not implemented on the CPU: expected float32 or float64. Convert the "
            "matrix with .float(); a policy has the format, such as 'bfloat16'."
        )
    return x if x.dim() == 3 else x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def broadcast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with the same leading dimensions."""
    leading = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.expand(*leading, *a.shape[-2:]), b.expand(*leading, *b.shape[-2:])


def less_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return x - a b; x itself where there is nothing to add up."""
    return x - torch.bmm(a, b) if a.shape[-1] else x


def numbers(n: int, like: Tensor) -> Tensor:
    """Return 0, ..., n - 1 as the elements of a loop: [n, 1]."""
    return torch.arange(n, device=like.device).unsqueeze(1)


def first_of(failed: Tensor) -> Tensor:
    """Return the number, from 1, of the first true element of each row, 0 where there is none: int32."""
    size = failed.shape[-1]
    if size == 0:
        return failed.new_zeros(failed.shape[:-1], dtype=torch.int32)
    places = torch.arange(1, size + 1, device=failed.device)
    first = torch.where(failed, places, size + 1).amin(-1)
    return torch.where(first > size, 0, first).to(torch.int32)


def identity_like(a: Tensor) -> Tensor:
    """Return the unit matrix for each of the matrices of a."""
    unit = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return unit.expand(a.shape)


def _substitute(r: Tensor, column: Tensor, j: Tensor, places: Tensor, *diagonal: Tensor) -> list[Tensor]:
    x = r.index_select(1, j)
    if diagonal:
        x = x / diagonal[0].index_select(1, j)
    return [torch.where(places > j, r - column * x, torch.where(places == j, x, r))]


def _substituted(block: Tensor, b: Tensor, unit: bool) -> Tensor:
    """Return x of ``block x = b`` for lower triangles of at most BLOCK rows."""
    diagonal = block.diagonal(0, -2, -1).unsqueeze(-1)
    if block.shape[-1] == 1:
        return b.clone() if unit else b / diagonal
    columns = block.permute(2, 0, 1).unsqueeze(-1)
    places = numbers(block.shape[-1], b)
    (x,) = scan(_substitute, [b], [columns, places], [places.clone()] + ([] if unit else [diagonal]))
    return x  # type: ignore[no-any-return]


def solve_lower(a: Tensor, b: Tensor, unit: bool) -> Tensor:
    """Return x of ``a x = b``, the first row first. a: [matrices, n, n], of which the lower triangle is read."""
    n = a.shape[-1]
    parts: list[Tensor] = []
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        r = b[:, begin:end]
        if parts:
            r = less_product(r, a[:, begin:end, :begin], torch.cat(parts, 1))
        parts.append(_substituted(a[:, begin:end, begin:end], r, unit))
    return torch.cat(parts, 1) if parts else b.clone()


def solve_upper(a: Tensor, b: Tensor, unit: bool) -> Tensor:
    """Return x of ``a x = b``, the last row first. a: [matrices, n, n], of which the upper triangle is read."""
    return solve_lower(a.flip(-2, -1), b.flip(-2), unit).flip(-2)


@formula(aten.linalg_solve_triangular.default)
def solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """solve_triangular(a, b)_i = (b_i - sum(a_ik * x_k) - a_ij * x_j - ...) / a_ii, k before the block, j inside"""
    if not left:
        x: Tensor = solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular)
        return x.mT
    if a.dtype != b.dtype:
        raise RuntimeError(f"linalg.solve_triangular: expected A and B of one dtype, got {a.dtype} and {b.dtype}")
    a, b = broadcast(a, b)
    solve = solve_upper if upper else solve_lower
    return solve(flat(a), flat(b), unitriangular).reshape(b.shape)


@formula(aten.triangular_solve.default)
def triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """triangular_solve(b, a) = solve_triangular(a, b)"""
    matrix = a.mT if transpose else a
    x = solve_triangular(matrix, b, upper=upper != transpose, unitriangular=unitriangular)
    return x, broadcast(a, b)[0].clone()


def _root(c: Tensor, j: Tensor, rows: Tensor, columns: Tensor) -> list[Tensor]:
    column = c.index_select(2, j)
    root = column.index_select(1, j).sqrt()
    factor = column / root
    across = factor[:, : c.shape[2]].mT
    done = torch.where(rows == j, root, factor)
    within = (rows >= columns) & (columns > j)
    return [torch.where(within, c - factor * across, torch.where((columns == j) & (rows >= j), done, c))]


def _factored_columns(c: Tensor) -> Tensor:
    """Return the columns of the Cholesky factor for the first columns of what is left of a matrix."""
    rows, columns = (torch.arange(n, device=c.device) for n in c.shape[1:])
    (factor,) = scan(_root, [c], [numbers(c.shape[2], c)], [rows.unsqueeze(1), columns])
    return factor  # type: ignore[no-any-return]


def cholesky_factor(a: Tensor) -> Tensor:
    """Return L of ``a = L L^T``, NaN if a is not positive definite. a: [matrices, n, n]; its lower triangle is read."""
    n = a.shape[-1]
    left = a[:, :, :0]
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        c = less_product(a[:, begin:, begin:end], left[:, begin:], left[:, begin:end].mT)
        above = a.new_zeros([a.shape[0], begin, end - begin])
        left = torch.cat([left, torch.cat([above, _factored_columns(c)], 1)], 2)
    return left.tril()


@formula(aten.linalg_cholesky_ex.default)
def cholesky_ex(a: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """linalg.cholesky(a) = l: l_jj = sqrt(c_jj), l_ij = c_ij / l_jj, c_ik = c_ik - l_ij * l_kj; c = a - sum(l l^T)"""
    lower = cholesky_factor(flat(a.mT if upper else a)).reshape(a.shape)
    info = first_of(~(lower.diagonal(0, -2, -1) > 0))
    if check_errors:
        aten._linalg_check_errors(info, "linalg.cholesky_ex", is_matrix=a.dim() == 2)
    return lower.mT if upper else lower, info


# torch 2.15 has torch.linalg.cholesky alone.
@formula(*([aten.cholesky.default] if hasattr(aten, "cholesky") else []))
def cholesky(a: Tensor, upper: bool = False) -> Tensor:
    """cholesky(a) = linalg.cholesky(a)"""
    factor, info = cholesky_ex(a, upper=upper)
    aten._linalg_check_errors(info, "cholesky", is_matrix=a.dim() == 2)
    return factor  # type: ignore[no-any-return]


@formula(aten.cholesky_solve.default)
def cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    """cholesky_solve(b, l) = solve_triangular(l^T, solve_triangular(l, b))"""
    factor, b = broadcast(factor.mT if upper else factor, b)
    lower = flat(factor)
    return solve_upper(lower.mT, solve_lower(lower, flat(b), False), False).reshape(b.shape)


@formula(aten.cholesky_inverse.default)
def cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    """cholesky_inverse(l) = cholesky_solve(I, l)"""
    return cholesky_solve(identity_like(factor), factor, upper)  # type: ignore[no-any-return]
