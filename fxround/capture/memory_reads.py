"""Finds in a graph how its ``as_strided`` depends on the layout of what enters: it reads memory, not elements.

``readings`` keeps what is found here with what else a graph depends on.

A model is traced with dense copies of its arguments. ``as_strided`` of a view of an argument reads the storage of that
argument, so that a graph is right only for arguments with the strides (and, for an explicit offset, the offset) of the
copies. Of a tensor that the model computes it reads memory that PyTorch laid out in the order of the operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx


@dataclass(frozen=True)
class MemoryReads:
    """What the ``as_strided`` of a graph depend on.

    order       on the order of dimensions in memory: there is an ``as_strided``
    strides     on the strides of what enters: one reads the storage of an input
    offset      on where in its storage an input begins: one of these has an offset of its own
    """

    order: bool = False
    strides: bool = False
    offset: bool = False

    def layouts(self, values: Any) -> tuple[Any, ...]:
        """Return the layouts of the tensors among values, as far as these reads depend on them."""
        if not self.order:
            return ()
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        return tuple(self._layout(t) for t in tensors if t.layout == torch.strided)

    def _layout(self, x: Tensor) -> Any:
        """Return the strides, None if they are row-major and follow from the sizes, and the offset."""
        strides = (x if self.strides else torch.empty_like(x, device="meta")).stride()
        rows = torch.empty(x.shape, device="meta").stride()
        is_row_major = all(a == b or size == 1 for a, b, size in zip(strides, rows, x.shape, strict=True))
        return None if is_row_major else strides, x.storage_offset() if self.offset else 0


def memory_reads(graph: fx.GraphModule) -> MemoryReads:
    """Return how Dynamo's graph, and the bodies of its loops, read memory."""
    parts = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
    reads = [node for part in parts for node in part.graph.nodes if _is_read(node)]
    entering = [node for node in reads if _enters(node.all_input_nodes[0])]
    offset = any(len(node.args) > 3 or node.kwargs.get("storage_offset") is not None for node in entering)
    return MemoryReads(bool(reads), bool(entering), offset)


def _is_read(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_function", "call_method") and name.startswith("as_strided")


def _enters(node: fx.Node) -> bool:
    """Whether a node's value lies in the storage of an input of the graph, whatever the strides of that are."""
    storage = _storage(node)
    while node.op not in ("placeholder", "get_attr"):
        if node.target == "contiguous":
            return False
        origin = next((each for each in node.all_input_nodes if _storage(each) == storage), None)
        if origin is None:
            return False
        node = origin
    return True


def _storage(node: fx.Node) -> Any:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) and value.layout == torch.strided else node
