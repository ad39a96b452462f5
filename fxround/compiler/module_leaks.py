"""``RoundedModule.leaks``: values that are not proved to be in their format, and counts of their elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxround.compiler.executable import Entry
from fxround.compiler.module_views import Shown
from fxround.compiler.signature import arguments
from fxround.errors import shown
from fxround.numerics.formats import Format
from fxround.numerics.scaled import is_scaled
from fxround.passes.leaks import Edge, edges, immediates
from fxround.policy import Policy
from fxround.views.leaks import Count, Leaks, leaks_of


class Leaking(Shown):
    """The part of a compiled module that proves what is in its declared format."""

    def _entry(self, args: Any, kwargs: Any) -> Entry:
        """Return the graph for these arguments. ``RoundedModule`` defines it."""
        raise NotImplementedError

    @torch.no_grad()
    def leaks(
        self,
        inputs: Any = None,
        *,
        declared: Any = None,
        tangents: Mapping[int, Tensor] | None = None,
    ) -> Leaks:
        """Return the values that are not proved to be in the format that the policy declares for them.

        The declared format is that of the rule that rounds the value: a rule for its operation, for its role, or for
        ``operands``. If no rule rounds it (often a weight), it is the format of the operation that reads the value.

        Args:
            inputs: arguments, in the forms of ``compile``'s ``example_inputs``. The model runs with them, and each row
                then says how many elements are not in the format, and the first of these. None reads the graph of the
                latest call and runs nothing.
            declared: a format that every value must be in, for example "e4m3fn", in place of the policy's declarations.
            tangents: with ``inputs``, the gradient of each result as in ``observe_step``; None runs the forward pass
                only.

        Returns:
            A ``Leaks``: a table with one row per value that is not proved to be in its format.

        Raises:
            ValueError: if ``inputs`` is None before the first call, and if ``declared`` is unknown or a scaled format.
                Also what capturing raises.

        Example::

            print(compiled.leaks(x))
        """
        if inputs is None:
            return _leaks(self._called, self.policy, declared, None, self.rng, None)
        args, kwargs = arguments(inputs)
        with torch.set_grad_enabled(tangents is not None):
            entry = self._entry(args, kwargs)
        return _leaks(entry, self.policy, declared, pytree.tree_leaves((args, kwargs)), self.rng, tangents)


def _leaks(
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
    found = edges(entry.lowered, policy, fmt)
    counts = None if leaves is None else _counts(entry, found, leaves, rng, tangents)
    return leaks_of(found, immediates(entry.lowered, fmt), counts)


def _counts(
    entry: Entry, found: Sequence[Edge], leaves: Sequence[Any], rng: Tensor, tangents: Mapping[int, Tensor] | None
) -> dict[Edge, Count]:
    """Return how many elements of the values of one call are outside, for the edges of a format."""
    wanted: dict[str, list[Edge]] = {}
    for edge in found:
        if isinstance(edge.declared, Format) and not edge.accumulator:
            wanted.setdefault(edge.producer.name, []).append(edge)
    counts: dict[Edge, Count] = {}

    def count(name: str, value: Any) -> None:
        each: dict[Any, Count] = {}
        for edge in wanted.pop(name, ()):
            counts[edge] = each.setdefault(edge.declared, _count(value, edge.declared))

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
    numbers = value.detach().to("cpu", torch.float64).numpy()
    outside = ~declared.contains(numbers)
    if not outside.any():
        return Count(0, numbers.size)
    first = np.unravel_index(int(outside.argmax()), numbers.shape)
    return Count(int(outside.sum()), numbers.size, tuple(map(int, first)), float(numbers[first]))
