"""Numbers that are attributes of modules and change from call to call, as inputs of a graph.

A trace has a number that the model reads as a constant, which ends up in the graph or decides what is in it. To make it
an input, the model is traced twice: as it is, and with a tensor of no dimension in the place of the number, which
Dynamo refuses to branch on, to convert, or to ask for its type. If both graphs are the same but for operands of
additions, subtractions, products and quotients, the number enters the computation there and nowhere else, and the first
graph gets an input in these places. It has the dtype of the other operand, to which PyTorch would convert the number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, fx, nn

from fxround.capture.attribute_reads import tensor_attribute_reads
from fxround.graph.site import PORT, Port
from fxround.graph.values import fake_mode

aten: Final = torch.ops.aten
# The operators that may have a number as their second operand, and whether the operands may be exchanged.
_OPERATORS: Final[Mapping[Any, bool]] = {
    aten.add.Tensor: True,
    aten.mul.Tensor: True,
    aten.sub.Tensor: False,
    aten.div.Tensor: False,
}
_DTYPES: Final = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Number:
    """An attribute of a module: the module's path, and the name."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    def holder(self, model: nn.Module) -> dict[str, Any]:
        """Return the attributes of the module that has the number."""
        return vars(model.get_submodule(self.path))

    def source(self, root: str) -> str:
        """Return Dynamo's name of the number, given that of the model."""
        modules = "".join(f"._modules['{part}']" for part in self.path.split(".") if part)
        return f"L['{root}']{modules}.{self.name}"


def is_number(value: Any) -> bool:
    """Whether a value can be an input: a float, or an int of 64 bits; of no class of its own."""
    return type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)


def as_operand(number: float, dtype: torch.dtype) -> Tensor:
    """Return a number in the dtype of the other operand, as PyTorch converts it: rounded once, to infinity if large.

    The result has no dimension.
    """
    if isinstance(number, float):
        return torch.scalar_tensor(number, dtype=torch.float64).to(dtype)
    return torch.scalar_tensor(number, dtype=dtype)


def number_of(model: nn.Module, spelled: str) -> Number | None:
    """Return the number that a source means, as the model's author spells it (``self.block.gain``); None for others."""
    _, _, inside = spelled.partition(".")
    path, _, name = inside.rpartition(".")
    number = Number(path, name)
    return number if is_held(model, number) else None


def is_held(model: nn.Module, number: Number) -> bool:
    """Whether the model has the number, and it is one now."""
    try:
        return is_number(number.holder(model).get(number.name))
    except AttributeError:  # no such submodule
        return False


def with_tensors(model: nn.Module, numbers: Collection[Number]) -> tuple[nn.Module, list[Tensor]]:
    """Return a model with tensors in place of numbers, which shares everything else with this one, and the tensors."""
    copies: dict[str, nn.Module] = {}

    def copied(path: str) -> nn.Module:
        if path not in copies:
            module = model.get_submodule(path)
            copies[path] = made = nn.Module.__new__(type(module))
            vars(made).update(vars(module))
            vars(made).update(_modules=dict(module._modules), _buffers=dict(module._buffers))
            if path:
                above, _, name = path.rpartition(".")
                copied(above)._modules[name] = made
        return copies[path]

    tensors = []
    for number in numbers:
        holder = copied(number.path)
        tensors.append(torch.tensor(vars(holder).pop(number.name), dtype=torch.float64))
        holder._buffers[number.name] = tensors[-1]
    return copied(""), tensors


@contextlib.contextmanager
def asked_nothing(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let Dynamo refuse what asks one of these tensors what it is: it would answer as a tensor, not as a number."""
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    def refuse_number(variable: Any, what: str, error: type[Exception] = Unsupported) -> None:
        argument = getattr(variable.proxy, "node", variable.proxy).meta.get("grapharg")
        if argument is not None and any(argument.example is tensor for tensor in tensors):
            raise error(f"the model asks a number for {what}")

    kind, has = TensorVariable.python_type, TensorVariable.call_obj_hasattr
    handlers = TorchInGraphFunctionVariable._get_handlers()
    is_tensor = handlers[torch.is_tensor]

    def python_type(self: Any) -> Any:
        refuse_number(self, "its type", NotImplementedError)  # which Dynamo expects here
        return kind(self)

    def attribute(read: Callable[[], Any], holder: Any, name: str) -> Any:
        refuse_number(holder, name)
        return read()

    def call_obj_hasattr(self: Any, tx: Any, name: str) -> Any:
        refuse_number(self, name)
        return has(self, tx, name)

    def asked(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        for variable in (*args, *kwargs.values()):
            if isinstance(variable.realize(), TensorVariable):
                refuse_number(variable.realize(), "its type")
        return is_tensor(self, tx, *args, **kwargs)

    replaced: Any = {"python_type": python_type, "call_obj_hasattr": call_obj_hasattr}
    functions = dict.fromkeys((f for f, handler in handlers.items() if handler is is_tensor), asked)
    with (
        mock.patch.multiple(TensorVariable, **replaced),
        mock.patch.dict(handlers, functions),
        tensor_attribute_reads(attribute),
    ):
        yield


def insert_numbers(
    graph: fx.GraphModule, other: fx.GraphModule, numbers: Mapping[Number, float]
) -> dict[Number, torch.dtype] | None:
    """Make numbers inputs of a graph, its first ones; return their dtypes.

    graph: with the numbers as constants. other: with buffers in their place. None, and no change, if the graphs differ
    in more than the operands of ``_OPERATORS``, or if a number is an operand of values of two dtypes.
    """
    places = _places(graph, other, {str(number): value for number, value in numbers.items()})
    if places is None:
        return None
    dtypes = {str(number): {node.args[0].meta["val"].dtype for node in places[str(number)]} for number in numbers}
    if any(len(each) != 1 for each in dtypes.values()):
        return None
    first, mode = next(iter(graph.graph.nodes)), fake_mode(graph)
    for number in numbers:
        (dtype,) = dtypes[str(number)]
        with graph.graph.inserting_before(first):
            made = graph.graph.placeholder(f"number_{number.name}")
        made.target = made.name
        made.meta[PORT] = Port("number", name=str(number))
        made.meta["val"] = mode.from_tensor(torch.zeros((), dtype=dtype), static_shapes=True)
        for node in places[str(number)]:
            node.update_arg(1, made)
    graph.recompile()
    return {number: next(iter(dtypes[str(number)])) for number in numbers}


def _places(graph: fx.GraphModule, other: fx.GraphModule, numbers: Mapping[str, float]) -> dict[str, list[Any]] | None:
    """Return the operations that have each number as their second operand; None if the graphs differ otherwise."""
    inputs = {node: node.meta[PORT].name for node in other.graph.find_nodes(op="placeholder")}
    entering = {node: name for node, name in inputs.items() if node.meta[PORT].kind == "buffer" and name in numbers}
    places: dict[str, list[Any]] = {name: [] for name in numbers}
    same: dict[fx.Node, fx.Node] = {}
    theirs = [node for node in other.graph.nodes if node not in entering]
    if len(entering) != len(numbers) or len(theirs) != len(graph.graph.nodes):
        return None
    for own, node in zip(graph.graph.nodes, theirs, strict=True):
        same[node] = own
        if not any(used in entering for used in node.all_input_nodes):
            if not _is_alike(own, node, other, graph) or not _equal(node.args, own.args, same):
                return None
            continue
        args = _operands(own, node, entering)
        if args is None or own.kwargs or node.kwargs or _dtype(own) != _dtype(node):
            return None
        operand, number = args
        value = own.args[1]
        if not is_number(value) or not _is_same(value, numbers[entering[number]]):
            return None
        if same.get(operand) is not own.args[0] or _dtype(own.args[0]) not in _DTYPES or _dtype(own) not in _DTYPES:
            return None
        places[entering[number]].append(own)
    return places


def _operands(own: fx.Node, node: fx.Node, entering: Mapping[fx.Node, str]) -> tuple[fx.Node, fx.Node] | None:
    """Return the operand and the number of an operation, in this order; None if it is not among ``_OPERATORS``."""
    if len(node.args) != 2 or len(own.args) != 2 or not all(isinstance(x, fx.Node) for x in node.args):
        return None
    left, right = node.args
    turned = left in entering
    if right in entering and turned:
        return None
    if own.target is not node.target or node.target not in _OPERATORS or (turned and not _OPERATORS[node.target]):
        return None
    return (right, left) if turned else (left, right)  # type: ignore[return-value]


def _is_alike(own: fx.Node, node: fx.Node, other: fx.GraphModule, graph: fx.GraphModule) -> bool:
    """Whether two nodes are the same operation, but for its operands."""
    if own.op != node.op or _dtype(own) != _dtype(node) or repr(own.kwargs) != repr(node.kwargs):
        return False
    if own.op == "placeholder":
        return bool(own.meta[PORT] == node.meta[PORT])
    if own.op != "get_attr":
        return own.op == "output" or own.target is node.target
    held, theirs = (_attribute(g, str(n.target)) for g, n in ((graph, own), (other, node)))
    if isinstance(held, fx.GraphModule):
        return isinstance(theirs, fx.GraphModule) and held.code == theirs.code
    tensors = isinstance(held, Tensor) and isinstance(theirs, Tensor)
    return tensors and held.dtype == theirs.dtype and torch.equal(held, theirs)


def _attribute(graph: fx.GraphModule, target: str) -> Any:
    value: Any = graph
    for name in target.split("."):
        value = getattr(value, name)
    return value


def _dtype(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, Tensor) else type(value)


def _equal(theirs: Any, own: Any, same: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether arguments are equal, with the nodes of one graph for those of the other."""
    if isinstance(theirs, fx.Node):
        return same.get(theirs) is own
    if isinstance(theirs, list | tuple):
        return (
            isinstance(own, list | tuple)
            and len(own) == len(theirs)
            and all(_equal(a, b, same) for a, b in zip(theirs, own, strict=True))
        )
    if isinstance(theirs, float) and isinstance(own, float):
        return _is_same(theirs, own)
    return type(theirs) is type(own) and bool(theirs == own)


def _is_same(a: float, b: float) -> bool:
    """Whether two numbers are the same, of the same type: a NaN is, and -0.0 is not 0.0."""
    return type(a) is type(b) and (a == b or (a != a and b != b)) and math.copysign(1, a) == math.copysign(1, b)
