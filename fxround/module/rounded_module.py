"""``RoundedModule``: a model and a policy as a module with explicit roundings.

A ``RoundedModule`` shares the model's parameters, buffers and submodules under the same names. It captures lazily, once
for each combination of training flags, grad mode, dtypes and sizes, lowers the graph by the policy, and runs it for
arguments that the graph admits. Batches, the lengths of texts and sizes that have changed are free. A call is a
function of arguments, state and (seed, sample) alone. A call that trains (training mode, gradients wanted) advances the
sample by one; with ``advance``, every call does. Such calls of several threads have different samples.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import FunctionType
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxround.capture import Captured, Dimension
from fxround.capture.dynamo import aside, capturing
from fxround.capture.recorded_outputs import record_outputs
from fxround.capture.refusals import LeftToPython, refuse_unsupported_tensors
from fxround.compiler.capture_table import Call, Capture, mode_of, reason_for, table_of
from fxround.compiler.delayed_state import SCALES, DelayedState
from fxround.compiler.executable import Entry, owner_of
from fxround.compiler.pipeline import Pipeline
from fxround.compiler.samples_of_calls import CHANGING, NO_METHOD, CalledBy, give_back, take
from fxround.compiler.signature import (
    asked,
    class_of,
    flattened,
    is_opaque,
    kind,
    packed_kinds,
    require_arguments,
    require_dtypes,
    require_flag,
)
from fxround.compiler.state_key import StateKeys
from fxround.compiler.training_step import Step, differentiable_later
from fxround.errors import CaptureError, FxroundError, type_of
from fxround.exported.caches import Cached
from fxround.exported.program import RNG_BUFFER
from fxround.module.decorating import bound, global_name, is_plain, names_of, refuse_compiled
from fxround.module.export import Exporting
from fxround.module.repeated_bits_warning import Repeats
from fxround.module.replay import Replay
from fxround.policy import Policy
from fxround.python_model.call_context import check_context, require_computable, require_untraced
from fxround.python_model.functions import Function
from fxround.python_model.method_dispatch import unwatched
from fxround.python_model.method_operations import Operations
from fxround.runtime import torch_ops
from fxround.runtime.operands import resolved
from fxround.runtime.random_state import changed, of_rank, of_submodule, random_state, state_of, state_on
from fxround.views.table import Table

PolicyLike = Any
# A module's call with its own hooks, and without those that ``register_module_forward_hook`` and its like add to all
# modules. These run for the model and its submodules; the compiled module is none of them.
_CALL: Final = FunctionType(
    nn.Module._call_impl.__code__,
    {name: {} if name.startswith("_global_") else value for name, value in vars(nn.modules.module).items()},
)
Flat = tuple[list[Any], pytree.TreeSpec]


class RoundedModule(Exporting):
    """A model with explicit roundings, made by ``fxround.compile`` and called like the model itself.

    The first call captures the model as a graph, and inserts the roundings of the policy. A later call whose arguments
    fit no captured graph, for example because of another dtype, captures again. A call that captures raises what
    ``compile`` raises at capture. Gradients flow to the parameters, which are the model's own, and to the arguments,
    through a backward graph that is rounded by the same policy.

    ``reseed`` chooses the random bits. ``summary``, ``coverage``, ``graph_text`` and ``draw`` show the roundings,
    ``leaks`` finds values that are not in their declared format, ``flips`` shows the bits that faults flip, ``observe``
    yields every value, and ``export`` writes a file for ``fxround.load``. The attributes ``policy``, ``source`` (the
    model), ``rng`` (seed and sample, int64 of shape [2]), ``strict``, ``fuse``, ``advance`` and ``unroll_loops`` are
    those of the compiled module; attributes of any other name are the model's. Example::

        compiled = fxround.compile(model, "bfloat16", example_inputs=x)
        print(compiled.summary(), compiled.coverage())
        compiled(x).square().sum().backward()
    """

    def __new__(cls, model: nn.Module, *rest: Any, **named: Any) -> RoundedModule:
        """Make an instance of a class whose ``forward`` has the model's signature."""
        made: RoundedModule = super().__new__(class_of(model, cls) if cls is RoundedModule else cls)
        return made

    def __init__(
        self, model: nn.Module, policy: Policy, strict: bool | None, seed: int, sample: int = 0, fuse: bool = True
    ) -> None:
        rng = random_state(seed, sample)
        super().__init__(model)
        if is_plain(model):
            self.__dict__.update(names_of(model.function))
        self.__dict__.update(policy=policy, strict=strict, rng=rng, fuse=fuse, advance=False, unroll_loops=False)
        self.__dict__.update(_entries={}, _left={}, _replay=None, _latest=None, _rank=0, _world_size=1)
        self.__dict__.update(_repeats=Repeats(), _delayed=DelayedState(), _state_keys=StateKeys())
        self.__dict__.update(_differentiated=set(), _told=set(), _recorded=[], _apart={}, _path="", _known=None)
        self.__dict__["_calling"] = NO_METHOD

    strict: bool | None
    fuse: bool
    advance: bool
    unroll_loops: bool
    _repeats: Repeats
    _state_keys: StateKeys
    _delayed: DelayedState
    _rank: int
    _world_size: int
    _entries: dict[Any, list[Entry]]
    _left: dict[Any, LeftToPython]
    _replay: Replay | None
    _differentiated: set[int]
    _recorded: list[Capture]
    _path: str
    _calling: CalledBy
    _known: tuple[Any, Entry] | None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind a compiled function that is found through an instance as a method; return a compiled model itself."""
        if instance is None or not is_plain(self.source):
            return self
        return bound(self, instance, self._like)

    def _like(self, model: nn.Module) -> RoundedModule:
        """Compile another model with the same policy, settings and seed, from sample 0."""
        made = RoundedModule(model, self.policy, self.strict, int(self.rng[0]), fuse=self.fuse)
        made.__dict__.update(advance=self.advance, unroll_loops=self.unroll_loops)
        return made

    @functools.cached_property
    def _operations(self) -> Operations:
        """The single operations of the model's methods."""
        compiled = functools.partial(RoundedModule, strict=self.strict, seed=0, fuse=self.fuse)
        return Operations(self.policy, lambda function, policy: compiled(Function(function), policy))

    @property
    def _is_strict(self) -> bool:
        return self.policy.strict if self.strict is None else self.strict

    @property
    def _pipeline(self) -> Pipeline:
        policy = self.policy
        if self._apart:  # a rule for what methods call by itself may match nothing in the rest of the model
            parts = [f"{path}." for path in self._apart]
            names = [name for name, _ in self.source.named_modules() if f"{name}.".startswith(tuple(parts))]
            policy = policy.with_optional_rules(names)
        return Pipeline(policy, self._is_strict, self.fuse, self.unroll_loops)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``forward``, between the hooks of this module; those of all modules are the model's."""
        own = self.__dict__
        if own["_forward_pre_hooks"] or own["_forward_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return _CALL(self, *args, **kwargs)
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model's result, rounded as the policy says.

        Raises FxroundError in a transform of ``torch.func``, in a trace of PyTorch's (``torch.compile``,
        ``torch.export``, ``torch.jit.trace``), and for a call in training mode inside a backward pass, as
        ``torch.utils.checkpoint`` around the compiled module makes it.
        """
        require_untraced()
        flat = flattened(args, kwargs)
        leaves, wanted = flat[0], self._wants_gradients(flat[0])
        check_context(wanted and self.training)
        before = self.rng
        with aside(), unwatched():
            result = self._called_with(args, kwargs, flat, wanted)
        if self.rng is before and self.policy.draws:
            self._repeats.warn(self.source, leaves, result, before)
        return result

    def _called_with(self, args: Any, kwargs: Any, flat: Flat, wanted: bool) -> Any:
        try:
            with torch.set_grad_enabled(wanted and self.training):
                entry = self._entry(args, kwargs, replays=True, flat=flat)
        except LeftToPython:
            return self._replayed().call(args, kwargs)
        if entry.captured.guards.grad_mode and torch.is_grad_enabled():
            return self.run(self._entry(args, kwargs, flat=flat), flat[0])
        if wanted and not self.training:
            return self._differentiable_in_eval(entry, args, kwargs)
        with torch.set_grad_enabled(wanted):
            return self.run(entry, flat[0])

    def run(self, entry: Entry, leaves: Sequence[Any]) -> Any:
        """Return the results of a captured graph for flat arguments; a training call advances the sample."""
        return self._drawing(lambda rng, trains: entry.run(leaves, rng, trains), bool(entry.step) and self.training)

    def _drawing(self, compute: Callable[[Tensor, bool], Any], trains: bool = False) -> Any:
        """Return ``compute(rng, trains)`` for the (seed, sample) of a call.

        No other call, of any thread, has the same one if it advances the sample.
        """
        whole = self._calling.whole
        holder, path = (self.__dict__, "") if whole is None else (whole.__dict__, self._path)
        if not (trains or self.advance):
            return compute(of_submodule(holder["rng"], path), False)
        own, after = take(holder, self._world_size if trains else 1)
        try:
            return compute(of_submodule(of_rank(own, self._rank) if trains else own, path), trains)
        except BaseException:
            give_back(holder, own, after)
            raise

    def receive(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Entry:
        """Lower a graph that Dynamo passes with its example inputs."""
        self._latest, _ = self._pipeline.receive(graph, inputs, self._delayed)
        return self._latest

    def record(self, capture: Capture) -> None:
        """Add a row to the table of ``captures``."""
        self._recorded.append(replace(capture, module=self._path))

    def captures(self) -> Table:
        """Return a table of the captured graphs: module, mode, arguments, conditions, reason of the capture, seconds.

        The column ``module`` is the path of a submodule that a method calls, empty for the model itself. The column
        ``arguments`` has the dtypes and sizes that the graph can be used for; a letter is a size that may change. A
        call with other arguments captures another graph, whose ``reason`` says why no earlier one could be used.
        ``captures`` itself captures nothing.
        """
        return table_of(self._recorded)

    def _replayed(self) -> Replay:
        if self._replay is None:
            with capturing():
                self._replay = self._replay or Replay(self)
        return self._replay

    def _differentiable_in_eval(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        """Return results that save nothing for a backward until a gradient is first requested."""
        leaves = pytree.tree_leaves((args, kwargs))
        if id(entry) in self._differentiated or any(port.mutation for port in entry.captured.outputs):
            with torch.enable_grad():
                joint = self._entry(args, kwargs)
                return self._drawing(lambda rng, _: joint.run(leaves, rng))
        key, sources, state = self._key(args, kwargs), self._sources(leaves), self._delayed.copy()

        def step() -> tuple[Step, list[int], list[Tensor]]:
            if self._key(args, kwargs) != key:
                raise FxroundError(
                    "the module was changed (train or eval, a dtype, a hook) between a call in eval mode and the first "
                    "backward pass of such a call: run the backward pass before the change."
                )
            with torch.enable_grad():
                joint = self._entry(args, kwargs)
            if joint.step is None:
                raise FxroundError("no result of this call depends on anything that requires a gradient")
            self._differentiated.add(id(entry))
            places = list(sources)
            positions = [places.index((port.name, port.index)) for port in joint.captured.entering]
            return joint.step, positions, state.multipliers(joint.delayed)

        def compute(rng: Tensor, _: bool) -> Any:
            results, spec = pytree.tree_flatten(entry.run(leaves, rng, aliased=False))
            later = differentiable_later(results, entry.depending(sources), step, resolved(sources.values()), rng)
            return pytree.tree_unflatten(entry.with_aliases(later, leaves), spec)

        return self._drawing(compute)

    def _sources(self, leaves: Sequence[Any]) -> dict[tuple[str, int], Any]:
        """Return state by name and arguments by position, as ports name them."""
        named = (self.source.named_parameters, self.source.named_buffers)
        state = {(name, -1): t for group in named for name, t in group(remove_duplicate=False)}
        return state | {("", i): leaf for i, leaf in enumerate(leaves)}

    def prepare(self, *args: Any, **kwargs: Any) -> RoundedModule:
        """Capture the graph for arguments like these, without running it; returns the module itself.

        In training mode the graph includes gradients, unless they are disabled (``torch.no_grad``). Raises what
        ``compile`` raises at capture.
        """
        with torch.set_grad_enabled(self.training and self._wants_gradients(pytree.tree_leaves((args, kwargs)))):
            try:
                self._entry(args, kwargs, replays=True)
            except LeftToPython:
                self._replayed().prepare(args, kwargs)
        return self

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call without gradients.

        Buffers and arguments that the model changes in place are not written, and the sample does not change.
        """
        return self._entry(args, kwargs).evaluate(pytree.tree_leaves((args, kwargs)), self.rng)

    @torch.no_grad()
    def observe(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Run one operation at a time, and yield the name and value of each, then ``("output", result)``.

        Names are those of ``coverage().operations``: what ``summary()`` lists, and data movement. The values are those
        of a call with the same seed and sample, bit for bit. Where the policy rounds the result of an operation that
        rounds nothing itself, or that a stock kernel computes, the summary has two operations: ``clamp``, what it
        selects, and ``clamp_rounded``, which later operations see. Each value is dropped after its last use, so that a
        caller who keeps none needs no more memory than a call. Buffers and arguments that the model changes in place
        are not written. Example::

            for name, value in compiled.observe(x):
                print(name, value.isfinite().all())
        """
        yield from self._entry(args, kwargs).steps(pytree.tree_leaves((args, kwargs)), self.rng)

    @torch.no_grad()
    def observe_step(self, tangents: Mapping[int, Tensor], *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield the operations of a training step, forward and backward, as ``observe`` does.

        tangents: the gradient of each result, by its position among the leaves of the result. No gradient is
        accumulated, and the sample does not change.
        """
        with torch.enable_grad():
            entry = self._entry(args, kwargs)
        yield from entry.steps(pytree.tree_leaves((args, kwargs)), self.rng, tangents)

    def with_policy(self, policy: PolicyLike, strict: bool | None = None) -> RoundedModule:
        """Return the same model under another policy, with the same seed and sample, and the same numbering of nodes.

        Captured graphs are reused, unless the policies differ in ``definitions``, or the graphs have a backward pass
        and only one of the policies has a rule whose ``gradient`` is not straight_through.

        policy, strict: as for ``compile``. Raises PolicyError, UnsupportedOperator and UnsupportedRounding.
        """
        require_flag("strict", strict, optional=True)
        seed, sample = self.rng.tolist()
        other = RoundedModule(self.source, Policy.parse(policy), strict, seed, sample, self.fuse)
        other.__dict__.update(advance=self.advance, unroll_loops=self.unroll_loops)
        if [rule.operands for rule in other.policy.rules] == [rule.operands for rule in self.policy.rules]:
            other.__dict__["_delayed"] = self._delayed.copy()
        same = other.policy.definitions == self.policy.definitions
        as_marked = other.policy.treats_gradients == self.policy.treats_gradients
        for key, entries in self._entries.items():
            if not same or not (as_marked or all(entry.step is None for entry in entries)):
                continue
            other._entries[key] = [other._lowered(entry.captured) for entry in entries]
            taken = {id(entry.captured) for entry in entries}
            other._recorded += [capture for capture in self._recorded if id(capture.captured) in taken]
            if self._latest in entries:
                other._latest = other._entries[key][entries.index(self._latest)]
        return other

    def reseed(self, seed: int, sample: int = 0, device: torch.device | str | None = None) -> RoundedModule:
        """Set the seed (0 to 2^63 - 1) and sample (0 to 2^32 - 1) without capturing again; returns the module itself.

        device: where both are from now on, the CPU at first. Kernels read them on a CUDA device when they run, so that
        replays of a CUDA graph draw those of the latest ``reseed``. Raises TypeError and ValueError for other values.
        """
        with CHANGING:
            self.rng = changed(self.rng, seed, sample) if device is None else state_on(device, seed, sample)
        return self

    def distribute(self, rank: int, world_size: int = 0, *, processes: int = 0) -> RoundedModule:
        """Train as one of several processes, each of which draws its own random bits; returns the module itself.

        A call in training mode that records gradients draws the bits of sample + rank, and advances the sample by
        world_size. Therefore (seed, sample) is the same in every process, and a single process that makes the calls of
        all processes in the order of their ranks draws the same bits. Other calls draw the bits of the sample.

        Args:
            rank, world_size: as ``torch.distributed`` counts them.
            processes: an older name of world_size.

        Raises:
            TypeError: for a rank or a world_size that is no int.
            ValueError: for a rank outside 0 to world_size - 1.
        """
        world_size = world_size or processes
        for name, value in (("rank", rank), ("world_size", world_size)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {type_of(value)}; expected an int, as torch.distributed counts")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of a world_size of {world_size}: expected 0 to world_size - 1")
        self.__dict__.update(_rank=rank, _world_size=world_size)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state, with the (seed, sample) of the next call as ``"fxround_rng"``, int64 of shape [2].

        Delayed scales (``delayed_scales``) have keys that begin with ``"fxround_scales."``. ``load_state_dict``
        restores all of it. If the key is missing, seed and sample do not change.
        """
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        state[f"{prefix}{RNG_BUFFER}"] = self.rng.clone()
        state |= {f"{prefix}{SCALES}{name}": value for name, value in self.delayed_scales.items()}
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.pop(f"{prefix}{RNG_BUFFER}", None)
        if saved is not None:
            self.reseed(*state_of(saved, f"{prefix}{RNG_BUFFER}"))
        self._delayed.load(state_dict, prefix, replace=saved is not None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def _graphs(self) -> int:
        """The number of captured graphs: by training flags, grad mode, dtypes and sizes."""
        replayed = len(self._replay.entries) if self._replay else 0
        return sum(map(len, self._entries.values())) + replayed

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = global_name(self)
        if name is not None:
            return name
        seed, sample = self.rng.tolist()
        args = self.source, self.policy, self.strict, seed, sample, self.fuse
        return RoundedModule, args, {name: self.__dict__[name] for name in ("advance", "unroll_loops", "_delayed")}

    def _key(self, args: Any, kwargs: Any, flat: Flat | None = None) -> Any:
        leaves, spec = flat or pytree.tree_flatten((args, kwargs))
        others = [value for value in chain(args, kwargs.values()) if not isinstance(value, Tensor)]
        packed = packed_kinds(others) if others else ()
        return spec, (*(kind(leaf) for leaf in leaves), *packed), self._state_keys.of(self.source)

    def _entry(self, args: Any, kwargs: Any, replays: bool = False, flat: Flat | None = None) -> Entry:
        """Return the graph for these arguments, with gradients if they are enabled.

        replays: whether the caller can replay what a graph cannot hold; if so, LeftToPython is raised for it. flat: the
        arguments' leaves and their spec, if the caller has them.
        """
        require_computable()
        record_outputs(self.source, kwargs)
        flat = flat or pytree.tree_flatten((args, kwargs))
        leaves = flat[0]
        if any(isinstance(x, Tensor) and (x.layout != torch.strided or x.is_nested) for x in leaves):
            refuse_unsupported_tensors(self.source, args, kwargs)
        opaque = [(type(leaf).__name__, "argument", "") for leaf in leaves if is_opaque(leaf)]
        if opaque:
            raise LeftToPython(self.source, opaque, reads=True)
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
        key = (*self._key(args, kwargs, flat), torch.is_grad_enabled())
        known = self._known
        # Most calls are like the one before; to compare them takes less than a lookup.
        if known is not None and known[0] == (key, shapes) and known[1].captured.guards.hold(args, kwargs):
            self._latest = known[1]
            return known[1]
        entry = self._admitting(key, shapes, args, kwargs, replays)
        if entry is None:
            with capturing():
                # Another thread may have captured it meanwhile.
                entry = self._admitting(key, shapes, args, kwargs, replays)
                if entry is None:
                    began, reason = time.perf_counter(), reason_for(Call.of(args, kwargs, key), self._entries)
                    entry = self._compile(args, kwargs, key)
                    self._entries.setdefault(key, []).append(entry)
                    mode = mode_of(self.source.training, entry.step is not None)
                    self.record(Capture(entry.captured, mode, reason, time.perf_counter() - began))
        self._latest = entry
        # What a graph reads from elsewhere is looked at in every call.
        self.__dict__["_known"] = None if entry.captured.reads else ((key, shapes), entry)
        return entry

    def _admitting(self, key: Any, shapes: Sequence[Any], args: Any, kwargs: Any, replays: bool) -> Entry | None:
        """Return a captured graph that may be used for these arguments."""
        left = self._left.get(key)
        if left is not None and replays:
            raise left.with_traceback(None)
        for entry in self._entries.get(key, ()):
            if not entry.captured.sizes.admit(shapes) or not entry.captured.guards.hold(args, kwargs):
                continue
            changed = [read for read in entry.captured.reads if not read.is_current()]
            if not changed:
                return entry
            if replays:
                found = [(read.source, read.kind, "") for read in changed]
                self._left[key] = LeftToPython(self.source, found, reads=True)
                self.__dict__["_known"] = None
                raise self._left[key]
        return None

    def _compile(self, args: Any, kwargs: Any, key: Any) -> Entry:
        refuse_compiled(self.source)
        require_arguments(self.source, args, kwargs)
        require_dtypes(self.source, args, kwargs)
        try:
            captured = self._pipeline.capture(self.source, args, kwargs, self._varying(args, kwargs, key))
        except LeftToPython as error:
            self._left[key] = error
            self.__dict__["_known"] = None
            raise
        except CaptureError as error:
            refusal = error
        else:
            return self._lowered(captured)
        asked(self.source, args, kwargs, traced=True)
        raise refusal

    def _varying(self, args: Any, kwargs: Any, key: Any) -> set[Dimension]:
        """Return the dimensions of the arguments that differed in earlier calls with this key."""
        shapes = Call.of(args, kwargs, key).shapes
        earlier = self._entries.get(key, ())
        always = self.source.lengths(args, kwargs) if isinstance(self.source, Cached) else set()
        return always | {dimension for entry in earlier for dimension in entry.captured.sizes.differing(shapes)}

    def _lowered(self, captured: Captured) -> Entry:
        owners = tuple(owner_of(self.source, port) for port in captured.entering)
        return self._pipeline.program(captured, owners, self._delayed)

    def _wants_gradients(self, leaves: Sequence[Any]) -> bool:
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        return torch.is_grad_enabled() and any(t.requires_grad for t in chain(tensors, self.source.parameters()))


assert torch_ops.KERNELS  # importing it attached them
