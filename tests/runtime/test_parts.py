"""The elements of a part of a result draw by their numbers in the whole: a part has the bits of the whole there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxround.graph.dialect import AddProcesses, StateOfPart
from fxround.runtime.cpu.pointwise import run_kernel
from fxround.runtime.draw import NO_KEY, Draw

OPS: Any = torch.ops.fxround
SR, UP_DOWN, FEW, RNE = (
    "binary32/stochastic/inf",
    "binary32/up_down/inf",
    "bfloat16/stochastic:11/inf",
    "binary32/nearest_even/inf",
)


def rng() -> Tensor:
    return torch.tensor([7, 3])


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def state(shape: Any, dim: int, processes: int, rank: int, shards: int = 1) -> Tensor:
    """The random state of one process, which has a block of a dimension; shape: of its part."""
    result: Tensor = OPS.state_of_part(rng(), list(shape[dim:]), rank, 1, processes, shards, 0)
    return result


def encodings(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def check(whole: Tensor, dim: int, part: Any, processes: int = 2, shards: int = 1) -> None:
    """Compare the parts, by a function of the rank and its random state, with those of the whole."""
    for rank, expected in enumerate(whole.chunk(processes, dim)):
        made = part(rank, state(expected.shape, dim, processes, rank, shards))
        assert torch.equal(encodings(made), encodings(expected)), (dim, rank)


# Widths of 32, 16 and 1 random bits; runs of 35, 7 and other numbers of elements, which are no whole blocks.
@pytest.mark.parametrize("rounding", [SR, FEW, UP_DOWN])
def test_maps(rounding: str) -> None:
    program = f"t0 = mul(x0, x1) @ {rounding}; t1 = add(t0, x1) @ {rounding}"
    x, y = normal(6, 10, 14), normal(14)
    whole = OPS.pointwise([x, y], program, torch.float32, rng(), 4)
    for dim in (0, 1):
        parts = x.chunk(2, dim)
        check(whole, dim, lambda r, s, parts=parts: OPS.pointwise([parts[r], y], program, torch.float32, s, 4))
    parts, others = x.chunk(2, 2), y.chunk(2)
    check(whole, 2, lambda r, s: OPS.pointwise([parts[r], others[r]], program, torch.float32, s, 4))


@pytest.mark.part(3)
@pytest.mark.parametrize("accumulate", [SR, f"{SR} shards=4", f"{UP_DOWN} shards=4", FEW])
@pytest.mark.parametrize("sizes", [(4, 9, 8), (40, 200, 48)])
def test_products(accumulate: str, sizes: tuple[int, int, int]) -> None:
    rows, length, columns = sizes
    a, b, shards = normal(rows, length), normal(length, columns), 4 if "shards" in accumulate else 1
    whole = OPS.matmul(a, b, accumulate, RNE, rng(), 6)
    up, left = a.chunk(2, 0), b.chunk(2, 1)
    check(whole, 0, lambda r, s: OPS.matmul(up[r], b, accumulate, RNE, s, 6), shards=shards)
    check(whole, 1, lambda r, s: OPS.matmul(a, left[r].contiguous(), accumulate, RNE, s, 6), shards=shards)


@pytest.mark.part(3)
@pytest.mark.parametrize("order", ["lanes:16", "sequential", "shards:4/lanes:2", "exact"])
@pytest.mark.parametrize("reduced", [0, 1, 2])
def test_sums(order: str, reduced: int) -> None:
    x, step = normal(4, 18, 30), SR if order != "exact" else FEW
    whole = OPS.sum(x, [reduced], True, order, step, RNE, rng(), 8)
    shards = 4 if "shards" in order else 1
    for dim in {0, 1, 2} - {reduced}:
        parts = x.chunk(2, dim)
        check(
            whole,
            dim,
            lambda r, s, parts=parts: OPS.sum(parts[r], [reduced], True, order, step, RNE, s, 8),
            shards=shards,
        )


def test_prefixes_and_scatters() -> None:
    x = normal(4, 6, 30)
    whole = OPS.cumsum(x, 2, SR, RNE, rng(), 8)
    for rank, part in enumerate(x.chunk(2, 1)):
        made = OPS.cumsum(part, 2, SR, RNE, OPS.state_of_part(rng(), [3], rank, 1, 2, 1, 0), 8)
        assert torch.equal(made, whole.chunk(2, 1)[rank])
    rows, index = normal(50, 30), [torch.arange(50) % 7]
    whole = OPS.index_put(torch.zeros(8, 30), index, rows, SR, rng(), 5)
    for rank, part in enumerate(rows.chunk(2, 1)):
        own = OPS.state_of_part(rng(), [15], rank, 1, 2, 1, 0)
        assert torch.equal(OPS.index_put(torch.zeros(8, 15), index, part, SR, own, 5), whole.chunk(2, 1)[rank])


def test_a_convolution() -> None:
    x, w = normal(2, 3, 9, 8), normal(8, 3, 3, 3)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, FEW, RNE)
    whole = OPS.convolution(x, w, *how, rng(), 3)
    parts = w.chunk(2)
    check(whole, 1, lambda r, s: OPS.convolution(x, parts[r], *how, s, 3))


def added(parts: list[Tensor], dtype: torch.dtype, order: str, accumulate: str, rounding: str, length: int) -> Tensor:
    """The sum of the processes by its kernel, without a group."""
    call = AddProcesses(parts[0], "group", len(parts), dtype, order, accumulate, rounding, length, rng(), 6)
    kernel = call.kernel(call.loads())
    if not kernel.draws:
        return run_kernel(kernel, parts, NO_KEY)[0]
    draw = Draw.of(OPS.state_of_part(rng(), [], 0, 1, 1, 8, 0), 6)
    return run_kernel(draw.of_part(kernel), parts, draw.key())[0]


@pytest.mark.parametrize("processes", [2, 8])
@pytest.mark.parametrize("rounding", [RNE, "bfloat16/stochastic/inf"])
@pytest.mark.parametrize("step", [SR, UP_DOWN, "binary32/nearest_even/inf", "binary16/stochastic_equal/inf"])
def test_processes_go_on_with_a_product(step: str, rounding: str, processes: int) -> None:
    a, b = normal(5, 88), normal(88, 19)
    whole = OPS.matmul(a, b, f"{step} shards=8", rounding, rng(), 6)
    own = 8 // processes
    parts = [
        OPS.matmul(
            a.chunk(processes, 1)[rank],
            b.chunk(processes, 0)[rank],
            f"{step} shards={own}" if own > 1 else step,
            "unfinished",
            OPS.state_of_part(rng(), [], 0, 1, 1, 8, rank * own),
            6,
        )
        for rank in range(processes)
    ]
    made = added(parts, torch.float32, "", f"{step} shards=8", rounding, 88 // processes)
    assert torch.equal(encodings(made), encodings(whole))


@pytest.mark.parametrize("chains", ["lanes:16", "sequential"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processes_go_on_with_a_sum(dtype: torch.dtype, chains: str) -> None:
    x, rounding = normal(3, 48, 5).to(dtype), "bfloat16/stochastic/inf"
    whole = OPS.sum(x, [1], False, f"shards:8/{chains}", SR, rounding, rng(), 6)
    parts = [
        OPS.sum(
            part,
            [1],
            False,
            f"shards:4/{chains}",
            SR,
            "unfinished",
            OPS.state_of_part(rng(), [], 0, 1, 1, 8, 4 * rank),
            6,
        )
        for rank, part in enumerate(x.chunk(2, 1))
    ]
    made = added(parts, dtype, f"shards:8/{chains}", SR, rounding, 24)
    assert torch.equal(encodings(made), encodings(whole))


def test_bad_parts() -> None:
    x = normal(4).double()
    with pytest.raises(ValueError, match="8 shards, which 3 processes cannot share"):
        added([x] * 3, torch.float32, "", f"{SR} shards=8", RNE, 5)
    with pytest.raises(ValueError, match=r"accumulators of .* are stored as f64, got f32"):
        added([x.float()] * 2, torch.float32, "", f"{SR} shards=8", RNE, 5)
    with pytest.raises(ValueError, match="needs the random state of a part"):
        OPS.add_processes(x, "one", 1, torch.float32, "", f"{SR} shards=8", "bfloat16/stochastic/inf", 5, rng(), 6)
    with pytest.raises(ValueError, match="an exact sum has no accumulator"):
        OPS.sum(x, [0], False, "exact", FEW, "unfinished", rng(), 6)
    with pytest.raises(ValueError, match="the random state is"):
        OPS.state_of_part(torch.zeros(3, dtype=torch.int64), [], 0, 1, 1, 1, 0)
    assert StateOfPart(rng(), [0, 5], 1, 1, 2, 1, 0).part.chunk == 1  # a divisor, also of a part without elements
