"""Names of symbolic sizes for people: ``n`` and ``length`` where a trace has ``s77`` and ``s50``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import fx

from fxround.graph.site import PORT

_SYMBOL: Final = re.compile(r"\b[su]\d+\b")
# What the dimensions of a floating-point argument usually are, by their number.
_DIMENSIONS: Final = {
    2: ("n", "size"),
    3: ("n", "length", "length"),
    4: ("n", "channels", "height", "width"),
    5: ("n", "channels", "depth", "height", "width"),
}


def size_names(gm: fx.GraphModule) -> dict[str, str]:
    """Return a name for each symbol in the shapes of a graph.

    A symbol has the name of the dimension of an argument that it is the size of: ``n`` is the first dimension, and
    ``length`` every other one of integers. A symbol of no argument, whose size depends on data, is a ``count``. Equal
    names are numbered: ``length``, ``length2``.
    """
    meanings = dict(_of_inputs(gm))
    for symbol in _symbols(gm):
        meanings.setdefault(symbol, "count")
    seen: Counter[str] = Counter()
    names = {}
    for symbol, meaning in meanings.items():
        seen[meaning] += 1
        names[symbol] = meaning if seen[meaning] == 1 else f"{meaning}{seen[meaning]}"
    return names


def spelled(size: Any, names: Mapping[str, str]) -> str:
    """Return a size, or an expression of sizes, in these names."""
    return _SYMBOL.sub(lambda symbol: names.get(symbol[0], symbol[0]), str(size))


def _of_inputs(gm: fx.GraphModule) -> Iterator[tuple[str, str]]:
    """Yield the symbols that are sizes of inputs with their meanings, those of other inputs than arguments first.

    A dict keeps the last meaning of a symbol, and so that of an argument.
    """
    nodes = gm.graph.find_nodes(op="placeholder")
    for node in sorted(nodes, key=lambda node: getattr(node.meta.get(PORT), "kind", "") == "argument"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            pairs = [(str(size), _meaning(value, dim)) for dim, size in enumerate(value.shape)]
            yield from (pair for pair in reversed(pairs) if _SYMBOL.fullmatch(pair[0]))


def _meaning(value: torch.Tensor, dim: int) -> str:
    if dim == 0:
        return "n"
    if not (value.is_floating_point() or value.is_complex()):
        return "length"
    return _DIMENSIONS.get(value.dim(), ("size",) * value.dim())[dim]


def _symbols(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                yield from (symbol for size in value.shape for symbol in _SYMBOL.findall(str(size)))
