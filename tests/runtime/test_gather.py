"""Gathers along the last dimension: the elements and the errors of PyTorch's operator, and fewer steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxround
from fxround import instruction_set
from fxround.runtime.call_programs import rounds_nothing
from fxround.runtime.cpu import gather as gathering
from fxround.runtime.cpu.gather import run_gather
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.torch_ops import gather

LARGE = (1 << 14) + 5


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def indices(size: int, *shape: int) -> Tensor:
    return torch.randint(size, shape)


def operands() -> dict[str, tuple[Tensor, Tensor]]:
    """What the code reads, and what it leaves to PyTorch."""
    x, index = numbers(2, 3, 40), indices(40, 2, 3, LARGE)
    return {
        "rows": (x, index),
        "one row": (x[0, 0], index[0, 0]),
        "shared indices": (x, indices(40, 2, 1, LARGE).expand(-1, 3, -1)),
        "shared rows": (numbers(1, 1, 40).expand(2, 3, -1), index),
        "fewer indices than rows": (x, index[:1, :2]),
        "exchanged dimensions": (x.transpose(0, 1), index.transpose(0, 1)),
        "short rows": (numbers(LARGE, 5), indices(5, LARGE, 3)),
        "16 bits": (x.bfloat16(), index),
        "64 bits": (x.double(), index),
        "integers": (torch.arange(40), index[0, 0]),
        "bytes": (torch.arange(40).to(torch.uint8), index[0, 0]),
        "strided elements": (numbers(2, 3, 80)[..., ::2], index),
        "strided indices": (x, indices(40, 2, 3, 2 * LARGE)[..., ::2]),
        "a negative view": (torch.complex(x, x).conj().imag, index),
        "complex numbers": (torch.complex(x, x), index),
        "few indices": (x, index[..., :9]),
        "no index": (x, index[..., :0]),
        "neither": (x[..., :0], index[..., :0]),
    }


def in_code(x: Tensor, index: Tensor) -> bool:
    return gathering._call_for(x, x.dim() - 1, index) is not None


@pytest.mark.parametrize("isa", instruction_sets())
def test_elements_are_those_that_pytorch_moves(isa: str) -> None:
    for name, (x, index) in operands().items():
        with instruction_set(isa):
            got = run_gather(x, x.dim() - 1, index)
            assert torch.equal(got, run_gather(x, -1, index)), name
        want = x.gather(-1, index)
        assert got.shape == want.shape and got.dtype == want.dtype, name
        assert torch.equal(got, want), name


def test_the_code_reads_what_it_is_made_for() -> None:
    known = {name for name, (x, index) in operands().items() if in_code(x, index)}
    assert known == {
        *("rows", "one row", "shared indices", "shared rows", "fewer indices than rows", "exchanged dimensions"),
        *("short rows", "16 bits", "64 bits", "integers"),
    }


def test_bits_of_nans_are_moved() -> None:
    x = torch.tensor([0x7F800001, 0x7FC12345, -1, 0x7FA00000], dtype=torch.int32).view(torch.float32)
    index = indices(4, LARGE)
    assert torch.equal(run_gather(x, 0, index).view(torch.int32), x.view(torch.int32).gather(0, index))


def test_threads_move_the_same_elements() -> None:
    x, index = numbers(3, 50), indices(50, 3, 1 << 17)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(run_gather(x, 1, index), x.gather(1, index))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("place", [0, 8, LARGE - 1])
@pytest.mark.parametrize("wrong", [40, -1, 1 << 40, -(1 << 62)])
def test_an_index_outside_is_an_error(wrong: int, place: int, isa: str) -> None:
    x, index = numbers(2, 40), indices(40, 2, LARGE)
    index[1, place] = wrong
    with instruction_set(isa), pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        run_gather(x, 1, index)


def test_shapes_that_do_not_fit_are_errors() -> None:
    with pytest.raises(RuntimeError, match="Size does not match"):
        run_gather(numbers(2, 40), 1, indices(40, 3, LARGE))
    with pytest.raises(RuntimeError, match="same number of dimensions"):
        run_gather(numbers(2, 40), 1, indices(40, LARGE))
    with pytest.raises(IndexError, match="out of range"):
        run_gather(numbers(2, 40), 2, indices(40, 2, LARGE))


def test_a_schedule_calls_it() -> None:
    x, grid = numbers(1, 4, 8, 8), torch.rand(1, 64, 64, 2) * 2.4 - 1.2
    compiled = fxround.compile(lambda a, b: F.grid_sample(a, b, "bicubic", align_corners=False), "reproducible")
    with torch.no_grad():
        compiled(x, grid)
    entry = compiled._called()
    assert entry is not None
    assert len(entry.running.graph.find_nodes(op="call_function", target=gather)) == 16


def test_a_graph_that_moves_values_rounds_nothing() -> None:
    """Under ``identity`` it is planned as one of PyTorch's operators alone, with their results."""
    x, index = numbers(64, 400), indices(400, 64, 300)
    compiled = fxround.compile(lambda a, i: a.gather(1, i) * 2, "identity")
    with torch.no_grad():
        results = [compiled(x, index) for _ in range(4)]
    entry = compiled._called()
    assert entry is not None and rounds_nothing(entry.fused)
    for result in results:
        assert torch.equal(result, x.gather(1, index) * 2)
