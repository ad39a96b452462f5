"""Comparisons of many objects by few calls of C: what every call of a small model looks at.

Both tell what has changed by PyTorch's private functions, with which Dynamo evaluates its guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards, dict_version


def comparing(tensors: Sequence[Any], strides: bool = False) -> Callable[..., bool]:
    """Return a function of as many tensors that says whether they are like these; it may say no.

    It compares faster than Python, and may be wrong only in what it takes for changed. Tensors are alike if they have
    the same class, dtype, device, layout, sizes and ``requires_grad``, and the same negative bit. strides: they have
    the same strides, too.
    """
    if not all(isinstance(t, Tensor) for t in tensors):
        return _unlike
    try:
        sizes: Any = [list(t.shape) for t in tensors]
        steps: Any = [list(t.stride()) if strides else [None] * t.dim() for t in tensors]
        made = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=steps)
    except Exception:  # a subclass of tensors without sizes or strides
        return _unlike
    check: Callable[..., bool] = made.check
    return check


def _unlike(*_: Any) -> bool:
    return False


def versions(dicts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return a number for each dict, which no other content of it has: every assignment of an item gives a new one.

    The order of an OrderedDict changes without a new number.
    """
    return list(map(dict_version, dicts))  # type: ignore[arg-type]
