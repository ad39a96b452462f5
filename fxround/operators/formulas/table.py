"""The table of formulas and the helpers that they share.

``@formula(overload)`` makes a function the definition of an operator on floating-point operands. Where a formula calls
``widened``, float16 and bfloat16 operands are first widened to binary32, which is exact, and the result is rounded back
at the end, as PyTorch does. A formula that does not apply returns NotImplemented; the operator then stays in the graph,
where the passes find it in the table of rules or report it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fxround.capture import core_decompositions
from fxround.capture.torch_private import or_else
from fxround.policy import DEFINITIONS, OWN

aten = torch.ops.aten
Formula = Callable[..., Any]
# The formulas of each set of definitions. An operator that a set lacks has fxround's own formula.
TABLES: Final[Mapping[str, dict[Any, Formula]]] = MappingProxyType({name: {} for name in DEFINITIONS})
FORMULAS: Final = TABLES[OWN]
# The formulas of operators on complex numbers. The same operator on real numbers has another formula, or none.
COMPLEX_FORMULAS: Final[dict[Any, Formula]] = {}
# Formulas of operators that other packages define, by name, because those packages may be imported later or not at all.
_FOREIGN: Final[dict[str, Formula]] = {}
# The operators whose formulas reduce data to statistics: means, variances, the maxima and sums of a softmax.
_STATISTICAL: Final[set[str]] = set()


def formula(*operators: Any, definitions: str = OWN, statistics: bool = False) -> Callable[[Formula], Formula]:
    """Register a function as the definition of these operators, for floating-point operands only.

    operators: overloads, which are replaced after differentiation (their gradients have overloads of their own), the
    name of such an overload if another package defines it ("transformers.grouped_mm_fallback.default"), or functions
    that a model calls (``torch.nn.functional.cross_entropy``), which are replaced before differentiation: their
    gradients are the definition's. statistics: whether the formula's reductions are statistics of the data, which is
    the role that policies see.
    """

    def register(function: Formula) -> Formula:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            floating = any(t.is_floating_point() for t in tensors)
            return function(*args, **kwargs) if floating or not tensors else NotImplemented

        if statistics:
            _STATISTICAL.update(map(str, operators))
        for operator in operators:
            if isinstance(operator, str):
                _FOREIGN[operator] = guarded
                continue
            overload = isinstance(operator, torch._ops.OpOverload)
            TABLES[definitions][operator] = guarded if overload else or_else(guarded, operator)
        return guarded

    return register


def complex_formula(*operators: Any) -> Callable[[Formula], Formula]:
    """Register a function as the definition of these overloads where an operand or the result is complex.

    The function is called for real operands too, among which are complex Python numbers, and returns NotImplemented
    where it does not apply.
    """

    def register(function: Formula) -> Formula:
        COMPLEX_FORMULAS.update(dict.fromkeys(operators, function))
        return function

    return register


def makes_statistics(operator: Any) -> bool:
    """Whether the reductions of an operator's formula are statistics of the data."""
    # By name: the operator that a node remembers may be a copy.
    return str(operator) in _STATISTICAL


def decompositions(definitions: str = OWN) -> dict[Any, Formula]:
    """Return the table for capture: PyTorch's core decompositions, overridden by the formulas."""
    # Dynamo makes this operator of PyTorch's compiler from addcmul_, addcdiv_ and add_ with a factor. Importing fxround
    # must not load that compiler, so the operator cannot be a key of FORMULAS.
    from torch._inductor.inductor_prims import fma

    real = {**core_decompositions(), fma: _multiplied_and_added, **_foreign(), **FORMULAS, **TABLES[definitions]}
    return real | {operator: _complex_first(made, real.get(operator)) for operator, made in COMPLEX_FORMULAS.items()}


def _complex_first(function: Formula, real: Formula | None) -> Formula:
    """Return a formula of complex numbers, with the one of real numbers where it does not apply."""

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return real(*args, **kwargs) if result is NotImplemented and real is not None else result

    return chosen


def _foreign() -> dict[Any, Formula]:
    """Return the formulas of the operators of other packages that this process has imported."""
    functions = {}
    for name, function in _FOREIGN.items():
        namespace, operator, overload = name.split(".")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            functions[getattr(packet, overload)] = function
    return functions


def _multiplied_and_added(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return c + a * b


def constant(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of numbers or of rows of them, which become a constant of a graph that is being captured."""
    # torch.tensor detaches what it returns in place, which a functional graph refuses. Its first half does not.
    with _disable_current_modes():
        made = torch.tensor(values, dtype=dtype, device=device)
    kept: Tensor = aten.lift_fresh_copy(made)
    return kept


def widened(x: Tensor) -> Tensor:
    """Return x in binary32 if its dtype has 16 bits, else x."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def total(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """Return the sum over dims; x itself if there are none."""
    return torch.sum(x, list(dims), keepdim) if dims else x


def count(x: Tensor, dims: Sequence[int]) -> int:
    """Return the number of elements that a reduction over dims adds up (symbolic where the batch is)."""
    return math.prod(x.shape[d] for d in dims)


def reduced_dims(x: Tensor, dims: Sequence[int] | int | None) -> list[int]:
    """Return dims as non-negative numbers: None or an empty list means all, negative ones count from the end."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(x.dim()))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return sorted(d % x.dim() for d in listed) if x.dim() else []


def scaled(x: Tensor, factor: Any) -> Tensor:
    """Return x * factor; x itself, without an operation, if the factor is 1."""
    return x if factor == 1 else x * factor


def require_dtype(expected: torch.dtype, **tensors: Tensor | None) -> None:
    """Raise the kind of error that PyTorch's kernels raise for tensors of another dtype, which tracing would take."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != expected:
            raise RuntimeError(f"{name} is a tensor of {tensor.dtype}; expected {expected}")


def channels(v: Tensor, x: Tensor) -> Tensor:
    """Return a vector of the channels of x, shaped to broadcast over x."""
    return v.reshape([1, -1] + [1] * (x.dim() - 2))


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x * weight + bias, without what is None."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
