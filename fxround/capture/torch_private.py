"""The state of PyTorch in which a model is captured, and the changes to Dynamo's graph before it is differentiated.

``tracing_switches`` turns off what would hide arithmetic from the graph, and restores every switch whatever the model
raises. ``quickened`` remembers results that tracing computes again and again with symbolic sizes; without it the graph
has the same operators on the same sizes. Each remembered result is a pure function of its key: the two expressions,
everything that a symbolic number carries besides them, and the version of what is known of the symbols. This file uses
PyTorch's private APIs; a comment names the versions wherever those differ.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import importlib
import inspect
import sys
import warnings
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses import fake_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import stateless

from fxround.capture.batch_norm import averages_of_all_batches
from fxround.capture.result_sizes import map_tensors
from fxround.capture.traced_aliases import kept_dropouts
from fxround.locks import waited_for

_LOCKS: Final[list[Any]] = []


def composite_operators() -> tuple[str, ...]:
    """Return the names of the operators that are registered as compositions of others; libraries may add some."""
    return tuple(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))


def derivatives() -> dict[str, Any]:
    """Return Dynamo's setting that traces ``torch.autograd.grad``; some versions of PyTorch do not have it."""
    name = "trace_autograd_ops"
    return {name: True} if hasattr(torch._dynamo.config, name) else {}


@contextlib.contextmanager
def tracing_switches(by_dynamo: bool = False) -> Iterator[None]:
    """Set the state in which a model may be traced: fused kernels that hide arithmetic are off, LSTMs are not skipped.

    by_dynamo: whether ``torch.compile`` has already traced the model, under its own assumptions on sizes. Under
    different ones, a size of 1 would get a symbol for which Dynamo's guards have no source.
    """
    mha, cudnn = torch.backends.mha.get_fastpath_enabled(), torch.backends.cudnn.enabled
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "TF32 acceleration on top of oneDNN")  # every set_flags gives this warning
        # PyTorch warns when a backward pass fails in a trace. The error itself is raised, and names the line.
        warnings.filterwarnings("ignore", "Error detected in ")
        # The loops of torch.scan are not compiled by torch.compile while they are captured.
        warnings.filterwarnings("ignore", "torch.compile is ignored when called inside")
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(mock.patch.object(fake_tensor.log, "disabled", True))  # what it logs is raised too
        stack.enter_context(
            torch._dynamo.config.patch(
                allow_rnn=True, automatic_dynamic_shapes=False, assume_static_by_default=True, **derivatives()
            )
        )
        stack.enter_context(torch.backends.nnpack.flags(enabled=False))
        stack.enter_context(_kept_checks())
        # Its checks read data, so that torch.compile switches them off for the rest of the process.
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        if not by_dynamo:
            stack.enter_context(asked_sizes())
            stack.enter_context(_unread_numbers())
        stack.enter_context(mock.patch("torch.nn.modules.transformer._detect_is_causal_mask", _declared_causality))
        decompositions = "torch._decomp.decompositions"
        stack.enter_context(mock.patch(f"{decompositions}._upsample_get_cubic_coefficients", _cubic_coefficients))
        parts = (_shapes_of_cells, averages_of_all_batches, kept_dropouts, _shared_inputs, _undifferentiated_loops)
        for part in parts:
            stack.enter_context(part())
        # A module with two names is swapped twice. Undo the swaps in reverse order, else it keeps the trace's tensors.
        swap = functools.partial(stateless._reparametrize_module, stack_weights=True)
        stack.enter_context(mock.patch.object(stateless, "_reparametrize_module", swap))
        stack.callback(torch.backends.mha.set_fastpath_enabled, mha)
        torch.backends.mha.set_fastpath_enabled(False)
        # On CUDA devices, norms and recurrent layers would be cuDNN's own operators.
        stack.callback(torch._C._set_cudnn_enabled, cudnn)
        torch._C._set_cudnn_enabled(False)
        yield


def _unread_numbers() -> contextlib.AbstractContextManager[Any]:
    """Keep a trace from reading the number in an argument without dimensions.

    Such a number would decide an if or the length of a loop for all later calls: Dynamo's guard on it is not kept here.
    """
    converter = fake_tensor.FakeTensorConverter
    original = converter.from_real_tensor

    @functools.wraps(original)
    def unread(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        made.item_memo = None
        return made

    return mock.patch.object(converter, "from_real_tensor", unread)


def traced_logger() -> tuple[Any, Any]:
    """Return Dynamo's class for a logger in a trace, and its function that makes a constant of the trace."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.misc import LoggingLoggerVariable

    return LoggingLoggerVariable, ConstantVariable.create


def refusing_logger() -> Any:
    """Return the logger of fake tensors, which logs the stack of every error that it raises."""
    return fake_tensor.log


def redefine(graph: fx.GraphModule, definitions: Mapping[Any, Callable[..., Any]]) -> fx.GraphModule:
    """Replace functions and methods in Dynamo's graph by their definitions, which apply before differentiation."""
    functions = {key: f for key, f in definitions.items() if not isinstance(key, torch._ops.OperatorBase)}
    for body in graph.children():
        if isinstance(body, fx.GraphModule):
            redefine(body, definitions)
    for node in graph.graph.nodes:
        method = node.op == "call_method"
        called = getattr(torch.Tensor, str(node.target), None) if method else node.target
        if node.op not in ("call_method", "call_function") or called not in functions:
            continue
        with graph.graph.inserting_before(node):
            new = graph.graph.call_function(functions[called], node.args, node.kwargs)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


def separate_results(graph: fx.GraphModule, aliases: Collection[int] = ()) -> None:
    """Copy every result of Dynamo's graph.

    aliases: the positions of the outputs that share memory with an input or another result (``capture.aliases``), and
    have no gradient here. Dynamo adds inputs that the model returns to the results after the graph.
    """
    copy_results(graph, aliases)
    codegen: Any = graph.graph._codegen
    restored = codegen.dynamo_bytecode_unflatten

    def separated(computed: Sequence[Any], inputs: tuple[Any, ...]) -> Any:
        own = {id(value) for value in computed}

        def copied(value: torch.Tensor) -> torch.Tensor:
            if id(value) not in own:
                return value.detach().clone()
            own.remove(id(value))
            return value

        return map_tensors(copied, restored(computed, inputs))

    codegen.dynamo_bytecode_unflatten = separated


def copy_results(graph: fx.GraphModule, aliases: Collection[int] = ()) -> None:
    """Make every result of Dynamo's graph a tensor of its own; those at the positions ``aliases`` have no gradient."""
    outputs: Any = graph.graph.output_node().args[0]
    detached = {outputs[position] for position in aliases}
    _replace_results(graph, lambda node, value: _detached_copy if node in detached else torch.clone)


def _detached_copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone()


def detach_results(graph: fx.GraphModule) -> None:
    """Detach what a model computed under ``torch.enable_grad``: a graph without a backward pass is wanted."""

    def chosen(node: fx.Node, value: torch.Tensor) -> Any:
        return torch.Tensor.detach if value.requires_grad and node.op != "placeholder" else None

    _replace_results(graph, chosen)


def _replace_results(graph: fx.GraphModule, chosen: Callable[[fx.Node, torch.Tensor], Any]) -> None:
    """Apply the function that is chosen for a result, if there is one, to each tensor that Dynamo's graph returns."""

    def replaced(node: fx.Node) -> fx.Node:
        value = node.meta.get("example_value")
        function = chosen(node, value) if isinstance(value, torch.Tensor) else None
        if function is None:
            return node
        result: fx.Node = graph.graph.call_function(function, (node,))
        result.meta = dict(node.meta)
        return result

    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        output.args, output.kwargs = fx.map_arg((output.args, output.kwargs), replaced)
    graph.recompile()


def asked_sizes() -> contextlib.AbstractContextManager[None]:
    """Make sizes of 0 and 1 conditions where a model asks for them, not assumptions."""
    return _symbolic_sizes(backed_size_oblivious=True)


def separate_sizes() -> contextlib.AbstractContextManager[None]:
    """Give equal sizes of an example symbols of their own, so that a batch of 5 is not taken for a length of 5."""
    return _symbolic_sizes(use_duck_shape=False)


def _symbolic_sizes(**settings: bool) -> contextlib.AbstractContextManager[None]:
    config: Any = importlib.import_module("torch.fx.experimental._config")
    patched: contextlib.AbstractContextManager[None] = config.patch(**settings)
    return patched


@contextlib.contextmanager
def _kept_checks() -> Iterator[None]:
    """Keep the checks that a linear algebra routine succeeded, although nothing uses their results."""
    # torch 2.11 and 2.12 do not declare that they have an effect.
    effects: Any = importlib.import_module("torch._higher_order_ops.effects")
    check = torch.ops.aten._linalg_check_errors.default
    declared = effects._get_effect(check) is not None
    handle = None if declared else effects._register_effectful_op(check, effects._EffectType.ORDERED)
    try:
        yield
    finally:
        if handle is not None:
            handle.destroy()


@contextlib.contextmanager
def replaced_layers(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let PyTorch's decompositions of recurrent layers call these functions by these names."""
    decompositions: Any = importlib.import_module("torch._decomp.decompositions")
    with mock.patch.dict(vars(decompositions), functions):
        yield


def recurrent_formulas() -> Any:
    """Return the module of PyTorch's formulas of recurrent layers."""
    return importlib.import_module("torch._decomp.decompositions")


def find_builtins(codegen: Any) -> None:
    """Let the code around Dynamo's graph find Python's builtins."""
    # torch 2.11 asks for them among the globals of the model's code.
    if not hasattr(importlib.import_module("torch._dynamo.convert_frame"), "_safe_builtins_dict"):
        for part in (codegen.dynamo_bytecode_flatten, codegen.dynamo_bytecode_unflatten):
            part.f_globals = ChainMap(part.f_globals, vars(builtins))


@contextlib.contextmanager
def _shared_inputs() -> Iterator[None]:
    """Let the body of a loop read two tensors of one memory.

    Dynamo refuses it in case one of them is changed in place, which it refuses by itself.
    """
    tracer: Any = importlib.import_module("torch._dynamo.output_graph").SubgraphTracer
    original = tracer.has_aliasing

    def has_aliasing(self: Any, **options: Any) -> Any:  # torch 2.15 has an option for loops that may read so
        info = original(self, **options)
        return type(info)(False, "") if info.msg.startswith("Input-to-input") else info

    with mock.patch.object(tracer, "has_aliasing", has_aliasing):
        yield


class _Opaque(torch.autograd.Function):
    """A loop of fake tensors whose results require gradients and have none."""

    @staticmethod
    def forward(_: Any, loop: Any, args: Any, *__: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return loop(*args)

    @staticmethod
    def backward(*_: Any) -> Any:
        raise AssertionError("Dynamo differentiated the shapes of a loop")


@contextlib.contextmanager
def _undifferentiated_loops() -> Iterator[None]:
    """Keep Dynamo from differentiating the loops that it traces, of which it reads the shapes of the results alone.

    PyTorch cannot differentiate loops of some loops; ``capture.loops`` can, and does it later.
    """
    key = torch._C.DispatchKey.Autograd

    def opaque(loop: Any, original: Any) -> Any:
        def shapes(*args: Any) -> Any:
            tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            if not all(isinstance(x, fake_tensor.FakeTensor) for x in tensors):
                return original(*args)
            return _Opaque.apply(loop, args, *tensors)  # type: ignore[no-untyped-call]

        return shapes

    with contextlib.ExitStack() as stack:
        for loop in (torch.ops.higher_order.scan, torch.ops.higher_order.cond, torch.ops.higher_order.map_impl):
            own = {key: opaque(loop, loop.py_kernels[key])}
            stack.enter_context(mock.patch.dict(loop.py_kernels, own))
            stack.enter_context(mock.patch.dict(loop._dispatch_cache, clear=True))
        yield


@contextlib.contextmanager
def _shapes_of_cells() -> Iterator[None]:
    """Let Dynamo trace the kernels that recurrent cells have on CUDA devices; formulas replace them in its graph."""

    def lstm_cell(gates: Any, _: Any, cx: Any, *biases: Any) -> tuple[Any, ...]:
        return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(gates)

    def gru_cell(gates: Any, _: Any, hx: Any, *biases: Any) -> tuple[Any, ...]:
        return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])

    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, shapes in (("_thnn_fused_lstm_cell", lstm_cell), ("_thnn_fused_gru_cell", gru_cell)):
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
                library.impl(name, shapes, "Meta")
        yield


def _cubic_coefficients(t: Any) -> tuple[Any, ...]:
    """Return the weights of the four neighbours, by PyTorch's decomposition for the CPU, on every device."""
    decompositions: Any = importlib.import_module("torch._decomp.decompositions")
    near, far = torch.stack([t, 1.0 - t]), torch.stack([t + 1.0, 2.0 - t])
    first, last = decompositions._upsample_cubic_convolution2(far, -0.75).unbind()
    second, third = decompositions._upsample_cubic_convolution1(near, -0.75).unbind()
    return first, second, third, last


def _declared_causality(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return what the caller declared. PyTorch would compare the mask's values, and apply the mask in either case."""
    return bool(is_causal)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection.

    Tracing makes millions of objects that stay alive, and each full collection visits them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def defined_before_autograd(definitions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Let formulas define the margin losses, which PyTorch replaces by decompositions before it differentiates.

    Its decomposition of multilabel_margin_loss has other results than its kernel, and both have another gradient where
    a term is 0.
    """
    aten, key = torch.ops.aten, torch._C.DispatchKey.Autograd
    with contextlib.ExitStack() as stack:
        for overload in (aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default):
            original = overload.py_kernels.get(key)
            if original is not None and overload in definitions:
                own = {key: or_else(definitions[overload], original)}
                stack.enter_context(mock.patch.dict(overload.py_kernels, own))
                stack.enter_context(mock.patch.dict(overload._dispatch_cache, clear=True))
        yield


def or_else(definition: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a definition, with ``original`` where it returns NotImplemented."""

    @functools.wraps(definition)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        result = definition(*args, **kwargs)
        return original(*args, **kwargs) if result is NotImplemented else result

    return chosen


def joint_of(stack: contextlib.ExitStack, graph: Any, args: Any, kwargs: Any, decompositions: Any) -> Any:
    """Return AOTAutograd's graph of results and gradients for Dynamo's graph. Its contexts end with ``stack``."""
    # Imported at the first capture, as in graph.py.
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    overloads = {key: f for key, f in decompositions.items() if isinstance(key, torch._ops.OpOverload)}
    stack.enter_context(defined_before_autograd(overloads))
    return aot_export_joint_with_descriptors(stack, graph, args, kwargs, decompositions=overloads)


# Where AOTAutograd's nodes name the node of Dynamo's graph that they were traced from.
TRACED_FROM: Final = "from_node"


def traced_from(node: fx.Node) -> str:
    """Return the name of the node of Dynamo's graph that an ATen node was traced from; "" if it does not say."""
    sources = node.meta.get(TRACED_FROM)
    return str(sources[0].name) if sources else ""


# What autograd adds to the stack of a sum of gradients.
NOTE_OF_SUMS: Final = "Gradient addition node due to multiple use of tensor around:"


def is_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd made a node for the backward pass."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def adds_gradients(node: fx.Node) -> bool:
    """Whether a node of the backward pass is autograd's own sum of the gradients of one value."""
    return bool(node.meta.get("is_gradient_acc"))


def traced_frame() -> tuple[str, torch.nn.Module | None]:
    """Return, inside of a backend, the name of the function that Dynamo traces, and the module among its arguments."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer = InstructionTranslator.current_tx()
    modules = (value for value in tracer.f_locals.values() if isinstance(value, torch.nn.Module))
    return tracer.f_code.co_name, next(modules, None)


@functools.cache
def own_graphs() -> dict[str, Any]:
    """Return the option of ``torch.compile`` by which each of its results has graphs of its own.

    Otherwise all functions of the same code share their graphs and the limit of their number, as all models of
    transformers do. torch 2.13 and later have this option.
    """
    name = "isolate_recompiles"
    return {name: True} if name in inspect.signature(torch.compile).parameters else {}


def failed_guard() -> str | None:
    """Return, inside of a backend, the guard for which Dynamo traces again; None for the first time."""
    from torch._dynamo.utils import get_metrics_context

    reason = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")
    return None if reason is None else str(reason)


def capturing() -> Any:
    """Return the only lock of the process under which models are traced.

    It is Dynamo's own, which ``torch.compile`` takes too.
    """
    # Imported at the first capture: it costs as much time as the rest of torch.
    from torch._dynamo import convert_frame

    if not _LOCKS:
        with convert_frame.compile_lock:
            if not _LOCKS:
                _LOCKS.append(waited_for(convert_frame.compile_lock))
    return _LOCKS[0]


# The arithmetic that computes strides, numbers of elements and tests of contiguity.
_ARITHMETIC: Final = ("add", "sub", "mul", "int_floordiv", "eq", "ne", "lt", "le", "gt", "ge")


@contextlib.contextmanager
def quickened() -> Iterator[None]:
    """Remember results of arithmetic on symbolic sizes, and leave out of the graph what nothing uses.

    Methods of PyTorch's classes are replaced meanwhile, so that one thread at a time is in such a block: of two, the
    one that ends last would put back what it had met, which is the other's.
    """
    # Imported at the first capture, as in graph.py.
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.sym_node import SymNode

    known: dict[Any, Any] = {}
    constant: dict[Any, bool] = {}

    def maybe_as_int(self: Any) -> int | None:
        expression = self.expr
        if expression.is_Integer:
            return int(expression)
        is_constant = constant.get(expression)
        if is_constant is None:
            is_constant = constant[expression] = bool(expression.is_number)
        return int(expression) if is_constant else None

    with capturing(), contextlib.ExitStack() as stack:
        for name in _ARITHMETIC:
            stack.enter_context(mock.patch.object(SymNode, f"_{name}", _remembering(SymNode, f"_{name}", known)))
        stack.enter_context(mock.patch.object(SymNode, "maybe_as_int", maybe_as_int))
        stack.enter_context(mock.patch.object(SymNode, "expr", property(_unreplaced(vars(SymNode)["expr"].fget))))
        stack.enter_context(mock.patch.object(FunctionalTensor, "__new__", _unasked(FunctionalTensor)))
        yield


def _remembering(symbolic: Any, name: str, known: dict[Any, Any]) -> Callable[[Any, Any], Any]:
    """Return the method, computing once for operands that are equal in everything.

    It computes every time while operations are recorded.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    compute: Callable[[Any, Any], Any] = getattr(symbolic, name)

    def remembered(self: Any, other: Any) -> Any:
        environment = self.shape_env
        if environment is None or get_proxy_mode() or not (_is_plain(self) and _is_plain(other)):
            return compute(self, other)
        key = (name, id(environment), _replacements(environment), *_all_of(self), *_all_of(other))
        result = known.get(key)
        if result is None:
            result = known[key] = compute(self, other)
        return result

    return remembered


def _unreplaced(replaced: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the method that gives the expression of a number. It is its own while no symbol has a replacement.

    PyTorch first asks an expression whether it is a number, which takes longer than all else that it does.
    """

    def expression(self: Any) -> Any:
        if getattr(self.shape_env, "_replacements_version_counter", None) == 0:
            return self._expr
        return replaced(self)

    return expression


def _replacements(environment: Any) -> Any:
    """Return what differs whenever a symbol was replaced by another expression."""
    # torch 2.11 has no counter of the replacements.
    counter = getattr(environment, "_replacements_version_counter", None)
    return tuple(environment.replacements.items()) if counter is None else counter


def known_of_symbols(environment: Any) -> tuple[Any, ...]:
    """Return what differs whenever more became known of the symbols of an environment."""
    return id(environment), _replacements(environment), len(environment.guards), environment._get_key()


def _is_plain(number: Any) -> bool:
    return isinstance(number._hint, int | float | None)


def _all_of(number: Any) -> tuple[Any, ...]:
    return number._expr, number.pytype, number._hint, number._optimized_summation


def _unasked(functional: Any) -> Callable[..., Any]:
    """Return the constructor. Arithmetic on sizes inside it enters the graph only if its result is used."""
    from torch.fx.experimental.proxy_tensor import maybe_enable_thunkify

    construct = functional.__new__

    def constructed(cls: Any, elem: Any, mode: Any) -> Any:
        with maybe_enable_thunkify():
            return construct(cls, elem, mode)

    return constructed


def is_optimized(model: torch.nn.Module) -> bool:
    """Whether a module is one that ``torch.compile`` returned."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported before the first call of torch.compile
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def is_of_dynamo(error: Exception) -> bool:
    """Whether Dynamo raised an error, and not the code that it traced."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)
