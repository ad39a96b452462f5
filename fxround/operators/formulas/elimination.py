"""Formulas of Gaussian elimination with partial pivoting, and of what is solved with it.

The pivot of a column is the first of its largest magnitudes, in the order of the rows after the exchanges before it; a
NaN is larger than every number. Rows are exchanged by indices, which rounds nothing. A block of ``BLOCK`` columns is
eliminated one column after the other, in the steps of a loop, after one contraction has subtracted what all columns
before it contribute; the block's rows to the right of it follow in the same way. Source: Golub and Van Loan, Matrix
Computations, 4th edition, sections 3.2 and 3.4 (the block algorithm of Crout's order).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxround.capture.loops import scan
from fxround.operators.formulas import triangular
from fxround.operators.formulas.table import formula
from fxround.operators.formulas.triangular import (
    broadcast,
    first_of,
    flat,
    identity_like,
    less_product,
    numbers,
    solve_lower,
    solve_upper,
)

aten = torch.ops.aten


def _eliminate(c: Tensor, place: Tensor, j: Tensor, columns: Tensor) -> list[Tensor]:
    """Eliminate column j below its pivot. place: of each row after the exchanges, [matrices, rows, 1]."""
    column = c.index_select(2, j)
    # One operation reads the magnitudes: two would see other numbers under a policy that perturbs operands.
    row_at = inverse(place.squeeze(2)).unsqueeze(2)
    magnitude = torch.where(place >= j, column.abs(), -1.0)
    pivot_place = magnitude.gather(1, row_at).argmax(1, keepdim=True)
    row = c.gather(1, row_at.gather(1, pivot_place).expand(-1, 1, c.shape[2]))
    pivot = row.index_select(2, j)
    moved = torch.where(place == pivot_place, j, torch.where(place == j, pivot_place, place))
    below = moved > j
    # A pivot of zero has zeros below it.
    factor = torch.where(pivot == 0, column, column / pivot)
    eliminated = torch.where(columns > j, c - factor * row, torch.where(columns == j, factor, c))
    return [torch.where(below, eliminated, c), moved, pivot_place]


def _panel(c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return L and U of a few columns in one, the row of c that each row was, and the place of each pivot."""
    matrices, rows, width = c.shape
    place = torch.arange(rows, device=c.device).unsqueeze(1).expand(matrices, rows, 1)
    columns = torch.arange(width, device=c.device)
    packed, place, pivots = scan(_eliminate, [c, place.clone()], [numbers(width, c)], [columns])
    order = inverse(place.squeeze(2))
    return rows_of(packed, order), order, pivots.reshape(width, matrices).mT


def inverse(order: Tensor) -> Tensor:
    """Return the inverse permutations: [matrices, n]."""
    places = torch.arange(order.shape[1], device=order.device).expand(order.shape)
    return torch.zeros_like(order).scatter(1, order, places)


def rows_of(x: Tensor, order: Tensor) -> Tensor:
    """Return the rows of each matrix in an order: [matrices, n]."""
    return x.gather(1, order.unsqueeze(2).expand(-1, -1, x.shape[2]))


def factors(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return L and U in one, the pivots as LAPACK counts them, and the row of a that each row of the product is.

    a: [matrices, m, n]; the pivots are int32 of shape [matrices, min(m, n)], the rows int64 of shape [matrices, m].
    """
    matrices, m, n = a.shape
    order = torch.arange(m, device=a.device).expand(matrices, m)
    rest, lower, upper = a, a[:, :, :0], a[:, :0]
    done, pivots = [], []
    for begin in range(0, min(m, n), triangular.BLOCK):
        width = min(triangular.BLOCK, min(m, n) - begin)
        packed, exchanged, places = _panel(less_product(rest[:, :, :width], lower, upper[:, :, :width]))
        lower, rest = rows_of(lower, exchanged), rows_of(rest, exchanged)
        order = torch.cat([order[:, :begin], order[:, begin:].gather(1, exchanged)], 1)
        top = packed[:, :width]
        right = less_product(rest[:, :width, width:], lower[:, :width], upper[:, :, width:])
        if right.shape[2]:
            right = solve_lower(top, right, True)
        done.append(torch.cat([lower[:, :width], top, right], 2))
        pivots.append(places + (begin + 1))
        lower = torch.cat([lower[:, width:], packed[:, width:]], 2)
        upper, rest = torch.cat([upper[:, :, width:], right], 1), rest[:, width:, width:]
    if not done:
        return a.clone(), order.new_zeros([matrices, 0], dtype=torch.int32), order
    done.append(torch.cat([lower, rest], 2))
    return torch.cat(done, 1), torch.cat(pivots, 1).to(torch.int32), order


def _solved(packed: Tensor, order: Tensor, b: Tensor, transposed: bool) -> Tensor:
    """Return x of ``a x = b``, or of ``a^T x = b``, for a of which ``factors`` returned these."""
    if not transposed:
        return solve_upper(packed, solve_lower(packed, rows_of(b, order), True), False)
    return rows_of(solve_upper(packed.mT, solve_lower(packed.mT, b, False), True), inverse(order))


def _zero_pivot(packed: Tensor) -> Tensor:
    return first_of(packed.diagonal(0, -2, -1) == 0)


@formula(aten.linalg_lu_factor_ex.default)
def lu_factor_ex(a: Tensor, *, pivot: bool = True, check_errors: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """lu_factor(a) = (l, u): l_ij = c_ij / u_jj, c_ik = c_ik - l_ij * u_jk, u_ik = c_ik; c = a - sum(l_ih u_hk)"""
    if not pivot:
        raise RuntimeError("linalg.lu_factor: without pivoting it is not implemented on the CPU: pass pivot=True.")
    packed, pivots, _ = factors(flat(a))
    packed = packed.reshape(a.shape)
    info = _zero_pivot(packed)
    if check_errors:
        aten._linalg_check_errors(info, "torch.linalg.lu_factor_ex", is_matrix=a.dim() == 2)
    return packed, pivots.reshape(*a.shape[:-2], pivots.shape[-1]), info


@formula(aten.linalg_lu.default)
def lu(a: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """lu(a) = (p, l, u) of lu_factor(a)"""
    packed, pivots, _ = lu_factor_ex(a, pivot=pivot)
    return torch.lu_unpack(packed, pivots)


@formula(aten.linalg_lu_solve.default)
def lu_solve(packed: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False) -> Tensor:
    """lu_solve(l, u, p, b) = solve_triangular(u, solve_triangular(l, p^T b))"""
    exchanges = torch.lu_unpack(packed, pivots, unpack_data=False)[0]
    right = b if left else b.mT
    packed, right = broadcast(packed, right)
    exchanges = exchanges.expand(*packed.shape[:-2], *exchanges.shape[-2:])
    if packed.shape[-1] == 0:
        return b.clone()
    order = flat(exchanges).argmax(1)
    x = _solved(flat(packed), order, flat(right), adjoint == left).reshape(right.shape)
    return x if left else x.mT


@formula(aten._linalg_solve_ex.default)
def solve_ex(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """solve(a, b) = lu_solve(lu_factor(a), b)"""
    vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    columns = b.unsqueeze(-1) if vector else b
    packed, pivots, order = factors(flat(a))
    wide, right = broadcast(a, columns if left else columns.mT)
    packed = packed.reshape(a.shape)
    matrices = flat(packed.expand(wide.shape))
    order = order.reshape(a.shape[:-1]).expand(wide.shape[:-1]).reshape(matrices.shape[:2])
    x = _solved(matrices, order, flat(right), not left).reshape(right.shape)
    x = x if left else x.mT
    info = _zero_pivot(packed)
    if check_errors:
        aten._linalg_check_errors(info, "torch.linalg.solve_ex", is_matrix=a.dim() == 2)
    return x.squeeze(-1) if vector else x, packed, pivots.reshape(a.shape[:-1]), info


@formula(aten.linalg_inv_ex.default)
def inv_ex(a: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """inv(a) = solve(a, I)"""
    matrices = flat(a)
    packed, _, order = factors(matrices)
    info = _zero_pivot(packed).reshape(a.shape[:-2])
    if check_errors:
        aten._linalg_check_errors(info, "torch.linalg.inv_ex", is_matrix=a.dim() == 2)
    return _solved(packed, order, identity_like(matrices), False).reshape(a.shape), info


def _odd_exchanges(pivots: Tensor) -> Tensor:
    """Return whether the number of exchanges is odd, for each matrix, the number of the elements that differ."""
    return (pivots != torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)).sum(-1) % 2 == 1


@formula(aten._linalg_det.default)
def det(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """det(a) = prod(u_jj), negated for an odd number of exchanges"""
    packed, pivots, _ = _of_derivatives(a)
    product = packed.diagonal(0, -2, -1).prod(-1)
    return torch.where(_odd_exchanges(pivots), -product, product), packed, pivots


@formula(aten._linalg_slogdet.default)
def slogdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """slogdet(a) = sum(log(|u_jj|)), and the sign of prod(u_jj), negated for an odd number of exchanges"""
    packed, pivots, _ = _of_derivatives(a)
    diagonal = packed.diagonal(0, -2, -1)
    odd = _odd_exchanges(pivots) ^ ((diagonal < 0).sum(-1) % 2 == 1)
    one = a.new_ones([])
    sign = torch.where(((diagonal == 0) | diagonal.isnan()).any(-1), 0.0, torch.where(odd, -one, one))
    return sign, diagonal.abs().log().sum(-1), packed, pivots


def _of_derivatives(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return lu_factor_ex of the matrix whose factors PyTorch's derivatives of determinants read."""
    found: tuple[Tensor, Tensor, Tensor] = lu_factor_ex(a.mT if a.is_contiguous() else a)
    return found


# PyTorch factors a contiguous matrix transposed, and so do its derivatives. Bits must not depend on strides: what these
# functions are given is never contiguous, unless it has one element.
def _columnwise(a: Tensor) -> Tensor:
    return a.mT.contiguous().mT if isinstance(a, Tensor) and a.dim() > 1 else a


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with its first argument, the matrices, column by column."""
    if args:
        return function(_columnwise(args[0]), *args[1:], **kwargs)
    return function(**{name: _columnwise(x) if name in ("A", "input", "self") else x for name, x in kwargs.items()})


@formula(torch.linalg.det, torch.det, torch.Tensor.det)
def linalg_det(*args: Any, **kwargs: Any) -> Any:
    """linalg.det(a) = det(a), of the columns of a"""
    return _called(torch.linalg.det, args, kwargs)


@formula(torch.linalg.slogdet, torch.slogdet, torch.Tensor.slogdet)
def linalg_slogdet(*args: Any, **kwargs: Any) -> Any:
    """linalg.slogdet(a) = slogdet(a), of the columns of a"""
    return _called(torch.linalg.slogdet, args, kwargs)


@formula(torch.logdet, torch.Tensor.logdet)
def logdet(*args: Any, **kwargs: Any) -> Any:
    """logdet(a) = slogdet(a).logabsdet, NaN for a negative sign"""
    return _called(torch.logdet, args, kwargs)
