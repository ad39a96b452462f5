"""The rounding modes: one row each."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from fxround.numerics.modes.mode import NAMED, Lost, Mode


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

NAMED.update({row.name: row for row in _MODES})
MODES: Final = MappingProxyType(NAMED)
