"""Masks: one captured graph lowered twice, with a choice at run time of which version computes each site.

A site is a captured node that the two policies lower differently; loops are unrolled. ``run(on)`` computes the sites of
``on`` as the loud policy says and every other node as the quiet policy says, without compiling anything. With all sites
on, the result has the bits of ``fxround.compile(model, policy, unroll_loops=True)``; with none, those under the quiet
policy. This works because both lowerings keep the dtype and shape of every captured value, and because streams of
random bits are numbered before a policy is applied, so that a site draws the same bits whatever else is on.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

import networkx as nx
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxround.attribution.attribute import shares_of
from fxround.attribution.subject import Subject
from fxround.capture import Captured
from fxround.capture.result_sizes import with_sizes
from fxround.choices import QUIET
from fxround.errors import UnsupportedOperator
from fxround.fingerprint import hash
from fxround.graph.dialect import loops_of
from fxround.graph.site import PORT, Port, Site, located, operator_name, placed
from fxround.localization.bundles import Bundle, bundles
from fxround.locks import waited_for
from fxround.module import compile
from fxround.module.rounded_module import PolicyLike
from fxround.numerics.lazy import cached_property
from fxround.operators.rules import rule_of
from fxround.passes.delayed_scales import DELAYED
from fxround.policy import Assignment, Policy
from fxround.significance.inputs import ModelCall, calls
from fxround.significance.places import undrawn

MEMORY: Final = 2**30
_DRAWING: Final = waited_for()

Values = dict[str, Any]
Blocks = Mapping[str, Tensor]
Observer = Callable[[fx.Node, dict[fx.Node, Any], Any], None]


class Masked:
    """A model whose sites are switched between two policies at run time.

    Args:
        model, policy: as for ``fxround.compile``.
        inputs: the arguments of every run: a tensor, a tuple of arguments, a dict of keywords, a tuple and a dict, or a
            DataLoader, of which the first batch is used.
        quiet: the policy of the sites that are off.
        memory: the most bytes of intermediate values of the quiet run that are kept, so that a run computes only nodes
            that depend on its sites. Nothing is kept if the quiet version draws random bits.

    Raises what ``fxround.compile`` raises.
    """

    def __init__(
        self, model: nn.Module, policy: PolicyLike, inputs: Any, *, quiet: PolicyLike = QUIET, memory: int = MEMORY
    ) -> None:
        self.call: ModelCall = next(calls(model, inputs))
        args, kwargs = self.call.args, self.call.kwargs
        self.policy = Policy.parse(policy)
        self.quiet = replace(Policy.parse(quiet), definitions=self.policy.definitions)
        self._compiled = compile(model, self.policy, fuse=False, unroll_loops=True)
        with torch.no_grad():
            self._entry = entry = self._compiled._entry(args, kwargs)
            self.captured: Captured = entry.captured
            _refuse_loops(self.captured.graph)
            self._off = bundles(self._compiled.with_policy(self.quiet, strict=False).graph)
        self._on = bundles(self._compiled.graph)
        names = [n.name for n in entry.lowered.graph.find_nodes(op="placeholder") if DELAYED in n.meta]
        self._multipliers = dict(zip(names, entry.multipliers(), strict=True))
        self._given = _given(model, self.captured, pytree.tree_leaves((args, kwargs)))
        nodes = [node for node in self.nodes if self._on[node.name].text != self._off[node.name].text]
        self.sites: Final[Mapping[str, Site]] = {node.name: _place(node, self._on[node.name]) for node in nodes}
        self._last_uses = _last_uses(self.captured.graph)
        self._dropout = any(_is_random(node) for node in self.nodes)
        pure = not self._dropout and not any(bundle.random for bundle in self._off.values())
        self._memory, self._kept = (memory if pure else 0), Values()

    @property
    def given(self) -> tuple[nn.Module, Policy, Policy, tuple[Any, ...], dict[str, Any]]:
        """The model, both policies and the arguments of every run, of which ``Masked`` makes the same again."""
        return self._compiled.source, self.policy, self.quiet, self.call.args, self.call.kwargs

    @cached_property
    def nodes(self) -> list[fx.Node]:
        """The nodes of the captured graph, in order, without the output."""
        return list(self.captured.graph.graph.nodes)[:-1]

    def place(self, name: str) -> Site | None:
        """Return the Site of a captured node in the loud policy's lowering; None if it yields no floating point."""
        return self._on[name].site

    def quiet_assignment(self, name: str) -> Assignment | None:
        """Return the quiet policy's assignment of a captured node, if there is one."""
        place = self._off[name].site
        return place.assignment if place is not None else None

    @property
    def output(self) -> fx.Node:
        """The output node of the captured graph."""
        node: fx.Node = self.captured.graph.graph.output_node()
        return node

    @property
    def random(self) -> bool:
        """Whether two samples may differ: a rounding of either version draws random bits."""
        return any(bundle.random for bundle in (*self._on.values(), *self._off.values()))

    def shares(self, seed: int) -> dict[str, float]:
        """Return the part of every site in the error of the result, all sites on; a site without a figure has none.

        Raises UnsupportedOperator or UnsupportedRounding for a model that cannot be attributed.
        """
        leaves = pytree.tree_leaves((self.call.args, self.call.kwargs))
        compiled = self._compiled.reseed(seed)
        shares = shares_of(Subject(compiled.source, compiled, self._entry, leaves, None, None, seed, 0))
        return {name: share for name, share in shares.items() if name in self.sites and not math.isnan(share)}

    @property
    def undrawn(self) -> tuple[str, ...]:
        """The operations whose roundings the loud policy draws and that are the same in every sample."""
        return undrawn(self._compiled.graph)

    @property
    def unsettled(self) -> str:
        """Why the model's own calls may differ, in words; "" for a model in eval mode that draws nothing."""
        drawing = [node.name for node in self.nodes if _is_random(node)]
        if drawing:
            return f"the model draws random bits of its own ({', '.join(drawing[:3])})"
        return "the model is in training mode" if any(m.training for m in self._compiled.source.modules()) else ""

    def run(
        self,
        on: Collection[str] = (),
        *,
        seed: int = 0,
        sample: int = 0,
        blocks: Blocks | None = None,
        observe: Observer | None = None,
    ) -> Any:
        """Return the model's result with the sites ``on`` loud and the others quiet; buffers are not written.

        blocks: for a site that is on, a bool tensor with as many elements as its result; where it is False the quiet
        version's value is used, computed from the same operands. observe: called with every captured node, in order,
        the values of its operands, and its own value; the operand of what enters is that, before any rounding. Raises
        ValueError for a name that is no site.
        """
        self._require_sites({*on, *(blocks or {})})
        rng = self._compiled.reseed(seed, sample).rng
        kept = self._kept if observe is None else {}
        reached = self._reached(on) if kept else {node.name for node in self.nodes}
        room = self._memory if not on and not kept else 0
        values: Values = {}
        known = ChainMap(values, kept, self._multipliers)
        with torch.no_grad(), self._seeded(seed):
            for node in self.nodes:
                if node.name in reached:
                    values[node.name] = value = self._value(node, node.name in on, blocks or {}, known, rng)
                    room -= _bytes(value)
                    if observe is not None:
                        observe(node, self._operands(node, known), value)
                if room < 0:
                    _forget(values, self._last_uses[node.name])
        if room > 0:
            self._kept = values
        return self._result(known)

    def _operands(self, node: fx.Node, known: Mapping[str, Any]) -> dict[fx.Node, Any]:
        if node.op == "placeholder":
            return {node: self._given[node.name]} if node.name in self._given else {}
        return {used: known[used.name] for used in node.all_input_nodes}

    @cached_property
    def shapes(self) -> Mapping[str, torch.Size]:
        """The shape of every site's result, from one quiet run."""
        sizes: dict[str, torch.Size] = {}

        def note(node: fx.Node, operands: Any, value: Any) -> None:
            if node.name in self.sites:
                sizes[node.name] = value.shape

        self.run(observe=note)
        return sizes

    def flow(self) -> nx.DiGraph:
        """Return the data flow of the captured graph over names of nodes, the output included."""
        flow = nx.DiGraph()
        for node in self.captured.graph.graph.nodes:
            flow.add_node(node.name)
            flow.add_edges_from((used.name, node.name) for used in node.all_input_nodes)
        return flow

    def digest(self) -> str:
        """Return a digest of both versions, the state and the inputs: what a run depends on, given sites and seed."""
        versions = [f"{name}: {bundle.text}" for side in (self._on, self._off) for name, bundle in side.items()]
        given = [hash(v) if isinstance(v, Tensor) else repr(v) for v in self._given.values()]
        return hashlib.sha256("\n".join([torch.__version__, *versions, *given]).encode()).hexdigest()

    def _require_sites(self, names: Collection[str]) -> None:
        unknown = sorted(name for name in names if name not in self.sites)
        if unknown:
            known = ", ".join(list(self.sites)[:20])
            raise ValueError(
                f"{unknown[0]!r} is not a site of this model and these policies; expected some of: {known}"
            )

    def _reached(self, on: Collection[str]) -> set[str]:
        """Return the nodes whose values depend on the sites ``on``."""
        reached = set(on)
        for node in self.nodes:
            if any(used.name in reached for used in node.all_input_nodes):
                reached.add(node.name)
        return reached

    def _value(self, node: fx.Node, on: bool, blocks: Blocks, known: Mapping[str, Any], rng: Tensor) -> Any:
        def computed(bundle: Bundle) -> Any:
            return bundle.run(known.__getitem__, lambda given: self._given[given.name], rng)

        if not on or node.name not in blocks:
            return computed((self._on if on else self._off)[node.name])
        loud, quiet = computed(self._on[node.name]), computed(self._off[node.name])
        return torch.where(blocks[node.name].reshape(loud.shape), loud, quiet)

    def _result(self, known: Mapping[str, Any]) -> Any:
        returned = fx.map_arg(self.output.args[0], lambda used: known[used.name])
        results = [v for port, v in zip(self.captured.outputs, returned, strict=True) if not port.mutation]  # type: ignore[arg-type]
        return with_sizes(pytree.tree_unflatten(results, self.captured.out_spec), self.captured.out_spec)

    @contextlib.contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """Seed PyTorch's own generator, which dropout uses and all threads share, for one run at a time."""
        if not self._dropout:
            yield
            return
        with _DRAWING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield


def _refuse_loops(graph: fx.GraphModule) -> None:
    """Raise UnsupportedOperator for a loop that is not unrolled: its operations cannot be switched one by one."""
    for loop, _ in loops_of(graph):
        place = located(loop.node)
        raise UnsupportedOperator(
            f"{placed(place.operator, place.path, place.source, place.code)} chooses at run time what it computes, "
            "so that its operations cannot be switched one by one: localize a function of one branch or one iteration."
        )


def _given(model: nn.Module, captured: Captured, leaves: list[Any]) -> Values:
    """Return the value of every placeholder by name."""
    ports: list[Port] = list(captured.inputs)
    names = [node.name for node in captured.graph.graph.nodes if node.op == "placeholder"]
    values = [leaves[port.index] if port.kind == "argument" else attrgetter(port.name)(model) for port in ports]
    return dict(zip(names, values, strict=True))


def _place(node: fx.Node, bundle: Bundle) -> Site:
    """Return the Site of a captured node; the code of a parameter is its name."""
    place = bundle.site or located(node)
    port: Port | None = node.meta.get(PORT)
    return replace(
        place, operator=operator_name(node), code=port.name or f"argument {port.index}" if port else place.code
    )


def _last_uses(graph: fx.GraphModule) -> dict[str, list[str]]:
    """Return for every node the names of the values whose last use it is."""
    last: dict[str, str] = {}
    for node in graph.graph.nodes:
        last[node.name] = node.name
        last |= {used.name: node.name for used in node.all_input_nodes}
    dead: dict[str, list[str]] = {node.name: [] for node in graph.graph.nodes}
    for name, user in last.items():
        dead[user].append(name)
    return dead


def _forget(values: Values, names: Collection[str]) -> None:
    for name in names:
        values.pop(name, None)


def _bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _is_random(node: fx.Node) -> bool:
    rule = rule_of(node) if node.op == "call_function" else None
    return rule is not None and rule.kind == "random"
