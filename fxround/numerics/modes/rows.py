"""The rounding modes: one row each."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from fxround.numerics.modes.mode import GRID_MODES, NAMED, Lost, Mode


def _to_nearest_even(lost: Lost[Any]) -> Any:
    return lost.above | (lost.half & lost.odd)


_MODES: Final[tuple[Mode, ...]] = (
    Mode("nearest_even", _to_nearest_even),
    Mode("nearest_away", lambda lost: lost.above | lost.half),
    Mode("nearest_zero", lambda lost: lost.above),
    Mode("nearest_odd", lambda lost: lost.above | (lost.half & lost.even)),
    Mode("toward_zero", lambda lost: lost.never),
    Mode("toward_positive", lambda lost: lost.inexact & lost.positive),
    Mode("toward_negative", lambda lost: lost.inexact & lost.negative),
    Mode("away_from_zero", lambda lost: lost.inexact),
    Mode("to_odd", lambda lost: lost.inexact & lost.even),
    # P(away) = I(lost * 2^n) / 2^n for n random bits, lost in quanta. For I = floor the bias is towards zero and less
    # than 2^-n of a quantum; for the nearest integer it is at most 2^-(n+1), either way. Where at most n bits are lost,
    # it is zero. The three are StochasticA, StochasticB and StochasticC of IEEE P3109.
    Mode("stochastic", lambda lost: lost.drawn, random_bits=32),
    Mode("stochastic_b", lambda lost: lost.drawn, random_bits=31, cut="half_up"),
    Mode("stochastic_c", lambda lost: lost.drawn, random_bits=31, cut="half_even"),
    Mode("stochastic_equal", lambda lost: lost.inexact & lost.coin, random_bits=1),
    Mode("up_down", _to_nearest_even, random_bits=1, jitter=True),
)

# Modes of floating-point formats alone. ``farthest`` is the neighbour that nearest_even leaves. The others are Monte
# Carlo arithmetic: noise is added, and the sum rounded to nearest even.
_OF_GRIDS: Final[tuple[Mode, ...]] = (
    Mode("farthest", lambda lost: lost.inexact ^ _to_nearest_even(lost)),
    Mode("mca", _to_nearest_even, random_bits=32, noise=0),
    Mode("mca_rr", _to_nearest_even, random_bits=32, noise=0, sparing=True),
)

NAMED.update({row.name: row for row in _MODES})
GRID_MODES.update({row.name: row for row in _OF_GRIDS})
MODES: Final = MappingProxyType(NAMED)
