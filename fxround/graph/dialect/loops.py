"""Loops: PyTorch's higher-order operators, whose bodies are graphs, and the random states of their iterations.

    scan(body, [*carries], [*xs], [*others])         body(*carries, *x, *others) -> (*carries, *y), for every x of xs
    while_loop(test, body, [*carries], [*others])    as long as test(*carries, *others)
    cond(predicate, body, other_body, [*operands])   one of the two bodies

``torch.map`` is a scan without carries. In a lowered graph every body has a placeholder of its own for (seed, sample),
which ``iterations(counters, rng, node)`` computes: the random bits of an iteration are a function of (seed, sample),
the number of the loop and the number of the iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch._higher_order_ops
from torch import Tensor, fx

from fxround.graph.dialect.call import Call, T, empty, operator, require_state
from fxround.numerics.formats.storage import Storage

SCAN: Final[Any] = torch.ops.higher_order.scan
WHILE: Final[Any] = torch.ops.higher_order.while_loop
COND: Final[Any] = torch.ops.higher_order.cond
MAP: Final[Any] = torch.ops.higher_order.map_impl
# The names of the operators' bodies, which are their first arguments (of a cond, those after the predicate).
BODIES: Final[dict[Any, tuple[str, ...]]] = {SCAN: ("step",), WHILE: ("test", "step"), COND: ("true", "false")}


@operator("iterations")
@dataclass(frozen=True)
class Iterations(Call[T]):
    """The (seed, sample) of iterations: int64 of shape [*counters.shape, 2]; counters are at least 0.

    The sample is that of ``rng``. The seed is 63 bits of ``numerics.arithmetic.randomness.iteration_seed``.
    """

    rounds: ClassVar[bool] = False

    counters: T
    rng: T
    node: int

    def loads(self) -> tuple[Storage, ...]:
        """Nothing that a kernel loads."""
        return ()

    def kernel(self, loads: tuple[Storage, ...]) -> None:
        """Nothing is rounded, and there is no kernel to build."""

    def fake(self: Iterations[Tensor]) -> Tensor:
        """Return a tensor of states."""
        require_state(self.rng)
        if self.counters.dtype != torch.int64:
            raise TypeError(f"iterations: counters of {self.counters.dtype}; expected int64")
        return empty(self.rng, [*self.counters.shape, 2])


@dataclass(frozen=True)
class Loop:
    """A loop's node: its bodies by their attributes' names, and its operands in the order of a body's placeholders.

    carries     the operands that an iteration replaces by its results
    xs          the operands of which iteration i reads element i
    others      the operands that every iteration reads
    predicate   of a cond
    """

    node: fx.Node
    bodies: tuple[str, ...]
    carries: tuple[Any, ...]
    xs: tuple[Any, ...]
    others: tuple[Any, ...]
    predicate: Any = None

    @property
    def operands(self) -> tuple[Any, ...]:
        """All operands, in the order of a body's placeholders."""
        return (*self.carries, *self.xs, *self.others)

    def arguments(self, bodies: Sequence[fx.Node]) -> tuple[Any, ...]:
        """Return the node's arguments with these nodes for the bodies."""
        if self.node.target is SCAN:
            return (*bodies, list(self.carries), list(self.xs), tuple(self.others))
        if self.node.target is WHILE:
            return (*bodies, tuple(self.carries), tuple(self.others))
        return (self.predicate, *bodies, tuple(self.others))


def is_loop(node: fx.Node) -> bool:
    """Whether a node calls a higher-order operator with bodies."""
    return node.op == "call_function" and node.target in BODIES


def read_loop(node: fx.Node) -> Loop:
    """Return what a loop's node calls."""
    args: tuple[Any, ...] = node.args
    if node.target is SCAN:
        return Loop(node, (args[0].target,), tuple(args[1]), tuple(args[2]), tuple(args[3] if len(args) > 3 else ()))
    if node.target is WHILE:
        return Loop(node, (args[0].target, args[1].target), tuple(args[2]), (), tuple(args[3] if len(args) > 3 else ()))
    return Loop(node, (args[1].target, args[2].target), (), (), tuple(args[3]), args[0])


def loops_of(graph: fx.GraphModule) -> Iterator[tuple[Loop, tuple[fx.GraphModule, ...]]]:
    """Yield the loops of a graph with their bodies; loops inside of a body are not among them."""
    for node in graph.graph.nodes:
        if is_loop(node):
            loop = read_loop(node)
            yield loop, tuple(graph.get_submodule(name) for name in loop.bodies)  # type: ignore[misc]


def graphs_of(graph: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield the bodies of all loops of a graph, inner ones first, and then the graph itself."""
    for _, bodies in loops_of(graph):
        for body in bodies:
            yield from graphs_of(body)
    yield graph
