"""The torch operators that reduce: sum, prod, their scans, scatter_add and accumulating index_put.

What is true here. Several reduced dimensions are one, in row-major order of their elements. Contributions to
one destination are added in the order of their source. Results are row-major.

Why it is safe. As ``library`` says: pure, functional, the arithmetic whole in the arguments.

    before   torch.sum(x, [0, 2])
    after    torch.ops.fxround.sum(x, [0, 2], False, "lanes:16", "binary32/stochastic/inf", ..., rng, 4)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from fxround.kernel import Exact, Scan
from fxround.runtime import texts
from fxround.runtime.exact import run_exact
from fxround.runtime.execute import Draw, storage_of
from fxround.runtime.reducing import run_reduce, run_scan
from fxround.runtime.scatter import Contributions, put_rows, run_scatter, scatter_rows
from fxround.specialize import cumprod_kernel, cumsum_kernel, prod_kernel, scatter_kernel, sum_kernel


def _dims(x: Tensor, dims: Sequence[int]) -> list[int]:
    """Non-negative, ascending, each once; all of them where none is named."""
    wanted = list(dims) or list(range(x.dim()))
    if any(not -max(1, x.dim()) <= d < max(1, x.dim()) for d in wanted):
        raise IndexError(f"dims {list(dims)} of a tensor with {x.dim()} dimensions: out of range")
    if x.dim() == 0:
        return []
    found = sorted(d % x.dim() for d in wanted)
    if len(set(found)) != len(found):
        raise ValueError(f"dims {list(dims)} name a dimension twice")
    return found


def sum_(
    x: Tensor, dims: Sequence[int], keepdim: bool, order: str, accumulate: str, rounding: str, rng: Tensor, node: int
) -> Tensor:
    """The sum over ``dims``, each addition rounded; under the order ``exact``, the exact sum once."""
    reduced = _dims(x, dims)
    storage = storage_of(x, "sum's operand")
    kernel = sum_kernel(texts.order(order), texts.rounding(accumulate), texts.rounding(rounding), storage, storage)
    draw = Draw.of(rng, node)
    out = run_exact(kernel, x, draw, reduced) if isinstance(kernel, Exact) else run_reduce(kernel, x, draw, reduced)
    return out.reshape(_reduced_shape(x, reduced, keepdim))


def _reduced_shape(x: Tensor, reduced: list[int], keepdim: bool) -> list[Any]:
    if keepdim:
        return [1 if d in reduced else s for d, s in enumerate(x.shape)]
    return [s for d, s in enumerate(x.shape) if d not in reduced]


def prod(
    x: Tensor, dims: Sequence[int], keepdim: bool, accumulate: str, rounding: str, rng: Tensor, node: int
) -> Tensor:
    """The product over ``dims``, k ascending from 1."""
    reduced = _dims(x, dims)
    storage = storage_of(x, "prod's operand")
    kernel = prod_kernel(texts.rounding(accumulate), texts.rounding(rounding), storage, storage)
    return run_reduce(kernel, x, Draw.of(rng, node), reduced).reshape(_reduced_shape(x, reduced, keepdim))


def _reduced_fake(x: Tensor, dims: Sequence[int], keepdim: bool, *rest: Any) -> Tensor:
    return x.new_empty(_reduced_shape(x, _dims(x, dims), keepdim))


def cumsum(x: Tensor, dim: int, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    """Every prefix sum along ``dim``, k ascending from +0."""
    storage = storage_of(x, "cumsum's operand")
    kernel = cumsum_kernel(texts.rounding(accumulate), texts.rounding(rounding), storage, storage)
    return _scan(kernel, x, dim, Draw.of(rng, node))


def cumprod(x: Tensor, dim: int, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    """Every prefix product along ``dim``, k ascending from 1."""
    storage = storage_of(x, "cumprod's operand")
    kernel = cumprod_kernel(texts.rounding(accumulate), texts.rounding(rounding), storage, storage)
    return _scan(kernel, x, dim, Draw.of(rng, node))


def _scan(kernel: Scan, x: Tensor, dim: int, draw: Draw) -> Tensor:
    (axis,) = _dims(x, [dim]) or (0,)
    return run_scan(kernel, x if x.dim() else x.reshape(1), draw, axis).reshape(x.shape)


def scatter_add(self: Tensor, dim: int, index: Tensor, src: Tensor, accumulate: str, rng: Tensor, node: int) -> Tensor:
    """self with src[i, j, ...] added at index[i, j, ...] along ``dim``, in index order of src."""
    return _scatter(self, scatter_rows(self, dim, index, src), accumulate, rng, node)


def index_put(
    self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: str, rng: Tensor, node: int
) -> Tensor:
    """self with values added at the indexed places, in index order of values."""
    return _scatter(self, put_rows(self, indices, values), accumulate, rng, node)


def _scatter(x: Tensor, contributions: Contributions, accumulate: str, rng: Tensor, node: int) -> Tensor:
    kernel = scatter_kernel(texts.rounding(accumulate), storage_of(x, "the destination"))
    return run_scatter(kernel, x, contributions, Draw.of(rng, node))


def _same_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


_STEPS: Final = "str accumulate, Tensor rng, int node) -> Tensor"
_STORED: Final = "str accumulate, str rounding, Tensor rng, int node) -> Tensor"
OPERATORS: Final[tuple[tuple[str, Callable[..., Tensor], Callable[..., Tensor]], ...]] = (
    (f"sum(Tensor x, int[] dims, bool keepdim, str order, {_STORED}", sum_, _reduced_fake),
    (f"prod(Tensor x, int[] dims, bool keepdim, {_STORED}", prod, _reduced_fake),
    (f"cumsum(Tensor x, int dim, {_STORED}", cumsum, _same_fake),
    (f"cumprod(Tensor x, int dim, {_STORED}", cumprod, _same_fake),
    (f"scatter_add(Tensor self, int dim, Tensor index, Tensor src, {_STEPS}", scatter_add, _same_fake),
    (f"index_put(Tensor self, Tensor?[] indices, Tensor values, {_STEPS}", index_put, _same_fake),
)
