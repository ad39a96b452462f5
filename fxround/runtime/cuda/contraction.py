"""Products of matrices, convolutions and their gradients over CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, Final

from torch import Tensor

from fxround.graph.dialect import Call, Convolution, ConvolutionInputGradient, ConvolutionWeightGradient, Matmul
from fxround.graph.dialect.contractions import require_product
from fxround.graph.dtypes import dtype_of
from fxround.runtime import buffers
from fxround.runtime.contractions import Plain, Product, Right, convolution, input_gradient, weight_gradient
from fxround.runtime.cuda.arguments import Shape, key_of
from fxround.runtime.cuda.cpp.common import preamble
from fxround.runtime.cuda.cpp.contract import SHAPE, THREADS, Tile, contract_name, contract_text
from fxround.runtime.cuda.launcher import Text, device_of, has_slow_binary64, launch
from fxround.runtime.draw import Draw
from fxround.runtime.operands import storage_of

# A GPU has about this many multiprocessors; fewer tiles would leave some without work.
_ENOUGH: Final = 128


def matmul(call: Matmul[Tensor]) -> Tensor:
    """The product (M, K) x (K, N), or a batch of them: k ascending from +0, rounded as ``accumulate`` says."""
    a, b = call.a.detach(), call.b.detach()
    loads = storage_of(a, "matmul's first operand"), storage_of(b, "matmul's second operand")
    require_product(a.shape, b.shape, (a.dtype, b.dtype))
    device_of([a, b], "matmul")
    size, groups = [*a.shape[:-1], b.shape[-1]], 0
    if a.dim() == 2:
        a, b, groups = a[None], b[None], 1
    right = Right.matrices(b.shape, b.stride(), b.device)
    return run_product(Product(call.kernel(loads), a, b, right, groups, Draw.of(call.rng, call.node), size))


def run_product(product: Product) -> Tensor:
    """Compute a contraction."""
    kernel, a, b, right = product.kernel, product.a, product.b, product.right
    result = buffers.empty(product.size, dtype_of(kernel.result), a.device)
    if product.is_empty:
        return result
    _, rows, length = a.shape
    columns, out = right.n_offsets.numel(), right.place(rows)
    # One matrix for all batches is a group of its own.
    steps = (*a.stride(), right.step, out.step, out.row_step)
    shape = Shape(right.batch, rows, length, columns, product.groups, *steps)
    single = kernel.single is not None and has_slow_binary64(a.device)
    tile = replace(_tile(product, rows, columns), single=single)
    arguments = [shape, result, a, b, right.k_offsets, right.n_offsets, out.offsets, *key_of(product.draw.key())]
    launch(_text(tile), _tiles(tile, right.batch, rows, columns), arguments, a.device)
    return result


def _tile(product: Product, rows: int, columns: int) -> Tile:
    """The largest tile that leaves enough tiles for a GPU and whose accumulators fit into registers."""
    kernel = product.kernel
    sides = (8, 4, 2, 1) if kernel.accumulator == "f32" and not kernel.streams and kernel.combine is None else (4, 2, 1)
    tiles = (Tile(kernel, side) for side in sides)
    return next((t for t in tiles if _tiles(t, product.right.batch, rows, columns) >= _ENOUGH), Tile(kernel, 1))


def _tiles(tile: Tile, batch: int, rows: int, columns: int) -> int:
    """The number of tiles of a result."""
    return batch * -(-rows // tile.width) * -(-columns // tile.width)


@cache
def _text(tile: Tile) -> Text:
    """The text of a contraction."""
    return Text(contract_name(tile), lambda: preamble(SHAPE) + contract_text(tile), THREADS, True)


def _run_plain(plain: Plain) -> Tensor:
    """Compute a convolution that is not transposed."""
    device_of([plain.x, plain.w], "convolution")
    if plain.is_empty:
        return buffers.empty(plain.size, dtype_of(plain.kernel.result), plain.x.device)
    return run_product(plain.product())


def _run_weight_gradient(call: ConvolutionWeightGradient[Tensor]) -> Tensor:
    device_of([call.grad, call.x], "convolution's gradient")
    return run_product(weight_gradient(call))


KERNELS: Final[dict[type[Call[Any]], Callable[[Any], Tensor]]] = {
    Matmul: matmul,
    Convolution: lambda call: _run_plain(convolution(call)),
    ConvolutionInputGradient: lambda call: _run_plain(input_gradient(call)),
    ConvolutionWeightGradient: _run_weight_gradient,
}
