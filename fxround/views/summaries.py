"""The tables that ``summary()`` and ``coverage()`` return, with typed rows that can be sorted, filtered and counted.

A ``Summary`` has one ``Operation`` per row. A ``Coverage`` groups operations by status. Both are tables
(``fxround.views.table``): they print, and convert to JSON, HTML and data frames.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, TypeVar

from fxround.errors import shown
from fxround.graph.site import Direction, Status, placed
from fxround.short_reprs import Short
from fxround.spelling import nearest, selects
from fxround.views.table import Table, data_frame

# Statuses without arithmetic, which the summary and the drawing leave out.
SILENT: Final = ("movement", "integer")
_ORDER: Final = ("rounded", "exact", "native", *SILENT)
_SHOWN: Final = ("node", "operator", "module", "source", "rounding", "accumulate")
_COVERED: Final = ("status", "operator", "nodes", "operations", "%", "reason")


@dataclass(frozen=True, repr=False)
class Operation(Short):
    """A row of ``Summary``: one operation of a graph, with its rounding.

    node        the name of its node in the graph
    operator    for example "aten.mm.default"
    module      the path of its module; "" is the root
    source      the model's line, "file:number"; "" if unknown
    rounding    the rounding of the result, "format/mode/overflow"; if it is not rounded, the status and the reason
    accumulate  the rounding of each step of an accumulator; "" if there is none
    status      "rounded", "exact", "native" (a stock kernel computes it), "movement" or "integer"
    reason      why it is native or exact; "" for another status
    direction   the pass: "forward", "backward" or "update" (an optimizer's step)
    kind        the kind of the operator, as in a policy's rules
    role        the role of the result, as in a policy's rules
    operations  the number of arithmetic operations on elements, at the sizes of the captured example; a multiply-add
                counts as two
    code        the text of the model's line
    """

    node: str
    operator: str
    module: str
    source: str
    rounding: str
    accumulate: str
    status: Status
    reason: str
    direction: Direction
    kind: str
    role: str
    operations: int
    code: str

    def __str__(self) -> str:
        return f"{self.node}: {placed(self.operator, self.module, self.source, self.code)} ({self.reason})"

    def _line(self) -> str:
        steps = f", accumulate {self.accumulate}" if self.accumulate else ""
        return (
            f"{self.node}, {self.operator} in {self.module or 'the root module'}: {self.rounding or self.status}{steps}"
        )


@dataclass(frozen=True)
class Group:
    """Operations of one status, and for native ones of one operator and reason.

    nodes and operations are counts, percent is the share of all operations.
    """

    status: Status
    operator: str
    nodes: int
    operations: int
    percent: float
    reason: str


@dataclass(frozen=True, repr=False)
class Summary(Table):
    """A table of operations in the order of the graph, as ``RoundedModule.summary`` returns it.

    ``operations`` holds the rows as data with more fields; ``summary[i]`` is one ``Operation``. Example::

        compiled.summary().filter("layer1", operator="contraction").sort("operations", reverse=True)
    """

    operations: tuple[Operation, ...] = ()

    def __getitem__(self, index: int) -> Operation:
        return self.operations[index]

    def sort(self, *by: str, reverse: bool = False) -> Summary:
        """Return the rows sorted by one or more fields of ``Operation``; equal rows keep their order.

        by: names of fields. reverse: whether the greatest come first. Raises ValueError for another field.
        """
        return summary_of(sorted_rows(self.operations, by, reverse), self.note)

    def filter(
        self,
        module: str = "*",
        operator: str | None = None,
        status: str | None = None,
        direction: str | None = None,
    ) -> Summary:
        """Return the rows that match all arguments.

        module: a glob over module paths, which also matches everything inside a module: ``"layer1"``,
        ``"*.attention"``. operator: a glob over operators or their kind, as in a policy's rules: ``"mm"``,
        ``"contraction"``. status, direction: a value of these fields. None matches every row. Raises ValueError for an
        unknown status.
        """
        return summary_of(_filtered(self.operations, module, operator, status, direction))

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with a column per field of ``Operation``. Raises ImportError without pandas."""
        return data_frame([asdict(o) for o in self.operations], [f.name for f in fields(Operation)])


@dataclass(frozen=True, repr=False)
class Coverage(Table):
    """Counts of nodes and operations by status, as ``RoundedModule.coverage`` returns them.

    The status of a node is "rounded" (by the policy, or by the model's own ``fxround.round``, which the reason says),
    "exact" (it rounds nothing: it selects values, as relu and max do, or changes a sign), "native" (a stock kernel
    computes and rounds it; the row gives the reason), "movement" (of data) or "integer".

    unrounded   one text for each floating-point operation that a stock kernel computes
    groups      the rows as data; ``coverage[i]`` is one ``Group``
    operations  every operation as an ``Operation``, data movement included

    Example::

        assert not compiled.coverage().unrounded
    """

    unrounded: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    operations: tuple[Operation, ...] = ()

    def __getitem__(self, index: int) -> Group:
        return self.groups[index]

    @property
    def line(self) -> str:
        """One line: the number of nodes of each status, and the share of operations that are rounded or exact."""
        counts = ", ".join(f"{n:,} {s}" for s in _ORDER if (n := sum(g.nodes for g in self.groups if g.status == s)))
        native = sum(g.percent for g in self.groups if g.status == "native")
        return f"{counts or 'no operations'}; {100 - native:.4g} % of the arithmetic is rounded or exact"

    def sort(self, *by: str, reverse: bool = False) -> Coverage:
        """Return the rows sorted by one or more fields of ``Group``; arguments and errors as in ``Summary.sort``."""
        return _coverage(sorted_rows(self.groups, by, reverse), self.operations)

    def filter(
        self,
        module: str = "*",
        operator: str | None = None,
        status: str | None = None,
        direction: str | None = None,
    ) -> Coverage:
        """Return the coverage of the operations that match all arguments; percentages are of the selection.

        module, operator, status, direction: as in ``Summary.filter``.
        """
        return coverage_of(_filtered(self.operations, module, operator, status, direction))

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data, with ``unrounded``."""
        return super().to_dict() | {"unrounded": list(self.unrounded)}


def summary_of(operations: Iterable[Operation], note: str | None = None) -> Summary:
    """Return a table of these operations; note: the text below it, None for the number of each status."""
    kept = tuple(operations)
    rows = tuple(tuple(getattr(o, name) for name in _SHOWN) for o in kept)
    return Summary(_SHOWN, rows, note=counted(kept) if note is None else note, operations=kept)


def coverage_of(operations: Iterable[Operation]) -> Coverage:
    """Return the coverage of these operations, data movement included."""
    kept = tuple(operations)
    grouped: defaultdict[tuple[Status, str, str], list[int]] = defaultdict(list)
    for o in kept:
        grouped[o.status, o.operator if o.status == "native" else "", o.reason].append(o.operations)
    total = sum(map(sum, grouped.values())) or 1
    groups = tuple(
        Group(status, operator, len(counts), sum(counts), 100 * sum(counts) / total, reason)
        for (status, operator, reason), counts in sorted(grouped.items(), key=lambda item: _ORDER.index(item[0][0]))
    )
    return _coverage(groups, kept)


def counted(operations: Iterable[Operation]) -> str:
    """Return the number of operations of each status, as text."""
    counts = Counter(o.status for o in operations)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def _coverage(groups: tuple[Group, ...], operations: tuple[Operation, ...]) -> Coverage:
    unrounded = tuple(str(o) for o in operations if o.status == "native")
    note = (
        "Every float operation is rounded or exact."
        if not unrounded
        else f"{len(unrounded)} float operations are not rounded. The bits of stock kernels depend on the device."
    )
    rows = tuple(tuple(asdict(group).values()) for group in groups)
    return Coverage(_COVERED, rows, "", note, unrounded, groups, operations)


R = TypeVar("R")


def sorted_rows(rows: tuple[R, ...], by: tuple[str, ...], reverse: bool) -> tuple[R, ...]:
    """Return dataclasses sorted by the fields ``by``; raises ValueError for a field that they lack."""
    known = [f.name for f in fields(rows[0])] if rows else list(by)  # type: ignore[arg-type]
    for name in by:
        if name not in known:
            near = nearest(name, known)
            raise ValueError(f"there is no field {shown(name)} to sort by{near} Fields: {', '.join(known)}")

    def key(row: R) -> tuple[tuple[bool, Any], ...]:
        return tuple(((value := getattr(row, name)) is not None, value) for name in by)

    return tuple(sorted(rows, key=key, reverse=reverse))


def _filtered(
    operations: Iterable[Operation], module: str, operator: str | None, status: str | None, direction: str | None
) -> Iterable[Operation]:
    if status is not None and status not in _ORDER:
        raise ValueError(f"no status is named {shown(status)}{nearest(status, _ORDER)} Known: {', '.join(_ORDER)}")
    return (
        o
        for o in operations
        if selects(module, operator, path=o.module, name=o.operator, kind=o.kind)
        and status in (None, o.status)
        and direction in (None, o.direction)
    )
