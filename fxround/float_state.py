"""A check of the thread's floating-point state, on which the results of stock operators depend.

``torch.set_flush_denormal(True)``, and libraries linked with ``-ffast-math``, make the processor treat subnormal
numbers as zero; a C library can change the rounding direction. fxround's kernels set their own state. PyTorch's
operators (relu, amax, casts) and the constants of a capture do not, so a call checks the state first.
"""

from __future__ import annotations

from typing import Final

from fxround.errors import FxroundError

# Names, not literals: Python would fold an expression of literals when it compiles, in the state of that moment.
_HALF: Final = float("0.5")
_ONE: Final = float("1")
_LEAST: Final = float.fromhex("0x1p-1022")
_BIT: Final = float.fromhex("0x1p-60")


def require_ieee_arithmetic() -> None:
    """Raise FxroundError if this thread flushes subnormal numbers to zero, or does not round to nearest."""
    if not _LEAST * _HALF:
        raise FxroundError(
            "this thread treats subnormal numbers as zero (torch.set_flush_denormal(True), or a library built with "
            "-ffast-math): results would differ from those of the policy. Call torch.set_flush_denormal(False) first."
        )
    if _ONE + _BIT != _ONE or _ONE - _BIT != _ONE:
        raise FxroundError(
            "this thread does not round to the nearest number (a library called fesetround): results would differ "
            "from those of the policy. Set the processor's rounding back to FE_TONEAREST first."
        )
