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

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter, getitem
from typing import Any, Final

import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fxround.attribution.functions import computed, exact_of, is_differentiated, product_gradients, with_operands
from fxround.attribution.losses import (
    Kept,
    Loss,
    carried_losses,
    is_biased,
    losses_of,
    moments,
    rounding_loss,
    stored_deterministically,
)
from fxround.eager.round import round as round_stochastically
from fxround.errors import UnsupportedOperator, UnsupportedRounding
from fxround.graph.dialect import CALLS, ContractionCall, Convolution, Cumsum, Matmul, Pointwise, Sum, loops_of, read
from fxround.graph.dtypes import FORMAT_OF, result_storage
from fxround.graph.site import PORT, PORTS, Site, float_values, is_complex, located, placed, site
from fxround.kernels import from_text
from fxround.kernels.kinds import Exact
from fxround.kernels.maps import steps_kernel
from fxround.kernels.perturbed import Perturbed, passes_exactly, perturbed_statement, perturbed_store
from fxround.kernels.program import Statement
from fxround.numerics.modes import Rounding
from fxround.operators.rules import rule_of
from fxround.runtime.draw import NO_KEY, Draw
from fxround.runtime.operands import loads_of
from fxround.runtime.run import run_kernel

# Operators whose results are sums of products of operands: a perturbation of one operand alone passes exactly.
_MULTILINEAR: Final = (ContractionCall, Sum, Cumsum)
_NAMES: Final = """
    view _unsafe_view reshape alias permute transpose.int t expand squeeze squeeze.dim squeeze.dims unsqueeze
    slice.Tensor select.int clone cat stack split.Tensor split_with_sizes unbind.int diagonal unfold flip roll repeat
    tril triu embedding gather index.Tensor index_select where.self
"""
# Operators of ATen that move values, or choose among them by a mask, and are linear in all of their floating-point
# tensors together.
MOVES: Final = frozenset(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in _NAMES.split())


@dataclass(frozen=True)
class Effects:
    """What the roundings of a site do to one number, by one backward pass.

    variance    the variance that its drawn errors add
    effect      the sum of the effects of its known errors
    fourth      the sum of the squares of the elements' parts of ``variance``
    doubt       the magnitude of what the derivatives miss at the operation
    tried       for each of ``formats``, the variance that a rounding of its result would add
    """

    variance: float = 0.0
    effect: float = 0.0
    doubt: float = 0.0
    tried: tuple[float, ...] = ()
    fourth: float = 0.0


@dataclass
class SiteLosses:
    """What the roundings of an operation lost.

    missed      what the derivatives miss of the operation for the perturbation of its operands, bfloat16; None for
                nothing
    value       its result; only with ``formats``
    formats     roundings to try on the result
    collected   the effects that the last backward pass found; None if no derivative reached the operation
    tried       the mean and the variance of the error in each of the formats, None before a pass asks for them
    """

    node: str
    place: Site
    losses: list[Kept]
    missed: Tensor | None = None
    value: Tensor | None = None
    formats: tuple[Rounding, ...] = ()
    collected: Effects | None = None
    tried: list[tuple[Tensor, Tensor]] | None = None

    def collect(self, gradient: Tensor) -> Tensor | None:
        """Keep the effects for this derivative with respect to the operation's result.

        Returns the derivative with zeros in place of what is no finite number, None if there is nothing to replace. An
        infinite derivative of an element without an error means nothing; of any other element it is the doubt.
        """
        raw = gradient.double()
        finite = bool(raw.isfinite().all())
        g = raw if finite else raw.nan_to_num(0.0, 0.0, 0.0)
        variance = effect = doubt = fourth = 0.0
        for loss in self.losses:
            own = g if loss.carried is None else loss.carried(g)
            if loss.deviation is not None:
                parts = (own * loss.deviation).square()
                variance += float(parts.sum())
                fourth += float(parts.square().sum())
            if loss.error is not None:
                effect += float((own * loss.error).sum())
            if not finite and loss.meets(raw if loss.carried is None else loss.carried(raw)):
                doubt = math.inf
        if self.missed is not None:
            each = torch.where((self.missed == 0) | (raw == 0), 0.0, raw * self.missed).nan_to_num(math.inf)
            # Elements may miss in one direction, or in all.
            doubt = max(doubt, abs(float(each.sum().nan_to_num(math.inf))), float(each.square().sum().sqrt()))
        tried: tuple[float, ...] = ()
        if self.value is not None:
            tried = tuple(_effect_of(raw, *errors) for errors in self._errors_of_formats())
        self.collected = Effects(variance, effect, doubt, tried, fourth)
        return None if finite else g.to(gradient.dtype)

    def _errors_of_formats(self) -> list[tuple[Tensor, Tensor]]:
        """Return the mean and the variance of the error of the result in each of the formats."""
        if self.tried is None:
            assert self.value is not None
            self.tried = [moments(rounding, self.value.double()) for rounding in self.formats]
        return self.tried


class _Start(torch.autograd.Function):
    """The value of an operation, of whose operands none depends on an earlier rounding."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, root: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient.new_zeros(())


class _Product(torch.autograd.Function):
    """The value of a matrix product or a convolution, with the derivative that PyTorch has for it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, value: Tensor, call: ContractionCall[Tensor]) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.call = call
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return *product_gradients(ctx.call, a, b, gradient, ctx.needs_input_grad[:2]), None, None


def _effect_of(derivative: Tensor, mean: Tensor, variance: Tensor) -> float:
    """Return the mean square of what errors do to a number: their known parts together, and what is drawn.

    A number that leaves the range of a format, or is none there, is as wrong as can be.
    """
    known = torch.where((derivative == 0) | (mean == 0), 0.0, derivative * mean)
    known = known.nan_to_num(math.inf, math.inf, -math.inf)
    drawn = torch.where((derivative == 0) | (variance == 0), 0.0, derivative.square() * variance)
    total = known.sum().square() + drawn.sum()
    return float(total.nan_to_num(math.inf, math.inf))


class _Bits(torch.autograd.Function):
    """The bits of a node in place of the value that PyTorch computes, with the derivative of that value."""

    @staticmethod
    def forward(ctx: Any, derived: Tensor, bits: Tensor, root: Tensor) -> Tensor:
        return bits.view_as(bits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, gradient.new_zeros(())


@dataclass(frozen=True)
class Decisions:
    """The values, no floating point, to which a perturbation and its opposite lead."""

    plus: Any
    minus: Any


@dataclass(frozen=True)
class State:
    """What a run has of a value: three pytrees of one structure.

    bits      the value of the run
    derived   the same numbers for autograd, at least float32
    moved     the perturbation of a floating-point tensor, None if there is none; ``Decisions`` of another value, None
              if the perturbation changes nothing
    """

    bits: Any
    derived: Any
    moved: Any

    @staticmethod
    def constant(value: Any) -> State:
        """Return the state of a value that does not depend on a rounding."""
        return State(value, pytree.tree_map(_derivable, value), pytree.tree_map(lambda _: None, value))

    @property
    def moves(self) -> bool:
        """Whether the perturbation changes the value."""
        if self.moved is None or isinstance(self.moved, Tensor):
            return self.moved is not None
        return any(leaf is not None for leaf in _leaves(self.moved))

    @property
    def decides(self) -> bool:
        """Whether the perturbation changes a value that is no floating point."""
        if self.moved is None or isinstance(self.moved, Tensor):
            return False
        return any(isinstance(leaf, Decisions) for leaf in _leaves(self.moved))

    def moved_or_zero(self) -> Any:
        """Return the perturbation of floating-point tensors, zeros where there is none; other values as they are."""
        if isinstance(self.moved, Tensor):
            return self.moved
        bits, structure = pytree.tree_flatten(self.bits)
        leaves = [
            moved if moved is not None else x.new_zeros(x.shape, dtype=_wide_enough(x.dtype)) if is_float(x) else x
            for x, moved in zip(bits, _leaves(self.moved), strict=True)
        ]
        return pytree.tree_unflatten(leaves, structure)

    def as_numbers(self) -> State:
        """Return the state of a mask as numbers, zeros and ones."""
        decided = self.moved
        if decided is not None:
            decided = Decisions(decided.plus.to(torch.float32), decided.minus.to(torch.float32))
        numbers = self.bits.to(torch.float32)
        return State(numbers, numbers, decided)

    def reshaped(self, shape: Sequence[int]) -> State:
        """Return the state of a floating-point tensor in another shape."""
        moved = None if self.moved is None else self.moved.reshape(shape)
        return State(self.bits.reshape(shape), self.derived.reshape(shape), moved)

    def shifted(self, sign: int) -> Any:
        """Return the value in binary64, with the perturbation added ``sign`` times."""
        bits, structure = pytree.tree_flatten(self.bits)
        shifted = [_shifted(value, moved, sign) for value, moved in zip(bits, _leaves(self.moved), strict=True)]
        return pytree.tree_unflatten(shifted, structure)

    def nearby(self, noise: torch.Generator | None) -> Any:
        """Return the value with the perturbation added, rounded to numbers of its dtype at random."""
        bits, structure = pytree.tree_flatten(self.bits)
        moved = zip(bits, self.shifted_leaves(1), _leaves(self.moved), strict=True)
        return pytree.tree_unflatten([_on_grid(value, to, by, noise) for value, to, by in moved], structure)

    def shifted_leaves(self, sign: int) -> list[Any]:
        """Return the leaves of ``shifted``."""
        return pytree.tree_leaves(self.shifted(sign))


_Chain = ContractionCall[Tensor] | Sum[Tensor]
# A function of an operation's operands, by node or name, and of the dtype in which it computes a dtype's values.
Get = Callable[[Any], Any]
Widened = Callable[[torch.dtype], torch.dtype]
Function = Callable[[Get, Widened], Any]
# From the states of results to those of the gradients of results at some positions.
Tangents = Callable[["Linearized", list[State], list[int]], list[State]]


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
        _require_plain(graph)
        self.graph, self.noise, self.formats = graph, noise, formats
        self.within = within
        self.sites: list[SiteLosses] = [] if after is None else after.sites
        self.seen: dict[str, State] = {}
        self.root: Tensor = torch.zeros((), requires_grad=True) if after is None else after.root
        self._states: dict[Any, State] = {}
        self._inputs, self._tangents, self._scales = iter(inputs), tangents, _scales(graph)
        nodes = _results_first(graph)
        self._chosen = _chosen(nodes)
        last = _last_uses(nodes, self._read_again)
        for node in nodes:
            if node.op == "output":
                nothing = State.constant(None)
                self.outputs = [self._states.get(used, nothing) for used in _listed(node.args[0])]
                break
            if self._tangents is not None and any(_is_tangent(used) for used in node.all_input_nodes):
                self._enter_tangents()
            try:
                self._states[node] = state = self._run(node)
            except UnsupportedRounding as error:
                at = site(node) or located(node)
                raise UnsupportedRounding(f"{placed(at.operator, at.path, at.source, at.code)}: {error}") from error
            if node.name in watched:
                self.seen[node.name] = state
            for spent in last.get(node, ()):
                del self._states[spent]
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

    def _enter_tangents(self) -> None:
        """Set the states of the gradients of results, which follow from those of the results."""
        assert self._tangents is not None
        results = [self._states[used] for used in _results(self.graph)]
        places = [node for node in self.graph.graph.find_nodes(op="placeholder") if _is_tangent(node)]
        entering = self._tangents(self, results, [node.meta[PORT].index for node in places])
        self._states.update(zip(places, entering, strict=True))
        self._tangents = None

    def _run(self, node: fx.Node) -> State:
        if _is_tangent(node):
            return State.constant(None)
        if node.op == "placeholder":
            given = next(self._inputs)
            return given if isinstance(given, State) else State.constant(given)
        if node.op == "get_attr":
            return State.constant(attrgetter(str(node.target))(self.graph))
        if node not in self._scales and (state := self._shortly(node)) is not None:
            return state
        with torch.no_grad():
            bits = _called(node, lambda used: self._states[used].bits, None)
        if node in self._scales:
            return State.constant(bits)
        if not float_values(node):
            return State(bits, bits, self._decisions(node, bits))
        decides = any(self._states[used].decides for used in node.all_input_nodes)
        if not decides and not any(_has_floats(self._states[used].bits) for used in node.all_input_nodes):
            return State.constant(bits)
        if node.target == Pointwise.overload:
            return self._program(node, bits)

        def function(get: Get, widened: Widened) -> Any:
            return _called(node, get, widened)

        rule = rule_of(node)
        kind = "" if rule is None else rule.kind
        if node.target is getitem or (kind in ("movement", "integer") and not decides):
            return self._moved(node, function, bits)
        linear = kind != "exact" and not decides and self._is_linear(node)
        call = _read(node, self._states) if node.target in CALLS else None

        def lost(exact: Any) -> list[Loss]:
            if kind in ("exact", "movement", "integer"):
                return []
            if call is not None:
                return losses_of(call, bits, exact)
            pairs = enumerate(zip(_floats(bits), _floats(exact), strict=True))
            return [Loss(error=a.double() - b, result=i) for i, (a, b) in pairs]

        stored = None if call is None else stored_deterministically(call)
        return self._operation(node, function, self._states, node.all_input_nodes, bits, lost, linear, None, stored)

    def _shortly(self, node: fx.Node) -> State | None:
        """Return the state of an operation that needs no other evaluation than that of its bits, else None.

        It moves values, or has a kernel of ``kernels.perturbed``.
        """
        if node.target in CALLS:
            return self._in_one_pass(node)
        if node.target is getitem:
            of, place = self._states[node.args[0]], node.args[1]
            return State(of.bits[place], of.derived[place], of.moved[place]) if is_float(of.bits[place]) else None
        if str(node.target) in MOVES:
            return self._linear_move(node)
        rule = rule_of(node)
        if rule is None or rule.kind != "exact" or not rule.body or len(node.args) != 1:
            return None
        (operand,) = node.args
        of = self._states[operand]
        if not is_float(of.bits) or isinstance(of.moved, Decisions):
            return None
        with torch.no_grad():
            bits = _called(node, lambda used: self._states[used].bits, None)
        text = f"t0 = {rule.body.format('x0')} @ exact"
        return self._statement_in_one_pass(node, text, [of.bits], [of], bits.dtype, NO_KEY, bits)

    def _linear_move(self, node: fx.Node) -> State | None:
        """Return the state of what moves values, whose perturbation moves as they do; None for decisions among them."""
        used = {one: self._states[one] for one in node.all_input_nodes}
        if any(not isinstance(leaf, Tensor | None) for one in used.values() for leaf in _leaves(one.moved)):
            return None
        floats = [leaf for one in used.values() for leaf in _floats(one.bits)]
        if not floats:
            return None
        own = all(leaf.dtype == torch.float32 for leaf in floats)
        with torch.enable_grad():
            derived = _called(node, lambda one: used[one].derived, None if own else _wide_enough)
        with torch.no_grad():
            # The derived values are the bits, in another dtype.
            bits = _mapped(Tensor.detach, derived) if own else _called(node, lambda one: used[one].bits, None)
            if not any(one.moves for one in used.values()):
                return State(bits, derived, _mapped(lambda _: None, bits))
            moved = _called(node, lambda one: used[one].moved_or_zero(), None if own else _wide_enough)
        return State(bits, derived, moved)

    def _in_one_pass(self, node: fx.Node) -> State | None:
        """Return the state of an operation for which there are kernels of ``kernels.perturbed``, else None."""
        written: Any = CALLS[node.target].of(node.args)
        operands = [self._states[used] for used in written.operands]
        if not all(is_float(one.bits) and not isinstance(one.moved, Decisions) for one in operands):
            return None
        if isinstance(written, Pointwise):
            key = Draw.of(self._states[written.rng].bits, written.node).key()
            xs = [one.bits for one in operands]
            return self._statement_in_one_pass(node, written.program, xs, operands, written.dtype, key)
        if isinstance(written, ContractionCall | Sum) and self.noise is not None:
            return self._chain_in_one_pass(node, _read(node, self._states), operands)
        return None

    def _statement_in_one_pass(
        self,
        node: fx.Node,
        text: str,
        xs: Sequence[Tensor],
        operands: Sequence[State],
        dtype: torch.dtype,
        key: Any,
        bits: Tensor | None = None,
    ) -> State | None:
        """Return the state of a program's only statement. bits: its value, if another kernel computes it."""
        statement, *more = from_text.program(text).statements
        read = [f"x{i}" in statement.operands for i in range(len(operands))]
        moved = tuple(reads and one.moved is not None for reads, one in zip(read, operands, strict=True))
        kernel = perturbed_statement(text, loads_of(xs), result_storage(dtype), moved, self.noise is not None)
        if more or kernel is None:
            return None
        given = [one.moved for one, moves in zip(operands, moved, strict=True) if moves]
        made = run_kernel(kernel.kernel, [*xs, *given], key)
        if bits is not None:
            made[0] = bits
        value = _derivable(made[0])
        derived = value
        if any(reads and one.derived.requires_grad for reads, one in zip(read, operands, strict=True)):
            names = {f"x{i}": one.derived for i, one in enumerate(operands)}
            with torch.enable_grad():
                derived = computed(statement, names, value)
            # The derivatives are those of PyTorch, and later operations read the bits.
            derived.data = value
        return self._passed_in_one(node, kernel, made, derived)

    def _chain_in_one_pass(self, node: fx.Node, call: _Chain, operands: Sequence[State]) -> State | None:
        kernel = call.kernel(call.loads())
        packed = None if isinstance(kernel, Exact) else carried_losses(call, kernel)
        if packed is None:
            return None
        moving = [i for i, one in enumerate(operands) if one.moved is not None]
        # A sum of products is linear in each of its operands.
        parts = [_multilinear(call, {i: operands[i].moved}) for i in moving]
        moved = sum(parts[1:], start=parts[0]) if parts else None
        store = perturbed_store(kernel, moved is not None)
        numbered: Any = call
        key = Draw.of(call.rng, numbered.node).key()
        made = run_kernel(store.kernel, [packed] if moved is None else [packed, moved], key)
        if not bool(made[0].isfinite().all()):
            made[0] = _called(node, lambda used: self._states[used].bits, None)
        missed = _multilinear(call, {i: operands[i].moved for i in moving}) if len(moving) > 1 else None
        if missed is not None:
            missed = torch.where(made[0].isfinite(), missed.nan_to_num(math.inf, math.inf, -math.inf), 0.0)
        value = _derivable(made[0])
        derived = [one.derived for one in operands]
        if not any(one.requires_grad for one in derived):
            new = value
        elif isinstance(call, Matmul | Convolution):
            replaced: Any = _Product.apply
            new = replaced(*derived, value, call)
        else:
            with torch.enable_grad():
                new = exact_of(with_operands(call, derived))
            new.data = value
        return self._passed_in_one(node, store, made, new, missed)

    def _passed_in_one(
        self, node: fx.Node, kernel: Perturbed, made: Sequence[Tensor], derived: Tensor, missed: Tensor | None = None
    ) -> State:
        """Return the state of a value by a kernel's results, and add what its rounding lost to the sites."""
        started: Any = _Start.apply
        derived = derived if derived.requires_grad else started(derived, self.root)
        moved = None if kernel.moved is None else made[kernel.moved]
        if kernel.missed is not None and bool(made[kernel.missed].any()):
            missed = made[kernel.missed].to(torch.bfloat16)
        elif missed is not None:
            missed = _doubt(missed, moved)
        lost = None if kernel.lost is None else made[kernel.lost]
        kept = [] if lost is None else [Kept(lost, None, None) if self.noise is None else Kept(None, lost, None)]
        place = site(node)
        assert place is not None
        tried = made[0] if self.formats else None
        record = SiteLosses(f"{self.within}{node.name}", place, kept, missed, tried, self.formats)
        self.sites.append(record)
        derived.register_hook(record.collect)
        return State(made[0], derived, moved)

    def _decisions(self, node: fx.Node, bits: Any) -> Any:
        """Return what a value that is no floating point becomes under the perturbation."""
        if not any(self._states[used].moves for used in node.all_input_nodes):
            return pytree.tree_map(lambda _: None, bits)
        with torch.no_grad():
            plus, minus = (self._chosen_again(node, sign, {}) for sign in (1, -1))
        return pytree.tree_map(_decided, bits, plus, minus)

    def _chosen_again(self, node: fx.Node, sign: int, known: dict[fx.Node, Any]) -> Any:
        """Return what a node yields for perturbed operands, choosing again what its operands have chosen.

        A comparison of a value with a maximum of such values is true for one of them, whatever the perturbation: the
        maximum must be that of the perturbed values, which its derivative does not give where two are equal.
        """

        def get(used: fx.Node) -> Any:
            if used not in known:
                again = used in self._chosen
                known[used] = self._chosen_again(used, sign, known) if again else self._states[used].shifted(sign)
            return known[used]

        return _called(node, get, _binary64)

    def _read_again(self, node: fx.Node) -> set[fx.Node]:
        """Return the nodes whose states a node reads: its operands, and for a decision what they have chosen from."""
        read, waiting = set(node.all_input_nodes), list(node.all_input_nodes)
        while waiting and node.op == "call_function" and not float_values(node):
            used = waiting.pop()
            if used in self._chosen:
                waiting += [one for one in used.all_input_nodes if one not in read]
                read.update(used.all_input_nodes)
        return read

    def _is_linear(self, node: fx.Node) -> bool:
        """Whether a perturbation passes the node exactly: a sum of products in which one factor alone is perturbed."""
        cls = CALLS.get(node.target)
        linear = cls is not None and issubclass(cls, _MULTILINEAR)
        return linear and sum(self._states[used].moves for used in node.all_input_nodes) <= 1

    def _program(self, node: fx.Node, bits: Tensor) -> State:
        """Run the statements of a pointwise program, each with a rounding of its own."""
        call: Any = _read(node, self._states)
        program = from_text.program(call.program)
        steps = [bits]
        if len(program.statements) > 1:
            kernel = steps_kernel(program, loads_of(call.xs), call.results[0])
            steps = run_kernel(kernel, call.xs, Draw.of(call.rng, call.node).key())
        operands: Any = node.args[0]
        states: dict[Any, State] = {}
        for i, used in enumerate(operands):
            own = self._states[used]
            states[f"x{i}"] = own if own.bits.is_floating_point() else own.as_numbers()
        for statement, value in zip(program.statements, steps, strict=True):
            states[statement.target] = self._statement(node, statement, states, value)
        return states[program.results[0]]

    def _statement(self, node: fx.Node, statement: Statement, states: Mapping[Any, State], value: Tensor) -> State:
        names = [o for o in statement.operands if isinstance(o, str)]
        own = states[names[0] if names else "x0"].bits.dtype

        def function(get: Get, widened: Widened) -> Tensor:
            dtype = widened(own)
            return computed(statement, {name: get(name).to(dtype) for name in names}, torch.zeros((), dtype=dtype))

        def lost(exact: Tensor) -> list[Loss]:
            rounding = statement.rounding
            return [] if rounding is None else [rounding_loss(rounding, value, exact.broadcast_to(value.shape))]

        linear = passes_exactly(statement, sum(states[name].moves for name in names))
        return self._operation(node, function, states, names, value, lost, linear, statement.rounding)

    def _moved(self, node: fx.Node, function: Function, bits: Any) -> State:
        """Return the state of what moves values, or takes one of a tuple."""
        states, keys = self._states, node.all_input_nodes
        if node.target is getitem:
            of, place = states[keys[0]], node.args[1]
            return State(bits, of.derived[place], of.moved[place])
        with torch.enable_grad():
            derived = function(lambda key: states[key].derived, _wide_enough)
        return State(bits, pytree.tree_map(_kept, derived, bits), _passed(function, states, keys, bits))

    def _operation(
        self,
        node: fx.Node,
        function: Function,
        states: Mapping[Any, State],
        keys: Sequence[Any],
        bits: Any,
        lost: Callable[[Any], list[Loss]],
        linear: bool,
        rounding: Rounding | None = None,
        stored: Rounding | None = None,
    ) -> State:
        """Return the state of a computed value, and add what its roundings lost to the sites.

        rounding: of a statement. stored: the rounding without random bits of what a chain has drawn.
        """
        with torch.enable_grad():
            derived = function(lambda key: states[key].derived, _wide_enough)
        with differentiable(f"{located(node)}"):
            moved = _passed(function, states, keys, bits)
        missed: Tensor | None = None
        with torch.no_grad():
            exact = function(lambda key: states[key].shifted(0), _binary64)
            losses = [_finite(loss) for loss in lost(exact)]
            if not linear and any(states[key].moves for key in keys):
                plus = function(lambda key: states[key].shifted(1), _binary64)
                minus = function(lambda key: states[key].shifted(-1), _binary64)
                missed = _missed(exact, plus, minus, moved)
                moved = pytree.tree_map(_moved_or_decided, bits, moved, plus, minus)
            if self.noise is not None and (
                wandered := self._wandered(node, function, states, keys, exact, losses, rounding, stored)
            ):
                more, steps = self.wandering(*wandered)
                losses += more
                missed = steps if missed is None else missed if steps is None else missed + steps
        place = site(node)
        assert place is not None
        return self.enter(node.name, place, State(bits, derived, moved), losses, missed)

    def enter(self, name: str, place: Site, state: State, losses: Sequence[Loss], missed: Tensor | None) -> State:
        """Return the state of a computed value, and add what its roundings lost to the sites.

        state: the bits, the value of PyTorch for autograd, and the perturbation that its operands pass on.
        """
        kept = pytree.tree_leaves(state.bits)
        floats = [i for i, value in enumerate(kept) if is_float(value)]
        values, structure = pytree.tree_flatten(state.derived)
        replaced: Any = _Bits.apply
        pairs = zip(values, kept, strict=True)
        values = [replaced(value, _derivable(k), self.root) if is_float(k) else k for value, k in pairs]
        moved = _leaves(state.moved)
        # A stock kernel may have several results, with an error in each; every other operation has one.
        for position, i in enumerate(floats):
            own = [loss for loss in losses if loss.result == position]
            tried = kept[i] if self.formats else None
            kept_losses = [loss.kept() for loss in own]
            moved[i] = self._perturbed(moved[i], own, kept[i].dtype)
            doubt = _doubt(missed, moved[i])
            record = SiteLosses(f"{self.within}{name}", place, kept_losses, doubt, tried, self.formats)
            self.sites.append(record)
            values[i].register_hook(record.collect)
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

    def _wandered(
        self,
        node: fx.Node,
        function: Function,
        states: Mapping[Any, State],
        keys: Sequence[Any],
        exact: Any,
        losses: Sequence[Loss],
        rounding: Rounding | None,
        stored: Rounding | None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the mean error of a rounding in the run and in another sample, and what changes the rounded value.

        None if the rounding has no such error, or if nothing changes.
        """
        known = [loss.error for loss in losses if loss.error is not None]
        by = stored or (rounding if rounding is not None and is_biased(rounding) else None)
        errs = by is not None or (rounding is None and known and not any(loss.draws for loss in losses))
        if self.noise is None or not errs:
            return None
        value = above = _floats(exact)[0]
        near: dict[Any, Any] = {}
        if any(states[key].moves for key in keys):
            near = {key: states[key].nearby(self.noise) for key in keys}
            above = _floats(function(lambda key: pytree.tree_map(_widened, near[key]), _binary64))[0]
        if stored is not None:
            # The store rounds what the chain has drawn.
            above = sum((one for loss in losses if (one := loss.sample(self.noise)) is not None), start=above)
        if above is value:
            return None
        if by is not None:
            return moments(by, value)[0], moments(by, above)[0], above - value
        other = _floats(_called(node, near.__getitem__, None))[0].double() - above
        return known[0], other, above - value

    def _perturbed(self, moved: Tensor | None, losses: Sequence[Loss], dtype: torch.dtype) -> Tensor | None:
        """Return the perturbation of a result: that which passed, and the errors of its own roundings."""
        for loss in losses:
            own = loss.error if self.noise is None else loss.sample(self.noise)
            if own is not None:
                own = own.to(_wide_enough(dtype))
                moved = own if moved is None else moved + own
        return moved


def _missed(exact: Any, plus: Any, minus: Any, moved: Any) -> Tensor:
    """Return what the derivative misses for the perturbation of the operands or for its opposite, float64.

    Of both the larger one, because a kink is on one side only.
    """
    value, passed = _floats(exact)[0], next((m for m in _leaves(moved) if isinstance(m, Tensor)), None)
    first = torch.zeros_like(value) if passed is None else passed.double()
    up, down = _floats(plus)[0] - value - first, _floats(minus)[0] - value + first
    missed = torch.where(up.abs() < down.abs(), down, up)
    return torch.where(value.isfinite(), missed.nan_to_num(math.inf, math.inf, -math.inf), 0.0)


def _doubt(missed: Tensor | None, moved: Tensor | None) -> Tensor | None:
    """Return what derivatives miss, in few bits; None if it is nowhere more than a thousandth of the perturbation."""
    if missed is None or (moved is not None and bool((missed.abs() <= moved.abs() / 1000).all())):
        return None
    return missed.to(torch.bfloat16)


def _decided(bits: Any, plus: Any, minus: Any) -> Decisions | None:
    return None if _same(bits, plus) and _same(bits, minus) else Decisions(plus, minus)


def _moved_or_decided(bits: Any, moved: Any, plus: Any, minus: Any) -> Any:
    """Return the perturbation of a floating-point result, or the decisions that another one, an index, follows."""
    return moved if is_float(bits) else _decided(bits, plus, minus)


def _passed(function: Function, states: Mapping[Any, State], keys: Sequence[Any], bits: Any) -> Any:
    """Return the perturbation of a result to first order, without the errors of its own roundings."""
    leaves, structure = pytree.tree_flatten(bits)
    moving = [key for key in dict.fromkeys(keys) if any(isinstance(m, Tensor) for m in _leaves(states[key].moved))]
    if not moving:
        return pytree.tree_unflatten([None] * len(leaves), structure)
    flat = {key: pytree.tree_flatten(states[key].derived) for key in keys}
    places = [
        (key, i) for key in moving for i, moved in enumerate(_leaves(states[key].moved)) if isinstance(moved, Tensor)
    ]

    def of(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(places, inputs, strict=True))

        def get(key: Any) -> Any:
            values, form = flat[key]
            plain = [v.detach() if isinstance(v, Tensor) else v for v in values]
            return pytree.tree_unflatten([given.get((key, i), v) for i, v in enumerate(plain)], form)

        return tuple(_floats(function(get, _wide_enough)))

    primals = tuple(flat[key][0][i].detach() for key, i in places)
    tangents = tuple(_leaves(states[key].moved)[i].to(p.dtype) for (key, i), p in zip(places, primals, strict=True))
    # An infinite derivative passes nothing: without a perturbation nothing changes, else all of the change is missed.
    passed = (None if p is None else p.nan_to_num(0.0, 0.0, 0.0) for p in directional(of, primals, tangents))
    made = [next(passed) if is_float(leaf) else None for leaf in leaves]
    return pytree.tree_unflatten(made, structure)


@contextmanager
def differentiable(what: str) -> Iterator[None]:
    """Raise UnsupportedOperator for derivatives that PyTorch does not have; what: whose they are."""
    try:
        yield
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        raise UnsupportedOperator(
            f"{what}: the {error} in PyTorch, so that the effects of errors that pass it are unknown; write it with "
            "operations that have derivatives of second order, or measure with fxround.variability"
        ) from error


def directional(
    function: Callable[..., tuple[Tensor, ...]], primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Return the derivative of a function in a direction."""
    # A tangent cannot be written to elements that share memory.
    primals = tuple(p.contiguous() if 0 in p.stride() else p for p in primals)
    try:
        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(p, t) for p, t in zip(primals, tangents, strict=True)]
            return tuple(forward_ad.unpack_dual(result).tangent for result in function(*duals))
    except NotImplementedError:
        # The operator has no forward mode: the derivative of its backward pass gives the same.
        with torch.enable_grad():
            return tuple(torch.autograd.functional.jvp(function, primals, tangents, strict=False)[1])


def evaluated(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    exact: bool = False,
    tangents: Callable[[list[Any], list[int]], list[Any]] | None = None,
    watched: Collection[str] = (),
    rounded: Collection[str] = (),
) -> tuple[list[Any], dict[str, Any]]:
    """Return what a lowered graph returns, and the values of the nodes ``watched``.

    exact: whether every operation is computed in binary64, without a rounding, but those ``rounded``. tangents: the
    function from the results to the gradients of those at some positions, for a joint graph.
    """
    values: dict[fx.Node, Any] = {}
    nodes, seen, scales = _results_first(graph), dict[str, Any](), _scales(graph)
    given, last = iter(inputs), _last_uses(nodes)
    waiting = [node for node in graph.graph.find_nodes(op="placeholder") if _is_tangent(node)]
    with torch.no_grad():
        for node in nodes:
            if node.op == "output":
                return [values.get(used) for used in _listed(node.args[0])], seen
            if waiting and tangents is not None and any(_is_tangent(used) for used in node.all_input_nodes):
                made = tangents([values[used] for used in _results(graph)], [one.meta[PORT].index for one in waiting])
                values.update(zip(waiting, made, strict=True))
                waiting = []
            if node.op in ("placeholder", "get_attr"):
                entering = attrgetter(str(node.target))(graph) if node.op == "get_attr" else None
                if node.op == "placeholder" and not _is_tangent(node):
                    entering = next(given)
                values[node] = _widened(entering) if exact else entering
            elif not exact:
                values[node] = _called(node, values.__getitem__, None)
            elif node in scales or node.name in rounded:
                values[node] = _called(node, lambda used: pytree.tree_map(_stored, values[used]), None)
                values[node] = values[node] if node in scales else pytree.tree_map(_widened, values[node])
            else:
                values[node] = _called(node, values.__getitem__, _binary64)
            if node.name in watched:
                seen[node.name] = values[node]
            for spent in last.get(node, ()):
                del values[spent]
    return [], seen


def _stored(value: Any) -> Any:
    return value.float() if is_float(value) else value


def draws(graph: fx.GraphModule) -> bool:
    """Whether a rounding of a lowered graph draws random bits."""
    return any(_draws(call) for call in map(read, graph.graph.nodes) if call is not None)


def _draws(call: Any) -> bool:
    if isinstance(call, Pointwise):
        return from_text.drawn(call.program) > 0
    chain = getattr(call, "accumulate", None)
    stored = getattr(call, "rounding", None)
    drawn = chain is not None and from_text.accumulation(chain).random
    return drawn or (stored is not None and from_text.rounding(stored).mode.random_bits > 0)


def _read(node: fx.Node, states: Mapping[Any, State]) -> Any:
    """Return the call that a node of the dialect makes, with the tensors of the run."""
    args: Any = fx.map_arg(node.args, lambda used: states[used].bits)
    return CALLS[node.target].of(args)


def _multilinear(call: _Chain, given: Mapping[int, Tensor]) -> Tensor:
    """Return a sum of products in the dtype of derivatives, with some operands replaced."""
    kept = [given.get(i, x) for i, x in enumerate(call.operands)]
    with torch.no_grad():
        return exact_of(with_operands(call, [x.to(_wide_enough(x.dtype)) for x in kept]))


def _called(node: fx.Node, get: Get, widened: Widened | None) -> Any:
    """Return a node's result for operands; with ``widened``, the function that PyTorch computes, without roundings."""
    target: Any = node.target
    if widened is None:
        return target(*fx.map_arg(node.args, get), **fx.map_arg(node.kwargs, get))
    args, kwargs = (_with_dtypes(fx.map_arg(given, get), widened) for given in (node.args, node.kwargs))
    return exact_of(CALLS[target].of(args)) if target in CALLS else target(*args, **kwargs)


def _with_dtypes(arguments: Any, widened: Widened) -> Any:
    """Return arguments whose floating-point dtypes are those in which values are computed."""
    if isinstance(arguments, torch.dtype):
        return widened(arguments) if arguments.is_floating_point else arguments
    if isinstance(arguments, list | tuple):
        return type(arguments)(_with_dtypes(one, widened) for one in arguments)
    if isinstance(arguments, dict):
        return {name: _with_dtypes(one, widened) for name, one in arguments.items()}
    return arguments


def _wide_enough(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _binary64(dtype: torch.dtype) -> torch.dtype:
    return torch.float64


def is_float(value: Any) -> bool:
    """Whether a value is a floating-point tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _has_floats(value: Any) -> bool:
    return any(map(is_float, pytree.tree_leaves(value)))


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a tensor's, or a tuple's, image under a function."""
    return function(value) if isinstance(value, Tensor) else pytree.tree_map(function, value)


def _floats(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [leaf for leaf in pytree.tree_leaves(value) if is_float(leaf)]


def _derivable(value: Any) -> Any:
    """Return a floating-point tensor in the dtype of derivatives, anything else as it is."""
    if not is_float(value):
        return value
    return value.detach() if value.dtype == torch.float32 else value.detach().to(_wide_enough(value.dtype))


def _kept(derived: Any, bits: Any) -> Any:
    """Return what autograd knows of a value that was moved; indices are those of the run."""
    return derived if is_float(bits) else bits


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def _shifted(value: Any, moved: Any, sign: int) -> Any:
    if isinstance(moved, Decisions):
        return (value, moved.plus, moved.minus)[sign]
    if not is_float(value):
        return value
    wide = value.detach().double()
    return wide if moved is None or sign == 0 else wide + sign * moved.double()


def _widened(value: Any) -> Any:
    return value.double() if is_float(value) else value


def _on_grid(value: Any, shifted: Any, moved: Any, noise: torch.Generator | None) -> Any:
    """Return a shifted value as a tensor of its own dtype, rounded stochastically."""
    if moved is None or not is_float(value) or value.dtype == torch.float64:
        return shifted if isinstance(moved, Decisions) else value if moved is None else shifted.to(value.dtype)
    seed = int(torch.randint(1 << 62, (), generator=noise))
    return round_stochastically(shifted, f"{FORMAT_OF[value.dtype]}/stochastic", seed).to(value.dtype)


def _finite(loss: Loss) -> Loss:
    """Return a loss in which what is not finite is zero."""
    return replace(
        loss,
        error=None if loss.error is None else loss.error.nan_to_num(0.0, 0.0, 0.0),
        variance=None if loss.variance is None else loss.variance.nan_to_num(0.0, 0.0, 0.0),
    )


def _leaves(moved: Any) -> list[Any]:
    """Return the leaves of a perturbation, None among them."""
    if moved is None or isinstance(moved, Tensor | Decisions):
        return [moved]
    return pytree.tree_leaves(moved, is_leaf=lambda one: one is None or isinstance(one, Decisions))


def _listed(returned: Any) -> list[Any]:
    return list(returned) if isinstance(returned, list | tuple) else [returned]


def _chosen(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose values are chosen from those of their operands, or moved: nothing is rounded."""
    return {
        node
        for node in nodes
        if node.op == "call_function"
        and node.target not in CALLS
        and float_values(node)
        and (rule := rule_of(node)) is not None
        and rule.kind in ("exact", "movement")
    }


def _last_uses(
    nodes: Iterable[fx.Node], read: Callable[[fx.Node], Iterable[fx.Node]] = attrgetter("all_input_nodes")
) -> dict[fx.Node, list[fx.Node]]:
    """Return for each node the nodes that no later node reads."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for used in (node, *read(node)):
            last[used] = node
    spent: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last.items():
        spent.setdefault(node, []).append(used)
    return spent


def _results(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of a graph's results, without those of values that the model changes and of gradients."""
    output: Any = graph.graph.output_node()
    ports = zip(_listed(output.args[0]), output.meta[PORTS], strict=False)
    return [node for node, port in ports if port.kind == "result" and not port.mutation]


def _is_tangent(node: fx.Node) -> bool:
    port = node.meta.get(PORT)
    return port is not None and port.kind == "tangent"


def _results_first(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes in an order in which nothing that follows from gradients of results precedes a result."""
    late: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if any(_is_tangent(used) or used in late for used in node.all_input_nodes):
            late.add(node)
    return sorted(graph.graph.nodes, key=lambda node: node in late)


def _scales(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that yield scales of a format or counts: parameters of a rounding, without a derivative."""
    scales: set[fx.Node] = set()
    for node in graph.graph.nodes:
        cls = CALLS.get(node.target) if node.op == "call_function" else None
        numbers = [used for used in node.all_input_nodes if float_values(used)]
        if cls is not None and (not is_differentiated(cls) or (numbers and scales.issuperset(numbers))):
            scales.add(node)
    return scales


def _require_plain(graph: fx.GraphModule) -> None:
    """Raise UnsupportedOperator for a graph with loops or complex numbers."""
    for loop, _ in loops_of(graph):
        place = located(loop.node)
        raise UnsupportedOperator(
            f"{placed(place.operator, place.path, place.source, place.code)} chooses at run time what it computes: "
            "attribute a function of one branch or one iteration."
        )
    for node in graph.graph.nodes:
        if is_complex(node):
            raise UnsupportedOperator(
                f"{located(node)} yields complex numbers, whose roundings are not attributed; use real ones "
                "(torch.view_as_real)."
            )
