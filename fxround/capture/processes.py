"""Models whose parameters several processes share (DTensor): what a capture does with their sums.

AOTAutograd traces through DTensor to the tensors that one process holds, and to collectives between processes. DTensor
leaves a sum over a dimension that processes share unfinished (``Partial``) until something needs its value, and adds a
bias to each part meanwhile. What is rounded would depend on the number of processes. In a capture, a sum is finished
where it is computed, as one process does it: ``fxround::sum_of_processes`` of the parts. The k of the product, or what
the sum adds up, is then known to be part r of an even division among processes, in process r: an order of shards makes
the bits of one process of it (``passes.shared_sums``). Where it is not, as in a sum over batch and positions of which
each process has some positions, every process gathers the operands and computes all of it. Other unfinished values are
refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxround.errors import CaptureError
from fxround.graph.dialect import graphs_of
from fxround.graph.site import SHARING, Share, Sharing
from fxround.graph.values import evaluate

# The attribute of a DTensor that is the part of this process.
LOCAL: Final = "_local_tensor"
LIBRARY: Final = torch.library.Library("fxround", "FRAGMENT")
LIBRARY.define("sum_of_processes(Tensor x, str group, int processes) -> Tensor")


def _added(x: Tensor, group: str, processes: int) -> Tensor:
    """Return the sum in the order of the process group."""
    del processes
    functional: Any = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x, "sum", group))  # type: ignore[no-any-return]


LIBRARY.impl("sum_of_processes", _added, "CompositeExplicitAutograd")
torch.library.register_fake("fxround::sum_of_processes", lambda x, group, processes: torch.empty_like(x), lib=LIBRARY)
SUM_OF_PROCESSES: Final = torch.ops.fxround.sum_of_processes.default

# The same tensor, with a note for the passes: what this process has of a value that several processes share.
LIBRARY.define("shared(Tensor x, int? dim, int? size, int[] uneven) -> Tensor")
LIBRARY.impl("shared", lambda x, dim, size, uneven: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake(
    "fxround::shared", lambda x, dim, size, uneven: x.new_empty_strided(x.shape, x.stride()), lib=LIBRARY
)
_SHARED: Final = torch.ops.fxround.shared.default


def noted(x: Tensor, dim: int | None, size: int | None = None, uneven: Share | None = None) -> Tensor:
    """Return a tensor with a note of what this process has of it (``site.Sharing``)."""
    return _SHARED(x, dim, size, uneven or ())  # type: ignore[no-any-return]


def apart(x: Tensor) -> Tensor:
    """Return a tensor that every process computes from its rank, as indices into its own part."""
    return noted(x, None, -1)


_ATEN: Final = torch.ops.aten
# Products with the dimensions of their operands over which they sum.
_PRODUCTS: Final = {_ATEN.mm.default: (1, 0), _ATEN.bmm.default: (2, 1)}
# Formulas over these operators. DTensor would add a part of the addend to each part of the product.
_COMPOSITE: Final = (
    *(_ATEN.addmm.default, _ATEN.baddbmm.default, _ATEN.addbmm.default),
    *(_ATEN.mv.default, _ATEN.addmv.default, _ATEN.dot.default, _ATEN.vdot.default),
)
_SUMS: Final = (_ATEN.sum.default, _ATEN.sum.dim_IntList)
# Operators with sums inside. DTensor would leave them unfinished, and each of them is a formula over several operators.
_WITH_SUMS: Final = (
    *(_ATEN.mean.default, _ATEN.mean.dim, _ATEN.var.correction, _ATEN.var_mean.correction),
    *(_ATEN.native_layer_norm_backward.default, _ATEN.linalg_vector_norm.default),
    _ATEN.embedding_dense_backward.default,
)
_UNFINISHED: Final = (
    "a value that each process has a part of, which DTensor has not combined: fxround knows no order for it that does "
    "not depend on the number of processes"
)
_ONE_DIMENSION: Final = (
    "fxround computes with meshes of one dimension: pass a part of the mesh, as mesh['tp'], to parallelize_module"
)


def tensor_class() -> Any:
    """Return DTensor; None where nothing has imported it, so that there is no such tensor."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_shared(value: object) -> bool:
    """Whether a value is a DTensor: a tensor that several processes hold, in parts or as a whole."""
    kind = tensor_class()
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
        if not (placements[0].is_replicate() or _is_plain_shard(placements[0])):
            raise CaptureError(f"{name} is a DTensor with the placement {placements[0]}; expected Shard or Replicate")
        meshes.append(mesh)
    return meshes[0] if meshes else None


def share_of(size: Any, processes: int, rank: int) -> Share:
    """Return what a process has of a dimension of this size: as many elements as any, the last ones fewer or none."""
    if size % processes == 0:  # also of a symbolic size
        return Share(rank * (size // processes), size // processes, size)
    most = -(-size // processes)
    first = min(rank * most, size)
    return Share(first, min(most, size - first), size)


def uneven_share(x: Any, dim: int) -> Share | None:
    """Return what this process has of a dimension that the processes cannot share evenly; None if they can.

    x: a DTensor, or the spec of one.
    """
    size, mesh = x.shape[dim], x.device_mesh
    return share_of(size, mesh.size(), mesh.get_local_rank()) if size % mesh.size() else None


def require_known_placement(name: str, tensor: Any, mesh: Any) -> None:
    """Raise CaptureError for a DTensor argument that processes share in a way that fxround does not know.

    mesh: that of the model's parameters; None for a model of one process.
    """
    if mesh is None:
        raise CaptureError(
            f"{name} is a DTensor, and no parameter of the model is one: pass tensor.to_local() or tensor.full_tensor()"
        )
    if tensor.device_mesh != mesh:
        raise CaptureError(f"{name} is a DTensor on {tensor.device_mesh}, the parameters on {mesh}: redistribute it")
    (placement,) = tensor.placements
    if not (placement.is_replicate() or _is_plain_shard(placement)):
        raise CaptureError(
            f"{name} is a DTensor with the placement {placement}; expected Shard or Replicate: call redistribute first"
        )
    shape, own = list(tensor.shape), own_shape(tensor)
    if placement.is_shard():
        shape[placement.dim] = share_of(shape[placement.dim], mesh.size(), mesh.get_local_rank()).own
    if tuple(shape) != own:
        raise CaptureError(
            f"{name} is a DTensor of shape {tuple(tensor.shape)} with the placement {placement}, of which this process "
            f"has {own}; expected {tuple(shape)}: make it by distribute_tensor, or by from_local of such parts"
        )


def own_shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of what this process has of a tensor; None for any other value."""
    own = getattr(value, LOCAL) if is_shared(value) else value
    return tuple(own.shape) if isinstance(own, Tensor) else None


def copied(shared: Any) -> Any:
    """Return a copy of a DTensor, a leaf, of which this process has a part of the same strides."""
    own = getattr(shared, LOCAL)
    memory = own.untyped_storage().clone()
    part = own.new_empty(0).set_(memory, own.storage_offset(), own.shape, own.stride())
    # from_local would give dimensions of one element other strides.
    names, context = shared.__tensor_flatten__()
    inner = {name: getattr(shared, name) for name in names} | {LOCAL: part}
    made = type(shared).__tensor_unflatten__(inner, context, shared.shape, shared.stride())
    return made.requires_grad_(shared.requires_grad)


@dataclass(frozen=True)
class Placement:
    """How processes share a result of the model that is a DTensor.

    dim: the dimension of which each process has a part; None: each has all of it. whole: the number of elements of a
    dimension that they cannot share evenly; None if they can.
    """

    dim: int | None
    whole: int | None = None

    def of(self, own: Tensor, mesh: Any) -> Any:
        """Return the DTensor of which this process has a part, through which gradients flow."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if self.dim is None:
            return DTensor.from_local(own, mesh, [Replicate()], run_check=False)
        if self.whole is None:
            return DTensor.from_local(own, mesh, [Shard(self.dim)], run_check=False)
        shape = torch.Size((*own.shape[: self.dim], self.whole, *own.shape[self.dim + 1 :]))
        order = sorted(range(own.dim()), key=own.stride, reverse=True)
        stride = torch.empty_permuted(shape, order, device="meta").stride()
        return DTensor.from_local(own, mesh, [Shard(self.dim)], run_check=False, shape=shape, stride=stride)


def placements_of(joint: Any) -> dict[int, Placement]:
    """Return how processes share the results of AOTAutograd's graph that are DTensors, by their positions."""
    metadata = joint._aot_state.fw_metadata
    results = metadata.subclass_fw_graph_out_meta[metadata.num_mutated_inp_runtime_indices :]
    made = {i: m.original_subclass for i, m in enumerate(results) if is_shared(getattr(m, "original_subclass", None))}
    return {i: _placement_of(tensor) for i, tensor in made.items()}


def _placement_of(tensor: Any) -> Placement:
    (placement,) = tensor.placements
    if placement.is_replicate():
        return Placement(None)
    dim = placement.dim % tensor.dim()
    return Placement(dim, int(tensor.shape[dim]) if uneven_share(tensor, dim) else None)


def _is_plain_shard(placement: Any) -> bool:
    """Whether process r holds part r of a dimension, all elements of it side by side."""
    # _StridedShard, which some versions derive from Shard, holds elements of several places.
    return type(placement).__name__ == "Shard"


def local(value: Any) -> Any:
    """Return the part of a tensor that this process holds, through which gradients flow; any other value as it is."""
    return value.to_local() if is_shared(value) else value


def part_like(shared: Any, whole: Tensor) -> Tensor:
    """Return what this process has of a whole tensor, if it is shared as a DTensor is."""
    from torch.distributed.tensor import distribute_tensor

    placed: Any = distribute_tensor(whole, shared.device_mesh, shared.placements, src_data_rank=None)
    part: Tensor = placed.to_local()
    return part


@contextlib.contextmanager
def finished_sums(decompositions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Trace in this block: sums over what processes share are finished where they are computed.

    decompositions: the formulas of composite operators.
    """
    kind = tensor_class()
    if kind is None:
        yield
        return
    handlers: dict[Any, Callable[..., Any]] = dict.fromkeys((*_PRODUCTS, *_SUMS, *_WITH_SUMS), finished)
    handlers[_ATEN._fused_rms_norm_backward.default] = _refused
    handlers |= {op: _by_formula(decompositions[op]) for op in _COMPOSITE if op in decompositions}
    flatten, to_local = kind.__tensor_flatten__, kind.to_local
    uneven: list[CaptureError] = []

    def flattened(self: Any) -> Any:
        unfinished = [p for p in self.placements if p.is_partial()]
        if unfinished:
            raise CaptureError(f"a value leaves the graph as {unfinished[0]}, {_UNFINISHED}")
        return flatten(self)

    def part(self: Any, **kwargs: Any) -> Any:
        uneven.extend(_uneven(self))
        return to_local(self, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(kind._op_dispatcher._custom_op_handlers, handlers))
        stack.enter_context(mock.patch.object(kind, "__tensor_flatten__", flattened))
        stack.enter_context(mock.patch.object(kind, "to_local", part))
        for module in ("_api", "_dispatch", "_redistribute"):
            # Each of them has the function under its own name. Without a note, nothing is known of what it moves.
            named = sys.modules.get(f"torch.distributed.tensor.{module}")
            if hasattr(named, "redistribute_local_tensor"):
                stack.enter_context(mock.patch.object(named, "redistribute_local_tensor", _noted(named)))
        try:
            yield
        finally:
            if uneven:  # also where PyTorch has failed at it
                raise uneven[0]


def _noted(module: Any) -> Callable[..., Any]:
    """Return the function that moves what processes share, with a note of what each has then."""
    original = module.redistribute_local_tensor

    def redistribute(local: Any, current: Any, target: Any, **options: Any) -> Any:
        placement = target.placements[0]
        if len(target.placements) != 1 or not (placement.is_replicate() or _is_plain_shard(placement)):
            return original(local, current, target, **options)
        if placement.is_replicate():
            return noted(original(local, current, target, **options), None)
        dim = placement.dim % local.dim()
        uneven = uneven_share(target, dim)
        if uneven is not None and current.placements[0].is_replicate():
            # DTensor makes parts without elements by an operation that one process does not have.
            taken = local.narrow(dim, uneven.first, uneven.own).clone(memory_format=torch.contiguous_format)
            return noted(taken, dim, uneven=uneven)
        return noted(original(local, current, target, **options), dim, uneven=uneven)

    return redistribute


def note_sharing(model: nn.Module, graph: fx.GraphModule, leaves: Sequence[Any]) -> None:
    """Note at the nodes of AOTAutograd's graph which part of their values this process has (``site.SHARING``).

    Parameters and buffers are shared as the model says, arguments as ``leaves`` are, and what DTensor moves as the
    trace has noted it.
    """
    mesh = mesh_of(model)
    if mesh is None:
        if any(part.graph.find_nodes(op="call_function", target=_SHARED) for part in graphs_of(graph)):
            raise CaptureError(
                "the model computes with a DTensor that is no parameter, buffer or argument of it: make it a buffer "
                "(register_buffer), or take to_local() or full_tensor() of it"
            )
        return
    processes, rank = mesh.size(), mesh.get_local_rank()
    for node in graph.graph.find_nodes(op="placeholder"):
        desc = node.meta.get("desc")
        shared = _origin(getattr(desc, "base", None), model, leaves)
        if shared is not None:
            node.meta[SHARING] = _sharing_of(shared)
    for part in graphs_of(graph):
        for node in part.graph.find_nodes(op="call_function", target=_SHARED):
            source, dim, size, uneven = node.args
            source.meta[SHARING] = Sharing(dim, processes, rank, size, Share(*uneven) if uneven else None)
            node.replace_all_uses_with(source)
            part.graph.erase_node(node)
        part.recompile()


def is_shared_out(graph: fx.GraphModule) -> bool:
    """Whether several processes share a parameter, buffer or argument of a captured graph (after ``note_sharing``)."""
    notes = (node.meta.get(SHARING) for node in graph.graph.find_nodes(op="placeholder"))
    return any(note is not None and note.processes > 1 for note in notes)


def _origin(desc: Any, model: nn.Module, leaves: Sequence[Any]) -> Any:
    """Return the parameter, buffer or argument that AOTAutograd describes; None for any other input."""
    kind = type(desc).__name__
    if kind == "PlainAOTInput":
        return leaves[desc.idx]
    if kind not in ("ParamAOTInput", "BufferAOTInput"):
        return None
    owner, _, name = desc.target.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _sharing_of(shared: Any) -> Sharing:
    """Return how processes share a DTensor."""
    mesh, placement = shared.device_mesh, shared.placements[0]
    dim = None if placement.is_replicate() else placement.dim
    uneven = None if dim is None else uneven_share(shared, dim)
    return Sharing(dim, mesh.size(), mesh.get_local_rank(), None, uneven)


def _uneven(tensor: Any) -> Iterator[CaptureError]:
    """Yield an error for each dimension that processes share, but not evenly: a part does not show its place then."""
    for placement, processes in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        size = tensor.shape[placement.dim] if placement.is_shard() else 0
        if size % processes:
            yield CaptureError(
                f"{processes} processes cannot share dimension {placement.dim} of a tensor of shape "
                f"{tuple(map(int, tensor.shape))} evenly, and the model reads the part of this process (to_local), "
                "which does not show its place in the whole. Let the layer return all features "
                "(output_layouts=Replicate()) or a DTensor (use_local_output=False); pass sequences whose length is a "
                f"multiple of {processes} (padded, with a mask or ignore_index)"
            )


def define_apart(
    model: nn.Module, graph: fx.GraphModule, functions: Mapping[Callable[..., Any], Callable[..., Any]]
) -> None:
    """Replace what PyTorch computes in another way for DTensors by the operations of plain tensors, in Dynamo's graph.

    A function that reads its operand twice gets two conversions of it, so that the gradients of both reach the value
    before, where one process adds them. functions: further ones, with those that replace them.
    """
    if mesh_of(model) is None:
        return
    for part in _parts(graph):
        for function, instead in functions.items():
            for node in part.graph.find_nodes(op="call_function", target=function):
                node.target = instead
        for node in part.graph.find_nodes(op="call_function", target=torch.rms_norm):
            operand, *rest = node.args
            with part.graph.inserting_before(node):
                if operand.meta["example_value"].dtype not in (torch.float32, torch.float64):
                    # One process converts 16 bits to binary32 first, and adds there.
                    new = part.graph.call_function(_rms_norm, (operand, *rest), node.kwargs)
                else:
                    # The second conversion is where one process reads the operand for the second time, so that the
                    # gradients are added in the turn that they have there.
                    shape, weight, eps = _arguments_of_rms_norm(*rest, **node.kwargs)
                    root = part.graph.call_function(_rms_root, (operand, shape, eps))
                    again = _converted_again(part.graph, operand)
                    new = part.graph.call_function(_rms_scaled, (again, root, weight))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            part.graph.erase_node(node)
        part.recompile()


def part_gradients(model: nn.Module, graph: fx.GraphModule, leaves: Sequence[Any]) -> None:
    """Give each process the part of a gradient that belongs to its part of a parameter or argument, in a joint graph.

    DTensor may compute all of it in every process. leaves: the arguments. Raises CaptureError for a gradient in other
    parts.
    """
    shared = mesh_of(model)
    if shared is None or shared.size() == 1:
        return
    output = graph.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    for i, (node, desc) in enumerate(zip(results, output.meta["desc"], strict=True)):
        source: Any = getattr(getattr(desc, "base", None), "grad_of", None)
        origin = _origin(source, model, leaves) if getattr(desc, "attr", "") == LOCAL else None
        if origin is None or not isinstance(node, fx.Node):
            continue
        name = getattr(source, "target", None) or f"argument {source.idx}"
        shape, own = tuple(node.meta["val"].shape), tuple(origin._local_tensor.shape)
        # What one process has may be all of it, if the others have nothing.
        is_whole = is_part(origin) and shape == tuple(origin.shape)
        if shape == own and not is_whole:
            continue
        if not is_whole:
            raise CaptureError(
                f"the gradient of {name} is in parts of shape {shape}, and {name} in parts of shape {own} "
                f"({origin.placements[0]}): let the plan share what the layer reads as it shares its "
                "weight, or redistribute the argument"
            )
        dim, mesh = origin.placements[0].dim, origin.device_mesh
        begin = share_of(shape[dim], mesh.size(), mesh.get_local_rank()).first
        with graph.graph.inserting_before(output):
            part = graph.graph.call_function(_ATEN.slice.Tensor, (node, dim, begin, begin + own[dim]))
        part.meta = {**node.meta, SHARING: _sharing_of(origin)}
        evaluate(graph, part)
        results[i] = part
    output.args = (tuple(results),)


def _parts(graph: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield a graph of Dynamo's, and those inside: bodies of loops, and what a checkpoint computes again."""
    return (module for module in graph.modules() if isinstance(module, fx.GraphModule))


def _converted_again(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return a copy of the conversions to the DTensor that a node is; the node itself if it is not converted."""
    if not _converts(node):
        return node
    source = node.all_input_nodes[0]
    source = source if _name_of(node) == "from_local" else _converted_again(graph, source)
    copied = graph.node_copy(node, lambda used: source if used is node.all_input_nodes[0] else used)
    copied.meta = dict(node.meta)
    return copied


def require_sums_of_gradients(model: nn.Module, graph: fx.GraphModule) -> None:
    """Raise CaptureError for a value whose gradients would be added in another order than in one process.

    Autograd adds the gradients of a value's uses one by one, those of later operations first. Behind a conversion to a
    DTensor, those of several uses are added before they meet the gradients of the other uses, and that of one use is
    added in the conversion's turn. graph: Dynamo's, after ``define_apart``.
    """
    if mesh_of(model) is None:
        return
    for part in _parts(graph):
        places = {node: place for place, node in enumerate(part.graph.nodes)}
        for node in part.graph.nodes:
            source = next(iter(node.all_input_nodes), None)
            if not _converts(node) or source is None or len(source.users) == 1 or _is_in_turn(node, source, places):
                continue
            value = source.meta.get("example_value")
            if isinstance(value, Tensor) and not value.requires_grad:
                continue
            lines = str(node.meta.get("stack_trace") or "").splitlines()
            where = next((line.strip() for line in reversed(lines) if line.strip(" ^~")), "")
            raise CaptureError(
                f"{source.name}, a value that several operations use, is converted to a DTensor for a part of them "
                f"({where}), so that its gradients would be added in another order than in one process: convert it for "
                "each layer (ColwiseParallel of each nn.Linear, SequenceParallel of nn.LayerNorm), or disable gradients"
            )


# What converts between DTensors, and to and from tensors of a process.
_CONVERSIONS: Final = ("from_local", "redistribute", "to_local", "full_tensor")
# Functions with one derivative by their first operand, to which it contributes once.
_USING_ONCE: Final = ("linear", "layer_norm", "embedding", "_rms_norm", "_rms_root", "_rms_scaled")


def _converts(node: fx.Node) -> bool:
    return _name_of(node) in _CONVERSIONS


def _is_in_turn(node: fx.Node, source: fx.Node, places: Mapping[fx.Node, int]) -> bool:
    """Whether the gradient that a conversion of a value gives it is that of one use, in the turn of that use."""
    use = _only_use(node)
    if use is None:
        return False
    between = [n for n in source.users if places[node] < places[n] < places[use]]
    return all(_converts(n) and _only_use(n) is use for n in between)


def _only_use(node: fx.Node) -> fx.Node | None:
    """Return the only use of what a conversion gives, by a function that reads it once; None for other uses."""
    users = list(node.users)
    if len(users) != 1:
        return None
    if _converts(users[0]):
        return _only_use(users[0])
    read: list[fx.Node] = []
    fx.map_arg((users[0].args, users[0].kwargs), read.append)
    return users[0] if _name_of(users[0]) in _USING_ONCE and read.count(node) == 1 else None


def _name_of(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def _arguments_of_rms_norm(shape: Any, weight: Any = None, eps: Any = None) -> tuple[Any, Any, Any]:
    return shape, weight, eps


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return ``torch.rms_norm``, which has a derivative of its own for DTensors alone."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return _rms_scaled(wide, _rms_root(wide, shape, eps), weight).to(x.dtype)


def _rms_root(x: Tensor, shape: Sequence[int], eps: float | None) -> Tensor:
    """Return the reciprocal of the root mean square over the last dimensions, of this shape."""
    least = torch.finfo(x.dtype).eps if eps is None else eps
    dims = list(range(x.dim() - len(shape), x.dim()))
    return torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + least)


def _rms_scaled(x: Tensor, root: Tensor, weight: Tensor | None) -> Tensor:
    scaled = x * root
    return scaled if weight is None else scaled * weight


def _refused(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise CaptureError(f"{op} of a DTensor has another formula than in one process: call torch.nn.functional.rms_norm")


def _by_formula(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler that computes a composite operator by its formula."""
    return lambda op, args, kwargs: formula(*args, **kwargs)


def finished(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator that sums; a sum over a shared dimension is finished.

    If the process has no part of the sum in the order of one process, it gets the operands of all, and computes it all.
    """
    kind = tensor_class()
    dispatcher = kind._op_dispatcher
    called = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(called)
    sharding, mesh = called.output_sharding, called.compute_mesh
    specs = sharding.output_spec if isinstance(sharding.output_spec, list | tuple) else [sharding.output_spec]
    if not any(p.is_partial() for spec in specs if spec is not None for p in spec.placements):
        return dispatcher.wrap(dispatcher._dispatch_get_local_results_slow_path(op, args, called), sharding.output_spec)
    if mesh.ndim != 1:
        raise CaptureError(f"{op} sums over processes of a mesh of {mesh.ndim} dimensions. {_ONE_DIMENSION}.")
    read = sharding.redistribute_schema if sharding.needs_redistribute else called.schema
    if not _has_part(op, [s for s in read.args_schema if hasattr(s, "placements")], args, mesh.size()):
        return op(*pytree.tree_map_only(kind, whole, args), **pytree.tree_map_only(kind, whole, kwargs))
    part = dispatcher._dispatch_get_local_results_slow_path(op, args, called)
    total = SUM_OF_PROCESSES(part, mesh.get_group().group_name, mesh.size())
    return dispatcher.wrap(total, _replicated(sharding.output_spec))


def _has_part(op: Any, specs: list[Any], args: tuple[Any, ...], processes: int) -> bool:
    """Whether process r computes part r of an even division of what an operator sums.

    specs: how the operands are shared when the operator reads them.
    """
    if any(p.is_partial() for spec in specs for p in spec.placements):
        raise CaptureError(
            f"{op} reads {next(p for spec in specs for p in spec.placements if p.is_partial())}, {_UNFINISHED}"
        )
    if op not in _PRODUCTS and op not in _SUMS:
        return False
    (placement, *_), shape = specs[0].placements, specs[0].shape
    dims = _summed(op, args, len(shape))
    first = next((d for d in dims if shape[d] != 1), dims[0])
    plain = all(_is_plain_shard(p) for spec in specs for p in spec.placements)
    return bool(plain and placement.dim % len(shape) == first and shape[first] % processes == 0)


def whole(tensor: Any) -> Any:
    """Return a DTensor that every process holds as a whole. Raises CaptureError for one that is not finished."""
    unfinished = next((p for p in tensor.placements if p.is_partial()), None)
    if unfinished is not None:
        raise CaptureError(f"all processes need {unfinished}, {_UNFINISHED}")
    return tensor.redistribute(placements=_replicated(tensor._spec).placements)


def replicated(like: Any, tensor: Tensor) -> Any:
    """Return a tensor that every process holds as a whole as a DTensor on the mesh of another one."""
    mesh = like.device_mesh
    tensor = noted(tensor, None) if mesh.ndim == 1 else tensor
    return tensor_class().from_local(tensor, mesh, _replicated(like._spec).placements, run_check=False)


def parts_of(x: Any, dims: Sequence[int], even: bool = True) -> bool:
    """Whether process r holds part r of one of these dimensions of a DTensor; even: of equal parts."""
    if x.device_mesh.ndim != 1 or not _is_plain_shard(x.placements[0]):
        return False
    dim = x.placements[0].dim % max(x.ndim, 1)
    return dim in dims and not (even and x.shape[dim] % x.device_mesh.size())


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
