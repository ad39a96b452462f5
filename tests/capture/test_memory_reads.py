"""``as_strided`` reads memory: the right elements for every layout, or an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxround
from fxround.errors import CaptureError

ROWS = torch.arange(12.0).view(3, 4)
GAPS = torch.arange(40.0).view(4, 10)[:3, ::2][:, :4]
INSIDE = torch.arange(40.0)[9:21].view(3, 4)


def _require_same(function: Callable[[Tensor], Any], *arguments: Tensor) -> None:
    compiled = fxround.compile(function, "reproducible")
    for x in arguments:
        assert torch.equal(compiled(x), function(x))


def test_argument_is_read_by_its_own_strides() -> None:
    _require_same(lambda x: x.as_strided((2, 2), (1, 3)) * 2, ROWS, ROWS.T, INSIDE, ROWS)
    _require_same(lambda x: torch.as_strided(x[1:], (2, 2), (1, 1)) * 2, ROWS, ROWS + 1)


def test_computed_tensor_is_read_in_the_order_of_its_operands() -> None:
    _require_same(lambda x: (x * 2).as_strided((2, 2), (1, 1)), ROWS, ROWS.T, GAPS)
    _require_same(lambda x: x.contiguous().as_strided((2, 2), (1, 1)) * 2, ROWS, ROWS.T, GAPS)


def test_transposed_batch_of_one() -> None:
    x = torch.arange(8.0).view(1, 2, 4)
    _require_same(lambda x: x.as_strided((4,), (1,)) * 2, x.transpose(1, 2), x)


@pytest.mark.parametrize("first", [(), (ROWS,)])
def test_argument_with_gaps_is_refused(first: tuple[Tensor, ...]) -> None:
    compiled = fxround.compile(lambda x: torch.as_strided(x, (3, 2), (1, 1)) * 2, "reproducible")
    for x in first:
        compiled(x)
    with pytest.raises(CaptureError, match=r"the memory of an argument \(by as_strided\).*contiguous"):
        compiled(GAPS)


def test_offset_of_an_argument_inside_of_its_storage_is_refused() -> None:
    function = lambda x: x.as_strided((2, 2), (1, 3), 1) * 2  # noqa: E731
    _require_same(function, ROWS)
    with pytest.raises(CaptureError, match="the memory of an argument"):
        fxround.compile(function, "reproducible")(INSIDE)


@pytest.mark.parametrize(
    "function",
    [lambda x: x[1:].as_strided((2, 2), (1, 1), 0) * 2, lambda x: x[:1].as_strided((2, 4), (4, 1)) * 2],
    ids=["before", "beyond"],
)
def test_memory_around_a_view_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="memory that is not its own"):
        fxround.compile(function, "reproducible")(ROWS)


class _Buffer(torch.nn.Module):
    def __init__(self, table: Tensor, begin: int | None) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.begin = begin

    def forward(self, x: Tensor) -> Tensor:
        table: Tensor = self.table  # type: ignore[assignment]
        return x * table.as_strided((4,), (1,), self.begin)


def test_buffer_of_another_layout() -> None:
    model = _Buffer(ROWS.clone(), None)
    compiled = fxround.compile(model, "reproducible")
    for table in (ROWS.clone(), ROWS.T, INSIDE):
        model.table = table
        assert torch.equal(compiled(torch.ones(4)), model(torch.ones(4)))


def test_offset_of_a_buffer_counts_from_the_begin_of_its_storage() -> None:
    _require_same(_Buffer(INSIDE, 9), torch.ones(4))
