"""Numerical instabilities: cancellations, and divisions, products and comparisons of numbers without a digit.

The counts are those of CADNA, for the operations of a graph. Three samples of one model are computed with random
rounding, and the number of decimal digits that three values have in common, with a probability of 95 %, is

    C = log10(sqrt(3) |mean| / (tau s)),   tau = 4.3027, s the standard deviation (n - 1) of the three

(Student's distribution with two degrees of freedom). C is at most the decimal digits of the dtype, which equal nonzero
samples have. A *computed zero* has no significant digit: all samples are zero, or C <= 0.

Sources: Vignes, A stochastic arithmetic for reliable scientific computation, Mathematics and Computers in Simulation
35, 1993; Jézéquel and Chesneaux, CADNA: a library for estimating round-off error propagation, Computer Physics
Communications 178, 2008.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, fx, nn

from fxround.graph.dtypes import FORMAT_OF
from fxround.graph.site import located
from fxround.localization.masked_model import Masked
from fxround.module.rounded_module import PolicyLike
from fxround.numerics.formats import Format
from fxround.operators.rules import rule_of
from fxround.views.table import Table, Tabled

Kind = Literal["cancellation", "division", "multiplication", "branch"]
SAMPLES: Final = 3
STUDENT: Final = 4.302652729749464
"""The two-sided 95 % quantile of Student's distribution with two degrees of freedom."""
_SAID: Final[dict[Kind, str]] = {
    "division": "unstable divisions",
    "multiplication": "unstable multiplications",
    "branch": "unstable branches",
    "cancellation": "losses of accuracy by cancellation",
}
_COMPARISONS: Final = ("lt", "le", "gt", "ge", "eq", "ne")


@dataclass(frozen=True)
class Instability:
    """One kind of instability in one node.

    node, operator, module, source, code   the node and its place in the model
    kind     "division", "multiplication", "branch" or "cancellation"
    count    the elements of the result that have it, of ``elements``
    index    the index of the first one
    """

    node: str
    operator: str
    module: str
    source: str
    code: str
    kind: Kind
    count: int
    elements: int
    index: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class InstabilityReport(Tabled):
    """The instabilities in the order of the graph. ``digits``: what an addition loses if it is counted."""

    nodes: tuple[Instability, ...]
    digits: int
    policy: str
    seed: int

    @property
    def totals(self) -> dict[Kind, int]:
        """The number of instabilities of each kind."""
        return {kind: sum(n.count for n in self.nodes if n.kind == kind) for kind in _SAID}

    def table(self) -> Table:
        """Return a table with one row per node and kind; the note has the totals."""
        rows = tuple(
            (n.module or "(root)", n.operator, n.source, n.code, n.kind, n.count, n.elements, str(list(n.index)))
            for n in self.nodes
        )
        columns = ("module", "operator", "source", "code", "kind", "count", "elements", "first at")
        listed = ", ".join(f"{_SAID[kind]} {count}" for kind, count in self.totals.items() if count)
        total = sum(self.totals.values())
        note = f"{total} numerical instabilities: {listed}." if total else "No numerical instability."
        return Table(columns, rows, title=f"Instabilities, policy {self.policy}, {SAMPLES} samples", note=note)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data, and the totals."""
        return {**asdict(self), "totals": self.totals}


def instabilities(
    model: nn.Module, inputs: Any, policy: PolicyLike = "cestac", *, digits: int = 4, seed: int = 0
) -> InstabilityReport:
    """Count the numerical instabilities of three samples of one call, as CADNA defines them.

    - division: the divisor is a computed zero (``1 / x`` and ``reciprocal`` too).
    - multiplication: both factors are computed zeros.
    - branch: a comparison (<, <=, >, >=, ==, !=) of floating-point numbers whose difference is a computed zero.
    - cancellation: an addition or subtraction whose result has at least ``digits`` fewer whole significant digits than
      the less accurate operand.

    Operations are those of the graph, element by element: a matrix product or a sum is one operation, whose products
    and additions are not counted. Each sample takes its own branches. Elements with an infinity or a NaN in a sample
    are left out.

    inputs: a tensor, a tuple of arguments, a dict of keywords, or a tuple and a dict. policy: one that draws. digits: 1
    to 15. Raises ValueError for other digits and a policy that draws nothing, and what ``fxround.compile`` raises.
    """
    if type(digits) is not int or not 1 <= digits <= 15:
        raise ValueError(f"digits = {digits!r}: expected 1 to 15 decimal digits")
    masked = Masked(model, policy, inputs, quiet="identity", memory=0)
    if not masked.policy.draws:
        raise ValueError(f"policy {masked.policy.name!r} draws nothing, so that all samples are equal; use 'cestac'")
    kept: list[dict[str, tuple[Any, ...]]] = []
    for sample in range(SAMPLES):
        operands: dict[str, tuple[Any, ...]] = {}

        def note(node: fx.Node, values: Any, value: Any, into: dict[str, tuple[Any, ...]] = operands) -> None:
            read = _read(node)
            if read is not None and isinstance(value, Tensor) and not _is_of_indices(node, masked):
                args = fx.map_arg(node.args, values.__getitem__)
                into[node.name] = (value, *(args[i] for i in read[1]))

        masked.run(masked.sites, seed=seed, sample=sample, observe=note)
        kept.append(operands)
    nodes = [node for node in masked.nodes if node.name in kept[0]]
    counted = (_instability(node, [sample[node.name] for sample in kept], digits) for node in nodes)
    return InstabilityReport(tuple(n for n in counted if n is not None), digits, masked.policy.name, seed)


def _is_of_indices(node: fx.Node, masked: Masked) -> bool:
    """Whether a node computes positions, as those of an interpolation, or compares them."""
    places = (masked.place(n.name) for n in (node, *node.all_input_nodes))
    return any(place is not None and place.kind == "coordinate" for place in places)


def _read(node: fx.Node) -> tuple[Kind, tuple[int, ...]] | None:
    """Return the kind of instability that a node can have, and the positions of the arguments that decide; None."""
    rule = rule_of(node) if node.op == "call_function" else None
    if rule is None:
        return None
    if (name := str(node.target).split(".")[1]) in _COMPARISONS:
        return "branch", (0, 1)
    if terms := re.fullmatch(r"(?:add|sub)\(\{(\d+)\}, \{(\d+)\}\)", rule.body):
        return "cancellation", (int(terms[1]), int(terms[2]))
    if terms := re.fullmatch(r"mul\(\{(\d+)\}, \{(\d+)\}\)", rule.body):
        return "multiplication", (int(terms[1]), int(terms[2]))
    if terms := re.fullmatch(r"(?:floor|trunc)?div\(\{\d+\}, \{(\d+)\}\)", rule.body):
        return "division", (int(terms[1]),)
    return ("division", (0,)) if name in ("reciprocal", "rsqrt") else None


def _instability(node: fx.Node, samples: list[tuple[Any, ...]], digits: int) -> Instability | None:
    read = _read(node)
    assert read is not None
    kind, value = read[0], samples[0][0]
    operands = [torch.stack([_number(s[i], value) for s in samples]) for i in range(1, len(samples[0]))]
    floating = [_format(s) for s in samples[0][1:]]
    if all(f is None for f in floating) or not value.numel():
        return None
    precision = min(f.precision for f in floating if f is not None)
    most = int(precision * math.log10(2))
    where = _WHERE[kind](operands, torch.stack([_number(s[0], value) for s in samples]), most, digits)
    where &= torch.stack(operands).isfinite().all(0).all(0)
    count = int(where.sum())
    if not count:
        return None
    place = located(node)
    first = torch.unravel_index(where.flatten().int().argmax(), where.shape) if where.dim() else ()
    index = tuple(int(i) for i in first)
    return Instability(
        node.name, place.operator, place.path, place.source, place.code, kind, count, value.numel(), index
    )


def _format(x: Any) -> Format | None:
    """Return the format of a floating-point tensor."""
    return Format.parse(FORMAT_OF[x.dtype]) if isinstance(x, Tensor) and x.dtype in FORMAT_OF else None


def _number(x: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(x, device=like.device).double().expand(like.shape)


def common_digits(samples: Tensor, most: int) -> Tensor:
    """Return C for three samples along the first dimension (float64), 0 to ``most``; 0 for computed zeros."""
    # Divided by a power of two, so that no square of the deviation is beyond binary64's range.
    _, exponent = torch.frexp(samples.abs().amax(0))
    samples = torch.ldexp(samples, -exponent)
    mean, deviation = samples.mean(0).abs(), samples.std(0)
    common = torch.log10(SAMPLES**0.5 * mean / (STUDENT * deviation)).clamp(0, most)
    equal = (samples == samples[0]).all(0)
    return torch.where(equal, torch.where(samples[0] == 0, 0.0, float(most)), common.nan_to_num(0.0))


def _is_zero(samples: Tensor, most: int) -> Tensor:
    return common_digits(samples, most) == 0


def _cancels(operands: list[Tensor], results: Tensor, most: int, digits: int) -> Tensor:
    have = torch.minimum(*(common_digits(o, most).floor() for o in operands))
    return (have - common_digits(results, most).floor() >= digits) & results.isfinite().all(0)


_WHERE: Final[dict[Kind, Callable[[list[Tensor], Tensor, int, int], Tensor]]] = {
    "cancellation": _cancels,
    "division": lambda operands, _, most, __: _is_zero(operands[0], most),
    "multiplication": lambda operands, _, most, __: _is_zero(operands[0], most) & _is_zero(operands[1], most),
    "branch": lambda operands, _, most, __: _is_zero(operands[0] - operands[1], most),
}
