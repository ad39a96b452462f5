"""The summation trees, revealed from outside, and compared with the ones that ``Order`` states.

FPRev's method (Xie, Gao, Wang and Xue, USENIX ATC 2025): put +M at leaf i, -M at leaf j and ones elsewhere, M so
large that it absorbs every one. What is left is the number of leaves outside of the smallest subtree that holds both
i and j; all pairs together give the tree. Nothing is known of a kernel but its result.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import fxround  # noqa: F401  registers the operators
from fxround.numerics.orders import Order

OPS = torch.ops.fxround
RNE = "binary32/nearest_even/inf"
RNG = torch.tensor([1, 2])
HUGE = 2.0**100
LENGTHS = (2, 3, 5, 15, 16, 17, 31, 40)
Tree = Any  # a leaf's number, or a pair of trees


def stated(order: Order, length: int) -> Tree:
    """The tree of an order, by its definition in docs/numerics.md; the initial +0 is no leaf."""
    if order.kind == "sequential":
        return chain(list(range(length)))
    lanes = [chain(list(range(lane, length, order.chains))) for lane in range(min(order.chains, length))]
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
    """One row a pair (i, j), i < j."""
    rows = torch.ones(length * (length - 1) // 2, length)
    for row, (i, j) in zip(rows, combinations(range(length), 2), strict=True):
        row[i], row[j] = HUGE, -HUGE
    return rows


def check(revealed: Tensor, tree: Tree, length: int) -> None:
    want = outside(tree, length)
    got = dict(zip(combinations(range(length), 2), revealed.tolist(), strict=True))
    assert got == want


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("order", ["sequential", "lanes:2", "lanes:4", "lanes:16", "lanes:32", "lanes:64"])
def test_sums_follow_the_tree_of_their_order(order: str, length: int) -> None:
    x, tree = masks(length), stated(Order.parse(order), length)
    check(OPS.sum(x, [1], False, order, RNE, RNE, RNG, 1), tree, length)
    check(OPS.sum(x.t(), [0], False, order, RNE, RNE, RNG, 1), tree, length)
    check(OPS.sum(x.t().contiguous(), [0], False, order, RNE, RNE, RNG, 1), tree, length)
    # Two reduced dimensions are one, in row-major order.
    split = x.reshape(len(x), 1, length, 1).transpose(0, 2)
    check(OPS.sum(split, [0, 1, 3], False, order, RNE, RNE, RNG, 1), tree, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_an_exact_sum_has_no_tree(length: int) -> None:
    """Nothing is absorbed: every pair leaves all the other leaves."""
    found = OPS.sum(masks(length), [1], False, "exact", RNE, RNE, RNG, 1)
    assert found.tolist() == [length - 2] * len(found)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefixes_and_scatters_ascend(length: int) -> None:
    x, tree = masks(length), chain(list(range(length)))
    check(OPS.cumsum(x, 1, RNE, RNE, RNG, 1)[:, -1], tree, length)
    check(OPS.cumsum(x.t().contiguous(), 0, RNE, RNE, RNG, 1)[-1], tree, length)
    where = torch.zeros(length, dtype=torch.int64)
    empty = torch.zeros(1, len(x))
    check(OPS.index_put(empty, [where], x.t(), RNE, RNG, 1)[0], tree, length)
    check(OPS.scatter_add(empty, 0, where[:, None].repeat(1, len(x)), x.t(), RNE, RNG, 1)[0], tree, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_contractions_ascend_in_k(length: int) -> None:
    x, tree = masks(length), chain(list(range(length)))
    ones = torch.ones(length, 33)
    for column in OPS.matmul(x, ones, RNE, RNE, RNG, 1).t()[[0, 20, 32]]:
        check(column, tree, length)
    check(OPS.matmul(ones.t(), x.t(), RNE, RNE, RNG, 1)[7], tree, length)
    check(OPS.matmul(x[None], ones[None], RNE, RNE, RNG, 1)[0, :, 0], tree, length)


@pytest.mark.parametrize("shape", [(1, 3, 3), (3, 1, 2), (4, 2, 3), (16, 1, 1)])
def test_convolutions_ascend_over_channel_row_and_column(shape: tuple[int, int, int]) -> None:
    length = shape[0] * shape[1] * shape[2]
    images, weight = masks(length).reshape(-1, *shape), torch.ones(5, *shape)
    got = OPS.convolution(images, weight, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, RNE, RNE, RNG, 1)
    check(got[:, 3, 0, 0], chain(list(range(length))), length)


def test_the_method_tells_trees_apart() -> None:
    """A wrong order is seen: one chain is not sixteen, and a reversed chain is not an ascending one."""
    x = masks(17)
    with pytest.raises(AssertionError):
        check(OPS.sum(x, [1], False, "lanes:16", RNE, RNE, RNG, 1), chain(list(range(17))), 17)
    with pytest.raises(AssertionError):
        check(OPS.sum(x.flip(1), [1], False, "sequential", RNE, RNE, RNG, 1), chain(list(range(17))), 17)
