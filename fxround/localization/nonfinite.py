"""Find the operations that create NaNs and infinities, in one run.

An operation creates a NaN if it yields one and has none among its operands, and an infinity if all its operands are
finite; operations that pass them on are not reported. What enters the model creates one if the policy's rounding does.
Operands of pointwise operations are compared element by element, those of others as a whole. A number that the program
contains (-inf in a mask) is not reported. Example::

    first_nonfinite(model, x)      # exp in loss.py:12: inf at [0, 3] from 97.2; it reaches the output
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import networkx as nx
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxround.graph.site import PORT, located
from fxround.localization.masked_model import Masked
from fxround.module.rounded_module import PolicyLike
from fxround.operators.rules import CONSTANTS, rule_of
from fxround.views.table import Table, Tabled

Operands = Mapping[fx.Node, Any]


@dataclass(frozen=True)
class Birth:
    """A node that creates NaNs or infinities.

    node, operator, module, source, code   the node and its place in the model
    value, index   the first such element
    many        the number of such elements
    operands    the operands of a pointwise operation at that element
    reaches     whether values that are not finite lead from the node to the output
    """

    node: str
    operator: str
    module: str
    source: str
    code: str
    value: float
    index: tuple[int, ...]
    many: int
    operands: tuple[float, ...]
    reaches: bool


@dataclass(frozen=True, repr=False)
class NonfiniteReport(Tabled):
    """The nodes that create NaNs or infinities, in the order of the graph; ``output``: how many the output has."""

    births: tuple[Birth, ...]
    output: int
    policy: str

    @property
    def first(self) -> Birth | None:
        """The first node that creates one; None if there is none."""
        return self.births[0] if self.births else None

    def table(self) -> Table:
        """Return a table with one row per node."""
        rows = [
            (
                *(b.module or "(root)", b.operator, b.source, b.code, str(b.value), str(list(b.index)), b.many),
                ", ".join(f"{o:g}" for o in b.operands),
                "yes" if b.reaches else "no",
            )
            for b in self.births
        ]
        columns = ("module", "operator", "source", "code", "value", "at", "many", "from", "reaches the output")
        note = f"{self.output} elements of the output are not finite." if self.output else "The output is finite."
        return Table(columns, tuple(rows), title=f"Births of NaNs and infinities, policy {self.policy}", note=note)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data; values that are not finite become text."""
        births = [
            asdict(b) | {"value": str(b.value), "operands": [o if math.isfinite(o) else str(o) for o in b.operands]}
            for b in self.births
        ]
        return {"births": births, "output": self.output, "policy": self.policy}


def first_nonfinite(
    model: nn.Module, inputs: Any, policy: PolicyLike = "identity", *, seed: int = 0, sample: int = 0
) -> NonfiniteReport:
    """Find the operations that create NaNs and infinities in one run under ``policy``, with module path and source
    line.

    inputs: a tensor, a tuple of arguments, a dict of keywords, or a tuple and a dict. Raises what ``fxround.compile``
    raises.
    """
    masked = Masked(model, policy, inputs, quiet="identity", memory=0)
    births: dict[str, Birth] = {}
    tainted: set[str] = {masked.output.name}

    def note(node: fx.Node, operands: Operands, value: Any) -> None:
        if not all(map(_finite, _floats(value))):
            tainted.add(node.name)
            birth = _birth(node, operands, value)
            births.update({node.name: birth} if birth else {})

    output = masked.run(masked.sites, seed=seed, sample=sample, observe=note)
    reaching = nx.ancestors(masked.flow().subgraph(tainted), masked.output.name)
    reported = tuple(Birth(**{**vars(birth), "reaches": name in reaching}) for name, birth in births.items())
    bad = sum(int((~x.isfinite()).sum()) for x in _floats(output))
    return NonfiniteReport(reported, bad, masked.policy.name)


def _birth(node: fx.Node, operands: Operands, value: Any) -> Birth | None:
    entering = node.op == "placeholder"
    if not (entering or node.op == "call_function") or not isinstance(value, Tensor) or str(node.target) in CONSTANTS:
        return None
    given = [*(x for o in operands.values() for x in _floats(o)), *_numbers(node)]
    rule = None if entering else rule_of(node)
    pointwise = entering or (rule is not None and rule.kind in ("pointwise", "elementary"))
    nans, infinite = (_any(given, value, kind, pointwise) for kind in (torch.isnan, lambda x: ~torch.isfinite(x)))
    born = (value.isnan() & ~nans) | (value.isinf() & ~infinite)
    if not bool(born.any()):
        return None
    index = tuple(int(i) for i in born.nonzero()[0])
    here = [float(x.expand(value.shape)[index]) for x in given] if pointwise else []
    place, port = located(node), node.meta.get(PORT)
    return Birth(
        node=node.name,
        operator=place.operator if port is None else f"rounding of {port.kind} {port.name or port.index}",
        module=place.path if port is None else port.name.rpartition(".")[0],
        source=place.source,
        code=place.code,
        value=float(value[index]),
        index=index,
        many=int(born.sum()),
        operands=tuple(here),
        reaches=False,
    )


def _any(given: list[Tensor], value: Tensor, kind: Any, pointwise: bool) -> Tensor:
    """Tell where an operand is of the kind: at the element itself, or anywhere."""
    mask = torch.zeros((), dtype=torch.bool, device=value.device)
    for x in given:
        mask = mask | (kind(x) if pointwise else kind(x).any())
    return mask.expand(value.shape)


def _numbers(node: fx.Node) -> list[Tensor]:
    """The floating-point numbers among the arguments."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [torch.tensor(leaf, dtype=torch.float64) for leaf in leaves if isinstance(leaf, float)]


def _floats(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()]


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())
