"""The (seed, sample) of each call: taken before it computes, so that calls of several threads have different ones.

A call that advances the sample takes its own, and leaves the next one for other calls. One that raises gives it back,
unless another call has taken the next one meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxround.locks import waited_for
from fxround.runtime.random_state import advance, advanced

# Held while (seed, sample) is read and changed. One for all modules: a fork waits for every lock of its own.
CHANGING: Final = waited_for()


def take(holder: dict[str, Any], world_size: int = 1) -> tuple[Tensor, Tensor]:
    """Return the (seed, sample) in ``holder["rng"]``, and what follows, which the holder has from now on."""
    with CHANGING:
        rng: Tensor = holder["rng"]
        own = rng if rng.is_cpu else rng.clone()
        after = holder["rng"] = advanced(rng, world_size)
    return own, after


def give_back(holder: dict[str, Any], own: Tensor, after: Tensor) -> None:
    """Undo ``take``, unless another call has taken the next sample meanwhile."""
    with CHANGING:
        if holder["rng"] is after:
            holder["rng"] = own if own.is_cpu else after.copy_(own)


def take_from(rng: Tensor) -> Tensor:
    """Return a copy of (seed, sample), and write what follows into the tensor."""
    with CHANGING:
        own = rng.clone()
        advance(rng)
    return own


def give_back_to(rng: Tensor, own: Tensor) -> None:
    """Undo ``take_from``, unless another call has taken the next sample meanwhile."""
    after = own.clone()
    advance(after)
    with CHANGING:
        if torch.equal(rng, after):
            rng.copy_(own)


class CalledBy(threading.local):
    """The compiled module, for each thread, whose method calls a submodule: its samples are those of the calls."""

    whole: Any = None

    @contextlib.contextmanager
    def by(self, whole: Any) -> Iterator[None]:
        """Name the module for the calls of this thread in the block."""
        outer, self.whole = self.whole, whole
        try:
            yield
        finally:
            self.whole = outer


NO_METHOD: Final = CalledBy()


class _Calls(threading.local):
    """The (seed, sample) that a thread's calls of programs have taken, by the ids of the programs' buffers."""

    def __init__(self) -> None:
        self.taken: dict[int, Tensor] = {}


_CALLS: Final = _Calls()


def _of_call(rng: Tensor) -> Tensor:
    return _CALLS.taken.get(id(rng), rng)


def read_per_call(program: nn.Module, buffer: str) -> None:
    """Let a program read, in the place of a buffer, what a call has taken from it (``reading``)."""
    graph: Any = program.graph
    for node in graph.find_nodes(op="get_attr", target=buffer):
        with graph.inserting_after(node):
            taken = graph.call_function(_of_call, (node,))
        node.replace_all_uses_with(taken, lambda user, taken=taken: user is not taken)
    program.recompile()  # type: ignore[operator]


@contextlib.contextmanager
def reading(rng: Tensor, own: Tensor) -> Iterator[None]:
    """Let the programs that this thread calls in the block read ``own`` in the place of ``rng``, their buffer."""
    outer = _CALLS.taken.get(id(rng))
    _CALLS.taken[id(rng)] = own
    try:
        yield
    finally:
        if outer is None:
            del _CALLS.taken[id(rng)]
        else:
            _CALLS.taken[id(rng)] = outer
