"""One run of a lowered graph, and its derivatives at the values of the run.

Most nodes have a kernel that computes their bits, their losses and their perturbation in one pass
(``kernels.perturbed``), and derivatives by PyTorch. Every other node is computed three times, and only the first result
goes on to other nodes:

    its bits       the kernels of the policy, as ``fxround.compile`` runs them
    exactly        the same function of the same operands in binary64, without a rounding; the difference is what the
                   node's roundings lost (``losses``)
    to be derived  by PyTorch in the dtype of the model, for autograd; its value is replaced by the bits

A perturbation accompanies the values. Each rounding adds its own error to it (a known one, or one drawn with the
variance of the rounding), and it passes a node by the node's derivative. At every node that is not linear, the run
compares f(x + d) and f(x - d) with f(x), for the perturbation d of the operands. Half of
f(x + d) - 2 f(x) + f(x - d) is what the derivatives miss: of second order where f is smooth, and of first order where
d crosses a kink or changes a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, getitem
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fxround.attribution.derivatives import (
    Bits,
    decided,
    differentiable,
    missed_by,
    moved_or_decided,
    passed_by,
)
from fxround.attribution.functions import computed
from fxround.attribution.graphs import Function, Get, Step, Widened, is_tangent, plan_of, require_plain
from fxround.attribution.losses import Loss, is_biased, losses_of, moments, rounding_loss, stored_deterministically
from fxround.attribution.one_pass import OnePass
from fxround.attribution.sites import Effects, SiteLosses, Sites, doubt_of, finite
from fxround.attribution.states import (
    State,
    binary64,
    derivable,
    derived_or_bits,
    floats,
    has_floats,
    is_float,
    leaves_of,
    wide_enough,
    widened,
)
from fxround.errors import UnsupportedRounding
from fxround.graph.dialect import ContractionCall, Cumsum, Pointwise, Sum
from fxround.graph.site import PORT, Site, located, placed, site
from fxround.kernels import from_text
from fxround.kernels.maps import steps_kernel
from fxround.kernels.perturbed import passes_exactly
from fxround.kernels.program import Statement
from fxround.numerics.modes import Rounding
from fxround.runtime.draw import Draw
from fxround.runtime.operands import loads_of
from fxround.runtime.run import run_kernel

# Operators whose results are sums of products of operands: a perturbation of one operand alone passes exactly.
_MULTILINEAR: Final = (ContractionCall, Sum, Cumsum)
# From the states of results to those of the gradients of results at some positions.
Tangents = Callable[["Linearized", list[State], list[int]], list[State]]


@dataclass(frozen=True)
class _Operation:
    """An operation that is evaluated several times.

    function   of operands, before any rounding
    states     of operands, by ``keys``
    bits       its result
    linear     whether a perturbation passes exactly
    rounding   of a statement
    stored     the rounding without random bits of what a chain has drawn
    """

    step: Step
    function: Function
    states: Mapping[Any, State]
    keys: Sequence[Any]
    bits: Any
    linear: bool
    rounding: Rounding | None = None
    stored: Rounding | None = None

    @property
    def decides(self) -> bool:
        """Whether a perturbation changes an operand that is no floating point."""
        return any(self.states[key].decides for key in self.keys)

    def exactly(self, sign: int) -> Any:
        """Return the function in binary64 of operands to which the perturbation is added ``sign`` times."""
        return self.function(lambda key: self.states[key].shifted(sign), binary64)


class Linearized:
    """A run of a lowered graph with its derivatives; ``outputs`` has the states of the graph's results.

    graph       of roundings one by one (``Entry.lowered``), without loops
    inputs      what enters it, (seed, sample) last. A state may enter in place of a value
    noise       a generator of the drawn errors of the perturbation; None if nothing draws: the known errors are then
                the perturbation
    watched     nodes whose states are kept in ``seen``
    formats     roundings to try on the result of each site
    tangents    the function from the states of results to those of their gradients, for a joint graph
    after       the run whose sites this one continues, for a graph that takes the results of another
    within      what the names of this graph's sites begin with

    Raises UnsupportedOperator for a loop or complex numbers, UnsupportedRounding for a rounding whose losses are not
    known.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        noise: torch.Generator | None,
        watched: Collection[str] = (),
        formats: tuple[Rounding, ...] = (),
        tangents: Tangents | None = None,
        after: Linearized | None = None,
        within: str = "",
    ) -> None:
        require_plain(graph)
        self.graph, self.noise, self.formats = graph, noise, formats
        self.sites: list[SiteLosses] = [] if after is None else after.sites
        self.seen: dict[str, State] = {}
        self.root: Tensor = torch.zeros((), requires_grad=True) if after is None else after.root
        self._plan, self._states = plan_of(graph), dict[Any, State]()
        self._inputs, self._tangents = iter(inputs), tangents
        self._added = Sites(self.sites, self.root, formats, within)
        self._short = OnePass(noise, self._added)
        spent = self._plan.spent_by_decisions
        for step in self._plan.steps:
            if self._tangents is not None and any(is_tangent(used) for used in step.reads):
                self._enter_tangents(self._tangents)
            try:
                self._states[step.node] = state = self._run(step)
            except UnsupportedRounding as error:
                at = site(step.node) or located(step.node)
                raise UnsupportedRounding(f"{placed(at.operator, at.path, at.source, at.code)}: {error}") from error
            if step.node.name in watched:
                self.seen[step.node.name] = state
            for used in spent.get(step.node, ()):
                del self._states[used]
        nothing = State.constant(None)
        self.outputs = [self._states.get(used, nothing) for used in self._plan.returned]
        self._states = {}

    def backward(self, value: Tensor, direction: Tensor) -> list[Effects]:
        """Return the effects of every site on the sum of the products of a derived value and a direction."""
        for record in self.sites:
            record.collected = None
        if value.requires_grad:
            torch.autograd.backward(value, direction.to(value.dtype), retain_graph=True, inputs=[self.root])
            self.root.grad = None
        none = Effects(tried=(0.0,) * len(self.formats))
        return [record.collected or none for record in self.sites]

    def _enter_tangents(self, tangents: Tangents) -> None:
        """Set the states of the gradients of results, which follow from those of the results."""
        results = [self._states[used] for used in self._plan.results]
        places = self._plan.tangents
        entering = tangents(self, results, [node.meta[PORT].index for node in places])
        self._states.update(zip(places, entering, strict=True))
        self._tangents = None

    def _bits(self, used: fx.Node) -> Any:
        return self._states[used].bits

    def _run(self, step: Step) -> State:
        node = step.node
        if node.op != "call_function":
            return self._entering(node)
        if not step.scale and (state := self._short.state(step, self._states)) is not None:
            return state
        with torch.no_grad():
            bits = step.call_with(self._bits)
        if step.scale:
            return State.constant(bits)
        if not step.floats:
            return State(bits, bits, self._decisions(step, bits))
        decides = any(self._states[used].decides for used in step.reads)
        if not decides and not any(has_floats(self._states[used].bits) for used in step.reads):
            return State.constant(bits)
        if isinstance(step.call, Pointwise):
            return self._program(step, bits)
        if node.target is getitem or (step.kind in ("movement", "integer") and not decides):
            return self._moved(step, bits)
        linear = step.kind != "exact" and not decides and self._is_linear(step)
        call = None if step.call is None else step.read(self._bits)

        def lost(exact: Any) -> list[Loss]:
            if step.kind in ("exact", "movement", "integer"):
                return []
            if call is not None:
                return losses_of(call, bits, exact)
            pairs = enumerate(zip(floats(bits), floats(exact), strict=True))
            return [Loss(error=a.double() - b, result=i) for i, (a, b) in pairs]

        stored = None if call is None else stored_deterministically(call)
        operation = _Operation(step, step.call_with, self._states, step.reads, bits, linear, None, stored)
        return self._operation(operation, lost)

    def _entering(self, node: fx.Node) -> State:
        """Return the state of what enters the graph."""
        if is_tangent(node):
            return State.constant(None)
        if node.op == "get_attr":
            return State.constant(attrgetter(str(node.target))(self.graph))
        given = next(self._inputs)
        return given if isinstance(given, State) else State.constant(given)

    def _decisions(self, step: Step, bits: Any) -> Any:
        """Return what a value that is no floating point becomes under the perturbation."""
        if not any(self._states[used].moves for used in step.reads):
            return pytree.tree_map(lambda _: None, bits)
        with torch.no_grad():
            plus, minus = (self._chosen_again(step, sign, {}) for sign in (1, -1))
        return pytree.tree_map(decided, bits, plus, minus)

    def _chosen_again(self, step: Step, sign: int, known: dict[fx.Node, Any]) -> Any:
        """Return what a node yields for perturbed operands, choosing again what its operands have chosen.

        A comparison of a value with a maximum of such values is true for one of them, whatever the perturbation: the
        maximum must be that of the perturbed values, which its derivative does not give where two are equal.
        """

        def get(used: fx.Node) -> Any:
            if used not in known:
                of = self._plan.by_node[used]
                known[used] = self._chosen_again(of, sign, known) if of.chooses else self._states[used].shifted(sign)
            return known[used]

        return step.call_with(get, binary64)

    def _is_linear(self, step: Step) -> bool:
        """Whether a perturbation passes the node exactly: a sum of products in which one factor alone is perturbed."""
        return isinstance(step.call, _MULTILINEAR) and sum(self._states[used].moves for used in step.reads) <= 1

    def _program(self, step: Step, bits: Tensor) -> State:
        """Run the statements of a pointwise program, each with a rounding of its own."""
        call: Any = step.read(self._bits)
        program = from_text.program(call.program)
        values = [bits]
        if len(program.statements) > 1:
            kernel = steps_kernel(program, loads_of(call.xs), call.results[0])
            values = run_kernel(kernel, call.xs, Draw.of(call.rng, call.node).key())
        operands: Any = step.node.args[0]
        states: dict[Any, State] = {}
        for i, used in enumerate(operands):
            own = self._states[used]
            states[f"x{i}"] = own if own.bits.is_floating_point() else own.as_numbers()
        for statement, value in zip(program.statements, values, strict=True):
            states[statement.target] = self._statement(step, statement, states, value)
        return states[program.results[0]]

    def _statement(self, step: Step, statement: Statement, states: Mapping[Any, State], value: Tensor) -> State:
        names = [o for o in statement.operands if isinstance(o, str)]
        own = states[names[0] if names else "x0"].bits.dtype

        def function(get: Get, widened: Widened) -> Tensor:
            dtype = widened(own)
            return computed(statement, {name: get(name).to(dtype) for name in names}, torch.zeros((), dtype=dtype))

        def lost(exact: Tensor) -> list[Loss]:
            rounding = statement.rounding
            return [] if rounding is None else [rounding_loss(rounding, value, exact.broadcast_to(value.shape))]

        linear = passes_exactly(statement, sum(states[name].moves for name in names))
        return self._operation(_Operation(step, function, states, names, value, linear, statement.rounding), lost)

    def _moved(self, step: Step, bits: Any) -> State:
        """Return the state of what moves values, or takes one of a tuple."""
        states, keys = self._states, step.reads
        if step.node.target is getitem:
            of, place = states[keys[0]], step.node.args[1]
            return State(bits, of.derived[place], of.moved[place])
        with torch.enable_grad():
            derived = step.call_with(lambda key: states[key].derived, wide_enough)
        with differentiable(lambda: f"{located(step.node)}"):
            passed = passed_by(step.call_with, states, keys, bits)
        return State(bits, pytree.tree_map(derived_or_bits, derived, bits), passed)

    def _operation(self, of: _Operation, lost: Callable[[Any], list[Loss]]) -> State:
        """Return the state of a computed value, and add what its roundings lost to the sites.

        lost: from the exact result to what the roundings lost.
        """
        states, keys, node = of.states, of.keys, of.step.node
        with torch.enable_grad():
            derived = of.function(lambda key: states[key].derived, wide_enough)
        with differentiable(lambda: f"{located(node)}"):
            moved = passed_by(of.function, states, keys, of.bits)
        missed: Tensor | None = None
        with torch.no_grad():
            # What is chosen from operands is one of their values.
            chosen = of.step.kind == "exact" and not of.decides
            exact = pytree.tree_map(widened, of.bits) if chosen else of.exactly(0)
            losses = [finite(loss) for loss in lost(exact)]
            if not of.linear and any(states[key].moves for key in keys):
                plus, minus = of.exactly(1), of.exactly(-1)
                missed = missed_by(exact, plus, minus, moved)
                moved = pytree.tree_map(moved_or_decided, of.bits, moved, plus, minus)
            if self.noise is not None and (wandered := self._wandered(of, exact, losses)):
                more, steps = self.wandering(*wandered)
                losses += more
                missed = steps if missed is None else missed if steps is None else missed + steps
        return self.enter(node.name, of.step.place, State(of.bits, derived, moved), losses, missed)

    def enter(self, name: str, place: Site, state: State, losses: Sequence[Loss], missed: Tensor | None) -> State:
        """Return the state of a computed value, and add what its roundings lost to the sites.

        state: the bits, the value of PyTorch for autograd, and the perturbation that its operands pass on.
        """
        kept = pytree.tree_leaves(state.bits)
        values, structure = pytree.tree_flatten(state.derived)
        replaced: Any = Bits.apply
        pairs = zip(values, kept, strict=True)
        values = [replaced(value, derivable(k), self.root) if is_float(k) else k for value, k in pairs]
        moved = leaves_of(state.moved)
        # A stock kernel may have several results, with an error in each; every other operation has one.
        for position, i in enumerate(i for i, value in enumerate(kept) if is_float(value)):
            own = [loss for loss in losses if loss.result == position]
            moved[i] = self._perturbed(moved[i], own, kept[i].dtype)
            doubt = doubt_of(missed, moved[i])
            self._added.add(name, place, values[i], [loss.kept() for loss in own], doubt, kept[i])
            missed = None
        return State(state.bits, pytree.tree_unflatten(values, structure), pytree.tree_unflatten(moved, structure))

    def wandering(self, error: Tensor, other: Tensor, passed: Tensor) -> tuple[list[Loss], Tensor | None]:
        """Return the loss of a known error that other samples change, or what the derivatives miss by it.

        error, other: the error of the run, and that for other operands. passed: what the exact function changes. A
        rounding without random bits of a value that varies has an error that varies: half of the mean square of the
        difference of two samples is its variance. But where the value varies by less than the rounding's quantum, the
        rounding undoes most changes and makes few of them a whole quantum, which no derivative tells.
        """
        changed = (other - error).nan_to_num(0.0, 0.0, 0.0)
        if float((changed * passed).sum()) < -float(passed.square().sum()) / 2:
            return [], changed
        return [Loss(variance=changed.square() / 2)], None

    def _wandered(self, of: _Operation, exact: Any, losses: Sequence[Loss]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the mean error of a rounding in the run and in another sample, and what changes the rounded value.

        None if the rounding has no such error, or if nothing changes.
        """
        known = [loss.error for loss in losses if loss.error is not None]
        by = of.stored or (of.rounding if of.rounding is not None and is_biased(of.rounding) else None)
        errs = by is not None or (of.rounding is None and known and not any(loss.draws for loss in losses))
        if self.noise is None or not errs:
            return None
        value = above = floats(exact)[0]
        near: dict[Any, Any] = {}
        if any(of.states[key].moves for key in of.keys):
            near = {key: of.states[key].nearby(self.noise) for key in of.keys}
            above = floats(of.function(lambda key: pytree.tree_map(widened, near[key]), binary64))[0]
        if of.stored is not None:
            # The store rounds what the chain has drawn.
            above = sum((one for loss in losses if (one := loss.sample(self.noise)) is not None), start=above)
        if above is value:
            return None
        if by is not None:
            return moments(by, value)[0], moments(by, above)[0], above - value
        other = floats(of.step.call_with(near.__getitem__))[0].double() - above
        return known[0], other, above - value

    def _perturbed(self, moved: Tensor | None, losses: Sequence[Loss], dtype: torch.dtype) -> Tensor | None:
        """Return the perturbation of a result: that which passed, and the errors of its own roundings."""
        for loss in losses:
            own = loss.error if self.noise is None else loss.sample(self.noise)
            if own is not None:
                own = own.to(wide_enough(dtype))
                moved = own if moved is None else moved + own
        return moved
