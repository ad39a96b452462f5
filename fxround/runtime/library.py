"""The torch operators ``fxround::...``: functional, row-major results, text for every rounding.

What is true here. A graph node carries its whole arithmetic in its arguments: a program or a rounding as
text, the run-time tensor ``rng`` = (seed, sample), and the number of the node. Calls are pure: the same
arguments give the same bits. Results are row-major whatever the operands' strides, in the kernels and in
their fake counterparts alike.

Why it is safe. ``define`` + ``impl`` + a fake kernel pass ``opcheck`` and survive export, deepcopy and pickle;
no operator has an autograd formula, since graphs are differentiated before they are lowered.

    before   torch.mm(a, b)
    after    torch.ops.fxround.matmul(a, b, "binary32/stochastic/inf", "binary32/nearest_even/inf", rng, 7)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fxround.errors import FxroundError
from fxround.kernel import Program, contract_kernel, cumsum_kernel, sum_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.modes import Rounding
from fxround.numerics.orders import Order
from fxround.runtime.convolution import output_size, transposed_as_plain, windows_of
from fxround.runtime.execute import Draw, Right, run_contract, run_map, run_reduce, run_scan, storage_of

NAMESPACE: Final = "fxround"
_LIBRARY: Final = torch.library.Library(NAMESPACE, "DEF")

_parse_program = lru_cache(maxsize=4096)(Program.parse)
_parse_rounding = lru_cache(maxsize=1024)(Rounding.parse)
_parse_accumulation = lru_cache(maxsize=1024)(Accumulation.parse)
_parse_order = lru_cache(maxsize=64)(Order.parse)


def pointwise(xs: Sequence[Tensor], program: str, dtype: torch.dtype, rng: Tensor, node: int) -> Tensor:
    """A program of rounded pointwise operations over operands that broadcast."""
    if not xs:
        raise ValueError(f"{program}: a pointwise operator needs at least one tensor operand")
    return run_map(_parse_program(program), xs, dtype, Draw.of(rng, node))


def _pointwise_fake(xs: Sequence[Tensor], program: str, dtype: torch.dtype, rng: Tensor, node: int) -> Tensor:
    shape = torch.broadcast_shapes(*(x.shape for x in xs))
    return xs[0].new_empty(shape, dtype=dtype)


def matmul(a: Tensor, b: Tensor, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    """(M, K) x (K, N), or the same with a batch in front: k ascending from +0, one rounding a step."""
    _check_matmul(a, b)
    draw = Draw.of(rng, node)
    loads = (storage_of(a, "matmul's first operand"), storage_of(b, "matmul's second operand"))
    kernel = contract_kernel(_parse_accumulation(accumulate), _parse_rounding(rounding), loads, loads[0])
    if a.dim() == 3:
        return run_contract(kernel, a.detach(), Right.matrices(b.detach()), 0, draw)
    return run_contract(kernel, a.detach()[None], Right.matrices(b.detach()[None]), 1, draw)[0]


def _check_matmul(a: Tensor, b: Tensor) -> None:
    if a.dim() not in (2, 3) or a.dim() != b.dim():
        raise ValueError(f"matmul takes two matrices or two batches of them, got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"matmul of {tuple(a.shape)} with {tuple(b.shape)}: inner sizes or batches differ")
    if a.dtype != b.dtype:
        raise TypeError(f"matmul of {a.dtype} with {b.dtype}: expected one dtype (cast one of them first)")


def _matmul_fake(a: Tensor, b: Tensor, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    return a.new_empty([*a.shape[:-1], b.shape[-1]])


def convolution(
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    accumulate: str,
    rounding: str,
    rng: Tensor,
    node: int,
) -> Tensor:
    """Convolution in 1, 2 or 3 dimensions without bias: k over (input channel, kernel position), ascending."""
    size = output_size(x, w, stride, padding, dilation, transposed, output_padding, groups)
    if x.dtype != w.dtype:
        raise TypeError(f"convolution of {x.dtype} with {w.dtype} weights: expected one dtype")
    loads = (storage_of(w, "convolution's weight"), storage_of(x, "convolution's input"))
    kernel = contract_kernel(_parse_accumulation(accumulate), _parse_rounding(rounding), loads, loads[1])
    x, w = x.detach(), w.detach()
    if transposed:
        x, w, stride, padding = transposed_as_plain(x, w, stride, padding, dilation, output_padding, groups)
    windows = windows_of(x, w, stride, padding, dilation, groups)
    weights = w.reshape(groups, w.shape[0] // groups, w.shape[1:].numel())
    return run_contract(kernel, weights, windows, groups, Draw.of(rng, node)).reshape(size)


def _convolution_fake(
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    accumulate: str,
    rounding: str,
    rng: Tensor,
    node: int,
) -> Tensor:
    return x.new_empty(output_size(x, w, stride, padding, dilation, transposed, output_padding, groups))


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
    """The sum over ``dims`` (row-major order of the reduced elements), each addition rounded."""
    reduced = _dims(x, dims)
    storage = storage_of(x, "sum's operand")
    kernel = sum_kernel(_parse_order(order), _parse_rounding(accumulate), _parse_rounding(rounding), storage, storage)
    flat = _as_outer_length_inner(x, reduced)
    return run_reduce(kernel, flat, Draw.of(rng, node)).reshape(_reduced_shape(x, reduced, keepdim))


def _as_outer_length_inner(x: Tensor, reduced: list[int]) -> Tensor:
    """(outer, length, inner): in place where the reduced dimensions are neighbours, else moved to the end."""
    kept = [d for d in range(x.dim()) if d not in reduced]
    if reduced and reduced == list(range(reduced[0], reduced[-1] + 1)):
        outer, inner = x.shape[: reduced[0]].numel(), x.shape[reduced[-1] + 1 :].numel()
        return x.reshape(outer, x.shape[reduced[0] : reduced[-1] + 1].numel(), inner)
    moved = x.permute((*kept, *reduced))
    return moved.reshape(moved.shape[: len(kept)].numel(), moved.shape[len(kept) :].numel(), 1)


def _reduced_shape(x: Tensor, reduced: list[int], keepdim: bool) -> list[Any]:
    if keepdim:
        return [1 if d in reduced else s for d, s in enumerate(x.shape)]
    return [s for d, s in enumerate(x.shape) if d not in reduced]


def _sum_fake(
    x: Tensor, dims: Sequence[int], keepdim: bool, order: str, accumulate: str, rounding: str, rng: Tensor, node: int
) -> Tensor:
    return x.new_empty(_reduced_shape(x, _dims(x, dims), keepdim))


def cumsum(x: Tensor, dim: int, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    """Every prefix sum along ``dim``, k ascending from +0."""
    storage = storage_of(x, "cumsum's operand")
    kernel = cumsum_kernel(_parse_rounding(accumulate), _parse_rounding(rounding), storage, storage)
    flat = _as_outer_length_inner(x, _dims(x, [dim]))
    return run_scan(kernel, flat, Draw.of(rng, node)).reshape(x.shape)


def _cumsum_fake(x: Tensor, dim: int, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    return x.new_empty(x.shape)


def _refuse_cuda(*args: Any, **kwargs: Any) -> Tensor:
    raise FxroundError("fxround's kernels run on the CPU; got a CUDA tensor: move the model and its inputs to 'cpu'")


_TAIL: Final = "str accumulate, str rounding, Tensor rng, int node) -> Tensor"
_OPERATORS: Final[tuple[tuple[str, Callable[..., Tensor], Callable[..., Tensor]], ...]] = (
    (
        "pointwise(Tensor[] xs, str program, ScalarType dtype, Tensor rng, int node) -> Tensor",
        pointwise,
        _pointwise_fake,
    ),
    (f"matmul(Tensor a, Tensor b, {_TAIL}", matmul, _matmul_fake),
    (
        "convolution(Tensor x, Tensor w, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
        f"SymInt[] output_padding, SymInt groups, {_TAIL}",
        convolution,
        _convolution_fake,
    ),
    (f"sum(Tensor x, int[] dims, bool keepdim, str order, {_TAIL}", sum_, _sum_fake),
    (f"cumsum(Tensor x, int dim, {_TAIL}", cumsum, _cumsum_fake),
)

for _schema, _kernel, _fake in _OPERATORS:
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _name = _schema.partition("(")[0]
    _LIBRARY.impl(_name, _kernel, "CPU")
    _LIBRARY.impl(_name, _refuse_cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_LIBRARY)
