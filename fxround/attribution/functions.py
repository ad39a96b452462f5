"""What each operator computes before it is rounded, as functions of PyTorch that autograd differentiates.

``exact_of(call)`` takes the call of an operator of the dialect whose operands are float64 (or float32) tensors, and
returns f(x, ...) without any rounding of a policy. The values differ from the exact ones by the errors of stock
kernels in the dtype of the operands, which are 2^-29 of an ulp of binary32 where the operands are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from fxround.errors import UnsupportedOperator
from fxround.graph.dialect import (
    Call,
    ContractionCall,
    Convolution,
    ConvolutionInputGradient,
    ConvolutionWeightGradient,
    Cumprod,
    Cumsum,
    HadamardTransform,
    IndexPut,
    Matmul,
    Pointwise,
    Prod,
    ScatterAdd,
    Sum,
)
from fxround.graph.geometry import Geometry
from fxround.kernels import from_text
from fxround.kernels.program import Statement
from fxround.numerics.arithmetic.hadamard import hadamard_matrix
from fxround.numerics.faults import numbers_of
from fxround.numerics.formats.hadamard import Hadamard

aten = torch.ops.aten


def _where(compared: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    return lambda a, b, x, y: torch.where(compared(a, b), x, y)


def _clamp(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x, low), high)


# The scalar operators of programs that PyTorch has no function of that name for.
_SCALAR: Final[Mapping[str, Callable[..., Tensor]]] = MappingProxyType(
    {
        "identity": lambda x: x.clone(),
        "clamp": _clamp,
        "where_lt": _where(torch.lt),
        "where_le": _where(torch.le),
        "where_eq": _where(torch.eq),
        "fma": lambda a, b, c: a * b + c,
        "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
        "cbrt": lambda x: x.sign() * x.abs().pow(1 / 3),
        "floordiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
        "truncdiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    }
)


def _copied(written: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
    return values.to(written.dtype).expand_as(written).clone()


# Operators that autograd has no derivative for, and functions with their values that it differentiates.
DIFFERENTIABLE: Final[Mapping[Any, Callable[..., Tensor]]] = MappingProxyType({aten.copy.default: _copied})


@lru_cache(maxsize=256)
def function_of(operator: str) -> Callable[..., Tensor]:
    """Return the function of a scalar operator of programs. Raises UnsupportedOperator for the flips of a fault."""
    if numbers_of(operator) is not None:
        raise UnsupportedOperator(f"{operator}: bits that flip are no roundings; attribute a policy without faults")
    function: Callable[..., Tensor] = _SCALAR.get(operator) or getattr(torch, operator)
    return function


def computed(statement: Statement, values: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Return a statement's value before its rounding. like: a tensor of the dtype for the statement's numbers."""
    operands = [
        values[o] if isinstance(o, str) else _number(o, math.copysign(1.0, o), like.dtype, like.device)
        for o in statement.operands
    ]
    return function_of(statement.operator)(*operands)


@lru_cache(maxsize=1024)
def _number(value: float, sign: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a tensor; ``sign`` tells the zeros apart."""
    return torch.tensor(value, dtype=dtype, device=device)


def _pointwise(call: Pointwise[Tensor]) -> Tensor:
    program = from_text.program(call.program)
    like = next(x for x in call.xs if x.is_floating_point())
    values = {f"x{i}": x if x.is_floating_point() else x.to(like.dtype) for i, x in enumerate(call.xs)}
    for statement in program.statements:
        values[statement.target] = computed(statement, values, like)
    return values[program.results[0]]


def _geometry(geometry: Geometry) -> tuple[Any, ...]:
    g = geometry
    return list(g.stride), list(g.padding), list(g.dilation), g.transposed, list(g.output_padding), g.groups


def _convolution(call: Convolution[Tensor]) -> Tensor:
    result: Tensor = aten.convolution(call.x, call.w, None, *_geometry(call.geometry))
    return result


def _input_gradient(call: ConvolutionInputGradient[Tensor]) -> Tensor:
    x = call.grad.new_zeros(()).expand(list(call.size))
    made = aten.convolution_backward(call.grad, x, call.w, None, *_geometry(call.geometry), [True, False, False])
    gradient: Tensor = made[0]
    return gradient


def _weight_gradient(call: ConvolutionWeightGradient[Tensor]) -> Tensor:
    w = call.grad.new_zeros(()).expand(list(call.size))
    made = aten.convolution_backward(call.grad, call.x, w, None, *_geometry(call.geometry), [False, True, False])
    gradient: Tensor = made[1]
    return gradient


def _sum(call: Sum[Tensor]) -> Tensor:
    return call.x.sum(call.reduced(), keepdim=call.keepdim) if call.x.dim() else call.x.clone()


def _prod(call: Prod[Tensor]) -> Tensor:
    dims = call.reduced()
    kept = [d for d in range(call.x.dim()) if d not in dims]
    return call.x.permute(*kept, *dims).flatten(len(kept)).prod(-1).reshape(call.size()) if dims else call.x.clone()


def _hadamard(call: HadamardTransform[Tensor]) -> Tensor:
    x = call.x.movedim(call.dim, -1)
    whole = x.shape[-1] - x.shape[-1] % call.size
    matrix = torch.tensor(hadamard_matrix(Hadamard(call.size, call.seed))).to(x.dtype)
    product = (x[..., :whole].reshape(-1, call.size) @ matrix).reshape(*x.shape[:-1], whole)
    return torch.cat((product, x[..., whole:]), -1).movedim(-1, call.dim)


# Operators without an entry choose a scale, or count: their results are parameters of a rounding, not values.
_FUNCTIONS: Final[Mapping[type[Call[Any]], Callable[[Any], Tensor]]] = MappingProxyType(
    {
        Pointwise: _pointwise,
        Matmul: lambda call: call.a @ call.b,
        Convolution: _convolution,
        ConvolutionInputGradient: _input_gradient,
        ConvolutionWeightGradient: _weight_gradient,
        Sum: _sum,
        Prod: _prod,
        Cumsum: lambda call: call.x.cumsum(call.dim),
        Cumprod: lambda call: call.x.cumprod(call.dim),
        ScatterAdd: lambda call: call.x.scatter_add(call.dim, call.index.long(), call.src),
        IndexPut: lambda call: aten.index_put(call.x, _indices(call), call.values, accumulate=True),
        HadamardTransform: _hadamard,
    }
)


def _indices(call: IndexPut[Tensor]) -> Any:
    return [i if i is None or i.dtype == torch.bool else i.long() for i in call.indices]


def is_differentiated(cls: type[Call[Any]]) -> bool:
    """Whether results of an operator depend smoothly on its operands; a scale or a count does not."""
    return cls in _FUNCTIONS


def exact_of(call: Call[Tensor]) -> Tensor:
    """Return the value of a call before any rounding."""
    return _FUNCTIONS[type(call)](call)


def with_operands(call: Call[Tensor], operands: Sequence[Tensor]) -> Call[Tensor]:
    """Return a call of a contraction or a chain over other operands, in the order of ``call.operands``."""
    named: Any = call
    return replace(named, **dict(zip(call._tensors, operands, strict=True)))


def linear_of(call: ContractionCall[Tensor] | Sum[Tensor]) -> Callable[..., Tensor]:
    """Return the function of a sum of products before any rounding, of other operands in the order of the call's."""
    if isinstance(call, Matmul):
        return torch.matmul
    if isinstance(call, Convolution):
        geometry = _geometry(call.geometry)
        return lambda x, w: aten.convolution(x, w, None, *geometry)
    if isinstance(call, Sum) and call.x.dim():
        dims, keepdim = call.reduced(), call.keepdim
        return lambda x: x.sum(dims, keepdim=keepdim)
    return lambda *operands: exact_of(with_operands(call, operands))


def product_gradients(
    call: ContractionCall[Tensor], a: Tensor, b: Tensor, gradient: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the derivatives of a matrix product or a convolution with respect to its operands, where they are wanted.

    gradient: of the result. Raises TypeError for another contraction.
    """
    if isinstance(call, Matmul):
        return (gradient @ b.mT if wanted[0] else None), (a.mT @ gradient if wanted[1] else None)
    if not isinstance(call, Convolution):
        raise TypeError(f"{call.name}: expected a matrix product or a convolution")
    mask = [wanted[0], wanted[1], False]
    of_a, of_b, _ = aten.convolution_backward(gradient, a, b, None, *_geometry(call.geometry), mask)
    return of_a, of_b
