"""The kernels of the torch operators ``fxround::...``, attached to the dialect's declarations by device.

The operators are pure: the same arguments give the same bits. Their schemas and fake counterparts are in
``graph.dialect``; both sides check the same numbers by the same functions, so they agree on shapes or both refuse. The
operators pass ``opcheck`` and survive export, deepcopy and pickle. None has an autograd formula, since graphs are
differentiated before they are lowered.

    torch.ops.fxround.matmul(a, b, "binary32/stochastic/inf", "binary32/nearest_even/inf", rng, 7)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from fxround.graph import dialect
from fxround.graph.dialect import (
    CALLS,
    LIBRARY,
    AddProcesses,
    Call,
    Fused,
    Pointwise,
    ProgramCall,
    StateOfPart,
    require_state,
)
from fxround.runtime.blocks import block_expand, block_maximum, block_percentile, block_sum, hadamard
from fxround.runtime.cpu import convolution, matmul, reduction_ops
from fxround.runtime.cpu.contraction import Pending
from fxround.runtime.cpu.long_programs import run_parts
from fxround.runtime.cpu.pointwise import run_kernel
from fxround.runtime.cuda import contraction as cuda_contraction
from fxround.runtime.cuda import pointwise as cuda_pointwise
from fxround.runtime.cuda import reduction as cuda_reduction
from fxround.runtime.cuda.launcher import out_of_memory, runs_texts
from fxround.runtime.draw import NO_KEY, Draw
from fxround.runtime.iterations import iterations
from fxround.runtime.lengths import packed_lengths
from fxround.runtime.operands import loads_of
from fxround.runtime.processes import gathered

R = TypeVar("R")


def pointwise(call: Pointwise[Tensor]) -> Tensor:
    """Run a program of rounded pointwise operations over operands that broadcast."""
    kernel = call.kernel(_loads(call))
    if kernel is None:
        return run_parts(call.program, call.xs, call.results, Draw.of(call.rng, call.node), None)[0]
    if not kernel.draws:
        return run_kernel(kernel, call.xs, NO_KEY)[0]
    draw = Draw.of(call.rng, call.node)
    return run_kernel(draw.of_part(kernel), call.xs, draw.key())[0]


def fused(call: Fused[Tensor]) -> list[Tensor]:
    """Run a chain of rounded pointwise operations in one pass over memory: the bits of one call for each operation."""
    kernel = call.kernel(_loads(call))
    if kernel is None:
        return run_parts(call.program, call.xs, call.results, Draw.of(call.rng, 0), call.nodes)
    return run_kernel(kernel, call.xs, Draw.of(call.rng, 0).keys(call.nodes) if kernel.draws else NO_KEY)


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


def _loads(call: ProgramCall[Tensor]) -> Any:
    """How the operands are stored; raises for what cannot be an operand."""
    return loads_of(call.xs) if call.xs else call.loads()


def _by_position(cls: type[Call[Tensor]], function: Callable[[Any], R]) -> Callable[..., R]:
    """The function of the operator's arguments, as PyTorch's dispatcher and a scheduled graph call it."""

    def positional(*args: Any) -> R:
        return function(cls.of(args))

    positional.__name__ = positional.__qualname__ = cls.name
    return positional


_BEGUN: Final = matmul.BEGUN | convolution.BEGUN
CONTRACTIONS: Final = {cls.overload: _by_position(cls, begin) for cls, begin in _BEGUN.items()}


def _finished(begin: Callable[[Any], Pending]) -> Callable[[Any], Tensor]:
    """The operator that begins a contraction by ``begin`` and finishes it."""
    return lambda call: begin(call).finish()


_KERNELS: Final[dict[type[Call[Any]], Callable[[Any], Any]]] = {
    Pointwise: pointwise,
    Fused: fused,
    **{cls: _finished(begin) for cls, begin in _BEGUN.items()},
    dialect.AddProcesses: add_processes,
    dialect.BlockExpand: block_expand,
    dialect.BlockMaximum: block_maximum,
    dialect.BlockPercentile: block_percentile,
    dialect.BlockSum: block_sum,
    dialect.HadamardTransform: hadamard,
    dialect.Iterations: iterations,
    dialect.PackedLengths: packed_lengths,
    dialect.StateOfPart: state_of_part,
    **reduction_ops.KERNELS,
}
_TEXTS: Final[dict[type[Call[Any]], Callable[[Any], Any]]] = {
    Pointwise: cuda_pointwise.pointwise,
    Fused: cuda_pointwise.fused,
    **dict.fromkeys(cuda_contraction.BEGUN, cuda_contraction.run),
    **cuda_reduction.KERNELS,
}


def function_of(cls: type[Call[Any]]) -> Callable[[Any], Any]:
    """Return the function of a class's calls, which runs on the CPU or as CUDA texts, wherever the operands are."""
    here, texts = _KERNELS[cls], _TEXTS.get(cls)
    if texts is None:
        return here

    def run(call: Any) -> Any:
        if not runs_texts(call.operands):
            return here(call)
        try:
            return texts(call)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error, cls.name, call.operands) from error

    return run


# The function of each operator, for callers that need no dispatcher.
KERNELS: Final = {cls.overload: _by_position(cls, function_of(cls)) for cls in CALLS.values()}

for _overload, _kernel in KERNELS.items():
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(CALLS[_overload].name, _kernel, _device)
