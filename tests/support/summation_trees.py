"""Summation trees: those that orders state, and those found from results (FPRev, see test_orders.py)."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from fxround.numerics.orders import Order

HUGE = 2.0**100
Tree = Any  # a leaf's number, or a pair of trees


def stated(order: Order, length: int) -> Tree:
    """The tree of an order, by its definition in docs/numerics.md; the initial +0 is no leaf."""
    return _over(list(range(length)), order, order.shards)


def _over(leaves: list[int], order: Order, shards: int) -> Tree:
    if shards > 1 and len(leaves) > 1:
        half = -(-len(leaves) // 2)
        return _over(leaves[:half], order, shards // 2), _over(leaves[half:], order, shards // 2)
    if order.kind == "sequential":
        return chain(leaves)
    lanes = [chain(leaves[lane :: order.chains]) for lane in range(min(order.chains, len(leaves)))]
    width = 1
    while width < len(lanes):
        width *= 2
    while width > 1:
        width //= 2
        for lane in range(width):
            if lane + width < len(lanes):
                lanes[lane] = (lanes[lane], lanes[lane + width])
        lanes = lanes[:width]
    return lanes[0]


def chain(leaves: list[int]) -> Tree:
    tree: Tree = leaves[0]
    for leaf in leaves[1:]:
        tree = (tree, leaf)
    return tree


def outside(tree: Tree, length: int) -> dict[tuple[int, int], int]:
    """For each pair, the number of leaves outside of the smallest subtree that holds both."""
    found: dict[tuple[int, int], int] = {}

    def leaves(node: Tree) -> list[int]:
        if isinstance(node, int):
            return [node]
        left, right = map(leaves, node)
        for i in left:
            for j in right:
                found[min(i, j), max(i, j)] = length - len(left) - len(right)
        return left + right

    assert sorted(leaves(tree)) == list(range(length)), "every leaf once"
    return found


def masks(length: int) -> Tensor:
    """One row per pair (i, j), i < j."""
    rows = torch.ones(length * (length - 1) // 2, length)
    for row, (i, j) in zip(rows, combinations(range(length), 2), strict=True):
        row[i], row[j] = HUGE, -HUGE
    return rows


def check(revealed: Tensor, tree: Tree, length: int) -> None:
    want = outside(tree, length)
    got = dict(zip(combinations(range(length), 2), revealed.tolist(), strict=True))
    assert got == want
