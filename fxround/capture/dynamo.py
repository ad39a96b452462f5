"""Dynamo's graph of a model, on copies of the model's modules, and what Dynamo would leave to Python.

Tracing replaces parameters by stand-ins. It does so in twins of the model's modules, so that every other thread finds
the model unchanged at every moment. Dynamo would carry out some changes after its graph (an assignment to an attribute,
an item of a dict), and may read tensors that are neither state nor arguments: this file finds both and reports them by
name.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast
from unittest import mock

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

from fxround.capture.aliases import Returned
from fxround.capture.counting_numbers import CountingNumbers
from fxround.capture.fake_results import remembered_results
from fxround.capture.guards import EVERY_GUARD, Noted, spelled
from fxround.capture.leftovers import installed_names
from fxround.capture.log_messages import logging_while_traced
from fxround.capture.memory_reads import memory_reads
from fxround.capture.numpy_numbers import numpy_numbers, refuse_numpy_numbers
from fxround.capture.python_gaps import python_gaps, unmoved_generator
from fxround.capture.readings import TRACING, readings
from fxround.capture.refusals import BUFFER, RESULT, LeftToPython, called_with, explained
from fxround.capture.result_sizes import map_tensors
from fxround.capture.torch_private import capturing, derivatives, find_builtins, own_graphs, separate_sizes
from fxround.capture.traced_aliases import computed_views
from fxround.errors import CaptureError
from fxround.graph.site import Port
from fxround.graph.source_lines import TORCH

_NOTHING: Final = contextlib.nullcontext()
_MARK: Final = "_dynamo_static_input_type"


@dataclass(frozen=True)
class Change:
    """A change of Python state by the model's code: its source as Dynamo spells it, its type, the line."""

    source: str
    kind: str
    line: str


@dataclass(frozen=True)
class Read:
    """A tensor that is neither state nor argument.

    The graph holds it as a constant, which is right while nothing changes it.
    """

    source: str
    tensor: Tensor = field(repr=False)
    version: int
    scope: Mapping[str, Any] = field(repr=False)

    @property
    def kind(self) -> str:
        """The tensor's type, for messages."""
        return type(self.tensor).__name__

    def is_current(self) -> bool:
        """Whether the source still gives the same tensor, unchanged."""
        return _found(self.source, self.scope) is self.tensor and _version(self.tensor) == self.version


@dataclass(frozen=True)
class Kept:
    """An attribute that a call sets to the value that it already has: no change, as long as it has that value."""

    source: str
    holder: Any = field(repr=False)
    attribute: str
    value: bool | int | float | str | None

    @property
    def kind(self) -> str:
        """The type, for messages."""
        return "attribute"

    def is_current(self) -> bool:
        """Whether the attribute has the value that a call leaves."""
        same: bool = _plain(vars(self.holder).get(self.attribute, _NOTHING)) == _plain(self.value)
        return same


def _plain(value: Any) -> Any:
    """Return a key that distinguishes plain values by type and digits, and every other object by identity."""
    return (type(value), repr(value)) if isinstance(value, bool | int | float | str | None) else (object, id(value))


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Trace in this block, one thread at a time. Raises CaptureError in the middle of a trace of the same thread."""
    with capturing():
        if TRACING:
            raise CaptureError(
                f"{name} cannot be captured during another capture, by a signal handler or a hook: call it once "
                "beforehand."
            )
        TRACING.append(threading.get_ident())
        try:
            yield
        finally:
            TRACING.clear()


def aside() -> contextlib.AbstractContextManager[object]:
    """Return a context for a call that computes.

    In a signal handler such a call may interrupt a trace; the context disables the trace's modes.
    """
    if TRACING and TRACING[-1:] == [threading.get_ident()]:
        return _disable_current_modes()
    return _NOTHING


def tracer() -> str:
    """Return the name of a tracer of PyTorch's that is at work in this thread; "" for fxround's own captures.

    What ``torch.compiler.is_compiling`` says is left out: another thread may have set it.
    """
    if torch.compiler.is_dynamo_compiling():
        return "torch.compile"
    if TRACING and TRACING[-1:] == [threading.get_ident()]:
        return ""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    # The number of modes is asked first: every call of a small model would pay for the search among them.
    if torch._C._len_torch_dispatch_stack() and get_proxy_mode() is not None:
        return "torch.export or make_fx"
    return "torch.compile" if callable(get_eval_frame_callback()) else ""


def is_of_a_trace() -> bool:
    """Whether Dynamo or AOTAutograd, in the middle of a trace in this thread, asks."""
    return TracingContext.try_get() is not None


# A model may need a graph for each value of an attribute that it reads as a number.
GRAPHS: Final = 64
ADVICE: Final = "a number that the model reads may change with every call; pass it as a tensor"
# PyTorch also limits the graphs of all models of the same code, since the process began: there is no such limit here.
# Until torch 2.12 it has no other limit than those.
_GRAPHS_OF_CODE: Final = 1 << 40


def too_many_graphs(model: nn.Module) -> CaptureError:
    """Return the error for a model that would need more than ``GRAPHS`` graphs."""
    return CaptureError(
        f"{type(model).__name__} has {GRAPHS} graphs already, and would need another one: {ADVICE}. "
        "captures() has the reason of each graph."
    )


def refuse_more_graphs(model: nn.Module, graphs: int) -> None:
    """Raise CaptureError if the model has too many graphs and PyTorch does not count them for each model."""
    if graphs >= GRAPHS and not own_graphs():
        raise too_many_graphs(model)


@contextlib.contextmanager
def replaying(model: nn.Module, symbolic: bool, numbers: CountingNumbers, args: Any, kwargs: Any) -> Iterator[None]:
    """Apply the settings for calls by way of ``torch.compile``; what Dynamo refuses becomes a CaptureError.

    symbolic: whether every size of an argument, and of a tensor inside an argument, has a symbol of its own, and the
    ``numbers`` of modules. Otherwise they are constants, and other ones are captured again.
    """
    from torch._dynamo import config, exc

    settings = config.patch(
        **derivatives(),
        allow_rnn=True,
        assume_static_by_default=not symbolic,
        automatic_dynamic_shapes=symbolic,
        specialize_float=True,
        allow_unspec_int_on_nn_module=symbolic,
        skip_nnmodule_hook_guards=False,
        recompile_limit=GRAPHS if own_graphs() else _GRAPHS_OF_CODE,
        accumulated_recompile_limit=_GRAPHS_OF_CODE,
        **EVERY_GUARD,
        suppress_errors=False,
    )
    with settings, separate_sizes(), numbers.alone(), logging_while_traced(), python_gaps(), numpy_numbers():
        try:
            yield
        except exc.FailOnRecompileLimitHit as error:
            raise too_many_graphs(model) from error
        except exc.TorchDynamoException as error:
            raise explained(model, error, called_with(args, kwargs)) from error


@unmoved_generator()
def dynamo_graph(model: nn.Module, args: Any, kwargs: Any) -> tuple[fx.GraphModule, tuple[Read | Kept, ...], Noted]:
    """Return Dynamo's graph of the call, and what it relies on besides state and arguments: tensors, and guards.

    The graph uses twins of the model's modules. Raises LeftToPython if the model changes Python state, or reads tensors
    through an argument that is no tensor, tuple, list or dict.
    """
    from torch._dynamo import config
    from torch._dynamo.convert_frame import fullgraph_capture, get_traced_fn
    from torch._dynamo.functional_export import create_fx_graph_from_captured_output
    from torch._dynamo.utils import dynamo_timed, get_metrics_context
    from torch._export.utils import _compiling_state_context

    traced = _traceable(model)
    # As in PyTorch's dynamo_graph_capture_for_export, except that what it warns of is an error here.
    with contextlib.ExitStack() as stack:
        stack.enter_context(python_gaps())
        stack.enter_context(_compiling_state_context())
        stack.enter_context(config.patch(replay_side_effects=False, side_effect_replay_policy="info"))
        stack.enter_context(get_metrics_context())
        stack.enter_context(dynamo_timed("fullgraph_capture"))
        effects = stack.enter_context(_changes())
        read = stack.enter_context(readings())
        stack.callback(unmark, model)
        stack.enter_context(computed_views())
        stack.enter_context(numpy_numbers())
        stack.enter_context(remembered_results())
        installed = stack.enter_context(installed_names(get_traced_fn(traced)[0].__globals__))
        captured = fullgraph_capture(traced, args, kwargs)
    if captured.backend_input is None:
        raise CaptureError(f"{type(model).__name__} computes no tensor: there is nothing to round. Call it as it is.")
    if not _outputs(captured.backend_input.graph_module):
        raise CaptureError(
            f"{type(model).__name__} returns arguments, parameters and buffers alone: there is nothing to round in its "
            "result. Call it as it is."
        )
    graph: fx.GraphModule = create_fx_graph_from_captured_output(captured, traced, args, kwargs)
    # Dynamo stores the graph in the globals of the model's code, where it would keep the model alive.
    captured.graph_capture_output.f_globals.pop(captured.backend_input.backend_id, None)
    changes = [c for c in effects if isinstance(c, Change)]
    if changes:
        raise LeftToPython(model, [(spelled(c.source), c.kind, c.line) for c in changes])
    refuse_numpy_numbers(graph)
    read.memory = memory_reads(graph)
    _keep_apart(graph, model)
    noted = Noted(captured.graph_capture_output, model, traced, args, kwargs, read, installed)
    return graph, (*_reads(graph, model, args, kwargs), *(c for c in effects if isinstance(c, Kept))), noted


def unmark(model: nn.Module) -> None:
    """Remove the mark that a trace leaves on parameters and buffers: an attribute, which ``torch.save`` would write."""
    for tensor in (*model.parameters(), *model.buffers()):
        if vars(tensor).get(_MARK) == "unguarded":  # a user's own mark is "guarded"
            del vars(tensor)[_MARK]


def _outputs(graph: fx.GraphModule) -> Any:
    return graph.graph.output_node().args[0]


def _traceable(model: nn.Module) -> nn.Module:
    """Return the model, or one with its attributes that PyTorch can trace.

    PyTorch takes the first parameter of ``forward`` for the model: a function that was set on the instance has none.
    """
    own, traceable = vars(model).get("forward"), _without_graph(model)
    if own is None or getattr(own, "__self__", None) is model:
        return traceable

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    plain: nn.Module = nn.Module.__new__(type(type(model).__name__, (type(traceable),), {"forward": forward}))
    vars(plain).update({name: value for name, value in vars(traceable).items() if name != "forward"})
    return plain


def _without_graph(model: nn.Module) -> nn.Module:
    """Return a model of ``torch.fx`` or ``torch.export`` as a plain module with the same forward and attributes.

    PyTorch copies a model's attributes to the graph that Dynamo made; the model's own graph would replace that one.
    """
    if not isinstance(model, fx.GraphModule):
        return model
    plain: nn.Module = nn.Module.__new__(type(type(model).__name__, (nn.Module,), {"forward": type(model).forward}))
    of_graphs = vars(fx.GraphModule({}, fx.Graph())).keys() - vars(nn.Module()).keys()
    vars(plain).update({name: value for name, value in vars(model).items() if name not in of_graphs})
    return plain


def _locals(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model under the names that Dynamo's sources have for it: the first parameter of its forward."""
    code = getattr(getattr(model.forward, "__func__", None), "__code__", None)
    first = code.co_varnames[:1] if code is not None and code.co_argcount else ()
    return dict.fromkeys(("self", *first), model)


@contextlib.contextmanager
def _changes() -> Iterator[list[Change | Kept]]:
    """Collect what Dynamo would replay after the graph that it traces inside of the block."""
    from torch._dynamo.side_effects import SideEffects

    changes: list[Change | Kept] = []
    generate = SideEffects.codegen_update_mutated

    def watched(self: Any, *rest: Any, **named: Any) -> Any:
        changes[:] = [c for v in self._get_modified_vars() if _lasts(v) for c in _described(self, v)]
        changes.extend(Change("a hook on a tensor", "hook", "") for _ in self.tensor_hooks)
        return generate(self, *rest, **named)

    with mock.patch.object(SideEffects, "codegen_update_mutated", watched):
        yield changes


def _lasts(variable: Any) -> bool:
    """Whether the change is visible after the call.

    It is if the object existed before, and is not the **kwargs of the call.
    """
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    existed = isinstance(getattr(variable, "mutation_type", None), AttributeMutationExisting | ValueMutationExisting)
    return existed and not getattr(variable.source, "is_varkw", False)


def _described(effects: Any, variable: Any) -> Iterator[Change | Kept]:
    """Yield the changes of one object: of each attribute, or of what it holds.

    Many models, transformers' among them, set a flag and reset it before they return, which Dynamo counts as a change.
    """
    stacks = effects.mutation_user_stacks.get(variable, ())
    frames = [frame for stack in stacks for frame in stack if not frame.filename.startswith(TORCH)]
    line = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    name = getattr(variable, "local_name", None) or str(getattr(variable.source, "name", variable.source))
    attributes = effects.store_attr_mutations.get(variable, ())
    for attribute in attributes:
        kept = _kept(f"{name}.{attribute}", variable, attribute, attributes[attribute])
        yield kept or Change(f"{name}.{attribute}", "attribute", line)
    assigned = _assigned(variable) if name.endswith("._buffers") else None
    if assigned is not None:
        yield from (Change(f"{name}[{key!r}]", BUFFER, line) for key in assigned)
    elif not attributes:
        yield Change(name, variable.python_type_name(), line)


def _assigned(variable: Any) -> list[Any] | None:
    """Return the names of a module's buffers that are other tensors after the call; None if no buffer was assigned.

    ``self.steps += 1`` changes a buffer in place, and assigns it to itself.
    """
    before, after = ({getattr(k, "vt", k): v for k, v in d.items()} for d in (variable.original_items, variable.items))
    assigned = [key for key in {**before, **after} if before.get(key) is not after.get(key)]
    others = [key.as_python_constant() for key in assigned if not _is_same(before.get(key), after.get(key))]
    return others if assigned else None


def _is_same(before: Any, after: Any) -> bool:
    """Whether two of Dynamo's variables are one tensor."""
    from torch._dynamo.variables import TensorVariable

    if before is None or after is None or not (before.is_realized() and after.is_realized()):
        return False
    variables = [before.realize(), after.realize()]
    if not all(isinstance(v, TensorVariable) for v in variables):
        return False
    old, new = (v.proxy.node.meta["example_value"] for v in variables)
    layouts = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (old, new)]
    return layouts[0] == layouts[1] and old.untyped_storage()._cdata == new.untyped_storage()._cdata


def _kept(source: str, variable: Any, attribute: str, last: Any) -> Kept | None:
    """Return the attribute, if its last value is plain and equal to the one that it has now, before any replay."""
    from torch._dynamo.variables import ConstantVariable

    holder = getattr(variable, "value", None)
    if not isinstance(last, ConstantVariable) or not hasattr(holder, "__dict__"):
        return None
    value: Any = last.as_python_constant()
    kept = Kept(spelled(source), holder, attribute, value)
    return kept if isinstance(value, bool | int | float | str | None) and kept.is_current() else None


def _keep_apart(graph: fx.GraphModule, model: nn.Module) -> None:
    """Let the graph hold the model's tensors in modules of its own, and look up tensors of the model by identity."""
    twins: dict[int, nn.Module] = {}
    places: dict[int, tuple[dict[str, Any], str]] = {}

    def fill(twin: nn.Module, module: nn.Module) -> nn.Module:
        twins[id(module)] = twin
        for kind in ("_parameters", "_buffers"):
            held = dict(getattr(module, kind))
            setattr(twin, kind, held)
            for name, tensor in held.items():
                if tensor is not None:
                    places.setdefault(id(tensor), (held, name))
        twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            known = None if child is None else twins.get(id(child))
            twin._modules[name] = known if child is None or known is not None else fill(nn.Module(), child)
        return twin

    fill(graph, model)
    codegen: Any = graph.graph._codegen
    find_builtins(codegen)
    flatten, unflatten = codegen.dynamo_bytecode_flatten, codegen.dynamo_bytecode_unflatten
    count, names = flatten.input_processor.num_args, flatten.input_processor.kwarg_names

    def called(inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (model, *inputs[:count]), dict(zip(names, inputs[count:], strict=False))

    flatten.input_processor = unflatten.input_processor = called

    def present(value: Any) -> Any:
        held, name = places.get(id(value), (None, ""))
        return value if held is None else held[name]

    def flat(*inputs: Any) -> Any:
        return tuple(present(value) for value in flatten(*inputs))

    def unflat(computed: Any, inputs: Any) -> Any:
        return map_tensors(present, unflatten(computed, inputs))

    codegen.dynamo_bytecode_flatten = graph.__dict__["_dynamo_bytecode_flatten"] = flat
    codegen.dynamo_bytecode_unflatten = graph.__dict__["_dynamo_bytecode_unflatten"] = unflat


def inputs_of(graph: fx.GraphModule, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the values of the inputs of Dynamo's graph in a call of the model."""
    codegen: Any = graph.graph._codegen
    inputs: tuple[Any, ...] = codegen.dynamo_bytecode_flatten(*args, *kwargs.values())
    return inputs


def tensors_of(graph: fx.GraphModule, model: nn.Module, args: Any, kwargs: Any) -> dict[fx.Node, Port | Tensor]:
    """Return what the tensors that enter Dynamo's graph are to the model; one from elsewhere is itself."""
    ports = _ports(model, args, kwargs)
    entering = zip(graph.graph.find_nodes(op="placeholder"), inputs_of(graph, args, kwargs), strict=True)
    return {node: ports.get(id(value), value) for node, value in entering if isinstance(value, Tensor)}


def returned_by(graph: fx.GraphModule, model: nn.Module, args: Any, kwargs: Any) -> list[Returned]:
    """Return, for each leaf of the model's result, the position among the outputs of Dynamo's graph, or the input.

    Raises LeftToPython for a result that is made of a tensor and is none: a number, or an array of NumPy's.
    """
    ports, codegen = _ports(model, args, kwargs), cast(Any, graph.graph._codegen)
    sizes = [isinstance(output.meta.get("example_value"), int | torch.SymInt) for output in _outputs(graph)]
    marks = [1 if is_size else torch.empty(0) for is_size in sizes]
    places: dict[int, Returned] = {id(mark): i for i, mark in enumerate(marks) if not sizes[i]}
    try:
        leaves, again = (
            pytree.tree_leaves(codegen.dynamo_bytecode_unflatten(marks, (*args, *kwargs.values()))) for _ in range(2)
        )
    except (RuntimeError, TypeError) as error:  # of .item() and the like of a mark, which has no number
        raise LeftToPython(model, [("what it makes of a tensor's numbers", RESULT, "")]) from error
    if any(a is not b for a, b in zip(leaves, again, strict=True) if isinstance(a, np.ndarray | np.generic)):
        raise LeftToPython(model, [("an array of NumPy's that it makes of a tensor", RESULT, "")])
    if any(a is not b for a, b in zip(leaves, again, strict=True) if isinstance(a, Tensor)):
        raise CaptureError(
            f"{type(model).__name__} returns a tensor that it makes without an operation of a graph: return a copy of "
            "it (.clone())."
        )
    known = places | ports
    return [known.get(id(leaf), leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]


def _ports(model: nn.Module, args: Any, kwargs: Any) -> dict[int, Port]:
    """Return what tensors of the model and of a call are, by their ids."""
    named = [("buffer", model.named_buffers()), ("parameter", model.named_parameters())]
    ports = {id(tensor): Port(kind, name) for kind, tensors in named for name, tensor in tensors}  # type: ignore
    leaves = enumerate(pytree.tree_leaves((args, kwargs)))
    return ports | {id(leaf): Port("argument", index=i) for i, leaf in leaves if isinstance(leaf, Tensor)}


def _reads(graph: fx.GraphModule, model: nn.Module, args: Any, kwargs: Any) -> tuple[Read, ...]:
    """Return the tensors among the graph's inputs that are neither parameters, nor buffers, nor arguments."""
    known = {id(t) for t in (*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, kwargs)))}
    foreign = [
        (str(getattr(node, "_dynamo_source").name), value)  # noqa: B009 (no attribute of the class)
        for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs_of(graph, args, kwargs), strict=True)
        if isinstance(value, Tensor) and id(value) not in known
    ]
    codegen: Any = graph.graph._codegen
    globals_ = getattr(codegen.dynamo_bytecode_unflatten, "f_globals", None)
    scope = {"L": _locals(model), "G": globals_ or getattr(type(model).forward, "__globals__", {})}
    unguarded = [(spelled(s), type(v).__name__, "") for s, v in foreign if _found(s, scope) is not v]
    if unguarded:
        raise LeftToPython(model, unguarded, reads=True)
    return tuple(Read(source, value, _version(value), scope) for source, value in foreign)


def _found(source: str, scope: Mapping[str, Any]) -> Any:
    """Return what a source of Dynamo's names now; None if it cannot be read."""
    try:
        return eval(source, {"__builtins__": {}}, dict(scope))
    except Exception:  # whatever the model's own attributes raise: then the tensor is not the one that was read
        return None


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
