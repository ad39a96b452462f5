"""Site and Port: where a node of a graph comes from, what was decided about it, and what its inputs and outputs are."""

from __future__ import annotations

import functools
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import fx

from fxround.graph.source_lines import source_line

if TYPE_CHECKING:
    from fxround.policy import Assignment


META: Final = "fxround"
PORT: Final = "fxround_port"
# The direction and role of a value, if they are known before the passes run: an optimizer's graph declares them.
DIRECTION: Final = "fxround_direction"
ROLE: Final = "fxround_role"
PORTS: Final = "fxround_ports"  # of the output node: one for each output
ORIGIN: Final = "fxround_origin"
# The Site of the value of another graph that a node computes again: it is rounded and draws as that one.
REPEATED: Final = "fxround_repeated"
# Of the output node: the numbers of the values of that graph.
TAKEN: Final = "fxround_taken"

# How several processes share the value of a node (``Sharing``), where the capture knows it.
SHARING: Final = "fxround_sharing"
# Of a graph: the text of what computes the values that all processes have as a whole, where elements draw.
SAME: Final = "fxround_same"

Status = Literal["rounded", "native", "movement", "exact", "integer"]
Direction = Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class Site:
    """The origin of a value of the graph, and the decisions about it (``node.meta["fxround"]``).

    ``path`` and ``module_type``: the module. ``operator``: the ATen overload. ``source`` and ``code``: the line of the
    model. ``kind``, ``role``, ``direction``: what the operator does and what the value is to the model
    (passes.classify). ``number``: the stream of its random bits. ``assignment``: what the policy said. ``status`` and
    ``reason``: what was done.
    """

    path: str
    module_type: str
    operator: str
    kind: str
    role: str
    source: str
    code: str
    number: int = -1
    assignment: Assignment | None = None
    status: Status = "native"
    reason: str = ""
    direction: Direction = "forward"

    def __str__(self) -> str:
        return placed(self.operator, self.path, self.source, self.code)


def placed(operator: str, path: str, source: str, code: str) -> str:
    """Return an operator and where it comes from, for messages: module path, source line and its text."""
    where = f" at {source}: {code}" if source else ""
    return f"{operator} in {path or 'the root module'}{where}"


class Share(NamedTuple):
    """What this process has of a dimension that processes share: of ``whole`` elements, ``own`` from ``first`` on."""

    first: int
    own: int
    whole: int


class Sharing(NamedTuple):
    """How several processes share a value: each has a part of a dimension, in the order of their ranks.

    dim: the dimension; None: each process has all of the value. rank: of this process. size: the number of elements of
    the dimension that are this process's part; None: all that it has. A value that each process has as a whole, and
    computes from its rank, has the size -1. uneven: this process's part where parts differ; None: they are equal.
    """

    dim: int | None
    processes: int
    rank: int
    size: int | None = None
    uneven: Share | None = None


@dataclass(frozen=True)
class Port:
    """What a graph input or output stands for.

    A parameter or buffer has a name, an argument or result a position (``index``). A mutation has the name or
    position of the input that it changes. A tangent is the gradient of the result ``index``, a gradient that of the
    parameter ``name`` or the argument ``index``. A number is the attribute ``name`` of the model. A multiplier is
    that of the delayed scale ``name``, and a magnitude the largest one of its value in this call. An input of a
    loop's body is carried, in the order of the loop's operands. One that is shared is a DTensor in the model, of which
    the graph has the part of this process.
    """

    kind: Literal[
        "parameter",
        "buffer",
        "argument",
        "number",
        "result",
        "random",
        "tangent",
        "gradient",
        "multiplier",
        "magnitude",
        "carried",
    ]
    name: str = ""
    index: int = -1
    mutation: bool = False
    shared: bool = False


def float_value(node: fx.Node) -> torch.Tensor | None:
    """Return the (fake) tensor that the node yields, if it is one of floating point, else None."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) and value.is_floating_point() else None


def float_values(node: fx.Node) -> list[torch.Tensor]:
    """Return the floating-point tensors that the node yields, alone or in a tuple."""
    value = node.meta.get("val")
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def is_complex(node: fx.Node) -> bool:
    """Whether the node yields complex numbers."""
    value = node.meta.get("val")
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return any(isinstance(leaf, torch.Tensor) and leaf.is_complex() for leaf in leaves)


def site(node: fx.Node) -> Site | None:
    """Return the node's Site; None before classification and for nodes that yield no tensor."""
    place: Site | None = node.meta.get(META)
    return place


def located(node: fx.Node) -> Site:
    """Return a Site that has only the node's origin: module path and type, operator, line of the model.

    ``getitem`` has the operator of the tuple that it takes from.
    """
    path, kind = (enclosing(node) or [("", "")])[-1]
    source, code = source_line(node.meta.get("stack_trace") or "")
    return Site(path, kind, operator_of(node), "", "", source, code)


def enclosing(node: fx.Node) -> list[tuple[str, str]]:
    """Return the modules around a node, the outermost first: the path and the name of the class of each."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    classes = [(path, kind if isinstance(kind, str) else kind.__name__) for path, kind in stack.values()]
    return [(_module_path(path), name.rpartition(".")[2]) for path, name in classes]


def function_of(node: fx.Node) -> str:
    """Return the function of PyTorch that the model called for a node, as torch.fft.fft; "" where none is known."""
    stack = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack") or [("", None)]
    name = str(getattr(stack[-1][1], "__name__", ""))
    family, _, member = name.partition("_")  # fft_fft
    if hasattr(getattr(torch, family, None), member):
        return f"torch.{family}.{member}"
    return f"torch.{name}" if hasattr(torch, name) else ""


def operator_of(node: fx.Node) -> str:
    """Return the name of the node's operator; for ``getitem``, of the operator that yields the tuple."""
    producer = node.args[0] if node.target is operator.getitem else node
    assert isinstance(producer, fx.Node)
    return operator_name(producer)


def operator_name(node: fx.Node) -> str:
    """Return the name of an operator, such as ``aten.mm.default``, or of a function, such as ``getitem``."""
    if node.op != "call_function":
        return node.op
    target: Any = node.target
    return str(target) if isinstance(target, torch._ops.OperatorBase) else getattr(target, "__name__", str(target))


@functools.lru_cache(maxsize=4096)
def _module_path(path: str) -> str:
    """Return ``layer1.0`` for Dynamo's ``L['self'].layer1.0``, or for ``getattr(L['self'].layer1, '0')``.

    The path of a compiled method is its module's.
    """
    # The code of a traced model reads layers whose names are numbers in this way.
    while (shorter := re.sub(r"getattr\(([^()]*), '(\w+)'\)", r"\1.\2", path)) != path:
        path = shorter
    path = re.sub(r"^function\.__self__\.?", "", re.sub(r"^L\['\w+'\]\.?", "", path))
    return re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path).lstrip(".")
