"""Products of matrices as contractions: layouts are looked at once, then only addresses change.

All that a call needs besides addresses (the plan, the code, tables of offsets) depends on shapes, strides, dtype,
instruction set and number of threads alone, and is remembered by them. A small product then costs a lookup, a result
and one call of machine code. Everything that the code reads by is part of the key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fxround.graph.dialect import STATE, Call, Matmul
from fxround.graph.dialect.contractions import require_product
from fxround.graph.dtypes import STORAGES, dtype_of
from fxround.kernels import from_text
from fxround.kernels.kinds import Contract, in_part
from fxround.runtime.contractions import TABLES, Right
from fxround.runtime.cpu.code import current_set
from fxround.runtime.cpu.contraction import Contraction, Pending
from fxround.runtime.draw import Draw
from fxround.runtime.memo import by_bytes
from fxround.runtime.operands import storage_of

# The number of rows from which a product with one column is computed transposed.
_FEW: Final = 8
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Bound:
    """A product of operands of given layouts.

    ``contraction`` is None if the result has no element; ``turned`` says that it computes the transposed product.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    contraction: Contraction | None
    turned: bool
    draws: bool

    def begin(self, a: Tensor, b: Tensor, rng: Tensor, node: int) -> Pending:
        """Begin the product of operands of these layouts."""
        if self.contraction is None:
            return Pending(self.shape, self.dtype)
        x, y = (b, a) if self.turned else (a, b)
        key = Draw.of(rng, node).key() if self.draws else None
        return self.contraction.of_operands(self.shape, self.dtype, x, y, key)


def begin_matmul(call: Matmul[Tensor]) -> Pending:
    """Begin the product (M, K) x (K, N), or a batch of them: k ascending from +0, rounded as ``accumulate`` says."""
    return bound_matmul(call).begin(call.a, call.b, call.rng, call.node)


def bound_matmul(call: Matmul[Tensor]) -> Bound:
    """The product for all operands of these layouts, until the instruction set or the number of threads changes."""
    a, b = _stored(call)
    stored = STORAGES[a.dtype]
    kernel = from_text.contract(call.accumulate, call.rounding, (stored, stored), stored)
    return _bound_by(a, b, kernel if len(call.rng) == STATE else in_part(kernel))


def run_chain(call: Matmul[Tensor], kernel: Contract) -> Tensor:
    """The product by another kernel of the same chain; the elements have their own random bits."""
    a, b = _stored(call)
    return _bound_by(a, b, kernel).begin(a, b, call.rng, call.node).finish()


def _stored(call: Matmul[Tensor]) -> tuple[Tensor, Tensor]:
    """The operands of a product; raises for those that no kernel reads."""
    a, b = call.a, call.b
    for x, what in ((a, "first"), (b, "second")):
        if x.layout is not torch.strided or not x.is_cpu or x.dtype not in STORAGES or x.is_neg():
            storage_of(x, f"matmul's {what} operand")
    return a, b


def _bound_by(a: Tensor, b: Tensor, kernel: Contract) -> Bound:
    layouts = (a.shape, a.stride(), a.dtype), (b.shape, b.stride(), b.dtype)
    return _bound(*layouts, kernel, current_set(), torch.get_num_threads())


@by_bytes(TABLES)
def _bound(a: Layout, b: Layout, kernel: Contract, isa: str, threads: int) -> Bound:
    """The product by a kernel for operands of these layouts."""
    (left, steps, dtype), (right, other_steps, other) = a, b
    require_product(left, right, (dtype, other))
    shape, draws = (*left[:-1], right[-1]), kernel.draws or kernel.finish_draws
    if 0 in shape:
        return Bound(shape, dtype_of(kernel.result), None, False, draws)
    groups = 0
    if len(shape) == 2:
        left, steps, right, other_steps, groups = (1, *left), (0, *steps), (1, *right), (0, *other_steps), 1
    # One column and many rows are computed as one row and many columns: a step is symmetric in its factors, and an
    # element keeps its place in the result, hence its stream.
    turned = right[2] == 1 and left[1] > _FEW
    if turned:
        left, steps, right, other_steps = (_turned(x) for x in (right, other_steps, left, steps))
    where = Right.matrices(right, other_steps)
    return Bound(shape, dtype_of(kernel.result), Contraction.of(kernel, left, steps, where, groups), turned, draws)


def _turned(of: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes or strides of a batch of transposed matrices."""
    return (of[0], of[2], of[1])


# The function that begins each contraction, up to the point where the result's address is needed.
BEGUN: Final[dict[type[Call[Any]], Callable[[Any], Pending]]] = {Matmul: begin_matmul}
