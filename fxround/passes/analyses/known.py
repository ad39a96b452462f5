"""What is known of every value of a lowered graph: the formats whose values it may have, and single numbers.

The result of an operation of fxround's lies in the format of its last rounding, that of any other operation in the
format of its dtype. An operation that moves or selects values keeps what is known of its operands, and which operation
made them, so that a view or a concatenation does not hide where a value comes from. Constants are known by value. For
example, ``known(graph)[relu]`` is ``{mm: Known({e4m3fn})}`` if the policy says nothing of the relu itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

import numpy as np
import torch
from torch import fx

from fxround.graph.dialect import BlockExpand, BlockMaximum, Loop, Pointwise, ScatterCall, loops_of, read
from fxround.graph.dtypes import FORMAT_OF
from fxround.graph.site import float_values, site
from fxround.graph.values import outputs_of
from fxround.kernels import from_text
from fxround.kernels.program import Program
from fxround.kernels.reductions import scatter_format
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.faults import numbers_of
from fxround.numerics.formats import Format
from fxround.numerics.modes import Rounding
from fxround.operators.rules import CONSTANTS
from fxround.passes.rewrite import decided

_LONGEST_RANGE: Final = 1 << 20


def _overloads(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name if '.' in name else name + '.default'}" for name in names.split())


# Operators that may yield a zero that no operand has.
_ZEROS: Final = _overloads(
    "relu hardshrink threshold max_unpool2d max_unpool3d tril triu diag_embed im2col masked_scatter"
    " masked_scatter_backward"
)
_INTEGRAL: Final = _overloads("floor ceil round trunc")
_SIGNS: Final = _overloads("sign sgn heaviside")
_SIGNED: Final = _overloads("neg copysign.Tensor copysign.Scalar")
# Their result has nothing of the first operand.
_FILLS: Final = _overloads("fill.Scalar fill.Tensor copy")
# They count, or read bits or memory that nothing has written.
_UNKNOWN: Final = _overloads(
    "view.dtype histc nan_to_num"
    " empty.memory_format empty_like empty_permuted empty_strided new_empty new_empty_strided"
)


@dataclass(frozen=True)
class Known:
    """Sets one of which has the value: the values of each format, and the numbers.

    A format without infinities means that the value is none. A NaN counts as a value of every format.
    """

    formats: frozenset[Format] = frozenset()
    numbers: frozenset[float] = frozenset()

    def __or__(self, other: Known) -> Known:
        return Known(self.formats | other.formats, self.numbers | other.numbers)

    def __str__(self) -> str:
        numbers = [f"{n:.6g}" for n in sorted(self.numbers)[:3]] + ["..."] * (len(self.numbers) > 3)
        return " or ".join(dict.fromkeys([*sorted(map(str, self.formats)), *numbers]))

    def within(self, declared: Format) -> bool:
        """Whether every value of the sets is one of the format's."""
        held = all(f.within(declared) and (declared.inf or not f.inf) for f in self.formats)
        return held and bool(np.all(declared.contains(list(self.numbers))))


# What is known of a value, by the node that made it.
Origins = Mapping[fx.Node, Known]


def known(graph: fx.GraphModule) -> dict[fx.Node, Origins]:
    """Return what is known of every floating-point value of a lowered graph, those in the bodies of its loops too."""
    origins: dict[fx.Node, Origins] = {}
    _find(graph, origins)
    return origins


def _find(graph: fx.GraphModule, origins: dict[fx.Node, Origins]) -> None:
    """Add what is known of a graph's values. What enters the body of a loop is known already."""
    results: dict[fx.Node, list[Origins]] = {}
    bodies = {loop.node: (loop, parts) for loop, parts in loops_of(graph)}
    for node in graph.graph.nodes:
        if node in bodies:
            results[node] = _of_loop(*bodies[node], origins)
        elif node.target is operator.getitem and node.args[0] in results:
            if float_values(node):
                origins[node] = results[node.args[0]][node.args[1]]
        elif node.op != "output" and float_values(node) and not (node.op == "placeholder" and node in origins):
            origins[node] = _origins(graph, node, origins)


def _of_loop(loop: Loop, bodies: tuple[fx.GraphModule, ...], origins: dict[fx.Node, Origins]) -> list[Origins]:
    """Return what is known of a loop's results. What a step returns enters the next one, until nothing new is found."""
    operands = [origins.get(x, {}) if isinstance(x, fx.Node) else {} for x in loop.operands]
    step, carries = bodies[-1], len(loop.carries)
    while True:
        for body in bodies:
            entries = body.graph.find_nodes(op="placeholder")
            origins.update({node: own for node, own in zip(entries, operands, strict=True) if float_values(node)})
            _find(body, origins)
        ends = [[origins.get(x, {}) for x in outputs_of(body)] for body in bodies]
        if loop.predicate is not None:
            return [merged(pair) for pair in zip(*ends, strict=True)]
        entering = [merged([a, b]) for a, b in zip(operands[:carries], ends[-1], strict=False)]
        if entering == operands[:carries]:
            return [*entering, *ends[-1][carries:]] if step is not bodies[0] else ends[-1]
        operands[:carries] = entering


def passes_on(node: fx.Node) -> bool:
    """Whether the node only moves or selects values, and the policy declares nothing of its result."""
    if node.op != "call_function" or not float_values(node):
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and passes_on(source)
    place, call = site(node), read(node)
    moves = place is not None and place.status in ("movement", "exact") and not is_constant(node)
    return isinstance(call, BlockMaximum | BlockExpand) or (call is None and moves and declaration(node) is None)


def is_constant(node: fx.Node) -> bool:
    """Whether the program text makes the value."""
    return str(node.target) in CONSTANTS


def declaration(node: fx.Node) -> Rounding | Format | None:
    """Return the rounding that the policy declares for a value itself, the dtype's format for ``identity``.

    None if the policy says nothing, and for elements of a scaled format.
    """
    place, values = site(node), float_values(node)
    if place is None or place.assignment is None or not values or place.assignment.is_scaled:
        return None
    wanted = decided(place)
    return wanted[1] if wanted is not None else _of_dtype(values[0].dtype)


def merged(origins: Iterable[Origins]) -> dict[fx.Node, Known]:
    """Return the union of what is known of several values."""
    union: dict[fx.Node, Known] = {}
    for each in origins:
        union.update({node: union.get(node, Known()) | own for node, own in each.items()})
    return union


def joined(origins: Origins) -> Known:
    """Return what is known of a value, wherever it was made."""
    return reduce(Known.__or__, origins.values(), Known())


def _origins(graph: fx.GraphModule, node: fx.Node, origins: Mapping[fx.Node, Origins]) -> Origins:
    operands = merged(origins[used] for used in _read(node) if used in origins)
    if not passes_on(node):
        return {node: _made(graph, node, joined(operands))}
    if str(node.target) in _FILLS:
        operands = merged(origins[used] for used in _read(node)[1:] if used in origins)
    selected = _selected(node, joined(operands))
    if selected is None:
        return operands
    return {node: selected} if selected.formats else merged([operands, {node: selected}])


def _read(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose values may be values of the result."""
    call = read(node)
    return [call.x] if isinstance(call, ScatterCall) else node.all_input_nodes


def _made(graph: fx.GraphModule, node: fx.Node, operands: Known) -> Known:
    """Return what is known of a value that the node makes; operands: what is known of what it reads."""
    place, call, own = site(node), read(node), _own(node)
    if node.op == "get_attr":
        return _constant(getattr(graph, str(node.target), None), own)
    if is_constant(node):
        return _filled(node, own)
    if isinstance(call, ScatterCall):
        kept = scatter_format(Accumulation.parse(call.accumulate), call.loads()[0])
        return operands | Known(frozenset([kept]))
    if place is not None and place.kind == "random" and place.status == "exact":
        return Known(numbers=frozenset((0.0, 1.0)))  # a mask: a probability, rounded stochastically to an integer
    if isinstance(call, Pointwise):
        last = Program.parse(call.program).statements[-1]
        if last.rounding is None:
            return own
        # A value that is not hit stays what it was.
        return _of_rounding(last.rounding) | (operands if numbers_of(last.operator) else Known())
    if call is not None:
        return _of_rounding(_stores(call)) if hasattr(call, "rounding") else own
    source = node.args[0] if node.target is operator.getitem else node
    made_by = site(source) if isinstance(source, fx.Node) else None
    if place is None or made_by is None or node.op != "call_function" or made_by.status not in ("exact", "movement"):
        return own
    selected = _selected(node, operands)
    return operands if selected is None else selected if selected.formats else operands | selected


def _stores(call: Any) -> Rounding:
    """Return the rounding of what a call stores."""
    unfinished = call.rounding == from_text.UNFINISHED
    return from_text.accumulators(call.accumulate, call.loads()) if unfinished else Rounding.parse(call.rounding)


def _of_rounding(rounding: Rounding) -> Known:
    fmt = rounding.format
    return Known(frozenset([fmt if rounding.overflow == "inf" else replace(fmt, inf=False)]))


def _of_dtype(dtype: torch.dtype) -> Format | None:
    return Format.parse(FORMAT_OF[dtype]) if dtype in FORMAT_OF else None


def _own(node: fx.Node) -> Known:
    """Return the format of the node's dtype."""
    return Known(frozenset(f for v in float_values(node) if (f := _of_dtype(v.dtype)) is not None))


def _constant(value: Any, own: Known) -> Known:
    """Return the values of a tensor that the graph holds."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
        return own
    return Known(numbers=frozenset(value.detach().double().unique().tolist()))


def _filled(node: fx.Node, own: Known) -> Known:
    """Return the numbers of a constant that the program text makes."""
    name, dtype = str(node.target).split(".")[1], float_values(node)[0].dtype
    if name in ("eye", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"):
        return Known(numbers=frozenset({0.0, 1.0} if name == "eye" else {float("ones" in name)}))
    numbers = _scalars(node)
    if name in ("full", "full_like", "new_full", "scalar_tensor") and len(numbers) == 1:
        return Known(numbers=frozenset([_stored(numbers[0], dtype)]))
    if name == "arange" and len(numbers) == len(_numeric(node)) and _length(*numbers) <= _LONGEST_RANGE:
        return Known(numbers=frozenset(torch.arange(*numbers, dtype=dtype).double().tolist()))
    return own


def _length(first: float, last: float | None = None, step: float = 1.0) -> float:
    """Return the number of steps of ``arange(first)``, ``arange(first, last)`` or ``arange(first, last, step)``."""
    return abs(first if last is None else last - first) / abs(step)


def _stored(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=torch.float64).to(dtype).double())


def _selected(node: fx.Node, operands: Known) -> Known | None:
    """Return what an operation that moves or selects yields beside its operands' values; None for nothing.

    If the result has formats, it is all that is known: the operation does not yield its operands' values.
    """
    name, own, dtype = str(node.target), _own(node), float_values(node)[0].dtype
    if node.target is operator.getitem:
        return None
    if name in _UNKNOWN or (name in _SIGNED and any(not f.signed for f in operands.formats)):
        return own
    if name in _INTEGRAL:
        return operands if all(map(_has_integers, operands.formats)) and operands.formats else own
    if name == "aten.frac.default":
        return operands if all(f.subnormals for f in operands.formats) and operands.formats else own
    if name == "aten._to_copy.default" and not operands.formats | operands.numbers:
        return Known(numbers=frozenset((0.0, 1.0)))  # a mask: an integer is no selection
    numbers = {_stored(n, dtype) for n in _scalars(node)} | ({0.0} if name in _ZEROS else set())
    if name in _SIGNS:
        numbers |= {-1.0, 0.0, 1.0}
    return Known(numbers=frozenset(numbers)) if numbers else None


def _has_integers(fmt: Format) -> bool:
    """Whether the integers on both sides of a value of the format are values of the format."""
    small = fmt.zero and fmt.quantum_exponent <= 0 and (fmt.subnormals or fmt.emin <= 0)
    return small and fmt.maximum == math.floor(fmt.maximum)


def _numeric(node: fx.Node) -> dict[str, Any]:
    """Return the arguments that can become values, by name: those of the schema's type ``number``."""
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: v for a, v in zip(declared, node.args, strict=False)} | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in declared if "number" in str(a.type)}


def _scalars(node: fx.Node) -> list[float]:
    """Return those of them that are numbers, and not sizes that only a run knows."""
    return [float(n) for n in _numeric(node).values() if isinstance(n, int | float)]
