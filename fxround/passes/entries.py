"""Entries: the random state becomes an input of the graph, and what enters it is rounded where the policy says so.

What is true here. The last placeholder is ``rng``, an int64 tensor (seed, sample): a run-time value, so that a new
seed needs no new graph. A weight, input, buffer or constant with an assignment is rounded once, before its first use.

    before   %w = placeholder[c.weight]; %mm = aten.mm.default(%x, %w)
    after    %w = placeholder[c.weight]; %r = fxround.pointwise([%w], "t0 = identity(x0) @ bfloat16/...", ...); ...
"""

from __future__ import annotations

import torch
from torch import fx

from fxround.graph import PORT, ROLE, Port, fake_mode
from fxround.numerics.formats import Format
from fxround.passes.rewrite import RNG, STORAGES, Plan, decided, keeps, round_after, sites
from fxround.policy import ENTERING
from fxround.refusals import FORMAT_OF


def add_random_state(graph: fx.GraphModule, plan: Plan) -> None:
    """Append the placeholder of (seed, sample)."""
    last = [node for node in graph.graph.nodes if node.op == "placeholder"]
    mode = fake_mode(graph)
    with graph.graph.inserting_after(last[-1]) if last else graph.graph.inserting_before(next(iter(graph.graph.nodes))):
        rng = graph.graph.placeholder(RNG)
    rng.meta[PORT] = Port("random")
    rng.meta["val"] = mode.from_tensor(torch.zeros(2, dtype=torch.int64), static_shapes=True)


def round_entries(graph: fx.GraphModule, plan: Plan) -> None:
    """Round the weights, inputs, buffers and constants that the policy names."""
    for node, place in reversed(sites(graph)):
        wanted = decided(place)
        stored = place.role in ENTERING or node.meta.get(ROLE) == "state"
        enters = place.kind == "placeholder" or (place.status == "movement" and stored)
        if not enters or wanted is None or node.meta["val"].dtype not in STORAGES:
            continue
        if not keeps(wanted[1], Format.parse(FORMAT_OF[node.meta["val"].dtype])):
            round_after(graph, node, wanted[1], place.number)
