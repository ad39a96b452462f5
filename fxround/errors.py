"""The errors of fxround; wrong arguments raise ``ValueError`` or ``TypeError``.

Every message says what was found, what was expected and what to do. If a node of a model is the cause, it names the
node, its module path and its source line.
"""

from __future__ import annotations

import sys


def shown(value: object, most: int = 120) -> str:
    """Return ``repr(value)`` for a message; the middle of a long text is left out."""
    return brief(repr(value), most)


def brief(text: str, most: int = 120) -> str:
    """Return a text for a message, without quotes; the middle of a long one is left out."""
    if len(text) <= most:
        return text
    return f"{text[: 2 * most // 3]}...{text[-most // 4 :]} ({len(text)} characters)"


def type_of(value: object) -> str:
    """Return the name of a value's type for a message, with its article: ``an int``, ``a Tensor``."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def callers() -> int:
    """Return the stack level, for ``warnings.warn`` in the calling function, of the code that called the module."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("fxround", "torch"):
        level, frame = level + 1, frame.f_back
    return level


class FxroundError(Exception):
    """The base class of fxround's errors."""


class CaptureError(FxroundError):
    """Raised if a model cannot be captured as one graph; the message names the line and the reason."""


class UnsupportedOperator(FxroundError):
    """Raised in strict mode for a floating-point operator without a rounding rule; the message names its line."""


class UnsupportedRounding(FxroundError):
    """Raised if a rounding of the policy cannot be computed for a tensor.

    An example is a format with more precision or range than the dtype that holds its values.
    """


class PolicyError(FxroundError, ValueError):
    """Raised for an invalid policy: an unknown name or key, a text that does not parse, or a rule that matches nothing.

    It is a ``ValueError`` as well.
    """


class NotCaptured(ValueError, AttributeError):
    """Raised for a graph that no call has captured: a ``ValueError``.

    It is an ``AttributeError`` as well, so that ``hasattr`` and ``inspect.getmembers`` can ask for such an attribute.
    """


class VerificationError(FxroundError):
    """Raised if a pass breaks an invariant of the graph: a defect of fxround, not of the model."""
