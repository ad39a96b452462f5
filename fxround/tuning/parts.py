"""The parts of a model that get a format each, the policy that gives it to them, and what a format of a part costs.

A part is a layer, the path of a module with its own operations, or an operator in a module. A weight has one format:
parts that read the same weight, or the same memory under another name, are one part.

The policy of an assignment is that of the base format, and then rules for each part whose format differs from that of
the module around it. A path matches what is inside of a module too, so that the rules of a part begin with some that
undo those of the modules around it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, get_args

from torch import fx, nn

from fxround.attribution.sites import SiteLosses
from fxround.choices import Cost, Per
from fxround.errors import PolicyError, shown
from fxround.graph.site import Site, site
from fxround.graph.values import memory_of
from fxround.numerics.formats.scaled import is_scaled
from fxround.numerics.gradients import STRAIGHT
from fxround.numerics.orders import LANES
from fxround.passes.rewrite import ROUND
from fxround.policy import ENTERING, IDENTITY, Policy, Rule
from fxround.policy.rule import DTYPE, WIDE
from fxround.spelling import selects
from fxround.tuning.costs import Stores, stores_of
from fxround.tuning.weights import parameters_read, readers_of
from fxround.views.graph_views import located_nodes

# A path, and if parts are operators an operator and its kind; else two empty texts.
Key = tuple[str, str, str]
# A format for each part, by its position.
Assignment = tuple[int, ...]

# The kinds of nodes that are no operations of a part.
_OTHER: Final = ("movement", "integer", "placeholder", "coordinate", "loop")


def known_word(name: str, word: Any, words: Any) -> Any:
    """Return an argument that is one of some words. Raises ValueError that lists them."""
    if word not in get_args(words):
        raise ValueError(f"{name} is {shown(word)}; expected one of {', '.join(map(repr, get_args(words)))}")
    return word


@dataclass(frozen=True)
class Part:
    """A part of a model: its name in reports, where its operations are, and the weights that they read."""

    name: str
    keys: tuple[Key, ...]
    weights: tuple[str, ...]


def parts_of(model: nn.Module, graph: fx.GraphModule, per: Per) -> tuple[Part, ...]:
    """Return the parts of a model, in the order of its operations. graph: a lowered graph of it."""
    memory = {name: memory_of(p) for name, p in model.named_parameters(remove_duplicate=False)}
    groups: list[tuple[set[Key], set[int], list[str]]] = []

    def join(keys: set[Key], own: set[int], names: list[str]) -> None:
        for group in [g for g in groups if g[0] & keys or g[1] & own]:
            groups.remove(group)
            keys, own, names = group[0] | keys, group[1] | own, [*group[2], *names]
        groups.append((keys, own, names))

    order: dict[Key, int] = {}
    for _, _, place, _ in located_nodes(graph):
        if place.operator != ROUND and place.kind not in _OTHER:
            key = _key(place, per)
            order.setdefault(key, len(order))
            join({key}, set(), [])
    for node, port in parameters_read(graph):
        keys = {_key(place, per) for place in readers_of(node) if per == "layer" or place.kind not in _OTHER}
        owner = site(node)
        if per == "layer" and owner is not None:
            keys.add((owner.path, "", ""))
        for key in keys:
            order.setdefault(key, len(order))
        join(keys, {memory[port.name]}, [port.name])
    made = [(tuple(sorted(keys, key=order.__getitem__)), tuple(names)) for keys, _, names in groups if keys]
    made.sort(key=lambda part: order[part[0][0]])
    return tuple(Part(" + ".join(map(_name, keys)), keys, names) for keys, names in made)


def _key(place: Site, per: Per) -> Key:
    return (place.path, "", "") if per == "layer" else (place.path, place.operator, place.kind)


def _name(key: Key) -> str:
    path, operator, _ = key
    return f"{path or '(root)'} {operator}".strip()


def group_of(parts: Sequence[Part], graph: fx.GraphModule, per: Per) -> Any:
    """Return the function from a site of an attribution of this graph to the position of its part, None for no part."""
    nodes = {node.name: node for node in graph.graph.nodes}
    positions = {key: i for i, part in enumerate(parts) for key in part.keys}

    def position(losses: SiteLosses) -> Hashable:
        place = losses.place
        if per == "operator" and place.operator == ROUND:
            place = next(readers_of(nodes[losses.node]), place)
        key = _key(place, per)
        return positions.get(key, _around(key, positions))

    return position


def _around(key: Key, known: Mapping[Key, int]) -> int | None:
    """Return what is known of the nearest module around a key; the root module is around nothing."""
    path, operator, kind = key
    while "." in path:
        path = path.rpartition(".")[0]
        if (path, operator, kind) in known:
            return known[path, operator, kind]
    return None


@dataclass(frozen=True)
class Formats:
    """Formats that parts can get, as policies.

    base   the position of the format of everything that is in no part
    kept   parts that have this format in every assignment
    """

    policies: tuple[Policy, ...]
    per: Per
    base: int = 0
    kept: tuple[Part, ...] = ()

    @staticmethod
    def of(asked: Any, per: Per) -> Formats:
        """Return the formats. Raises TypeError, ValueError or PolicyError for what no part can get."""
        if isinstance(asked, str | Policy | Mapping) or not isinstance(asked, Sequence):
            raise TypeError(f"formats is {shown(asked)}; expected several, such as ['bfloat16', 'int8:channel']")
        policies = tuple(map(Policy.parse, asked))
        if len(policies) < 2:
            raise ValueError(f"formats has {len(policies)}; expected at least two, among which there is a choice")
        names = [policy.name for policy in policies]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"formats has {shown(twice)} twice; expected each format once")
        for policy in policies:
            _require_format(policy)
        other = next((p for p in policies if p.definitions != policies[0].definitions), None)
        if other is not None:
            raise PolicyError(
                f"formats {shown(names[0])} and {shown(other.name)} have other definitions of composite operators; "
                "expected formats with the same ones"
            )
        return Formats(policies, per)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the formats."""
        return tuple(policy.name for policy in self.policies)

    def uniform(self, parts: Sequence[Part], position: int) -> Policy:
        """Return the policy that gives one format to everything."""
        return replace(self, base=position).policy(parts, (position,) * len(parts))

    def policy(self, parts: Sequence[Part], assignment: Assignment, name: str = "tuned") -> Policy:
        """Return the policy of an assignment."""
        base = self.policies[self.base]
        chosen = {key: given for part, given in zip(parts, assignment, strict=True) for key in part.keys}
        chosen |= {key: self.base for part in self.kept for key in part.keys}
        rules = list(_whole(base))
        for key in sorted(chosen, key=lambda key: (key[0].count("."), key)):
            around = _around(key, chosen)
            if chosen[key] != (self.base if around is None else around):
                rules += self._undone(key)
                rules += self._rules(self.policies[chosen[key]], key)
        return replace(base, name=name, rules=tuple(rules))

    def _undone(self, key: Key) -> Iterator[Rule]:
        """Yield rules that undo what the rules of any format say of a part."""
        said = [rule for policy in self.policies for rule in policy.rules]
        own = Rule(_glob(key[0]), operator=key[1] or None, operands=IDENTITY, optional=True)
        nothing = replace(own, operands=None, rounding=IDENTITY)
        order = str(LANES) if any(rule.order is not None for rule in said) else None
        gradient = STRAIGHT if any(rule.gradient is not None for rule in said) else None
        yield replace(nothing, accumulate=WIDE, order=order, gradient=gradient)
        if self.per == "layer":
            roles = {rule.role for rule in said if rule.role in ENTERING and rule.rounding is not None}
            yield from (replace(nothing, role=role) for role in ENTERING if role in roles)
        yield own

    def _rules(self, policy: Policy, key: Key) -> Iterator[Rule]:
        """Yield the rules of a format for a part."""
        path, operator, kind = key
        for rule in _whole(policy):
            if operator and rule.role in ENTERING and rule.operands is None:
                continue
            if operator and not selects("*", rule.operator, path=path, name=operator, kind=kind):
                continue
            yield replace(rule, match=_glob(path), operator=operator or rule.operator, optional=True)


def _whole(policy: Policy) -> tuple[Rule, ...]:
    """Return the rules of a format. A product of an element format reads operands in this format."""
    said = [rule.rounding for rule in policy.rules if rule.rounding is not None and rule.role is None]
    text = said[-1] if said else IDENTITY
    if any(rule.operands is not None for rule in policy.rules) or is_scaled(text):
        return policy.rules
    if text.partition("/")[0] in (IDENTITY, DTYPE):
        return policy.rules
    return (*policy.rules, Rule(operator="contraction", operands=text, optional=True))


def _require_format(policy: Policy) -> None:
    """Raise PolicyError for a policy whose rules cannot be those of a part."""
    name = shown(policy.name)
    narrow = next((rule for rule in policy.rules if rule.match != "*"), None)
    if narrow is not None:
        raise PolicyError(
            f"formats: {name} has a rule for some modules only, {str(narrow)!r}; expected a format, or a policy whose "
            "rules have match='*'"
        )
    if any(rule.faults is not None for rule in policy.rules):
        raise PolicyError(f"formats: {name} flips bits by chance; expected a format without faults")
    if policy.delays_scales:
        raise PolicyError(
            f"formats: {name} has scales from earlier steps, or held ones, which one part cannot have without the "
            "others; expected a format that scales by the values themselves, such as 'fp8'"
        )
    everything = [rule for rule in policy.rules if rule.operator is None and rule.role is None and rule.rounding]
    if policy.rules and not everything:
        raise PolicyError(
            f"formats: {name} says nothing of results in general; expected a policy with a rule rounding=... for all "
            "operations, such as Rule(rounding='dtype')"
        )


def _glob(path: str) -> str:
    """Return the glob that matches a path alone, and what is inside of it."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path)


@dataclass(frozen=True)
class PartCosts:
    """Bits of each part in each format, in whole units of which ``unit`` is the mean bits that one is."""

    table: tuple[tuple[int, ...], ...]
    fixed: int
    unit: Fraction

    def of(self, assignment: Assignment) -> int:
        """Return the units of an assignment."""
        return self.fixed + sum(row[given] for row, given in zip(self.table, assignment, strict=True))

    def bits(self, assignment: Assignment) -> float:
        """Return the mean bits of an assignment."""
        return float(self.of(assignment) * self.unit)


def part_costs(parts: Sequence[Part], graphs: Sequence[fx.GraphModule], formats: Formats, cost: Cost) -> PartCosts:
    """Return the costs of parts. graphs: lowered, with all parts in the first format, in the second, ...

    Raises ValueError for a format whose codes have no size, and for a model without anything that has a cost.
    """
    stores = [stores_of(graph) for graph in graphs]
    rows = [_mean_bits(store, parts, formats, name, cost) for store, name in zip(stores, formats.names, strict=True)]
    base = rows[formats.base]
    values = [value for row in rows for value in row]
    parts_of_a_bit = math.lcm(*(value.denominator for value in values))
    unit = Fraction(math.gcd(*(int(value * parts_of_a_bit) for value in values)) or 1, parts_of_a_bit)
    table = tuple(tuple(int(row[i] / unit) for row in rows) for i in range(len(parts)))
    return PartCosts(table, int(base[len(parts)] / unit), unit)


def _mean_bits(store: Stores, parts: Sequence[Part], formats: Formats, name: str, cost: Cost) -> list[Fraction]:
    """Return what each part adds to the mean bits if all have one format, and last what belongs to no part."""
    whole = [Fraction(0)] * (len(parts) + 1)
    kinds = {"both": ("weights", "activations")}.get(cost, (cost,))
    owner = {weight: i for i, part in enumerate(parts) for weight in part.weights}
    positions = {key: i for i, part in enumerate(parts) for key in part.keys}
    for kind in kinds:
        counted: list[tuple[int, int, float | None]] = []
        if kind == "weights":
            counted = [(owner.get(w, len(parts)), n, bits) for w, (n, bits) in store.parameters.items()]
        else:
            for read in store.operands:
                key = (read.path, "", "") if formats.per == "layer" else (read.path, read.operator, "contraction")
                counted.append((positions.get(key, len(parts)), read.elements, read.bits))
        total = sum(count for _, count, _ in counted)
        if not total:
            raise ValueError(f"cost={cost!r}: the model reads no {kind} that have a cost; choose another cost")
        for i, count, bits in counted:
            if bits is None:
                raise ValueError(
                    f"formats: the codes of {shown(name)} are not defined, so that it has no number of bits; expected "
                    "formats with codes (fxround.describe says how many bits a format has)"
                )
            whole[i] += Fraction(round(bits * count), total * len(kinds))
    return whole
