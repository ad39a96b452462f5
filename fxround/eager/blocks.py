"""Scaled formats in ``fxround.round``: one kernel where there is one, else the operators of a graph, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fxround.graph.dialect import BlockMaximum, Call, block_sizes
from fxround.graph.dtypes import FORMAT_OF
from fxround.kernels.program import Program
from fxround.kernels.scaled import carrier_of, element_program, is_scale_of_largest, scale_program
from fxround.numerics.arithmetic.randomness import BLOCK
from fxround.numerics.formats import Format
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.passes.scaling import scaled
from fxround.runtime import torch_ops
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_blocks, run_map
from fxround.runtime.target import target_of

# The elements of a piece of a large tensor: temporary tensors that are larger are fresh memory, which costs more than
# the arithmetic.
_PIECE: Final = 1 << 20


def in_blocks(x: Tensor, rounding: ScaledRounding, dims: tuple[int, ...], out: Tensor | None) -> Tensor | None:
    """Return x rounded by one kernel, if there is one for its blocks."""
    scaling = rounding.format.scaling
    if scaling is None or draws(rounding) or not x.numel() or not x.dim() or not is_scale_of_largest(scaling):
        return None
    stored = Format.parse(FORMAT_OF[x.dtype])
    shared = [torch.ops.fxround.block_maximum(x, [0] * x.dim())] if scaling.whole is not None else []
    if shared and x.dtype != torch.float64:
        shared = [shared[0].float()]
    figure, elements = scale_program(rounding, carrier_of(stored)), element_program(rounding, stored)
    return run_blocks(figure, elements, x, block_sizes(scaling.block, dims, x.dim()), shared, out)


def draws(rounding: ScaledRounding) -> bool:
    """Return whether an element's rounding draws random bits."""
    return rounding.mode.random_bits > 0 or rounding.mode.moves


def reads_all(rounding: ScaledRounding) -> bool:
    """Return whether scales are made of the largest magnitude of the tensor."""
    scaling = rounding.format.scaling
    return scaling is not None and (scaling.whole is not None or scaling.block == "tensor")


def pieces(x: Tensor, rounding: ScaledRounding, dims: tuple[int, ...]) -> tuple[int, int]:
    """Return a dimension along which x can be rounded piece by piece, and the size of a piece, or of all of it.

    Scales are as large as x; those of a piece stay in the cache. No block may cross pieces, and a piece of the result
    has to be row-major. The modes that draw number the elements of all of x, in blocks (``BLOCK``) that no piece may
    part.
    """
    scaling = rounding.format.scaling
    d = next((i for i, n in enumerate(x.shape) if n > 1), 0)
    size = x.shape[d] if x.dim() else 1
    if scaling is None or x.numel() <= _PIECE or (draws(rounding) and not target_of([x]).takes_parts(x)):
        return d, size
    block = 1 if scaling.block == "tensor" else block_sizes(scaling.block, dims, x.dim())[d]
    # Only a largest magnitude of the tensor is that of the pieces' largest magnitudes.
    other = scaling.block == "tensor" and (scaling.how == "affine" or scaling.percentile is not None or scaling.fit)
    if block == 0 or other:
        return d, size
    if draws(rounding):
        block = math.lcm(block, BLOCK // math.gcd(x.numel() // size, BLOCK))
    return d, max(1, _PIECE * size // x.numel() // block) * block


def operands_of_elements(
    x: Tensor, rounding: ScaledRounding, dims: tuple[int, ...], most: Tensor | None = None
) -> tuple[Program, tuple[Tensor, ...]]:
    """Return the program of the elements of a scaled rounding, and its operands.

    most: the largest finite magnitude of the tensor of which x is a piece; None: x is no piece.
    """
    last = _Last(most)
    scaled(x.reshape(1) if x.dim() == 0 else x, max(1, x.dim()), x.dtype, rounding, dims, last)
    return last.found[0], tuple(operand.reshape(()) if x.dim() == 0 else operand for operand in last.found[1])


class _Last:
    """A Writer (``passes.scaling``) that computes all but the elements, which it remembers."""

    found: tuple[Program, tuple[Tensor, ...]]

    def __init__(self, most: Tensor | None) -> None:
        self.most = most

    def call(self, call: Call[Tensor]) -> Tensor:
        """Return the result of an operator on blocks."""
        if self.most is not None and isinstance(call, BlockMaximum) and not any(call.sizes):
            return self.most
        result: Tensor = call.overload(*call.arguments())
        return result

    def program(self, program: Program, operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the result of a program."""
        return run_map(program, operands, dtype, Draw())

    def multiplier(self, rounding: ScaledRounding) -> Tensor:
        """There is no earlier step of a tensor."""
        assert rounding.format.scaling is not None
        raise ValueError(
            f"{rounding.format}: a {rounding.format.scaling.how} scale is state of a compiled model; expected it in a "
            "rule's operands, or a "
            "scale of the tensor itself, as in scaled(e4m3fn;tensor,binary32,inverse)"
        )

    flips_scales = False

    def flipped(self, scale: Tensor, fmt: Format, whole: bool = False) -> Tensor:
        """Return the scales: a call has no faults."""
        return scale

    def elements(self, program: Program, operands: Sequence[Tensor], held: Sequence[Tensor]) -> Tensor:
        """Remember the program of the elements, and return the first operand."""
        self.found = (program, tuple(operands))
        return operands[0]


assert torch_ops.KERNELS  # importing it attached them: scales are made by operators
