"""A caller's function in a wider dtype than the one that it was written for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Methods that convert to a narrower dtype without naming it.
_CASTS: Final = frozenset(("float", "half", "bfloat16"))


class Widening(TorchFunctionMode):
    """A context in which a function of PyTorch that is given a tensor of ``dtype`` computes in this dtype.

    Its other floating-point tensors, such as the targets of a loss, are converted, because many losses refuse operands
    of two dtypes. A conversion to a narrower dtype leaves the tensor as it is. What is changed in place keeps its
    dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named: Mapping[str, Any] = kwargs or {}
        name = getattr(func, "__name__", "")
        leaves = pytree.tree_leaves((args, named))
        in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__get__", "__set__")
        in_place = in_place or named.get("out") is not None
        if in_place or not any(isinstance(leaf, Tensor) and leaf.dtype == self.dtype for leaf in leaves):
            return func(*args, **named)
        if name in _CASTS:
            return args[0]
        args, named = pytree.tree_map(self._widened, (args, named))
        return func(*args, **named)

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self.dtype if self._is_narrower(value) else value
        return value.to(self.dtype) if isinstance(value, Tensor) and self._is_narrower(value.dtype) else value

    def _is_narrower(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and torch.finfo(dtype).bits < torch.finfo(self.dtype).bits


def widely(function: Callable[[Any], Any], made: Any, own: torch.dtype | None = None) -> Any:
    """Return ``function(made)``, computed in the dtype of ``made`` where that is wider than a model's results.

    made: a pytree. own: the dtype of the results, for which the function was written; None if they are in binary32.
    """
    dtypes = [leaf.dtype for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    widest = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
    if widest == (own or torch.float32):
        return function(made)
    with Widening(widest):
        return function(made)
