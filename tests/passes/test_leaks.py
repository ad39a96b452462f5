"""No rounding can be lost without a leak: every one of a graph is taken away in turn, and the edge is named."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxround
from fxround.capture.recurrent import recurrent_layers
from fxround.graph.dialect import Call, Pointwise, ReductionCall, read
from fxround.graph.site import site
from fxround.graph.values import module_of
from fxround.numerics.formats import FORMATS, Format
from fxround.passes import Plan, lower
from fxround.passes.analyses.known import Known, known
from fxround.passes.analyses.leaks import Edge, edges, immediates
from fxround.policy import PRESETS, Policy, Rule

NARROW = "e4m3fn/nearest_even/saturate"


class CNN(nn.Module):
    """Convolution, normalization, pooling, dropout, a classifier, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.drop, self.fc = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return F.cross_entropy(self.fc(self.drop(x.flatten(1))), torch.arange(x.shape[0]) % 3)


class LSTM(nn.Module):
    """An embedding, an LSTM and a classifier of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(5, 3), nn.LSTM(3, 2, batch_first=True), nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, activation="gelu", dropout=0.25)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "cnn": lambda: (CNN(), (torch.randn(2, 1, 6, 6),)),
    "transformer": lambda: (transformer(), (torch.randn(2, 3, 8),)),
    "lstm": lambda: (LSTM(), (torch.randint(0, 5, (2, 2)),)),
}
POLICIES = (*PRESETS, "e4m3fn", "e5m2/stochastic/saturate", "mxfp8", "nvfp4", "int8:channel", "fixed(12,8)", "nf4")


def unrolled(loops: bool) -> AbstractContextManager[None]:
    return recurrent_layers(False)


@cache
def compiled(name: str, training: bool, definitions: str = "fxround") -> tuple[fxround.RoundedModule, tuple[Any, ...]]:
    torch.manual_seed(0)
    model, args = MODELS[name]()
    policy = Policy("none", definitions=definitions)
    # The LSTM is unrolled, as under policies whose values loops cannot have; tests/test_recurrent.py has it as a loop.
    with mock.patch("fxround.compiler.pipeline.recurrent_layers", unrolled):
        return fxround.compile(model.train(training), policy, example_inputs=args, strict=False), args


def lowered(name: str, training: bool, policy: Policy) -> fx.GraphModule:
    captured = compiled(name, training, policy.definitions)[0].captured
    return lower(captured.graph, Plan(policy, strict=False))


def open_edges(graph: fx.GraphModule, policy: Policy, declared: Format | None = None) -> list[Edge]:
    return [edge for edge in edges(graph, policy, declared) if not edge.proved]


def narrow(*more: Rule) -> Policy:
    """Every value in e4m3fn, those that enter included."""
    return Policy.parse(NARROW).with_rules(*more, name="narrow")


# A training step has the forward pass; that of inference differs where a model has a batch norm.
@pytest.mark.part(11)
@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("name, training", [("cnn", False), *((name, True) for name in MODELS)])
def test_presets_leak_nothing(name: str, training: bool, text: str) -> None:
    policy = Policy.parse(text)
    graph = lowered(name, training, policy)
    found = edges(graph, policy)
    assert [e for e in found if not e.proved] == []
    read_by_arithmetic = sum(site(n) is not None and site(n).status == "rounded" for n in graph.graph.nodes)  # type: ignore[union-attr]
    assert len(found) == 0 if text == "identity" else len(found) > read_by_arithmetic / 4


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    return module_of(graph, copy.deepcopy(graph.graph))


def taken_away(graph: fx.GraphModule, every: int = 1, named: str = "") -> Iterator[tuple[str, fx.GraphModule]]:
    """For each rounding of a graph, or for some of them, the graph without it: its name, and a copy."""
    for name in [n.name for n in graph.graph.nodes if read(n) is not None and named in n.name][::every]:
        other = copied(graph)
        node = next(n for n in other.graph.nodes if n.name == name)
        call = read(node)
        place = site(node)
        assert place is not None
        if place.operator == "fxround.round" and not name.endswith("_scale"):
            assert isinstance(call, Pointwise)
            node.replace_all_uses_with(call.xs[0])
        elif isinstance(call, Pointwise):
            node.args = replace(call, program=widened(call.program)).arguments()
        elif isinstance(call, Call) and "rounding" in {f.name for f in fields(call)}:
            node.args = replace(call, rounding="binary32/nearest_even/inf").arguments()
        else:
            continue
        yield name, other


def widened(program: str) -> str:
    head, at, _ = program.rpartition(" @ ")
    return f"{head}{at}binary32/nearest_even/inf"


@pytest.mark.part("lstm-bfloat16")
@pytest.mark.parametrize("name, text", [("cnn", NARROW), ("lstm", "bfloat16")])
def test_every_rounding_that_is_taken_away_is_a_leak(name: str, text: str) -> None:
    """Weights, arguments, results, accumulators that are stored as they are, in both directions."""
    other, args = compiled(name, True)
    policy = Policy.parse(text)
    module = other.with_policy(policy, strict=False)
    values = stepped(module, args)
    graph, silent, directions = module.lowered, [], set()
    for planted, without in taken_away(graph, 1 if name == "cnn" else 6):
        node = next(n for n in graph.graph.nodes if n.name == planted)
        place, call = site(node), read(node)
        assert place is not None
        inserted = place.operator == "fxround.round" and isinstance(call, Pointwise)
        producer = call.xs[0].name if inserted else planted  # type: ignore[union-attr]
        leaks = open_edges(without, policy)
        # What selects among values that are not in the format yields such values.
        assert all(e.producer.name == producer or site(e.producer).status == "exact" for e in leaks)  # type: ignore[union-attr]
        assert not leaks or producer in {e.producer.name for e in leaks}
        directions.add(place.direction)
        if leaks:
            continue
        silent.append(planted)
        # A mask is drawn by a rounding. Any other rounding that leaves no leak changes no value.
        assert place.kind == "random" or (inserted and torch.equal(values[planted], values[producer])), planted
    assert directions == {"forward", "backward"}
    assert len(silent) < sum(read(n) is not None for n in graph.graph.nodes) / (3 if name == "cnn" else 18)


def stepped(module: fxround.RoundedModule, args: tuple[Any, ...]) -> dict[str, Any]:
    """The values of a training step by the names of their nodes, those that enter included."""
    with torch.no_grad():
        result = module.evaluate(*args)
    tangents = {0: torch.randn_like(result)}
    entry = module._called()
    with torch.enable_grad():
        values = dict(module.observe_step(tangents, *args))
    entry = module._called()
    assert entry.step is not None
    names = [n.name for n in entry.lowered.graph.nodes if n.op == "placeholder"]
    return values | dict(zip(names, entry.entering(list(args), tangents), strict=False))


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "text",
    [
        *("mxfp8", "nvfp4", "fixed(12,8)", "fp8", "fp8_blocks", "fp8_delayed", "uint8:channel", "nvfp4:8,fit=6:4"),
        "int8:8,percentile=90",
    ],
)
def test_every_operand_that_is_not_rounded_is_a_leak(text: str) -> None:
    policy = Policy.parse(text)
    graph = lowered("cnn", True, policy)
    planted = list(taken_away(graph, named="_operand"))
    assert len(planted) == 10  # two operands of two products forward, and of four backward: the input needs none
    for name, other in planted:
        users = {user.name for node in graph.graph.nodes if node.name == name for user in node.users}
        assert users & {e.consumer.name for e in open_edges(other, policy)} or users <= moved(graph), name


def moved(graph: fx.GraphModule) -> set[str]:
    return {n.name for n in graph.graph.nodes if (place := site(n)) is not None and place.status == "movement"}


def test_operands_need_the_scales_of_their_own_values() -> None:
    policy = Policy.parse("mxfp8")
    graph = lowered("lstm", False, policy)
    scaled = [n for n in graph.graph.nodes if n.name.endswith("_operand") or "_operand_" in n.name]
    assert len(scaled) > 4 and open_edges(graph, policy) == []
    for position, wrong in ((0, scaled[1].args[0][1]), (1, "t0 = div(x0, x1) @ e5m2; t1 = mul(t0, x1) @ binary32")):
        other = copied(graph)
        node = next(n for n in other.graph.nodes if n.name == scaled[0].name)
        if position == 0:
            foreign = next(n for n in other.graph.nodes if n.name == wrong.name)
            node.update_arg(0, [node.args[0][0], foreign])
        else:
            node.update_arg(1, wrong)
        assert len(open_edges(other, policy)) == 1


def test_an_accumulator_that_is_wider_than_declared_is_a_leak() -> None:
    policy = Policy("short", (Rule(rounding="dtype", accumulate="bfloat16"),))
    graph = lowered("cnn", True, policy)
    assert open_edges(graph, policy) == []
    accumulating = [n for n in graph.graph.nodes if "accumulate" in {f.name for f in fields(read(n) or Known())}]
    assert len(accumulating) > 8
    for name in [n.name for n in accumulating]:
        other = copied(graph)
        node = next(n for n in other.graph.nodes if n.name == name)
        node.args = replace(read(node), accumulate="binary32/nearest_even/inf").arguments()  # type: ignore[type-var, union-attr]
        (leak,) = [e for e in open_edges(other, policy) if e.accumulator]
        assert (leak.producer.name, str(leak.declared), str(leak.known)) == (name, "bfloat16", "binary32")


# Policies with gaps, of which the rules that leaks name close every one.
GAPS = {
    "results": Policy("results", (Rule(rounding=NARROW),)),
    "forward": Policy("forward", (Rule(rounding=NARROW, direction="forward"),)),
    "products": Policy("products", (Rule(operator="contraction", rounding="bfloat16"),)),
    "no weights": Policy("no weights", (Rule(rounding="e5m2"), Rule(role="input", rounding="e5m2", optional=True))),
    "two formats": Policy("two", (Rule(rounding="bfloat16"), Rule(operator="contraction", rounding=NARROW))),
}


@pytest.mark.part(2)
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", MODELS)
def test_the_rules_close_the_leaks(name: str, gap: str) -> None:
    policy = GAPS[gap]
    found = open_edges(lowered(name, True, policy), policy)
    assert found and all(e.rule is not None for e in found)
    for _ in range(12):  # a rule declares a value of which nothing was said, and so what it is computed from
        rules = dict.fromkeys(e.rule for e in found if e.rule is not None)
        policy = policy.with_rules(*rules)
        found = open_edges(lowered(name, True, policy), policy)
        if not found:
            return
    raise AssertionError([(e.producer, e.consumer, e.rule) for e in found])


def test_one_format_for_everything() -> None:
    """What a designer of hardware asks: which tensors are not e4m3fn, whatever the policy says."""
    policy, wanted = Policy.parse("fp8"), FORMATS["e4m3fn"]
    found = open_edges(lowered("transformer", True, policy), policy, wanted)
    assert len(found) > 50
    for _ in range(4):
        policy = policy.with_rules(*dict.fromkeys(e.rule for e in found if e.rule is not None))
        found = open_edges(lowered("transformer", True, policy), policy, wanted)
    assert found == []


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.table = nn.Buffer(torch.tensor([0.5, 0.3]))

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def leaks_of(function: Callable[..., Any], policy: Policy, *args: Tensor) -> list[tuple[str, str, str]]:
    """(producer's operator or role, consumer's operator, what is known) of each leak."""
    found = fxround.compile(Function(function).eval(), policy, example_inputs=args, strict=False)
    listed = []
    for e in open_edges(found.lowered, policy):
        made, reader = site(e.producer), site(e.consumer)
        assert made is not None
        producer = made.operator if e.producer.op == "call_function" else made.role
        listed.append((producer, reader.operator if reader else e.consumer.op, str(e.known)))
    return listed


X = torch.rand(2, 2)
ENTERING = (Rule(role="input", rounding=NARROW, optional=True), Rule(role="buffer", rounding=NARROW, optional=True))
RESULTS = Policy("results", (Rule(rounding=NARROW), *ENTERING))
PRODUCTS = Policy("products", (Rule(operator="mm", rounding=NARROW), *ENTERING))


def test_movement_does_not_hide_where_a_value_comes_from() -> None:
    bare = Policy("bare", (Rule(rounding=NARROW),))
    assert leaks_of(lambda m, x: torch.cat([x, x + x]).t().relu() @ x[:, :1].repeat(2, 1), bare, X) == [
        ("input", "aten.add.Tensor", "binary32"),
        ("input", "aten.relu.default", "binary32"),
        ("input", "aten.mm.default", "binary32"),
    ]
    # Nothing computes with the concatenation: its values are to be alike.
    assert leaks_of(lambda m, x: torch.cat([x, x.exp()]), bare, X) == [
        ("input", "aten.exp.default", "binary32"),
        ("input", "output", "binary32"),
    ]
    assert leaks_of(lambda m, x: x.t(), Policy("free", (Rule(rounding=NARROW, optional=True),)), X) == []


def test_stock_operators_between() -> None:
    stock = leaks_of(lambda m, x: (x @ x).sin() @ x, PRODUCTS, X)
    assert stock == [("aten.sin.default", "aten.mm.default", "binary32")]
    assert leaks_of(lambda m, x: (x @ x).abs().max(0)[0][None] @ x, PRODUCTS, X) == []
    # An operator without a kernel is a stock kernel, of which the result is rounded.
    assert leaks_of(lambda m, x: torch.special.erfcx(x) @ x, RESULTS, X) == []


@pytest.mark.parametrize(
    "function, value",
    [
        (lambda m, x: x + torch.full((2,), 0.1), "0.1"),
        (lambda m, x: x + torch.full((2,), 0.125), None),
        (lambda m, x: x + torch.tensor([0.5, 0.25]), None),
        (lambda m, x: x + torch.tensor([0.5, 0.3]), "0.3 or 0.5"),
        # The formula of an arange converts integers, of which nothing is known here.
        (lambda m, x: x + torch.arange(8.0)[:2], "binary32"),
        (lambda m, x: x + torch.eye(2), None),
        (lambda m, x: x @ F.pad(x, (0, 1), value=0.3)[:, 1:], "0.3"),
        (lambda m, x: x @ F.pad(x, (0, 1), value=1.0)[:, 1:], None),
        (lambda m, x: x @ x.masked_fill(x > 0.5, -torch.inf), "-inf"),
        (lambda m, x: x @ x.masked_fill(x > 0.5, -448.0), None),
        (lambda m, x: x @ x.clamp(0.0, 0.3), "0 or 0.3"),
        (lambda m, x: x @ x.floor(), None),
        (lambda m, x: x @ x.sign(), None),
        (lambda m, x: x @ (x > 0.5).float(), None),
        (lambda m, x: x @ x.view(torch.int32).view(torch.float32), "binary32"),
    ],
)
def test_constants_and_selections_by_value(function: Callable[..., Any], value: str | None) -> None:
    rules = (Rule(operator="mm", rounding=NARROW, optional=True), Rule(operator="add", rounding=NARROW, optional=True))
    known_values = [text for _, _, text in leaks_of(function, Policy("some", (*rules, *ENTERING)), X)]
    assert known_values == ([] if value is None else [value])


def test_formats_without_infinities_hold_no_infinities() -> None:
    """e5m2 has infinities: its values lie in binary16, but not in e4m3 without them unless they saturate."""
    wide = Format.custom(precision=4, emin=-30, maximum=2.0**20, inf=False)
    e5m2 = Known(frozenset([FORMATS["e5m2"]]))
    assert FORMATS["e5m2"].within(wide) and not e5m2.within(wide)
    assert Known(frozenset([replace(FORMATS["e5m2"], inf=False)])).within(wide)
    policy = Policy("p", (Rule("0", rounding="e5m2/nearest_even/inf"), Rule("1", operands=str(wide) + "/nearest_even")))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).eval()
    graph = fxround.compile(model, policy, example_inputs=X).lowered
    mm = next(n for n in graph.graph.nodes if n.name.startswith("add"))
    assert {str(k) for k in known(graph)[mm].values()} == {"e5m2"}


def test_numbers_of_the_code_are_listed_apart() -> None:
    found = fxround.compile(Function(lambda m, x: x * 0.1 + 0.5).eval(), RESULTS, example_inputs=X)
    assert open_edges(found.lowered, RESULTS) == []
    (number,) = immediates(found.lowered)
    assert (number.node.name, str(number.declared)) == ("mul", "e4m3fn")
    assert number.number == float(torch.tensor(0.1))


def test_reductions_are_checked() -> None:
    assert any(issubclass(type(read(n)), ReductionCall) for n in lowered("cnn", True, narrow()).graph.nodes)
