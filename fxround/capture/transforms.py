"""Transforms of PyTorch that a compiled module meets while it runs: vmap of a backward pass, forward derivatives."""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad

from fxround.errors import FxroundError

TANGENTS_REFUSED: Final = (
    "forward-mode differentiation (torch.autograd.forward_ad) passes a tangent to a compiled module, whose "
    "kernels have no rules for that: torch.autograd.functional.jvp computes the same product from gradients, "
    "or compile a model that calls torch.func.jvp"
)
# Takes tangents and returns gradients, in both of which None stands for nothing.
Backward = Callable[[Sequence[Any]], Sequence[Any]]


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` (grad, vmap) is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# What PyTorch calls the tensors of torch.func, in its messages.
TRANSFORMED: Final = ("GradTrackingTensor(", "BatchedTensor(")


@contextlib.contextmanager
def undone_transforms() -> Iterator[None]:
    """Leave PyTorch's state of dispatch as it was where a trace fails inside of a transform of ``torch.func``.

    The frames of the trace hold contexts of functorch. Whenever those are collected, they set the state that they met,
    and no operation records gradients any more (torch 2.13, ``torch.compile`` too): they are released here.
    """
    with torch._C._PreserveDispatchKeyGuard():
        try:
            yield
        except Exception as error:
            chain: BaseException | None = error
            inside = False
            while chain is not None:
                inside = inside or any(name in str(chain) for name in TRANSFORMED)
                traceback.clear_frames(chain.__traceback__)
                chain = chain.__cause__ or chain.__context__
            if inside:
                gc.collect()
            raise


def differentiates_forward() -> bool:
    """Whether forward-mode automatic differentiation is at work."""
    return forward_ad._current_level >= 0


def has_tangent(value: Any) -> bool:
    """Whether a value is a tensor with a tangent of forward-mode differentiation."""
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None


def by_rows(backward: Backward, tangents: Sequence[Any]) -> Sequence[Any]:
    """Return ``backward(tangents)``, called once for each row of tangents that vmap has made one tensor of.

    ``torch.autograd.grad(is_grads_batched=True)``, ``jacobian(vectorize=True)`` and ``torch.func.vmap`` of a call of
    ``torch.autograd.grad`` do so. A row has the bits of a backward pass of its own. Raises FxroundError in another
    transform of ``torch.func``.
    """
    functorch, top = torch._C._functorch, torch._C._functorch.peek_interpreter_stack()
    if top is None:
        return _by_rows_of_autograd(backward, tangents)
    level = top.level()
    if top.key() != functorch.TransformType.Vmap:
        raise FxroundError(
            f"torch.func ({top.key().name.lower()}) transforms the backward pass of a compiled module, whose kernels "
            "have no rules for that: use torch.autograd.grad with create_graph=True"
        )
    own = [isinstance(t, Tensor) and functorch.maybe_get_level(t) == level for t in tangents]
    dims = [functorch.maybe_get_bdim(t) if batched else None for t, batched in zip(tangents, own, strict=True)]
    plain = [functorch.get_unwrapped(t) if batched else t for t, batched in zip(tangents, own, strict=True)]
    with temporarily_pop_interpreter_stack():
        stacked = _stacked(functools.partial(by_rows, backward), plain, dims)
    return stacked if dims == [None] * len(dims) else [_wrapped(functorch._add_batch_dim, g, level) for g in stacked]


def _by_rows_of_autograd(backward: Backward, tangents: Sequence[Any]) -> Sequence[Any]:
    """Do the same for the vmap of ``torch.autograd``, which has tensors and levels of its own."""
    own = [isinstance(t, Tensor) and torch._C._functorch.is_legacy_batchedtensor(t) for t in tangents]
    if not any(own):
        return backward(tangents)
    torch._C._vmapmode_increment_nesting()
    level = torch._C._vmapmode_decrement_nesting()
    plain = [torch._remove_batch_dim(t, level, 1, 0) if b else t for t, b in zip(tangents, own, strict=True)]
    stacked = _stacked(backward, plain, [0 if batched else None for batched in own])
    return [_wrapped(torch._add_batch_dim, g, level) for g in stacked]


def _wrapped(wrap: Callable[..., Any], gradient: Any, level: int) -> Any:
    return None if gradient is None else wrap(gradient, 0, level)


def _stacked(backward: Backward, tangents: Sequence[Any], dims: Sequence[int | None]) -> Sequence[Any]:
    """Return the gradients of all rows, along a new first dimension; without rows, those of the tangents."""
    pairs = list(zip(tangents, dims, strict=True))
    sizes = [t.shape[d] for t, d in pairs if d is not None]
    if not sizes:
        return backward(tangents)
    rows = ([t if d is None else t.select(d, i) for t, d in pairs] for i in range(sizes[0]))
    columns = zip(*map(backward, rows), strict=True)
    return [None if column[0] is None else torch.stack(column) for column in columns]


def will_run(node: Any) -> bool:
    """Whether the backward pass that runs needs the gradient for a node of autograd's graph.

    PyTorch does not tell it of a leaf under ``torch.autograd.grad``; then it may.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
