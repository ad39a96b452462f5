"""Epilogues: a contraction and its map have the same bits together and one after the other, and need one result."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import fxround
from fxround.graph.dialect import CALLS
from fxround.runtime import buffers
from fxround.runtime.cpu import contraction as contractions
from fxround.runtime.cpu import epilogues, matmul
from fxround.runtime.cpu.begin import begin
from fxround.runtime.schedule import schedule
from fxround.runtime.schedule.epilogues import Epilogue, join_epilogues

RNE = "binary32/nearest_even/inf"
RNG = torch.tensor([7, 2])
# To nearest, with random words, under the processor's flags (whose items are done again for special data), in chunks.
ACCUMULATORS = (
    RNE,
    "binary32/stochastic",
    "binary32/up_down",
    "binary32/toward_zero",
    "bfloat16",
    "bfloat16 chunk=8 combine=binary32",
)
# x0: the contraction's result, x1: broadcast, x2: of its shape.
PROGRAMS = {
    f"t0 = add(x0, x1) @ {RNE}": ("f32", 2),
    "t0 = add(x0, x1) @ binary32/stochastic/inf; t1 = relu(t0) @ exact; return t1": ("f32", 2),
    f"t0 = mul(x0, x1) @ {RNE}; t1 = tanh(t0) @ binary32/up_down/inf; t2 = add(t1, x2) @ {RNE}; return t0, t2": (
        "f32 f32",
        3,
    ),
    f"t0 = add(x2, x0) @ bfloat16/stochastic/inf; t1 = mul(t0, x0) @ {RNE}; return t0, t1": ("bf16 f32", 3),
    "t0 = identity(x0) @ bfloat16/nearest_even/inf; return t0": ("bf16", 1),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many items, and many steps."""
    caches = contractions._packed, contractions._direct, matmul._bound
    monkeypatch.setattr(contractions, "_CHUNK_BYTES", 1 << 13)
    monkeypatch.setattr(contractions, "_PARKED_BYTES", 1 << 13)
    monkeypatch.setattr(epilogues, "_STEP", 1 << 9)
    monkeypatch.setattr(epilogues, "_ITEMS", 1)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def values(data: st.DataObject, shape: tuple[int, ...]) -> Tensor:
    """Normal deviates in a random layout, sometimes with subnormal numbers, overflows or NaNs."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(shape, generator=generator)
    if data.draw(st.integers(0, 3)) == 0 and x.numel():
        special = torch.tensor([math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-40, -0.0])
        places = torch.randint(x.numel(), (3,), generator=generator)
        x.view(-1)[places] = special[torch.randint(7, (3,), generator=generator)]
    order = data.draw(st.permutations(range(len(shape))))
    return x.permute(*order).contiguous().permute(*(order.index(d) for d in range(len(shape))))


def contraction(graph: fx.Graph, data: st.DataObject, given: list[Tensor]) -> tuple[fx.Node, tuple[int, ...]]:
    """A random contraction, with its operands appended to those given, and the shape of its result."""
    name = data.draw(
        st.sampled_from(("matmul", "batched", "few", "convolution", "images", "planes", "transposed", "gw"))
    )
    batch, rows, length, columns = (data.draw(st.integers(1, n)) for n in (7, 40, 30, 90))
    if name in ("matmul", "batched", "few"):
        many = () if name == "matmul" else (batch,)
        rows = min(rows, 8) if name == "few" else rows * 3
        operands = values(data, (*many, rows, length)), values(data, (*many, length, columns))
        target, arguments = torch.ops.fxround.matmul.default, ()
    else:
        groups, per = data.draw(st.sampled_from([(1, 9), (2, 6), (3, 1)] if name != "planes" else [(6, 1), (3, 2)]))
        channels, size = (
            groups * data.draw(st.integers(1, 3)),
            {"convolution": 26, "gw": 6}.get(name, data.draw(st.integers(3, 12))),
        )
        transposed = name == "transposed"
        weight = (channels, per, 3, 2) if transposed else (groups * per, channels // groups, 3, 2)
        geometry = ([1, 1], [1, 0], [1, 1], transposed, [0, 0], groups)
        target, arguments = torch.ops.fxround.convolution.default, geometry
        operands = values(data, (batch, channels, size, size)), values(data, weight)
        if name == "gw":
            gradient = values(data, (batch, groups * per, size, size - 1))
            target, arguments = torch.ops.fxround.convolution_weight_gradient.default, (list(weight), *geometry)
            operands = gradient, operands[0]
    nodes = [graph.placeholder(f"a{i}") for i in range(2)]
    given.extend(operands)
    accumulate = data.draw(st.sampled_from(ACCUMULATORS))
    node = graph.call_function(target, (*nodes, *arguments, accumulate, RNE, graph.placeholder("rng"), 3))
    given.append(RNG)
    with torch.no_grad():
        return node, tuple(target(*operands, *arguments, accumulate, RNE, RNG, 3).shape)


def shaped(data: st.DataObject, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape, or another one with the same number of elements."""
    kind = data.draw(st.sampled_from(("same", "flat", "split", "one more")))
    if kind == "split":
        return (*shape[:-2], shape[-2] // 2, 2, shape[-1]) if shape[-2] % 2 == 0 else (1, *shape, 1)
    return {"same": shape, "flat": (math.prod(shape),), "one more": (*shape[:1], 1, *shape[1:])}[kind]


@settings(max_examples=120)
@given(st.data())
def test_the_bits_are_those_of_one_after_the_other(data: st.DataObject) -> None:
    graph, given = fx.Graph(), []
    node, shape = contraction(graph, data, given)
    seen = shaped(data, shape)
    read = node if seen == shape else graph.call_function(torch.ops.aten.reshape.default, (node, list(seen)))
    program, (results, arity) = data.draw(st.sampled_from(list(PROGRAMS.items())))
    broadcast = tuple(n if data.draw(st.booleans()) else 1 for n in seen[data.draw(st.integers(0, len(seen) - 1)) :])
    others = [values(data, broadcast), values(data, seen)][: arity - 1]
    operands = [read, *(graph.placeholder(f"b{i}") for i in range(arity - 1))]
    given.extend(others)
    rng = next(n for n in graph.nodes if n.name == "rng")
    fused = graph.call_function(torch.ops.fxround.fused.default, (operands, program, results, rng, [4, 5]))
    taken = [graph.call_function(operator.getitem, (fused, i)) for i in range(len(results.split()))]
    graph.output([*taken, node] if data.draw(st.booleans()) else taken)
    plain = fx.GraphModule({}, graph)
    joined = schedule(plain)
    assert sum(isinstance(m, Epilogue) for m in joined.modules()) == 1
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.sampled_from((1, 2, 3))))
        want, got = plain(*given), joined(*given)
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(want, got, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and other.is_contiguous()
        kind = torch.int32 if one.dtype == torch.float32 else torch.int16
        assert torch.equal(one.view(kind), other.view(kind))


@settings(max_examples=100)
@given(st.data())
def test_leading_elements_are_complete_when_a_plan_says_so(data: st.DataObject) -> None:
    graph, given = fx.Graph(), []
    node, _ = contraction(graph, data, given)
    arguments = fx.map_arg(node.args, dict(zip(graph.nodes, [*given[:2], RNG], strict=False)).__getitem__)
    pending = begin(CALLS[node.target].of(arguments))
    want = pending.finish().view(torch.int32).flatten()
    assert pending.plan is not None and pending.plan.complete(0) == 0
    assert pending.plan.complete(pending.plan.items) == want.numel()
    cuts = sorted({0, pending.plan.items, *data.draw(st.lists(st.integers(0, pending.plan.items), max_size=4))})
    made = torch.full((want.numel(),), -77, dtype=torch.int32)
    for start, end in pairwise(cuts):
        pending.run(made.data_ptr(), range(start, end))
        first = pending.plan.complete(end)
        assert torch.equal(made[:first], want[:first])


class Head(nn.Module):
    """A product with a bias, an activation and a residual: maps of their own, in binary32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


def found(compiled: fxround.RoundedModule) -> list[Epilogue]:
    return [m for m in compiled._called().running.modules() if isinstance(m, Epilogue)]


def test_a_result_lies_where_the_contraction_s_was() -> None:
    x = torch.randn(4, 64, 300)
    peaks = {}
    for fuse in (True, False):
        compiled = fxround.compile(Head(300), "reproducible", example_inputs=x, fuse=fuse)
        buffers.forget()
        with torch.no_grad():
            compiled(x)
        peaks[fuse] = buffers._POOL.peak / x.nbytes
        assert len(found(compiled)) == fuse
    assert peaks == {True: 1.0, False: 2.0}
    buffers.forget()


@pytest.mark.part("stochastic")
@pytest.mark.parametrize("policy", ["stochastic", "reproducible", "up_down"])
def test_convolutions_with_batch_norms_and_a_residual_are_joined(policy: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(6, 8, 1)
            self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.norms[0](self.a(x)))
            return torch.relu(self.norms[1](self.b(y)) + self.norms[2](self.c(x)))

    x = torch.randn(5, 6, 25, 25)
    compiled = fxround.compile(Block().eval(), policy, seed=2)
    with torch.no_grad():
        got = compiled(x)
        entry = compiled._called()
        (want,) = entry.lowered(*entry._inputs([x]), compiled.rng)
    assert torch.equal(got, want)
    # Of the last map's two convolutions one is joined.
    assert len(found(compiled)) == 2 and all(plan is not None for m in found(compiled) for plan in m.plans.values())


@pytest.mark.parametrize(
    "shape, other",
    [((3, 4), (5, 3, 4)), ((0, 4), (0, 4)), ((3, 4), (2, 1, 1, 1, 1, 1))],
    ids=["broadcast to a larger shape", "empty", "larger by ones"],
)
def test_what_cannot_be_joined_runs_as_the_graph_says(shape: tuple[int, int], other: tuple[int, ...]) -> None:
    graph = fx.Graph()
    a, b, c, rng = (graph.placeholder(name) for name in ("a", "b", "c", "rng"))
    product = graph.call_function(torch.ops.fxround.matmul.default, (a, b, RNE, RNE, rng, 1))
    program = f"t0 = add(x0, x1) @ {RNE}"
    graph.output(
        [graph.call_function(torch.ops.fxround.pointwise.default, ([product, c], program, torch.float32, rng, 2))]
    )
    plain = fx.GraphModule({}, graph)
    joined = schedule(plain)
    given = torch.randn(shape[0], 6), torch.randn(6, shape[1]), torch.randn(other), RNG
    assert torch.equal(joined(*given)[0], plain(*given)[0])
    (module,) = (m for m in joined.modules() if isinstance(m, Epilogue))
    assert list(module.plans.values()) == [None]
    wrong = (given[0], given[1].double(), *given[2:])
    with pytest.raises(TypeError, match="expected one dtype"):
        joined(*wrong)
    with pytest.raises(TypeError, match="operand 1"):
        joined(*given[:2], torch.ones(other, dtype=torch.int32), RNG)


def test_a_group_that_a_path_leads_around_is_left() -> None:
    graph = fx.Graph()
    a, b, rng = (graph.placeholder(name) for name in ("a", "b", "rng"))
    product = graph.call_function(torch.ops.fxround.matmul.default, (a, b, RNE, RNE, rng, 1))
    total = graph.call_function(torch.ops.aten.cumsum.default, (product, 0))
    program = f"t0 = add(x0, x1) @ {RNE}"
    last = graph.call_function(torch.ops.fxround.pointwise.default, ([product, total], program, torch.float32, rng, 2))
    graph.output([last])
    plain = fx.GraphModule({}, graph)
    joined = join_epilogues(plain)
    assert not any(node.op == "call_module" for node in joined.graph.nodes)
    given: Any = torch.randn(5, 6), torch.randn(6, 70), RNG
    assert torch.equal(joined(*given)[0], plain(*given)[0])
