"""Max pooling: the elements, indices and errors of PyTorch's operator, in a fraction of its time."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround import instruction_set
from fxround.runtime.cpu import pooling
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.cpu.pooling import run_max_pool2d
from fxround.runtime.target import CPU
from fxround.runtime.torch_ops import max_pool2d

OPERATOR = torch.ops.aten.max_pool2d_with_indices.default
WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}
Windows = tuple[Any, Any, Any, Any]


def chosen(plane: list[list[float]], windows: Windows, rows: int, columns: int) -> list[tuple[float, int]]:
    """The elements of windows by the definition: each in row-major order, where a larger element or a NaN is taken."""
    (kernel_h, kernel_w), (step_h, step_w), (padding_h, padding_w), (dilation_h, dilation_w) = windows
    made = []
    for i, j in itertools.product(range(rows), range(columns)):
        inside = [
            (y, x)
            for y in range(i * step_h - padding_h, i * step_h - padding_h + kernel_h * dilation_h, dilation_h)
            for x in range(j * step_w - padding_w, j * step_w - padding_w + kernel_w * dilation_w, dilation_w)
            if 0 <= y < len(plane) and 0 <= x < len(plane[0])
        ]
        value, place = -math.inf, inside[0]
        for y, x in inside:
            if plane[y][x] > value or math.isnan(plane[y][x]):
                value, place = plane[y][x], (y, x)
        made.append((value, place[0] * len(plane[0]) + place[1]))
    return made


def numbers(shape: tuple[int, ...], dtype: torch.dtype, number: int) -> Tensor:
    """Numbers of which many are equal, infinite, zeros of both signs or NaNs of several encodings."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randint(-3, 4, shape, generator=generator).to(dtype)
    if number % 4 == 1:
        x = torch.where(torch.rand(shape, generator=generator) < 0.1, math.nan, x)
        x = torch.where(torch.rand(shape, generator=generator) < 0.1, -x, x)
    if number % 4 == 2:
        x = torch.where(torch.rand(shape, generator=generator) < 0.7, -math.inf, x)
    return x * 0.0 if number % 4 == 3 else x


# Kernel, stride, padding, dilation.
WINDOWS: tuple[Windows, ...] = (
    ((2, 2), (2, 2), (0, 0), (1, 1)),
    ((3, 3), (2, 2), (1, 1), (1, 1)),
    ((5, 5), (1, 1), (2, 2), (1, 1)),
    ((1, 1), (2, 2), (0, 0), (1, 1)),
    ((3, 2), (1, 3), (1, 1), (2, 1)),
    ((2, 4), (3, 2), (1, 2), (1, 3)),
    ((4, 7), (2, 1), (2, 3), (1, 2)),
    ((2, 3), (2, 2), (0, 1), (1, 2)),
)
# Rows of a result with room for no vector, for one of each kind, and for several of which the last two overlap.
SHAPES = ((3, 100, 9, 7), (40, 11, 15), (2, 9, 16, 24), (2, 5, 12, 67), (1024, 5, 14))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_elements_and_indices_are_those_of_pytorch(windows: Windows, isa: str) -> None:
    for number, (shape, ceil_mode, dtype) in enumerate(itertools.product(SHAPES, (False, True), WORDS)):
        for kind in range(4):
            x = numbers(shape, dtype, 4 * number + kind)
            try:
                want = OPERATOR(x, *windows, ceil_mode)
            except RuntimeError:  # the result would have no element
                continue
            with instruction_set(isa):
                values, indices = run_max_pool2d(x, *windows, ceil_mode)
            assert torch.equal(values.view(WORDS[dtype]), want[0].view(WORDS[dtype])), (shape, ceil_mode, dtype)
            assert torch.equal(indices, want[1]), (shape, ceil_mode, dtype)
            assert values.stride() == want[0].stride() and indices.stride() == want[1].stride()


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_elements_are_those_of_the_definition(windows: Windows) -> None:
    for number, dtype in itertools.product(range(4), WORDS):
        x = numbers((200, 13, 21), dtype, number)
        assert in_code(x, windows)
        values, indices = run_max_pool2d(x, *windows)
        rows, columns = values.shape[-2:]
        for k in range(0, len(x), 67):
            want = chosen(x[k].tolist(), windows, rows, columns)
            expected = torch.tensor([value for value, _ in want], dtype=dtype)
            assert torch.equal(values[k].flatten().view(WORDS[dtype]), expected.view(WORDS[dtype]))
            assert indices[k].flatten().tolist() == [place for _, place in want]


def in_code(x: Tensor, windows: Windows = WINDOWS[0], ceil_mode: bool = False) -> bool:
    return pooling._call_for(x, windows, ceil_mode) is not None


def test_the_code_reads_what_it_is_made_for() -> None:
    x = torch.randn(16, 8, 16, 16)
    for other in (x, x[0].repeat(4, 1, 1), x.double(), x[::1, 2:5].contiguous(), x[3:]):
        assert in_code(other)
    for other in (
        x.bfloat16(),
        x.contiguous(memory_format=torch.channels_last),
        x[:, ::2],
        x[:1, :1],  # few elements
        torch.complex(x, x).conj().imag,
        torch.randint(9, x.shape),
        x[None],
        x.to("meta"),
        x[:0],
    ):
        assert not in_code(other)
    assert not in_code(x, ((2, 17), (2, 2), (1, 1), (1, 1)))


@pytest.mark.parametrize("kind", ["channels_last", "bfloat16", "strided", "empty", "negative"])
def test_what_it_does_not_read_is_left_to_pytorch(kind: str) -> None:
    x = torch.randn(16, 8, 16, 16)
    other = {
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "bfloat16": x.bfloat16(),
        "strided": x[:, ::2],
        "empty": x[:0],
        "negative": torch.complex(x, x).conj().imag,
    }[kind]
    for got, want in zip(run_max_pool2d(other, [3, 3], [2, 2], [1, 1]), OPERATOR(other, 3, 2, 1), strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize("shape", [(64, 1, 28, 28), (1, 28, 28), (400, 1, 28, 28), (2048, 3, 2, 2)])
def test_strides_are_those_of_pytorch_where_a_size_is_one(shape: tuple[int, ...]) -> None:
    """Of one channel, or one pixel, a tensor is row-major and has channels last at once."""
    x = torch.randn(shape)
    kinds = [x]
    if len(shape) == 4:
        kinds.append(torch.empty(shape, memory_format=torch.channels_last).copy_(x))
    compiled = fxround.compile(lambda x: F.max_pool2d(x, 2, return_indices=True), "identity")
    for operand in kinds:
        want = OPERATOR(operand, 2)
        with torch.no_grad():
            for got in (run_max_pool2d(operand, 2), *(compiled(operand) for _ in range(4))):
                for a, b in zip(got, want, strict=True):
                    assert torch.equal(a, b) and a.stride() == b.stride()


def test_the_default_device_is_not_asked() -> None:
    x, model = torch.randn(16, 8, 16, 16), nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.Softmax(-1))
    compiled = fxround.compile(model, "reproducible")
    with torch.no_grad():
        want = compiled(x)
        torch.set_default_device("meta")
        try:
            results = [compiled(x) for _ in range(3)]
        finally:
            torch.set_default_device(None)
    assert all(torch.equal(result, want) for result in results)


def test_sizes_are_as_those_of_pytorch() -> None:
    x = torch.randn(16, 8, 16, 16)
    for arguments in ((3,), ([3],), ([3, 3], []), ([3, 3], 2, [1]), ([2, 3], [1, 2], 1, [1, 1], True)):
        for got, want in zip(run_max_pool2d(x, *arguments), OPERATOR(x, *arguments), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("windows", [(3, 1, 2), ([40, 40],), (0,), ([2, 2, 2],), (2, 0), (2, 2, 0, 0), (2, 2, -1)])
def test_errors_are_those_of_pytorch(windows: Any) -> None:
    x = torch.randn(16, 8, 16, 16)
    with pytest.raises(RuntimeError) as expected:
        OPERATOR(x, *windows)
    with pytest.raises(RuntimeError) as raised:
        run_max_pool2d(x, *windows)
    assert str(raised.value) == str(expected.value)


def test_threads_choose_the_same_elements() -> None:
    x = torch.randn(64, 16, 32, 32)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        got = run_max_pool2d(x, [2, 2])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, got, OPERATOR(x, [2, 2])))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x).relu()
        pooled, places = F.max_pool2d(y, 3, 2, 1, return_indices=True)
        return F.max_pool2d(pooled, 2) * 2, places


@pytest.mark.parametrize("policy", ["reproducible", "identity"])
@pytest.mark.parametrize("batch", [64, 512, 1])
def test_calls_run_it_unless_the_result_is_small(batch: int, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return run_max_pool2d(*arguments)

    monkeypatch.setattr(type(CPU), "max_pool2d", staticmethod(counted))
    x = torch.randn(batch, 4, 28, 28)
    compiled = fxround.compile(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), policy)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        calls.clear()
        assert torch.equal(compiled(x), F.max_pool2d(x.relu(), 2))
    assert len(calls) == (batch > 1)


@pytest.mark.parametrize("policy", ["reproducible", "stochastic", "identity"])
def test_a_schedule_calls_it(policy: str) -> None:
    model, x = Pooled().eval(), torch.randn(8, 3, 32, 32)
    compiled = fxround.compile(model, policy)
    with torch.no_grad():
        results = [compiled(x) for _ in range(3)]
        entry = compiled._called()
        assert entry is not None
        assert len(entry.running.graph.find_nodes(op="call_function", target=max_pool2d)) == 2
        want = dict(entry.steps([x], compiled.rng))["output"]
    for result in results:
        assert all(map(torch.equal, result, want))


def test_gradients_go_to_the_chosen_elements() -> None:
    model, x = nn.Sequential(nn.MaxPool2d(3, 2, 1)), torch.randn(8, 8, 16, 16, requires_grad=True)
    compiled = fxround.compile(model, "reproducible")
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    _, indices = OPERATOR(x.detach(), 3, 2, 1)
    want = torch.zeros(8, 8, 256).scatter_add_(2, indices.flatten(2), torch.ones(8, 8, 64)).view_as(x)
    assert torch.equal(got, want)  # sums of up to four ones are exact
