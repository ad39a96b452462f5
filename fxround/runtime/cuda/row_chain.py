"""Chains over rows of CUDA tensors: one launch for a softmax or a norm, with the bits of its kernels one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxround.graph.dialect import Fused, ProgramCall
from fxround.graph.dtypes import LOADS, STORAGES, dtype_of
from fxround.kernels import from_text
from fxround.kernels.kinds import Exact, Map, Reduce
from fxround.runtime import buffers
from fxround.runtime.cuda.arguments import key_of, layout
from fxround.runtime.cuda.cpp.common import preamble
from fxround.runtime.cuda.cpp.contract import SHAPE
from fxround.runtime.cuda.cpp.map import MAX_DIMS, Access
from fxround.runtime.cuda.cpp.row_chain import Operand, RowChain, RowStage, row_chain_text
from fxround.runtime.cuda.launcher import Text, device_among, device_of, for_device, launch
from fxround.runtime.cuda.pointwise import on_device
from fxround.runtime.draw import Draw
from fxround.runtime.layouts import collapse, expanded
from fxround.runtime.row_chains import Chain, ChainedKernel


@dataclass(frozen=True)
class RowsCall:
    """A chain's text for operands of given layouts.

    layout      its first argument
    operands    the inputs that it reads
    results     the shape and the dtype of each result
    rows        the rows, and those of a block
    nodes       the numbers of the nodes that draw
    spent       the inputs that nothing reaches after the call
    chain       the chain
    """

    text: Text
    layout: Any
    operands: tuple[int, ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    rows: tuple[int, int]
    nodes: tuple[int, ...]
    spent: tuple[int, ...]
    chain: Chain

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Launch the text and return the results."""
        device = device_of([inputs[i] for i in self.operands], "a chain of pointwise operators and sums over rows")
        operands = [on_device(inputs[i], device) for i in self.operands]
        try:
            results = [buffers.empty(shape, dtype, device) for shape, dtype in self.results]
        except torch.OutOfMemoryError as error:
            raise buffers.out_of_memory(error, "a softmax, norm or other chain over rows", operands) from error
        draw = Draw.unread(inputs[self.chain.rng], 0) if self.nodes else Draw()
        key = key_of(draw.words(self.nodes or (0,)), draw.state, device)
        blocks = -(-self.rows[0] // self.rows[1])
        launch(self.text, blocks, [self.layout, *results, *operands, *key], device)
        buffers.release(*(inputs[i] for i in self.spent))
        return results


def plan_rows(chain: Chain, inputs: Sequence[Tensor], spent: tuple[int, ...]) -> RowsCall | None:
    """The call for inputs of these layouts; None if the chain is to run kernel by kernel."""
    device = device_among(inputs)
    # The random state is no operand; the other values keep their order.
    place = {i: i - (i > chain.rng) for i in range(chain.inputs + sum(len(s.results) for s in chain.stages))}
    shapes = {i: tuple(x.shape) for i, x in enumerate(inputs)}
    dtypes = {i: x.dtype for i, x in enumerate(inputs)}
    stages: list[RowStage] = []
    for stage in chain.stages:
        shape = torch.broadcast_shapes(*(shapes[i] for i in stage.operands))
        kernel = _kernel(stage, [dtypes[i] for i in stage.operands])
        if isinstance(kernel, Exact):
            return None
        kernel = for_device(kernel, device)
        made = shape if isinstance(kernel, Map) else (*shape[:-1], 1)
        kinds = kernel.results if isinstance(kernel, Map) else (kernel.result,)
        for i, storage in zip(stage.results, kinds, strict=True):
            shapes[i], dtypes[i] = tuple(made), dtype_of(storage)
        stages.append(_numbered(stage, kernel, place, shape[-1] > 1))
    whole = max((shapes[i] for stage in chain.stages for i in stage.operands), key=math.prod)
    rows = math.prod(whole[:-1])
    used = tuple(i for i in range(chain.inputs) if i != chain.rng)
    own = [expanded(whole, inputs[i].shape, inputs[i].stride()) for i in used]
    sizes, steps = collapse(whole[:-1], [each[:-1] for each in own])
    if not rows * whole[-1] or len(sizes) >= MAX_DIMS:
        return None
    operands = tuple(Operand(LOADS[dtypes[i]], _along(each[-1])) for i, each in zip(used, own, strict=True))
    stored = tuple(place[i] for i in chain.stored)
    row_chain = RowChain(tuple(stages), operands, stored, whole[-1], len(sizes))
    if row_chain.threads is None:
        return None
    text = Text(row_chain.name, lambda: preamble(SHAPE) + row_chain_text(row_chain), row_chain.threads, True)
    first = layout(rows, [*sizes, whole[-1]], [[*step, each[-1]] for step, each in zip(steps, own, strict=True)])
    results = tuple((shapes[i], dtypes[i]) for i in chain.stored)
    per_block = row_chain.threads // row_chain.group
    return RowsCall(text, first, used, results, (rows, per_block), _nodes(chain, stages), spent, chain)


def _kernel(stage: ChainedKernel, dtypes: Sequence[torch.dtype]) -> Map | Reduce | Exact:
    """The kernel of a stage for operands of these dtypes."""
    call = stage.call
    if not isinstance(call, ProgramCall):
        return stage.reduction(STORAGES[dtypes[0]])
    loads = tuple(LOADS[dtype] for dtype in dtypes)
    if isinstance(call, Fused):
        return from_text.fused(call.program, loads, call.stored)
    return from_text.pointwise(call.program, loads, *call.results)


def _numbered(stage: ChainedKernel, kernel: Map | Reduce, place: dict[int, int], wide: bool) -> RowStage:
    """A stage with the numbers that values have in the text."""
    return RowStage(kernel, tuple(place[i] for i in stage.operands), tuple(place[i] for i in stage.results), wide)


def _along(step: int) -> Access:
    """How elements of a row follow each other."""
    return "contiguous" if step == 1 else "strided" if step else "scalar"


def _nodes(chain: Chain, stages: Sequence[RowStage]) -> tuple[int, ...]:
    """The node numbers of all stages, as many for each as its kernel takes."""
    numbers: list[int] = []
    for stage, own in zip(chain.stages, stages, strict=True):
        call: Any = stage.call
        given = () if call is None else call.nodes if isinstance(call, Fused) else (call.node,)
        numbers += [*given, *[0] * own.nodes][: own.nodes]
    return tuple(numbers)
