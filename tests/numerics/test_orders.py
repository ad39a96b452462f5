"""The summation trees, found from results alone and compared with those that ``Order`` states.

FPRev's method (Xie, Gao, Wang and Xue, USENIX ATC 2025): put +M at leaf i, -M at leaf j and ones elsewhere, M so
large that it absorbs every one. What is left is the number of leaves outside of the smallest subtree that holds both
i and j; all pairs together give the tree. Nothing is known of a kernel but its result.
"""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from summation_trees import chain, check, masks, outside, stated
from torch import Tensor
from torch.nn import functional as F

import fxround
from fxround.numerics.orders import Order

OPS = torch.ops.fxround
RNE = "binary32/nearest_even/inf"
RNG = torch.tensor([1, 2])
LENGTHS = (2, 3, 5, 15, 16, 17, 31, 40)


@pytest.mark.part(5)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "order",
    ["sequential", "lanes:2", "lanes:4", "lanes:16", "lanes:32", "lanes:64", "shards:4/sequential", "shards:8/lanes:2"],
)
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


@pytest.mark.parametrize("length", LENGTHS)
def test_contractions_in_shards_follow_the_tree_of_their_order(length: int) -> None:
    x, tree, how = masks(length), stated(Order.parse("shards:4/sequential"), length), f"{RNE} shards=4"
    for column in OPS.matmul(x, torch.ones(length, 33), how, RNE, RNG, 1).t()[[0, 20, 32]]:
        check(column, tree, length)
    images, weight = x.reshape(len(x), 1, length, 1), torch.ones(5, 1, length, 1)
    for channels in (1, 5):
        got = OPS.convolution(images, weight[:channels], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, how, RNE, RNG, 1)
        check(got[:, -1, 0, 0], tree, length)


@pytest.mark.parametrize("shape", [(1, 3, 3), (3, 1, 2), (4, 2, 3), (16, 1, 1)])
def test_convolutions_ascend_over_channel_row_and_column(shape: tuple[int, int, int]) -> None:
    length = shape[0] * shape[1] * shape[2]
    images, weight = masks(length).reshape(-1, *shape), torch.ones(5, *shape)
    got = OPS.convolution(images, weight, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, RNE, RNE, RNG, 1)
    check(got[:, 3, 0, 0], chain(list(range(length))), length)


@pytest.mark.parametrize("length", [3, 16, 31])
def test_every_product_of_a_compiled_module_ascends_in_k(length: int) -> None:
    x, ones = masks(length), torch.ones(length, 5)

    def products(x: Tensor, y: Tensor) -> list[Tensor]:
        zero = y.new_zeros(5)
        batch, column = x.expand(2, -1, -1), y.expand(2, -1, -1)
        found = [x @ y, torch.addmm(zero, x, y), F.linear(x, y.t()), torch.einsum("ij,jk->ik", x, y)]
        found += [
            (batch @ column)[1],
            torch.baddbmm(zero, batch, column)[1],
            torch.einsum("bij,bjk->bik", batch, column)[0],
        ]
        return [*found, torch.mv(x, y[:, 0])[:, None], torch.dot(x[0], y[:, 0])[None, None]]

    tree = chain(list(range(length)))
    *matrices, dot = fxround.compile(products, "reproducible")(x, ones)
    for matrix in matrices:
        check(matrix[:, -1], tree, length)
    assert dot.item() == outside(tree, length)[0, 1]


@pytest.mark.parametrize("taps", [(3,), (2, 3), (2, 1, 2)])
def test_convolutions_of_every_dimension_and_their_gradients_ascend(taps: tuple[int, ...]) -> None:
    dims, size = len(taps), math.prod(taps)
    place = ([1] * dims, [0] * dims, [1] * dims)
    length, corner = 4 * size, (0,) * dims
    x, tree = masks(length).reshape(-1, 4, *taps), chain(list(range(length)))
    got = OPS.convolution(x, torch.ones(2, 4, *taps), *place, False, [0] * dims, 1, RNE, RNE, RNG, 1)
    check(got[(slice(None), 1, *corner)], tree, length)
    # Each channel by itself.
    depthwise = masks(size).reshape(-1, 1, *taps).expand(-1, 3, *taps)
    got = OPS.convolution(depthwise, torch.ones(3, 1, *taps), *place, False, [0] * dims, 3, RNE, RNE, RNG, 1)
    check(got[(slice(None), 2, *corner)], chain(list(range(size))), size)
    # All taps meet in the middle of the larger image.
    middle = tuple(t - 1 for t in taps)
    larger = [len(x), 2, *(2 * t - 1 for t in taps)]
    tail = (*place, False, [0] * dims, 1, RNE, RNE, RNG, 1)
    back = OPS.convolution_input_gradient(x, torch.ones(4, 2, *taps), larger, *tail)
    check(back[(slice(None), 1, *middle)], tree, length)
    got = OPS.convolution(x, torch.ones(4, 2, *taps), *place, True, [0] * dims, 1, RNE, RNE, RNG, 1)
    check(got[(slice(None), 0, *middle)], tree, length)
    # k over (image, pixel): four images of as many pixels as taps, a pair an output channel.
    grad = masks(length).reshape(-1, 4, *taps).transpose(0, 1).contiguous()
    image = torch.ones(4, 2, *(2 * t - 1 for t in taps))
    size_of_weight = [grad.shape[1], 2, *taps]
    check(OPS.convolution_weight_gradient(grad, image, size_of_weight, *tail)[(slice(None), 1, *middle)], tree, length)


@pytest.mark.parametrize("length", [8, 32])
def test_what_is_made_of_sums_has_their_tree(length: int) -> None:
    """Sums, means, prefix sums, a softmax's and an embedding's backward in a compiled module, in its policy's order."""
    x, lanes = masks(length), stated(Order.parse("lanes:16"), length)

    def sums(x: Tensor) -> list[Tensor]:
        return [x.sum(1), x.mean(1) * x.shape[1], x.t().sum(0), torch.cumsum(x, 1)[:, -1]]

    *found, prefix = fxround.compile(sums, "reproducible")(x)
    for sum_ in found:
        check(sum_, lanes, length)
    check(prefix, chain(list(range(length))), length)

    # y * (g - sum(g * y)), y = 1 / length, where g is 1: all scalings are powers of two.
    logits = torch.zeros(len(x), length, requires_grad=True)
    y = fxround.compile(lambda v: torch.softmax(v, 1), "reproducible")(logits)
    (slope,) = torch.autograd.grad(y, logits, x)
    ones = torch.tensor([min(set(range(length)) - set(pair)) for pair in combinations(range(length), 2)])
    here = slope.gather(1, ones[:, None])[:, 0] * length
    check((1 - here) * length, lanes, length)

    weight = torch.zeros(2, len(x), requires_grad=True)
    rows = fxround.compile(lambda w, i: F.embedding(i, w), "reproducible")(
        weight, torch.ones(length, dtype=torch.int64)
    )
    (grad,) = torch.autograd.grad(rows, weight, x.t().contiguous())
    check(grad[1], chain(list(range(length))), length)


@pytest.mark.parametrize("order", ["sequential", "lanes:16", "exact"])
def test_norms_and_softmax_sum_in_their_policys_order(order: str) -> None:
    """They square or exponentiate, so that masks do not show their trees. Their sums are the operator tested above."""

    def made_of_sums(x: Tensor) -> list[Tensor]:
        image = x.reshape(2, 4, 3, -1)
        found = [x.var(1), x.std(1), torch.linalg.vector_norm(x, 2, 1), torch.softmax(x, 1), torch.log_softmax(x, 1)]
        found += [torch.logsumexp(x, 1), F.layer_norm(x, x.shape[1:]), F.avg_pool2d(image, 2), F.group_norm(image, 2)]
        return [*found, F.batch_norm(image, None, None, training=True), F.instance_norm(image)]

    policy = fxround.Policy("ordered", (fxround.Rule(rounding="dtype", order=order),))
    compiled = fxround.compile(made_of_sums, policy, example_inputs=(torch.randn(8, 24),))
    sums = [node for node in compiled.graph.graph.nodes if str(node.target) == "fxround.sum.default"]
    assert len(sums) >= 14 and {node.args[3] for node in sums} == {order}
    assert not compiled.coverage().unrounded


def test_the_method_tells_trees_apart() -> None:
    """A wrong order is detected: one chain differs from sixteen, and a reversed chain from an ascending one."""
    x = masks(17)
    with pytest.raises(AssertionError):
        check(OPS.sum(x, [1], False, "lanes:16", RNE, RNE, RNG, 1), chain(list(range(17))), 17)
    with pytest.raises(AssertionError):
        check(OPS.sum(x.flip(1), [1], False, "sequential", RNE, RNE, RNG, 1), chain(list(range(17))), 17)
