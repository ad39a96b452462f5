"""The ranges of the numbers of streams do not meet, and numbers that results depend on stay as they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from typing import get_args

import pytest

from fxround.errors import UnsupportedRounding
from fxround.graph.site import Site
from fxround.passes.streams import Part, of_fault, of_operand, of_values, second

PLACE = Site("layer", "aten.mm.default", "mm", "contraction", "activation", "", "")
MOST = 1 << 22


def at(number: int) -> Site:
    return replace(PLACE, number=number)


def test_streams_of_different_draws_differ() -> None:
    """Of the first and last values: all that a value draws as, once each."""
    numbers = (
        *of_values((), 40),
        *of_values([MOST // 2 - 82], 40),
        *of_values((), 40, moved=True),
        *of_values([MOST - 82], 40, moved=True),
    )
    own = [*numbers, *map(second, numbers)]
    operands = [of_operand(at(n), i) for n in numbers for i in range(64)]
    parts: tuple[Part, ...] = get_args(Part)
    faults = [of_fault(s, f, part) for s in (*numbers, *operands) for f in range(4) for part in parts]
    drawn = sorted(chain(own, operands, faults))
    assert all(a < b for a, b in pairwise(drawn))
    assert drawn[0] == 0 and drawn[-1] < 1 << 32


def test_numbers_stay_as_they_were() -> None:
    """Saved programs and results that people compare depend on them."""
    assert list(of_values([4, MOST // 2], 3)) == [6, 8, 10] and second(8) == 9
    assert list(of_values([4, MOST // 2], 2, moved=True)) == [MOST // 2 + 2, MOST // 2 + 4]
    assert [of_operand(at(6), i) for i in (0, 15)] == [(1 << 28) + 48, (1 << 28) + 63]
    operand = of_operand(at(6), 1)
    assert [of_fault(6, 3), of_fault(operand, 2)] == [(1 << 30) + 27, (3 << 29) + 198]
    assert [of_fault(6, 3, "scales"), of_fault(operand, 2, "scales")] == [(1 << 31) + 27, (7 << 29) + 198]
    assert [of_fault(6, 3, "tensor"), of_fault(operand, 2, "tensor")] == [(5 << 29) + 27, (6 << 29) + 198]


def test_a_graph_with_too_many_values_is_refused() -> None:
    assert of_values([MOST - 4], 1, moved=True) == range(MOST - 2, MOST, 2)
    with pytest.raises(UnsupportedRounding, match="1048577 values, and there are random streams for 1048576"):
        of_values([MOST // 2 - 4], 2)
    with pytest.raises(UnsupportedRounding, match=r"1048577 values that are moved, and .* for 1048576"):
        of_values([MOST - 4], 2, moved=True)
    with pytest.raises(UnsupportedRounding, match="layer"):
        of_operand(at(0), 64)
