"""Replay: calls of a model that changes Python state, captured and guarded by ``torch.compile``.

Dynamo asks before each call whether what its graph took for constant is as it was, and carries out after it what the
model's code does to lists, dicts, attributes and counters, with the values of the lowered graph. A call that did not
run a graph of fxround's raises: nothing is left to stock kernels.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from fxround.dynamo import replaying
from fxround.entry import Entry
from fxround.errors import CaptureError, FxroundError


class Host(Protocol):
    """What a replay asks of the compiled module that it belongs to."""

    source: nn.Module

    def receive(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Entry:
        """The lowered graph of Dynamo's graph."""

    def run(self, entry: Entry, leaves: Sequence[Any]) -> Any:
        """The results of a call."""


class _Prepared(Exception):
    """A graph is there; the call that asked for it is not to run."""


class _Thread(threading.local):
    """What a thread's call under way is for, and whether a graph has run."""

    preparing = False
    ran = False


class Replay:
    """The calls of one compiled module, its host, by way of ``torch.compile``."""

    def __init__(self, host: Host) -> None:
        # Dynamo keeps its backend beside the model's code, which outlives the model: it must hold neither.
        self._host = weakref.ref(host)
        self.entries: list[Entry] = []
        self._thread = _Thread()
        self._call = torch.compile(host.source, backend=_backend(weakref.ref(self)), fullgraph=True)

    def call(self, args: Any, kwargs: Any) -> Any:
        """The model's result; what it changes in Python is changed. Raises CaptureError."""
        model, thread = self.living.source, self._thread
        thread.ran = False
        with replaying(model):
            result = self._call(*args, **kwargs)
        if not thread.ran:
            raise CaptureError(
                f"{type(model).__name__} changes Python state, which needs torch.compile: it is switched off "
                "(TORCH_COMPILE_DISABLE, torch.compiler.set_stance), or the call computes no tensor."
            )
        return result

    def prepare(self, args: Any, kwargs: Any) -> None:
        """Capture and lower for these arguments; nothing is run and nothing is changed."""
        self._thread.preparing = True
        try:
            self.call(args, kwargs)
        except _Prepared:
            pass
        finally:
            self._thread.preparing = False

    @property
    def living(self) -> Host:
        """The compiled module; it is there while it is called."""
        host = self._host()
        assert host is not None
        return host

    def receive(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> int:
        """The number of a new graph."""
        self.entries.append(self.living.receive(graph, inputs))
        return len(self.entries) - 1

    def run(self, number: int, inputs: Sequence[Any]) -> Any:
        """The results of a graph."""
        self._thread.ran = True
        if self._thread.preparing:
            raise _Prepared
        return self.living.run(self.entries[number], inputs)


def _backend(replay: weakref.ref[Replay]) -> Callable[..., Any]:
    def living() -> Replay:
        found = replay()
        assert found is not None
        return found

    def compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            number = living().receive(graph, inputs)
        except (FxroundError, TypeError, ValueError) as error:
            refusal = error  # raised where the graph would run: Dynamo would wrap it in an error of its own

            def refuse(*inputs: Any) -> Any:
                raise refusal

            return refuse
        return lambda *inputs: living().run(number, inputs)

    return compiled
