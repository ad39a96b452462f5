"""The table that ``flips()`` returns: a row for each fault of each value, with the bits that flipped in a call."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from fxround.graph.site import Direction
from fxround.short_reprs import Short
from fxround.spelling import selects
from fxround.views.summaries import sorted_rows
from fxround.views.table import Table, data_frame

_SHOWN: Final = ("value", "module", "source", "format", "fault", "elements", "flipped", "expected")


@dataclass(frozen=True, repr=False)
class Flip(Short):
    """A row of ``Flips``: one fault of one value, and the number of bits that it flipped in a call.

    value      the operator that computes the value; for a value that enters the graph, its role and name, for example
               "weight 0.weight"; "accumulators of" an operator; "scales of" a value
    node       the node that flips the bits, as in ``summary()``
    module     the path of the module of that node; "" is the root
    source     the model's line, "file:number"; "" if unknown
    format     the format in whose encoding the bits flip
    fault      the field of the encoding and its probability, as in a rule: "significand:0.01"
    elements   the number of elements of the value, over all iterations of a loop; of accumulators, the number of steps
    flipped    the number of elements in which a bit flipped; of accumulators, of steps that were hit
    expected   the mean of ``flipped`` over all seeds: ``elements`` times the probability, which is rounded to a
               multiple of the field's number of bits times 2^-32
    direction  the pass: "forward", "backward" or "update"
    role       the role of the value, as in a policy's rules
    operator   the operator of the operation whose result or operand the value is
    """

    value: str
    node: str
    module: str
    source: str
    format: str
    fault: str
    elements: int
    flipped: int
    expected: float
    direction: Direction
    role: str
    operator: str

    def _line(self) -> str:
        flipped = f"{self.flipped:,} of {self.elements:,}, {self.expected:.4g} expected"
        return f"{self.value}, {self.fault} in {self.format}: {flipped}"


@dataclass(frozen=True, repr=False)
class Flips(Table):
    """The bits that flipped in a call, as ``RoundedModule.flips`` returns them.

    flips    the rows as data; ``found[i]`` is one ``Flip``
    changed  the number of elements of the model's results that differ from those of the same call without faults
    results  the number of elements of the model's results

    Example::

        print(compiled.flips(x).sort("flipped", reverse=True))
    """

    flips: tuple[Flip, ...] = ()
    changed: int = 0
    results: int = 0

    def __getitem__(self, index: int) -> Flip:
        return self.flips[index]

    @property
    def flipped(self) -> int:
        """The number of flipped bits."""
        return sum(row.flipped for row in self.flips)

    @property
    def expected(self) -> float:
        """The mean number of flipped bits over all seeds."""
        return math.fsum(row.expected for row in self.flips)

    def sort(self, *by: str, reverse: bool = False) -> Flips:
        """Return the rows sorted by one or more fields of ``Flip``; raises ValueError for another field."""
        return flips_of(sorted_rows(self.flips, by, reverse), self.changed, self.results)

    def filter(self, module: str = "*", operator: str | None = None, direction: str | None = None) -> Flips:
        """Return the rows that match all arguments, as in ``Summary.filter``."""
        kept = (
            row
            for row in self.flips
            if selects(module, operator, path=row.module, name=row.operator, kind="")
            and direction in (None, row.direction)
        )
        return flips_of(kept, self.changed, self.results)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data, with ``changed`` and ``results``."""
        return super().to_dict() | {"changed": self.changed, "results": self.results}

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with a column per field of ``Flip``. Raises ImportError without pandas."""
        return data_frame([asdict(row) for row in self.flips], [f.name for f in fields(Flip)])


def flips_of(flips: Iterable[Flip], changed: int, results: int) -> Flips:
    """Return the table of these rows."""
    kept = tuple(flips)
    cells = tuple(tuple(getattr(row, name) for name in _SHOWN) for row in kept)
    made = Flips(_SHOWN, cells, "", "", kept, changed, results)
    total = sum(row.elements for row in kept)
    note = f"{made.flipped:,} bits flipped in {total:,} values, {made.expected:.6g} are expected. "
    note += f"{changed:,} of {results:,} elements of the results changed."
    return replace(made, note=note)
