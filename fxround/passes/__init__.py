"""The pipeline of passes, from a captured graph and a policy to a graph of explicitly rounded operations.

``LOWERING`` gives the order. A pass is a function that changes the graph in place, and the graph is verified after
each. For example, ``aten.mm`` and ``aten.add`` become
``fxround.matmul(x, w, "binary32/nearest_even/inf", ...)`` and ``fxround.pointwise([mm, b], ...)``. Under the identity
policy no operator changes except in its layout, so the lowered graph gives the bits of the captured graph.
"""

from __future__ import annotations

import copy
from typing import Final

from torch import fx

from fxround.capture.torch_private import quickened, uncollected
from fxround.graph.dialect import Fused, graphs_of, loops_of, read_map
from fxround.graph.site import ORIGIN
from fxround.graph.values import drop_aliases, module_of, settle
from fxround.kernels.program import UNROUNDED
from fxround.passes.assign import assign
from fxround.passes.classify import classify
from fxround.passes.complex_parts import split_complex
from fxround.passes.contractions import lower_contractions
from fxround.passes.dropout_masks import lower_draws
from fxround.passes.inject_faults import inject_faults
from fxround.passes.loops import own_bodies
from fxround.passes.normalize import normalize
from fxround.passes.number_parts import number_parts
from fxround.passes.optimizations.choose import choose
from fxround.passes.optimizations.fuse import fuse
from fxround.passes.optimizations.hoist import hoist
from fxround.passes.pointwise import lower_pointwise
from fxround.passes.random_states import add_random_state
from fxround.passes.reductions import lower_reductions
from fxround.passes.rewrite import Pass, Plan
from fxround.passes.round_fallbacks import compare_selections, round_results, round_selections
from fxround.passes.round_inputs import round_entries, round_operands
from fxround.passes.rounding_gradients import treat_gradients
from fxround.passes.scaled_results import round_scaled_results
from fxround.passes.shared_sums import add_shares, share_sums
from fxround.passes.verify import verify, verify_accounted

LOWERING: Final[tuple[Pass, ...]] = (
    normalize,
    split_complex,
    classify,
    assign,
    add_random_state,
    round_scaled_results,
    treat_gradients,
    round_operands,
    lower_draws,
    share_sums,
    lower_contractions,
    lower_reductions,
    add_shares,
    lower_pointwise,
    round_entries,
    round_results,
    round_selections,
    compare_selections,
    inject_faults,
    number_parts,
)


# The passes that ask the policy treat the bodies of loops together with the graph around them.
_OF_ALL: Final = (assign, round_operands)


def classified(graph: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Return a copy of a captured graph as the passes see it, before the policy is asked: every value has its Site."""
    copied = module_of(graph, copy.deepcopy(graph.graph))
    own_bodies(copied)
    for part in graphs_of(copied):
        settle(part)
    for step in (normalize, split_complex, classify):
        for part in _outer_first(copied):
            step(part, plan)
        for part in graphs_of(copied):
            verify(part, step.__name__)
    return copied


@uncollected()
@quickened()
def lower(graph: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Return a new graph, lowered by every pass of the pipeline; ``graph`` is not changed.

    ``node.meta[ORIGIN]`` of every node is the name of the node of ``graph`` that it computes, alone or with others.

    Raises PolicyError, UnsupportedOperator or UnsupportedRounding for what the policy asks and cannot have, and
    VerificationError if a pass broke an invariant.
    """
    lowered = module_of(graph, copy.deepcopy(graph.graph))
    for node in lowered.graph.nodes:
        node.meta[ORIGIN] = node.name
    for part in graphs_of(lowered):
        drop_aliases(part)
    own_bodies(lowered)
    for part in graphs_of(lowered):
        settle(part)
    for step in LOWERING:
        for part in (lowered,) if step in _OF_ALL else _outer_first(lowered):
            step(part, plan)
        for part in graphs_of(lowered):
            verify(part, step.__name__)
    for part in graphs_of(lowered):
        verify_accounted(part)
    return lowered


def _outer_first(graph: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the graph and the bodies of its loops. What a pass finds out about a body begins with its surroundings."""
    return list(graphs_of(graph))[::-1]


@uncollected()
@quickened()
def optimize(lowered: fx.GraphModule) -> fx.GraphModule:
    """Return a new graph with the same bits that reads and writes memory less often; ``lowered`` is not changed.

    Raises VerificationError if a fused value has another shape or dtype than it had.
    """
    fused = fuse(hoist(choose(lowered)))
    for loop, bodies in loops_of(fused):
        for name, body in zip(loop.bodies, bodies, strict=True):
            setattr(fused, name, optimize(body))
    settle(fused, [node for node in fused.graph.nodes if _is_made(node)])
    verify(fused, fuse.__name__)
    return fused


def _is_made(node: fx.Node) -> bool:
    """Whether ``optimize`` made the node's program."""
    call = read_map(node)
    return isinstance(call, Fused) or (call is not None and call.program.endswith(f"@ {UNROUNDED}"))


__all__ = ["LOWERING", "Plan", "lower", "optimize"]
