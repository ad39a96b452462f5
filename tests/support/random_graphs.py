"""Random models as ATen graphs: the operations of their steps, and the graph of a recipe.

Every operation takes what earlier ones made and is left out where it does not fit, so that each recipe is a model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from random_builder import DTYPES, STEPS, Builder, Model, Recipe, Unfit, broadcast, shape
from torch import fx

from fxround.graph.site import PORTS, Port

aten = torch.ops.aten

Made = fx.Node | list[fx.Node]
Operation = Callable[[Builder, fx.Node, fx.Node, int], Made]
OPERATIONS: list[Operation] = []


def operation(function: Operation) -> Operation:
    OPERATIONS.append(function)
    return function


@operation
def nothing(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    raise Unfit("nothing")


# ---- arithmetic ----


@operation
def arithmetic(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    y = b.beside(x, y)
    if p == 4:
        return b(aten.div.Tensor, x, b(aten.add.Tensor, b(aten.abs.default, y), 1.0))
    return b((aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.add.Tensor)[p % 4], x, y)


@operation
def number(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    target = (aten.mul.Tensor, aten.add.Tensor, aten.rsub.Scalar, aten.sub.Tensor, aten.div.Tensor)[p % 5]
    return b(target, x, (0.5, 1.25, -0.3, 3)[p % 4])


@operation
def scaled(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    """A product with a parameter of no dimensions."""
    return b((aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor)[p % 3], x, b.scale)


@operation
def function(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    if p == 1:
        return b(aten.exp.default, b(aten.clamp.default, x, -4.0, 4.0))
    if p == 2:
        return b(aten.rsqrt.default, b(aten.add.Tensor, b(aten.abs.default, x), 1.0))
    if p == 3:
        return b(aten.tanh.default, x)
    return b(aten.sqrt.default, b(aten.abs.default, x))


@operation
def choice(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    if p == 6:
        return b(aten.maximum.default, x, b.beside(x, y))
    if p == 5:
        return b(aten.clamp.default, x, None, 1.0)
    if p == 4:
        return b(aten.hardtanh.default, x)
    if p == 3:
        return b(aten.clamp.default, x, -0.5, 2.0)
    return b((aten.relu.default, aten.neg.default, aten.abs.default, aten.relu.default)[p % 4], x)


@operation
def masked(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    """A choice by a comparison, a new one or an older one."""
    y = b.beside(x, y)
    other: Any = y if p % 2 else (0, 0.5)[p // 4 % 2]
    names = ("le", "lt", "gt", "ge", "eq", "ne")
    packet = getattr(aten, names[p % 6])
    if p == 7:
        mask = next((m for m in reversed(b.masks) if broadcast(shape(m), shape(x))), b.mask)
        mask = b(aten.logical_not.default, mask)
    else:
        mask = b(packet.Tensor if isinstance(other, fx.Node) else packet.Scalar, x, other)
    b.masks.append(mask)
    dtype = x.meta["val"].dtype
    if p in (0, 3):
        zero = b(aten.scalar_tensor.default, 0.0, dtype=dtype)
        return b(aten.where.self, mask, zero, y)
    if p == 1:
        return b(aten.where.self, mask, y, x)
    if p == 2:
        return b(aten.masked_fill.Scalar, x, mask, 0.25)
    if p == 4:
        return b(aten.mul.Tensor, y, b(aten._to_copy.default, mask, dtype=dtype))
    if p == 5:
        return b(aten.where.self, mask, x, b(aten.full.default, [1], 0.5, dtype=dtype))
    return b(aten.mul.Tensor, x, mask)


@operation
def converted(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    return b(aten._to_copy.default, x, dtype=DTYPES[p % 4])


# ---- movement ----


@operation
def viewed(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    old = shape(x)
    if p == 0 or len(old) < 2:
        return b(aten.view.default, _dense(b, x), [-1])
    if p == 1:
        return b(aten.view.default, _dense(b, x), [-1, old[-1]])
    if p == 2:
        return b(aten.view.default, _dense(b, x), [*old[:-1], 2, -1])
    if p == 3:
        return b(aten.view.default, _dense(b, x), [old[0] * old[1], *old[2:]])
    if p == 4:
        return b(aten.unsqueeze.default, x, 1)
    if p == 5:
        return b(aten.squeeze.default, x)
    if p == 6:
        return b(aten.view.default, _dense(b, x), [2, 4, 10, -1])
    return b(aten.view.default, _dense(b, x), [2, -1, *old[1:]])


def _dense(b: Builder, x: fx.Node) -> fx.Node:
    """x, or a copy of it if a view would be refused."""
    if x.meta["val"].is_contiguous():
        return x
    return b(aten.clone.default, x, memory_format=torch.contiguous_format)


@operation
def turned(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    dims = list(range(len(shape(x))))
    if p % 2:
        dims[-1:], dims[-2:-1] = dims[-2:-1], dims[-1:]
        order = [*dims[: p // 2], *dims[p // 2 :]]
        return b(aten.permute.default, x, order)
    return b(aten.permute.default, x, [*dims[p // 2 + 1 :], *dims[: p // 2 + 1]])


@operation
def part(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    dim = p % max(1, len(shape(x)))
    size = shape(x)[dim]
    if p == 7:
        return b(aten.select.int, x, 0, -1)
    if p == 6:
        return b(aten.slice.Tensor, x, -1, 0, size, 2)
    if p % 2:
        return b(aten.slice.Tensor, x, dim, size // 2, size)
    return b(aten.slice.Tensor, x, dim, 0, size // 2)


@operation
def parts(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    dim = p // 2 % max(1, len(shape(x)))
    size = shape(x)[dim]
    if p % 2:
        return b.list(aten.split_with_sizes.default, x, [1, size - 1], dim)
    return b.list(aten.split.Tensor, x, size // 2, dim)


@operation
def widened(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    old = list(shape(x))
    if p == 0:
        return b(aten.expand.default, b(aten.unsqueeze.default, x, 0), [2, *old])
    if p == 1:
        return b(aten.repeat.default, x, [1] * (len(old) - 1) + [2])
    if p == 2:
        return b(aten.constant_pad_nd.default, x, [1, 1], 0.5)
    if p == 3:
        return b(aten.flip.default, x, [-1])
    if p == 4:
        return b(aten.roll.default, x, [1], [0])
    if p == 5:
        return b(aten.tril.default, x)
    if p == 6:
        return b(aten.upsample_nearest2d.default, x, [old[-2] * 2, old[-1]])
    return b(aten.clone.default, x)


@operation
def joined(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    """Several values as one: equal operands, halves, other values."""
    dim = (1, 0, -1)[p % 3]
    if p == 7:
        return b(aten.stack.default, [x, b.beside(x, y)], 0)
    if p == 6:
        return b(aten.cat.default, [x, x], dim)
    if p >= 3:
        older = [v for v in b.values if shape(v) == shape(x) and v.meta["val"].dtype == x.meta["val"].dtype]
        return b(aten.cat.default, [x, *older[-(p - 1) :]], dim)
    return b(aten.cat.default, [x, y], dim)


@operation
def written(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    """The functional form of a change in place: x with a part of it replaced."""
    size = shape(x)[0]
    piece = b(aten.slice.Tensor, x, 0, 0, size // 2)
    if p % 4 == 0:
        return b(aten.slice_scatter.default, x, b(aten.mul.Tensor, piece, 2.0), 0, 0, size // 2)
    if p % 4 == 1:
        return b(aten.select_scatter.default, x, b(aten.neg.default, b(aten.select.int, x, 0, 0)), 0, 1)
    if p % 4 == 2:
        return b(aten.copy.default, x, b.beside(x, y))
    return b(aten.fill.Scalar, x, 0.75)


@operation
def indexed(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    if p == 0:
        return b(aten.index.Tensor, x, [b.index])
    if p == 1:
        return b(aten.index.Tensor, x, [None, b.index])
    where = b(aten.remainder.Scalar, b.index, 2)
    if p == 2:
        return b(aten.index_select.default, x, 0, where)
    spread = b(aten.expand.default, where, list(shape(x)))
    if p == 3:
        return b(aten.gather.default, x, 0, spread)
    if p == 4:
        return b(aten.scatter_add.default, x, 0, spread, b.beside(x, y))
    values = b(aten.index.Tensor, b.beside(x, y), [b.index])
    return b(aten.index_put.default, x, [b.index], values, p % 2 == 1)


@operation
def chosen(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    if p == 0:
        return b.list(aten.sort.default, x, -1)[0]
    if p == 1:
        return b.list(aten.topk.default, x, 2, -1)[0]
    if p == 2:
        return b.list(aten.max.dim, x, 0, True)[0]
    if p == 3:
        return b.list(aten.max_pool2d_with_indices.default, x, [2, 2])[0]
    return b(aten.amax.default, x, [-1 if p < 6 else 0], True)


# ---- reductions ----


@operation
def reduced(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    if p == 0:
        return b(aten.sum.dim_IntList, x, [-1], True)
    if p == 1:
        return b(aten.sum.dim_IntList, x, [0], False)
    if p == 2:
        return b(aten.div.Tensor, b(aten.sum.dim_IntList, x, [0, -1], True), 4)
    if p == 3:
        return b(aten.sum.default, x)
    if p == 4:
        return b(aten.cumsum.default, x, -1)
    if p == 5:
        return b(aten.prod.dim_int, x, 0, True)
    if p == 6:
        return b(aten.sum.dim_IntList, x, [-1], False)
    return b(aten.sub.Tensor, x, b(aten.div.Tensor, b(aten.sum.dim_IntList, x, [-1], True), 8))


# ---- products ----


@operation
def product(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    """A linear layer, x y^T or a batch of products, and an operation that commonly follows."""
    old = shape(x)
    flat = b(aten.view.default, _dense(b, x), [-1, old[-1]])
    if p >= 6 and len(old) > 2:
        batch = b(aten.view.default, _dense(b, x), [-1, *old[-2:]])
        y = b(aten.view.default, _dense(b, y), [batch.meta["val"].shape[0], *old[-2:]])
        return b(aten.bmm.default, batch, b(aten.permute.default, y, [0, 2, 1]))
    if p >= 4:
        y = b.beside(x, y)
        other = b(aten.view.default, _dense(b, y), [-1, shape(y)[-1]])
        return b(aten.mm.default, b(aten.slice.Tensor, flat, 0, 0, 40), b(aten.permute.default, other, [1, 0]))
    weight: fx.Node = b(aten.permute.default, b.matrix, [1, 0]) if p % 2 else b.matrix
    made = b(aten.view.default, b(aten.mm.default, flat, weight), [*old[:-1], 8])
    if p == 0:
        return made
    made = b(aten.add.Tensor, made, b.bias)
    return b(aten.relu.default, made) if p == 1 else b(aten.add.Tensor, made, b.beside(made, y))


@operation
def convolved(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    """A random convolution, often with an operation that commonly follows."""
    channels, groups = shape(x)[1], 1
    weight = b.weight if channels == 8 else b(aten.slice.Tensor, b.weight, 1, 0, channels)
    weight = weight if p % 2 else b(aten.slice.Tensor, weight, 0, 0, 4)
    if p == 5:
        weight, groups = b(aten.slice.Tensor, b(aten.slice.Tensor, b.weight, 1, 0, 1), 0, 0, channels), channels
    stride = [2, 1] if p == 4 else [1, 1]
    geometry = (stride, [1, 0], [1, 1], p == 3, [0, 0], groups)
    if p == 3:
        weight = b(aten.slice.Tensor, b.weight, 0, 0, channels)
    made = b(aten.convolution.default, x, weight, None, *geometry)
    if p in (2, 4):
        return made
    count = shape(made)[1]
    bias = b.bias if count == 8 else b(aten.slice.Tensor, b.bias, 0, 0, count)
    made = b(aten.add.Tensor, made, b(aten.view.default, bias, [-1, 1, 1]))
    if p == 6:
        return b(aten.relu.default, b(aten.add.Tensor, made, b.beside(made, y)))
    return b(aten.relu.default, made)


@operation
def convolution_gradient(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    """The gradient of a convolution of y, where x is the gradient of its result."""
    if len(shape(x)) != 4 or len(shape(y)) != 4:
        raise Unfit("images are wanted")
    into, out = shape(y)[1], shape(x)[1]
    # The convolution keeps the batch and the image's size, so its result's gradient has them.
    if (shape(x)[0], shape(x)[2:]) != (shape(y)[0], shape(y)[2:]):
        raise Unfit("another batch or size")
    if len({node.meta["val"].dtype for node in (x, y, b.weight)}) > 1:
        raise Unfit("autograd gives operands of one dtype")
    weight = b(aten.slice.Tensor, b(aten.slice.Tensor, b.weight, 1, 0, into), 0, 0, out)
    wanted = [True, False, False] if p % 2 else [False, True, False]
    args = (x, y, weight, None, [1, 1], [1, 0], [1, 1], False, [0, 0], 1, wanted)
    return b(operator.getitem, b(aten.convolution_backward.default, *args), 0 if p % 2 else 1)


# ---- what many models are made of ----


@operation
def softmax(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    if p % 2 and shape(x)[-1] != 1:
        mean = b(aten.div.Tensor, b(aten.sum.dim_IntList, x, [-1], True), shape(x)[-1])
        middle = b(aten.sub.Tensor, x, mean)
        square = b(aten.sum.dim_IntList, b(aten.mul.Tensor, middle, middle), [-1], True)
        scale = b(aten.rsqrt.default, b(aten.add.Tensor, square, 1e-3))
        made = b(aten.mul.Tensor, middle, scale)
        return b(aten.add.Tensor, b(aten.mul.Tensor, made, b.bias), b.bias) if p == 3 else made
    lower = b(aten.sub.Tensor, x, b(aten.amax.default, x, [-1], True))
    power = b(aten.exp.default, lower)
    return b(aten.div.Tensor, power, b(aten.sum.dim_IntList, power, [-1], True))


@operation
def attention(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    old = shape(x)
    if len(old) < 3:
        raise Unfit("a batch is wanted")
    query = b(aten.view.default, _dense(b, x), [-1, *old[-2:]])
    y = b.beside(x, y)
    key = query if shape(y) != old else b(aten.view.default, _dense(b, y), [-1, *old[-2:]])
    scores = b(aten.mul.Tensor, b(aten.bmm.default, query, b(aten.permute.default, key, [0, 2, 1])), 0.5)
    weights = softmax(b, scores, scores, 0)
    assert isinstance(weights, fx.Node)
    return b(aten.view.default, b(aten.bmm.default, weights, key), list(old))


@operation
def skip(b: Builder, x: fx.Node, y: fx.Node, p: int) -> Made:
    """Two convolutions of the same value."""
    first, second = convolved(b, x, y, 0), convolved(b, x if p % 2 else y, y, 0)
    return b(aten.cat.default, [first, second], 1)


# How often a recipe names each operation.
_WEIGHTS = {nothing: 1, arithmetic: 4, choice: 3, joined: 4, reduced: 2, product: 3, convolved: 5, softmax: 2, skip: 4}
FREQUENT = tuple(i for i, function in enumerate(OPERATIONS) for _ in range(_WEIGHTS.get(function, 1)))


def build(recipe: Recipe) -> Model:
    """The graph of a recipe."""
    b = Builder(recipe)
    for chosen_, first, second, p in recipe.steps:
        values = b.values
        x, y = values[-1 - first % len(values)], values[-1 - second % len(values)]
        before = set(b.graph.nodes)
        masks = list(b.masks)
        try:
            made = OPERATIONS[chosen_ % len(OPERATIONS)](b, x, y, p)
        except (Unfit, IndexError, ValueError, ZeroDivisionError):
            for node in [n for n in reversed(b.graph.nodes) if n not in before]:
                b.graph.erase_node(node)
            b.masks[:] = masks
            continue
        values.extend(node for node in (made if isinstance(made, list) else [made]) if node not in values)
    return _finished(b, recipe)


def _finished(b: Builder, recipe: Recipe) -> Model:
    """The graph with its results, without inputs that nothing reads."""
    wanted = list(dict.fromkeys(b.values[-1 - i % len(b.values)] for i in recipe.returned))
    early = [node for node in wanted if node not in b.late]
    late = [node for node in wanted if node in b.late and node.op == "call_function"]
    ports = [Port("result", index=i) for i in range(len(early))]
    gradients = [Port("gradient", index=i) for i in range(len(late))]
    output = b.graph.output((*early, *late))
    output.meta[PORTS] = (*ports, *gradients)
    for node in list(b.inputs):
        if not node.users:
            b.graph.erase_node(node)
            del b.inputs[node]
    graph = fx.GraphModule({}, b.graph)
    return Model(graph, tuple(x for x, _ in b.inputs.values()), tuple(x for _, x in b.inputs.values()))


_SMALL = st.integers(0, 7)
RECIPES = st.builds(
    Recipe,
    steps=st.tuples(*[st.tuples(st.sampled_from(FREQUENT), _SMALL, _SMALL, _SMALL)] * STEPS),
    returned=st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    # The policies that draw and the narrow one, which NumPy follows slowly, are a third.
    policy=st.sampled_from((0, 0, 1, 2, 2, 3, 4, 5, 6)),
    dtype=st.sampled_from((0, 0, 0, 1, 2, 3)),
    tangents=st.sampled_from((0, 0, 1, 2)),
    layout=st.integers(0, 3),
    small=st.integers(0, 2),
    seed=st.integers(0, 99),
)
