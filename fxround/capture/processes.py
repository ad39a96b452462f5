"""Models whose parameters several processes share (DTensor): what a capture does with their sums.

AOTAutograd traces through DTensor to the tensors that one process holds, and to collectives between processes. DTensor
leaves a sum over a dimension that processes share unfinished (``Partial``) until something needs its value, and adds a
bias to each part meanwhile. What is rounded would depend on the number of processes. In a capture, a sum is finished
where it is computed, as one process does it: ``fxround::sum_of_processes`` of the parts. The k of the product, or what
the sum adds up, is then known to be part r of an even division among processes, in process r: an order of shards makes
the bits of one process of it (``passes.shared_sums``). Other unfinished values are refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn

from fxround.errors import CaptureError

_LIBRARY: Final = torch.library.Library("fxround", "FRAGMENT")
_LIBRARY.define("sum_of_processes(Tensor x, str group, int processes) -> Tensor")


def _added(x: Tensor, group: str, processes: int) -> Tensor:
    """Return the sum in the order of the process group."""
    del processes
    functional: Any = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x, "sum", group))  # type: ignore[no-any-return]


_LIBRARY.impl("sum_of_processes", _added, "CompositeExplicitAutograd")
torch.library.register_fake("fxround::sum_of_processes", lambda x, group, processes: torch.empty_like(x), lib=_LIBRARY)
SUM_OF_PROCESSES: Final = torch.ops.fxround.sum_of_processes.default

_ATEN: Final = torch.ops.aten
# Products with the dimensions of their operands over which they sum.
_PRODUCTS: Final = {_ATEN.mm.default: (1, 0), _ATEN.bmm.default: (2, 1)}
# Formulas over these operators. DTensor would add a part of the addend to each part of the product.
_COMPOSITE: Final = (
    *(_ATEN.addmm.default, _ATEN.baddbmm.default, _ATEN.addbmm.default),
    *(_ATEN.mv.default, _ATEN.addmv.default, _ATEN.dot.default, _ATEN.vdot.default),
)
_SUMS: Final = (_ATEN.sum.default, _ATEN.sum.dim_IntList)
_ONE_DIMENSION: Final = (
    "fxround computes with meshes of one dimension: pass a part of the mesh, as mesh['tp'], to parallelize_module"
)


def _tensor_class() -> Any:
    """Return DTensor; None where nothing has imported it, so that there is no such tensor."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_shared(value: object) -> bool:
    """Whether a value is a DTensor: a tensor that several processes hold, in parts or as a whole."""
    kind = _tensor_class()
    return kind is not None and isinstance(value, kind)


def is_part(value: Any) -> bool:
    """Whether a value is a DTensor of which this process has a part alone."""
    return is_shared(value) and not all(placement.is_replicate() for placement in value.placements)


def mesh_of(model: nn.Module) -> Any:
    """Return the device mesh of the processes that share the parameters of a model; None for one process.

    Raises CaptureError for parameters that are shared in a way that fxround does not know.
    """
    meshes: list[Any] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_shared(tensor):
            continue
        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        if mesh.ndim != 1:
            raise CaptureError(f"{name} is a DTensor on a mesh of {mesh.ndim} dimensions. {_ONE_DIMENSION}.")
        if meshes and mesh != meshes[0]:
            raise CaptureError(
                f"{name} is a DTensor on {mesh}, another parameter on {meshes[0]}: fxround computes with one mesh"
            )
        _require_even(name, tensor, placements[0], mesh.size())
        meshes.append(mesh)
    return meshes[0] if meshes else None


def _require_even(name: str, tensor: Any, placement: Any, processes: int) -> None:
    """Raise CaptureError unless each process holds all of a tensor, or an equal part of one of its dimensions."""
    if placement.is_replicate():
        return
    if not _is_plain_shard(placement):
        raise CaptureError(f"{name} is a DTensor with the placement {placement}; expected Shard or Replicate")
    size = tensor.shape[placement.dim]
    if size % processes:
        raise CaptureError(
            f"dimension {placement.dim} of {name} has {size} elements, which {processes} processes cannot share "
            f"evenly: fxround computes with equal parts. Choose a number of processes that divides {size}, or "
            f"replicate the layer (leave it out of the plan)."
        )


def _is_plain_shard(placement: Any) -> bool:
    """Whether process r holds part r of a dimension, all elements of it side by side."""
    # _StridedShard, which some versions derive from Shard, holds elements of several places.
    return type(placement).__name__ == "Shard"


def local(value: Any) -> Any:
    """Return the part of a tensor that this process holds, through which gradients flow; any other value as it is."""
    return value.to_local() if is_shared(value) else value


@contextlib.contextmanager
def finished_sums(decompositions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Trace in this block: sums over what processes share are finished where they are computed.

    decompositions: the formulas of composite operators.
    """
    kind = _tensor_class()
    if kind is None:
        yield
        return
    handlers: dict[Any, Callable[..., Any]] = dict.fromkeys((*_PRODUCTS, *_SUMS), _finished)
    handlers |= {op: _by_formula(decompositions[op]) for op in _COMPOSITE if op in decompositions}
    flatten = kind.__tensor_flatten__

    def flattened(self: Any) -> Any:
        unfinished = [p for p in self.placements if p.is_partial()]
        if unfinished:
            raise CaptureError(
                f"a value leaves the graph as {unfinished[0]}, a sum over processes that DTensor has not finished, and "
                "that has no order which does not depend on their number"
            )
        return flatten(self)

    with (
        mock.patch.dict(kind._op_dispatcher._custom_op_handlers, handlers),
        mock.patch.object(kind, "__tensor_flatten__", flattened),
    ):
        yield


def _by_formula(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler that computes a composite operator by its formula."""
    return lambda op, args, kwargs: formula(*args, **kwargs)


def _finished(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a product or a sum of DTensors; one over a shared dimension is finished."""
    dispatcher = _tensor_class()._op_dispatcher
    called = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(called)
    sharding = called.output_sharding
    spec = sharding.output_spec
    result = dispatcher._dispatch_get_local_results_slow_path(op, args, called)
    if not any(placement.is_partial() for placement in spec.placements):
        return dispatcher.wrap(result, spec)
    mesh = called.compute_mesh
    if mesh.ndim != 1:
        raise CaptureError(f"{op} sums over processes of a mesh of {mesh.ndim} dimensions. {_ONE_DIMENSION}.")
    read = sharding.redistribute_schema if sharding.needs_redistribute else called.schema
    _require_parts(op, [s for s in read.args_schema if hasattr(s, "placements")], args, mesh.size())
    whole = SUM_OF_PROCESSES(result, mesh.get_group().group_name, mesh.size())
    return dispatcher.wrap(whole, _replicated(spec))


def _require_parts(op: Any, specs: list[Any], args: tuple[Any, ...], processes: int) -> None:
    """Raise CaptureError unless process r computes part r of an even division of what is summed.

    specs: how the operands are shared when the operator reads them.
    """
    (placement, *_), dims = specs[0].placements, _summed(op, args, len(specs[0].shape))
    if any(p.is_partial() for spec in specs for p in spec.placements):
        raise CaptureError(
            f"{op} reads a sum over processes that DTensor has not finished, and that has no order which does not "
            "depend on their number"
        )
    shape = specs[0].shape
    first = next((d for d in dims if shape[d] != 1), dims[0])
    plain = all(_is_plain_shard(p) for spec in specs for p in spec.placements)
    if not plain or placement.dim % len(shape) != first:
        raise CaptureError(
            f"{op} sums over dimensions {dims} of a tensor of shape {tuple(shape)}, of which each process has "
            f"{placement}: its elements do not follow each other in the sum of one process, so that the bits would "
            "depend on the number of processes. Let processes share the first dimension that is summed, or none "
            "(PrepareModuleInput, redistribute)."
        )
    if shape[first] % processes:
        raise CaptureError(
            f"{op} sums {shape[first]} elements that {processes} processes share, and cannot share evenly: choose a "
            "number of processes that divides it"
        )


def _summed(op: Any, args: tuple[Any, ...], dims: int) -> list[int]:
    """Return the dimensions of the first operand over which an operator sums, ascending."""
    if op in _PRODUCTS:
        return [_PRODUCTS[op][0]]
    named = args[1] if len(args) > 1 and args[1] is not None else []
    return sorted(d % dims for d in ([named] if isinstance(named, int) else named)) or list(range(dims))


def _replicated(spec: Any) -> Any:
    """Return the spec of a tensor that every process holds as a whole."""
    from torch.distributed.tensor import Replicate

    return type(spec)(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
