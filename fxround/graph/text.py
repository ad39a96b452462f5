"""A captured graph as text, and the digest by which processes and files tell whether two graphs are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from torch import Tensor, fx

from fxround.fingerprint import hash
from fxround.graph.site import operator_name


def digest(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines, with its name."""
    computed = hashlib.sha256()
    for line in lines:
        computed.update(f"{line}\n".encode())
    return f"sha256:{computed.hexdigest()}"


def lines_of_graph(graph: fx.GraphModule) -> Iterator[str]:
    """Yield lines that say all of a captured graph, with the hashes of the tensors that it holds."""
    for node in graph.graph.nodes:
        yield f"{node.name} {operator_name(node)} {node.args} {dict(node.kwargs)}"
        held = getattr(graph, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(held, Tensor):
            yield hash(held)
        if isinstance(held, fx.GraphModule):
            yield from lines_of_graph(held)
