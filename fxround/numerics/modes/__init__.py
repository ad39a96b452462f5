"""Rounding modes as data, and a rounding as format x mode x overflow.

Truncation keeps the multiple of the quantum next to a number towards zero and loses the rest. A mode is one boolean
rule, *step away from zero?*, over a ``Lost``: the sign, the parity of what is kept, what is lost, and the random bits.
Python booleans and IR values both fit the rule, so the specification (``exact``) and the algorithm (``rounding``) share
it and nothing else. No rule changes an exact value: ``drawn``, ``half`` and ``above`` imply ``inexact``. A mode's only
other properties are ``jitter``, which up_down alone has, and ``cut``, which says what few random bits see of the lost
fraction.
"""

from fxround.numerics.modes.mode import Lost, Mode, Rounding
from fxround.numerics.modes.rows import MODES

__all__ = ["MODES", "Lost", "Mode", "Rounding"]
