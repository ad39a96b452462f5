"""Products of matrices, convolutions and their gradients over CUDA tensors, and maps that follow them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from fxround.graph.dialect import CALLS, Call, Convolution, ConvolutionInputGradient, ConvolutionWeightGradient, Matmul
from fxround.graph.dialect.contractions import require_product
from fxround.graph.dtypes import dtype_of
from fxround.kernels.kinds import Contract, Map
from fxround.runtime import buffers
from fxround.runtime.contractions import Placing, Plain, Product, Right, convolution, input_gradient, weight_gradient
from fxround.runtime.cuda.arguments import ContractionShape, key_of, layout, shards_of_length
from fxround.runtime.cuda.cpp.common import preamble
from fxround.runtime.cuda.cpp.contract import SHAPE, After, Tile, contract_name, contract_text
from fxround.runtime.cuda.cpp.copies import THREADS, Way
from fxround.runtime.cuda.cpp.map import LAYOUT, MAX_DIMS, CudaMapVariant
from fxround.runtime.cuda.launcher import Text, copies_async, device_of, for_device, has_slow_binary64, launch
from fxround.runtime.cuda.pointwise import access_of, on_device
from fxround.runtime.draw import Draw
from fxround.runtime.layouts import collapse, expanded
from fxround.runtime.operands import storage_of

# A GPU has about this many multiprocessors; fewer tiles would leave some without work.
_ENOUGH: Final = 128


def _matmul(call: Matmul[Tensor]) -> Product:
    """The product (M, K) x (K, N), or a batch of them: k ascending from +0, rounded as ``accumulate`` says."""
    a, b = call.a.detach(), call.b.detach()
    loads = storage_of(a, "matmul's first operand"), storage_of(b, "matmul's second operand")
    require_product(a.shape, b.shape, (a.dtype, b.dtype))
    device_of([a, b], "matmul")
    size, groups = [*a.shape[:-1], b.shape[-1]], 0
    if a.dim() == 2:
        a, b, groups = a[None], b[None], 1
    right = Right.matrices(b.shape, b.stride(), b.device)
    return Product(call.kernel(loads), a, b, right, groups, Draw.unread(call.rng, call.node), size)


@dataclass(frozen=True)
class Following:
    """A map that follows a contraction, for operands of given layouts.

    after       its part of the text
    layout      its own argument
    shape       the shape of its results
    nodes       the numbers of its nodes
    """

    after: After
    layout: Any
    shape: tuple[int, ...]
    nodes: tuple[int, ...]

    @staticmethod
    def of(
        kernel: Map,
        layouts: Sequence[tuple[Sequence[int], Sequence[int]]],
        taken: Sequence[bool],
        kept: bool,
        nodes: Sequence[int],
    ) -> Following | None:
        """The map for operands of these shapes and strides; None if they have too many dimensions.

        taken: which operands are the contraction's result, whole and row-major. kept: whether that is stored too.
        """
        shape = torch.broadcast_shapes(*(shape for shape, _ in layouts))
        sizes, steps = collapse(shape, [expanded(shape, *operand) for operand in layouts])
        if len(sizes) > MAX_DIMS:
            return None
        accesses, total = tuple(access_of(sizes, own) for own in steps), math.prod(shape)
        variant = CudaMapVariant(kernel, accesses, len(sizes), total >= 1 << 31)
        after = After(variant, tuple(taken), kept)
        words = tuple([*nodes, *[0] * len(after.nodes)][: len(after.nodes)])
        return Following(after, layout(total, sizes, steps), tuple(shape), words)


def run_product(product: Product) -> Tensor:
    """Compute a contraction."""
    result = buffers.empty(product.size, dtype_of(product.kernel.result), product.a.device)
    if not product.is_empty:
        _launch(product, [result], [result], None, [])
    return result


def run_followed(
    product: Product, following: Following, operands: Sequence[Tensor]
) -> tuple[Tensor | None, list[Tensor]]:
    """Compute a contraction that is not empty and the map that follows: its result, if that is kept, and the map's.

    operands: those of the map that are not the contraction's result.
    """
    kernel, after = product.kernel, following.after
    device = device_of([product.a, *operands], "a contraction and the map after it")
    after = replace(after, variant=replace(after.variant, kernel=for_device(after.variant.kernel, device)))
    operands = [on_device(x, device) for x in operands]
    kept = buffers.empty(product.size, dtype_of(kernel.result), device) if after.kept else None
    made = [buffers.empty(following.shape, dtype_of(storage), device) for storage in after.variant.kernel.results]
    own = [*(ctypes.c_uint32(node & 0xFFFF_FFFF) for node in following.nodes), following.layout, *made, *operands]
    stored = [] if kept is None else [kept]
    _launch(product, stored, [*stored, *made], after, own)
    return kept, made


def _launch(
    product: Product, result: Sequence[Tensor], made: Sequence[Tensor], after: After | None, own: Sequence[Any]
) -> None:
    """Launch the text of a contraction. made: all its results. own: the arguments of the map that follows."""
    kernel, a, b, right = product.kernel, product.a, product.b, product.right
    _, rows, length = a.shape
    columns, out = right.n_offsets.numel(), right.place(rows)
    # One matrix for all batches is a group of its own.
    steps = (*a.stride(), right.step, *(right.steps or (0, 0)), out.step, out.row_step)
    shape = ContractionShape(right.batch, rows, length, columns, product.groups, *steps)
    single = kernel.single is not None and has_slow_binary64(a.device)
    tile = replace(_tile(product, rows, columns), single=single)
    tile = replace(tile, ways=_ways(product, tile), after=after, stored=_stored(tile.vector, out, made))
    key = key_of(product.draw.words((product.draw.node,)), product.draw.state, a.device)
    shards = [shards_of_length(length, kernel.shards)] if kernel.shards > 1 else []
    arguments = [shape, *shards, *result, a, b, right.k_offsets, right.n_offsets, out.offsets, *key, *own]
    launch(_text(tile), _tiles(tile, right.batch, rows, columns), arguments, a.device)


def _tile(product: Product, rows: int, columns: int) -> Tile:
    """The largest tile that leaves enough tiles for a GPU and whose accumulators fit into registers."""
    kernel = product.kernel
    sides = (8, 4, 2, 1) if kernel.accumulator == "f32" and not kernel.streams and kernel.combine is None else (4, 2, 1)
    tiles = (Tile(kernel, side) for side in sides)
    return next((t for t in tiles if _tiles(t, product.right.batch, rows, columns) >= _ENOUGH), Tile(kernel, 1))


def _ways(product: Product, tile: Tile) -> tuple[Way, Way]:
    """How the operands are copied: the largest pieces that their layout allows."""
    a, b, right = product.a, product.b, product.right
    batch, row, k = a.stride()
    able = copies_async(a.device)
    # An element that its lift changes goes through registers.
    plain = [able and lift.results == lift.params for lift in tile.steps.lifts]
    left = Way(k == 1, _piece(a, row, k, batch if a.shape[0] > 1 else 0) if plain[0] else 0)
    if right.steps is None:
        return left, Way(right.along, int(plain[1]), tables=True)
    k, column = right.steps
    return left, Way(right.along, _piece(b, column, k, right.step if right.batch > 1 else 0) if plain[1] else 0)


def _stored(vector: int, out: Placing, made: Sequence[Tensor]) -> int:
    """The adjacent columns that a thread stores at once: its own, if all pieces begin at multiples of their size."""
    whole = all(step % vector == 0 for step in (out.run, out.row_step, out.step))
    bytes_of = [vector * x.itemsize for x in made]
    aligned = all(n <= 16 and x.data_ptr() % n == 0 for n, x in zip(bytes_of, made, strict=True))
    return vector if whole and aligned else 1


def _piece(x: Tensor, step: int, *others: int) -> int:
    """The elements of a copy of x: 16 bytes along a dimension of this step, if all copies begin at multiples of it."""
    whole = 16 // x.itemsize
    aligned = x.data_ptr() % 16 == 0 and all(other % whole == 0 for other in others)
    return whole if step == 1 and aligned else 1


def _tiles(tile: Tile, batch: int, rows: int, columns: int) -> int:
    """The number of tiles of a result."""
    return batch * -(-rows // tile.width) * -(-columns // tile.width)


@cache
def _text(tile: Tile) -> Text:
    """The text of a contraction."""
    head = preamble(SHAPE) + (LAYOUT if tile.after else "")
    return Text(contract_name(tile), lambda: head + contract_text(tile), THREADS, True)


def _plain(plain: Plain) -> Product | Tensor:
    """A convolution that is not transposed, or its result without elements."""
    device = device_of([plain.x, plain.w], "convolution")
    return buffers.empty(plain.size, dtype_of(plain.kernel.result), device) if plain.is_empty else plain.product()


def _weight_gradient(call: ConvolutionWeightGradient[Tensor]) -> Product:
    device_of([call.grad, call.x], "convolution's gradient")
    return weight_gradient(call)


_BEGUN: Final[dict[type[Call[Any]], Callable[[Any], Product | Tensor]]] = {
    Matmul: _matmul,
    Convolution: lambda call: _plain(convolution(call)),
    ConvolutionInputGradient: lambda call: _plain(input_gradient(call)),
    ConvolutionWeightGradient: _weight_gradient,
}


def begun(call: Call[Tensor]) -> Product | Tensor:
    """Begin a contraction; a subclass of a call's class begins as that does. Raises TypeError for one without a text.

    A result without elements is made at once.
    """
    begin = _BEGUN.get(CALLS[call.overload])
    if begin is None:
        raise TypeError(f"{call.name}: no kernel for CUDA tensors; move its operands to the CPU")
    return begin(call)


def run(call: Call[Tensor]) -> Tensor:
    """Run a contraction."""
    product = begun(call)
    return product if isinstance(product, Tensor) else run_product(product)


def run_chain(call: Matmul[Tensor], kernel: Contract) -> Tensor:
    """The product of two matrices, or of two batches of them, by another kernel of the same chain."""
    return run_product(replace(_matmul(call), kernel=kernel))
