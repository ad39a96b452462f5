"""Kernels run where their operands are (``target``)."""

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
from fxround.runtime.draw import Draw
from fxround.runtime.operands import loads_of, storage_of
from fxround.runtime.several import Several
from fxround.runtime.target import target_of


def run_kernel(
    kernel: Map, operands: Sequence[Tensor], key: Any, outs: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """Run a map over operands that broadcast. ``outs`` are row-major tensors to write into, None for a new one."""
    return target_of(operands).map(kernel, operands, key, outs)


def run_several(several: Several) -> None:
    """Run a map over several lists of tensors that it overwrites; in their order if they share memory."""
    run = target_of(several.entries[0]).several
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
    """Run a program over ``size`` rows of x from ``start`` on along d (``Target.part``)."""
    kernel = map_kernel(program, loads_of((x, *parts)), result_storage(out.dtype))
    target_of([x]).part(kernel, x, parts, out, draw.key(), d, start, size)


def run_blocks(
    figure: Program,
    elements: Program | None,
    x: Tensor,
    sizes: Sequence[int],
    shared: Sequence[Tensor] = (),
    out: Tensor | None = None,
) -> Tensor | None:
    """Run a kernel of blocks (``Target.blocks``); None if there is no such code, or none where x is.

    The programs are those of ``kernels.blocks.blocks_kernel``.
    """
    kernel = blocks_kernel(figure, elements, storage_of(x, "an operand in blocks"))
    return None if kernel is None else target_of([x]).blocks(kernel, x, sizes, shared, out)


def run_exact(kernel: Exact, x: Tensor, draw: Draw, dims: Sequence[int] = (1,)) -> Tensor:
    """Sum ``dims`` (ascending, none negative) of x exactly; the result has the other dimensions."""
    return target_of([x]).exact(kernel, x, draw, dims)


def run_reduce(kernel: Reduce | Exact, x: Tensor, draw: Draw, dims: Sequence[int] = (1,)) -> Tensor:
    """Reduce ``dims`` (ascending, none negative) of x; the result has the other dimensions."""
    if isinstance(kernel, Exact):
        return run_exact(kernel, x, draw, dims)
    return target_of([x]).reduce(kernel, x, draw, dims)


def run_product(kernel: Contract, a: Tensor, b: Tensor, groups: int, draw: Draw) -> Tensor:
    """The product of (g, rows, length) and (batch, length, columns), of any strides: (batch, rows, columns)."""
    size = (b.shape[0], a.shape[1], b.shape[2])
    product = Product(kernel, a, b, Right.matrices(b.shape, b.stride(), b.device), groups, draw, size)
    return target_of([a, b]).product(product)


def run_matmul(call: Matmul[Tensor]) -> Tensor:
    """The product of two matrices, or of two batches of them."""
    return target_of(call.operands).contraction(call)


def run_chain(call: Matmul[Tensor], kernel: Contract) -> Tensor:
    """The product of two matrices, or of two batches of them, by another kernel of the same chain."""
    return target_of(call.operands).product_of(call, kernel)
