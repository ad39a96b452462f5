"""``fxround.perturb``: perturb a model inside of code that cannot be changed.

What is true here. Within the block, a call of the model (or of its ``forward``) runs it under the policy; behind the
block the model is what it was, errors included. Each call is a sample of its own: call k of a block has the bits of
(seed, sample + k), so that a loop over batches, or a text generated token by token, does not meet the same noise
again and again; the same seed repeats the whole block.

Why it is safe. Nothing of the model is replaced but its class, by a subclass with two methods, and that only while
the block lasts. Parameters, buffers, hooks and ``isinstance`` stay. Calls of a submodule that do not come through the
model are not perturbed: pass that submodule.

    before   accuracy = evaluate(model)                  # somebody else's function
    after    with fxround.perturb(model, seed=run): accuracy = evaluate(model)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fxround.compiler import RoundedModule, compile
from fxround.policy import Policy


@contextmanager
def perturb(
    model: nn.Module, policy: Any = "stochastic", *, seed: int = 0, sample: int = 0, strict: bool | None = None
) -> Iterator[RoundedModule]:
    """Run ``model`` under ``policy`` within the block; yields the compiled module (for ``coverage()`` and its like).

    model: the module that the code in the block calls. policy, strict: as for ``compile``. seed, sample: of the first
    call. Raises what ``compile`` raises, ValueError if the model is perturbed already."""
    original = type(model)
    if getattr(original, "_fxround_perturbed", False):
        raise ValueError(f"{original.__name__} is perturbed already: leave that block first")
    compiled = compile(model, Policy.parse(policy), strict=strict, seed=seed)
    perturbed = _perturbed(original, compiled, sample)
    model.__class__ = perturbed
    try:
        yield compiled
    finally:
        model.__class__ = original


def _perturbed(original: type[nn.Module], compiled: RoundedModule, sample: int) -> type[nn.Module]:
    """A subclass whose calls are those of the compiled module."""
    seed, calls = int(compiled.rng[0]), 0

    def run(self: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal calls
        compiled.reseed(seed, sample=sample + calls)
        calls += 1
        perturbed = type(self)
        self.__class__ = original  # the compiled module captures and runs the model itself
        try:
            return compiled(*args, **kwargs)
        finally:
            self.__class__ = perturbed

    @functools.wraps(original.__call__)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    members = {"__call__": call, "forward": forward, "_fxround_perturbed": True, "__doc__": original.__doc__}
    return type(original.__name__, (original,), members | {"__module__": original.__module__})
