"""What Dynamo computes with fake tensors again for every equal layer: computed once in a trace.

Dynamo calls each function of a model on tensors without memory, to learn the dtype, the shape and the strides of its
result. For an attention these are a hundred operations on symbolic sizes. ``remembered_results`` keeps what a few
functions returned, by everything that such a call depends on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from fxround.capture.torch_private import known_of_symbols
from fxround.graph.values import described, memory_of

# Functions that write to no argument, and that the key of a call, which does not have all modes, is right for.
_FUNCTIONS: Final = (F.scaled_dot_product_attention, F.linear, F.layer_norm)
# Which implementations of attention PyTorch may choose from.
_ATTENTIONS: Final[tuple[Callable[[], bool], ...]] = (
    *(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled),
    *(torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.cudnn_sdp_enabled),
)


@contextlib.contextmanager
def remembered_results() -> Iterator[None]:
    """Compute the results of a few functions once for equal arguments, in the trace of this block."""
    from torch._dynamo import utils

    run, known = utils.run_node, dict[Any, _Result]()

    def remembered(tracer: Any, node: Any, args: Any, kwargs: Any, module: Any) -> Any:
        key = _key(tracer, node, args, kwargs)
        if key is None:
            return run(tracer, node, args, kwargs, module)
        if key in known:
            with tracer.shape_env.suppress_guards():
                return known[key].again()
        result = run(tracer, node, args, kwargs, module)
        # If the call added a condition on sizes, the next one is made under other conditions.
        if key == _key(tracer, node, args, kwargs) and _is_new(result, args, kwargs):
            known[key] = _Result(_Layout.of(result), None if result._base is None else _Layout.of(result._base))
        return result

    with mock.patch.object(utils, "run_node", remembered):
        yield


@dataclass(frozen=True)
class _Layout:
    """All of a tensor but its memory; the tensor itself may get another shape later, in place."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> _Layout:
        """Return that of a tensor."""
        return _Layout(tuple(x.size()), tuple(x.stride()), x.dtype, x.device)

    def made(self) -> Tensor:
        """Return a new tensor."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _Result:
    """The result of a call, and the tensor of which it is a view."""

    own: _Layout
    base: _Layout | None

    def again(self) -> Tensor:
        """Return an equal result in other memory."""
        return self.own.made() if self.base is None else self.base.made().as_strided(self.own.size, self.own.stride)


def _key(tracer: Any, node: Any, args: Any, kwargs: Any) -> Any:
    """Return what the result of a call depends on; None if that is not known."""
    if node.op != "call_function" or node.target not in _FUNCTIONS:
        return None
    if torch._C._is_any_autocast_enabled() or torch._C._len_torch_function_stack() or _is_transformed():
        return None
    leaves, structure = pytree.tree_flatten((args, kwargs))
    if not all(isinstance(leaf, Hashable) for leaf in leaves):
        return None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *(enabled() for enabled in _ATTENTIONS)
    symbols = tracer.fake_mode, *known_of_symbols(tracer.shape_env)  # the mode lives as long as what is known
    return node.target, structure, modes, symbols, *map(described, leaves)


def _is_transformed() -> bool:
    """Whether another mode than that of fake tensors, or a transform of functions, sees what is called."""
    transform = torch._C._functorch.peek_interpreter_stack()
    return transform is not None or torch._C._len_torch_dispatch_stack() != 1


def _is_new(result: Any, args: Any, kwargs: Any) -> bool:
    """Whether a result has its own memory, and sizes, strides, dtype and device say all about it and its base."""
    if not _is_plain(result) or not (result._base is None or _is_plain(result._base)):
        return False
    return memory_of(result) not in {memory_of(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}


def _is_plain(x: Any) -> bool:
    if type(x) is not FakeTensor or x.layout is not torch.strided or x.constant is not None:
        return False
    offset = x.storage_offset()
    marked = x.requires_grad or x.is_conj() or x.is_neg() or x.is_inference()
    return not marked and isinstance(offset, int) and offset == 0
