"""Chains over rows: a few rows at a time, and the bits of the whole run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.runtime import buffers
from fxround.runtime.cpu import row_chains as cpu_chains
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.schedule import row_chains
from fxround.runtime.schedule.row_chains import RowsPart


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def chains(compiled: fxround.RoundedModule) -> list[RowsPart]:
    return [m for m in compiled._called().running.modules() if isinstance(m, RowsPart)]


def normalized(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * 0.5 + x.mean(-1, keepdim=True)


class Tempered(nn.Module):
    """A softmax with a learnt temperature: a parameter of no dimensions is among a chain's operands."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * self.scale, -1) * self.scale


CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "layer_norm": (nn.LayerNorm(192), (2100, 192)),
    "softmax": (nn.Softmax(-1), (3, 5, 160, 260)),
    "log_softmax": (nn.LogSoftmax(-1), (2200, 250)),
    "temperature": (Tempered(), (2200, 250)),
    "two statistics": (Applied(normalized), (4300, 130)),
    "softmax of blocks": (nn.Softmax(-1), (3, 5, 160, 256)),
    "temperature of blocks": (Tempered(), (2200, 256)),
    "two statistics of blocks": (Applied(normalized), (4300, 128)),
}


@pytest.mark.part(3)
@pytest.mark.parametrize("policy", ["stochastic", "reproducible"])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_one_kernel_after_the_other(name: str, policy: str) -> None:
    model, shape = CASES[name]
    compiled = fxround.compile(model, policy, seed=4)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    with torch.no_grad():
        want = fxround.compile(model, policy, seed=4, fuse=False)
        want(x)
        (plain,) = want._called().lowered(*want._called()._inputs([x]), want.rng)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(compiled(x), plain)
    torch.set_num_threads(threads)
    assert chains(compiled) and all(plan is not None for chain in chains(compiled) for plan in chain.plans.values())


class Tables(nn.Module):
    """Rows with vectors of all rows, numbers of each row that a caller gives, and numbers that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.randn(192)), nn.Parameter(torch.randn(192))

    def forward(self, x: Tensor, y: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        mean = (x * number).mean(-1, keepdim=True)
        centred = (x - mean) * self.gain
        largest = centred.amax(-1, keepdim=True)
        return torch.exp(centred - largest) + y * self.shift, mean, largest * 0.75


@pytest.mark.part(11)
@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("policy", ["stochastic", "reproducible", "up_down"])
def test_one_kernel_walks_rows_of_blocks_with_the_bits_of_all(
    isa: str, policy: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of an operand may be apart, as those of a slice are, or the same for all."""
    monkeypatch.setattr(cpu_chains, "_one_after_the_other", None)
    generator = torch.Generator().manual_seed(7)
    x, y, number = (torch.randn(*shape, generator=generator) for shape in ((2, 517, 200), (1, 192), (2, 517, 1)))
    x[0, 3, 5], x[0, 4, 7], x[1, 2], y[0, 9] = torch.nan, torch.inf, -0.0, 0.0
    model = Tables().to(dtype).eval()
    inputs = x.to(dtype)[:, :, 8:], y.to(dtype), number.to(dtype)
    compiled = fxround.compile(model, policy, seed=9)
    threads = torch.get_num_threads()
    with torch.no_grad(), fxround.instruction_set(isa):
        plain = fxround.compile(model, policy, seed=9, fuse=False)
        plain(*inputs)
        entry = plain._called()
        want = entry.lowered(*entry._inputs(list(inputs)), plain.rng)
        for count in (1, 2):
            torch.set_num_threads(count)
            for value, other in zip(compiled(*inputs), want, strict=True):
                assert torch.equal(value.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    torch.set_num_threads(threads)
    plans = [plan for chain in chains(compiled) for plan in chain.plans.values()]
    assert plans and all(plan is not None for plan in plans)


@pytest.mark.parametrize("x", [torch.randn(3, 64), torch.randn(192, 700).t(), torch.zeros(0, 192), torch.ones(1, 192)])
def test_what_gains_nothing_runs_as_the_graph_says(x: Tensor) -> None:
    model = Applied(normalized)
    compiled = fxround.compile(model, "stochastic")
    with torch.no_grad():
        result = compiled(x)
        (plain,) = compiled._called().lowered(*compiled._called()._inputs([x]), compiled.rng)
    assert torch.equal(result, plain)
    assert all(plan is None for chain in chains(compiled) for plan in chain.plans.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [5, 31, 256])
def test_the_maximum_of_a_softmax_is_a_part_of_its_chain(length: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(9000 // length * 64, length, generator=generator).to(dtype)
    x[1], x[2], x[3], x[4, -1], x[5, 0] = -torch.inf, torch.inf, torch.nan, torch.nan, -torch.inf
    x[6], x[7], x[8], x[8, 3] = 0.0, -0.0, -0.0, 0.0
    compiled = fxround.compile(nn.Softmax(-1), "stochastic", seed=2)
    with torch.no_grad():
        result = compiled(x)
        (plain,) = compiled._called().lowered(*compiled._called()._inputs([x]), compiled.rng)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(result.view(bits), plain.view(bits))
    (chain,) = chains(compiled)
    assert all(plan is not None for plan in chain.plans.values())
    assert None in {stage.call for stage in chain.chain.stages}, "the maximum is no stage"


class Attention(nn.Module):
    """Softmax weights of a product's rows; kept: whether the product is also read after them."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        scores = (a @ b).reshape(4, 8, 120, 130)
        weights = (scores - scores.mean(-1, keepdim=True)) * 0.5
        return weights.reshape(32, 120, 130) @ (scores.reshape(32, 120, 130).mT if self.kept else b.mT)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("policy", ["stochastic", "reproducible"])
def test_a_result_lies_where_a_dead_input_was(kept: bool, policy: str) -> None:
    a, b = torch.randn(32, 120, 16), torch.randn(32, 16, 130)
    compiled = fxround.compile(Attention(kept), policy, seed=4)
    threads = torch.get_num_threads()
    with torch.no_grad():
        compiled(a, b)
        entry = compiled._called()
        (want,) = entry.lowered(a, b, compiled.rng)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            buffers.forget()
            assert torch.equal(compiled(a, b), want)
            scores = 4 * 32 * 120 * 130
            assert (buffers._POOL.peak >= 2 * scores) is kept
    torch.set_num_threads(threads)
    (chain,) = chains(compiled)
    assert all(plan is not None and bool(plan.over) is not kept for plan in chain.plans.values())


@pytest.mark.part(2)
@pytest.mark.parametrize("longest", [3, 6, 9, 11])
def test_a_chain_that_ends_between_a_list_of_results_and_its_parts(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain has a longest length. It took a list of another operation's results for a tensor."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Softmax(-1), nn.LayerNorm(8), nn.GELU())
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def found() -> tuple[Tensor, ...]:
        y = fxround.compile(model, "reproducible")(x)
        return y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])

    wanted = found()
    monkeypatch.setattr(row_chains, "_LONGEST", longest)
    for value, other in zip(found(), wanted, strict=True):
        assert torch.equal(value, other)
