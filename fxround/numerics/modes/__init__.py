"""Rounding modes as data, and a rounding as format x mode x overflow.

Truncation keeps the multiple of the quantum next to a number towards zero and loses the rest. A mode is one boolean
rule, *step away from zero?*, over a ``Lost``: the sign, the parity of what is kept, what is lost, and the random bits.
Python booleans and IR values both fit the rule, so the specification (``exact``) and the algorithm (``rounding``) share
it and nothing else. No rule changes an exact value: ``drawn``, ``half`` and ``above`` imply ``inexact``. A mode's only
other properties are ``jitter``, which up_down alone has; ``noise``, which Monte Carlo arithmetic adds before the rule;
and ``cut``, which says what few random bits see of the lost fraction. ``GRID_MODES`` are the modes of floating-point
formats alone.
"""

from fxround.numerics.modes.mode import GRID_MODES, LEAST_NOISY, Lost, Mode, Rounding
from fxround.numerics.modes.rows import MODES

__all__ = ["GRID_MODES", "LEAST_NOISY", "MODES", "Lost", "Mode", "Rounding"]
