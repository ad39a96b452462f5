"""Flip bits of the values that rules name, after everything else was done to them.

``fxround.pointwise([x], "t0 = flip_0_3_1432(x0) @ e4m3fn/stochastic/nan", float32, rng, n)`` follows the last
rounding of a value, once for each field, and every use of the value reads the result: the backward pass sees the same
flipped bits, and gradients pass them unchanged. Each fault has a stream of its own, so that faults of different values
and fields are independent, and no rounding draws other bits than without them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from torch import fx

from fxround.graph.dialect import Pointwise, read
from fxround.graph.dtypes import STORAGES
from fxround.graph.site import Site, float_value, site
from fxround.numerics.faults import Fault, flip_operator
from fxround.numerics.formats import Format
from fxround.numerics.formats.encodings import Encoding
from fxround.passes import streams
from fxround.passes.rewrite import ROUND, Plan, decided, follow, locating, rng_of, sites

FLIP: Final = "fxround.flip"


def flip_of(
    graph: fx.GraphModule, node: fx.Node, place: Site, fault: Fault, encoding: Encoding, stream: int
) -> Pointwise[fx.Node]:
    """Return the call that flips bits of a node, whose values have this encoding; raises UnsupportedRounding."""
    fmt, span = encoding.format, [] if encoding.integers is None else [v.hex() for v in encoding.span or ()]
    with locating(place):
        operands = ", ".join(["x0", *span])
        program = f"t0 = {flip_operator(fault, encoding)}({operands}) @ {fmt}/stochastic/{fmt.default_overflow}"
        call = Pointwise([node], program, node.meta["val"].dtype, rng_of(graph), stream)
        call.kernel(call.loads())
    return call


def site_of(place: Site, fault: Fault, fmt: Format) -> Site:
    """Return the Site of a fault of the value at a place, or of its scales, in this format."""
    kind = "operand" if place.kind == "operand" or fault.of_scale or fault.of_tensor else "pointwise"
    return replace(place, operator=FLIP, kind=kind, status="rounded", reason=f"{fmt} flips {fault}")


def before_flips(node: fx.Node) -> fx.Node:
    """Return the value whose bits were flipped; else the node itself."""
    place, call = site(node), read(node)
    if place is not None and place.operator == FLIP and isinstance(call, Pointwise):
        return before_flips(call.xs[0])
    return node


def inject_faults(graph: fx.GraphModule, plan: Plan) -> None:
    """Insert the faults of every value that a rule with ``faults`` matches.

    Raises UnsupportedRounding for a format without an encoding, or a probability that is too small.
    """
    for node, place in sites(graph):
        wanted, value = decided(place), float_value(node)
        if wanted is None or wanted[0].faults is None or value is None or value.dtype not in STORAGES:
            continue
        if place.kind in ("operand", "random") or _is_rounded_later(node, place) or wanted[0].blocks is not None:
            continue
        with locating(place):
            encoding = Encoding(wanted[1].format)
        last = node
        for i, fault in enumerate(wanted[0].faults.faults):
            call = flip_of(graph, last, place, fault, encoding, streams.of_fault(place.number, i))
            last = follow(graph, last, call, site_of(place, fault, encoding.format), f"{node.name}_flipped")


def _is_rounded_later(node: fx.Node, place: Site) -> bool:
    """Whether a pass inserted a rounding of the value after it."""
    after = [site(user) for user in node.users if isinstance(call := read(user), Pointwise) and call.xs[0] is node]
    rounds = [p for p in after if p is not None and p.operator == ROUND and p.kind != "operand"]
    return any(p.number == place.number for p in rounds)
