"""Hoisting keeps the bits of any graph with reshapes and copies, and brings operations together."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.compiler.executable import Entry
from fxround.graph.dialect import POINTWISE, read_map
from fxround.module.rounded_module import RoundedModule
from fxround.passes.optimizations.choose import COPY
from fxround.runtime.schedule.epilogues import Epilogue


class Moves(nn.Module):
    """Operations, reshapes and copies of earlier values, by a list of (operation, operand, operand)."""

    OPERATIONS: Any = (
        lambda a, b: a + b.reshape(a.shape),
        lambda a, b: a * a.shape[-1] + 1.5,
        lambda a, b: a + torch.arange(a.shape[-1], device=a.device) * 0.1,
        lambda a, b: a * b.reshape(-1)[: a.shape[-1]].clone(),
        lambda a, b: torch.relu(a).clone(),
        lambda a, b: a.reshape(4, 6, 10),
        lambda a, b: a.reshape(24, 10),
        lambda a, b: a.reshape(12, 2, 1, 10),
        lambda a, b: a.reshape(10, 24),
        lambda a, b: a.clone(),
        lambda a, b: nn.functional.dropout(a, 0.5, training=False),
        lambda a, b: a.transpose(0, -1).clone().transpose(0, -1),
    )

    def __init__(self, steps: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> list[Tensor]:
        values = [x * 2, x - 1]
        for operation, a, b in self.steps:
            f = self.OPERATIONS[operation % len(self.OPERATIONS)]
            values.append(f(values[a % len(values)], values[b % len(values)]))
        # Views of one tensor that is no result could not be returned side by side.
        return [values[-1], values[-2] + 0.5, values[-3] - 0.5]


def both(compiled: RoundedModule, x: Tensor) -> tuple[list[Tensor], list[Tensor], Entry]:
    """Return the results as they are computed and those of the lowered graph, which are equal, and the graphs."""
    with torch.no_grad():
        got = compiled(x)
        entry = compiled._called()
        want = entry.lowered(x, compiled.rng)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, want, strict=True))
    return got, want, entry


@pytest.mark.part(2)
@pytest.mark.parametrize("seed", range(6))
def test_the_bits_stay_and_no_result_is_another_one(seed: int) -> None:
    chosen = random.Random(seed)
    # Mostly chains: each operation on one of the last values.
    steps = [(chosen.randrange(99), -chosen.randint(1, 3), chosen.randrange(99)) for _ in range(25)]
    compiled = fxround.compile(Moves(steps), "stochastic", strict=False, seed=3)
    x = torch.randn(24, 10, generator=torch.Generator().manual_seed(seed))
    got, want, _ = both(compiled, x)
    # What shares memory shared it before: a result and its reshape.
    assert sharing(got) <= sharing(want)


def sharing(values: list[Tensor]) -> set[tuple[int, int]]:
    memory = [value.untyped_storage().data_ptr() for value in values]
    return {(i, j) for i, one in enumerate(memory) for j, other in enumerate(memory) if one == other and i != j}


def test_a_layer_of_a_sequence_is_one_step() -> None:
    """A bias is added in [batch * time, width], the activation and the residual follow in [batch, time, width]."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(12, 12), nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.dropout(torch.relu(self.linear(x)))

    compiled = fxround.compile(Layer().eval(), "stochastic", seed=1)
    x = torch.randn(3, 50, 12)
    with torch.no_grad():
        got = compiled(x)
        entry = compiled._called()
        (want,) = entry.lowered(*entry._inputs([x]), compiled.rng)
    assert torch.equal(got, want)
    assert sum(isinstance(m, Epilogue) for m in entry.running.modules()) == 1
    names = {str(node.target) for node in entry.fused.graph.nodes if node.op == "call_function"}
    assert "aten.clone.default" not in names and "fxround.pointwise.default" not in names


def test_a_copy_beside_what_it_copies_stays() -> None:
    def copies(x: Tensor) -> list[Tensor]:
        y, z = x * 2, x + 1
        return [y, y.clone(), torch.relu(y).clone(), z.reshape(-1).clone(), z.t().clone()]

    compiled = fxround.compile(copies, "stochastic")
    x = torch.randn(6, 5)
    assert sharing(both(compiled, x)[0]) == set()


def test_parts_of_a_copy_are_copied_one_by_one() -> None:
    def parts(x: Tensor) -> list[Tensor]:
        several = (x * 2).unflatten(1, (3, 4)).permute(1, 2, 0)
        a, b, c = several.contiguous()
        twice, whole = several.contiguous(), several.contiguous()
        return [a.reshape(2, -1) * 3, b, c.reshape(-1), twice[0].t() * twice[0].t(), twice[1], whole[2] + 1, whole]

    compiled = fxround.compile(parts, "stochastic")
    x = torch.randn(6, 12)
    _, _, entry = both(compiled, x)
    copies = [read_map(node) for node in entry.fused.graph.find_nodes(op="call_function", target=POINTWISE)]
    shapes = [tuple(copy.xs[0].meta["val"].shape) for copy in copies if copy is not None and copy.program == COPY]
    # Whole copies: one of which a part is read twice, and one that is a result.
    assert shapes.count((4, 6)) == 3 and shapes.count((3, 4, 6)) == 2


def test_no_kernel_of_pytorch_copies_within_attention() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    compiled = fxround.compile(layer, "stochastic", seed=1)
    x = torch.randn(3, 20, 32)
    with torch.no_grad():
        compiled(x)
        with torch.profiler.profile() as profile:
            compiled(x)
    called = {event.key for event in profile.key_averages()}
    assert called & {"aten::view", "aten::reshape"}
    assert not called & {"aten::copy_", "aten::clone", "aten::any", "aten::eq", "aten::logical_not"}


def test_a_graph_that_rounds_nothing_keeps_the_copies_of_pytorch() -> None:
    compiled = fxround.compile(lambda x: (x * 2).t().contiguous() + 1, "identity")
    with torch.no_grad():
        compiled(torch.randn(6, 12))
    targets = {node.target for node in compiled._called().fused.graph.nodes}
    assert torch.ops.aten.clone.default in targets and POINTWISE not in targets


def test_a_copy_keeps_every_bit_of_a_nan() -> None:
    x = torch.randn(70, 3, 50)
    x.view(torch.int32)[0, 0, :3] = torch.tensor([0x7F800001, 0x7FC12345, -0x3FFFF0], dtype=torch.int32)

    def turned(x: Tensor) -> Tensor:
        return x.permute(2, 0, 1).contiguous()

    assert torch.equal(fxround.compile(turned, "reproducible")(x).view(torch.int32), turned(x).view(torch.int32))
