"""``RoundedModule``: a model and a policy as a module with explicit roundings.

A ``RoundedModule`` shares the model's parameters, buffers and submodules under the same names. It captures lazily, once
for each combination of training flags, grad mode, dtypes and sizes, lowers the graph by the policy, and runs it for
arguments that the graph admits. Batches, the lengths of texts and sizes that have changed are free. A call is a
function of arguments, state and (seed, sample) alone. A call that trains (training mode, gradients wanted) advances the
sample by one; with ``advance``, every call does. Such calls of several threads have different samples.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, Final

import networkx as nx
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxround.capture import Captured
from fxround.capture.dynamo import aside
from fxround.capture.processes import local, mesh_of
from fxround.capture.readings import TRACING
from fxround.capture.refusals import LeftToPython
from fxround.capture.result_sizes import with_sizes
from fxround.capture.torch_private import capturing
from fxround.compiler.averages import OrderOfRanks
from fxround.compiler.capture_report import Capture, table_of
from fxround.compiler.captures import Captures, Flat
from fxround.compiler.delayed_state import SCALES, DelayedState, Names
from fxround.compiler.executable import Entry
from fxround.compiler.pipeline import Pipeline
from fxround.compiler.samples_of_calls import CHANGING, NO_METHOD, CalledBy, give_back, take
from fxround.compiler.signature import (
    arguments,
    class_of,
    flattened,
    require_flag,
)
from fxround.compiler.training_step import TrainingStep, differentiable_later
from fxround.errors import CaptureError, FxroundError, NotCaptured, type_of
from fxround.exported.caches import Cached, caches_among, with_tensors
from fxround.exported.program import RNG_BUFFER
from fxround.faults.flip_table import Flips
from fxround.module.attributes import CallSignature, Reaching
from fxround.module.decorating import bound, global_name, is_plain, names_of, refuse_compiled
from fxround.module.export import write_program
from fxround.module.flips import flips_in, without_faults
from fxround.module.leaks import leaks_in
from fxround.module.repeated_bits_warning import Repeats
from fxround.module.replay import Replay
from fxround.policy import Policy
from fxround.python_model.call_context import check_context, require_untraced
from fxround.python_model.functions import Function, Method, calling
from fxround.python_model.method_dispatch import is_watched, unwatched
from fxround.python_model.method_operations import Operations
from fxround.runtime import torch_ops
from fxround.runtime.operands import resolved
from fxround.runtime.random_state import changed, of_rank, of_submodule, random_state, state_of, state_on
from fxround.views import graph_views
from fxround.views.leaks import Leaks
from fxround.views.pictures import colourings_of, write_picture
from fxround.views.summaries import Coverage, Summary
from fxround.views.table import Table

PolicyLike = Any
# A module's call with its own hooks, and without those that ``register_module_forward_hook`` and its like add to all
# modules. These run for the model and its submodules; the compiled module is none of them.
_CALL: Final = FunctionType(
    nn.Module._call_impl.__code__,
    {name: {} if name.startswith("_global_") else value for name, value in vars(nn.modules.module).items()},
)


class RoundedModule(Reaching):
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
        self,
        model: nn.Module,
        policy: Policy,
        strict: bool | None,
        seed: int,
        sample: int = 0,
        fuse: bool = True,
        advance: bool = False,
        unroll_loops: bool = False,
        captures: Captures | None = None,
    ) -> None:
        # Set before the model is known, from when on attributes of other names are the model's.
        self.policy, self.strict, self.rng = policy, strict, random_state(seed, sample)
        self.fuse, self.advance, self.unroll_loops = fuse, advance, unroll_loops
        self._captures = Captures(model, DelayedState.given(policy)) if captures is None else captures
        self._rank, self._world_size = 0, 1
        sharded = self._captures.sharded
        if sharded is not None:
            self._rank, self._world_size = sharded.rank, sharded.size
        self._repeats = Repeats()
        self._replay: Replay | None = None
        # The graphs of calls in eval mode of which a gradient was requested.
        self._differentiated: set[int] = set()
        # The (method, operator) pairs for which a warning was given.
        self._told: set[tuple[str, str]] = set()
        # The submodules that methods call, by their paths; and, of such a submodule, the module whose method calls it.
        self._apart: dict[str, RoundedModule] = {}
        self._calling = NO_METHOD
        super().__init__(model)
        if sharded is not None:
            sharded.averages = OrderOfRanks.of(self, policy, sharded.size)
        if is_plain(model):
            self.__dict__.update(names_of(model.function))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind a compiled function that is found through an instance as a method; return a compiled model itself."""
        if instance is None or not is_plain(self.source):
            return self
        return bound(self, instance, self._like)

    __signature__ = CallSignature()

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
        if TRACING or is_watched():
            with aside(), unwatched():
                result = self._called_with(args, kwargs, flat, wanted)
        else:
            result = self._called_with(args, kwargs, flat, wanted)
        if self.rng is before and self.policy.draws:
            self._repeats.warn(self.source, leaves, result, before)
        return result

    def _called_with(self, args: Any, kwargs: Any, flat: Flat, wanted: bool) -> Any:
        replays, recorded = self._captures.sharded is None, torch.is_grad_enabled()
        try:
            if recorded:
                with torch.set_grad_enabled(wanted and self.training):
                    entry = self._entry(args, kwargs, replays, flat)
            else:  # the commonest call: no mode is switched
                entry = self._entry(args, kwargs, replays, flat)
        except LeftToPython as error:
            if not replays:
                told = str(error).rpartition("\n")[0]
                raise CaptureError(
                    f"{told}\n  A model that fully_shard was called for has to be one graph, of tensors alone: return "
                    "what it changes, or register it as a buffer (for transformers: pass use_cache=False)."
                ) from error
            return self._replayed(error).call(args, kwargs)
        if not recorded:
            return self.run(entry, flat[0])
        if entry.captured.guards.grad_mode:
            return self.run(self._entry(args, kwargs, flat=flat), flat[0])
        if wanted and not self.training:
            if entry.sharded is not None:
                joint = self._entry(args, kwargs, flat=flat)
                return self.run(joint, flat[0])
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
        if whole is None and not (trains or self.advance):  # most calls
            return compute(self.rng, False)
        holder, path = (self.__dict__, "") if whole is None else (whole.__dict__, self._captures.path)
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
        return self._captures.receive(self._pipeline(), graph, inputs)

    def record(self, capture: Capture) -> None:
        """Add a row to the table of ``captures``."""
        self._captures.record(capture)

    def _replayed(self, left: LeftToPython) -> Replay:
        """Return what calls the model by torch.compile. Raises CaptureError for a model that processes share."""
        if mesh_of(self.source) is not None:
            raise CaptureError(
                f"{left.used}\n  Processes share the model, so that torch.compile cannot do it either: return what the "
                "model changes, register it as a buffer, or pass it as a tensor; return tensors, tuples, lists, dicts."
            )
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
        key, state = self._captures.key(args, kwargs), self._captures.delayed.copy()
        sources, numbers = self._sources(leaves), entry.numbers()

        def step() -> tuple[TrainingStep, list[int], list[Tensor]]:
            same = self._captures.key(args, kwargs) == key and entry.captured.guards.hold(args, kwargs)
            if not same or entry.numbers() != numbers:
                raise FxroundError(
                    "the module was changed (train or eval, a dtype, a hook, an attribute) between a call in eval mode "
                    "and the first backward pass of such a call: run the backward pass before the change."
                )
            with torch.enable_grad():
                joint = self._entry(args, kwargs, constants=True)
            if joint.step is None:
                raise FxroundError("no result of this call depends on anything that requires a gradient")
            self._differentiated.add(id(entry))
            places = list(sources)
            positions = [places.index((port.name, port.index)) for port in joint.captured.entering]
            return joint.step, positions, state.multipliers(joint.delayed)

        def compute(rng: Tensor, _: bool) -> Any:
            results, spec = pytree.tree_flatten(entry.run(leaves, rng, aliased=False))
            own = list(map(local, results))
            later = differentiable_later(own, entry.depending(sources), step, resolved(sources.values()), rng)
            return with_sizes(pytree.tree_unflatten(entry.with_aliases(entry.placed(later), leaves), spec), spec)

        return self._drawing(compute)

    def _sources(self, leaves: Sequence[Any]) -> dict[tuple[str, int], Any]:
        """Return what this process has of state, by name, and of arguments, by position, as ports name them."""
        named = (self.source.named_parameters, self.source.named_buffers)
        state = {(name, -1): local(t) for group in named for name, t in group(remove_duplicate=False)}
        return state | {("", i): local(leaf) for i, leaf in enumerate(leaves)}

    def prepare(self, *args: Any, **kwargs: Any) -> RoundedModule:
        """Capture the graph for arguments like these, without running it; returns the module itself.

        In training mode the graph includes gradients, unless they are disabled (``torch.no_grad``). Raises what
        ``compile`` raises at capture.
        """
        with torch.set_grad_enabled(self.training and self._wants_gradients(pytree.tree_leaves((args, kwargs)))):
            try:
                self._captures.entry(self._pipeline, args, kwargs, replays=True)
            except LeftToPython as error:
                self._replayed(error).prepare(args, kwargs)
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
        parsed = Policy.parse(policy)
        same_scales = [rule.operands for rule in parsed.rules] == [rule.operands for rule in self.policy.rules]
        delayed = DelayedState.given(parsed) or (self._captures.delayed.copy() if same_scales else None)
        other = self._like(self.source, parsed, strict, Captures(self.source, delayed))
        other.rng = self.rng.cpu().clone()
        if parsed.definitions == self.policy.definitions:
            as_marked = parsed.treats_gradients == self.policy.treats_gradients
            other._captures.lower_again(self._captures, other._pipeline(), keeps_joint=as_marked)
        return other

    def reseed(self, seed: int, sample: int = 0, device: torch.device | str | None = None) -> RoundedModule:
        """Set the seed (0 to 2^63 - 1) and sample (0 to 2^32 - 1) without capturing again; returns the module itself.

        device: where both are from now on, the CPU at first. Kernels read them on a CUDA device when they run, so that
        replays of a CUDA graph draw those of the latest ``reseed``. Raises TypeError and ValueError for other values.
        """
        with CHANGING:
            self.rng = changed(self.rng, seed, sample) if device is None else state_on(device, seed, sample)
        return self

    def distribute(self, rank: int, world_size: int) -> RoundedModule:
        """Train as one of several processes, each of which draws its own random bits; returns the module itself.

        A call in training mode that records gradients draws the bits of sample + rank, and advances the sample by
        world_size. Therefore (seed, sample) is the same in every process, and a single process that makes the calls of
        all processes in the order of their ranks draws the same bits. Other calls draw the bits of the sample.

        Args:
            rank, world_size: as ``torch.distributed`` counts them.

        Raises:
            TypeError: for a rank or a world_size that is no int.
            ValueError: for a rank outside 0 to world_size - 1.
        """
        for name, value in (("rank", rank), ("world_size", world_size)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {type_of(value)}; expected an int, as torch.distributed counts")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of a world_size of {world_size}: expected 0 to world_size - 1")
        self.__dict__.update(_rank=rank, _world_size=world_size)
        return self

    @property
    def delayed_scales(self) -> dict[str, Tensor]:
        """Copies of the state of delayed and held scales by the names of values, such as ``first.weight0``.

        Held scales are a tensor with a number for each block. The state of a delayed scale is a tensor of shape
        [1 + history]: the multiplier of the next call, and the largest magnitudes of the last steps, newest first.
        Empty before the first call, and without such scales.
        """
        return self._captures.delayed.copy().values

    @property
    def fxround_scales(self) -> Names:
        """An object with any attributes: ``torch.distributed.checkpoint`` follows the keys of a state dict."""
        return Names()

    def share_scales(self, group: Any = None) -> None:
        """Take the largest magnitudes of all processes for delayed scales, as TransformerEngine does.

        Every call that trains and every backward pass then reduces its magnitudes by one ``all_reduce`` for each format
        and dtype, so that all processes must run the same model and the same steps. A copy of the module, or one that
        was pickled, shares nothing until it is called for it.

        Args:
            group: a process group of ``torch.distributed``; None for all processes.

        Raises:
            FxroundError: if ``torch.distributed`` is not initialized.

        Example::

            compiled.share_scales()
        """
        self._captures.delayed.share(group)

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
        self._captures.delayed.load(state_dict, prefix, replace=saved is not None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = global_name(self)
        if name is not None:
            return name
        seed, sample = self.rng.tolist()
        settings = self.strict, seed, sample, self.fuse, self.advance, self.unroll_loops
        return RoundedModule, (self.source, self.policy, *settings, self._captures)

    @property
    def graph(self) -> fx.GraphModule:
        """The lowered (forward) graph that ran or was captured last. Raises ValueError before that."""
        entry = self._called()
        return entry.step.shown.forward if entry.step else entry.lowered

    @property
    def lowered(self) -> fx.GraphModule:
        """The whole lowered graph of the latest call, forward and backward; ``observe_step`` runs its nodes."""
        return self._called().lowered

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The backward graph of the latest call. Raises ValueError if it wanted no gradients."""
        step = self._called(backward=True).step
        assert step is not None
        return step.shown.backward

    @property
    def captured(self) -> Captured:
        """The graph before any pass, of the same call as ``graph``; the joint graph if gradients were wanted."""
        return self._called().captured

    def captures(self) -> Table:
        """Return a table of the captured graphs: module, mode, arguments, conditions, reason of the capture, seconds.

        The column ``module`` is the path of a submodule that a method calls, empty for the model itself. The column
        ``arguments`` has the dtypes and sizes that the graph can be used for; a letter is a size that may change. A
        call with other arguments captures another graph, whose ``reason`` says why no earlier one could be used.
        A gradient that is differentiated again has a graph of its own, the derivative of gradients, after the capture
        that it belongs to. ``captures`` itself captures nothing.
        """
        return table_of(list(self._captures.rows()))

    def graph_text(self, backward: bool = False) -> str:
        """Return the forward or the backward graph of the latest call as text, with one line per node.

        Raises ValueError before the first call, and for a backward graph if the latest call wanted no gradients.
        """
        return graph_views.graph_text(self.backward_graph if backward else self.graph)

    def summary(self, backward: bool | None = None) -> Summary:
        """Return a table of the latest call's operations: node, operator, module, source, rounding, accumulate.

        backward: True for the backward pass alone, False for the forward pass alone, None for both. Raises ValueError
        before the first call, and for a backward pass if the latest call wanted no gradients.
        """
        return graph_views.summary(self._called(backward).lowered, backward=backward)

    def coverage(self, backward: bool | None = None) -> Coverage:
        """Return how many operations of the latest call are rounded, exact, native (with the reason) or data movement.

        backward and errors: as in ``summary``.
        """
        return graph_views.coverage(self._called(backward).lowered, backward=backward)

    def draw(self, path: str | Path, *, report: Any = None) -> Path:
        """Draw the forward graph of the latest call; returns the path.

        Args:
            path: a file that ends in .html, .svg or .json. The HTML page suits graphs of any size: a click opens and
                closes modules, equal layers are folded, and there is a search. It needs no network. SVG suits small
                graphs. Google's Model Explorer opens the JSON, whose colours are those of the first report.
            report: a VariabilityReport, an AttributionReport or a list of reports of this model, which colour the
                operations by their significant bits or shares of the error. The page can show the policy as well.

        Raises:
            ValueError: before the first call, for a path with another suffix, and for a report of another graph, which
                the model has in another mode, or for arguments of other dtypes.
            TypeError: for a report of another type.

        Example::

            compiled.draw("graph.html", report=fxround.variability(model, x, capture="nodes"))
        """
        graph = self.to_networkx()
        return write_picture(path, graph, colourings_of(graph, report), type(self.source).__name__)

    def to_networkx(self) -> nx.DiGraph:
        """Return the forward graph of the latest call as a ``networkx.DiGraph``.

        Raises ValueError before the first call.
        """
        return graph_views.to_networkx(self.graph)

    @torch.no_grad()
    def leaks(
        self,
        inputs: Any = None,
        *,
        declared: Any = None,
        tangents: Mapping[int, Tensor] | None = None,
    ) -> Leaks:
        """Return the values that are not proved to be in the format that the policy declares for them.

        The declared format is that of the rule that rounds the value: a rule for its operation, for its role, or for
        ``operands``. If no rule rounds it (often a weight), it is the format of the operation that reads the value.

        Args:
            inputs: arguments, in the forms of ``compile``'s ``example_inputs``. The model runs with them, and each row
                then says how many elements are not in the format, and the first of these. None reads the graph of the
                latest call and runs nothing.
            declared: a format that every value must be in, for example "e4m3fn", in place of the policy's declarations.
            tangents: with ``inputs``, the gradient of each result as in ``observe_step``; None runs the forward pass
                only.

        Returns:
            A ``Leaks``: a table with one row per value that is not proved to be in its format.

        Raises:
            ValueError: if ``inputs`` is None before the first call or with ``tangents``, and if ``declared`` is unknown
                or a scaled format. Also what capturing raises.

        Example::

            print(compiled.leaks(x))
        """
        if inputs is None and tangents is not None:
            raise ValueError("tangents are given without inputs: the gradients of results need a call to run with")
        if inputs is None:
            return leaks_in(self._called(), self.policy, declared, None, self.rng, None)
        args, kwargs = arguments(inputs, "inputs")
        with torch.set_grad_enabled(tangents is not None):
            entry = self._entry(args, kwargs)
        return leaks_in(entry, self.policy, declared, pytree.tree_leaves((args, kwargs)), self.rng, tangents)

    @torch.no_grad()
    def flips(self, inputs: Any, *, tangents: Mapping[int, Tensor] | None = None) -> Flips:
        """Run the model, and return the bits that the policy's faults flip and how many elements of the results change.

        The flips are those of a call with the same seed and sample. Buffers and arguments are not written, and the
        sample does not change.

        Args:
            inputs: arguments as ``example_inputs`` of ``compile``.
            tangents: the gradient of each result as in ``observe_step``, for a training step; None for a forward pass.

        Raises what capturing raises.
        """
        args, kwargs = arguments(inputs, "inputs")
        leaves = pytree.tree_leaves((args, kwargs))
        quiet = self.with_policy(without_faults(self.policy))
        with torch.set_grad_enabled(tangents is not None):
            entry, expected = self._entry(args, kwargs), quiet._entry(args, kwargs)
        return flips_in(entry, expected, leaves, self.rng, tangents)

    def extra_repr(self) -> str:
        """Return the policy, and the coverage and cost of the latest call if there was one; nothing is captured."""
        seed, sample = self.rng.tolist()
        lines = [f"policy={self.policy.name!r}, seed={seed}, sample={sample}"]
        if self._captures.latest is None:
            return f"{lines[0]}\n(not captured yet: call it, or prepare(*example_inputs))"
        coverage = self.coverage()
        operations = sum(o.operations for o in coverage.operations)
        graphs = f"{self._graphs} captured graph{'s' * (self._graphs != 1)}"
        return "\n".join([*lines, f"coverage: {coverage.line}", f"cost: {operations:,} operations, {graphs}"])

    def __repr__(self) -> str:
        """Return the lines of ``extra_repr``, then the model."""
        shown = "\n".join([*self.extra_repr().splitlines(), f"(source): {self.source!r}"])
        return f"{type(self).__name__}(\n{textwrap.indent(shown, '  ')}\n)"

    def _repr_html_(self) -> str:
        title = f"{type(self.source).__name__}, policy {self.policy.name}"
        return (
            graph_views.html(self.graph, title=title)
            if self._captures.latest
            else f"<pre>{title}: not captured yet</pre>"
        )

    @property
    def _graphs(self) -> int:
        """The number of captured graphs: by training flags, grad mode, dtypes and sizes."""
        return len(self._captures) + (len(self._replay.entries) if self._replay else 0)

    def export(
        self, path: str | Path, example_inputs: Any, *, keep_inputs: bool = True, gradients: bool = False, **kwargs: Any
    ) -> Path:
        """Write the rounded graph and the model's state to a .pt2 file; returns the path.

        The program in the file gives the same bits as this module. ``fxround.load`` reads it, and so does
        ``torch.export.load`` after ``import fxround``. Seed and sample are a buffer of the program.

        Args:
            path: the file, which is replaced when the new one is complete.
            example_inputs: as for ``compile``. The program takes any size of the first dimension of an argument, and
                any size of the dimensions of integer arguments. A cache of keys and values (transformers'
                ``DynamicCache`` or ``StaticCache``) that a call has filled is an argument like a tensor.
            keep_inputs: whether the example inputs are stored in the file, as ``torch.export.save`` does.
            gradients: whether the loaded program can be differentiated with respect to what requires gradients now.
            kwargs: further keyword arguments of the model: ``compiled.export(path, ids, use_cache=False)``.

        Raises:
            OSError: if the file cannot be written; an existing file is then kept. Also what capturing raises.
            TypeError: for a cache that is empty, or of layers of another kind, and for a keyword that is passed twice.
            FxroundError: with ``gradients``, if nothing requires a gradient, for delayed scales, or for a result that
                shares memory with an input or another result; for a view of an input that the model changes; and
                for a named tuple that no module has under its name.
        """
        args, named = arguments(example_inputs)
        if twice := named.keys() & kwargs:
            raise TypeError(f"{', '.join(sorted(twice))} is in example_inputs and a keyword of export; pass it once")
        kwargs = named | kwargs
        caches = caches_among(args, kwargs)
        if caches:
            cached = Cached(self.source, caches)
            captures = Captures(cached, self._captures.delayed, lengths=cached.lengths)
            made = self._like(cached, captures=captures)
            made.rng, made._apart = self.rng, self._apart
            example = with_tensors(caches, args, kwargs)
            return made.export(path, example, keep_inputs=keep_inputs, gradients=gradients)
        # A program has the numbers that the model has now.
        with torch.no_grad():
            entry = self._entry(args, kwargs, constants=True)
        with torch.set_grad_enabled(gradients):
            joint = self._entry(args, kwargs, constants=True) if gradients else None
        return write_program(path, self, entry, joint, (args, kwargs), keep_inputs)

    @property
    def called_submodules(self) -> Mapping[str, Any]:
        """The submodules that methods have called, as compiled modules, by their paths.

        Each is captured by itself under the same policy, as the encoder is by ``generate``. Read-only.
        """
        return MappingProxyType(self._apart)

    def call_submodule(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the rounded result of a submodule that a method calls; one that the model has not is called itself."""
        path = next((path for path, other in self.source.named_modules() if other is module), "")
        if not path:
            return module(*args, **kwargs)
        part = self._apart.get(path)
        if part is None:
            method = Method(MethodType(calling(path), self.source))
            captures = Captures(method, self._captures.delayed, path, self._captures.recorded)
            part = self._like(method, self.policy.with_optional_rules(), self.strict, captures)
            part._calling = CalledBy()
            part = self._apart.setdefault(path, part)
        part.rng = of_submodule(self.rng, path)
        part.advance, part._rank, part._world_size = self.advance, self._rank, self._world_size
        with part._calling.by(self):
            return part(*args, **kwargs)

    @functools.cached_property
    def _operations(self) -> Operations:
        """The single operations of the model's methods."""
        compiled = functools.partial(RoundedModule, strict=self.strict, seed=0, fuse=self.fuse)
        return Operations(self.policy, lambda function, policy: compiled(Function(function), policy))

    def _like(
        self,
        model: nn.Module,
        policy: Policy | None = None,
        strict: bool | None = None,
        captures: Captures | None = None,
    ) -> RoundedModule:
        """Compile a model with the same settings and seed, from sample 0; None: with the same policy and strictness."""
        strict = self.strict if policy is None else strict
        settings = self.fuse, self.advance, self.unroll_loops, captures
        return RoundedModule(model, policy or self.policy, strict, int(self.rng[0]), 0, *settings)

    @property
    def _is_strict(self) -> bool:
        return self.policy.strict if self.strict is None else self.strict

    def _pipeline(self) -> Pipeline:
        """Return what captures and lowers. Raises CaptureError for a model with compiled modules in it."""
        refuse_compiled(self.source)
        policy = self.policy
        if self._apart:  # a rule for what methods call by itself may match nothing in the rest of the model
            parts = [f"{path}." for path in self._apart]
            names = [name for name, _ in self.source.named_modules() if f"{name}.".startswith(tuple(parts))]
            policy = policy.with_optional_rules(names)
        return Pipeline(policy, self._is_strict, self.fuse, self.unroll_loops)

    def _entry(
        self, args: Any, kwargs: Any, replays: bool = False, flat: Flat | None = None, constants: bool = False
    ) -> Entry:
        """Return the graph for these arguments, to run it; arguments and errors as of ``Captures.entry``."""
        try:
            return self._captures.entry(self._pipeline, args, kwargs, replays, flat, constants)
        except Exception as error:
            if self._captures.sharded is not None:
                self._captures.sharded.failed(error)
            raise

    def _called(self, backward: bool | None = None) -> Entry:
        """Return the graph of the latest call. backward: whether it must have a backward pass."""
        entry = self._captures.called
        if backward and entry.step is None:
            raise NotCaptured(
                "the latest call recorded no gradients, so there is no backward graph: call the module with gradients "
                "enabled, and parameters or arguments that require them"
            )
        return entry

    def _wants_gradients(self, leaves: Sequence[Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        return any(t.requires_grad for t in chain(tensors, self.source.parameters()))


assert torch_ops.KERNELS  # importing it attached them
