"""Whether the roundings of a lowered graph draw random bits."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxround.graph.dialect import Pointwise, read
from fxround.kernels import from_text


def any_draws(graph: fx.GraphModule) -> bool:
    """Whether a rounding of a lowered graph draws random bits."""
    return any(draws(call) for call in map(read, graph.graph.nodes) if call is not None)


def draws(call: Any) -> bool:
    """Whether the roundings of a call draw random bits."""
    if isinstance(call, Pointwise):
        return from_text.drawn(call.program) > 0
    chain = getattr(call, "accumulate", None)
    stored = getattr(call, "rounding", None)
    drawn = chain is not None and from_text.accumulation(chain).random
    finished = stored is not None and stored != from_text.UNFINISHED
    return drawn or (finished and from_text.rounding(stored).mode.random_bits > 0)
