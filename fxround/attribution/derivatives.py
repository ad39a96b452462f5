"""Derivatives of operations by PyTorch, and what they miss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils._pytree as pytree
from torch import Tensor

from fxround.attribution.functions import product_gradients
from fxround.attribution.graphs import Function
from fxround.attribution.states import Decisions, State, floats, is_float, leaves_of, same, wide_enough
from fxround.errors import UnsupportedOperator
from fxround.graph.dialect import ContractionCall, Sum

Chain = ContractionCall[Tensor] | Sum[Tensor]


class Start(torch.autograd.Function):
    """The value of an operation, of whose operands none depends on an earlier rounding."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, root: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None


class Bits(torch.autograd.Function):
    """The bits of a node in place of the value that PyTorch computes, with the derivative of that value."""

    @staticmethod
    def forward(ctx: Any, derived: Tensor, bits: Tensor, root: Tensor) -> Tensor:
        return bits.view_as(bits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None


class ProductBits(torch.autograd.Function):
    """The value of a matrix product or a convolution, with the derivative that PyTorch has for it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, value: Tensor, call: ContractionCall[Tensor]) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.call = call
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return *product_gradients(ctx.call, a, b, gradient, ctx.needs_input_grad[:2]), None, None


@contextmanager
def differentiable(what: Callable[[], str]) -> Iterator[None]:
    """Raise UnsupportedOperator for derivatives that PyTorch does not have; what: says whose they are."""
    try:
        yield
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        raise UnsupportedOperator(
            f"{what()}: the {error} in PyTorch, so that the effects of errors that pass it are unknown; write it with "
            "operations that have derivatives of second order, or measure with fxround.variability"
        ) from error


def directional(
    function: Callable[..., tuple[Tensor, ...]], primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Return the derivative of a function in a direction."""
    # A tangent cannot be written to elements that share memory.
    primals = tuple(p.contiguous() if 0 in p.stride() else p for p in primals)
    try:
        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(p, t) for p, t in zip(primals, tangents, strict=True)]
            return tuple(forward_ad.unpack_dual(result).tangent for result in function(*duals))
    except NotImplementedError:
        # The operator has no forward mode: the derivative of its backward pass gives the same.
        with torch.enable_grad():
            return tuple(torch.autograd.functional.jvp(function, primals, tangents, strict=False)[1])


def passed_by(function: Function, states: Mapping[Any, State], keys: Sequence[Any], bits: Any) -> Any:
    """Return the perturbation of a result to first order, without the errors of its own roundings."""
    leaves, structure = pytree.tree_flatten(bits)
    moving = [key for key in dict.fromkeys(keys) if any(isinstance(m, Tensor) for m in leaves_of(states[key].moved))]
    if not moving:
        return pytree.tree_unflatten([None] * len(leaves), structure)
    flat = {key: pytree.tree_flatten(states[key].derived) for key in keys}
    places = [
        (key, i) for key in moving for i, moved in enumerate(leaves_of(states[key].moved)) if isinstance(moved, Tensor)
    ]

    def of(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(places, inputs, strict=True))

        def get(key: Any) -> Any:
            values, form = flat[key]
            plain = [v.detach() if isinstance(v, Tensor) else v for v in values]
            return pytree.tree_unflatten([given.get((key, i), v) for i, v in enumerate(plain)], form)

        return tuple(floats(function(get, wide_enough)))

    primals = tuple(flat[key][0][i].detach() for key, i in places)
    tangents = tuple(leaves_of(states[key].moved)[i].to(p.dtype) for (key, i), p in zip(places, primals, strict=True))
    # An infinite derivative passes nothing: without a perturbation nothing changes, else all of the change is missed.
    passed = (None if p is None else p.nan_to_num(0.0, 0.0, 0.0) for p in directional(of, primals, tangents))
    made = [next(passed) if is_float(leaf) else None for leaf in leaves]
    return pytree.tree_unflatten(made, structure)


def missed_by(exact: Any, plus: Any, minus: Any, moved: Any) -> Tensor:
    """Return what the derivative misses for the perturbation of the operands or for its opposite, float64.

    Of both the larger one, because a kink is on one side only.
    """
    value, passed = floats(exact)[0], next((m for m in leaves_of(moved) if isinstance(m, Tensor)), None)
    first = torch.zeros_like(value) if passed is None else passed.double()
    up, down = floats(plus)[0] - value - first, floats(minus)[0] - value + first
    missed = torch.where(up.abs() < down.abs(), down, up)
    return torch.where(value.isfinite(), missed.nan_to_num(math.inf, math.inf, -math.inf), 0.0)


def decided(bits: Any, plus: Any, minus: Any) -> Decisions | None:
    """Return the decisions that are not those of the run; None if both are."""
    return None if same(bits, plus) and same(bits, minus) else Decisions(plus, minus)


def moved_or_decided(bits: Any, moved: Any, plus: Any, minus: Any) -> Any:
    """Return the perturbation of a floating-point result, or the decisions that another one, an index, follows."""
    return moved if is_float(bits) else decided(bits, plus, minus)
