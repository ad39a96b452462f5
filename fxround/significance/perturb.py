"""``fxround.perturb``: perturb a model inside code that cannot be changed.

Within the block, a call of the model or of its ``forward`` runs under the policy; after the block the model is as it
was, also when the block raises. Call k of a block has the bits of (seed, sample + k), so that repeated calls draw
different random bits, and the same seed repeats the whole block. While the block lasts, the model's class is replaced
by a subclass with two methods; parameters, buffers, hooks and ``isinstance`` are unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fxround.compiler.captures import Captures
from fxround.compiler.executable import Entry
from fxround.compiler.signature import require_module
from fxround.module import compile
from fxround.module.rounded_module import RoundedModule
from fxround.policy import Policy


@contextmanager
def perturb(
    model: nn.Module, policy: Any = "stochastic", *, seed: int = 0, sample: int = 0, strict: bool | None = None
) -> Iterator[RoundedModule]:
    """Round every call of ``model`` in a ``with`` block as ``policy`` says, without a change of the code that calls it.

    Calls of a submodule that do not come through the model are not perturbed; pass the submodule itself for that.

    Args:
        model: the ``torch.nn.Module`` that the code in the block calls.
        policy: as for ``fxround.compile``.
        seed: 0 to 2^63 - 1, the seed of all random bits of the block.
        sample: 0 to 2^32 - 1, the sample of the first call; each call takes the next one.
        strict: as for ``fxround.compile``.

    Yields:
        The ``RoundedModule`` that runs the calls, for ``coverage()`` and ``summary()``.

    Raises:
        TypeError: for what is no module. ValueError: if the model is perturbed already. Also what ``compile`` raises.

    Example::

        with fxround.perturb(model, seed=1):
            accuracy = evaluate(model)
    """
    require_module(model)
    original = type(model)
    if getattr(original, "_fxround_perturbed", False):
        raise ValueError(f"{original.__name__} is perturbed already: leave that block first")
    compiled = compile(model, Policy.parse(policy), strict=strict, seed=seed).reseed(seed, sample)
    compiled._captures = _Captures(model, original)
    model.__class__ = _perturbed(original, compiled, sample)
    try:
        yield compiled
    finally:
        model.__class__ = original


class _Captures(Captures):
    """The captures of a perturbed model: what captures or compares the model in the block takes the model itself."""

    def __init__(self, model: nn.Module, original: type[nn.Module]) -> None:
        super().__init__(model)
        self._original = original

    def __reduce__(self) -> tuple[Any, ...]:
        return Captures, (self.source, self.delayed)

    def entry(self, *args: Any, **kwargs: Any) -> Entry:
        """Return the graph of a call of the model itself."""
        with _as(self._original, self.source):
            return super().entry(*args, **kwargs)


@contextmanager
def _as(original: type[nn.Module], model: nn.Module) -> Iterator[None]:
    """Give a model its own class back for a while."""
    now = type(model)
    model.__class__ = original
    try:
        yield
    finally:
        model.__class__ = now


def _perturbed(original: type[nn.Module], compiled: RoundedModule, sample: int) -> type[nn.Module]:
    """Return a subclass whose calls are those of the compiled module."""
    seed, calls = int(compiled.rng[0]), 0

    def run(self: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal calls
        compiled.reseed(seed, sample=sample + calls)
        calls += 1
        with _as(original, self):  # the compiled module captures and runs the model itself
            return compiled(*args, **kwargs)

    @functools.wraps(original.__call__)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    members = {"__call__": call, "forward": forward, "_fxround_perturbed": True, "__doc__": original.__doc__}
    return type(original.__name__, (original,), members | {"__module__": original.__module__})
