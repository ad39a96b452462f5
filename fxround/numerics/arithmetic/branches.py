"""What a function always computes, and what only the rare side of a ``rarely`` needs, which targets put in a branch."""

from __future__ import annotations

from collections.abc import Container, Sequence

from fxround.numerics.arithmetic.scalar import Expr


def needed(roots: Sequence[Expr], known: Container[Expr]) -> list[Expr]:
    """Return the nodes that the roots need in any case, operands first: all but the known ones and the rare sides."""
    order: dict[Expr, None] = {}
    stack = [(r, False) for r in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if node in order or node in known:
            continue
        operands = (node.args[0], node.args[2]) if node.op == "rarely" else node.args
        if ready or not operands:
            order[node] = None
            continue
        stack.append((node, True))
        stack.extend((a, False) for a in reversed(operands))
    return list(order)
