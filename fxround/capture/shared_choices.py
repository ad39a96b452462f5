"""Maxima, chosen elements and rows of what several processes share, and the formulas over them.

Each of them is exact: a maximum over a dimension that processes share is that of their maxima, and an element or a row
that one process has is taken from it. DTensor adds what the processes have in place of the latter, with zeros for what
they do not have, which changes -0. Softmax, its logarithm and cross-entropy of a shared dimension are their formulas
over parts, with sums that are finished where they are computed (``processes``): with and without ``loss_parallel``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx.experimental.proxy_tensor import set_original_aten_op

from fxround.capture.processes import (
    LIBRARY,
    apart,
    finished,
    is_shared,
    noted,
    parts_of,
    replicated,
    share_of,
    tensor_class,
    uneven_share,
    whole,
)
from fxround.graph.site import Share

LIBRARY.define("extreme_of_processes(Tensor x, str group, int processes, bool largest) -> Tensor")


def _extreme(x: Tensor, group: str, processes: int, largest: bool) -> Tensor:
    """Return the elementwise maximum, or minimum, of the tensors x of all processes of a group."""
    choose = torch.amax if largest else torch.amin
    return choose(gathered(x, group, processes), 0)


LIBRARY.impl("extreme_of_processes", _extreme, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fxround::extreme_of_processes", lambda x, group, processes, largest: torch.empty_like(x), lib=LIBRARY
)
EXTREME_OF_PROCESSES: Final = torch.ops.fxround.extreme_of_processes.default

_ATEN: Final = torch.ops.aten
_EXTREMES: Final = {_ATEN.amax.default: True, _ATEN.amin.default: False}
_CONDITIONS: Final = {
    **dict.fromkeys((_ATEN.any.default, _ATEN.any.dim, _ATEN.any.dims), torch.any),
    **dict.fromkeys((_ATEN.all.default, _ATEN.all.dim, _ATEN.all.dims), torch.all),
}
# Formulas of reductions, with the position of the operand and of the dimensions over which they reduce it.
_FORMULAS: Final = {
    **dict.fromkeys((_ATEN.max.default, _ATEN.min.default), (0, None)),
    **dict.fromkeys((_ATEN._softmax.default, _ATEN._log_softmax.default, _ATEN.logsumexp.default), (0, 1)),
    **dict.fromkeys((_ATEN._softmax_backward_data.default, _ATEN._log_softmax_backward_data.default), (1, 2)),
}
_LOSSES: Final = (_ATEN.nll_loss_forward.default, _ATEN.nll_loss2d_forward.default)
_GRADIENTS_OF_LOSSES: Final = (_ATEN.nll_loss_backward.default, _ATEN.nll_loss2d_backward.default)
# While traced, DTensor (torch 2.13) takes the operators with names like __and__ for operators in place, and returns
# their first operand.
_SPELLED: Final = {
    getattr(getattr(_ATEN, f"__{name}__"), overload): getattr(getattr(_ATEN, spelled), other)
    for name, spelled in (
        *(("and", "bitwise_and"), ("or", "bitwise_or"), ("xor", "bitwise_xor")),
        *(("lshift", "bitwise_left_shift"), ("rshift", "bitwise_right_shift")),
    )
    for overload, other in (("Tensor", "Tensor"), ("Scalar", "Tensor_Scalar" if "shift" in name else "Scalar"))
}
# DTensor (torch 2.13) takes a shared dimension of a convolution's weight for one of the image.
_CONVOLUTIONS: Final = (_ATEN.convolution.default, _ATEN.convolution_backward.default)
# Operators that need all elements along a dimension, of which DTensor (torch 2.13) computes some of parts alone.
_OF_LINES: Final = (
    *(_ATEN.cumsum.default, _ATEN.cumprod.default, _ATEN.logcumsumexp.default),
    *(_ATEN.cummax.default, _ATEN.cummin.default, _ATEN.argmax.default, _ATEN.argmin.default),
    *(_ATEN.prod.default, _ATEN.prod.dim_int),
)


@contextlib.contextmanager
def exact_choices(formulas: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Trace in this block: what is chosen among elements that processes share is chosen as one process does.

    formulas: those of composite operators.
    """
    kind = tensor_class()
    if kind is None:
        yield
        return
    known = kind._op_dispatcher._custom_op_handlers
    handlers: dict[Any, Callable[..., Any]] = {
        **{op: _extreme_by(formulas[op]) for op in _EXTREMES},
        **dict.fromkeys(_CONDITIONS, _condition),
        **{op: _reduced_by(formulas[op], *at) for op, at in _FORMULAS.items()},
        **{op: _loss_by(formulas[op], 0) for op in _LOSSES},
        **{op: _loss_by(formulas[op], 1) for op in _GRADIENTS_OF_LOSSES},
        **{op: _of_whole_lines(known.get(op, finished)) for op in _OF_LINES},
        **{op: _spelled(other) for op, other in _SPELLED.items()},
        **dict.fromkeys(_CONVOLUTIONS, _of_whole_operands),
        _ATEN.gather.default: _chosen,
        _ATEN.scatter.src: _placed,
        _ATEN.embedding.default: _rows,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(known, handlers))
        if "torch.distributed.tensor.parallel.loss" in sys.modules:
            # loss_parallel would put handlers of its own in the places of these, and take them away at its end.
            for function in ("_enable_custom_loss_ops", "_disable_custom_loss_ops"):
                stack.enter_context(mock.patch(f"torch.distributed.tensor.parallel.loss.{function}", _nothing))
        yield


def _nothing() -> None:
    """Do nothing."""


def gathered(x: Tensor, group: str, processes: int) -> Tensor:
    """Return the tensors x of all processes of a group, one after another along a new first dimension."""
    functional: Any = torch.ops._c10d_functional
    flat = x.reshape(-1)
    stored = flat.to(torch.uint8) if x.dtype == torch.bool else flat
    everything = functional.wait_tensor(functional.all_gather_into_tensor(stored, processes, group))
    return everything.to(x.dtype).reshape(processes, *x.shape)  # type: ignore[no-any-return]


def _group_of(x: Any) -> tuple[str, int]:
    return x.device_mesh.get_group().group_name, x.device_mesh.size()


def _all_of(x: Any, part: Tensor) -> Tensor:
    """Return the parts that the processes of a DTensor have of something, one after another."""
    return gathered(part, *_group_of(x))


def _dims(x: Any, dims: Any) -> list[int]:
    """Return dimensions as non-negative numbers; all of them if none is named."""
    named = [dims] if isinstance(dims, int) else list(dims or range(x.ndim))
    return [d % max(x.ndim, 1) for d in named]


def _extreme_by(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler of amax or amin: its formula over parts; of the kernel that the formula calls, the parts'."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, dims, keepdim = args[0], args[1] if len(args) > 1 else (), len(args) > 2 and args[2]
        if not parts_of(x, _dims(x, dims)):
            return finished(op, args, kwargs)
        with set_original_aten_op(op):
            result = formula(x, dims, keepdim)
        if result is not NotImplemented:
            return result
        part = op(x.to_local(), _dims(x, dims), keepdim)
        return replicated(x, EXTREME_OF_PROCESSES(part, *_group_of(x), _EXTREMES[op]))

    return handler


def _condition(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute whether any or all elements along shared dimensions are true."""
    x, dims = args[0], args[1] if len(args) > 1 else None
    if not parts_of(x, _dims(x, dims)):
        return finished(op, args, kwargs)
    return replicated(x, _CONDITIONS[op](_all_of(x, op(x.to_local(), *args[1:], **kwargs)), 0))


def _reduced_by(formula: Callable[..., Any], operand: int, place: int | None) -> Callable[..., Any]:
    """Return the handler of a formula that reduces an operand along the dimensions in an argument."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[operand]
        dims = _dims(x, None if place is None else args[place])
        if not parts_of(x, dims, even=False):
            return finished(op, args, kwargs)
        if uneven_share(x, x.placements[0].dim) is not None:
            return _by_all(x, op, args, kwargs)
        with set_original_aten_op(op):
            result = formula(*args, **kwargs)
        return finished(op, args, kwargs) if result is NotImplemented else result  # integers have no formula

    return handler


def _loss_by(formula: Callable[..., Any], operand: int) -> Callable[..., Any]:
    """Return the handler of a loss of chosen classes that processes share; its plain tensors are those of all."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[operand]
        if not is_shared(x) or not parts_of(x, [min(x.ndim - 1, 1)], even=False):
            return finished(op, args, kwargs)
        given = [replicated(x, a) if isinstance(a, Tensor) and not is_shared(a) else a for a in args]
        if uneven_share(x, x.placements[0].dim) is not None:
            return _by_all(x, op, given, kwargs)
        with set_original_aten_op(op):
            return formula(*given)

    return handler


def _by_all(x: Any, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute all of an operation in every process, which keeps its part of what is shaped as its operand x."""
    kind = tensor_class()
    results = op(*pytree.tree_map_only(kind, whole, args), **pytree.tree_map_only(kind, whole, kwargs))

    def kept(result: Any) -> Any:
        return result.redistribute(placements=x.placements) if result.shape == x.shape else result

    return pytree.tree_map_only(kind, kept, results)


def _of_whole_lines(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler that gives every process all elements along a dimension, if processes share it."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
        if not any(placement.is_shard(d) for placement in x.placements for d in _dims(x, dim)):
            return otherwise(op, args, kwargs)
        return op(whole(x), *args[1:], **kwargs)

    return handler


def _spelled(other: Any) -> Callable[..., Any]:
    """Return the handler of an operator that is another one by its name."""
    return lambda op, args, kwargs: other(*args, **kwargs)


def _of_whole_operands(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute all of an operation in every process."""
    like = next(a for a in args if is_shared(a))
    if any(isinstance(a, Tensor) and not is_shared(a) for a in args):
        return finished(op, args, kwargs)  # raises PyTorch's error
    results = op(*(whole(a).to_local() if is_shared(a) else a for a in args), **kwargs)
    return pytree.tree_map_only(Tensor, lambda result: replicated(like, result), results)


def _chosen(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``gather``: each element is that of the process that has it."""
    x, dim, index, *rest = args
    if not _is_whole(index) or not parts_of(x, [dim % max(x.ndim, 1)], even=False):
        return finished(op, args, kwargs)
    if uneven_share(x, dim) is not None:
        return _by_all(x, op, args, kwargs)
    part, wanted = x.to_local(), index.to_local()
    own = _owned(x, dim)
    found = op(part, dim, apart((wanted - own.first).clamp(0, own.own - 1)), *rest, **kwargs)
    return replicated(x, _all_of(x, found).gather(0, (wanted // own.own).unsqueeze(0)).squeeze(0))


def _placed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``scatter``: each process places what belongs to its part, the rest beyond its end."""
    x, dim, index, source = args
    if not (_is_whole(index) and _is_whole(source)) or not parts_of(x, [dim % max(x.ndim, 1)], even=False):
        return finished(op, args, kwargs)
    if uneven_share(x, dim) is not None:
        return _by_all(x, op, args, kwargs)
    part, places = x.to_local(), index.to_local()
    own = _owned(x, dim)
    padding = [0, 0] * (part.dim() - 1 - dim % part.dim()) + [0, 1]
    longer = _ATEN.constant_pad_nd(part, padding, 0.0)
    placed = op(longer, dim, _inside(places, own), source.to_local())
    return _like(x, noted(placed.narrow(dim, 0, own.own), dim % part.dim()))


def _rows(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``embedding``: each row is that of the process that has it."""
    weight, indices, *rest = args
    if not parts_of(weight, [0], even=False) or not _is_whole(indices):
        return finished(op, args, kwargs)
    wanted, part, own = indices.to_local(), weight._local_tensor, _owned(weight, 0)
    table = part if own.own else _ATEN.constant_pad_nd(part, [0, 0, 0, 1], 0.0)  # no process takes this row
    found = op(table, apart((wanted - own.first).clamp(0, table.shape[0] - 1)), *rest, **kwargs)
    elements, most = wanted.numel(), share_of(own.whole, weight.device_mesh.size(), 0).own
    places = (wanted // most).reshape(-1) * elements + torch.arange(elements, device=wanted.device)
    rows = _all_of(weight, found).reshape(-1, found.shape[-1]).index_select(0, places)
    return replicated(weight, rows.reshape(*wanted.shape, found.shape[-1]))


class _Rows(torch.autograd.Function):
    """An embedding whose rows processes share; the gradient of the rows that a process has is its own."""

    @staticmethod
    def forward(ctx: Any, weight: Any, indices: Any, padding: int, scales: bool) -> Any:
        ctx.weight, ctx.indices, ctx.padding, ctx.scales = weight, indices, padding, scales
        return _ATEN.embedding(weight, indices, padding, scales)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        weight = ctx.weight
        own, uneven = _owned(weight, 0), uneven_share(weight, 0)
        wanted = ctx.indices.to_local()
        places = _inside(wanted, own)
        places = torch.where(wanted == ctx.padding, own.own, places) if ctx.padding >= 0 else places
        rows = _ATEN.embedding_dense_backward(whole(gradient).to_local(), places, own.own + 1, -1, ctx.scales)
        part = noted(rows, 0, own.own, uneven)[: own.own]
        return _like(weight, noted(part, 0, uneven=uneven)), None, None, None


def embedding(
    indices: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Return ``torch.nn.functional.embedding``; of a weight whose rows processes share, with gradients in parts."""
    parted = is_shared(weight) and parts_of(weight, [0], even=False) and _is_whole(indices)
    if max_norm is not None or sparse or not parted:
        return torch.nn.functional.embedding(
            indices, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return _Rows.apply(weight, indices, padding, scale_grad_by_freq)  # type: ignore[no-untyped-call]


def _is_whole(x: Any) -> bool:
    return is_shared(x) and all(placement.is_replicate() for placement in x.placements)


def _owned(x: Any, dim: int) -> Share:
    """Return what this process has of a dimension of a DTensor."""
    return share_of(x.shape[dim], x.device_mesh.size(), x.device_mesh.get_local_rank())


def _inside(wanted: Tensor, own: Share) -> Tensor:
    """Return places in the part that this process has; that beyond its end for those that others have."""
    places = wanted - own.first
    return apart(torch.where((places < 0) | (places >= own.own), own.own, places))


def _like(x: Any, part: Tensor) -> Any:
    """Return the DTensor with the shape of another one of which this process has a part."""
    return tensor_class().from_local(
        part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
