"""Kernels of blocks: the same bits for every layout, in place, with threads, and in a compiled graph."""

from __future__ import annotations

import pytest
import torch
from rationals import contraction
from torch import Tensor, nn

import fxround
from fxround.eager import blocks as eager_blocks
from fxround.kernels.blocks import MAXIMA
from fxround.numerics.modes import Rounding
from fxround.policy import Policy, Rule
from fxround.runtime.cpu.blocks import BlockGeometry, geometry
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.run import run_blocks
from fxround.runtime.schedule.scaled import Scaled

CASES = [
    ("mxfp8", torch.float32),
    ("int8:channel", torch.bfloat16),
    ("nvfp4/toward_zero", torch.float64),
    ("scaled(e5m2;7,e8m0fnu,inverse)", torch.float32),
]


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def step_by_step(x: Tensor, form: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The result of the operators of a graph, one after the other."""
    with monkeypatch.context() as patch:
        patch.setattr(eager_blocks, "run_blocks", lambda *_: None)
        return fxround.round(x, form, dim=dim)


@pytest.mark.part(2)
@pytest.mark.parametrize("form, dtype", CASES)
def test_layouts_change_nothing(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns of whole and of shorter blocks, more than one item and strip, tensors in another order."""
    torch.manual_seed(0)
    for shape in [(70, 150), (5, 33, 3), (200, 64)]:
        for x in (
            torch.randn(shape).to(dtype),
            torch.randn(shape[::-1]).to(dtype).permute(*reversed(range(len(shape)))),
        ):
            for dim in range(len(shape)):
                expected = step_by_step(x, form, dim, monkeypatch)
                assert same(fxround.round(x, form, dim=dim), expected), (shape, dim)
                out = x.clone()
                assert same(fxround.round(out, form, dim=dim, out=out), expected), (shape, dim, "in place")


def test_threads_and_instruction_sets_change_nothing() -> None:
    x, threads = torch.randn(400, 333), torch.get_num_threads()
    for dim in (0, 1):
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            for isa in instruction_sets():
                with fxround.instruction_set(isa):
                    found.append(fxround.round(x, "mxfp8", dim=dim))
        torch.set_num_threads(threads)
        assert all(same(found[0], other) for other in found[1:])


def test_maxima_of_blocks() -> None:
    """The largest finite magnitudes, also of blocks without any: those that a plain loop finds."""
    x = torch.randn(7, 45)
    x[0], x[1, :20], x[2, 3], x[3] = 0.0, torch.nan, -torch.inf, -x[3].abs()
    for sizes in ([1, 16], [3, 1], [1, 0], [0, 1], [1, 1], [1, 200]):
        found = run_blocks(MAXIMA, None, x, sizes)
        rows, columns = ((size or n) for size, n in zip(sizes, x.shape, strict=True))
        parts = [[part.flatten() for part in row.split(columns, 1)] for row in x.split(rows, 0)]
        expected = torch.tensor([[max([0.0, *p[p.isfinite()].abs().tolist()]) for p in row] for row in parts])
        assert found is not None and torch.equal(found, expected), sizes


def test_geometry() -> None:
    assert geometry((4, 64), (1, 32)) == BlockGeometry(4, 64, 32, 1)
    assert geometry((64, 4), (32, 1)) == BlockGeometry(1, 64, 32, 4)
    assert geometry((2, 3, 4, 5), (1, 0, 0, 0)) == BlockGeometry(2, 60, 60, 1)
    assert geometry((2, 3, 4, 5), (1, 3, 1, 1)) == BlockGeometry(2, 3, 3, 20)
    assert geometry((2, 1, 40), (1, 1, 64)) == BlockGeometry(2, 40, 40, 1)
    # Tiles, blocks apart from each other, one block of a whole large tensor, and no elements.
    assert geometry((64, 64), (16, 16)) is None
    assert geometry((3, 4, 5), (0, 1, 0)) is None
    assert geometry((1 << 20,), (0,)) is None
    assert geometry((0, 4), (1, 2)) is None


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "dtype, carrier, step",
    [
        (torch.bfloat16, "bfloat16", "binary32"),
        (torch.float16, "binary16", "binary32"),
        (torch.float64, "binary64", "binary64"),
    ],
)
def test_the_scale_of_a_tensor_is_read_as_the_tensor_stores_it(dtype: torch.dtype, carrier: str, step: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 16, bias=False).to(dtype).eval()
    rule = Rule(operator="contraction", operands="nvfp4", rounding=carrier, accumulate=step)
    net = fxround.compile(model, Policy("blocks", (rule,)))
    rows = fxround.round(model.weight.detach(), "nvfp4").tolist()
    how = Rounding.parse(step), Rounding.parse(carrier)
    for seed in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
        columns = fxround.round(x, "nvfp4").tolist()
        want = torch.tensor([[contraction(a, b, *how) for b in rows] for a in columns], dtype=dtype)
        assert want.abs().max() > 0.1 and same(net(x), want)


def test_a_compiled_rounding_is_one_kernel_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(
        "blocks",
        (
            Rule(rounding="dtype", accumulate="binary32", optional=True),
            Rule(operator="contraction", operands="nvfp4"),
        ),
    )
    ran: list[bool] = []
    kept = Scaled.forward

    def counting(self: Scaled, *inputs: Tensor) -> list[Tensor]:
        found = kept(self, *inputs)
        ran.append(True)
        return found

    def results() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(300, 200)
        y = fxround.compile(model, policy)(torch.randn(500, 300))
        y.sum().backward()
        return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    monkeypatch.setattr(Scaled, "forward", counting)
    fast = results()
    assert len(ran) == 4
    monkeypatch.setattr(Scaled, "forward", lambda self, *inputs: self.whole(*inputs))
    assert all(same(a, b) for a, b in zip(fast, results(), strict=True))
