"""Programs: the steps of a call of a planned graph, as one Python function that torch.fx writes.

A ``Run`` calls a segment. A ``PythonCall`` is a call of Python, whose result must be what the plan assumes where the
layouts of its arguments do not decide it. The function has no loop over the steps, and releases every value after its
last use.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, fx

from fxround.graph.dialect import CALLS
from fxround.graph.generated_code import forget_source_of
from fxround.numerics.lazy import cached_property
from fxround.runtime import buffers

_ATEN: Final = torch.ops.aten
# The functions of ``torch`` that make the same call as an operator of that name, in less time.
_BINDINGS: Final[Mapping[Any, Callable[..., Any]]] = {
    getattr(getattr(_ATEN, name), overload): getattr(torch, name)
    for overload, names in {
        "default": "abs amax amin bmm clone convolution cos embedding erf exp log mm neg reciprocal relu rsqrt sigmoid "
        "sin sqrt tanh",
        "Tensor": "add div mul sub",
        "dim_IntList": "sum",
        "self": "where",
    }.items()
    for name in names.split()
}
# Of these, the operators of arithmetic: their second operand may be a number.
_ARITHMETIC: Final = frozenset((_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor))
# The dtypes of which kernels convert no operand.
_FULL: Final = (torch.float32, torch.float64)
# The functions that return a part of a tensor's layout.
SIZES: Final = (_ATEN.sym_size.int, _ATEN.sym_stride.int, _ATEN.sym_numel.default)
# Operators whose results' layouts do not follow from those of the arguments alone.
_VARYING: Final = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))


def rounds_nothing(graph: fx.GraphModule) -> bool:
    """Whether operators of PyTorch's compute everything in a graph, and no operator of the dialect."""
    return not any(node.op == "call_module" or node.target in CALLS for node in graph.graph.nodes)


def parts_of(value: Any) -> list[Any]:
    """Return the parts of a result that is a list, or a list of the result."""
    return list(value) if isinstance(value, list | tuple) else [value]


@dataclass(frozen=True)
class Slot:
    """The place of a value in a call: an argument of a step, or a part of one."""

    index: int


@dataclass(frozen=True)
class PythonCall:
    """A call of Python.

    results     the slots of its result, or of the parts of a result that is a list
    parts       whether the result is a list
    expected    the layouts, or the numbers, that the program assumes; None if they follow from those of the arguments
    """

    function: Any
    args: Any
    kwargs: Any
    results: tuple[int, ...]
    parts: bool = False
    expected: Any = None

    def write(self, graph: fx.Graph, slots: dict[int, fx.Node]) -> None:
        """Append the call to a graph, with a check of the result if one is needed."""
        args, kwargs = _filled(tuple(self.args), slots), {k: _filled(arg, slots) for k, arg in self.kwargs.items()}
        result = graph.call_function(_named(self.function), args, kwargs)
        if self.expected is not None:
            graph.call_function(_requirement(self.expected), (result,))
        for i, slot in enumerate(self.results):
            slots[slot] = graph.call_function(operator.getitem, (result, i)) if self.parts else result


class Segment(Protocol):
    """Kernels in one call of machine code."""

    def run(self, outside: Sequence[Tensor], rng: Tensor | None, /) -> None:
        """Run the kernels on what they read and make outside of the segment."""


@dataclass(frozen=True)
class Run:
    """A segment with the slots of what it reads and of what it makes, of these shapes and dtypes."""

    segment: Segment
    reads: tuple[int, ...]
    makes: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
    rng: int | None

    def write(self, graph: fx.Graph, slots: dict[int, fx.Node]) -> None:
        """Append the call to a graph."""
        rng = None if self.rng is None else slots[self.rng]
        result = graph.call_function(self._call(), ([slots[i] for i in self.reads], rng))
        for i, (slot, _, _) in enumerate(self.makes):
            slots[slot] = graph.call_function(operator.getitem, (result, i))

    def _call(self) -> Callable[[list[Tensor], Tensor | None], list[Tensor]]:
        layouts, run = [(shape, dtype) for _, shape, dtype in self.makes], self.segment.run

        def segment(reads: list[Tensor], rng: Tensor | None) -> list[Tensor]:
            made = [buffers.empty(shape, dtype) for shape, dtype in layouts]
            run([*reads, *made], rng)
            return made

        return segment


class _Unexpected(Exception):
    """A result of Python is not what the plan assumes."""


def sees_calls() -> bool:
    """Whether a mode may keep a result of PyTorch's operators, or change what they do unless they get ``out``."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._is_any_autocast_enabled())


@dataclass(frozen=True)
class CallPlan:
    """The steps of a call. The first slots are the inputs, the next ones what the graph holds.

    overwrites: whether results of Python are overwritten.
    """

    steps: tuple[Run | PythonCall, ...]
    inputs: int
    held: tuple[Any, ...]
    returned: Any
    overwrites: bool = False

    def run(self, inputs: Sequence[Any]) -> Any:
        """Return what the graph returns; None if the plan cannot be used.

        Then a result of Python is not what the plan assumes, or a mode sees the calls of a plan that overwrites.
        """
        if self.overwrites and sees_calls():
            return None
        try:
            return self._function(*inputs, *self.held)
        except _Unexpected:
            return None

    @cached_property
    def _function(self) -> Callable[..., Any]:
        graph = fx.Graph()
        slots = {i: graph.placeholder(f"x{i}") for i in range(self.inputs + len(self.held))}
        if self.overwrites or any(isinstance(step, Run) for step in self.steps):
            graph.call_function(buffers.begin)
        for step in self.steps:
            step.write(graph, slots)
        graph.output(_filled(self.returned, slots))
        written: Any = fx.GraphModule({}, graph).forward
        forget_source_of(written.__code__)
        function: Callable[..., Any] = written
        return function


@dataclass(frozen=True)
class Computed:
    """What a graph returned while its calls were planned; plan: None if there is nothing to gain."""

    results: Any
    plan: CallPlan | None


def _filled(arg: Any, slots: Mapping[int, fx.Node]) -> Any:
    """Return an argument with nodes in place of slots."""
    if isinstance(arg, Slot):
        return slots[arg.index]
    if isinstance(arg, list | tuple):
        return (list if isinstance(arg, list) else tuple)(_filled(part, slots) for part in arg)
    return arg


def _named(function: Any) -> Callable[..., Any]:
    """Return a function whose name torch.fx can write."""
    if hasattr(function, "__name__"):
        named: Callable[..., Any] = function
        return named

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return called


@dataclass(frozen=True)
class Strides:
    """What a plan assumes of a tensor if everything else about it follows from the arguments."""

    strides: tuple[int, ...]


def _requirement(expected: Any) -> Callable[[Any], None]:
    if isinstance(expected, Strides):
        strides = expected.strides

        def require_strides(value: Tensor) -> None:
            if value.stride() != strides:
                raise _Unexpected

        return require_strides

    def require(value: Any) -> None:
        if assumed(value) != expected:
            raise _Unexpected

    return require


def assumed(value: Any) -> Any:
    """Return what a plan assumes of a result of Python: its layout, or the number itself."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_cpu, value.is_neg()
    if isinstance(value, list | tuple):
        return tuple(map(assumed, value))
    return type(value), value


# The numbers of rows and steps that come from lengths have no tag.
_UNSETTLED: Final = (_ATEN._pack_padded_sequence.default,)


def expectation(target: Any, value: Any) -> Any:
    """Return what has to be checked of an operator's result; None if the arguments' layouts decide everything."""
    settled = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and not _VARYING & {*target.tags}
    # A complex result may be a view with a sign.
    tensors = value if isinstance(value, list | tuple) else [value]
    plain = all(isinstance(x, Tensor) and not (x.is_complex() or x.is_neg()) for x in tensors)
    if not (settled and plain) or target in _UNSETTLED:
        return assumed(value)
    # A switch of PyTorch decides the strides of a convolution.
    return Strides(value.stride()) if target is _ATEN.convolution.default else None


def binding(target: Any, args: Sequence[Any]) -> Any:
    """Return a function that makes the call of an operator in less time, the operator itself if there is none."""
    return _BINDINGS.get(target, target) if args and isinstance(args[0], Tensor) else target


def number_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the second operand of arithmetic, a number, as a tensor with which the call has the same bits.

    PyTorch makes a tensor without dimensions of the number in each call, of int64 or float64, converts it to the dtype
    of the first operand, which is that of the result, and passes it to the kernel. To do so takes longer than the
    arithmetic of a few elements. Kernels of reduced dtypes compute with the number before its conversion.
    """
    if target not in _ARITHMETIC or kwargs or len(args) != 2:
        return None
    tensor, number = args
    if type(number) not in (int, float) or not isinstance(tensor, Tensor) or tensor.dtype not in _FULL:
        return None
    if isinstance(number, int) and number.bit_length() > 63:
        return None
    dtype = torch.int64 if isinstance(number, int) else torch.float64
    return torch.tensor(number, dtype=dtype, device="cpu").to(tensor.dtype)


def view_of(home: Tensor, view: Tensor, source: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the function and arguments that make a view of a home's memory at once; None if there are none.

    source: what stands for the home among the arguments.
    """
    if view.dtype != home.dtype or home.is_complex() or view.is_neg() or home.layout != torch.strided:
        return None
    beyond, size, stride = view.storage_offset() - home.storage_offset(), tuple(view.shape), view.stride()
    if not beyond:
        return torch.as_strided, (source, size, stride)

    def part(x: Tensor) -> Tensor:
        return torch.as_strided(x, size, stride, x.storage_offset() + beyond)

    return part, (source,)
