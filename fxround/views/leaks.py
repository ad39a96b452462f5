"""The table that ``leaks()`` returns: a row for each value that is not proved to be in the format declared for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from torch import fx

from fxround.graph.site import PORT, Direction, Site, site
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.passes.analyses.known import passes_on
from fxround.passes.analyses.leaks import Edge, Immediate, unrounded
from fxround.policy import Rule
from fxround.spelling import selects
from fxround.views.summaries import sorted_rows
from fxround.views.table import Table, data_frame

_SHOWN: Final = ("value", "consumer", "module", "source", "declared", "known", "rule")
_COUNTED: Final = ("outside", "elements", "first", "number")
_NOT_FOLLOWED: Final = "none: the policy declares it, and it was not followed"
_NO_RULE: Final = "none: the values that it moves need rules"
_REGROUPED: Final = "none: it regroups elements that share scales"


@dataclass(frozen=True)
class Leak:
    """A value that an operation reads and that is not proved to be in the format declared there.

    value      the operator that computes the value; for a value that enters the graph, "weight 0.weight" or "input 0"
    producer   the node that computes the value, or by which it enters the graph
    consumer   the node that reads the value; "output" for a result of the model
    module     the module of the operation that computes the value; for a value that enters the graph, the module of the
               operation that reads it
    source     the line of that operation, "file:number"; "" if unknown
    declared   the declared format or scaled rounding
    known      what is proved of the value: formats that it is in, and single numbers
    rule       the rule to add, as text; if there is none, the reason
    direction  the pass of the consumer: "forward", "backward" or "update"
    role       the role of the value, as in a policy's rules
    operator   the operator of the operation that ``module`` and ``source`` describe
    code       the text of the line ``source``
    outside    the number of elements that are not in the format; None if ``leaks`` had no inputs to run
    elements   the number of elements of the value; None if ``leaks`` had no inputs to run
    first      the index of the first element that is not in the format, as text; "" if there is none
    number     the value of that element; None if there is none
    """

    value: str
    producer: str
    consumer: str
    module: str
    source: str
    declared: str
    known: str
    rule: str
    direction: Direction
    role: str
    operator: str
    code: str
    outside: int | None = None
    elements: int | None = None
    first: str = ""
    number: float | None = None

    def __str__(self) -> str:
        where = f"{self.module or 'the root module'}{f' at {self.source}: {self.code}' if self.source else ''}"
        return f"{self.value} ({self.producer}) -> {self.consumer} in {where}: {self.known}, not {self.declared}"


@dataclass(frozen=True, repr=False)
class Leaks(Table):
    """The values that are not in the format declared for them, as ``RoundedModule.leaks`` returns them.

    leaks    the rows as data; ``found[i]`` is one ``Leak``
    proved   the number of edges (a value and an operation that reads it) where the value is proved to be in its format
    rules    rules to add, ``policy.with_rules(*found.rules)``: they round every value that a rule can round
    numbers  one text for each number in the model's code that is not in the format of its operation, such as 0.1 in
             ``x * 0.1``; the number is part of the operation, and no rule rounds it

    Example::

        assert not compiled.leaks()
    """

    leaks: tuple[Leak, ...] = ()
    proved: int = 0
    rules: tuple[Rule, ...] = ()
    numbers: tuple[str, ...] = ()

    def __getitem__(self, index: int) -> Leak:
        return self.leaks[index]

    def sort(self, *by: str, reverse: bool = False) -> Leaks:
        """Return the rows sorted by one or more fields of ``Leak``; equal rows keep their order.

        by: names of fields. reverse: whether the greatest come first. Raises ValueError for another field.
        """
        return self._of(sorted_rows(self.leaks, by, reverse))

    def filter(self, module: str = "*", operator: str | None = None, direction: str | None = None) -> Leaks:
        """Return the rows that match all arguments, as in ``Summary.filter``; ``rules`` stay those of all rows."""
        return self._of(
            leak
            for leak in self.leaks
            if selects(module, operator, path=leak.module, name=leak.operator, kind="")
            and direction in (None, leak.direction)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data, with ``proved``, ``rules`` (as text) and ``numbers``."""
        more = {"proved": self.proved, "rules": [str(rule) for rule in self.rules], "numbers": list(self.numbers)}
        return super().to_dict() | more

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with a column per field of ``Leak``. Raises ImportError without pandas."""
        return data_frame([asdict(leak) for leak in self.leaks], [f.name for f in fields(Leak)])

    def _of(self, kept: Iterable[Leak]) -> Leaks:
        return _table(tuple(kept), self.proved, self.rules, self.numbers)


@dataclass(frozen=True)
class Count:
    """The elements of a value, those outside of its format, and the first of these with its index."""

    outside: int
    elements: int
    first: tuple[int, ...] = ()
    number: float | None = None


def leaks_of(
    edges: Sequence[Edge], immediates: Sequence[Immediate], counts: Mapping[Edge, Count] | None = None
) -> Leaks:
    """Return the table of edges that are not proved.

    counts: of the values of a call. An edge that is proved has a row nevertheless if a value was outside: then what is
    known of it was wrong, which is a defect of fxround.
    """
    counted = counts or {}
    open_edges = [e for e in edges if not e.proved or (e in counted and counted[e].outside)]
    rules = tuple(dict.fromkeys(e.rule for e in open_edges if e.rule is not None))
    rows = tuple(_with_count(_leak(e), counted.get(e)) for e in open_edges)
    return _table(rows, len(edges) - len(open_edges), rules, tuple(map(_number, immediates)))


def _table(rows: tuple[Leak, ...], proved: int, rules: tuple[Rule, ...], numbers: tuple[str, ...]) -> Leaks:
    shown = _SHOWN + (_COUNTED if any(row.outside is not None for row in rows) else ())
    cells = tuple(tuple(getattr(row, name) for name in shown) for row in rows)
    note = f"{proved} edges are proved, {len(rows)} are not."
    if numbers:
        note += f" {len(numbers)} numbers of the code are not in the format of their operation (numbers lists them)."
    return Leaks(shown, cells, "", note, rows, proved, rules, numbers)


def _leak(edge: Edge) -> Leak:
    origin = unrounded(edge.producer)
    made, reader = site(origin), site(edge.consumer)
    enters = origin.op != "call_function"
    place = (reader if enters else made) or made
    assert place is not None and made is not None
    value = value_name(origin, made)
    return Leak(
        value=f"accumulator of {value}" if edge.accumulator else value,
        producer=edge.producer.name,
        consumer=edge.consumer.name,
        module=place.path,
        source=place.source,
        declared=str(edge.declared),
        known=str(edge.known),
        rule=_written(edge.rule) if edge.rule is not None else _reason(edge, made),
        direction=(reader or made).direction,
        role=made.role,
        operator=place.operator,
        code=place.code,
    )


def _reason(edge: Edge, made: Site) -> str:
    if isinstance(edge.declared, ScaledRounding) and passes_on(edge.producer):
        return _REGROUPED
    return _NO_RULE if made.status == "movement" and made.assignment is None else _NOT_FOLLOWED


def _with_count(leak: Leak, count: Count | None) -> Leak:
    if count is None:
        return leak
    first = f"[{', '.join(map(str, count.first))}]" if count.outside else ""
    return replace(leak, outside=count.outside, elements=count.elements, first=first, number=count.number)


def value_name(node: fx.Node, place: Site) -> str:
    """Return what a value is to the model: its parameter, its argument, or the operator that makes it."""
    port = node.meta.get(PORT)
    if port is None:
        return place.operator if node.op == "call_function" else f"constant {node.target}"
    if port.kind == "tangent":
        return f"gradient of result {port.index}"
    return f"{place.role} {port.name or port.index}"


def _written(rule: Rule) -> str:
    """Return a rule as Python code."""
    said = [repr(rule.match)] if rule.match != "*" else []
    keys = [f.name for f in fields(rule) if f.name != "match" and getattr(rule, f.name) != f.default]
    return f"Rule({', '.join([*said, *(f'{key}={getattr(rule, key)!r}' for key in keys)])})"


def _number(immediate: Immediate) -> str:
    place = site(immediate.node)
    return f"{immediate.number!r} in {place or immediate.node.name}: not {immediate.declared}"
