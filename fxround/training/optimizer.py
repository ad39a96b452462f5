"""compile_optimizer: the step of an optimizer, captured once, rounded operation by operation, and run for a group.

The step of a parameter is a graph whose operations have Sites (direction "update"): its results are the new weight and
the new states. One graph serves every shape, since a step works element by element; learning rates are run-time
numbers. The k-th parameter draws with a seed of its own, so that no two parameters share bits, and the number of steps
taken is the sample: the bits of a step are a function of (seed, step), which ``state_dict`` saves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from fxround.capture import Captured
from fxround.capture.processes import is_part, is_shared, local, part_like
from fxround.compiler.pipeline import Pipeline
from fxround.errors import FxroundError, PolicyError, shown, type_of
from fxround.graph.site import DIRECTION, PORT, ROLE, site
from fxround.graph.values import module_of
from fxround.passes.shared_sums import counted_in_parts
from fxround.policy import Policy
from fxround.python_model.functions import Function
from fxround.runtime.draw import Draw
from fxround.runtime.random_state import random_state, state_of
from fxround.runtime.run import run_several
from fxround.training.inplace import InPlace, in_place, is_row_major
from fxround.training.update import Progress, Update
from fxround.training.updates import NO_FORMULA, UPDATES, update_of
from fxround.views import graph_views
from fxround.views.summaries import Coverage, Summary

RNG_KEY: Final = "fxround_rng"
# Knuth's multiplicative constant: parameter k draws with seed + (k + 1) * this, modulo 2^63.
_APART: Final = 0x9E3779B97F4A7C15
_EXAMPLE: Final = 8
# The roles of values in a step.
_ROLES: Final = ("weight", "state", "gradient", "update")


def compile_optimizer(
    optimizer: torch.optim.Optimizer,
    policy: Any,
    *,
    model: nn.Module | None = None,
    strict: bool | None = None,
    seed: int = 0,
) -> RoundedOptimizer:
    """Return an optimizer that takes the steps of ``optimizer`` with the roundings of ``policy``.

    Args:
        optimizer: of ``torch.optim``, but for LBFGS, Adafactor and SparseAdam. Its parameter groups and state are
            shared, so that a scheduler of either works. Parameters and gradients are dense real tensors of any shape.
        policy: as for ``fxround.compile``. Its rules see the roles ``weight`` (the new parameter), ``state``,
            ``gradient`` (the incoming gradient) and ``update`` (all other operations), with the direction ``update``.
        model: the module whose parameters are optimized, so that rules can match module paths; needed for a rule that
            names a module and may round updates.
        strict: whether an operation that cannot be rounded is an error; None takes the policy's setting.
        seed: 0 to 2^63 - 1, the seed of the stochastic modes.

    Returns:
        A ``RoundedOptimizer``.

    Raises:
        TypeError: for another optimizer, or a model that is no module.
        PolicyError: for a policy that does not parse, for a rule that needs ``model``, and at the first step for a rule
            of the direction ``update`` that matches nothing.
        ValueError: for a model that has none of the parameters; at the first step, for the options ``capturable`` and
            ``differentiable``, which have no formula.

    Example::

        optimizer = fxround.compile_optimizer(torch.optim.Adam(model.parameters()), "bfloat16/stochastic", seed=1)
        loss.backward()
        optimizer.step()

    Source: the single-tensor code of ``torch.optim``, whose multiplications and additions are rounded one by one here,
    and are partly fused there (``fxround.training.updates``).
    """
    if isinstance(optimizer, RoundedOptimizer):
        raise TypeError("the optimizer is compiled already; compile the original one")
    if type(optimizer) not in UPDATES:
        known = ", ".join(kind.__name__ for kind in UPDATES)
        reason = NO_FORMULA.get(type(optimizer))
        why = f", which has no formula of single roundings: {reason}" if reason else ""
        raise TypeError(f"optimizer is {type_of(optimizer)}{why}; expected one of torch.optim's {known}")
    parsed = Policy.parse(policy)
    _require_paths(parsed, model, {id(p) for group in optimizer.param_groups for p in group["params"]})
    return RoundedOptimizer(optimizer, parsed, model, strict, seed)


def _require_paths(policy: Policy, model: Any, parameters: Collection[int]) -> None:
    """Raise TypeError, PolicyError or ValueError if rules that name modules cannot find the parameters."""
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model is {type_of(model)}; expected the torch.nn.Module whose parameters are optimized")
    if model is not None and not any(id(p) in parameters for p in model.parameters()):
        raise ValueError("model has none of the optimizer's parameters; pass the module whose parameters are optimized")
    for position, rule in enumerate(policy.rules if model is None else ()):
        updates = "update" in rule.directions and rule.role in (None, *_ROLES) and rule.operator is None
        if rule.match != "*" and updates and not rule.optional:
            raise PolicyError(
                f"policy {shown(policy.name)}: rule {position + 1}, {str(rule)!r}, names a module, and the optimizer "
                "knows the modules of its parameters only with model=...: pass the module whose parameters are "
                "optimized"
            )


@dataclass(frozen=True)
class _Compiled:
    """The lowered graph of a step, the graph that runs, its kernel if it is one, and the names of its numbers.

    shape: that of the tensors that enter, (-1,) unless the formula is one of matrices
    """

    shape: tuple[int, ...]
    lowered: fx.GraphModule
    running: fx.GraphModule
    kernel: InPlace | None
    numbers: tuple[str, ...]


@dataclass(frozen=True)
class _Batch:
    """Steps with one formula and its numbers: the parameter, the gradient and the states of each, and its seed.

    later: the states of no dimensions after the step. whole: whether the entries are DTensors, and the step is one of
    whole tensors
    """

    update: Update
    compiled: _Compiled
    numbers: dict[str, float]
    later: Mapping[str, float]
    whole: bool = False
    entries: list[list[Tensor]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def given(self, names: Sequence[str], device: torch.device) -> list[Tensor]:
        """Return numbers as tensors of no dimensions."""
        # torch.tensor would wait for a device.
        dtype = self.entries[0][0].dtype
        return [torch.full((), self.numbers[name], dtype=dtype, device=device) for name in names]


@dataclass(frozen=True)
class StepGraph:
    """The lowered graph of a parameter's next step, and what enters it after the parameter and its gradient.

    The parameter, its gradient and the states enter in ``shape``: as tensors of one dimension, (-1,), unless the
    formula is one of matrices; then the numbers, and (seed, step).
    """

    parameter: Tensor
    shape: tuple[int, ...]
    lowered: fx.GraphModule
    states: tuple[Tensor, ...]
    numbers: tuple[Tensor, ...]
    rng: Tensor

    @property
    def entering(self) -> list[Tensor]:
        """What enters after the gradient."""
        states = [_entering(state, self.shape) for state in self.states]
        return [*states, *self.numbers, self.rng]


class RoundedOptimizer(torch.optim.Optimizer):
    """An optimizer with explicit roundings, which ``fxround.compile_optimizer`` makes.

    It is used like the original optimizer, and shares ``param_groups`` and ``state`` with it.
    ``state_dict`` holds seed and step under ``"fxround_rng"`` in every parameter group. Example::

        optimizer = fxround.compile_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), "stochastic")
        optimizer.reseed(1)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        policy: Policy,
        model: nn.Module | None = None,
        strict: bool | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state
        self.kind = type(optimizer)
        self._formulas = update_of(self.kind, policy.definitions)
        self.policy, self.strict = policy, policy.strict if strict is None else strict
        self._paths = {id(p): n.rpartition(".")[0] for n, p in model.named_parameters()} if model else {}
        self._captured: dict[Any, Captured] = {}
        self._compiled: dict[Any, _Compiled] = {}
        self._checked = 0
        # A rule that matches nothing in one parameter's graph may match in another's; _require_matched checks them all.
        rules = tuple(replace(rule, optional=True) for rule in policy.rules)
        self._pipeline = Pipeline(replace(policy, rules=rules), self.strict)
        for group in self.param_groups:
            group[RNG_KEY] = list(random_state(seed, 0).tolist())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step for every parameter that has a gradient.

        closure: evaluates the model again and returns the loss, as in PyTorch. Returns the closure's loss, or None.
        Raises ValueError for sparse or complex tensors, a state of another shape or dtype, and options without a
        formula; PolicyError as stated in ``compile_optimizer``; FxroundError while a CUDA graph is captured, for a
        step that draws or whose numbers change with the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = 0
        for group in self.param_groups:
            _refuse_options(group)
            seed, done = group.setdefault(RNG_KEY, self.param_groups[0][RNG_KEY])
            numbered = list(enumerate(group["params"], number + 1))
            number += len(numbered)
            for batch in self._batches([(p, (seed + k * _APART) % (1 << 63)) for k, p in numbered], group, done):
                self._update(batch, done)
            group[RNG_KEY] = [seed, done + 1]
        self._require_matched()
        return loss

    def _require_matched(self) -> None:
        """Raise PolicyError for a rule of updates alone that matches no operation of any parameter's step."""
        if len(self._compiled) == self._checked or not self._compiled:
            return
        places = [place for c in self._compiled.values() for node in c.lowered.graph.nodes if (place := site(node))]
        matched = {
            i
            for i, rule in enumerate(self.policy.rules)
            if rule.directions != {"update"}
            or any(
                rule.matches(path=p.path, operator=p.operator, kind=p.kind, role=p.role, direction="update")
                for p in places
            )
        }
        self.policy.require_matched(matched, [p.path for p in places], operators=[(p.operator, p.kind) for p in places])
        self._checked = len(self._compiled)

    def reseed(self, seed: int, step: int = 0) -> RoundedOptimizer:
        """Set the seed (0 to 2^63 - 1) and the number of the next step; returns the optimizer itself.

        The random bits of a step are a function of both. Raises TypeError and ValueError for other values.
        """
        for group in self.param_groups:
            group[RNG_KEY] = list(random_state(seed, step).tolist())
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state as PyTorch does; seed and step do not change if the dict has none."""
        kept = [list(group[RNG_KEY]) for group in self.param_groups]
        super().load_state_dict(dict(state_dict))
        for group, rng in zip(self.param_groups, kept, strict=True):
            group[RNG_KEY] = list(state_of(group.get(RNG_KEY, rng), RNG_KEY))

    def graph_text(self) -> str:
        """Return the captured graphs as text; each computes the step of one parameter.

        Raises ValueError before the first step.
        """
        return "\n\n".join(graph_views.graph_text(compiled.lowered) for compiled in self._taken())

    def summary(self) -> Summary:
        """Return a table of the operations of the graph that was captured last: node, operator, path, rounding.

        Raises ValueError before the first step.
        """
        return graph_views.summary(self._taken()[-1].lowered)

    def coverage(self) -> Coverage:
        """Return what is rounded and what is not in the graph that was captured last.

        Raises ValueError before the first step.
        """
        return graph_views.coverage(self._taken()[-1].lowered)

    def graphs(self, with_gradients: Collection[int], later: int = 0) -> Iterator[StepGraph]:
        """Yield the graph of the next step of each parameter whose id is in ``with_gradients``; nothing is changed.

        later: the steps between the next one and that whose random bits are drawn.

        Raises what ``step`` raises before it changes anything.
        """
        number = 0
        for group in self.param_groups:
            _refuse_options(group)
            seed, done = group.get(RNG_KEY, self.param_groups[0][RNG_KEY])
            for k, p in enumerate(group["params"], number + 1):
                if id(p) in with_gradients:
                    yield self._graph(p, group, (seed + k * _APART) % (1 << 63), done, later)
            number += len(group["params"])

    def _graph(self, p: Tensor, group: dict[str, Any], seed: int, done: int, later: int) -> StepGraph:
        _refuse_tensors(p)
        state: Mapping[str, Any] = self.state.get(p, {})
        at = self._progress(p, state, group, done)
        update = self._formulas.of(group, at)
        numbers = update.numbers(group, at)
        by_path = any(rule.match != "*" for rule in self.policy.rules)
        path = self._paths.get(id(p), "") if by_path else ""
        compiled = self._compile(update, tuple(numbers), p.dtype, path, at.shape)
        held = [state.get(name) for name in update.states]
        made = [update.initial(n, p, group) if s is None else s for n, s in zip(update.states, held, strict=True)]
        scalars = [torch.full((), numbers[name], dtype=p.dtype) for name in compiled.numbers]
        rng = random_state(seed, done + later)
        return StepGraph(p, compiled.shape, compiled.lowered, tuple(made), tuple(scalars), rng)

    def _progress(self, p: Tensor, state: Mapping[str, Any], group: dict[str, Any], done: int) -> Progress:
        """Return where a parameter is in its training, before the step."""
        kept = {name: float(state.get(name, value)) for name, value in self._formulas.scalars(group).items()}
        shape = tuple(p.shape) if self._formulas.of_matrices else ()
        if not self._formulas.counts:
            return Progress(done + 1, state.get("momentum_buffer") is None, kept, shape)
        before = state.get("step")
        return Progress((0 if before is None else int(before.item())) + 1, False, kept, shape)

    def _taken(self) -> list[_Compiled]:
        if not self._compiled:
            raise ValueError("no step has been taken yet: call step() when the parameters have gradients")
        return list(self._compiled.values())

    def _batches(self, members: Sequence[tuple[Tensor, int]], group: dict[str, Any], done: int) -> list[_Batch]:
        """Return the steps of a group's parameters that have gradients, those with one graph and its numbers together.

        members: each parameter and its seed. Raises ValueError before any state changes.
        """
        by_path = any(rule.match != "*" for rule in self.policy.rules)
        batches: dict[Any, _Batch] = {}
        counted: list[tuple[dict[str, Any], Tensor]] = []
        moved: list[tuple[dict[str, Any], Mapping[str, float]]] = []
        for p, seed in members:
            if p.grad is None:
                continue
            _refuse_tensors(p)
            state = self.state[p]
            at = self._progress(p, state, group, done)
            if self._formulas.counts:
                before = state.get("step")
                counted.append((state, torch.zeros((), dtype=torch.float32) if before is None else before))
            path = self._paths.get(id(p), "") if by_path else ""
            key = (at.step, at.first, *at.scalars.values(), at.shape, p.dtype, p.device, path, is_part(p))
            batch = batches.get(key)
            if batch is None:
                update = self._formulas.of(group, at)
                numbers, later = update.numbers(group, at), update.advanced(group, at)
                if p.is_cuda and torch.cuda.is_current_stream_capturing():
                    following = replace(at, step=at.step + 1, scalars=later)
                    self._refuse_capture(numbers != update.numbers(group, following))
                compiled = self._compile(update, tuple(numbers), p.dtype, path, at.shape)
                batch = batches[key] = _Batch(update, compiled, numbers, later, is_part(p) and _is_of_whole(compiled))
            for name in batch.update.states:
                if state.get(name) is None:
                    state[name] = batch.update.initial(name, p, group)
                _require_state(state[name], name, p)
            if batch.later:
                moved.append((state, batch.later))
            batch.seeds.append(seed)
            entry = [p, p.grad, *(state[name] for name in batch.update.states)]
            batch.entries.append(list(map(local, entry)) if is_shared(p) and not batch.whole else entry)
        for state, before in counted:
            state["step"] = before
        if counted:
            torch._foreach_add_([before for _, before in counted], 1)
        for state, scalars in moved:
            for name, value in scalars.items():
                state.setdefault(name, torch.empty((), dtype=torch.float32)).fill_(value)
        return list(batches.values())

    def _refuse_capture(self, numbers_change: bool) -> None:
        """Raise FxroundError for a step that a CUDA graph would repeat with the random bits or numbers of this one."""
        changing = "numbers that change with the step" if numbers_change else "random bits" if self.policy.draws else ""
        if changing:
            raise FxroundError(
                f"the step of {self.kind.__name__} takes {changing} from the host, and every replay of the CUDA graph "
                "that is being captured would repeat them: capture the passes of the model alone, and call step() "
                "after each replay"
            )

    def _update(self, batch: _Batch, done: int) -> None:
        """Take the steps of a batch: one call for the tensors that a kernel can overwrite.

        Tensors that several processes have to know as a whole are gathered for one parameter at a time.
        """
        if batch.whole:
            for entry, seed in zip(batch.entries, batch.seeds, strict=True):
                gathered = [tensor.full_tensor().detach() for tensor in entry]  # type: ignore[attr-defined]
                self._update(replace(batch, whole=False, entries=[gathered], seeds=[seed]), done)
                for before, after in zip(_old(entry), _old(gathered), strict=True):
                    local(before).copy_(part_like(before, after))
            return
        compiled, rest = batch.compiled, list(range(len(batch.seeds)))
        if compiled.kernel is not None:
            short = [i for i in rest if is_row_major(batch.entries[i])]
            call = (
                compiled.kernel.several(
                    [batch.entries[i] for i in short],
                    batch.given(compiled.numbers, torch.device("cpu")),
                    [batch.seeds[i] for i in short],
                    Draw(0, done).sample,
                )
                if short
                else None
            )
            if call is not None:
                run_several(call)
                torch.autograd.graph.increment_version([x for i in short for x in _old(batch.entries[i])])
                taken = set(short)
                rest = [i for i in rest if i not in taken]
        if not rest:
            return
        given = batch.given(compiled.numbers, batch.entries[0][0].device)
        for i in rest:
            entering = [_entering(t, compiled.shape) for t in batch.entries[i]]
            made = compiled.running(*entering, *given, random_state(batch.seeds[i], done))
            for before, value in zip(_old(batch.entries[i]), made, strict=True):
                before.copy_(value.reshape(before.shape))

    def _compile(
        self, update: Update, numbers: tuple[str, ...], dtype: torch.dtype, path: str, shape: tuple[int, ...]
    ) -> _Compiled:
        """Return the graph of an update, captured once per formula and lowered once per path if rules name paths."""
        key = (update, dtype, path, shape)
        if key not in self._compiled:
            if (update, dtype, shape) not in self._captured:
                self._captured[update, dtype, shape] = _capture(update, numbers, dtype, shape)
            placed = _placed(self._captured[update, dtype, shape].graph, update, numbers, path)
            graphs = self._pipeline.graphs(placed)
            kernel = None if update.of_matrices else in_place(graphs.fused)
            self._compiled[key] = _Compiled(shape or (-1,), graphs.lowered, graphs.running, kernel, numbers)
        return self._compiled[key]


def _capture(update: Update, numbers: tuple[str, ...], dtype: torch.dtype, shape: tuple[int, ...]) -> Captured:
    """Return the graph of (p, g, states, numbers) -> (p, states).

    shape: of the tensors, if the formula is one of matrices; else tensors have one dimension and any length.
    """
    names = update.states

    def step(p: Tensor, g: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        state, given = dict(zip(names, rest, strict=False)), dict(zip(numbers, rest[len(names) :], strict=True))
        new, states = update.formula(p, g, state, given)
        return new, *(states[name] for name in names)

    example = [torch.ones(shape or _EXAMPLE, dtype=dtype) for _ in range(2 + len(names))]
    scalars = [torch.ones((), dtype=dtype) for _ in numbers]
    # An update has no composite operator, so that its graph is the same under every policy.
    return Pipeline(Policy.parse("identity"), strict=True).capture(Function(step), [*example, *scalars], {})


def _placed(graph: fx.GraphModule, update: Update, numbers: tuple[str, ...], path: str) -> fx.GraphModule:
    """Return a copy of the graph whose nodes carry their roles in an optimizer, for the passes."""
    placed = module_of(graph, copy.deepcopy(graph.graph))
    entering = ("weight", "gradient", *("state" for _ in update.states))
    names = ("weight", "gradient", *update.states, *numbers)
    output: Any = placed.graph.output_node()
    placeholders = [node for node in placed.graph.nodes if node.op == "placeholder"]
    for node in placed.graph.nodes:
        node.meta[DIRECTION], node.meta[ROLE] = "update", "update"
        node.meta["nn_module_stack"] = {"": (path, "")}
    for node in placeholders:
        port = node.meta[PORT]
        node.meta[ROLE] = entering[port.index] if port.index < len(entering) else "scalar"
        node.meta[PORT] = replace(port, name=names[port.index])
    for node, role in zip(output.args[0], ("weight", *("state" for _ in update.states)), strict=True):
        if node.op == "call_function":
            node.meta[ROLE] = role
    return placed


def _entering(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.detach().resolve_neg().reshape(shape).contiguous()


def _old(entry: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameter and the states of an entry, which a step overwrites."""
    return [entry[0], *entry[2:]]


def _require_state(kept: Tensor, name: str, p: Tensor) -> None:
    if kept.shape != p.shape or kept.dtype != p.dtype:
        raise ValueError(
            f"the optimizer's state {name!r} is {kept.dtype} {tuple(kept.shape)}; expected {p.dtype} "
            f"{tuple(p.shape)}, as its parameter"
        )


def _refuse_options(group: Mapping[str, Any]) -> None:
    for option in ("capturable", "differentiable"):
        if group.get(option):
            raise ValueError(f"the optimizer's option {option}=True has no formula: pass {option}=False")


def _is_of_whole(compiled: _Compiled) -> bool:
    """Whether a step depends on more than the elements that it computes: on their numbers, blocks or matrices."""
    return compiled.shape != (-1,) or bool(counted_in_parts(compiled.lowered))


def _refuse_tensors(p: Tensor) -> None:
    placed, expected = getattr(p.grad, "placements", None), getattr(p, "placements", None)
    if p.grad is not None and placed != expected:
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} has the placements {expected}, and its gradient {placed}; expected "
            "a gradient that is placed as its parameter"
        )
    for name, tensor in (("a parameter", p), ("a gradient", p.grad)):
        if tensor is not None and (tensor.layout != torch.strided or tensor.is_complex()):
            kind = "complex" if tensor.is_complex() else str(tensor.layout)
            raise ValueError(f"{name} of shape {tuple(p.shape)} is {kind}; expected a dense real tensor")
