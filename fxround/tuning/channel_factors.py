"""The factors of channels: by SmoothQuant's formula, or by the search of AWQ.

Sources: Xiao et al., SmoothQuant: Accurate and efficient post-training quantization for large language models, ICML
2023, equation 4; Lin et al., AWQ: Activation-aware weight quantization, MLSys 2024, section 3.2, and the authors'
program for the normalization of scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import torch
from torch import Tensor, fx

from fxround.graph.dtypes import FORMAT_OF
from fxround.kernels.program import Program
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.modes import Rounding
from fxround.operators.rules import argument
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map
from fxround.tuning.grid import Grid
from fxround.tuning.products import Product

Method = Literal["smoothquant", "awq"]
_MM: Final = torch.ops.aten.mm.default
_CONVOLUTION: Final = torch.ops.aten.convolution.default


@dataclass(frozen=True, eq=False)
class Operand:
    """The inputs of one product that reads a weight, over all batches. Columns of the weight's matrix are summed over.

    weight    the name of the parameter
    node      the product in the graph of the first batch
    inputs    the node of its other operand
    axis      of the channels in this operand, negative
    index     for each element of the weight's matrix, [rows, columns], its row-major position in the parameter
    inner     how many columns belong to a channel: the elements of a convolution's window
    most      the largest magnitude of each channel, float64
    mean      the mean magnitude of each channel, float64
    squares   the sum of x x^T, float64 of shape [columns, columns]; None if it was not asked for
    unfit     why its channels can have no factors, or ""
    """

    weight: str
    node: fx.Node
    inputs: fx.Node
    axis: int
    index: Tensor
    inner: int
    most: Tensor
    mean: Tensor
    squares: Tensor | None
    unfit: str = ""

    @staticmethod
    def of(products: Sequence[Product], keeps_squares: bool) -> Operand:
        """Return the operand of one product in all batches. Raises ValueError for values that are not finite."""
        first = products[0]
        node, nothing = first.node, torch.empty(0)
        inputs: Any = node.args[1 - first.position]
        unfit = _unfit(first)
        if unfit:
            return Operand(first.weight, node, inputs, -1, nothing, 1, nothing, nothing, None, unfit)
        axis = -1 if node.target is _MM else 1 - first.args[0].dim()
        (index,) = first.weight_matrices()
        inner = 1 if node.target is _MM else math.prod(first.index.shape[2:])
        most = torch.zeros(index.shape[1] // inner, dtype=torch.float64)
        total, count = torch.zeros_like(most), 0
        squares = torch.zeros(2 * [index.shape[1]], dtype=torch.float64) if keeps_squares else None
        for product in products:
            x = product.finite_inputs()[0].double().cpu()
            magnitudes = x.abs().view(len(x), -1, inner)
            most = torch.maximum(most, magnitudes.amax((0, 2)) if len(x) else most)
            total, count = total + magnitudes.sum((0, 2)), count + len(x) * inner
            if squares is not None:
                squares += x.T @ x
        return Operand(first.weight, node, inputs, axis, index, inner, most, total / max(1, count), squares)

    @property
    def channels(self) -> int:
        """The number of channels."""
        return len(self.most)

    def matrix(self, weight: Tensor) -> Tensor:
        """Return a weight as [rows, columns]."""
        return weight.reshape(-1)[self.index]

    def largest(self, weight: Tensor) -> Tensor:
        """Return the largest magnitude of a weight in each channel, float64."""
        return self.matrix(weight).double().abs().cpu().view(-1, self.channels, self.inner).amax((0, 2))

    def rescaled(self, weight: Tensor, factors: Tensor) -> Tensor:
        """Return a weight divided by the factors of its channels, each quotient rounded once to its dtype."""
        result = weight.reshape(-1).clone()
        result[self.index] = divided(self.matrix(weight), factors.repeat_interleave(self.inner))
        return result.view(weight.shape)

    def keeps(self, weight: Tensor, factors: Tensor) -> Tensor:
        """Return for which channels the quotients are exact."""
        before, after = (
            self.matrix(w).view(-1, self.channels, self.inner) for w in (weight, self.rescaled(weight, factors))
        )
        return (multiplied(after, factors[:, None]) == before).all(2).all(0).cpu()

    def lost(self, weight: Tensor, rounding: Rounding | ScaledRounding, factors: Tensor) -> float:
        """Return the sum of squared changes of the products if the rescaled weight is rounded."""
        assert self.squares is not None
        new = self.rescaled(weight, factors)
        rounded = self.matrix(self._grid(new, rounding).nearest(new)).double().cpu()
        change = rounded * factors.repeat_interleave(self.inner) - self.matrix(weight).double().cpu()
        return float(((change @ self.squares) * change).sum())

    def _grid(self, weight: Tensor, rounding: Rounding | ScaledRounding) -> Grid:
        """Return the grid of a weight, with blocks as a policy has them: along the sum."""
        scaling = rounding.format.scaling if isinstance(rounding, ScaledRounding) else None
        channels = int(self.index[0, self.inner % self.index.shape[1]] - self.index[0, 0])
        strides = [math.prod(weight.shape[d + 1 :]) for d in range(weight.dim())]
        along = 1 if weight.dim() > 2 or channels == 1 else strides.index(channels)
        spatial = range(2, weight.dim())
        dims = (along, *spatial) if scaling is not None and scaling.block == "channel" else (along,)
        is_tile = scaling is not None and not isinstance(scaling.block, str) and len(scaling.block) == 2
        return Grid.of(weight, rounding, (1 - along, along) if is_tile else dims)


@dataclass(frozen=True)
class Choice:
    """The exponent, the factor of each channel (float64), and the error relative to that without factors, or None."""

    alpha: float
    factors: Tensor
    error: float | None = None


def smooth(operands: Sequence[Operand], weights: Sequence[Tensor], alpha: float, power_of_two: bool) -> Choice:
    """Return the factors by the largest magnitudes of activations and weights."""
    x = torch.stack([operand.most for operand in operands]).amax(0)
    w = torch.stack([o.largest(weight) for o, weight in zip(operands, weights, strict=True)]).amax(0)
    scales = _run(_SMOOTH, torch.float64, x, w, *(torch.tensor(a, dtype=torch.float64) for a in (alpha, 1 - alpha)))
    return Choice(alpha, _factors(scales, power_of_two, weights[0].dtype))


def activation_aware(
    operands: Sequence[Operand],
    weights: Sequence[Tensor],
    roundings: Mapping[str, Rounding | ScaledRounding],
    grid: int,
    power_of_two: bool,
) -> Choice:
    """Return the factors by mean magnitudes of activations whose rounded weights change the products least."""
    x = torch.stack([operand.mean for operand in operands]).amax(0)
    known = [(o, w, roundings[o.weight]) for o, w in zip(operands, weights, strict=True) if o.weight in roundings]
    choices: list[Choice] = []
    for i in range(grid + 1):
        scales = _run(_POWER, torch.float64, x, torch.tensor(i / grid, dtype=torch.float64))
        scales = torch.where(x > 0, scales, torch.nan)
        middle = _run(_MIDDLE, torch.float64, *(f(scales.nan_to_num(1.0)) for f in (torch.max, torch.min)))
        scales = (scales / middle).nan_to_num(1.0)
        factors = _factors(scales, power_of_two, weights[0].dtype)
        choices.append(Choice(i / grid, factors, sum(o.lost(w, rounding, factors) for o, w, rounding in known)))
    best = min(choices, key=lambda choice: choice.error or 0.0)
    before = choices[0].error
    return Choice(best.alpha, best.factors, (best.error or 0.0) / before if before else 1.0)


def divided(x: Tensor, factors: Tensor) -> Tensor:
    """Return quotients, each rounded once to the dtype of x; factors: float64, broadcasts."""
    return _run(_QUOTIENT, x.dtype, x.double(), factors.to(x.device)).to(x.dtype)


def multiplied(x: Tensor, factors: Tensor) -> Tensor:
    """Return products, each rounded once to the dtype of x; factors: float64, broadcasts."""
    return _run(_PRODUCT, x.dtype, x.double(), factors.to(x.device)).to(x.dtype)


def _factors(scales: Tensor, power_of_two: bool, dtype: torch.dtype) -> Tensor:
    """Return 1 / s in float64, rounded once to a dtype; or of the nearest power of two of s, by its logarithm."""
    scales = torch.where(scales.isfinite() & (scales > 0), scales, 1.0)
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa < math.sqrt(0.5)).int())
    factors = _run(_QUOTIENT, dtype, torch.ones_like(scales), scales)
    return torch.where(factors.isfinite() & (factors > 0), factors, 1.0)


# R stands for the format of the result.
_SMOOTH: Final = "t0 = pow(x0, x2) @ R; t1 = pow(x1, x3) @ R; t2 = div(t0, t1) @ R"
_POWER: Final = "t0 = pow(x0, x1) @ R"
_MIDDLE: Final = "t0 = mul(x0, x1) @ R; t1 = sqrt(t0) @ R"
_QUOTIENT: Final = "t0 = div(x0, x1) @ R"
_PRODUCT: Final = "t0 = mul(x0, x1) @ R"


@cache
def _program(text: str, dtype: torch.dtype) -> Program:
    return Program.parse(text.replace("R", f"{FORMAT_OF[dtype]}/nearest_even/inf"))


def _run(text: str, dtype: torch.dtype, *operands: Tensor) -> Tensor:
    """Return the result of a program on tensors of float64 in float64, rounded to the format of a dtype."""
    return run_map(_program(text, dtype), [x.contiguous() for x in operands], torch.float64, Draw())


def _unfit(product: Product) -> str:
    """Return why the channels of a product can have no factors, or nothing."""
    node = product.node
    if product.index.unique().numel() != product.index.numel():
        return "the product reads elements of the weight several times"
    if node.target is _MM:
        return "" if product.position == 1 else "the weight is the first operand of the product"
    if node.target is not _CONVOLUTION or argument(node, "transposed"):
        return "a transposed convolution or a batch of products reads the weight"
    return "" if argument(node, "groups") == 1 else "a convolution of groups reads the weight"
