"""What can go wrong beside a caller's mistake (which is a ``ValueError`` or a ``TypeError``).

Every message says what came, what was expected and what to do; where a node of a model is at fault it
names the node, its module path and its source line.
"""

from __future__ import annotations


def shown(value: object, most: int = 120) -> str:
    """``repr(value)`` for a message, its middle left out where it is long."""
    text = repr(value)
    if len(text) <= most:
        return text
    return f"{text[: 2 * most // 3]}...{text[-most // 4 :]} ({len(text)} characters)"


class FxroundError(Exception):
    """The root of fxround's own errors."""


class CaptureError(FxroundError):
    """A model cannot be captured as one graph."""


class UnsupportedOperator(FxroundError):
    """An operator has no rounding rule, and the policy is strict."""


class UnsupportedRounding(FxroundError):
    """A target or carrier lacks a rounding that was asked of it."""


class PolicyError(FxroundError, ValueError):
    """A policy is not what it should be: an unknown key, or a rule that matches no node."""


class VerificationError(FxroundError):
    """A pass broke an invariant of the graph: a defect of fxround, not of the model."""
