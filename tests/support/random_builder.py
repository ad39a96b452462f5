"""The tools that write random models: a recipe of numbers, and a builder of graphs.

A ``Recipe`` is a few tuples of small integers, so that Hypothesis shrinks it and a failure is repeated by its text.
``Builder`` writes nodes as ``graph.capture`` would, without Dynamo, with example inputs; what depends on a tangent is
the backward of the model.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxround.graph.site import PORT, Port
from fxround.policy import Policy, Rule

aten = torch.ops.aten

NARROW = Policy(
    "narrow",
    (
        Rule(rounding="e5m2/stochastic/saturate", accumulate="binary32/nearest_even/inf", optional=True),
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

    steps: (operation, operand, operand, parameter); operands count back from the latest value. returned: values,
    counted likewise. policy, dtype: places in POLICIES and DTYPES. tangents: how many of the inputs are tangents.
    layout: how the first input lies in memory. small: how small the parts are in which chains over rows and epilogues
    run. seed: of inputs and of random bits.
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
    """A graph that is being built. values: its floating-point nodes; masks: its comparisons."""

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
            x.view(-1)[:: 1 + x.numel() // 4] = torch.tensor([0.0, -0.0, 1.0, -2.0])[
                : math.ceil(x.numel() / (1 + x.numel() // 4))
            ]
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
        self.scale = given("s", "parameter", *(torch.tensor(value, dtype=self.dtype) for value in (2.5, -0.75)))
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
        """The results of an operator with several."""
        node = self(target, *args)
        return [self(operator.getitem, node, i) for i in range(len(node.meta["val"]))]

    def beside(self, x: fx.Node, y: fx.Node) -> fx.Node:
        """y, or the latest older value that broadcasts with x, or x itself."""
        start = self.values.index(y)
        for value in (*reversed(self.values[: start + 1]), x):
            if value.meta["val"].dtype == x.meta["val"].dtype and broadcast(shape(value), shape(x)) is not None:
                return value
        return x


class Unfit(Exception):
    """An operation that its operands do not allow."""


def shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    try:
        found = torch.broadcast_shapes(a, b)
    except RuntimeError:
        return None
    return tuple(found) if math.prod(found) <= MOST else None
