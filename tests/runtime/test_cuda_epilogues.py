"""Contractions and the maps that follow them as one CUDA kernel on the host: the bits of the CPU's two kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from cuda_host import HostLauncher
from torch import Tensor, fx

from benchmarks.cuda import texts_of
from fxround.runtime.cuda import contraction, epilogues
from fxround.runtime.cuda.contraction import Tile
from fxround.runtime.cuda.launcher import launching
from fxround.runtime.schedule import schedule
from fxround.runtime.schedule.epilogues import Epilogue

RNE = "binary32/nearest_even/inf"
CHUNKS = "bfloat16 chunk=8 combine=binary32"
RNG = torch.tensor([7, 2])
# x0: the contraction's result, x1: broadcast, x2: of its shape.
BIAS = f"t0 = add(x0, x1) @ {RNE}; t1 = relu(t0) @ exact; return t1", "f32"
DRAWS = (
    f"t0 = mul(x0, x1) @ binary32/stochastic/inf; t1 = exp(t0) @ {RNE}; t2 = add(t1, x2) @ binary32/up_down/inf; "
    "return t0, t2",
    "f32 f32",
)
NARROW = f"t0 = add(x0, x1) @ bfloat16/stochastic/inf; t1 = mul(t0, x0) @ {RNE}; return t0, t1", "bf16 f32"


def numbers(seed: int, *shape: int) -> Tensor:
    """Normal deviates, and a few that are subnormal, infinite or no number."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    places = torch.arange(1, 5) * (x.numel() // 5)
    x.view(-1)[places] = torch.tensor([1e-40, torch.inf, torch.nan, -0.0])
    return x


@dataclass(frozen=True)
class Case:
    """A contraction, how it accumulates, the program after it, and the operands of both.

    rest        the arguments of the contraction between its operands and its accumulator
    view        a shape in which the program sees the result
    kept        whether the contraction's result is a result of the graph too
    side        the side of the tile, if that is not the launch's own choice
    """

    target: Any
    operands: tuple[Tensor, ...]
    accumulate: str
    program: tuple[str, str]
    others: tuple[Tensor, ...]
    rest: tuple[Any, ...] = ()
    view: tuple[int, ...] = ()
    kept: bool = False
    side: int = 0
    single: bool = False

    def graph(self) -> fx.GraphModule:
        graph = fx.Graph()
        given = [graph.placeholder(f"a{i}") for i in range(len(self.operands))]
        others = [graph.placeholder(f"b{i}") for i in range(len(self.others))]
        rng = graph.placeholder("rng")
        node = graph.call_function(self.target, (*given, *self.rest, self.accumulate, RNE, rng, 3))
        read = graph.call_function(torch.ops.aten.reshape.default, (node, list(self.view))) if self.view else node
        program, results = self.program
        arguments = ([read, *others], program, results, rng, [5, 4, 9])
        fused = graph.call_function(torch.ops.fxround.fused.default, arguments)
        taken = [graph.call_function(operator.getitem, (fused, i)) for i in range(len(results.split()))]
        graph.output([*taken, *([node] if self.kept else [])])
        return fx.GraphModule({}, graph)


MATMUL, CONVOLUTION = torch.ops.fxround.matmul.default, torch.ops.fxround.convolution.default
INPUT_GRADIENT = torch.ops.fxround.convolution_input_gradient.default
WEIGHT_GRADIENT = torch.ops.fxround.convolution_weight_gradient.default
PLAIN = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
GROUPS = ([2, 1], [1, 0], [1, 2], False, [0, 0], 3)
TRANSPOSED = ([2, 2], [0, 1], [1, 1], True, [1, 0], 2)
IMAGES, WEIGHT = numbers(1, 3, 4, 7, 9), numbers(2, 6, 4, 3, 3)
WIDE = numbers(3, 2, 6, 40, 30), numbers(4, 6, 2, 3, 2)
CASES = {
    "product": Case(MATMUL, (numbers(1, 37, 50), numbers(2, 50, 19)), RNE, BIAS, (numbers(3, 19),)),
    "product, kept": Case(
        MATMUL,
        (numbers(1, 130, 21), numbers(2, 40, 21).t()),
        "binary32/stochastic",
        DRAWS,
        (numbers(3, 130, 1), numbers(4, 40, 130).t()),
        kept=True,
        side=4,
    ),
    "largest tile, view": Case(
        MATMUL,
        (numbers(1, 140, 21), numbers(2, 21, 132)),
        RNE,
        DRAWS,
        (numbers(3, 20, 1, 1), numbers(4, 7, 20, 132).permute(1, 0, 2)),
        view=(20, 7, 132),
        side=8,
    ),
    "batch": Case(
        MATMUL,
        (numbers(1, 3, 18, 20), numbers(2, 3, 20, 17)),
        CHUNKS,
        NARROW,
        (numbers(3, 3, 1, 17),),
        side=2,
    ),
    "binary32 steps": Case(
        MATMUL,
        (numbers(1, 33, 70), numbers(2, 70, 20)),
        "binary32/stochastic",
        NARROW,
        (torch.tensor(1.5),),
        side=2,
        single=True,
    ),
    "convolution": Case(CONVOLUTION, WIDE, "binary32/up_down", BIAS, (numbers(5, 1, 6, 1, 1),), GROUPS),
    "images together": Case(
        CONVOLUTION, (IMAGES, WEIGHT), "bfloat16", DRAWS, (numbers(3, 6, 1, 1), numbers(4, 3, 6, 7, 9)), PLAIN
    ),
    "transposed": Case(
        CONVOLUTION, (IMAGES, numbers(2, 4, 3, 2, 3)), RNE, BIAS, (numbers(3, 6, 1, 1),), TRANSPOSED, kept=True
    ),
    "input gradient": Case(
        INPUT_GRADIENT,
        (numbers(1, 3, 6, 7, 9), WEIGHT),
        "binary32/stochastic",
        BIAS,
        (numbers(3, 3, 4, 7, 9),),
        ([3, 4, 7, 9], *PLAIN),
    ),
    "weight gradient": Case(
        WEIGHT_GRADIENT,
        (numbers(1, 3, 6, 7, 9), IMAGES),
        CHUNKS,
        NARROW,
        (numbers(3, 6, 4, 3, 3),),
        ([6, 4, 3, 3], *PLAIN),
        view=(6, 4, 3, 3),
    ),
}


@pytest.fixture(scope="module")
def host(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> HostLauncher:
    found = HostLauncher(tmp_path_factory.mktemp("epilogues"), compiler, seed=5)
    # A block computes several tiles one after the other.
    found.most_blocks = 3
    return found


def scheduled(case: Case, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Tensor]]:
    """The case with its tile, as a schedule that joins both kernels."""
    if case.side:
        monkeypatch.setattr(contraction, "_tile", lambda product, *sizes: Tile(product.kernel, case.side))
    joined = schedule(case.graph())
    assert sum(isinstance(m, Epilogue) for m in joined.modules()) == 1
    return partial(joined, *case.operands, *case.others, RNG)


@pytest.fixture(scope="module")
def prepared(host: HostLauncher) -> HostLauncher:
    """The launcher with the texts of all cases."""
    texts = []
    for case in CASES.values():
        with pytest.MonkeyPatch.context() as patch:
            texts += texts_of(scheduled(case, patch), slow_binary64=case.single)
    host.compile(texts)
    return host


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and one.is_contiguous()
        kind = {2: torch.int16, 4: torch.int32}[one.itemsize]
        assert torch.equal(one.view(kind), other.contiguous().view(kind))


@pytest.mark.part(4)
@pytest.mark.parametrize("name", CASES)
def test_one_kernel_has_the_bits_of_two_on_the_cpu(
    prepared: HostLauncher, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    want = case.graph()(*case.operands, *case.others, RNG)
    run = scheduled(case, monkeypatch)
    monkeypatch.setattr(prepared, "slow_binary64", case.single)
    prepared.launched.clear()
    with launching(prepared):
        got = run()
        again = run()
    same(got, want)
    same(again, want)
    assert len(prepared.launched) == 2 and all("_then_" in text for text in prepared.launched)
    assert ("_kept" in prepared.launched[0]) == case.kept and ("_single" in prepared.launched[0]) == case.single


def test_a_long_map_is_a_kernel_of_its_own(prepared: HostLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["product"]
    run = scheduled(case, monkeypatch)
    monkeypatch.setattr(epilogues, "_LONGEST", 1)
    prepared.launched.clear()
    with launching(prepared):
        got = run()
    same(got, case.graph()(*case.operands, *case.others, RNG))
    assert [text.split("_")[0] for text in prepared.launched] == ["contract", "map"]
    assert "_then_" not in prepared.launched[0]
