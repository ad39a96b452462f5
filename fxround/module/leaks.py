"""``RoundedModule.leaks``: values that are not proved to be in their format, and counts of their elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fxround.compiler.executable import Entry
from fxround.eager.round import round as rounded
from fxround.errors import shown
from fxround.graph.dialect import Pointwise, read
from fxround.graph.dtypes import FORMAT_OF
from fxround.kernels.scaled import carrier_of
from fxround.numerics.formats import Format
from fxround.numerics.formats.scaled import ScaledRounding, is_scaled
from fxround.numerics.formats.scaled.grid import outside_grid
from fxround.numerics.modes import MODES
from fxround.passes.analyses.leaks import Edge, edges, immediates
from fxround.policy import Policy
from fxround.views.leaks import Count, Leaks, leaks_of


def leaks_in(
    entry: Entry,
    policy: Policy,
    declared: Any,
    leaves: Sequence[Any] | None,
    rng: Tensor,
    tangents: Mapping[int, Tensor] | None,
) -> Leaks:
    """Return the leaks of a graph. leaves: flat arguments of a call whose values are counted; None for no call.

    Raises ValueError for a declared format that does not exist, or a scaled one.
    """
    if declared is not None and is_scaled(declared):
        raise ValueError(
            f"declared={shown(declared)}: a scaled format has no values of its own; expected a format such as "
            "'e4m3fn'. Rules declare scaled operands (operands=), and leaks() without declared= proves them"
        )
    fmt = None if declared is None else Format.parse(declared)
    leaking = edges(entry.lowered, policy, fmt)
    counts = None if leaves is None else _counts(entry, leaking, leaves, rng, tangents)
    return leaks_of(leaking, immediates(entry.lowered, fmt), counts)


def _counts(
    entry: Entry, leaking: Sequence[Edge], leaves: Sequence[Any], rng: Tensor, tangents: Mapping[int, Tensor] | None
) -> dict[Edge, Count]:
    """Return how many elements of the values of one call are outside of what is declared, for all but accumulators."""
    wanted: dict[str, list[Edge]] = {}
    for edge in leaking:
        if not edge.accumulator:
            wanted.setdefault(edge.producer.name, []).append(edge)
    counts: dict[Edge, Count] = {}
    used = {node.name for edge in leaking for node in _scales_of(edge)}
    scales: dict[str, Tensor] = {}

    def count(name: str, value: Any) -> None:
        if name in used:
            scales[name] = value
        each: dict[Any, Count] = {}
        for edge in wanted.pop(name, ()):
            if isinstance(edge.declared, Format):
                counts[edge] = each.setdefault(edge.declared, _count(value, edge.declared))
            elif isinstance(value, Tensor):
                counts[edge] = _on_grid(value, edge, edge.declared, [scales[n.name] for n in _scales_of(edge)])

    for name, value in entry.named(leaves, tangents).items():
        count(name, value)
    for name, value in entry.steps(leaves, rng, tangents):
        count(name, value)
    return counts


def _count(value: Any, declared: Any) -> Count:
    """Return the elements of a value that are outside of a format; of several tensors, the first one's index."""
    counts = [_of_tensor(x, declared) for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    total, elements = sum(c.outside for c in counts), sum(c.elements for c in counts)
    first = next((c for c in counts if c.outside), Count(0, 0))
    return Count(total, elements, first.first, first.number)


def _of_tensor(value: Tensor, declared: Format) -> Count:
    if not value.is_floating_point():
        return Count(0, 0)
    numbers = _numbers(value)
    return _counted(numbers, ~declared.contains(numbers))


def _scales_of(edge: Edge) -> list[fx.Node]:
    """Return the nodes of the scales, and zero points, of a scaled operand that was made by its programs."""
    call = read(edge.producer) if isinstance(edge.declared, ScaledRounding) and edge.proved else None
    return list(call.xs[1:]) if isinstance(call, Pointwise) else []


def _on_grid(value: Tensor, edge: Edge, declared: ScaledRounding, scales: Sequence[Tensor]) -> Count:
    """Count the elements that no element and scale make; of a value that was not rounded, those that rounding changes.

    The blocks of the latter are along the last dimension. A delayed scale is then not known: every element counts.
    """
    numbers = _numbers(value)
    if edge.proved:
        stored = Format.parse(FORMAT_OF[value.dtype])
        read = [_numbers(scale) for scale in scales]
        return _counted(numbers, outside_grid(numbers, declared, read, stored, carrier_of(stored)))
    plain = replace(declared, mode=MODES["nearest_even"], hadamard=None)
    if plain.of_products:
        return _counted(numbers, ~np.isnan(numbers))
    own = _numbers(rounded(value.detach(), plain))
    return _counted(numbers, (own != numbers) & ~np.isnan(numbers))


def _numbers(value: Tensor) -> Any:
    return value.detach().to("cpu", torch.float64).numpy()


def _counted(numbers: Any, outside: Any) -> Count:
    """Return the number of elements that are outside, with the first of them."""
    if not outside.any():
        return Count(0, numbers.size)
    first = np.unravel_index(int(outside.argmax()), numbers.shape)
    return Count(int(outside.sum()), numbers.size, tuple(map(int, first)), float(numbers[first]))
