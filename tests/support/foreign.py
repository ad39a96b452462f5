"""A pytest plugin, ``-p foreign``: PyTorch's own float kernels are off by one ulp for a fifth of their results.

This models another processor, whose square root, exponential, and orders of sums and products differ. A test that
passes on one processor alone takes a stock operation as an oracle. ``+ - * /`` of elements, and short results (the
same in any order), are kept.

    PYTHONPATH=tests/support ./run tests -p foreign tests/training/test_optimizer.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

aten = torch.ops.aten
_INTEGER: Final = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
_UNARY: Final = (
    *("sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos"),
    *("atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "sigmoid", "lgamma"),
    "digamma",
)
_LIBRARY: Final = torch.library.Library("aten", "IMPL")


def _moved(y: Tensor) -> Tensor:
    """One ulp away from zero where the encoding is a multiple of five and its low bits are not all zeros."""
    if y.dtype not in _INTEGER:
        return y
    code = y.contiguous().view(_INTEGER[y.dtype])
    low = 0xFF if y.itemsize > 2 else 0x3
    chosen = torch.isfinite(y) & (y != 0) & ((code & low) != 0) & (code % 5 == 0)
    return y.clone().copy_((code + chosen.to(code.dtype)).view(y.dtype))


def _replace(name: str, into: Any, dtype: Callable[..., torch.dtype]) -> None:
    """Register the moved result of an operator's ``out`` variant, which stays PyTorch's, in the operator's place."""

    def moved(*args: Any, **kwargs: Any) -> Tensor:
        return _moved(into(*args, **kwargs, out=torch.empty(0, dtype=dtype(*args, **kwargs))))

    _LIBRARY.impl(name, moved, "CPU")


def _same(*args: Any, **kwargs: Any) -> torch.dtype:
    dtype: torch.dtype = next(a.dtype for a in args if isinstance(a, Tensor))
    return dtype


def _floating(x: Tensor, *_: Any) -> torch.dtype:
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype()


def _summed(x: Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> torch.dtype:
    return dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)


def _promoted(x: Any, y: Any) -> torch.dtype:
    return torch.result_type(x, y)


def _sum(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return aten.sum.dim_IntList(x, list(range(x.dim())), False, dtype=dtype)


def _convolution(*args: Any) -> Tensor:
    return _moved(aten._convolution.default(*args, False, False, True, True))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that kernels are replaced is the purpose
    for _name in _UNARY:
        _replace(_name, getattr(aten, _name).out, _floating)
    for _name in ("mm", "bmm", "addmm", "addcdiv", "addcmul", "_softmax", "_log_softmax", "atan2", "hypot"):
        _replace(_name, getattr(aten, _name).out, _same)
    _replace("lerp.Scalar", aten.lerp.Scalar_out, _same)
    _replace("lerp.Tensor", aten.lerp.Tensor_out, _same)
    _replace("sum.dim_IntList", aten.sum.IntList_out, _summed)
    _replace("mean.dim", aten.mean.out, _summed)
    _replace("cumsum", aten.cumsum.out, _summed)
    _replace("linalg_vector_norm", aten.linalg_vector_norm.out, _summed)
    _replace("pow.Tensor_Scalar", aten.pow.Tensor_Scalar_out, _promoted)
    _replace("pow.Tensor_Tensor", aten.pow.Tensor_Tensor_out, _promoted)
    _LIBRARY.impl("sum", _sum, "CPU")
    _LIBRARY.impl("convolution", _convolution, "CPU")
