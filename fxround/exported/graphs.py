"""What PyTorch does not write in the graph of a program, in another spelling."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxround.graph.dialect.loops import COND


def make_writable(part: fx.GraphModule) -> None:
    """Spell what PyTorch does not write: a list of results, and a sum of any number of sizes."""
    for node in part.graph.find_nodes(op="call_function", target=COND):
        node.meta["val"] = tuple(node.meta["val"])
    for node in part.graph.find_nodes(op="call_function", target=torch.sym_sum):
        first, *others = node.args[0] if isinstance(node.args[0], list | tuple) else node.args
        with part.graph.inserting_before(node):
            for other in others:
                values = (size.meta["val"] if isinstance(size, fx.Node) else size for size in (first, other))
                first = part.graph.call_function(operator.add, (first, other))
                first.meta = {**node.meta, "val": sum(values)}
        node.replace_all_uses_with(first)
        part.graph.erase_node(node)
