"""Random models as ATen graphs: a recipe of numbers, and the graph that it stands for.

A ``Recipe`` is a few tuples of small integers, so that Hypothesis shrinks it and a failure is repeated by its text. Every
operation takes what earlier ones made and is left out where it does not fit: each recipe is a model. ``build`` writes the
graph as ``graph.capture`` would, without Dynamo, with example inputs; what depends on a tangent is its backward.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxround.graph import PORT, PORTS, Port
from fxround.policy import Policy, Rule

aten = torch.ops.aten

NARROW = Policy(
    "narrow",
    (
        Rule(rounding="e5m2/stochastic/saturate", accumulate="binary32/nearest_even/inf"),
        Rule(operator="contraction", accumulate="bfloat16 chunk=4 combine=binary32/stochastic", optional=True),
        Rule(operator="exact", rounding="e4m3fn/nearest_even/saturate", optional=True),
        Rule(role="weight", rounding="e4m3fn/nearest_even/saturate", optional=True),
    ),
)
# The first ones are the cheapest to follow by NumPy.
POLICIES: tuple[Any, ...] = ("reproducible", "repdl", "identity", "reproducible", "stochastic", NARROW, "up_down")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
# No tensor is larger.
MOST = 4000
# Steps of a recipe; one that names operation 0 is none.
STEPS = 9


@dataclass(frozen=True)
class Recipe:
    """A model in numbers.

    steps: (operation, operand, operand, parameter); operands count back from the latest value. returned: values, counted
    likewise. policy, dtype: places in POLICIES and DTYPES. tangents: how many of the inputs are tangents. layout: how the
    first input lies in memory. small: how small the parts are in which chains over rows and epilogues run. seed: of inputs
    and of random bits.
    """

    steps: tuple[tuple[int, int, int, int], ...]
    returned: tuple[int, ...] = (0,)
    policy: int = 0
    dtype: int = 0
    tangents: int = 0
    layout: int = 0
    small: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Model:
    """A graph as it is captured, its inputs (without the random state), and others of the same shapes."""

    graph: fx.GraphModule
    inputs: tuple[Tensor, ...]
    others: tuple[Tensor, ...]


class Builder:
    """A graph in the making. values: its floating-point nodes; masks: its comparisons."""

    def __init__(self, recipe: Recipe) -> None:
        self.dtype = DTYPES[recipe.dtype % len(DTYPES)]
        self.mode, self.graph = FakeTensorMode(), fx.Graph()
        self.values: list[fx.Node] = []
        self.masks: list[fx.Node] = []
        self.inputs: dict[fx.Node, tuple[Tensor, Tensor]] = {}
        self.late: set[fx.Node] = set()
        self.real: dict[fx.Node, Any] = {}
        generator = torch.Generator().manual_seed(recipe.seed)

        def draw(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            x = x * torch.exp2(torch.randint(-3, 3, shape, generator=generator))
            x.view(-1)[:: 1 + x.numel() // 4] = torch.tensor([0.0, -0.0, 1.0, -2.0])[: math.ceil(x.numel() / (1 + x.numel() // 4))]
            return x.to(self.dtype)

        def lie(x: Tensor) -> Tensor:
            order = ([0, 1, 2, 3], [0, 2, 3, 1], [3, 2, 1, 0], [1, 0, 2, 3])[recipe.layout % 4]
            return x.permute(order).contiguous().permute([order.index(d) for d in range(4)])

        def given(name: str, kind: str, *tensors: Tensor) -> fx.Node:
            node = self.graph.placeholder(name)
            port = Port("parameter", name) if kind == "parameter" else Port(kind, index=len(self.inputs))  # type: ignore[arg-type]
            node.meta = {PORT: port, "val": self._fake(tensors[0])}
            self.real[node] = tensors[0]
            self.inputs[node] = (tensors[0], tensors[1])
            if kind == "tangent":
                self.late.add(node)
            return node

        full, row = (2, 4, 10, 8), (10, 8)
        late = ["argument"] * (3 - recipe.tangents) + ["tangent"] * recipe.tangents
        self.weight = given("w", "parameter", draw(8, 8, 3, 1) / 4, draw(8, 8, 3, 1))
        self.matrix = given("m", "parameter", draw(8, 8) / 2, draw(8, 8))
        self.bias = given("b", "parameter", draw(8), draw(8))
        self.index = given("i", "argument", *(torch.randint(-2, 2, (8,), generator=generator) for _ in range(2)))
        self.mask = given("k", "argument", *(torch.rand(full, generator=generator) < 0.5 for _ in range(2)))
        self.masks.append(self.mask)
        self.values.append(given("r", "argument", draw(*row), draw(*row)))
        for name, kind in zip("xyz", late, strict=True):
            self.values.append(given(name, kind, lie(draw(*full)), lie(draw(*full))))
        # What tangents are counts from the back, what the model reads first from the front.
        self.values[1:] = reversed(self.values[1:])

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of the operator, with its fake value."""
        try:
            given, named = fx.map_arg((args, kwargs), self.real.__getitem__)
            value = target(*given, **named)
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
            raise Unfit(str(error)) from error
        if isinstance(value, Tensor) and (value.numel() > MOST or value.dim() > 6 or not value.numel()):
            raise Unfit("too large, or empty")
        node = self.graph.call_function(target, args, kwargs)
        self.real[node] = value
        node.meta["val"] = pytree.tree_map_only(Tensor, self._fake, value)
        if any(used in self.late for used in node.all_input_nodes):
            self.late.add(node)
            node.meta["partitioner_tag"] = "is_backward"
        return node

    def _fake(self, x: Tensor) -> FakeTensor:
        layout = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return FakeTensor(self.mode, layout, torch.device("cpu"))

    def list(self, target: Any, *args: Any) -> list[fx.Node]:
        """What an operator yields that returns several."""
        node = self(target, *args)
        return [self(operator.getitem, node, i) for i in range(len(node.meta["val"]))]

    def beside(self, x: fx.Node, y: fx.Node) -> fx.Node:
        """y, or the nearest older value that broadcasts with x; x itself in the end."""
        start = self.values.index(y)
        for value in (*reversed(self.values[: start + 1]), x):
            if value.meta["val"].dtype == x.meta["val"].dtype and _broadcast(shape(value), shape(x)) is not None:
                return value
        return x


class Unfit(Exception):
    """An operation that its operands do not allow."""


def shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    try:
        found = torch.broadcast_shapes(a, b)
    except RuntimeError:
        return None
    return tuple(found) if math.prod(found) <= MOST else None


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
    """A comparison, or an older one, and what is chosen by it."""
    y = b.beside(x, y)
    other: Any = y if p % 2 else (0, 0.5)[p // 4 % 2]
    names = ("le", "lt", "gt", "ge", "eq", "ne")
    packet = getattr(aten, names[p % 6])
    if p == 7:
        mask = next((m for m in reversed(b.masks) if _broadcast(shape(m), shape(x))), b.mask)
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
    """x, copied where a view of it would be refused."""
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
    """What a change in place becomes: x with a part of it replaced."""
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
    """A linear layer, x y^T, a batch of products, and what stands behind a layer."""
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
    """A convolution of some kind, often with what stands behind it."""
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
    """The gradient of a convolution of y where x is the gradient of its result."""
    if len(shape(x)) != 4 or len(shape(y)) != 4:
        raise Unfit("images are wanted")
    into, out = shape(y)[1], shape(x)[1]
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
    """Two convolutions of one value beside each other."""
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
    """The graph with its results; inputs that nothing reads go."""
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
