"""Assign: ask the policy about every value that it may round.

The pass stores what the policy said in the Site's assignment, resolved for the value's dtype; None if no rule matches.
A rule for results that matches nothing raises PolicyError. Rules that have operands only are asked where operands are
rounded (passes.round_inputs).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Final

from torch import fx

from fxround.graph.dialect import graphs_of
from fxround.graph.dtypes import FORMAT_OF
from fxround.graph.site import META, ROLE, Site, float_values
from fxround.numerics.modes import MODES
from fxround.operators.rules import CONSTANTS
from fxround.passes.loops import carried_role
from fxround.passes.rewrite import Plan, sites
from fxround.policy import ENTERING, Assignment

_ASKED: Final = frozenset(
    {"pointwise", "elementary", "contraction", "reduction", "exact", "random", "opaque", "unknown", "placeholder"}
)


def assign(graph: fx.GraphModule, plan: Plan) -> None:
    """Attach the policy's assignments, in loops too; raise PolicyError for a rule that matches nothing."""
    matched: set[int] = set()

    @cache
    def ask(path: str, operator: str, kind: str, role: str, direction: str, dtype: str) -> Assignment | None:
        place = {"path": path, "operator": operator, "kind": kind, "role": role, "direction": direction}
        matched.update(plan.policy.matching(**place))
        return plan.policy.assign(**place, dtype=dtype)

    everywhere = [pair for part in graphs_of(graph) for pair in sites(part) if carried_role(pair[0]) is None]
    for node, place in everywhere:
        values = float_values(node)
        entry = (place.role in ENTERING and _enters(node)) or _is_stored(node, place)
        if not values or not (place.kind in _ASKED or entry):
            continue
        dtype = FORMAT_OF[values[0].dtype]
        assignment = ask(place.path, place.operator, place.kind, place.role, place.direction, dtype)
        node.meta[META] = replace(place, assignment=_of_an_integer(node, assignment))
    matched.update(i for i, rule in enumerate(plan.policy.rules) if not rule.speaks_of_results)
    paths, directions = [p.path for _, p in everywhere], {p.direction for _, p in everywhere}
    operators = [(p.operator, p.kind) for _, p in everywhere if p.kind in _ASKED and p.kind != "placeholder"]
    plan.policy.require_matched(matched, paths, directions, operators)


def _of_an_integer(node: fx.Node, said: Assignment | None) -> Assignment | None:
    """Return the assignment of a conversion of an integer tensor: up_down must not move it if it is exact.

    Counts and indices are compared and binned as floating-point numbers: one ulp below 3 selects another expert for a
    token.
    """
    if said is None or said.rounding is None or not said.rounding.mode.moves:
        return said
    if str(node.target) != "aten._to_copy.default" or node.all_input_nodes[0].meta["val"].is_floating_point():
        return said
    return replace(said, rounding=replace(said.rounding, mode=MODES["stochastic"]))


def _enters(node: fx.Node) -> bool:
    """Whether the value comes from outside or from the program text. A moved weight does not count."""
    return node.op in ("placeholder", "get_attr") or str(node.target) in CONSTANTS


def _is_stored(node: fx.Node, place: Site) -> bool:
    """Whether an optimizer keeps the value although no operation computes it: a momentum begins as a copy."""
    return node.op == "call_function" and place.direction == "update" and node.meta.get(ROLE) in ("state", "weight")
