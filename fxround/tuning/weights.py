"""The weights that a policy rounds, read from the rounded graph of a model: which ones, in which blocks, to which grid.

The graph is the definition. A rounding of a weight is a node whose operand is a parameter, or a view of one; its other
operands are the scales, and what computes them reads the same parameter alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from fxround.compiler.executable import Entry
from fxround.graph.dialect import CALLS, Pointwise, graphs_of
from fxround.graph.dtypes import FORMAT_OF
from fxround.graph.site import PORT, Port, Site, site
from fxround.graph.values import memory_of
from fxround.numerics.formats import Format
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.modes import Rounding
from fxround.passes.rewrite import ROUND, is_random_state, moved_by, source_of
from fxround.policy import Assignment, Policy
from fxround.tuning.grid import Grid, nearest_of, program_of

# What a product may be called in a rule; a weight that is in no graph is asked about under these names.
_PRODUCTS: Final = ("aten.mm.default", "aten.bmm.default", "aten.convolution.default")


@dataclass(frozen=True)
class Weight:
    """A parameter that a policy rounds.

    name      its name in the model
    path      the module that reads it
    value     the parameter as it was trained, of the model's dtype and shape
    grid      what its elements can become, in the same shape
    """

    name: str
    path: str
    value: Tensor
    grid: Grid


def weights_of(model: nn.Module, entry: Entry, leaves: list[Any], policy: Policy) -> dict[str, Weight]:
    """Return the weights that the policy rounds, by their names, in the order of the graph.

    entry, leaves: a call of the model under the policy, and its flat arguments.

    Raises ValueError for weights that are shared between modules or not reached by the call, for one of which several
    roundings or a part are read, for a rounding that is no grid of the weight (a Hadamard transform, a delayed scale,
    faults), for a loop that cannot be unrolled, for a grid without zero and a weight that has zeros, and if there is
    none.
    """
    if any(part is not entry.lowered for part in graphs_of(entry.lowered)):
        raise ValueError("the model has a loop or a branch in its graph, whose weights are not seen; expected none")
    values = _Values(entry, leaves)
    collected: dict[str, list[_Read]] = {}
    for node in entry.lowered.graph.nodes:
        read = _read(node)
        if read is not None:
            collected.setdefault(read.name, []).append(read)
    _refuse_unreached(model, entry, policy)
    _refuse_shared(model, entry, collected)
    if not collected:
        raise ValueError(
            f"policy {policy.name!r} rounds no weight of the model; expected a format such as 'int4:channel' or "
            "'nvfp4', or a rule with role='weight' and operands="
        )
    return {name: _weight(name, reads, values) for name, reads in collected.items()}


@dataclass(frozen=True)
class _Read:
    """A node that rounds a parameter: the name of the parameter, the node, its Site, and the rounding."""

    name: str
    node: fx.Node
    place: Site
    rounding: Rounding | ScaledRounding


def _read(node: fx.Node) -> _Read | None:
    """Return what a node rounds, if that is a parameter: the rounding itself, and not one of its scales."""
    place = site(node)
    if place is None or place.operator != ROUND or place.role != "weight" or place.assignment is None:
        return None
    assignment = place.assignment
    if assignment.faults is not None:
        raise ValueError(f"{place}: the policy flips bits of the weight ({assignment.faults}); use one without faults")
    rounding = _rounding_of(assignment)
    if node.target is not Pointwise.overload or node.args[1] != str(program_of(rounding, _stored(node))):
        return None
    if isinstance(rounding, ScaledRounding) and rounding.of_products:
        raise ValueError(
            f"{place}: {rounding} reads more than the weight (a transform of both operands, or earlier steps); choose "
            "a format without it"
        )
    source = source_of(node.args[0][0])  # type: ignore[index,arg-type]
    port: Port | None = source.meta.get(PORT)
    if port is None or port.kind != "parameter":
        raise ValueError(
            f"{place}: a weight is rounded as it enters (rounding=) and again as an operand (operands=); leave one of "
            "the rules out"
        )
    return _Read(port.name, node, place, rounding)


def _rounding_of(assignment: Assignment) -> Rounding | ScaledRounding:
    rounding = assignment.scaled or assignment.blocks or assignment.rounding
    assert rounding is not None
    return rounding


def _stored(node: fx.Node) -> Format:
    return Format.parse(FORMAT_OF[node.meta["val"].dtype])


def _weight(name: str, reads: list[_Read], values: _Values) -> Weight:
    """Return a weight, with the scales of all parts of it that are read."""
    node = reads[0].node
    value: Tensor = values.of(source_of(node.args[0][0]))  # type: ignore[index,arg-type]
    texts = list(dict.fromkeys(str(read.rounding) for read in reads))
    if len(texts) > 1:
        raise ValueError(f"the weight {name} is rounded in several ways, {' and '.join(texts)}; give it one format")
    rounding = nearest_of(reads[0].rounding)
    seen = torch.zeros(value.numel(), dtype=torch.bool, device=value.device)
    scales: list[Tensor] = []
    for part in reads:
        operands: Any = part.node.args[0]
        x, *read_too = operands
        index = moved_index(x, value).reshape(-1)
        own = [values.of(s).expand(x.meta["val"].shape).reshape(-1) for s in read_too]
        scales = scales or [torch.zeros(value.numel(), dtype=s.dtype, device=s.device) for s in own]
        again = index[seen[index]]
        for held, scale in zip(scales, own, strict=True):
            if not torch.equal(held[again], scale[seen[index]]):
                raise ValueError(
                    f"the weight {name} is read by several products, in blocks of their own; choose a format whose "
                    "blocks are the same for all of them, such as ':tensor'"
                )
            held[index] = scale
        seen[index] = True
    if not seen.all():
        raise ValueError(f"a part of the weight {name} alone is rounded; expected products that read all of it")
    grid = Grid(rounding, tuple(scale.reshape(value.shape) for scale in scales))
    weight = Weight(name, reads[0].place.path, value.detach().clone(), grid)
    _refuse(weight)
    return weight


def _refuse(weight: Weight) -> None:
    """Raise ValueError for a weight that is not finite, or has zeros that the grid lacks."""
    if not weight.value.isfinite().all():
        raise ValueError(f"the weight {weight.name} has NaNs or infinities: there is no nearest value; mend the model")
    zeros = weight.value == 0
    if (weight.grid.nearest(weight.value)[zeros] != 0).any():
        raise ValueError(
            f"the weight {weight.name} has {int(zeros.sum())} zeros, and {weight.grid.rounding} cannot hold zero; "
            "choose a format with a zero"
        )


def moved_index(node: fx.Node, value: Tensor) -> Tensor:
    """Return, for each element of a view of a parameter, its row-major position in the parameter."""
    before = moved_by(node)
    if before is None:
        return torch.arange(value.numel(), device=value.device).reshape(value.shape)
    index = moved_index(before, value)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: index if n is before else n)
    moved: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return moved


class _Values:
    """The values of nodes that depend on parameters alone."""

    def __init__(self, entry: Entry, leaves: list[Any]) -> None:
        self._known: dict[fx.Node, Any] = {}
        named = entry.named(leaves)
        for node in entry.lowered.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                is_state = is_random_state(node)
                self._known[node] = torch.zeros(2, dtype=torch.int64) if is_state else named.get(node.name)

    @torch.no_grad()
    def of(self, node: fx.Node) -> Any:
        """Return the value of a node."""
        if node not in self._known:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.of)
            self._known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._known[node]


def parameters_read(graph: fx.GraphModule) -> Iterator[tuple[fx.Node, Port]]:
    """Yield the parameters that enter a graph and are used."""
    for node in graph.graph.find_nodes(op="placeholder"):
        port: Port | None = node.meta.get(PORT)
        if port is not None and port.kind == "parameter" and node.users:
            yield node, port


def _refuse_shared(model: nn.Module, entry: Entry, collected: Mapping[str, list[_Read]]) -> None:
    """Raise ValueError for a rounded weight that several modules read, or whose memory two names share."""
    readers: dict[int, dict[str, str]] = {}
    memory = {name: memory_of(p) for name, p in model.named_parameters(remove_duplicate=False)}
    for node, port in parameters_read(entry.lowered):
        own = readers.setdefault(memory[port.name], {})
        own |= dict.fromkeys((place.path for place in readers_of(node)), port.name)
    for name in collected:
        own = readers[memory[name]]
        if len(own) > 1:
            reading = ", ".join(path or "the root module" for path in sorted(own))
            raise ValueError(
                f"the weight {name} is shared: {reading} read it, and what is best for one of them is not for the "
                "others. Keep it, by Rule(path, role='weight', operands='identity'), or give each its own weight"
            )


def readers_of(node: fx.Node) -> Iterator[Site]:
    """Yield the Sites of the operations that read a parameter, through views and its roundings."""
    for user in node.users:
        place = site(user)
        if moved_by(user) is node or (place is not None and place.operator == ROUND):
            yield from readers_of(user)
        # Largest magnitudes are read for the scales of the product that reads the elements.
        elif place is not None and not (user.target in CALLS and place.kind == "movement"):
            yield place


def _refuse_unreached(model: nn.Module, entry: Entry, policy: Policy) -> None:
    """Raise ValueError for a weight that the policy names and no operation of the call reads."""
    read = {port.name for _, port in parameters_read(entry.lowered)}
    memory = {memory_of(p) for name, p in model.named_parameters(remove_duplicate=False) if name in read}
    for name, parameter in model.named_parameters():
        if name in read or memory_of(parameter) in memory or parameter.dim() < 2:
            continue
        path = name.rpartition(".")[0]
        if any(_is_named(policy, path, operator) for operator in _PRODUCTS):
            raise ValueError(
                f"the data never reach the weight {name}: no operation of the call reads it. Pass data that do, or "
                f"keep it by Rule({path!r}, role='weight', operands='identity', optional=True)"
            )


def _is_named(policy: Policy, path: str, operator: str) -> bool:
    """Whether the policy rounds a weight of a module as an operand of this product."""
    asked = {"path": path, "operator": operator, "kind": "contraction", "role": "weight", "direction": "forward"}
    matching = policy.matching_operand(**asked, result="activation")
    return bool(matching) and policy.rules[matching[-1]].operands != "identity"
