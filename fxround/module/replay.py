"""Calls of a model that changes Python state, captured and guarded by ``torch.compile``.

Before each call Dynamo checks that the constants of its graph still hold. After it, Dynamo applies the model's changes
of lists, dicts, attributes and counters, with the values of the lowered graph. A call that did not run a graph of
fxround's raises, so that stock kernels compute nothing unnoticed.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import fx, nn

from fxround.capture.counting_numbers import CountingNumbers
from fxround.capture.dynamo import refuse_more_graphs, replaying, unmark
from fxround.capture.numpy_numbers import refuse_numpy_numbers
from fxround.capture.refusals import called_with
from fxround.capture.replayed_guards import watch_more
from fxround.capture.torch_private import failed_guard, own_graphs
from fxround.compiler.capture_report import Capture, guard_of, mode_of
from fxround.compiler.executable import Entry
from fxround.errors import CaptureError, FxroundError

# An attribute that ``torch.compile`` leaves on a model.
_MARK: Final = "_is_torch_compile"


class Host(Protocol):
    """The interface that a replay needs of its compiled module."""

    source: nn.Module

    def receive(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Entry:
        """Lower Dynamo's graph."""

    def run(self, entry: Entry, leaves: Sequence[Any]) -> Any:
        """Return the results of a call."""

    def record(self, capture: Capture) -> None:
        """Take note of a capture."""


class _Prepared(Exception):
    """Raised in place of running a graph that was only to be prepared."""


class _Thread(threading.local):
    """The state of a thread's current call: whether it only prepares, whether a graph has run, when it began."""

    preparing = False
    ran = False
    began = 0.0


class Replay:
    """The calls of one compiled module, its host, by ``torch.compile``."""

    def __init__(self, host: Host) -> None:
        # Dynamo stores its backend with the model's code, which outlives the model: weak references let both be freed.
        self._host = weakref.ref(host)
        self.entries: list[Entry] = []
        self._thread = _Thread()
        self._symbolic = True
        self._numbers = CountingNumbers(host.source)
        marked = _MARK in vars(host.source)
        optimized: Any = torch.compile(host.source, backend=_backend(weakref.ref(self)), fullgraph=True, **own_graphs())
        # Not its call, for which hooks of all modules would run once more: ``forward`` calls the model.
        self._call = optimized.forward
        if not marked:
            vars(host.source).pop(_MARK, None)

    def call(self, args: Any, kwargs: Any) -> Any:
        """Return the model's result and apply its changes of Python state. Raises CaptureError if no graph has run."""
        model, thread = self.living.source, self._thread
        thread.ran, thread.began = False, time.perf_counter()
        result = self._attempted(args, kwargs)
        if not thread.ran:
            raise CaptureError(
                f"{type(model).__name__} changes Python state, which needs torch.compile: it is switched off "
                "(TORCH_COMPILE_DISABLE, torch.compiler.set_stance), or the call computes no tensor."
            )
        return result

    def _attempted(self, args: Any, kwargs: Any) -> Any:
        """Return the result of the first call that is not refused: some models cannot be traced with symbols."""
        try:
            return self._called(args, kwargs)
        except CaptureError as error:
            first = error
        while not self._thread.ran and self._has_fewer_symbols():
            try:
                return self._called(args, kwargs)
            except CaptureError:
                continue
        raise first from first.__cause__

    def _has_fewer_symbols(self) -> bool:
        """Take numbers of modules that have changed for constants, then sizes too. False if all are constants."""
        if self._numbers.settle():
            return True
        before, self._symbolic = self._symbolic, False
        return before

    def _called(self, args: Any, kwargs: Any) -> Any:
        model = self.living.source
        with replaying(model, self._symbolic, self._numbers, args, kwargs):
            try:
                return self._call(*args, **kwargs)
            except BaseException as error:
                unmark(model)  # a trace that was refused has marked it
                if isinstance(error, IndexError):  # a cache or a table of positions that is too short
                    error.add_note(f"{type(model).__name__} was called with {called_with(args, kwargs)}")
                raise

    def may_settle(self) -> bool:
        """Whether a number that is a symbol now may be a constant."""
        return self._numbers.may_settle()

    def prepare(self, args: Any, kwargs: Any) -> None:
        """Capture and lower for these arguments, without running or changing anything."""
        self._thread.preparing = True
        try:
            self.call(args, kwargs)
        except _Prepared:
            pass
        finally:
            self._thread.preparing = False

    @property
    def living(self) -> Host:
        """The compiled module, which is alive while it is called."""
        host = self._host()
        assert host is not None
        return host

    def receive(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> int:
        """Lower a new graph and return its number."""
        host, gradients = self.living, torch.is_grad_enabled()
        refuse_more_graphs(host.source, len(self.entries))
        watch_more(host.source)
        unmark(host.source)
        refuse_numpy_numbers(graph)
        entry = host.receive(graph, inputs)
        reason = guard_of(failed_guard() if self.entries else None)
        self.entries.append(entry)
        seconds = time.perf_counter() - self._thread.began
        host.record(Capture(entry.captured, mode_of(host.source.training, gradients), reason, seconds))
        return len(self.entries) - 1

    def run(self, number: int, inputs: Sequence[Any]) -> Any:
        """Return the results of a graph."""
        self._thread.ran = True
        if self._thread.preparing:
            raise _Prepared
        return self.living.run(self.entries[number], inputs)


def _backend(replay: weakref.ref[Replay]) -> Callable[..., Any]:
    def living() -> Replay:
        living = replay()
        assert living is not None
        return living

    def compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            number = living().receive(graph, inputs)
        except (FxroundError, TypeError, ValueError) as error:
            if living().may_settle():
                raise  # nothing of this trace stays, so that there may be another one
            refusal = error  # raised where the graph would run: Dynamo would wrap it in an error of its own

            def refuse(*inputs: Any) -> Any:
                raise refusal

            return refuse
        return lambda *inputs: living().run(number, inputs)

    return compiled
