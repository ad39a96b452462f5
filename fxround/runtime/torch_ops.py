"""The torch operators ``fxround::...``: functional, with row-major results and a text for every rounding.

A graph node carries its whole arithmetic in its arguments: a program or a rounding as text, the run-time tensor ``rng``
= (seed, sample), and the number of the node. Calls are pure: the same arguments give the same bits. Results are
row-major whatever the operands' strides, in the kernels and in their fake counterparts alike. Both check the same
numbers by the same functions, so they agree on shapes or both refuse. Operators defined with ``define``, ``impl`` and a
fake kernel pass ``opcheck`` and survive export, deepcopy and pickle. None has an autograd formula, since graphs are
differentiated before they are lowered.

    torch.ops.fxround.matmul(a, b, "binary32/stochastic/inf", "binary32/nearest_even/inf", rng, 7)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxround.errors import FxroundError, shown
from fxround.kernels import parsed
from fxround.kernels.shapes import Map
from fxround.numerics.storage import Storage
from fxround.runtime.cpu import reduction_ops
from fxround.runtime.cpu.contraction import Pending, contract_of
from fxround.runtime.cpu.convolution import (
    begin_convolution,
    begin_input_gradient,
    begin_weight_gradient,
    convolution,
    input_gradient,
    weight_gradient,
)
from fxround.runtime.cpu.long_programs import is_long, run_parts
from fxround.runtime.cpu.matmul import begin_matmul, check_matmul, matmul
from fxround.runtime.cpu.pointwise import (
    LOADS,
    NO_KEY,
    Draw,
    broadcast,
    dtype_of,
    loads_of,
    require_state,
    result_storage,
    run_kernel,
    stored_as,
)
from fxround.runtime.geometry import Geometry, require_one_dtype

NAMESPACE: Final = "fxround"
_LIBRARY: Final = torch.library.Library(NAMESPACE, "DEF")


def pointwise(xs: Sequence[Tensor], program: str, dtype: torch.dtype, rng: Tensor, node: int) -> Tensor:
    """Run a program of rounded pointwise operations over operands that broadcast."""
    loads, result = _loads(xs, program), result_storage(dtype)
    if is_long(program, loads, (result,)):
        return run_parts(program, xs, (result,), Draw.of(rng, node), None)[0]
    kernel = parsed.pointwise(program, loads, result)
    return run_kernel(kernel, xs, Draw.of(rng, node).key() if kernel.draws else NO_KEY)[0]


def _pointwise_fake(xs: Sequence[Tensor], program: str, dtype: torch.dtype, rng: Tensor, node: int) -> Tensor:
    loads, result = _loads_fake(xs, program), result_storage(dtype)
    if not is_long(program, loads, (result,)):
        parsed.pointwise(program, loads, result)
    require_state(rng)
    return xs[0].new_empty(broadcast("pointwise", *(x.shape for x in xs)), dtype=dtype)


def fused(xs: Sequence[Tensor], program: str, results: str, rng: Tensor, nodes: Sequence[int]) -> list[Tensor]:
    """Run a chain of rounded pointwise operations in one pass over memory: the bits of one call for each operation.

    results: how each result is stored, for example ``f32 bf16``. nodes: the number of each operation that draws, in
    order.
    """
    kernel = _fused_kernel(_loads(xs, program), program, results, nodes)
    if kernel is None:
        return run_parts(program, xs, parsed.storages(results), Draw.of(rng, 0), nodes)
    return run_kernel(kernel, xs, Draw.of(rng, 0).keys(nodes) if kernel.draws else NO_KEY)


def _fused_fake(xs: Sequence[Tensor], program: str, results: str, rng: Tensor, nodes: Sequence[int]) -> list[Tensor]:
    _fused_kernel(_loads_fake(xs, program), program, results, nodes)
    require_state(rng)
    shape = broadcast("fused", *(x.shape for x in xs))
    return [xs[0].new_empty(shape, dtype=dtype_of(storage)) for storage in parsed.storages(results)]


def _loads(xs: Sequence[Tensor], program: str) -> tuple[Storage, ...]:
    """How the operands are stored; ValueError if there are none."""
    if not xs:
        raise ValueError(f"{shown(program)}: a pointwise operator needs at least one tensor operand")
    return loads_of(xs)


def _loads_fake(xs: Sequence[Tensor], program: str) -> tuple[Storage, ...]:
    """The same from the dtypes alone."""
    if not xs:
        raise ValueError(f"{shown(program)}: a pointwise operator needs at least one tensor operand")
    return tuple(stored_as(x.dtype, f"operand {i}", LOADS) for i, x in enumerate(xs))


def _fused_kernel(loads: tuple[Storage, ...], program: str, results: str, nodes: Sequence[int]) -> Map | None:
    """The kernel; None for a program that runs in parts."""
    long = is_long(program, loads, parsed.storages(results))
    kernel, drawn = None if long else parsed.fused(program, loads, results), parsed.drawn(program)
    if len(nodes) < drawn:
        raise ValueError(f"{shown(program)} draws {drawn} times, got {len(nodes)} node numbers")
    return kernel


def _contraction_checked(dtype: torch.dtype, accumulate: str, rounding: str, rng: Tensor) -> None:
    """Check what the fake kernels of contractions check besides sizes."""
    storage = stored_as(dtype, "a contraction's operand")
    contract_of(accumulate, rounding, (storage, storage), storage)
    require_state(rng)


def _matmul_fake(a: Tensor, b: Tensor, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    check_matmul((a.shape, (), a.dtype), (b.shape, (), b.dtype))
    _contraction_checked(a.dtype, accumulate, rounding, rng)
    return a.new_empty([*a.shape[:-1], b.shape[-1]])


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
    geometry = Geometry.of(stride, padding, dilation, transposed, output_padding, groups)
    require_one_dtype("convolution", x.dtype, w.dtype)
    size = geometry.result_size(x.shape, w.shape)
    _contraction_checked(x.dtype, accumulate, rounding, rng)
    return x.new_empty(size)


def _input_gradient_fake(
    grad: Tensor,
    w: Tensor,
    size: Sequence[int],
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
    require_one_dtype("convolution's gradient", grad.dtype, w.dtype)
    Geometry.of(stride, padding, dilation, transposed, output_padding, groups).require_gradient(
        grad.shape, size, w.shape
    )
    _contraction_checked(grad.dtype, accumulate, rounding, rng)
    return grad.new_empty(size)


def _weight_gradient_fake(
    grad: Tensor,
    x: Tensor,
    size: Sequence[int],
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
    require_one_dtype("convolution's gradient", grad.dtype, x.dtype)
    Geometry.of(stride, padding, dilation, transposed, output_padding, groups).require_gradient(
        grad.shape, x.shape, size
    )
    _contraction_checked(grad.dtype, accumulate, rounding, rng)
    return grad.new_empty(size)


def _refuse_cuda(*args: Any, **kwargs: Any) -> Tensor:
    raise FxroundError("fxround's kernels run on the CPU; got a CUDA tensor: move the model and its inputs to 'cpu'")


_GEOMETRY: Final = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
)
_TAIL: Final = "str accumulate, str rounding, Tensor rng, int node) -> Tensor"
_OPERATORS: Final[tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...]] = (
    (
        "pointwise(Tensor[] xs, str program, ScalarType dtype, Tensor rng, int node) -> Tensor",
        pointwise,
        _pointwise_fake,
    ),
    ("fused(Tensor[] xs, str program, str results, Tensor rng, int[] nodes) -> Tensor[]", fused, _fused_fake),
    (f"matmul(Tensor a, Tensor b, {_TAIL}", matmul, _matmul_fake),
    (
        f"convolution(Tensor x, Tensor w, {_GEOMETRY}, {_TAIL}",
        convolution,
        _convolution_fake,
    ),
    (
        f"convolution_input_gradient(Tensor grad, Tensor w, SymInt[] size, {_GEOMETRY}, {_TAIL}",
        input_gradient,
        _input_gradient_fake,
    ),
    (
        f"convolution_weight_gradient(Tensor grad, Tensor x, SymInt[] size, {_GEOMETRY}, {_TAIL}",
        weight_gradient,
        _weight_gradient_fake,
    ),
    *reduction_ops.OPERATORS,
)

# The function of each operator, for callers that need no dispatcher.
KERNELS: Final[dict[Any, Callable[..., Any]]] = {}

for _schema, _kernel, _fake in _OPERATORS:
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _name = _schema.partition("(")[0]
    _LIBRARY.impl(_name, _kernel, "CPU")
    _LIBRARY.impl(_name, _refuse_cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_LIBRARY)
    KERNELS[getattr(torch.ops.fxround, _name).default] = _kernel

POINTWISE: Final = torch.ops.fxround.pointwise.default
FUSED: Final = torch.ops.fxround.fused.default

# The functions that begin a contraction, up to the point where the result's address is needed.
CONTRACTIONS: Final[dict[Any, Callable[..., Pending]]] = {
    torch.ops.fxround.matmul.default: begin_matmul,
    torch.ops.fxround.convolution.default: begin_convolution,
    torch.ops.fxround.convolution_input_gradient.default: begin_input_gradient,
    torch.ops.fxround.convolution_weight_gradient.default: begin_weight_gradient,
}
