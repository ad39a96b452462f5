"""The named policies: one row each."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from fxround.numerics.modes import Rounding
from fxround.policy.policy import NAMED, OWN, Policy, in_format
from fxround.policy.recipes import block_scaling, current_scaling, delayed_scaling, nvfp4
from fxround.policy.rule import DTYPE, IDENTITY, WIDE, Rule


def _everywhere(
    name: str, mode: str, *, order: str = "lanes:16", strict: bool = False, definitions: str = OWN
) -> Policy:
    """Round every operation in its own format, and every step of an accumulator, in binary32 for 16-bit dtypes."""
    rule = Rule(rounding=f"{DTYPE}/{mode}", accumulate=f"{WIDE}/{mode}", order=order, optional=True)
    return Policy(name, (rule,), strict, definitions)


_PRESETS: Final = (
    Policy(IDENTITY),
    _everywhere("stochastic", "stochastic"),
    _everywhere("up_down", "up_down"),
    _everywhere("cestac", "stochastic_equal"),
    _everywhere("reproducible", "nearest_even", strict=True),
    _everywhere("reproducible_sharded", "nearest_even", order="shards:8/lanes:16", strict=True),
    _everywhere("repdl", "nearest_even", order="sequential", strict=True, definitions="repdl"),
    in_format("bfloat16", Rounding.parse("bfloat16")),
    in_format("binary16", Rounding.parse("binary16")),
    current_scaling(),
    delayed_scaling(),
    block_scaling(),
    nvfp4(),
)
NAMED.update({policy.name: policy for policy in _PRESETS})
PRESETS: Final = MappingProxyType(NAMED)
