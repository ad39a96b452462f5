"""The program of a pointwise kernel as text: one statement per rounded operation.

A graph node carries a program such as ``t0 = add(x0, x1) @ binary32/stochastic/inf``. x0, x1, ... are the tensor
operands, and a number is a scalar of the result's dtype. The last statement is the result, unless ``return t0, t2``
names others. ``Program.parse(str(p)) == p``: the text contains the whole arithmetic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fxround.errors import shown
from fxround.numerics.formats import number
from fxround.numerics.modes import Rounding

UNROUNDED = "exact"
# The longest statement, in characters: a rounding to a table of 256 values.
_LONGEST = 8000
_STATEMENT = re.compile(r"\s*(t[0-9]+)\s*=\s*(\w+)\(([^()]*)\)\s*@\s*(\S+(?:\([^)]*\)\S*)?)\s*")


@dataclass(frozen=True, eq=False)
class Statement:
    """One operation, ``target = operator(operands) @ rounding``, rounded once (or exact: rounding None).

    Statements are equal if their texts are: 0.0 == -0.0 as numbers, and kernels are cached by their programs.
    """

    target: str
    operator: str
    operands: tuple[str | float, ...]
    rounding: Rounding | None

    def __str__(self) -> str:
        operands = ", ".join(o if isinstance(o, str) else o.hex() for o in self.operands)
        return f"{self.target} = {self.operator}({operands}) @ {self.rounding or UNROUNDED}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Statement) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @staticmethod
    def parse(text: str) -> Statement:
        """Parse one statement; ValueError shows the statement and the expected form."""
        match = _STATEMENT.fullmatch(text) if len(text) <= _LONGEST else None
        if not match:
            expected = "t0 = add(x0, 0x1.8p+0) @ binary32/nearest_even/inf"
            raise ValueError(f"{shown(text)} is not a statement; expected: {expected}")
        target, operator, operands, rounding = match.groups()
        values = tuple(_operand(o.strip()) for o in operands.split(",") if o.strip())
        return Statement(target, operator, values, None if rounding == UNROUNDED else Rounding.parse(rounding))


def _operand(text: str) -> str | float:
    if re.fullmatch(r"[xt][0-9]{1,9}", text):
        return text
    try:
        return number(text)
    except ValueError:
        raise ValueError(f"{shown(text)} is not an operand: expected x0, t0 or a number") from None


@dataclass(frozen=True)
class Program:
    """Statements in order, and the names of the results (empty: the last statement's). The operands are x0, x1, ..."""

    statements: tuple[Statement, ...]
    returned: tuple[str, ...] = ()

    def __str__(self) -> str:
        last = (f"return {', '.join(self.returned)}",) if self.returned else ()
        return "; ".join((*map(str, self.statements), *last))

    @property
    def results(self) -> tuple[str, ...]:
        """The targets of the statements that are stored."""
        return self.returned or (self.statements[-1].target,)

    @staticmethod
    def parse(text: str) -> Program:
        """Parse a program; ValueError for a malformed statement, or a name that is used before it is defined."""
        if not isinstance(text, str):
            raise TypeError(f"a program is a text like 't0 = add(x0, x1) @ binary32', got {type(text).__name__}")
        parts = [part.strip() for part in text.split(";") if part.strip()]
        returned = parts.pop().removeprefix("return ") if parts and parts[-1].startswith("return ") else ""
        statements = tuple(map(Statement.parse, parts))
        if not statements:
            raise ValueError("an empty program computes nothing; expected at least one statement")
        defined: set[str] = set()
        for s in statements:
            for o in s.operands:
                if isinstance(o, str) and o.startswith("t") and o not in defined:
                    raise ValueError(f"{shown(str(s))}: {o} is used before it is defined")
            defined.add(s.target)
        names = tuple(name.strip() for name in returned.split(",") if name.strip())
        for name in names:
            if name not in defined:
                raise ValueError(
                    f"return {shown(returned)}: {shown(name)} is not defined; defined: {shown(sorted(defined))}"
                )
        return Program(statements, names)

    @property
    def arity(self) -> int:
        """The number of tensor operands: one more than the highest x."""
        used = [int(o[1:]) for s in self.statements for o in s.operands if isinstance(o, str) and o[0] == "x"]
        return 1 + max(used, default=-1)
