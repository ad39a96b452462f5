"""The schedule: the bits of the graph, memory that is used again, and results that nobody writes over."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.runtime import buffers

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


@pytest.mark.parametrize("seed", range(4))
def test_results_are_the_graphs_own_and_stay_so(seed: int) -> None:
    chosen = random.Random(seed)
    steps = [(chosen.randrange(99), chosen.randrange(99), chosen.randrange(99)) for _ in range(25)]
    results = [chosen.randrange(99) for _ in range(3)]
    compiled = fxround.compile(Moves(steps, results), "stochastic", strict=False)
    with torch.no_grad():
        first = compiled(*pair(1))
        copies = [value.clone() for value in first]
        entry = compiled._latest
        assert entry is not None
        plain = entry.lowered(*pair(1), compiled.rng)
        for seed in (2, 3):
            compiled(*pair(seed))
    for value, copy, want in zip(first, copies, plain, strict=True):
        assert torch.equal(value, copy) and torch.equal(value, want)


class Deep(nn.Module):
    """Forty sums over the rows, which no fusion joins: forty results of one size, of which two are alive at once."""

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
