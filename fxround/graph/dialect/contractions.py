"""Contractions: sums of products, k ascending from +0, each step rounded by ``accumulate`` and the end by ``rounding``.

Rules and lowering are made of the classes: another contraction is a class here and its kernel in ``runtime.cpu.matmul``
or ``runtime.cpu.convolution``.

matmul(a, b, "binary32/stochastic/inf", "binary32/nearest_even/inf", rng, 7)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import torch
from torch import Tensor

from fxround.graph.dialect.call import CALLS, Call, T, empty, operator, require_state
from fxround.graph.dtypes import dtype_of
from fxround.graph.geometry import Geometry, Sizes, differ, require_one_dtype, surely
from fxround.kernels import from_text
from fxround.kernels.kinds import Contract
from fxround.numerics.formats.storage import Storage

_LONGEST: Final = 1 << 30


def require_product(left: Sizes, right: Sizes, dtypes: Sequence[torch.dtype]) -> None:
    """Raise ValueError or TypeError for operands that have no product; sizes may be symbolic."""
    if len(left) not in (2, 3) or len(left) != len(right):
        raise ValueError(f"matmul takes two matrices or two batches of them, got {tuple(left)} and {tuple(right)}")
    if differ((*left[:-2], left[-1]), (*right[:-2], right[-2])):
        raise ValueError(f"matmul of {tuple(left)} with {tuple(right)}: inner sizes or batches differ")
    require_one_dtype("matmul", *dtypes)
    require_length(left[-1])


def require_length(length: int) -> None:
    """Raise ValueError for a chain that is too long."""
    if surely(length > _LONGEST):
        raise ValueError(f"contraction of {length} products: a chain has at most {_LONGEST}")


class ContractionCall(Call[T]):
    """What all contractions have in common: two operands and the kernel of a sum of products.

    sums    ATen's names of the operands, in the order of the fields, each with the dimension over which the operator
            sums; of a convolution that of channels, whose windows are summed too. If the convolution is transposed, the
            first two dimensions of its weight change places.
    """

    kind: ClassVar[Literal["contraction"]] = "contraction"
    sums: ClassVar[Mapping[str, int]]

    accumulate: str
    rounding: str
    rng: T

    def kernel(self, loads: tuple[Storage, ...]) -> Contract:
        """Return the kernel; both operands and the result are stored in the same way."""
        first, second = loads
        return from_text.contract(self.accumulate, self.rounding, (first, second), second)

    def require(self: ContractionCall[Tensor]) -> None:
        """Raise what the operator raises for the roundings, the dtype or the random state."""
        self.kernel(self.loads())
        require_state(self.rng)

    def made(self: ContractionCall[Tensor], size: Sequence[Any]) -> Tensor:
        """Return a tensor of this size without memory, in the dtype of the result."""
        return empty(self.operands[0], size, dtype_of(self.kernel(self.loads()).result))


@operator("matmul", aten=("mm.default", "bmm.default"))
@dataclass(frozen=True)
class Matmul(ContractionCall[T]):
    """The product of two matrices [M, K] and [K, N], or of two batches of them."""

    sums: ClassVar = {"self": -1, "mat2": -2}

    a: T
    b: T
    accumulate: str
    rounding: str
    rng: T
    node: int

    def fake(self: Matmul[Tensor]) -> Tensor:
        """Return a tensor [..., M, N]."""
        require_product(self.a.shape, self.b.shape, (self.a.dtype, self.b.dtype))
        self.require()
        return self.made([*self.a.shape[:-1], self.b.shape[-1]])


@operator("convolution", aten=("convolution.default",))
@dataclass(frozen=True)
class Convolution(ContractionCall[T]):
    """A convolution in 1 to 3 dimensions without bias: k over (input channel, kernel position)."""

    sums: ClassVar = {"input": 1, "weight": 1}

    x: T
    w: T
    geometry: Geometry
    accumulate: str
    rounding: str
    rng: T
    node: int

    def fake(self: Convolution[Tensor]) -> Tensor:
        """Return a tensor [batch, channels, *spatial]."""
        require_one_dtype("convolution", self.x.dtype, self.w.dtype)
        size = self.geometry.result_size(self.x.shape, self.w.shape)
        self.require()
        return self.made(size)


@operator("convolution_input_gradient")
@dataclass(frozen=True)
class ConvolutionInputGradient(ContractionCall[T]):
    """The gradient of a convolution's input of this size: k over (output channel, kernel position)."""

    sums: ClassVar = {"grad_output": 1, "weight": 0}

    grad: T
    w: T
    size: Sizes
    geometry: Geometry
    accumulate: str
    rounding: str
    rng: T
    node: int

    def fake(self: ConvolutionInputGradient[Tensor]) -> Tensor:
        """Return a tensor of the input's size."""
        require_one_dtype("convolution's gradient", self.grad.dtype, self.w.dtype)
        self.geometry.require_gradient(self.grad.shape, self.size, self.w.shape)
        self.require()
        return self.made(list(self.size))


@operator("convolution_weight_gradient")
@dataclass(frozen=True)
class ConvolutionWeightGradient(ContractionCall[T]):
    """The gradient of a convolution's weight of this size: k over (image, pixel)."""

    sums: ClassVar = {"grad_output": 0, "input": 0}

    grad: T
    x: T
    size: Sizes
    geometry: Geometry
    accumulate: str
    rounding: str
    rng: T
    node: int

    def fake(self: ConvolutionWeightGradient[Tensor]) -> Tensor:
        """Return a tensor of the weight's size."""
        require_one_dtype("convolution's gradient", self.grad.dtype, self.x.dtype)
        self.geometry.require_gradient(self.grad.shape, self.x.shape, self.size)
        self.require()
        return self.made(list(self.size))


CONTRACTIONS: Final = frozenset(cls.overload for cls in CALLS.values() if issubclass(cls, ContractionCall))
