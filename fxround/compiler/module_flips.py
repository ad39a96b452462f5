"""``RoundedModule.flips``: the bits that faults flip in a call, and the elements of the results that they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fxround.compiler.executable import Entry
from fxround.compiler.module_leaks import Leaking
from fxround.compiler.signature import arguments
from fxround.graph.dialect import Pointwise, read
from fxround.graph.site import site
from fxround.kernels.program import Program
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.faults import Faults, numbers_of
from fxround.passes.inject_faults import FLIP, before_flips
from fxround.passes.leaks import operand_source, unrounded
from fxround.policy import Policy, Rule
from fxround.runtime.accumulator_faults import count_faults
from fxround.views.flips import Flip, Flips, flips_of
from fxround.views.leaks import value_name

# The integers that hold the encodings of dtypes.
_CODES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Faulting(Leaking):
    """The part of a compiled module that counts flipped bits."""

    def with_policy(self, policy: Any, strict: bool | None = None) -> Self:
        """Return the same model under another policy. ``RoundedModule`` defines it."""
        raise NotImplementedError

    @torch.no_grad()
    def flips(self, inputs: Any, *, tangents: Mapping[int, Tensor] | None = None) -> Flips:
        """Run the model, and return the bits that the policy's faults flip and how many elements of the results change.

        The flips are those of a call with the same seed and sample. Buffers and arguments are not written, and the
        sample does not change.

        Args:
            inputs: arguments as ``example_inputs`` of ``compile``.
            tangents: the gradient of each result as in ``observe_step``, for a training step; None for a forward pass.

        Raises:
            What capturing raises.
        """
        args, kwargs = arguments(inputs)
        leaves = pytree.tree_leaves((args, kwargs))
        quiet = self.with_policy(_without_faults(self.policy))
        with torch.set_grad_enabled(tangents is not None):
            entry, other = self._entry(args, kwargs), quiet._entry(args, kwargs)
        rows, output = _flips(entry, leaves, self.rng, tangents)
        *_, (_, expected) = other.steps(leaves, self.rng, tangents)
        pairs = zip(_tensors(output), _tensors(expected), strict=True)
        changed = sum(_differ(a, b) for a, b in pairs)
        return flips_of(rows, changed, sum(t.numel() for t in _tensors(output)))


def _without_faults(policy: Policy) -> Policy:
    """Return the policy with faults of probability 0, which flip nothing; its rules still match what they matched."""

    def without(rule: Rule) -> Rule:
        kept = " ".join(word for word in (rule.accumulate or "").split() if not word.startswith("faults="))
        return replace(rule, faults=rule.faults and "any:0", accumulate=kept or None)

    return replace(policy, rules=tuple(map(without, policy.rules)))


def _flips(
    entry: Entry, leaves: Sequence[Any], rng: Tensor, tangents: Mapping[int, Tensor] | None
) -> tuple[list[Flip], Any]:
    """Return a row for each fault of a graph, and the results."""
    faults = {node.name: node for node in entry.lowered.graph.nodes if _is_fault(node)}
    read_by: dict[str, list[fx.Node]] = {}
    for node in faults.values():
        read_by.setdefault(node.args[0][0].name, []).append(node)
    chains = {node.name: node for node in entry.lowered.graph.nodes if _accumulation(node) is not None}
    operands = {used.name for node in chains.values() for used in node.all_input_nodes}
    kept: dict[str, Any] = {}
    values: dict[str, Any] = {}
    rows: list[Flip] = []

    def seen(name: str, value: Any) -> None:
        if name in operands:
            values[name] = value
        if name in chains:
            rows.extend(_rows_of_chain(chains[name], values, rng))
        if name in faults:
            rows.append(_row(faults[name], kept.pop(name), value))
        for node in read_by.get(name, ()):
            kept[node.name] = value

    for name, value in entry.named(leaves, tangents).items():
        seen(name, value)
    output = None
    for name, value in entry.steps(leaves, rng, tangents):
        output = value
        seen(name, value)
    return rows, output


def _is_fault(node: fx.Node) -> bool:
    place = site(node)
    return place is not None and place.operator == FLIP


def _row(node: fx.Node, before: Tensor, after: Tensor) -> Flip:
    call, place = read(node), site(node)
    assert isinstance(call, Pointwise) and place is not None
    fault = place.reason.rpartition(" ")[2]
    of_scale = Faults.parse(fault).faults[0].of_scale
    source = _scaled_by(node) if of_scale else operand_source(node) if place.kind == "operand" else unrounded(node)
    made = site(source)
    assert made is not None
    (statement,) = Program.parse(call.program).statements
    numbers = numbers_of(statement.operator)
    assert numbers is not None and statement.rounding is not None
    _, count, q = numbers
    return Flip(
        value=f"{'scales of ' if of_scale else ''}{value_name(source, made)}",
        node=node.name,
        module=place.path,
        source=place.source,
        format=str(statement.rounding.format),
        fault=fault,
        elements=after.numel(),
        flipped=_differ(before, after),
        expected=after.numel() * min(count * q, 1 << 32) / 2**32,
        direction=place.direction,
        role=place.role,
        operator=made.operator,
    )


def _accumulation(node: fx.Node) -> Accumulation | None:
    """Return how an operation accumulates if its accumulators have faults, else None."""
    text = getattr(read(node), "accumulate", "")
    return Accumulation.parse(text) if "faults=" in text else None


def _rows_of_chain(node: fx.Node, values: Mapping[str, Any], rng: Tensor) -> list[Flip]:
    """Return a row for each fault of an operation's accumulators. values: those that the operation reads."""
    call, how, place = read(node), _accumulation(node), site(node)
    assert call is not None and how is not None and how.flips is not None and place is not None
    # The random state is no value of the graph.
    run: Any = type(call).of(fx.map_arg(call.arguments(), lambda used: values.get(used.name, rng)))
    steps = count_faults(run, None)
    return [
        Flip(
            value=f"accumulators of {value_name(node, place)}",
            node=node.name,
            module=place.path,
            source=place.source,
            format=str(how.step.format),
            fault=str(fault),
            elements=steps,
            flipped=count_faults(run, number),
            expected=steps * fault.probability,
            direction=place.direction,
            role=place.role,
            operator=place.operator,
        )
        for number, fault in enumerate(how.flips.faults)
    ]


def _scaled_by(scale: fx.Node) -> fx.Node:
    """Return the value whose elements are multiplied by a scale."""
    user: fx.Node
    for user in scale.users:
        call = read(user)
        if not isinstance(call, Pointwise) or call.xs[0] is scale:
            return _scaled_by(user)
        elements = read(before_flips(call.xs[0]))
        assert isinstance(elements, Pointwise)
        return operand_source(elements.xs[0])
    raise AssertionError(f"{scale.name} scales nothing")


def _differ(a: Tensor, b: Tensor) -> int:
    """Return how many elements have other encodings; two NaNs are equal."""
    if not a.is_floating_point():
        return int((a != b).sum())
    code = _CODES[a.element_size()]
    return int(((a.contiguous().view(code) != b.contiguous().view(code)) & ~(a.isnan() & b.isnan())).sum())


def _tensors(results: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
