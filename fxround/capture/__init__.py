"""Capture: trace a model and its arguments to one ATen graph.

Dynamo captures the whole model as one graph, or raises a ``CaptureError`` that names the line. AOTAutograd turns that
into functional ATen operators and splits composite ones by the formulas that it is given: ``self.fc(x.relu())`` becomes
``aten.relu``, ``aten.mm`` and ``aten.add``. Every graph input and output has a ``Port``, which says what it is, and
every operator a ``Site``, which says where it comes from. Batches, lengths of texts and sizes that have changed stay
symbolic; ``Sizes`` keeps what the trace assumed about sizes, and is checked before another call uses the graph.
Features that hide arithmetic (fused attention, oneDNN, the encoder fast path, skipped LSTMs) are off while tracing, and
what a graph cannot represent (quantized numbers, complex arguments, ``.item()``) is refused by name.
The rooms capture/ and graph/ hold PyTorch's private interfaces, but for a table of its formulas.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._guards import tracing
from torch.utils._python_dispatch import _disable_current_modes

from fxround.capture.aliases import Alias, aliases_of, positions_of
from fxround.capture.ctc_shapes import traced_ctc_losses
from fxround.capture.dynamo import Kept, Read, alone, dynamo_graph, returned_by, tensors_of
from fxround.capture.empty_sizes import asked_of_data
from fxround.capture.gradient_marks import mark_values
from fxround.capture.guards import Guards, Noted
from fxround.capture.least_squares import traced_least_squares
from fxround.capture.leftovers import forget_export, forgotten_environments
from fxround.capture.log_messages import logging_while_traced
from fxround.capture.loops import own_loops, refuse_reads
from fxround.capture.numbers import Number, asked_nothing, insert_numbers, with_tensors
from fxround.capture.outside_reads import wrap_reads
from fxround.capture.packed import as_tuples, packed_sequences
from fxround.capture.processes import (
    LOCAL,
    Placement,
    copied,
    define_apart,
    finished_sums,
    is_shared,
    note_sharing,
    own_shape,
    part_gradients,
    placements_of,
    require_sums_of_gradients,
)
from fxround.capture.refusals import (
    EXPECTED,
    RESULT,
    LeftToPython,
    explained,
    refuse_unsupported_tensors,
    refused_kind,
    without_derivative,
)
from fxround.capture.repeated_blocks import traced_once
from fxround.capture.rolls import as_pieces
from fxround.capture.shared_choices import embedding, exact_choices
from fxround.capture.sizes import Sizes, ask_arguments_for_sizes, sizes_of
from fxround.capture.torch_private import (
    asked_sizes,
    composite_operators,
    detach_results,
    quickened,
    redefine,
    separate_results,
    tracing_switches,
    uncollected,
)
from fxround.capture.transforms import undone_transforms
from fxround.capture.undifferentiated import CONSTANT, mark_constants
from fxround.errors import CaptureError
from fxround.graph.dialect import graphs_of
from fxround.graph.generated_code import forgotten_sources
from fxround.graph.site import PORT, PORTS, Port, located
from fxround.graph.values import drop_aliases, fake_mode, module_of

Decompositions = Mapping[Any, Callable[..., Any]]
# The position of a tensor among the flattened arguments, and a dimension of it.
Dimension = tuple[int, int]


@dataclass(frozen=True)
class Captured:
    """A model as one functional ATen graph: ``graph(*inputs) -> outputs``, with ports in the same order.

    Captured with gradients it is the joint graph: (state, arguments, tangents) to (results, gradients). ``once`` says
    why its gradients cannot be differentiated again; it is empty if they can. ``numbers`` has the attributes that are
    inputs, with the dtypes that they have in the graph; ``constants`` is then the graph without these inputs.
    ``placements`` says how processes share the results that are DTensors.
    """

    graph: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    out_spec: pytree.TreeSpec
    sizes: Sizes
    reads: tuple[Read | Kept, ...] = ()
    aliases: Mapping[int, Alias] = field(default_factory=dict)
    once: str = ""
    guards: Guards = field(default_factory=Guards)
    numbers: Mapping[Number, torch.dtype] = field(default_factory=dict)
    constants: fx.GraphModule | None = field(default=None, repr=False)
    placements: Mapping[int, Placement] = field(default_factory=dict)

    @property
    def entering(self) -> tuple[Port, ...]:
        """The ports of state and arguments: all inputs except the tangents."""
        return tuple(port for port in self.inputs if port.kind != "tangent")

    @property
    def results(self) -> tuple[Port, ...]:
        """The ports of results and mutations: all outputs except the gradients."""
        return tuple(port for port in self.outputs if port.kind != "gradient")


@dataclass(frozen=True)
class _Traced:
    """The results of AOTAutograd, and the example that was traced."""

    joint: Any
    leaves: list[Any] = field(repr=False)
    reads: tuple[Read | Kept, ...]
    noted: Noted
    aliases: Mapping[int, Alias]
    once: str


# The attribute of a DTensor that is the mesh of all processes.
_MESH: Final = "device_mesh"


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return PyTorch's own table of formulas, with slices for rolls (``rolls``).

    Its attention entry, which breaks gradients on a CPU, is not in it.
    """
    return dict(_core_decompositions(composite_operators()))


@functools.lru_cache(maxsize=1)
def _core_decompositions(_composites: tuple[str, ...]) -> dict[Any, Callable[..., Any]]:
    """Return the table for the composite operators that are registered; PyTorch walks all of them to make it."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    table = dict(core_aten_decompositions()) | get_decompositions([torch.ops.aten.grid_sampler_2d])
    table.pop(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, None)
    roll = torch.ops.aten.roll.default
    return table | {roll: as_pieces(table[roll])}


def capture(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    decompositions: Decompositions,
    marked: bool = False,
    varying: Collection[Dimension] = (),
    numbers: Collection[Number] = (),
) -> Captured:
    """Return the ATen graph of ``model(*args, **kwargs)`` in the current grad mode and training flags.

    marked: whether a graph with gradients records which gradient belongs to which value (``gradient_marks``). varying:
    the dimensions of arguments that stay symbolic if the model allows it, besides the first dimension of every tensor
    and all dimensions of tensors of integers (the tokens of a text). numbers: attributes that become inputs if they
    are operands of sums, differences, products and quotients, and decide nothing; the result's ``numbers`` says so.

    If all tensors have size 1 in dimension 0, they are duplicated for the trace, so that the batch stays symbolic. One
    thread of the process captures at a time; the model is not changed. Raises CaptureError with the line of the model
    and what to change, and LeftToPython (a CaptureError) for what Dynamo would do after the graph.
    """
    refuse_unsupported_tensors(model, args, kwargs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(undone_transforms())
        stack.enter_context(alone(type(model).__name__))
        stack.enter_context(uncollected())
        stack.enter_context(forgotten_environments())
        stack.enter_context(forgotten_sources())
        stack.enter_context(logging_while_traced())
        stack.enter_context(_disable_current_modes())
        return _captured(model, args, kwargs, decompositions, marked, varying, numbers)


def _captured(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    decompositions: Decompositions,
    marked: bool,
    varying: Collection[Dimension],
    numbers: Collection[Number],
) -> Captured:
    error: CaptureError | None = None
    one_differs = False
    for example, doubled in _examples((tuple(args), dict(kwargs)), varying):
        if doubled and one_differs:
            continue
        try:
            traced = _trace(model, example, decompositions, doubled, marked)
        except LeftToPython:
            raise
        except CaptureError as e:
            error = error or e
            continue
        if traced is None:
            one_differs = True
            continue
        captured = describe(traced.joint, len(traced.leaves))
        if captured.sizes.admit([own_shape(leaf) for leaf in pytree.tree_leaves((args, kwargs))]):
            if numbers and all(map(traced.noted.guard, numbers)):
                other = _with_tensors(model, numbers, example, decompositions, doubled, marked)
                captured = _with_numbers(model, captured, other, numbers) if other is not None else captured
            guards = traced.noted.compiled(captured.numbers.keys())
            if doubled and guards.changed(args, kwargs):  # the doubled batch may have another layout
                continue
            _require_held(model, guards, args, kwargs)
            captured = replace(captured, reads=traced.reads, guards=guards)
            return replace(captured, aliases=traced.aliases, once=traced.once)
    raise error or CaptureError(f"{type(model).__name__}: the graph does not admit the sizes it was captured with")


def _with_tensors(
    model: torch.nn.Module,
    numbers: Collection[Number],
    example: Any,
    decompositions: Decompositions,
    doubled: bool,
    marked: bool,
) -> Captured | None:
    """Return the graph with tensors in place of numbers; None where PyTorch needs the numbers."""
    other, tensors = with_tensors(model, numbers)
    try:
        with asked_nothing(tensors):
            traced = _trace(other, example, decompositions, doubled, marked)
    except CaptureError:
        return None
    if traced is None or traced.noted.reads(model, numbers):  # by another path, on which the number is a constant
        return None
    return describe(traced.joint, len(traced.leaves))


def _with_numbers(model: torch.nn.Module, captured: Captured, other: Captured, numbers: Collection[Number]) -> Captured:
    """Return the graph with numbers as inputs; as it is if that is not possible."""
    graph = module_of(captured.graph, copy.deepcopy(captured.graph.graph))
    values = {number: number.holder(model)[number.name] for number in numbers}
    dtypes = insert_numbers(graph, other.graph, values) if str(captured.sizes) == str(other.sizes) else None
    if dtypes is None:
        return captured
    ports = [node.meta[PORT] for node in graph.graph.find_nodes(op="placeholder")]
    return replace(captured, graph=graph, inputs=tuple(ports), numbers=dtypes, constants=captured.graph)


def _require_held(model: torch.nn.Module, guards: Guards, args: Any, kwargs: Any) -> None:
    """Raise CaptureError if what a trace read differs already from what the call has."""
    changed = guards.changed(args, kwargs)
    if changed:
        raise CaptureError(
            f"{type(model).__name__} reads {changed[0]}, which is not in this call what it was in the trace: pass "
            "dense tensors (.contiguous()), and let no other thread change the model meanwhile."
        )


def trace_example(
    args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Sizes
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the arguments, with a batch of one duplicated if the graph of these sizes admits two."""
    examples: list[tuple[tuple[Any, ...], dict[str, Any]]] = [e for e, _ in _examples((tuple(args), dict(kwargs)))]
    return next((e for e in examples if sizes.admit([own_shape(leaf) for leaf in pytree.tree_leaves(e)])), examples[-1])


def export_program(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sizes) -> Any:
    """Return ``torch.export.export`` of a module whose arguments keep the symbolic dimensions of ``sizes``.

    The module's ``forward`` must name its parameters: torch 2.13 loses the shapes of ``**kwargs``.
    """
    args, kwargs = as_tuples((args, kwargs))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    dynamic = [_dynamic(leaf, dimensions) for leaf, dimensions in zip(leaves, sizes.dimensions, strict=True)]
    positional, named = pytree.tree_unflatten(dynamic, spec)
    shapes = dict(inspect.signature(module.forward).bind(*positional, **named).arguments)
    with packed_sequences((args, kwargs)):
        return _exported(module, args, kwargs, shapes)


def export_graph(module: torch.nn.Module, graph: fx.GraphModule, given: list[Any]) -> Any:
    """Return ``torch.export.export`` of ``module(given)``, where dimensions that are symbolic in a graph stay so.

    given: what enters the graph, in the order of its placeholders.
    """
    values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    shapes = [_dynamic(leaf, getattr(value, "shape", None)) for leaf, value in zip(given, values, strict=True)]
    return _exported(module, (given,), {}, (shapes,))


def _exported(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> Any:
    with asked_sizes(), _same_attributes(module):
        program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
    forget_export(program.graph_module)
    return program


@contextlib.contextmanager
def _same_attributes(module: torch.nn.Module) -> Iterator[None]:
    """Leave the attributes of modules the objects that they are; PyTorch puts copies of lists and dicts there."""
    held = [(vars(part), dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for attributes, before in held:
            attributes.update(before)


def _dynamic(leaf: Any, dimensions: tuple[Any, ...] | None) -> Any:
    if not isinstance(leaf, torch.Tensor) or dimensions is None:
        return None
    return {i: torch.export.Dim.AUTO for i, size in enumerate(dimensions) if not isinstance(size, int)}


def inside_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def _differentiated(
    stack: contextlib.ExitStack, model: torch.nn.Module, graph: Any, args: Any, kwargs: Any, formulas: Decompositions
) -> Any:
    """Return the joint graph of Dynamo's graph. Raises CaptureError for an operation without a derivative."""
    try:
        return traced_once(stack, graph, args, kwargs, formulas)
    except RuntimeError as error:
        place = without_derivative(graph)
        if not place:
            raise
        raise explained(model, error, stack=place) from error


def _trace(
    model: torch.nn.Module, example: Any, decompositions: Decompositions, doubled: bool, marked: bool
) -> _Traced | None:
    """Return the joint graph.

    None if the example's batch was doubled and the model treats a batch of one differently.
    """
    args, kwargs = example
    differentiable = torch.is_grad_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing_switches())
        stack.enter_context(asked_of_data())
        stack.enter_context(quickened())
        stack.enter_context(packed_sequences((args, kwargs)))
        stack.enter_context(traced_ctc_losses())
        stack.enter_context(traced_least_squares())
        stack.enter_context(finished_sums(decompositions))
        stack.enter_context(exact_choices(decompositions))
        try:
            graph, reads, noted = _graph_of(stack, model, args, kwargs, differentiable)
            returned = returned_by(graph, model, args, kwargs)
            aliases = aliases_of(graph, returned, tensors_of(graph, model, args, kwargs))
            outside = {read.source for read in reads if isinstance(read, Read)}
            refuse_reads(graph, outside)
            wrap_reads(model, graph, outside)
            define_apart(model, graph, {torch.nn.functional.embedding: embedding})
            redefine(graph, decompositions)
            own_loops(graph)
            if doubled and _excludes_one(graph):
                return None
            if differentiable:
                require_sums_of_gradients(model, graph)
                separate_results(graph, positions_of(aliases, returned))
                if marked:
                    mark_values(graph)
            stack.enter_context(tracing(graph.meta["tracing_context"]))
            joint = _differentiated(stack, model, graph, args, kwargs, decompositions)
        except CaptureError:
            raise
        except Exception as e:  # whatever the model's own code raises
            made = re.match(r"Found <class '([^']+)'> in output", str(e))
            if made:
                raise LeftToPython(model, [(made[1], RESULT, "")]) from None
            raise explained(model, e) from e
    leaves = pytree.tree_leaves((args, kwargs))
    note_sharing(model, joint.graph_module, leaves)
    for part in graphs_of(joint.graph_module):
        refuse_unsupported_nodes(part)
    part_gradients(model, joint.graph_module, leaves)
    once = mark_constants(graph, joint.graph_module) if differentiable else ""
    return _Traced(joint, leaves, reads, noted, aliases, once)


def _graph_of(
    stack: contextlib.ExitStack, model: torch.nn.Module, args: Any, kwargs: Any, differentiable: bool
) -> tuple[fx.GraphModule, tuple[Read | Kept, ...], Noted]:
    """Return what ``dynamo_graph`` returns; the results have no gradients if none are wanted.

    A model whose results contain derivatives (forces, residuals of a differential equation) records gradients itself,
    and is traced with them.
    """
    if differentiable:
        return dynamo_graph(model, args, kwargs)
    try:
        graph, reads, noted = dynamo_graph(model, args, kwargs)
    except Exception as error:  # Dynamo's classes have what the model raised in their text
        if "does not require grad" not in str(error):
            raise
        stack.enter_context(torch.enable_grad())
        graph, reads, noted = dynamo_graph(model, args, kwargs)
    detach_results(graph)
    return graph, reads, noted


def _excludes_one(graph: fx.GraphModule) -> bool:
    """Whether a condition that the trace met fails for a batch of one."""
    environment = graph.meta["tracing_context"].fake_mode.shape_env
    conditions = [environment.replace(guard.expr) for guard in environment.guards]
    values = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
    batches: list[Any] = [v.shape[0] for v in values if isinstance(v, torch.Tensor) and v.dim()]
    symbols = {s for b in batches if not isinstance(b, int) for s in environment.replace(b.node.expr).free_symbols}
    return any(c.xreplace(dict.fromkeys(symbols, 1)) == False for c in conditions)  # noqa: E712 (sympy)


def describe(joint: Any, arguments: int) -> Captured:
    """Return what AOTAutograd returned as a ``Captured``, with a Port for every input and output.

    joint: AOTAutograd's result. arguments: the number of the model's arguments, flattened.
    """
    graph: fx.GraphModule = joint.graph_module
    _drop_tokens(graph)
    _drop_descriptions(graph)
    for part in graphs_of(graph):
        drop_aliases(part, but=CONSTANT)
    ask_arguments_for_sizes(graph)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    inputs = tuple(_port(node.meta["desc"]) for node in placeholders)
    for node, port in zip(placeholders, inputs, strict=True):
        node.meta[PORT] = port
    for part in graphs_of(graph):
        _describe_constants(part)
    output = graph.graph.output_node()
    outputs = tuple(_port(desc) for desc in output.meta["desc"])
    output.meta[PORTS] = outputs
    pairs = zip(placeholders, inputs, strict=True)
    values = {port.index: node.meta.get("val") for node, port in pairs if port.kind == "argument"}
    sizes = sizes_of([values.get(i) for i in range(arguments)])
    placements = placements_of(joint) if any(port.shared and port.kind == "result" for port in outputs) else {}
    return Captured(_renamed(graph), inputs, outputs, joint.out_spec, sizes, placements=placements)


def _drop_tokens(graph: fx.GraphModule) -> None:
    """Call checks (of a linear algebra routine's success) directly: a graph that runs in order needs no token."""
    nodes = graph.graph.nodes
    for node in [n for n in nodes if n.target is torch.ops.higher_order.with_effects]:
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function(node.args[1], node.args[2:], node.kwargs)
        call.meta = {**node.meta, "val": None}
        for taken in list(node.users):
            taken.replace_all_uses_with(node.args[0] if taken.args[1] == 0 else call)
            graph.graph.erase_node(taken)
        graph.graph.erase_node(node)
    output = graph.graph.output_node()
    kept = [i for i, d in enumerate(output.meta["desc"]) if d is not None and "Token" not in type(d).__name__]
    results: Any = output.args[0]
    output.args = (tuple(results[i] for i in kept),)
    output.meta["desc"] = [output.meta["desc"][i] for i in kept]
    for node in [n for n in nodes if n.op == "placeholder" and "Token" in type(n.meta["desc"]).__name__]:
        graph.graph.erase_node(node)


def _drop_descriptions(graph: fx.GraphModule) -> None:
    """Remove what describes DTensors: their meshes and symbolic sizes, which enter a graph and leave it beside them.

    Collectives name groups, and the sizes of what this process has are those of its tensors.
    """
    output = graph.graph.output_node()
    kept = [i for i, desc in enumerate(output.meta["desc"]) if not _describes(desc)]
    results: Any = output.args[0]
    output.args = (tuple(results[i] for i in kept),)
    output.meta["desc"] = [output.meta["desc"][i] for i in kept]
    for node in graph.graph.find_nodes(op="placeholder"):
        if _describes(node.meta["desc"]):
            graph.graph.erase_node(node)


def _describes(desc: Any) -> bool:
    """Whether an input or output is no tensor, but describes a DTensor."""
    sizes = ("SubclassSizeAOT", "SubclassStrideAOT")
    return getattr(desc, "attr", None) == _MESH or type(desc).__name__.startswith(sizes)


def _describe_constants(graph: fx.GraphModule) -> None:
    """Give the tensors of the program text, which are attributes, a fake value."""
    mode = fake_mode(graph)
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(constant := getattr(graph, str(node.target)), torch.Tensor):
            node.meta["val"] = mode.from_tensor(constant, static_shapes=True)


def _renamed(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the same graph with inputs named after their ports and operators numbered without gaps."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        name = _input_name(node.meta[PORT]) if node.op == "placeholder" else re.sub(r"_\d+$", "", node.name)
        new = copy.create_node(node.op, node.target, args, kwargs, name)
        new.target = new.name if node.op == "placeholder" else node.target
        new.meta = dict(node.meta)
        copies[node] = new
    return module_of(graph, copy)


def _input_name(port: Port) -> str:
    prefix = "tangent" if port.kind == "tangent" else "input"
    return port.name.replace(".", "_") if port.name else f"{prefix}_{port.index}"


def _port(desc: Any) -> Port:
    kind = type(desc).__name__
    if kind == "InputMutationAOTOutput":
        return replace(_port(desc.mutated_input), mutation=True)
    if kind in ("ParamAOTInput", "BufferAOTInput"):
        return Port("parameter" if kind == "ParamAOTInput" else "buffer", name=desc.target)
    if kind in ("PlainAOTInput", "PlainAOTOutput"):
        return Port("argument" if kind == "PlainAOTInput" else "result", index=desc.idx)
    if kind.startswith("SubclassGetAttr") and desc.attr == LOCAL:
        return _shared(_port(desc.base))
    if kind == "GradAOTOutput":
        return replace(_port(desc.grad_of), kind="gradient")
    if kind == "TangentAOTInput":
        return _tangent(_port(desc.output))
    raise CaptureError(
        f"the captured graph has a port of kind {kind}, which fxround does not know. "
        "A model whose outputs are views of one mutated tensor does this: return clones of them."
    )


def _shared(port: Port) -> Port:
    if port.mutation:
        raise CaptureError(
            f"the model changes {port.name or f'argument {port.index}'}, a DTensor, in place: compute a new tensor"
        )
    return replace(port, shared=True)


def _tangent(result: Port) -> Port:
    if result.mutation:
        raise CaptureError(
            f"the model changes {result.name or f'argument {result.index}'} in place, and a gradient flows through the "
            "change: compute a new tensor and return it. An embedding with max_norm does this when its weight is "
            "trained: leave max_norm out, and call torch.embedding_renorm_(weight, indices, max_norm, norm_type) under "
            "torch.no_grad() before the model."
        )
    return replace(result, kind="tangent")


def _examples(example: Any, varying: Collection[Dimension] = ()) -> Iterator[tuple[Any, bool]]:
    """Yield examples to trace with, the preferred one first, and whether the batch was doubled.

    The first has the most symbolic dimensions and a batch of at least two; the last has the arguments' own sizes.
    """
    leaves, spec = pytree.tree_flatten(example)
    if any(map(is_shared, leaves)):  # the sizes of parts, and those of the whole, would be two symbols
        yield pytree.tree_unflatten([_copied(leaf, False, i, ()) for i, leaf in enumerate(leaves)], spec), False
        return
    tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    twice = {leaf.shape[0] for leaf in tensors.values()} == {1}
    batches = frozenset((i, 0) for i in tensors)
    words = [(i, d) for i, leaf in tensors.items() if not leaf.is_floating_point() for d in range(1, leaf.dim())]
    lengths = frozenset((i, d) for i, d in (*words, *varying) if d and tensors[i].shape[d] > 1)
    choices: list[tuple[bool, frozenset[Dimension]]] = [(twice, batches | lengths), (twice, batches)]
    choices += [(False, lengths), (False, frozenset())] if twice else [(False, frozenset())]
    for doubled, symbolic in dict.fromkeys(choices):
        copies = [_copied(leaf, doubled, i, symbolic) for i, leaf in enumerate(leaves)]
        yield pytree.tree_unflatten(copies, spec), doubled


def _copied(leaf: Any, doubled: bool, position: int, symbolic: Collection[Dimension]) -> Any:
    """Return a copy of a tensor.

    Marking a dimension symbolic writes to the tensor object, and tracing must not change the caller's.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if is_shared(leaf):
        return copied(leaf)
    copy = leaf.detach().clone()
    copy = torch.cat([copy, copy]) if doubled and copy.dim() else copy
    copy.requires_grad_(leaf.requires_grad)
    # Attributes of its own, which the model may read.
    vars(copy).update({name: value for name, value in vars(leaf).items() if not name.startswith("_dynamo")})
    for dimension in range(copy.dim()):
        if (position, dimension) in symbolic and copy.shape[dimension] > 1:
            torch._dynamo.maybe_mark_dynamic(copy, dimension)
    return copy


def _is_whole(node: Any) -> bool:
    """Whether a node's value has an integer dtype: its .item() needs no rounding, and may be a size."""
    dtype = node.meta["val"].dtype
    return not (dtype.is_floating_point or dtype.is_complex)


def refuse_unsupported_nodes(graph: fx.GraphModule) -> None:
    """Raise CaptureError, with the line of the model, for nodes after which no rounding is possible."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten._local_scalar_dense.default and not _is_whole(node.args[0]):
            raise CaptureError(
                f"{located(node)}: .item() takes a number out of the graph, where it cannot be rounded. "
                "Keep it a tensor (x.sum() in place of x.sum().item())."
            )
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and (kind := refused_kind(value)):
                raise CaptureError(f"{located(node)} yields {kind} numbers ({value.dtype}); {EXPECTED}.")
