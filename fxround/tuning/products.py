"""The products of a model that read its weights, met one after the other as data run through the model.

Every batch runs through the unrounded graph, one operation at a time, and waits where a product reads a weight of
interest. All batches wait at the same product, so that its weight can be changed before any of them goes on: later
layers see what earlier ones have become, and one pass over the data is enough.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxround.compiler.executable import Entry
from fxround.graph.site import PORT, Port, Site, site
from fxround.module import RoundedModule, compile
from fxround.operators.rules import argument
from fxround.passes.rewrite import source_of
from fxround.passes.round_inputs import operands_of
from fxround.significance.inputs import ModelCall
from fxround.tuning.weights import moved_index

_MATRIX: Final = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


@dataclass(frozen=True)
class Product:
    """A product of a weight and a value, in one batch.

    weight    the name of the parameter
    node      of the graph
    position  of the weight among the node's arguments
    args      the node's arguments, of which ``args[position]`` is a view of the weight
    index     for each element of this view, its row-major position in the weight
    """

    weight: str
    node: fx.Node
    position: int
    args: tuple[Any, ...]
    index: Tensor

    @property
    def place(self) -> Site:
        """Where the product is."""
        place = site(self.node)
        assert place is not None
        return place

    def result(self, weight: Tensor) -> Tensor:
        """Return the product with another weight, of the parameter's shape; it can be differentiated."""
        args = list(self.args)
        args[self.position] = weight.reshape(-1)[self.index]
        result: Tensor = self.node.target(*args)  # type: ignore[operator]
        return result

    @property
    def has_matrices(self) -> bool:
        """Whether the product is one of matrices, or a convolution that is one."""
        return self.node.target in _MATRIX or not argument(self.node, "transposed")

    def weight_matrices(self) -> Tensor:
        """Return row-major positions in the weight as [groups, rows, n]: each row is summed with its group's inputs."""
        if self.node.target in _MATRIX:
            index = self.index if self.position == 0 else self.index.transpose(-1, -2)
            return index if index.dim() == 3 else index[None]
        groups = argument(self.node, "groups")
        return self.index.reshape(groups, self.index.shape[0] // groups, -1)

    def input_matrices(self) -> Tensor:
        """Return what the rows of the weight are multiplied by, as [groups, m, n]."""
        x: Tensor = self.args[1 - self.position]
        if self.node.target in _MATRIX:
            x = x.transpose(-1, -2) if self.position == 0 else x
            return x if x.dim() == 3 else x[None]
        groups, size = argument(self.node, "groups"), self.index.shape[1:]
        named = ("stride", "padding", "dilation", "output_padding")
        stride, padding, dilation, other = (argument(self.node, key) for key in named)
        # A convolution with each unit kernel picks one input of every sum; all other terms are zeros.
        units = torch.eye(size.numel(), dtype=x.dtype, device=x.device).reshape(size.numel(), *size)
        parts = [
            torch.ops.aten.convolution.default(part, units, None, stride, padding, dilation, False, other, 1)
            for part in x.chunk(groups, 1)
        ]
        return torch.stack([part.movedim(1, -1).reshape(-1, size.numel()) for part in parts])

    def finite_inputs(self) -> Tensor:
        """Return ``input_matrices()``. Raises ValueError for inputs with NaNs or infinities."""
        x = self.input_matrices()
        if not x.isfinite().all():
            raise ValueError(
                f"{self.place}: the inputs of {self.weight} have NaNs or infinities, of which nothing can be learned; "
                "check the data and the model"
            )
        return x


def require_matrices(products: Sequence[Product], done: Collection[str]) -> str:
    """Return the weight of products that are one layer of matrices. ``done``: the weights that were met before.

    Raises ValueError for a transposed convolution, and for a weight that a call reads several times.
    """
    first = products[0]
    remedy = "use the method 'nearest' or 'discquant', or keep it by a rule with role='weight' and operands='identity'"
    if not first.has_matrices:
        raise ValueError(f"{first.place}: {first.weight} belongs to a transposed convolution, no product; {remedy}")
    if first.weight in done:
        raise ValueError(f"{first.place}: the weight {first.weight} is read more than once in a call; {remedy}")
    return first.weight


class Stream:
    """The runs of several batches through a model, side by side; ``model`` may change between two products.

    compiled: the model under the policy that leaves everything alone, with unrolled loops, or a model of which this one
    is a copy with other numbers in its tensors; None captures the model.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[ModelCall],
        names: Collection[str],
        compiled: RoundedModule | None = None,
    ) -> None:
        self._compiled = compile(model, "identity", unroll_loops=True) if compiled is None else compiled
        captured = [*self._compiled.source.parameters(), *self._compiled.source.buffers()]
        self._own = {id(t): own for t, own in zip(captured, [*model.parameters(), *model.buffers()], strict=True)}
        self._model, self._calls, self._names = model, calls, names

    @torch.no_grad()
    def __iter__(self) -> Iterator[list[Product]]:
        """Yield a list with the same product of every batch.

        Raises ValueError if the batches read their weights in different orders.
        """
        entries = [self._compiled._entry(call.args, call.kwargs) for call in self._calls]
        runs = [self._products(entry, call) for entry, call in zip(entries, self._calls, strict=True)]
        for products in zip_longest(*runs):
            names = {"none" if product is None else product.weight for product in products}
            if len(names) > 1:
                raise ValueError(
                    f"batches of the data take different ways: the next weight is {' or '.join(sorted(names))}; "
                    "expected batches for which the model computes the same operations"
                )
            yield list(products)

    @torch.no_grad()
    def _products(self, entry: Entry, call: ModelCall) -> Iterator[Product]:
        graph, leaves = entry.lowered, pytree.tree_leaves((call.args, call.kwargs))
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        interpreter = fx.Interpreter(graph)
        entering = [self._own.get(id(value), value) for value in entry.entering(leaves)]
        interpreter.args_iter = iter([*entering, torch.zeros(2, dtype=torch.int64)])
        for node in graph.graph.nodes:
            for position, name in self._weights_read(node):
                value, operand = parameters[name], node.args[position]
                index = moved_index(operand, value)
                args: Any = interpreter.map_nodes_to_values(node.args, node)
                yield Product(name, node, position, args, index)
                # The weight may have changed, and what was computed of it before.
                interpreter.env[operand] = value.detach().reshape(-1)[index]
            interpreter.env[node] = interpreter.run_node(node)
            for spent in interpreter.user_to_last_uses.get(node, ()):
                del interpreter.env[spent]

    def _weights_read(self, node: fx.Node) -> Iterator[tuple[int, str]]:
        place = site(node)
        if node.op != "call_function" or place is None or place.kind != "contraction":
            return
        for operand in operands_of(node):
            port: Port | None = source_of(operand).meta.get(PORT)
            if port is not None and port.kind == "parameter" and port.name in self._names:
                yield node.args.index(operand), port.name
