"""Results that share memory with an input or with another result of the model, as Dynamo's graph shows them.

AOTAutograd's graph computes values. ``aliases_of`` notes which results are an argument, a parameter, a buffer or
another result, or a view of one, and by which functions the model makes the view. ``Alias.of`` calls these functions
again on the tensor of a call, so that the result is what the model returns: the tensor itself, a view, or a copy where
``contiguous`` or ``reshape`` has to copy. Views move numbers, and so do their gradients, unless elements repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from fxround.errors import CaptureError, FxroundError
from fxround.graph.site import Port, located

# Functions that return a view if the strides allow one, and else a copy.
_VIEWS_OR_COPIES: Final = ("contiguous", "reshape", "reshape_as", "flatten", "ravel")
# Methods that give a tensor the sizes of another one, and those that take the sizes.
_AS_ANOTHER: Final = MappingProxyType({"view_as": "view", "reshape_as": "reshape", "expand_as": "expand"})
# Views in which elements may repeat, so that their gradients are sums.
_REPEATING: Final = ("expand", "expand_as", "broadcast_to", "broadcast_tensors", "unfold", "as_strided")
_DROPOUTS: Final = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
# Methods that give a tensor another shape in place. Dynamo's graph shows the last shape for every use of the tensor.
_RESHAPING: Final = frozenset(
    ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "resize_", "resize_as_")
)
# What the model returns: the position among the outputs of Dynamo's graph, an input, or another tensor.
Returned = int | Port | Tensor | None


class _Here:
    """Stands for the tensor among the arguments of a function that views it."""


_HERE: Final = _Here()


@dataclass(frozen=True)
class View:
    """A function, or a method by its name, and its arguments, with ``_HERE`` in the place of the tensor."""

    called: Callable[..., Any] | str
    args: Any
    kwargs: Any

    def of(self, tensor: Any, measured: Callable[[torch.SymInt], int]) -> Any:
        """Return the view of a tensor. measured: returns the number of a symbolic size."""

        def filled(value: Any) -> Any:
            if value is _HERE:
                return tensor
            return measured(value) if isinstance(value, torch.SymInt) else value

        args, kwargs = map_aggregate((self.args, self.kwargs), filled)
        if isinstance(self.called, str):
            return getattr(args[0], self.called)(*args[1:], **kwargs)
        return self.called(*args, **kwargs)


@dataclass(frozen=True)
class Alias:
    """The tensor that a result is made of, and the views, in their order.

    base: an input, the position of another result, or a tensor from elsewhere. repeats: whether elements may repeat.
    """

    base: Port | int | Tensor = field(repr=False)
    views: tuple[View, ...]
    repeats: bool = False

    def of(self, tensor: Tensor, measured: Callable[[torch.SymInt], int]) -> Tensor:
        """Return the result. Raises FxroundError if its gradient would be a sum that no policy rounds."""
        if self.repeats and tensor.requires_grad and torch.is_grad_enabled():
            raise FxroundError(
                "a result of the model is a view in which elements of an input, or of another result, repeat (expand): "
                "PyTorch would add their gradients, not the policy. Return a copy (.clone()), or detach it."
            )
        made: Any = tensor
        for view in self.views:
            made = view.of(made, measured)
        return made  # type: ignore[no-any-return]


def aliases_of(
    graph: fx.GraphModule, returned: Sequence[Returned], inputs: Mapping[fx.Node, Port | Tensor]
) -> dict[int, Alias]:
    """Return the results that share memory, by their positions among the leaves of the model's result.

    returned: for each leaf, what it is in Dynamo's graph. inputs: what the placeholders of that graph are. Raises
    CaptureError for two results that share elements of a tensor that is no result.
    """
    outputs: Any = graph.graph.output_node().args[0]
    nodes = {i: outputs[leaf] for i, leaf in enumerate(returned) if isinstance(leaf, int)}
    chains = {i: list(_chain(node)) for i, node in nodes.items() if _has_memory(_value(node))}
    aliases = {i: Alias(leaf, ()) for i, leaf in enumerate(returned) if isinstance(leaf, Port | Tensor)}
    first: dict[fx.Node, int] = {}
    for i, chain in chains.items():
        first.setdefault(chain[0].node, i)
    for i, chain in chains.items():
        bases = ((length, _base(link.node, inputs, first, i)) for length, link in enumerate(chain))
        length, base = next(((length, base) for length, base in bases if base is not None), (0, None))
        if base is not None:
            made = [(link.node, link.source) for link in chain[:length] if link.source is not None]
            views = tuple(_view(node, source) for node, source in reversed(made))
            aliases[i] = Alias(base, views, repeats=any(_name(node) in _REPEATING for node, _ in made))
    shared = {link.node for i, chain in chains.items() if i in aliases for link in chain}
    _refuse_reshaped(graph, shared, {id(_value(node)) for node in inputs})
    _refuse_overlaps([chain[0].node for i, chain in chains.items() if i not in aliases and chain[1:]])
    return aliases


def positions_of(aliases: Mapping[int, Alias], returned: Sequence[Returned]) -> set[int]:
    """Return the positions of the outputs of Dynamo's graph that are aliases wherever the model returns them."""
    places = {leaf for i, leaf in enumerate(returned) if i in aliases and isinstance(leaf, int)}
    return places - {leaf for i, leaf in enumerate(returned) if i not in aliases and isinstance(leaf, int)}


def require_written(captured: Any, gradients: bool) -> None:
    """Raise FxroundError for results that share memory in a way that a written program does not."""
    changed = {(port.name, port.index) for port in captured.results if port.mutation}
    pairs = zip(captured.outputs, captured.graph.graph.output_node().args[0], strict=True)
    results = [node for port, node in pairs if port.kind != "gradient" and not port.mutation]
    for position, alias in captured.aliases.items():
        base, views = alias.base, alias.views
        while isinstance(base, int) and base in captured.aliases:
            views += captured.aliases[base].views
            base = captured.aliases[base].base
        value = results[position].meta["val"]
        if gradients and value.is_floating_point():
            raise FxroundError(
                f"a program with gradients=True holds no result {position}, which shares memory with an input or "
                "another result: return a copy (.clone()), or export without gradients=True"
            )
        if views and isinstance(base, Port) and (base.name, base.index) in changed:
            raise FxroundError(
                f"a program holds no result {position}, a view of an argument, parameter or buffer that the model "
                "changes in place: return a copy (.clone())"
            )


@dataclass(frozen=True)
class _Link:
    """A node, and the next one of its chain, of which it is a view; None if it is the same tensor."""

    node: fx.Node
    source: fx.Node | None


def _base(node: fx.Node, inputs: Mapping[fx.Node, Any], first: Mapping[fx.Node, int], position: int) -> Any:
    """Return what a node is besides a value: an input, or another result; None if neither."""
    result = first.get(node, position)
    return inputs.get(node, None if result == position else result)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _chain(node: fx.Node) -> Iterator[_Link]:
    """Yield a tensor's node, and those that it is a view of."""
    memory = _value(node).untyped_storage()._cdata
    while True:
        source = _kept_by_dropout(node)
        if source is not None:
            memory = _value(source).untyped_storage()._cdata
            yield _Link(node, None)
        elif (source := _viewed(node, memory)) is None:
            yield _Link(node, None)
            return
        else:
            # The same tensor is returned by operations in place, and by functions that had nothing to do.
            same = _value(node) is _value(source) and _name(node) not in _VIEWS_OR_COPIES
            yield _Link(node, None if same else source)
        node = source


def _kept_by_dropout(node: fx.Node) -> fx.Node | None:
    """Return the argument of a dropout that drops nothing, and therefore returns it; fake tensors show a copy."""
    if node.op != "call_function" or _name(node) not in _DROPOUTS:
        return None
    named = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
    training = named.get("training", named.get("train", True))
    source: Any = named["input"]
    return None if training and named.get("p", 0.5) != 0 else source


def _viewed(node: fx.Node, memory: Any) -> fx.Node | None:
    """Return the argument of which a node is a view."""
    for source in node.all_input_nodes if node.op in ("call_function", "call_method") else ():
        if any(t.untyped_storage()._cdata == memory for t in _tensors(source)):
            return source
    return None


def _tensors(node: fx.Node) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(_value(node)) if _has_memory(t)]


def _has_memory(value: Any) -> bool:
    """Whether a value is a dense tensor that is not wrapped by a transform of ``torch.func``."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return isinstance(value, Tensor) and value.layout == torch.strided and not wrapped(value)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def _view(node: fx.Node, source: fx.Node) -> View:
    if node.op not in ("call_function", "call_method") or isinstance(node.target, torch._ops.HigherOrderOperator):
        raise CaptureError(
            f"{located(node)}: a result of the model shares memory by way of {_name(node)}: return a copy (.clone())."
        )

    if node.op == "call_method" and _name(node) in _AS_ANOTHER:
        return View(_AS_ANOTHER[_name(node)], (_HERE, *_value(node).shape), {})

    def held(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value is source:
            return _HERE
        number = _value(value)
        if isinstance(number, Tensor):
            raise CaptureError(
                f"{located(node)}: a result of the model shares memory with an input or another result by way of "
                f"{_name(node)}, which takes another tensor: return a copy (.clone())."
            )
        return number

    args, kwargs = map_aggregate((node.args, node.kwargs), held)
    return View(node.target, args, kwargs)


def _refuse_reshaped(graph: fx.GraphModule, shared: Collection[fx.Node], inputs: Collection[int]) -> None:
    """Raise CaptureError for a tensor that gets another shape in place, and is an input or shares memory with a result.

    shared: the nodes whose memory results share. inputs: the ids of the values of inputs.
    """
    for node in graph.graph.nodes:
        name = _name(node)
        if name in _RESHAPING and (node in shared or node.args[0] in shared or id(_value(node.args[0])) in inputs):
            raise CaptureError(
                f"{located(node)}: {name} gives a tensor another shape in place, and an input or a result of the model "
                f"shares memory with it: write x = x.{name.removesuffix('_')}(...) in place of x.{name}(...)."
            )


def _refuse_overlaps(nodes: Sequence[fx.Node]) -> None:
    """Raise CaptureError for two views of a tensor that is no result if they share elements."""
    by_memory: dict[Any, list[fx.Node]] = {}
    for node in dict.fromkeys(nodes):
        by_memory.setdefault(_value(node).untyped_storage()._cdata, []).append(node)
    for group in by_memory.values():
        if len(group) > 1:
            taken: set[int] = set()
            for node in group:
                own = _elements(_value(node))
                if not taken.isdisjoint(own):
                    raise CaptureError(
                        f"{located(node)}: this result of the model and another one are views that share elements of a "
                        "tensor which is no result, so that a change of one in place would show in the other: return "
                        "copies (.clone())."
                    )
                taken |= own


def _elements(tensor: Tensor) -> set[int]:
    """Return the places of a tensor's elements in its memory, for the sizes of the example."""
    places = np.full((), _hint(tensor.storage_offset()))
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + np.arange(_hint(size)) * _hint(stride)
    return set(places.ravel().tolist())


def _hint(number: Any) -> int:
    """Return a number of the example; 2 for a size that the data determine."""
    hint = number.node.hint if isinstance(number, torch.SymInt) else number
    return 2 if hint is None else int(hint)
