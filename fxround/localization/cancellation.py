"""Cancellation: count the bits that cancel in additions, in one run without perturbation.

The bits that cancel in an addition are the exponent of its largest operand minus the exponent of its result: relative
to the result, the errors of the operands grow by that many bits. In a sum or a prefix sum, the largest term replaces
the operand; in a matrix product or a convolution, the sum of the magnitudes of its products. A result of zero has
lost the whole precision, except in ``x - amax(x)``, whose zeros are exact by construction. The count is computed from
the exponents of the values that occurred. A cancellation is harmless if the operands are exact; ``localize`` shows the
effect on the output. Computations of indices are left out.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxround.graph.dtypes import FORMAT_OF
from fxround.graph.site import float_value, located
from fxround.localization.masked_model import Masked
from fxround.module.rounded_module import PolicyLike
from fxround.numerics.formats import Format
from fxround.operators.rules import rule_of
from fxround.views.table import Table, Tabled

Operands = Mapping[fx.Node, Any]


@dataclass(frozen=True)
class Cancellation:
    """One node that adds.

    node, operator, module, source, code   the node and its place in the model
    lost        the bits that cancel in its worst element
    index       the index of that element
    largest     the magnitude of the largest operand there; ``result``: the value
    many        the number of elements that lose more than the ``bits`` passed, of ``elements``
    """

    node: str
    operator: str
    module: str
    source: str
    code: str
    lost: float
    index: tuple[int, ...]
    largest: float
    result: float
    many: int
    elements: int


@dataclass(frozen=True, repr=False)
class CancellationReport(Tabled):
    """The nodes that add, worst first; ``bits`` is the threshold of ``many``."""

    nodes: tuple[Cancellation, ...]
    bits: float
    policy: str

    def table(self) -> Table:
        """Return a table with one row per node in which bits cancel."""
        rows = [
            (n.module or "(root)", n.operator, n.source, n.code, n.lost, n.many, n.elements, str(list(n.index)))
            for n in self.nodes
            if n.lost
        ]
        columns = ("module", "operator", "source", "code", "bits lost", f"> {self.bits:g} bits", "elements", "worst at")
        quiet = len(self.nodes) - len(rows)
        return Table(
            columns, tuple(rows), title=f"Cancellation, policy {self.policy}", note=f"{quiet} others lose none."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        return asdict(self)


def cancellations(
    model: nn.Module, inputs: Any, policy: PolicyLike = "identity", *, bits: float = 10, seed: int = 0, sample: int = 0
) -> CancellationReport:
    """Count the bits that cancel in every addition, sum and product of matrices of one run under ``policy``, worst
    first.

    inputs: a tensor, a tuple of arguments, a dict of keywords, or a tuple and a dict. bits: ``many`` counts the
    elements that lose more. Raises what ``fxround.compile`` raises.
    """
    masked = Masked(model, policy, inputs, quiet="identity", memory=0)
    losses = cancelled(masked, masked.sites, bits=bits, seed=seed, sample=sample)
    return CancellationReport(tuple(sorted(losses, key=lambda n: (-n.lost, -n.many))), bits, masked.policy.name)


def cancelled(
    masked: Masked, on: Collection[str] = (), *, bits: float = 10, seed: int = 0, sample: int = 0
) -> list[Cancellation]:
    """Return the nodes that add, in the order of the graph, with their bits that cancel in a run with ``on``."""
    losses: list[Cancellation] = []

    def note(node: fx.Node, operands: Operands, value: Any) -> None:
        place = masked.place(node.name)
        largest = _largest(node, operands) if place is not None and place.kind != "coordinate" else None
        if largest is not None and float_value(node) is not None and value.numel():
            losses.append(_cancellation(node, largest.expand(value.shape).double(), value, bits))

    masked.run(on, seed=seed, sample=sample, observe=note)
    return losses


def _largest(node: fx.Node, operands: Operands) -> Tensor | None:
    """Return the magnitude that cancels, for every element of the result; None for a node that does not add."""
    rule = rule_of(node) if node.op == "call_function" else None
    if rule is None:
        return None
    args: Any = fx.map_arg(node.args, operands.__getitem__)
    if terms := re.fullmatch(r"(?:add|sub)\(\{(\d+)\}, \{(\d+)\}\)", rule.body):
        a, b = (torch.as_tensor(args[int(position)]).abs().double() for position in terms.groups())
        return torch.maximum(a, b)
    if rule.kind == "contraction" and float_value(node) is not None and node.target is not operator.getitem:
        target: Any = node.target
        magnitudes: Tensor = target(*(a.abs() if isinstance(a, Tensor) else a for a in args))
        return magnitudes
    if rule.lower == "sum":
        dims = (list(args[1] or []) if len(args) > 1 else []) or list(range(args[0].dim()))
        keep = bool(args[2]) if len(args) > 2 else False
        return args[0].abs().amax(dims, keepdim=keep) if args[0].numel() else None
    return args[0].abs().cummax(args[1]).values if rule.lower == "cumsum" else None


def _cancellation(node: fx.Node, largest: Tensor, value: Tensor, bits: float) -> Cancellation:
    precision = Format.parse(FORMAT_OF[value.dtype]).precision
    lost = _exponent(largest) - _exponent(value.double())
    vanished = (value == 0) & (largest != 0)
    lost = torch.where(vanished, 0 if _shifts_by_maximum(node) else precision, lost.clamp(0, precision))
    lost = torch.where(largest.isfinite() & value.isfinite() & (largest != 0), lost, 0)
    worst = int(lost.argmax())
    place = located(node)
    return Cancellation(
        node=node.name,
        operator=place.operator,
        module=place.path,
        source=place.source,
        code=place.code,
        lost=float(lost.flatten()[worst]),
        index=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), value.shape)),
        largest=float(largest.flatten()[worst]),
        result=float(value.flatten()[worst]),
        many=int((lost > bits).sum()),
        elements=value.numel(),
    )


def _exponent(x: Tensor) -> Tensor:
    return torch.frexp(x).exponent.double()


def _shifts_by_maximum(node: fx.Node) -> bool:
    """Whether the node is ``x - amax(x)``, the first step of softmax."""
    shift = node.args[1] if len(node.args) > 1 else None
    return isinstance(shift, fx.Node) and "amax" in str(shift.target) and shift.args[0] is node.args[0]
