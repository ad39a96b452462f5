"""The pipeline: from a captured graph and a policy to a graph of explicitly rounded operations.

What is true here. ``PIPELINE`` is the order; a pass is one function in one file that changes the graph in place, and
is verified before the next one runs. Under the identity policy no operator changes but for its layout, so the
lowered graph gives the bits of the captured graph.

    before   mm = aten.mm.default(x, w); add = aten.add.Tensor(mm, b)
    after    mm = fxround.matmul(x, w, "binary32/nearest_even/inf", ..., rng, 0); add = fxround.pointwise([mm, b], ...)
"""

from __future__ import annotations

import copy
from typing import Final

import torch
from torch import fx

from fxround.graph import ORIGIN, module_of, settle
from fxround.passes.assign import assign
from fxround.passes.choose import choose
from fxround.passes.classify import classify
from fxround.passes.contractions import lower_contractions
from fxround.passes.draws import lower_draws
from fxround.passes.entries import add_random_state, round_entries, round_operands
from fxround.passes.fuse import fuse
from fxround.passes.gradients import treat_gradients
from fxround.passes.hoist import hoist
from fxround.passes.normalize import normalize
from fxround.passes.pointwise import lower_pointwise
from fxround.passes.reductions import lower_reductions
from fxround.passes.results import round_results, round_selections
from fxround.passes.rewrite import Pass, Plan
from fxround.passes.verify import verify, verify_accounted
from fxround.program import EXACT
from fxround.tracing import quickened, uncollected

PIPELINE: Final[tuple[Pass, ...]] = (
    normalize,
    classify,
    assign,
    add_random_state,
    treat_gradients,
    round_operands,
    lower_draws,
    lower_contractions,
    lower_reductions,
    lower_pointwise,
    round_entries,
    round_results,
    round_selections,
)


@uncollected()
@quickened()
def lower(graph: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """A new graph, lowered by every pass of the pipeline; ``graph`` stays as it is.

    Every node says which node of ``graph`` it computes, alone or with others: ``node.meta[ORIGIN]`` is that one's name.

    Raises PolicyError, UnsupportedOperator or UnsupportedRounding for what the policy asks in vain, and
    VerificationError if a pass broke an invariant.
    """
    lowered = module_of(graph, copy.deepcopy(graph.graph))
    for node in lowered.graph.nodes:
        node.meta[ORIGIN] = node.name
    settle(lowered)
    for step in PIPELINE:
        step(lowered, plan)
        verify(lowered, step.__name__)
    verify_accounted(lowered)
    return lowered


@uncollected()
@quickened()
def optimize(lowered: fx.GraphModule) -> fx.GraphModule:
    """A new graph of the same bits in fewer passes over memory; ``lowered``, which can be read, stays as it is.

    Raises VerificationError if a fused value has another shape or dtype than before.
    """
    fused = fuse(hoist(choose(lowered)))
    settle(fused, [node for node in fused.graph.nodes if _is_made(node)])
    verify(fused, fuse.__name__)
    return fused


def _is_made(node: fx.Node) -> bool:
    """Whether ``optimize`` made the node's program."""
    chosen = node.target is torch.ops.fxround.pointwise.default and str(node.args[1]).endswith(f"@ {EXACT}")
    return chosen or node.target is torch.ops.fxround.fused.default


__all__ = ["PIPELINE", "Plan", "lower", "optimize"]
