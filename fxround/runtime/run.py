"""Kernels run where their operands are: on the CPU, or as CUDA texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxround.graph.dialect import Matmul
from fxround.graph.dtypes import result_storage
from fxround.kernels.blocks import blocks_kernel
from fxround.kernels.kinds import Contract, Exact, Map, Reduce
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.runtime.contractions import Product, Right
from fxround.runtime.cpu import blocks, contraction, exact_sum, matmul, pointwise, reduction
from fxround.runtime.cpu import several as cpu_several
from fxround.runtime.cuda import contraction as cuda_contraction
from fxround.runtime.cuda import pointwise as cuda_pointwise
from fxround.runtime.cuda import reduction as cuda_reduction
from fxround.runtime.cuda import several as cuda_several
from fxround.runtime.cuda.launcher import runs_texts
from fxround.runtime.draw import Draw
from fxround.runtime.operands import loads_of, storage_of
from fxround.runtime.several import Several


def run_kernel(
    kernel: Map, operands: Sequence[Tensor], key: Any, outs: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """Run a map over operands that broadcast. ``outs`` are row-major tensors to write into, None for a new one."""
    run = cuda_pointwise.run_kernel if runs_texts(operands) else pointwise.run_kernel
    return run(kernel, operands, key, outs)


def run_several(several: Several) -> None:
    """Run a map over several lists of tensors that it overwrites; in their order if they share memory."""
    run = cuda_several.run_several if runs_texts(several.entries[0]) else cpu_several.run_several
    if several.apart():
        run(several)
        return
    for i in range(len(several.entries)):
        run(several.of(i, i + 1))


def run_map(
    program: Program,
    operands: Sequence[Tensor],
    dtype: torch.dtype,
    draw: Draw,
    out: Tensor | None = None,
) -> Tensor:
    """Run a program over operands that broadcast; ``out`` is a row-major tensor to write into."""
    kernel = map_kernel(program, loads_of(operands), result_storage(dtype))
    (result,) = run_kernel(draw.of_part(kernel), operands, draw.key(), (out,))
    return result


def run_part(
    program: Program, x: Tensor, parts: Sequence[Tensor], out: Tensor, draw: Draw, d: int, start: int, size: int
) -> None:
    """Run a program over ``size`` rows of x from ``start`` on along d (``pointwise.run_part``); x is on the CPU."""
    kernel = map_kernel(program, loads_of((x, *parts)), result_storage(out.dtype))
    pointwise.run_part(kernel, x, parts, out, draw.key(), d, start, size)


def run_blocks(
    figure: Program,
    elements: Program | None,
    x: Tensor,
    sizes: Sequence[int],
    shared: Sequence[Tensor] = (),
    out: Tensor | None = None,
) -> Tensor | None:
    """Run a kernel of blocks (``cpu.blocks.run_blocks``); None if there is no such code, or none where x is.

    The programs are those of ``kernels.blocks.blocks_kernel``.
    """
    if runs_texts([x]):
        return None
    kernel = blocks_kernel(figure, elements, storage_of(x, "an operand in blocks"))
    return None if kernel is None else blocks.run_blocks(kernel, x, sizes, shared, out)


def run_exact(kernel: Exact, x: Tensor, draw: Draw, dims: Sequence[int] = (1,)) -> Tensor:
    """Sum ``dims`` (ascending, none negative) of x exactly; the result has the other dimensions."""
    run = cuda_reduction.run_reduce if runs_texts([x]) else exact_sum.run_exact
    return run(kernel, x, draw, dims)


def run_reduce(kernel: Reduce | Exact, x: Tensor, draw: Draw, dims: Sequence[int] = (1,)) -> Tensor:
    """Reduce ``dims`` (ascending, none negative) of x; the result has the other dimensions."""
    if isinstance(kernel, Exact):
        return run_exact(kernel, x, draw, dims)
    run = cuda_reduction.run_reduce if runs_texts([x]) else reduction.run_reduce
    return run(kernel, x, draw, dims)


def run_product(kernel: Contract, a: Tensor, b: Tensor, groups: int, draw: Draw) -> Tensor:
    """The product of (g, rows, length) and (batch, length, columns), of any strides: (batch, rows, columns)."""
    size = (b.shape[0], a.shape[1], b.shape[2])
    product = Product(kernel, a, b, Right.matrices(b.shape, b.stride(), b.device), groups, draw, size)
    return cuda_contraction.run_product(product) if runs_texts([a, b]) else contraction.begin_product(product).finish()


def run_matmul(call: Matmul[Tensor]) -> Tensor:
    """The product of two matrices, or of two batches of them."""
    return cuda_contraction.run(call) if runs_texts(call.operands) else matmul.begin_matmul(call).finish()


def run_chain(call: Matmul[Tensor], kernel: Contract) -> Tensor:
    """The product of two matrices, or of two batches of them, by another kernel of the same chain."""
    if not runs_texts(call.operands):
        return matmul.run_chain(call, kernel)
    batched = call.a.dim() == 3
    a, b = (call.a, call.b) if batched else (call.a[None], call.b[None])
    result = run_product(kernel, a, b, 0 if batched else 1, Draw.of(call.rng, call.node))
    return result if batched else result[0]
