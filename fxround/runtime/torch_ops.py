"""The kernels of the torch operators ``fxround::...``, attached to the dialect's declarations by device.

The operators are pure: the same arguments give the same bits. Their schemas and fake counterparts are in
``graph.dialect``; both sides check the same numbers by the same functions, so they agree on shapes or both refuse. The
operators pass ``opcheck`` and survive export, deepcopy and pickle. None has an autograd formula, since graphs are
differentiated before they are lowered.

    torch.ops.fxround.matmul(a, b, "binary32/stochastic/inf", "binary32/nearest_even/inf", rng, 7)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from fxround.graph import dialect
from fxround.graph.dialect import (
    CALLS,
    CONTRACTIONS,
    LIBRARY,
    AddProcesses,
    Call,
    Fused,
    Pointwise,
    StateOfPart,
    require_state,
)
from fxround.runtime.blocks import block_expand, block_maximum, block_percentile, block_sum, hadamard
from fxround.runtime.buffers import out_of_memory
from fxround.runtime.draw import NO_KEY, Draw
from fxround.runtime.lengths import packed_lengths
from fxround.runtime.processes import gathered
from fxround.runtime.reductions import REDUCTIONS
from fxround.runtime.run import run_kernel
from fxround.runtime.target import target_of

R = TypeVar("R")


def add_processes(call: AddProcesses[Tensor]) -> Tensor:
    """Gather the accumulators of all processes, add them in the order of the tree, and round the sum."""
    kernel = call.kernel(call.loads())
    parts = gathered(call.x, call.group, call.processes)
    if not kernel.draws:
        return run_kernel(kernel, parts, NO_KEY)[0]
    draw = Draw.of(call.rng, call.node)
    if draw.part is None:
        raise ValueError("an addition of processes that draws needs the random state of a part of the whole")
    return run_kernel(draw.of_part(kernel), parts, draw.key())[0]


def state_of_part(call: StateOfPart[Tensor]) -> Tensor:
    """The random state of a part of a result."""
    require_state(call.rng, parts=False)
    return torch.cat([call.rng, torch.tensor(call.part, dtype=torch.int64)])


def _by_position(cls: type[Call[Tensor]], function: Callable[[Any], R]) -> Callable[..., R]:
    """The function of the operator's arguments, as PyTorch's dispatcher and a scheduled graph call it."""

    def positional(*args: Any) -> R:
        return function(cls.of(args))

    positional.__name__ = positional.__qualname__ = cls.name
    return positional


_FUNCTIONS: Final[dict[type[Call[Any]], Callable[[Any], Any]]] = {
    Pointwise: lambda call: target_of(call.xs).pointwise(call),
    Fused: lambda call: target_of(call.xs).fused(call),
    **{CALLS[overload]: lambda call: target_of(call.operands).contraction(call) for overload in CONTRACTIONS},
    dialect.AddProcesses: add_processes,
    dialect.BlockExpand: block_expand,
    dialect.BlockMaximum: block_maximum,
    dialect.BlockPercentile: block_percentile,
    dialect.BlockSum: block_sum,
    dialect.HadamardTransform: hadamard,
    dialect.Iterations: lambda call: target_of([call.rng]).iterations(call),
    dialect.PackedLengths: packed_lengths,
    dialect.StateOfPart: state_of_part,
    **REDUCTIONS,
}


def function_of(cls: type[Call[Any]]) -> Callable[[Any], Any]:
    """Return the function of a class's calls, which runs where the operands are."""
    function = _FUNCTIONS[cls]

    def run(call: Any) -> Any:
        try:
            return function(call)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error, cls.name, call.operands) from error

    return run


def gather(x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    """The elements of x that indices choose along a dimension; ``sparse_grad`` is for a gradient that none asks for."""
    return target_of([x, index]).gather(x, dim, index)


def max_pool2d(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1,
    ceil_mode: bool = False,
) -> Sequence[Tensor]:
    """The largest elements of windows, and their indices."""
    return target_of([x]).max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)


# The function of each operator, for callers that need no dispatcher.
KERNELS: Final = {cls.overload: _by_position(cls, function_of(cls)) for cls in CALLS.values()}

# PyTorch's operators that move values, and functions of ours that move them faster.
MOVEMENTS: Final = {torch.ops.aten.gather.default: gather}
# The same for operators that choose values, whose results are on memory of PyTorch's allocator.
CHOICES: Final = {torch.ops.aten.max_pool2d_with_indices.default: max_pool2d}

for _overload, _kernel in KERNELS.items():
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(CALLS[_overload].name, _kernel, _device)
