"""The kernels of blocks that share scales (``kernels.kinds.Blocks``), made of the programs that graphs hold."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from fxround.kernels.kinds import Blocks
from fxround.kernels.long_programs import is_long
from fxround.kernels.maps import draws, map_kernel
from fxround.kernels.program import Program, Statement
from fxround.numerics.formats.storage import CARRIER_OF, Storage

# The figures are the maxima themselves.
MAXIMA: Final = Program((Statement("t0", "identity", ("x0",), None),))


@lru_cache(maxsize=1024)
def blocks_kernel(figure: Program, elements: Program | None, storage: Storage) -> Blocks | None:
    """Return the kernel of a tensor that is stored in this way; None for programs that have no such kernel.

    figure: x0 is a block's largest finite magnitude, and the other operands are numbers that all blocks share, in the
    carrier. elements: x0 is an element and x1 the figure of its block; None if the figures are the result, in the
    carrier.

    Raises what ``map_kernel`` raises.
    """
    carrier: Storage = "f64" if CARRIER_OF[storage] == "f64" else "f32"
    statements = (*figure.statements, *(elements.statements if elements else ()))
    if any(map(draws, statements)) or (elements is not None and elements.arity != 2) or not figure.arity:
        return None
    if elements is not None and is_long(str(elements), (storage, carrier), (storage,)):
        return None
    powers = ("x1",) if _makes_powers(figure) else ()
    kernel = map_kernel(figure, (carrier,) * figure.arity, carrier)
    mapped = None if elements is None else map_kernel(elements, (storage, carrier), storage, powers)
    return Blocks(kernel, mapped, (storage,))


def _makes_powers(figure: Program) -> bool:
    """Whether a figure is a power of two from 2^-127 to 2^127 whatever the operands are, NaN excepted."""
    if len(figure.results) != 1:
        return False
    (last,) = (s for s in figure.statements if s.target == figure.results[0])
    if last.rounding is None:
        return False
    fmt = last.rounding.format
    inside = fmt.emin >= -127 and fmt.maximum <= 2.0**127
    return fmt.precision == 1 and inside and not fmt.zero and not fmt.signed and last.rounding.overflow == "saturate"
