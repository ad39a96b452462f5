"""The torch operators that reduce: sum, prod, their scans, scatter_add and accumulating index_put.

Several reduced dimensions count as one, in row-major order of their elements. Contributions to one destination are
added in the order of their source. Results are row-major. As in ``library``, operators are pure and functional, their
whole arithmetic is in their arguments, and a kernel and its fake counterpart make the same checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from fxround.kernels import parsed
from fxround.kernels.shapes import Exact, Reduce, Scan, Scatter
from fxround.kernels.specialize import cumprod_kernel, cumsum_kernel, prod_kernel, scatter_kernel, sum_kernel
from fxround.numerics.modes import Rounding
from fxround.numerics.storage import Storage
from fxround.runtime.cpu.exact_sum import run_exact
from fxround.runtime.cpu.pointwise import Draw, require_state, storage_of, stored_as
from fxround.runtime.cpu.reduction import run_reduce, run_scan
from fxround.runtime.cpu.scatter import check_put, check_scatter, put_rows, run_scatter, scatter_rows

K = TypeVar("K")


def _dims(x: Tensor, dims: Sequence[int]) -> list[int]:
    """The dimensions as non-negative numbers, ascending, each once; all of them if none is named."""
    wanted = list(dims) or list(range(x.dim()))
    if any(not -max(1, x.dim()) <= d < max(1, x.dim()) for d in wanted):
        raise IndexError(f"dims {list(dims)} of a tensor with {x.dim()} dimensions: out of range")
    if x.dim() == 0:
        return []
    found = sorted(d % x.dim() for d in wanted)
    if len(set(found)) != len(found):
        raise ValueError(f"dims {list(dims)} name a dimension twice")
    return found


def _sum_kernel(dtype: torch.dtype, order: str, accumulate: str, rounding: str) -> Reduce | Exact:
    """The kernel of a sum over elements of this dtype."""
    storage = stored_as(dtype, "sum's operand")
    return sum_kernel(parsed.order(order), parsed.rounding(accumulate), parsed.rounding(rounding), storage, storage)


def _line_kernel(
    make: Callable[[Rounding, Rounding, Storage, Storage], K], what: str, dtype: torch.dtype, texts_: tuple[str, str]
) -> K:
    """The kernel of prod or of a scan; ``texts_`` are the roundings of the steps and of the results."""
    accumulate, rounding = map(parsed.rounding, texts_)
    storage = stored_as(dtype, f"{what}'s operand")
    return make(accumulate, rounding, storage, storage)


def sum_(
    x: Tensor, dims: Sequence[int], keepdim: bool, order: str, accumulate: str, rounding: str, rng: Tensor, node: int
) -> Tensor:
    """The sum over ``dims``, each addition rounded; under the order ``exact``, the exact sum rounded once."""
    reduced = _dims(x, dims)
    storage_of(x, "sum's operand")
    kernel = _sum_kernel(x.dtype, order, accumulate, rounding)
    draw = Draw.of(rng, node)
    out = run_exact(kernel, x, draw, reduced) if isinstance(kernel, Exact) else run_reduce(kernel, x, draw, reduced)
    return out.reshape(_reduced_shape(x, reduced, keepdim))


def _sum_fake(
    x: Tensor, dims: Sequence[int], keepdim: bool, order: str, accumulate: str, rounding: str, rng: Tensor, node: int
) -> Tensor:
    _sum_kernel(x.dtype, order, accumulate, rounding)
    require_state(rng)
    return x.new_empty(_reduced_shape(x, _dims(x, dims), keepdim))


def _reduced_shape(x: Tensor, reduced: list[int], keepdim: bool) -> list[Any]:
    if keepdim:
        return [1 if d in reduced else s for d, s in enumerate(x.shape)]
    return [s for d, s in enumerate(x.shape) if d not in reduced]


def prod(
    x: Tensor, dims: Sequence[int], keepdim: bool, accumulate: str, rounding: str, rng: Tensor, node: int
) -> Tensor:
    """The product over ``dims``, k ascending from 1."""
    reduced = _dims(x, dims)
    storage_of(x, "prod's operand")
    kernel = _line_kernel(prod_kernel, "prod", x.dtype, (accumulate, rounding))
    return run_reduce(kernel, x, Draw.of(rng, node), reduced).reshape(_reduced_shape(x, reduced, keepdim))


def _prod_fake(
    x: Tensor, dims: Sequence[int], keepdim: bool, accumulate: str, rounding: str, rng: Tensor, node: int
) -> Tensor:
    _line_kernel(prod_kernel, "prod", x.dtype, (accumulate, rounding))
    require_state(rng)
    return x.new_empty(_reduced_shape(x, _dims(x, dims), keepdim))


def cumsum(x: Tensor, dim: int, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    """Every prefix sum along ``dim``, k ascending from +0."""
    storage_of(x, "cumsum's operand")
    return _scan(_line_kernel(cumsum_kernel, "cumsum", x.dtype, (accumulate, rounding)), x, dim, Draw.of(rng, node))


def cumprod(x: Tensor, dim: int, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    """Every prefix product along ``dim``, k ascending from 1."""
    storage_of(x, "cumprod's operand")
    return _scan(_line_kernel(cumprod_kernel, "cumprod", x.dtype, (accumulate, rounding)), x, dim, Draw.of(rng, node))


def _scan(kernel: Scan, x: Tensor, dim: int, draw: Draw) -> Tensor:
    (axis,) = _dims(x, [dim]) or (0,)
    return run_scan(kernel, x if x.dim() else x.reshape(1), draw, axis).reshape(x.shape)


def _scan_fake(x: Tensor, dim: int, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    # Running sums and running products accept the same roundings.
    _line_kernel(cumsum_kernel, "a scan", x.dtype, (accumulate, rounding))
    _dims(x, [dim])
    require_state(rng)
    return x.new_empty(x.shape)


def scatter_add(self: Tensor, dim: int, index: Tensor, src: Tensor, accumulate: str, rng: Tensor, node: int) -> Tensor:
    """``self`` with src[i, j, ...] added at index[i, j, ...] along ``dim``, in index order of src."""
    kernel = _scatter_kernel(self.dtype, accumulate)
    check_scatter(self, dim, index, src)
    for x, what in ((self, "scatter_add's destination"), (src, "scatter_add's source")):
        storage_of(x, what)
    return run_scatter(kernel, self, scatter_rows(self, dim, index, src), Draw.of(rng, node))


def _scatter_add_fake(
    self: Tensor, dim: int, index: Tensor, src: Tensor, accumulate: str, rng: Tensor, node: int
) -> Tensor:
    _scatter_kernel(self.dtype, accumulate)
    check_scatter(self, dim, index, src)
    require_state(rng)
    return self.new_empty(self.shape)


def index_put(
    self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: str, rng: Tensor, node: int
) -> Tensor:
    """``self`` with values added at the indexed places, in index order of values."""
    kernel = _scatter_kernel(self.dtype, accumulate)
    check_put(self, indices, values)
    for x, what in ((self, "index_put's destination"), (values, "index_put's values")):
        storage_of(x, what)
    return run_scatter(kernel, self, put_rows(self, indices, values), Draw.of(rng, node))


def _index_put_fake(
    self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: str, rng: Tensor, node: int
) -> Tensor:
    _scatter_kernel(self.dtype, accumulate)
    check_put(self, indices, values)
    require_state(rng)
    return self.new_empty(self.shape)


def _scatter_kernel(dtype: torch.dtype, accumulate: str) -> Scatter:
    return scatter_kernel(parsed.rounding(accumulate), stored_as(dtype, "the destination"))


_STEPS: Final = "str accumulate, Tensor rng, int node) -> Tensor"
_STORED: Final = "str accumulate, str rounding, Tensor rng, int node) -> Tensor"
OPERATORS: Final[tuple[tuple[str, Callable[..., Tensor], Callable[..., Tensor]], ...]] = (
    (f"sum(Tensor x, int[] dims, bool keepdim, str order, {_STORED}", sum_, _sum_fake),
    (f"prod(Tensor x, int[] dims, bool keepdim, {_STORED}", prod, _prod_fake),
    (f"cumsum(Tensor x, int dim, {_STORED}", cumsum, _scan_fake),
    (f"cumprod(Tensor x, int dim, {_STORED}", cumprod, _scan_fake),
    (f"scatter_add(Tensor self, int dim, Tensor index, Tensor src, {_STEPS}", scatter_add, _scatter_add_fake),
    (f"index_put(Tensor self, Tensor?[] indices, Tensor values, {_STEPS}", index_put, _index_put_fake),
)
