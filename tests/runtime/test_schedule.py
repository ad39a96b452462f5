"""The schedule keeps the graph's bits, uses memory again, and never overwrites a result."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from layers import Calls
from torch import Tensor, fx, nn

import fxround
from fxround.errors import VerificationError
from fxround.graph.dialect import FUSED, POINTWISE
from fxround.operators.rules import RULES
from fxround.runtime import buffers
from fxround.runtime import schedule as schedule_module
from fxround.runtime.schedule.aliasing import is_view_of, may_share
from fxround.runtime.schedule.verify import verify_schedule
from fxround.runtime.torch_ops import KERNELS

# 68 kB in binary32: large enough for a buffer of the pool.
SIZE = 132


class Moves(nn.Module):
    """Roundings between operators that share memory with their operands, or might."""

    OPERATIONS: ClassVar = (
        lambda a, b: a + b,
        lambda a, b: torch.relu(a * b),
        lambda a, b: a.t(),
        lambda a, b: a.reshape(4, -1).reshape(SIZE, SIZE),
        lambda a, b: torch.cat([a[:60], b[60:]]),
        lambda a, b: a.split(66)[1].repeat(2, 1),
        lambda a, b: a.unsqueeze(0).expand(3, -1, -1)[1],
        lambda a, b: a.sort(-1).values,
        lambda a, b: a - a.mean(-1, keepdim=True),
        lambda a, b: a @ b,
        lambda a, b: torch.nn.functional.pad(a[1:], (0, 0, 0, 1)),
        lambda a, b: a.double().float(),
        lambda a, b: a.masked_fill(b > 0, 0.5),
    )

    def __init__(self, steps: list[tuple[int, int, int]], results: list[int]) -> None:
        super().__init__()
        self.steps, self.results = steps, results

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        values = [x, y]
        for operation, a, b in self.steps:
            f = self.OPERATIONS[operation % len(self.OPERATIONS)]
            values.append(f(values[a % len(values)], values[b % len(values)]))
        return [values[r % len(values)] for r in self.results]


def pair(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE, SIZE, generator=generator), torch.randn(SIZE, SIZE, generator=generator)


@pytest.mark.part(2)
@pytest.mark.parametrize("seed", range(4))
def test_results_are_the_graphs_own_and_stay_so(seed: int) -> None:
    chosen = random.Random(seed)
    steps = [(chosen.randrange(99), chosen.randrange(99), chosen.randrange(99)) for _ in range(25)]
    results = [chosen.randrange(99) for _ in range(3)]
    compiled = fxround.compile(Moves(steps, results), "stochastic", strict=False)
    with torch.no_grad():
        first = compiled(*pair(1))
        copies = [value.clone() for value in first]
        entry = compiled._called()
        plain = entry.lowered(*pair(1), compiled.rng)
        for seed in (2, 3):
            compiled(*pair(seed))
    for value, copy, want in zip(first, copies, plain, strict=True):
        assert torch.equal(value, copy) and torch.equal(value, want)


class Skip(nn.Module):
    """A concatenation of two kernels' results that a chain reads as one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(3, 32, 3, padding=1)
        self.c, self.d, self.e = (nn.Conv2d(64, 64, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(torch.cat([self.a(x).relu(), self.b(x).relu()], 1)).relu()
        for _ in range(2):
            y = y + self.e(self.d(y).relu()).relu()
        return y


@pytest.mark.parametrize("fuse", [True, False])
def test_two_operands_of_a_concatenation_are_released_once(fuse: bool) -> None:
    x = torch.randn(2, 3, 32, 32)
    compiled = fxround.compile(Skip(), "reproducible", fuse=fuse)
    with torch.no_grad():
        results = [compiled(x) for _ in range(3)]
        entry = compiled._called()
        want = entry.lowered(*entry._inputs([x]), compiled.rng)[0]
    assert all(torch.equal(result, want) for result in results)
    calls = [node for node in entry.running.graph.nodes if node.target is buffers.release]
    released = [value for call in calls for value in call.args]
    assert len(released) == len(set(released)) > 0


class Deep(nn.Module):
    """Forty sums over the rows, which are not fused: forty results of one size, two of which are in use at a time."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = x - x.mean(-1, keepdim=True)
        return x


def test_dead_memory_is_used_again_and_little_is_kept() -> None:
    buffers.forget()
    x = torch.randn(1024, 1024)
    compiled = fxround.compile(Deep(), "reproducible")
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
    assert 0 < buffers.kept() <= 3 * x.nbytes
    buffers.forget()
    assert buffers.kept() == 0


def test_a_released_buffer_serves_the_next_result_of_its_size() -> None:
    buffers.forget()
    buffers.begin()
    first = buffers.empty((300, 300), torch.float32)
    address = first.data_ptr()
    buffers.release(first)
    other = buffers.empty((150, 300), torch.float64)
    assert other.data_ptr() == address and other.is_contiguous() and other.dtype == torch.float64
    assert buffers.empty((300, 300), torch.float32).data_ptr() != address
    buffers.forget()


def test_a_chain_that_runs_in_whole_kernels_needs_two_buffers() -> None:
    def steps(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x - x.mean(-1, keepdim=True)
        return x

    x = torch.ones(16, 40_000)  # a row is too long for the cache
    for fuse in (True, False):
        compiled = fxround.compile(steps, "reproducible", fuse=fuse, example_inputs=x)
        buffers.forget()
        result = compiled(x)
        assert buffers._POOL.peak == 2 * result.nbytes and buffers.kept() == result.nbytes


def test_memory_that_is_not_in_use_cannot_be_released() -> None:
    lent, own = buffers.empty((300, 300), torch.float32), torch.empty(300, 300)
    buffers.release(lent)
    for tensor in (lent, lent.t(), own):
        with pytest.raises(VerificationError, match=r"shape \(300, 300\) was released but is not in use"):
            buffers.release(tensor)
    again = buffers.empty((300, 300), torch.float32)
    assert again.data_ptr() == lent.data_ptr() != buffers.empty((300, 300), torch.float32).data_ptr()
    buffers.forget()


# ---- the verification of a schedule ----


class Sketch:
    """A scheduled graph, written by hand: two inputs and the random state."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x, self.y, self.rng = (self.graph.placeholder(name) for name in ("x", "y", "rng"))
        self.modules: dict[str, nn.Module] = {}

    def add(self, *operands: fx.Node) -> fx.Node:
        arguments = (list(operands), "add(x0, x1)", torch.float32, self.rng, 0)
        return self.graph.call_function(KERNELS[POINTWISE], arguments)

    def call(self, target: object, *args: object) -> fx.Node:
        return self.graph.call_function(target, args)  # type: ignore[arg-type]

    def release(self, *values: fx.Node) -> None:
        self.graph.call_function(buffers.release, values)

    def chain(self, spent: tuple[int, ...], *args: fx.Node) -> fx.Node:
        inside = Sketch()
        inside.graph.output([inside.add(inside.x, inside.y)])
        module = nn.Module()
        module.spent, module.whole = spent, inside.done()  # type: ignore[assignment]
        name = f"rows_{len(self.modules)}"
        self.modules[name] = module
        return self.call(operator.getitem, self.graph.call_module(name, args), 0)

    def done(self) -> fx.GraphModule:
        return fx.GraphModule(self.modules, self.graph)


def a_release_before_the_last_use(g: Sketch) -> fx.Node:
    a = g.add(g.x, g.y)
    g.release(a)
    return g.add(a, g.x)


def a_release_before_the_last_use_of_a_view(g: Sketch) -> fx.Node:
    a = g.add(g.x, g.y)
    view = g.call(torch.ops.aten.t.default, a)
    g.release(a)
    return g.add(view, g.x)


def two_releases(g: Sketch) -> fx.Node:
    a = g.add(g.x, g.y)
    b = g.add(a, g.y)
    g.release(a)
    g.release(a)
    return b


def a_release_of_two_views_of_one_memory(g: Sketch) -> fx.Node:
    a = g.add(g.x, g.y)
    b = g.add(a, g.y)
    g.release(g.call(torch.ops.aten.t.default, a), a)
    return b


def a_release_of_the_result(g: Sketch) -> fx.Node:
    a = g.add(g.x, g.y)
    view = g.call(torch.ops.aten.unsqueeze.default, a, 0)
    g.release(a)
    return view


def a_release_of_an_input(g: Sketch) -> fx.Node:
    g.release(g.x)
    return g.add(g.x, g.y)


def a_release_of_a_view_of_an_input(g: Sketch) -> fx.Node:
    b = g.add(g.x, g.y)
    g.release(g.call(torch.ops.aten.t.default, g.x))
    return b


def a_release_of_what_stock_made(g: Sketch) -> fx.Node:
    copy = g.call(torch.ops.aten.cat.default, [g.x, g.y])
    b = g.add(copy, g.y)
    g.release(copy)
    return b


def a_release_of_what_an_unknown_operator_read(g: Sketch) -> fx.Node:
    a = g.add(g.x, g.y)
    b = g.call(print, a)
    g.release(a)
    return b


def a_release_of_what_an_unknown_operator_may_keep(g: Sketch) -> fx.Node:
    a, b = g.add(g.x, g.y), g.add(g.y, g.x)
    g.call(print, a)
    g.release(a)
    return b


def a_chain_that_releases_one_argument_twice(g: Sketch) -> fx.Node:
    a, b = g.add(g.x, g.y), g.add(g.y, g.x)
    return g.chain((0, 0), a, b)


def a_chain_that_releases_what_another_argument_shares(g: Sketch) -> fx.Node:
    a = g.add(g.x, g.y)
    return g.chain((0,), a, g.call(torch.ops.aten.t.default, a))


def a_chain_that_releases_what_is_used_later(g: Sketch) -> fx.Node:
    a = g.add(g.x, g.y)
    return g.add(g.chain((1,), g.x, a), a)


@pytest.mark.parametrize(
    "fault",
    [
        a_release_before_the_last_use,
        a_release_before_the_last_use_of_a_view,
        two_releases,
        a_release_of_two_views_of_one_memory,
        a_release_of_the_result,
        a_release_of_an_input,
        a_release_of_a_view_of_an_input,
        a_release_of_what_stock_made,
        a_release_of_what_an_unknown_operator_read,
        a_release_of_what_an_unknown_operator_may_keep,
        a_chain_that_releases_one_argument_twice,
        a_chain_that_releases_what_another_argument_shares,
        a_chain_that_releases_what_is_used_later,
    ],
    ids=lambda fault: fault.__name__,
)
def test_verification_finds(fault: Callable[[Sketch], fx.Node]) -> None:
    sketch = Sketch()
    sketch.graph.output([fault(sketch)])
    with pytest.raises(VerificationError, match="the schedule"):
        verify_schedule(sketch.done())


def test_verification_accepts_what_is_right() -> None:
    g = Sketch()
    a = g.add(g.x, g.y)
    pair = g.call(KERNELS[FUSED], [a, g.x], "two results", "f32 f32", g.rng, [1, 2])
    first, second = g.call(operator.getitem, pair, 0), g.call(operator.getitem, pair, 1)
    g.release(a)
    joined = g.call(torch.ops.aten.cat.default, [first, second])
    g.release(first, second)
    b = g.add(joined, g.y)
    c = g.chain((0,), g.call(torch.ops.aten.reshape.default, b, [4]), g.x)
    g.graph.output([c, joined])
    verify_schedule(g.done())


def test_every_schedule_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: fx.GraphModule) -> None:
        raise VerificationError("the schedule is not verified")

    monkeypatch.setattr(schedule_module, "verify_schedule", refuse)
    x = torch.ones(2, 3)
    with pytest.raises(VerificationError, match="is not verified"):
        fxround.compile(nn.Linear(3, 4), "reproducible")(x)


def test_a_result_holds_no_memory_of_a_larger_value() -> None:
    """A chain over rows that reads a part of a value does not write its result into the value's memory."""
    layer = nn.Linear(64, 512, bias=False)
    with torch.no_grad():
        result = fxround.compile(Calls(lambda x: layer(x)[2:400].softmax(-1)), "reproducible")(torch.ones(500, 64))
    assert (result.storage_offset(), result.untyped_storage().nbytes()) == (0, result.nbytes)


# ---- guarded memory ----


def test_a_guard_finds_what_is_written_beside_a_buffer_and_after_its_release() -> None:
    def beside(tensor: Tensor) -> None:
        torch.empty(0).set_(tensor.untyped_storage(), tensor.storage_offset() + 3, (1,)).zero_()

    def late(tensor: Tensor) -> None:
        buffers.release(tensor)
        tensor.view(-1)[0] = 1

    for fault, message in ((beside, "wrote beside its result of 12 bytes"), (late, "of 12 bytes was written to")):
        with pytest.raises(VerificationError, match=message), buffers.guarded():
            fault(buffers.empty((3,), torch.float32))


def test_a_guard_finds_a_second_release() -> None:
    with buffers.guarded():
        tensor = buffers.empty((3, 1), torch.float64)
        buffers.release(tensor.t())
        with pytest.raises(VerificationError, match="not in use"):
            buffers.release(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_guarded_memory_holds_nans_before_and_after_its_use(dtype: torch.dtype) -> None:
    with buffers.guarded():
        tensor = buffers.empty((2, 3), dtype)
        assert tensor.shape == (2, 3) and bool(tensor.isnan().all())
        tensor.fill_(1)
        assert buffers.fills_its_buffer(tensor) and buffers.again(tensor).data_ptr() == tensor.data_ptr()
        buffers.release(tensor)
        assert bool(tensor.isnan().all())
        assert buffers.empty((2, 3), dtype).data_ptr() != tensor.data_ptr()


# ---- what may share memory ----


def test_operators_share_no_memory_that_the_schedule_does_not_expect() -> None:
    aten, x = torch.ops.aten, torch.randn(4, 6)
    cases = [
        *((aten.view.default, ([6, 4],)), (aten.reshape.default, ([24],)), (aten._unsafe_view.default, ([24],))),
        *((aten.t.default, ()), (aten.permute.default, ([1, 0],)), (aten.transpose.int, (0, 1))),
        *((aten.expand.default, ([4, 6],)), (aten.slice.Tensor, (0, 0, 4)), (aten.select.int, (0, 0))),
        *((aten.unsqueeze.default, (0,)), (aten.squeeze.default, ()), (aten.squeeze.dim, (0,))),
        *((aten.squeeze.dims, ([0],)), (aten.alias.default, ()), (aten.detach.default, ())),
        *(
            (aten.split.Tensor, (4,)),
            (aten.unbind.int, ()),
            (aten.diagonal.default, ()),
            (aten.unfold.default, (0, 4, 1)),
        ),
        *(
            (aten.as_strided.default, ([4, 6], [6, 1])),
            (aten.contiguous.default, ()),
            (aten.view.dtype, (torch.float32,)),
        ),
        *((aten.clone.default, ()), (aten.repeat.default, ([1, 1],)), (aten.roll.default, ([0],))),
        *((aten.flip.default, ([],)), (aten.constant_pad_nd.default, ([0, 0],)), (aten.tril.default, (9,))),
        *((aten.masked_fill.Scalar, (torch.zeros(4, 6, dtype=torch.bool), 1.0)), (aten._to_copy.default, ())),
        *((aten.upsample_nearest2d.default, ([4, 6],)), (aten.pixel_shuffle.default, (1,))),
        *(
            (aten.clamp.default, (-9,)),
            (aten.relu.default, ()),
            (aten.nan_to_num.default, ()),
            (aten.floor.default, ()),
        ),
        *((aten.index_select.default, (0, torch.arange(4))), (aten.gather.default, (0, torch.zeros(4, 6).long()))),
        *((aten.sort.default, ()), (aten.amax.default, ([],)), (aten.cummax.default, (0,)), (aten.copy.default, (x,))),
    ]
    for operator_, rest in cases:
        graph = fx.Graph()
        node = graph.call_function(operator_, (graph.placeholder("x"), *rest))
        operand = x[None, None] if "upsample" in str(operator_) or "pixel" in str(operator_) else x
        results = torch.utils._pytree.tree_leaves(operator_(operand, *rest))
        shares = any(result.untyped_storage()._cdata == x.untyped_storage()._cdata for result in results)
        assert may_share(node) or not shares, operator_
        assert shares or not is_view_of(node, node.args[0]), operator_  # type: ignore[arg-type]
    joined = aten.cat.default([x, x[:0]])
    assert joined.untyped_storage()._cdata != x.untyped_storage()._cdata


def test_a_row_major_result_and_its_views_are_told_from_what_may_be_a_copy() -> None:
    aten, g = torch.ops.aten, Sketch()
    made = g.add(g.x, g.y)
    transposed = g.call(aten.t.default, made)
    flat = g.call(aten.reshape.default, made, [16])
    for view in (made, transposed, flat, g.call(aten.t.default, transposed), g.call(aten.slice.Tensor, flat, 0, 2)):
        assert is_view_of(view, made), view
    assert is_view_of(g.call(aten.select.int, g.call(aten.unsqueeze.default, flat, 0), 0, 0), made)
    # A reshape of a tensor that is not row-major may copy it, whatever follows.
    copied = g.call(aten.reshape.default, transposed, [16])
    others = (g.call(aten.view.default, copied, [4, 4]), g.x, g.call(aten.t.default, g.x), g.add(made), None)
    for other in (copied, *others):
        assert not is_view_of(other, made), other


def test_what_is_not_known_may_share_memory() -> None:
    g = Sketch()
    a = g.add(g.x, g.y)
    # An operator without a rule, whatever its schema says; a part of a list; and a function of Python.
    for target in (torch.ops.aten._fused_sdp_choice.default, print):
        assert str(target) not in RULES and may_share(g.call(target, a, a, a)), target
    assert may_share(g.call(operator.getitem, a, 0))
    assert not may_share(g.call(torch.ops.aten.cat.default, [a, a])) and not may_share(a)
