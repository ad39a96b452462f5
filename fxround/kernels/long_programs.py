"""Programs that are too long for one kernel, as statements that each have one.

The time of a compilation grows with a kernel's length. A program of more than ``MOST`` operators of the scalar IR runs
as one kernel for each kind of statement: numbers are operands, so statements that differ only in what they read share a
kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from fxround.kernels import from_text
from fxround.kernels.maps import program_carrier
from fxround.kernels.program import Statement
from fxround.numerics.formats.storage import Storage

# LLVM takes up to 0.2 ms for an operator of a kernel, and half of that where it does not optimize (``llvm.map``).
MOST: Final = 12_000
# No statement has more operators than MOST divided by this.
_FEW: Final = 4


@lru_cache(maxsize=4096)
def is_long(text: str, loads: tuple[Storage, ...], results: tuple[Storage, ...]) -> bool:
    """Whether a program is to be run in parts. Raises ValueError for a program that no kernel runs."""
    program = from_text.program(text)
    if len(program.statements) <= _FEW:
        return False
    carrier = program_carrier(program, loads, results)
    return (
        sum(len(from_text.fused(p.text, (carrier,) * len(p.read), carrier).body.schedule) for p in parts(text)) > MOST
    )


@dataclass(frozen=True)
class ProgramPart:
    """A statement over x0, x1, ...: its text, its target, the values or numbers it reads, and values not read later."""

    text: str
    target: str
    read: tuple[str | float, ...]
    dead: tuple[str, ...]


@lru_cache(maxsize=64)
def parts(text: str) -> tuple[ProgramPart, ...]:
    """The program as statements of their own, in order."""
    program = from_text.program(text)
    alive, cut = set(program.results), []
    for statement in reversed(program.statements):
        names = {o for o in statement.operands if isinstance(o, str)} | {statement.target}
        read = _read(statement)
        places = {o: f"x{i}" for i, o in enumerate(read) if isinstance(o, str)}
        numbers = (f"x{i}" for i, o in enumerate(read) if not isinstance(o, str))
        operands = tuple(places[o] if isinstance(o, str) else next(numbers) for o in statement.operands)
        alone = str(replace(statement, target="t0", operands=operands))
        cut.append(ProgramPart(alone, statement.target, read, tuple(names - alive)))
        alive |= names
    return tuple(cut[::-1])


def _read(statement: Statement) -> tuple[str | float, ...]:
    """The values that a statement reads, each once, then its numbers."""
    values = dict.fromkeys(o for o in statement.operands if isinstance(o, str))
    return (*values, *(o for o in statement.operands if not isinstance(o, str)))
