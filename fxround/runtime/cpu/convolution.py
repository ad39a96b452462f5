"""Convolution and its two gradients on the CPU: over image planes where channels are few, else as packed products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from fxround.graph.dialect import Call, Convolution, ConvolutionInputGradient, ConvolutionWeightGradient
from fxround.graph.dtypes import dtype_of
from fxround.runtime.contractions import Plain, convolution, input_gradient, weight_gradient
from fxround.runtime.cpu.contraction import Pending, begin_product
from fxround.runtime.cpu.padding import padded
from fxround.runtime.cpu.planes import begin_planes, planned, shape_of


def begin_convolution(call: Convolution[Tensor]) -> Pending:
    """Begin a convolution."""
    return _begin(convolution(call))


def begin_input_gradient(call: ConvolutionInputGradient[Tensor]) -> Pending:
    """Begin the gradient of a convolution's input."""
    return _begin(input_gradient(call, padded))


def begin_weight_gradient(call: ConvolutionWeightGradient[Tensor]) -> Pending:
    """Begin the gradient of a convolution's weight."""
    return begin_product(weight_gradient(call, padded))


def _begin(plain: Plain) -> Pending:
    """Begin a convolution that is not transposed."""
    if plain.is_empty:
        return Pending(plain.size, dtype_of(plain.kernel.result))
    x, w, g = plain.x, plain.w, plain.geometry
    planes = planned(plain.kernel, shape_of(x.shape, w.shape, g.stride, g.padding, g.dilation, g.groups))
    if planes is not None:
        return begin_planes(plain.kernel, planes, x, w, plain.draw.key(), plain.size)
    return begin_product(plain.product(padded))


# The function that begins each contraction, up to the point where the result's address is needed.
BEGUN: Final[dict[type[Call[Any]], Callable[[Any], Pending]]] = {
    Convolution: begin_convolution,
    ConvolutionInputGradient: begin_input_gradient,
    ConvolutionWeightGradient: begin_weight_gradient,
}
