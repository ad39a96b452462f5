"""The derivative of a captured graph of gradients, captured as a graph of the same kind.

The joint graph of a model maps (state, arguments, tangents) to (results, gradients). Its gradients are a function of
what enters it, and ``differentiated`` traces the joint graph of that function: (state, arguments, tangents, further
tangents) to (gradients, second gradients), which can be differentiated again. Nodes that compute the gradients again
have the Site of the node that they repeat (``REPEATED``), so that they are rounded as it is and draw its random bits.
What autograd took for a constant (``undifferentiated``) is a constant here too.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fxround.capture import Captured, Decompositions, describe, refuse_unsupported_nodes
from fxround.capture.dynamo import alone
from fxround.capture.leftovers import forgotten_environments
from fxround.capture.loops import own_loops
from fxround.capture.torch_private import is_backward, joint_of, quickened, traced_from, tracing_switches, uncollected
from fxround.capture.undifferentiated import CONSTANT
from fxround.errors import CaptureError
from fxround.graph.dialect import graphs_of
from fxround.graph.generated_code import forgotten_sources
from fxround.graph.site import META, PORT, PORTS, REPEATED, TAKEN, Port, Site, located

# What the nodes of the traced graph keep of their origin.
_ORIGIN: Final = ("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten", "val", CONSTANT)
_ADVICE: Final = (
    "Compute this second derivative with the original model, or write the operation by others that can be "
    "differentiated twice."
)


def differentiated(
    graph: fx.GraphModule,
    gradients: Sequence[int],
    wanted: Collection[int],
    shapes: Sequence[Any] | None,
    formulas: Decompositions,
) -> Captured:
    """Return the joint graph of the gradients of a joint graph.

    Args:
        graph: a captured joint graph, classified.
        gradients: which of its gradients are differentiated, by their numbers among its gradients.
        wanted: the positions of its inputs for which derivatives are wanted.
        shapes: the sizes of its inputs, if the result is to be right for these alone; None for symbols as in ``graph``.
        formulas: the decompositions of a capture.

    Returns:
        The graph. Its inputs have the ports of ``graph``, where a tangent has become an argument, and its ``sizes`` are
        those of all these inputs in their order.

    Raises:
        CaptureError: for an operation whose derivative is not known; it names the node and its line.
    """
    with alone("the derivative of a graph"), uncollected(), forgotten_environments(), contextlib.ExitStack() as stack:
        stack.enter_context(forgotten_sources())
        stack.enter_context(tracing_switches())
        stack.enter_context(quickened())
        mode, inputs = _inputs(graph, wanted, shapes)
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(torch.enable_grad())
        try:
            joint = joint_of(stack, _Gradients(graph, gradients), tuple(inputs), {}, formulas)
        except CaptureError:
            raise
        except Exception as error:  # whatever autograd says of an operation
            raise _explained(graph, error) from error
    for part in graphs_of(joint.graph_module):
        refuse_unsupported_nodes(part)
    _repeat(joint.graph_module, graph)
    return _named(describe(joint, len(inputs)), graph)


def gradients_of(graph: fx.GraphModule) -> list[Any]:
    """Return the nodes of a joint graph's gradients; None for one that is always zero."""
    output = graph.graph.output_node()
    values: Any = output.args[0]
    pairs = zip(values, output.meta[PORTS], strict=True)
    return [value if isinstance(value, fx.Node) else None for value, port in pairs if port.kind == "gradient"]


class _Gradients(nn.Module):
    """A joint graph as a function of its inputs that returns gradients alone."""

    def __init__(self, graph: fx.GraphModule, kept: Sequence[int]) -> None:
        super().__init__()
        results = [gradients_of(graph)[i] for i in kept]
        needed = set(results)
        for node in reversed(graph.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        own = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.nodes:
            if node.op == "placeholder" or node in needed:
                _require_derivative(node)
                copies[node] = own.create_node(node.op, node.target, *_copied(node, copies), name=node.name)
                copies[node].meta = _origin(node)
        own.output(tuple(copies[node] for node in results))
        made = fx.GraphModule(graph, own)
        own_loops(made)
        # In a list, so that the tensors that the graph holds do not become inputs.
        self._held = [made]

    def forward(self, *inputs: Any) -> Any:
        """Return the gradients."""
        with fx.traceback.preserve_node_meta():
            return _Run(self._held[0]).run(*inputs)


class _Run(fx.Interpreter):
    """Runs a graph of which some values are constants of differentiation."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        return pytree.tree_map_only(Tensor, Tensor.detach, value) if CONSTANT in n.meta else value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten.copy.default:
            return _Copy.apply(*args[:2])  # type: ignore[no-untyped-call]
        return super().call_function(target, args, kwargs)


class _Copy(torch.autograd.Function):
    """``aten.copy``, for which autograd has no derivative: values in the shape and dtype of another tensor."""

    @staticmethod
    def forward(ctx: Any, written: Tensor, values: Tensor) -> Tensor:
        """Return the values, in the shape and dtype of ``written``."""
        ctx.like = values.shape, values.dtype
        return torch.ops.aten.copy.default(written, values)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return None for the tensor that is overwritten, and the gradient of the values."""
        shape, dtype = ctx.like
        return None, gradients[0].sum_to_size(shape).to(dtype)


def _copied(node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> tuple[Any, Any]:
    arguments: Any = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    return arguments  # type: ignore[no-any-return]


def _origin(node: fx.Node) -> dict[str, Any]:
    kept = {key: value for key, value in node.meta.items() if key in _ORIGIN}
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return kept | ({"nn_module_stack": stack} if stack else {})


def _require_derivative(node: fx.Node) -> None:
    """Raise CaptureError for an operator of another library that autograd would take for a constant."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace == "aten":
        return
    name = target.name()
    keys = ("Autograd", "AutogradCPU", "CompositeImplicitAutograd")
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys):
        raise CaptureError(f"{located(node)} has a derivative, and no second one. {_ADVICE}")


def _explained(graph: fx.GraphModule, error: Exception) -> CaptureError:
    """Return an error that names the node whose derivative autograd does not know, if it says which."""
    text = str(error).strip().partition("\n")[0]
    named = re.search(r"derivative for '?(?:aten::)?(\w+)", text)
    nodes = [n for n in graph.graph.nodes if named and str(n.target).split(".")[1:2] == [named[1]]]
    where = f"{located(nodes[0])} has a derivative, and no second one" if nodes else "no second derivative is known"
    return CaptureError(f"{where} ({text}). {_ADVICE}")


def _inputs(graph: fx.GraphModule, wanted: Collection[int], shapes: Sequence[Any] | None) -> tuple[Any, list[Any]]:
    """Return a fake mode and inputs of the graph in it, symbolic where the graph's are unless their sizes are given."""
    # Imported at the first derivative, because it imports Dynamo.
    from torch._dynamo.source import ConstantSource

    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    symbols: dict[Any, Any] = {}

    def size(n: Any) -> Any:
        if not isinstance(n, torch.SymInt):
            return n
        for symbol in n.node.expr.free_symbols - symbols.keys():
            source = ConstantSource(f"size_{len(symbols)}")
            hint = int(n.node.shape_env.backed_var_to_val[symbol])
            symbols[symbol] = environment.create_symbol(hint, source, DimDynamic.DYNAMIC)
        return environment.create_symintnode(n.node.expr.xreplace(symbols), hint=n.node.hint)

    def made(i: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return size(value)
        given = None if shapes is None else shapes[i]
        layout = (tuple(map(size, value.shape)), tuple(map(size, value.stride())))
        with mode:
            layout = layout if given is None else (given, _strides(value, given))
            return torch.empty_strided(*layout, dtype=value.dtype, device=value.device).requires_grad_(i in wanted)

    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    return mode, [made(i, value) for i, value in enumerate(values)]


def _strides(value: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor of another shape whose dimensions have the same order in memory."""
    strides, step = [1] * value.dim(), 1
    for d in sorted(range(value.dim()), key=lambda d: (value.stride(d), -d)):
        strides[d], step = step, step * shape[d]
    return tuple(strides)


def _repeat(joint: fx.GraphModule, source: fx.GraphModule) -> None:
    """Give the nodes of a graph that compute values of another one again the Sites of these values."""
    named = {node.name: node for node in source.graph.nodes}
    repeated: dict[fx.Node, fx.Node] = {}
    taken: set[fx.Node] = set()
    entries = joint.graph.find_nodes(op="placeholder")
    repeated |= dict(zip(entries, source.graph.find_nodes(op="placeholder"), strict=False))
    for node in joint.graph.nodes:
        if node.op != "call_function" or is_backward(node):
            continue
        if node.target is operator.getitem:
            users = getattr(repeated.get(node.args[0]), "users", ())
            match = next((u for u in users if u.target is operator.getitem and u.args[1] == node.args[1]), None)
        else:
            match = named.get(traced_from(node))
            match = match if match is not None and match.target is node.target else None
        if match is not None and match not in taken:
            taken.add(match)
            repeated[node] = match
    for node, match in repeated.items():
        site: Site | None = match.meta.get(META)
        if site is not None and node not in entries[len(source.graph.find_nodes(op="placeholder")) :]:
            node.meta[REPEATED] = site
        if CONSTANT in match.meta:
            node.meta[CONSTANT] = True
    joint.graph.output_node().meta[TAKEN] = {n.meta[META].number for n in source.graph.nodes if META in n.meta}


def _named(captured: Captured, source: fx.GraphModule) -> Captured:
    """Return the graph with the ports of the graph whose gradients it differentiates."""
    known: list[Port] = [node.meta[PORT] for node in source.graph.find_nodes(op="placeholder")]
    free = 1 + max((port.index for port in known if port.kind != "tangent"), default=-1)
    tangents = (i for i, port in enumerate(known) if port.kind == "tangent")
    entering = known.copy()
    for index, i in enumerate(tangents, free):
        entering[i] = Port("argument", index=index)

    def named(port: Port) -> Port:
        own = entering[port.index] if port.kind in ("argument", "gradient") else port
        return replace(own, kind="gradient") if port.kind == "gradient" else own

    inputs, outputs = tuple(map(named, captured.inputs)), tuple(map(named, captured.outputs))
    for node, port in zip(captured.graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta[PORT] = port
    captured.graph.graph.output_node().meta[PORTS] = outputs
    return replace(captured, inputs=inputs, outputs=outputs)
