"""The captured graphs of a model, by the calls that they are right for (``Captures``).

A call has a key: the structure and the kinds of its arguments, what the model depends on beside them (``state_key``),
and whether gradients are wanted. A graph with this key is right for the call if it admits the sizes of the arguments,
if its guards hold, and if what it read from outside is as it was. Any other call is captured and lowered.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxround.capture import Captured, Dimension
from fxround.capture.fully_sharded import modules_of, whole_parameters
from fxround.capture.numbers import Number, is_held, number_of
from fxround.capture.processes import mesh_of, own_shape
from fxround.capture.recorded_outputs import record_outputs
from fxround.capture.refusals import LeftToPython, refuse_unsupported_tensors
from fxround.capture.torch_private import capturing
from fxround.compiler.agreement import agreed, described_settings
from fxround.compiler.capture_report import Capture, KeyedCall, mode_of, reason_for
from fxround.compiler.delayed_state import DelayedState
from fxround.compiler.executable import Entry, owner_of
from fxround.compiler.fully_sharded import FullySharded
from fxround.compiler.pipeline import Pipeline
from fxround.compiler.signature import (
    asked,
    is_opaque,
    kind,
    packed_kinds,
    require_arguments,
    require_dtypes,
    require_products,
    require_python,
)
from fxround.compiler.state_key import StateKeys
from fxround.errors import CaptureError, NotCaptured
from fxround.graph.comparing import comparing
from fxround.graph.site import Port
from fxround.python_model.call_context import require_computable

_AGAIN: Final = "a gradient was differentiated"
# The leaves of a call's arguments with their spec.
Flat = tuple[list[Any], pytree.TreeSpec]


class _Known:
    """The graph of the latest call, with its key and the sizes of its tensors.

    If the next call has the same key and sizes, what its arguments are is noted: later calls are compared with it.
    """

    def __init__(self, key: Any, shapes: list[Any], entry: Entry) -> None:
        self.key, self.shapes, self.entry = key, shapes, entry
        self._alike: Callable[..., bool] | None = None

    def is_like(self, flat: Flat) -> bool:
        """Whether the arguments of a call are tensors that have the kinds and sizes noted; it may say no.

        Tensors alone have one spec for each number of them (``flattened``): then nothing else is an argument.
        """
        return self._alike is not None and flat[1] is self.key[0] and self._alike(*flat[0])

    def note(self, flat: Flat) -> None:
        """Note the arguments of a call with this key and these sizes."""
        if self._alike is None:
            self._alike = comparing(flat[0])


class Captures:
    """The graphs of one model. A pickled or copied one has none.

    Args:
        source: the model.
        delayed: the state of delayed scales, which all graphs share.
        path: of the submodule that the model calls, and on which alone the key depends; "" for the model itself.
        recorded: the list to which each capture is added.
        lengths: returns the dimensions of arguments, as (leaf, dimension), that differ from call to call.
    """

    def __init__(
        self,
        source: nn.Module,
        delayed: DelayedState | None = None,
        path: str = "",
        recorded: list[Capture] | None = None,
        lengths: Callable[[Any, Any], set[Dimension]] | None = None,
    ) -> None:
        require_python(source)
        self.source, self.delayed, self.path = source, delayed or DelayedState(), path
        self._lengths = lengths
        self.sharded = FullySharded.of(source)
        self.recorded = [] if recorded is None else recorded
        self.latest: Entry | None = None
        self._by_key: dict[Any, list[Entry]] = {}
        self._left: dict[Any, LeftToPython] = {}
        self._known: _Known | None = None
        self._state_keys = StateKeys(path)
        # By keys: the numbers that are inputs of graphs, and those that cannot be.
        self._numbers: dict[Any, set[Number]] = {}
        self._constants: dict[Any, set[Number]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.delayed)

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._by_key.values())

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    @property
    def called(self) -> Entry:
        """The graph of the latest call. Raises NotCaptured before the first one."""
        if self.latest is None:
            raise NotCaptured("nothing is captured yet: call the module once, or pass example_inputs= to compile")
        return self.latest

    def key(self, args: Any, kwargs: Any, flat: Flat | None = None) -> Any:
        """Return the key of a call, but for whether gradients are wanted."""
        leaves, spec = flat or pytree.tree_flatten((args, kwargs))
        others = [value for value in chain(args, kwargs.values()) if not isinstance(value, Tensor)]
        packed = packed_kinds(others) if others else ()
        return spec, (*(kind(leaf) for leaf in leaves), *packed), self._state_keys.of(self.source)

    def entry(
        self,
        pipeline: Callable[[], Pipeline],
        args: Any,
        kwargs: Any,
        replays: bool = False,
        flat: Flat | None = None,
        constants: bool = False,
    ) -> Entry:
        """Return the graph for these arguments, with gradients if they are enabled.

        pipeline: what captures and lowers where no graph is right. replays: whether the caller can replay what a graph
        cannot hold; if so, LeftToPython is raised for it. flat: the arguments' leaves and their spec, if the caller has
        them. constants: whether the numbers that the model has as attributes are constants of the graph.
        """
        require_computable()
        if self.sharded is not None:
            self.sharded.renew()
        record_outputs(self.source, kwargs)
        flat = flat or pytree.tree_flatten((args, kwargs))
        known = self._known
        # Most calls are like the one before; to compare them takes less than to describe them, or a lookup.
        if known is not None and known.is_like(flat):
            (spec, kinds, *_), shapes = known.key, known.shapes
            key = spec, kinds, self._state_keys.of(self.source), torch.is_grad_enabled()
        else:
            key, shapes = self._described(args, kwargs, flat)
        alike = known is not None and known.key == key and known.shapes == shapes
        if known is not None and alike and not (constants and known.entry.captured.numbers):
            known.note(flat)
            if known.entry.captured.guards.hold(args, kwargs):
                self.latest = known.entry
                return known.entry
        entry = self._admitting(key, shapes, args, kwargs, replays, constants)
        if entry is None:
            with capturing():
                # Another thread may have captured it meanwhile.
                entry = self._admitting(key, shapes, args, kwargs, replays, constants)
                if entry is None:
                    began, reason = time.perf_counter(), reason_for(KeyedCall.of(args, kwargs, key), self._by_key)
                    entry = self._made(pipeline(), args, kwargs, key, constants)
                    self._by_key.setdefault(key, []).append(entry)
                    mode = mode_of(self.source.training, entry.step is not None)
                    self.record(Capture(entry.captured, mode, reason, time.perf_counter() - began))
        self.latest = entry
        # What a graph reads from elsewhere is looked at in every call.
        self._known = None if entry.captured.reads else _Known(key, shapes, entry)
        return entry

    def receive(self, pipeline: Pipeline, graph: fx.GraphModule, inputs: Sequence[Any]) -> Entry:
        """Lower a graph that Dynamo passes with its example inputs; no later call finds it by its key."""
        self.latest, _ = pipeline.receive(graph, inputs, self.delayed)
        return self.latest

    def forget_state(self) -> None:
        """Forget the tensors of the model's latest call, which the next one reads again."""
        self._state_keys.forget()

    def record(self, capture: Capture) -> None:
        """Add a row to the table of captures."""
        self.recorded.append(replace(capture, module=self.path))

    def rows(self) -> Iterator[Capture]:
        """Yield the captures in their order, each with those of the derivatives of its gradients."""
        steps = {id(entry.captured): entry.step for entry in self if entry.step is not None}
        for capture in self.recorded:
            yield capture
            step = steps.get(id(capture.captured))
            for seconds in step.derivatives.all_made() if step is not None and step.derivatives else ():
                yield replace(capture, mode="derivative of gradients", reason=_AGAIN, seconds=seconds)

    def lower_again(self, other: Captures, pipeline: Pipeline, keeps_joint: bool) -> None:
        """Take the captured graphs of the same model from another policy, lowered by this pipeline.

        keeps_joint: whether graphs with gradients are taken.
        """
        for key, entries in other._by_key.items():
            if not keeps_joint and any(entry.step is not None for entry in entries):
                continue
            makers = [partial(self._lowered, pipeline, entry.captured) for entry in entries]
            lowered = self._by_key[key] = [self._together(pipeline, make) for make in makers]
            taken = {id(entry.captured) for entry in entries}
            self.recorded += [capture for capture in other.recorded if id(capture.captured) in taken]
            if other.latest in entries:
                self.latest = lowered[entries.index(other.latest)]

    def _described(self, args: Any, kwargs: Any, flat: Flat) -> tuple[Any, list[Any]]:
        """Return the key of a call and the sizes of its tensors; raises for arguments that no graph takes."""
        leaves = flat[0]
        if any(isinstance(x, Tensor) and (x.layout != torch.strided or x.is_nested) for x in leaves):
            refuse_unsupported_tensors(self.source, args, kwargs)
        opaque = [(type(leaf).__name__, "argument", "") for leaf in leaves if is_opaque(leaf)]
        if opaque:
            raise LeftToPython(self.source, opaque, reads=True)
        shapes = [own_shape(leaf) for leaf in leaves]
        return (*self.key(args, kwargs, flat), torch.is_grad_enabled()), shapes

    def _admitting(
        self, key: Any, shapes: Sequence[Any], args: Any, kwargs: Any, replays: bool, constants: bool
    ) -> Entry | None:
        """Return a captured graph that may be used for these arguments."""
        left = self._left.get(key)
        if left is not None and replays:
            raise left.with_traceback(None)
        for entry in self._by_key.get(key, ()):
            if constants and entry.captured.numbers:
                continue
            if not entry.captured.sizes.admit(shapes) or not entry.captured.guards.hold(args, kwargs):
                continue
            stale = [(read.source, read.kind, "") for read in entry.captured.reads if not read.is_current()]
            if not stale:
                return entry
            if replays:
                raise self._leave(key, LeftToPython(self.source, stale, reads=True))
        return None

    def _leave(self, key: Any, error: LeftToPython) -> LeftToPython:
        """Leave the calls of a key to Python from now on."""
        self._left[key], self._known = error, None
        return error

    def _made(self, pipeline: Pipeline, args: Any, kwargs: Any, key: Any, constants: bool) -> Entry:
        if self.sharded is None and modules_of(self.source):
            raise CaptureError(
                f"fully_shard was called for {type(self.source).__name__} after fxround.compile: call it before"
            )
        shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return self._together(pipeline, lambda: self._made_here(pipeline, args, kwargs, key, constants), shapes)

    def _together(self, pipeline: Pipeline, make: Callable[[], Entry], shapes: Sequence[Any] = ()) -> Entry:
        """Return the entry that this process makes; processes that share the model must make the same."""
        with whole_parameters(self.sharded.model) if self.sharded is not None else contextlib.nullcontext():
            mesh = mesh_of(self.source)
            return make() if mesh is None else agreed(mesh, pipeline, make, shapes)

    def _made_here(self, pipeline: Pipeline, args: Any, kwargs: Any, key: Any, constants: bool) -> Entry:
        require_arguments(self.source, args, kwargs)
        require_dtypes(self.source, args, kwargs)
        try:
            captured = self._captured(pipeline, args, kwargs, key, constants)
        except LeftToPython as error:
            self._leave(key, error)
            raise
        except CaptureError as error:
            refusal = error
        else:
            require_products(self.source, captured.graph, args, kwargs)
            return self._lowered(pipeline, captured)
        asked(self.source, args, kwargs, traced=True)
        raise refusal

    def _varying(self, args: Any, kwargs: Any, key: Any) -> set[Dimension]:
        """Return the dimensions of arguments that always differ, or did in earlier calls with this key."""
        shapes, earlier = KeyedCall.of(args, kwargs, key).shapes, self._by_key.get(key, ())
        always = self._lengths(args, kwargs) if self._lengths else set()
        return always | {dimension for entry in earlier for dimension in entry.captured.sizes.differing(shapes)}

    def _captured(self, pipeline: Pipeline, args: Any, kwargs: Any, key: Any, constants: bool) -> Captured:
        """Return the graph of a call, in which a number that differs from earlier calls is an input if it can be."""
        varying = self._varying(args, kwargs, key)
        if constants:
            return pipeline.capture(self.source, args, kwargs, varying)
        inputs, fixed = self._numbers.setdefault(key, set()), self._constants.setdefault(key, set())
        known = {number for number in inputs if is_held(self.source, number)}
        changed = (entry.captured.guards.changed(args, kwargs) for entry in self._by_key.get(key, ()))
        sources = (number_of(self.source, source) for source, *_ in filter(None, changed))
        new = {number for number in sources if number is not None} - known - fixed
        captured = pipeline.capture(self.source, args, kwargs, varying, known | new)
        if new and not captured.numbers:
            fixed.update(new)
            captured = pipeline.capture(self.source, args, kwargs, varying, known) if known else captured
        inputs.update(captured.numbers)
        return captured

    def _lowered(self, pipeline: Pipeline, captured: Captured) -> Entry:
        dtypes = {str(number): dtype for number, dtype in captured.numbers.items()}
        owners = tuple(owner_of(self.source, port, dtypes.get(port.name)) for port in captured.entering)
        entry = pipeline.entry(captured, owners, self.delayed)
        if self.sharded is None:
            return entry
        for alias in captured.aliases.values():
            if isinstance(alias.base, Port) and alias.base.kind == "parameter":
                raise CaptureError(
                    f"the model returns {alias.base.name} itself, or a view of it, of which this process has a part: "
                    "return a copy (.clone())"
                )
        return replace(entry, sharded=self.sharded, settings=described_settings(pipeline))
