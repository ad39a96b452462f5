"""Padding: every layout and dtype against PyTorch's, bit for bit, with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fxround.runtime.cpu import padding
from fxround.runtime.cpu.padding import pad

CASES = {
    "image": ((2, 3, 5, 7), (0, 0, 1, 2), (0, 0, 3, 0)),
    "volume": ((2, 1, 3, 4, 2), (0, 0, 1, 0, 2), (0, 0, 0, 1, 1)),
    "signal": ((3, 2, 9), (0, 0, 4), (0, 0, 0)),
    "vector": ((5,), (2,), (1,)),
    "no rows": ((0, 2, 3), (0, 0, 1), (0, 0, 1)),
    "no columns": ((2, 2, 0), (0, 1, 2), (0, 0, 1)),
    "nothing inside": ((2, 0, 3), (0, 1, 1), (0, 2, 0)),
    "long": ((1, 2, 300, 400), (0, 0, 1, 1), (0, 0, 1, 1)),
}
LAYOUTS = {
    "row-major": lambda x: x,
    "reversed": lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
    "every second": lambda x: torch.stack([x, x], -1)[..., 0],
    "negative": lambda x: torch._neg_view(-x),
}


@pytest.fixture(params=[1, 2])
def number(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(padding, "_ENOUGH", 1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("number")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_zeros_surround_the_operand(case: str, layout: str, dtype: torch.dtype) -> None:
    shape, before, after = CASES[case]
    x: Tensor = LAYOUTS[layout](torch.randn(shape, dtype=dtype))
    edges = [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]
    want = torch.nn.functional.pad(x.resolve_neg(), edges)
    found = pad(x, before, after)
    assert found.is_contiguous() and found.dtype == dtype
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(found.view(integer), want.view(integer))
    assert found.shape == want.shape
