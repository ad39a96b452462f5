"""The warning, given once, that a module is applied to its own result with the same random bits.

Without gradients a call does not change (seed, sample), so that it can be repeated. A time step or a sampler that is
iterated in this way draws the same bits at every step: its rounding errors are correlated, and add up systematically.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.errors import callers


class Repeats:
    """The results of a module's latest call, held weakly, and the (seed, sample) of that call."""

    def __init__(self) -> None:
        self._drawn: Tensor | None = None
        self._returned: list[weakref.ref[Tensor]] = []
        self._told = False

    def warn(self, module: nn.Module, leaves: Sequence[Any], result: Any, rng: Tensor) -> None:
        """Warn once if a call received a result of the previous call, made with the same ``rng`` (seed, sample)."""
        if self._told:
            return
        earlier = [x for ref in self._returned if (x := ref()) is not None] if self._drawn is rng else []
        if earlier and any(leaf is tensor for leaf in leaves for tensor in earlier):
            self._told = True
            seed, sample = rng.tolist()
            warnings.warn(
                f"the compiled {type(module).__name__} is applied to its own result with the same seed {seed} and "
                f"sample {sample}: every call draws the same random bits, so that the errors of an iteration are not "
                "independent. Pass advance=True to fxround.compile, or call reseed(seed, sample=i) before step i.",
                UserWarning,
                stacklevel=callers(),
            )
        self._drawn = rng
        results = [result] if isinstance(result, Tensor) else pytree.tree_leaves(result)
        # Integers, and an argument that is returned, have no rounding errors.
        self._returned = [
            weakref.ref(x)
            for x in results
            if isinstance(x, Tensor) and x.is_floating_point() and not any(x is leaf for leaf in leaves)
        ]
