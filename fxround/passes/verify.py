"""Verify: the invariants of the graph after every pass, and at the end.

After every pass the graph is well formed, and every value that existed already has its shape and dtype. At the end
every floating-point value is accounted for: rounded by fxround's own operator, exact, moved, or native with a reason. A
violation is a defect of fxround and raises VerificationError, which names the pass.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from fxround.errors import VerificationError
from fxround.graph.dialect import CALLS
from fxround.graph.geometry import surely
from fxround.graph.site import float_value, site
from fxround.graph.values import refresh
from fxround.passes.rewrite import decided


def verify(graph: fx.GraphModule, name: str) -> None:
    """Raise VerificationError if the graph is malformed or a value changed its shape or dtype in the pass ``name``."""
    try:
        graph.graph.lint()
        changed = refresh(graph)
    except (RuntimeError, TypeError, ValueError) as error:
        raise VerificationError(f"after {name}: the graph is malformed: {error}") from error
    compared: set[tuple[int, int]] = set()  # equal layers share their fake values
    for key, (before, now) in changed.items():
        pair = id(before), id(now)
        if before is None or pair in compared:
            continue
        compared.add(pair)
        if not _same(before, now):
            raise VerificationError(f"after {name}: {key} was {_described(before)}, now it is {_described(now)}")


def _same(before: Any, now: Any) -> bool:
    """Whether the tensors of two values have the same dtypes and shapes.

    A recomputation may write a size in another way that the conditions of the graph prove equal, such as n // 4 as 1.
    """
    if _described(before) == _described(now):
        return True
    pairs = list(itertools.zip_longest(_tensors(before), _tensors(now)))
    return all(
        a is not None and b is not None and a.dtype == b.dtype and a.dim() == b.dim()
        and all(surely(m == n) for m, n in zip(a.shape, b.shape, strict=True))
        for a, b in pairs
    )  # fmt: skip


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _described(value: Any) -> str:
    """Describe the tensors of a value.

    Every recomputation renames sizes that depend on data, so their numbers are left out.
    """
    leaves = _tensors(value)
    return ", ".join(re.sub(r"\bu\d+\b", "u", f"{leaf.dtype} {tuple(leaf.shape)}") for leaf in leaves)


def verify_accounted(graph: fx.GraphModule) -> None:
    """Raise VerificationError unless the status of every floating-point value agrees with its operator."""
    for node in graph.graph.nodes:
        if node.op != "call_function" or float_value(node) is None:
            continue
        place = site(node)
        if place is None:
            raise VerificationError(f"{node.name} ({node.target}) has no Site")
        # A draw is an operator of fxround's and rounds nothing.
        ours = (
            node.target in CALLS
            and CALLS[node.target].rounds
            and not (place.kind == "random" and place.status == "exact")
        )
        if ours != (place.status == "rounded"):
            raise VerificationError(f"{node.name} ({node.target}) claims to be {place.status}: {place}")
        if place.status == "native" and not place.reason:
            raise VerificationError(f"{node.name} is native without a reason: {place}")
        if ours and decided(place) is None:
            raise VerificationError(f"{node.name} was rounded although the policy leaves it alone: {place}")
