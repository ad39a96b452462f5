"""How each contraction of the dialect begins on the CPU: up to the point where the result's address is needed."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from fxround.graph.dialect import CALLS, Call
from fxround.runtime.cpu import convolution, matmul
from fxround.runtime.cpu.contraction import Pending

_BEGUN: Final = matmul.BEGUN | convolution.BEGUN


def begin(call: Call[Tensor]) -> Pending:
    """Begin a contraction; a subclass of a call's class begins as that does."""
    cls: Any = CALLS[call.overload]
    return _BEGUN[cls](call)
