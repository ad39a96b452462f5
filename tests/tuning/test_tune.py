"""Formats of layers: what a policy does to each, what it costs, and the search on models."""

from __future__ import annotations

import copy
import itertools
import json
import math
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import DigitsCNN
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround import Policy, PolicyError, Rule
from fxround.attribution.attribute import contributions
from fxround.attribution.linearized import Linearized
from fxround.attribution.subject import Subject
from fxround.graph.site import site
from fxround.module.rounded_module import RoundedModule
from fxround.passes.rewrite import ROUND
from fxround.tuning.costs import costs_of
from fxround.tuning.parts import Formats, parts_of

FORMATS = ("bfloat16", "e4m3fn", "int4:channel")


def mlp(*widths: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers[:-1]).eval()


def batches(width: int = 24, classes: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Two batches of different sizes, with targets."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(13, width, generator=generator)
    y = torch.randint(0, classes, (13,), generator=generator)
    return [(x[:8], y[:8]), (x[8:], y[8:])]


def hits(result: Tensor, target: Tensor) -> float:
    return float((result.argmax(1) == target).double().mean())


class Transformer(nn.Module):
    """Two encoder layers between an embedding and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)))


def transformer(tied: bool = False) -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Transformer(tied).eval()


def tokens() -> Tensor:
    return torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(1))


def identity(model: nn.Module, x: Tensor) -> tuple[RoundedModule, Any]:
    whole = fxround.compile(model, "identity")
    with torch.no_grad():
        return whole, whole.prepare(x)._entry((x,), {}).lowered


@pytest.mark.parametrize("name", ["bfloat16", "e4m3fn/stochastic/saturate", "mxfp8", "int8:channel", "reproducible"])
def test_one_format_for_all_has_the_bits_of_its_policy(name: str) -> None:
    model, x = DigitsCNN().eval(), torch.rand(3, 1, 10, 10)
    whole, graph = identity(model, x)
    parts = parts_of(model, graph, "layer")
    formats = Formats.of(["binary16", name], "layer")
    for base in (0, 1):
        policy = Formats(formats.policies, "layer", base).policy(parts, (1,) * len(parts))
        compiled, expected = whole.with_policy(policy).reseed(3), whole.with_policy(name).reseed(3)
        # With another base only the inputs are rounded otherwise; the first product reads them in its own format.
        assert torch.equal(compiled.evaluate(x), expected.evaluate(x)) or (base == 0 and "stochastic" in name)


def test_a_layer_has_its_format_whatever_the_others_have() -> None:
    """The result of layers in several formats is that of each layer, compiled alone in its format, one by one."""
    model, x = mlp(24, 16, 12, 5), batches()[0][0]
    whole, graph = identity(model, x)
    parts = parts_of(model, graph, "layer")
    assert [part.name for part in parts] == ["0", "1", "2", "3", "4"]
    formats = Formats.of(FORMATS, "layer")

    @cache
    def alone(layer: nn.Module, given: str) -> RoundedModule:
        # What is no product reads its operands as they are.
        own = Policy.parse(given).with_rules(Rule(role="input", rounding="identity", optional=True))
        return fxround.compile(layer, given if isinstance(layer, nn.Linear) else own)

    for one in itertools.product(range(3), repeat=3):
        assignment = (one[0], 0, one[1], 0, one[2])
        got = whole.with_policy(formats.policy(parts, assignment)).evaluate(x)
        # The base rounds the inputs of the model.
        value = fxround.round(x, "bfloat16")
        for layer, given in zip(model, assignment, strict=True):
            value = alone(layer, FORMATS[given]).evaluate(value)
        assert torch.equal(got, value), assignment


@pytest.mark.part(2)
@pytest.mark.parametrize("per", ["layer", "operator"])
@pytest.mark.parametrize("others", [("mxfp8", "bfloat16"), ("e4m3fn/stochastic", "reproducible"), ("int8", "identity")])
def test_rules_of_modules_around_do_not_reach_inside(per: Any, others: tuple[str, str]) -> None:
    """Each operation is asked of the policy of its own format, whatever the module around it has."""
    model, x = transformer(), tokens()
    _, graph = identity(model, x)
    parts = parts_of(model, graph, per)
    formats = Formats.of(others, per)
    owner = {key: i for i, part in enumerate(parts) for key in part.keys}
    compared = 0
    for turn in range(3):
        assignment = tuple((i * (turn + 1) // 2 + turn) % 2 for i in range(len(parts)))
        policy = formats.policy(parts, assignment)
        for node in graph.graph.nodes:
            place = site(node)
            if place is None or place.operator == ROUND or place.kind in ("movement", "integer", "loop"):
                continue
            key = (place.path, "", "") if per == "layer" else (place.path, place.operator, place.kind)
            if key not in owner:
                continue
            own = formats.policies[assignment[owner[key]]]
            asked: dict[str, Any] = {"path": place.path, "operator": place.operator, "kind": place.kind}
            result = asked | {"role": place.role, "direction": place.direction, "dtype": "binary32"}
            want, got = own.assign(**result), policy.assign(**result)
            if want is None or want.rounding is None:
                assert got is None or got.rounding is None
            else:
                assert got is not None
                assert (got.rounding, got.accumulate, got.order) == (want.rounding, want.accumulate, want.order)
            operand = asked | {"role": "activation", "direction": "forward", "dtype": "binary32"}
            if place.kind == "contraction" and any(rule.operands for rule in own.rules):
                scaled = policy.assign_operand(**operand)
                assert scaled is not None and own.assign_operand(**operand) is not None
                assert scaled.scaled == own.assign_operand(**operand).scaled  # type: ignore[union-attr]
            elif place.kind == "contraction" and want is not None and want.rounding is not None:
                read = policy.assign_operand(**operand)
                assert (None if read is None else read.rounding) == (
                    None if own.name == "reproducible" else want.rounding
                )
            else:
                assert policy.assign_operand(**operand) is None
            compared += 1
    assert compared > 100


@pytest.mark.parametrize(
    "widths, formats, cost",
    [
        ((24, 8, 5), FORMATS, "weights"),
        ((24, 8, 8, 5), ("bfloat16", "int4:channel"), "both"),
        pytest.param((24, 16, 12, 5), FORMATS, "weights", marks=pytest.mark.long),
        pytest.param((24, 16, 12, 5), FORMATS, "both", marks=pytest.mark.long),
        pytest.param((24, 8, 8, 8, 8, 8, 8, 8, 5), ("bfloat16", "int4:channel"), "weights", marks=pytest.mark.long),
        pytest.param((24, 16, 12, 8, 5), FORMATS, "weights", marks=pytest.mark.long),
    ],
)
def test_the_cheapest_is_that_of_an_enumeration(
    widths: tuple[int, ...], formats: tuple[str, ...], cost: Any, tmp_path: Path
) -> None:
    path = tmp_path / "search.json"
    model, data = mlp(*widths), batches()
    whole, graph = identity(model, data[0][0])
    parts = parts_of(model, graph, "layer")
    base = Formats.of(formats, "layer")
    sites = len(widths) - 1
    plain = [whole.evaluate(x) for x, _ in data]
    measured: dict[tuple[str, ...], tuple[float, float]] = {}
    for one in itertools.product(range(len(formats)), repeat=sites):
        assignment = tuple(given for pair in itertools.zip_longest(one, [0] * (sites - 1)) for given in pair)[:-1]
        compiled = whole.with_policy(base.policy(parts, assignment))
        results = [compiled.evaluate(x) for x, _ in data]
        noise = sum(float((r.double() - p.double()).square().sum()) for r, p in zip(results, plain, strict=True))
        with torch.no_grad():
            costs = costs_of(compiled._entry((data[0][0],), {}).lowered)
        assert costs.weight_bits is not None
        # An operand has the format of its product, with a scale of 32 bits for each row of an integer format.
        each = {"bfloat16": lambda width: 16 * width, "e4m3fn": lambda width: 8 * width}
        read = [
            each.get(formats[given], lambda width: 4 * width + 32)(a) for given, a in zip(one, widths, strict=False)
        ]
        bits = costs.weight_bits if cost == "weights" else (costs.weight_bits + sum(read) / sum(widths[:-1])) / 2
        assert costs.activation_bits is not None and costs.activation_bits <= sum(read) / sum(widths[:-1]) * (1 + 1e-12)
        measured[tuple(formats[given] for given in one)] = bits, noise
    signal_ = sum(float(p.double().square().sum()) for p in plain)

    def decibels(noise: float) -> float:
        return 10 * math.log10(signal_ / noise)

    for bound in (15, 20, 30):
        kept = {one: bits for one, (bits, noise) in measured.items() if decibels(noise) >= bound}
        asked: dict[str, Any] = {"cost": cost, "path": path, "proof": "all" if len(measured) > 30 else "monotone"}
        report = fxround.tune(model, data, "sqnr", f">= {bound}", formats, **asked)
        assert report.chosen is not None and report.chosen.trial.formats in kept and not report.reason
        bits, noise = measured[report.chosen.trial.formats]
        assert report.value == decibels(noise)
        # Sums of the same bits in another order.
        assert math.isclose(bits, min(kept.values()), rel_tol=1e-12), (bound, report, min(kept, key=kept.__getitem__))
        assert math.isclose(report.bits, bits, rel_tol=1e-12)
        assert report.minimal and report.proved == "all"
        for i, row in enumerate(report.parts):
            for step in row.cheaper:
                lowered = (*report.chosen.trial.formats[:i], step.format, *report.chosen.trial.formats[i + 1 :])
                assert measured[lowered][0] < bits and step.value == decibels(measured[lowered][1]) < bound
    for most in (2, 8.5):
        report = fxround.tune(model, data, "sqnr", formats=formats, bits=most, cost=cost, proof="all", path=path)
        within = [noise for bits, noise in measured.values() if bits <= most]
        if not within:
            assert "the cheapest assignment has more" in report.reason and report.bits > most
        else:
            assert report.value == decibels(min(within)) and report.proved == "all" and report.bits <= most


def values(report: fxround.TuningReport) -> Any:
    return report.chosen and (report.chosen.trial.formats, report.value, report.bits), report.minimal, report.proved


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the policy of each evaluation."""
    ran: list[str] = []
    evaluate: Callable[..., Any] = RoundedModule.evaluate

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(self.policy.name)
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(RoundedModule, "evaluate", noting)
    return ran


def test_a_file_has_what_need_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model, data = tmp_path / "search.json", mlp(24, 8, 5), batches()
    best = fxround.metric(hits, better="higher")
    first = fxround.tune(model, data, best, 0.1, FORMATS, path=path)
    ran = count_runs(monkeypatch)
    again = fxround.tune(model, data, best, 0.1, FORMATS, path=path)
    assert ran == ["identity"] * 2 and values(again) == values(first)
    assert (again.runs, again.recalled, again.passes) == (0, first.runs, 1)
    assert first.passes == 1 + first.runs and first.recalled == 0 and len(first.evaluated) == first.runs
    # Another budget uses what ran.
    other = fxround.tune(model, data, best, formats=FORMATS, bits=6, path=path)
    assert other.recalled > 0
    with pytest.raises(ValueError, match="another formats"):
        fxround.tune(model, data, best, 0.1, FORMATS[:2], path=path)
    with pytest.raises(ValueError, match="another data"):
        fxround.tune(model, data[:1], best, 0.1, FORMATS, path=path)
    with pytest.raises(ValueError, match="not known whether higher or lower values of hits are better"):
        fxround.tune(model, data, hits, 0.1, FORMATS)
    path.write_text("{}")
    with pytest.raises(ValueError, match="no file of a search"):
        fxround.tune(model, data, best, 0.1, FORMATS, path=path)


@cache
def uninterrupted() -> fxround.TuningReport:
    return fxround.tune(mlp(24, 8, 5), batches(), "sqnr", ">= 20", FORMATS)


@pytest.mark.parametrize("at", [1, 3, 4, 9])
def test_ctrl_c_keeps_what_is_complete(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model, data = tmp_path / "search.json", mlp(24, 8, 5), batches()
    whole = uninterrupted()
    ran, evaluate = count_runs(monkeypatch), RoundedModule.evaluate

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(ran) == at:
            signal.raise_signal(signal.SIGINT)
        return evaluate(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(RoundedModule, "evaluate", interrupted)
        report = fxround.tune(model, data, "sqnr", ">= 20", FORMATS, path=path)
    # Two batches without roundings, and two for each assignment.
    complete = max((at - 2) // 2, 0)
    assert report.interrupted and "INTERRUPTED" in str(report) and len(report.evaluated) == complete
    assert [one.trial.values for one in report.evaluated] == [one.trial.values for one in whole.evaluated][:complete]
    if not complete:
        with pytest.raises(ValueError, match="no assignment ran"):
            _ = report.value
    again = fxround.tune(model, data, "sqnr", ">= 20", FORMATS, path=path)
    assert values(again) == values(whole) and again.recalled == complete and not again.interrupted


def test_ctrl_c_ends_the_attribution_of_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    backward, calls = Linearized.backward, itertools.count(1)

    def interrupted(self: Any, *args: Any) -> Any:
        if next(calls) == 40:
            signal.raise_signal(signal.SIGINT)
        return backward(self, *args)

    monkeypatch.setattr(Linearized, "backward", interrupted)
    report = fxround.tune(mlp(24, 8, 5), batches(), "sqnr", ">= 20", FORMATS)
    assert next(calls) == 41 and report.interrupted and report.evaluated == ()
    assert "Ctrl-C ended the attribution: 8 of 32 backward passes are complete" in str(report)


def test_a_metric_that_raises_or_is_nan_keeps_no_budget(tmp_path: Path) -> None:
    path, model, data = tmp_path / "search.json", mlp(24, 8, 5), batches()
    finest = fxround.compile(model, "bfloat16").evaluate(data[1][0])
    exact = fxround.compile(model, "identity").evaluate(data[1][0])
    told: list[bool] = []

    def picky(result: Tensor, target: Tensor) -> float:
        if len(result) == 8 or any(torch.equal(result, one) for one in (exact, finest)):
            return 1.0
        told.append(len(told) % 2 == 0)
        if told[-1]:
            raise ArithmeticError("too narrow")
        return math.nan

    report = fxround.tune(model, data, fxround.metric(picky, better="higher"), 0.5, FORMATS, path=path)
    assert report.chosen is not None and set(report.chosen.trial.formats) == {"bfloat16"} and report.value == 1
    said = str(report)
    assert "failed: ArithmeticError: too narrow" in said and "picky is NaN for" in said and report.minimal
    held = json.loads(path.read_text())["trials"]
    assert held and not any(trial["error"] for trial in held) and any(None in trial["values"] for trial in held)
    json.loads(report.to_json())
    assert len(report.to_pandas()) == len(report.evaluated) > len(held)

    def broken(result: Tensor, target: Tensor) -> float:
        raise ArithmeticError("always")

    with pytest.raises(ArithmeticError, match="always"):
        fxround.tune(model, data, broken, 0.5, FORMATS)


def test_a_budget_that_no_assignment_meets_is_said(tmp_path: Path) -> None:
    model, data = mlp(24, 8, 5), batches()
    report = fxround.tune(model, data, "sqnr", ">= 90", FORMATS)
    assert "the finest assignment does not keep the budget, >= 90: sqnr is" in report.reason
    assert "NO ASSIGNMENT MEETS THE BUDGET" in str(report) and not report.minimal
    assert report.value == max(one.trial.value for one in report.evaluated) < 90
    assert report.save_policy(tmp_path / "best.toml").exists()
    report = fxround.tune(model, data, "sqnr", formats=FORMATS, bits=2.5)
    assert "more than 2.5 bits" in report.reason and report.bits > 2.5
    assert report.bits == min(one.bits for one in report.evaluated)


def test_the_model_and_generators_stay_as_they_were() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 5)).eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    once: Iterator[Any] = iter(batches())
    report = fxround.tune(model, once, "accuracy", 0.3, ("bfloat16", "e5m2/stochastic/saturate"), samples=2, runs=4)
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(p.grad is not None for p in model.parameters()) and all(p.requires_grad for p in model.parameters())
    assert all(
        len(one.trial.values) == 2 for one in report.evaluated if "e5m2/stochastic/saturate" in one.trial.formats
    )
    with pytest.raises(ValueError, match="no batch"):
        fxround.tune(model, once, "accuracy", 0.3, FORMATS)


def test_data_that_end_early_raise_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def ending() -> Iterator[Any]:
        yield batches()[0]
        raise OSError("the file ends")

    ran = count_runs(monkeypatch)
    with pytest.raises(OSError, match="the file ends"):
        fxround.tune(mlp(24, 5), ending(), "accuracy", 0.3, FORMATS)
    assert ran == []


def test_a_policy_file_has_the_bits_of_the_assignment(tmp_path: Path) -> None:
    model, data = mlp(24, 8, 5), batches()
    report = fxround.tune(model, data, "sqnr", ">= 25", FORMATS, runs=12)
    path = report.save_policy(tmp_path / "tuned.toml")
    assert Policy.parse(path) == report.policy
    results = [fxround.compile(model, str(path)).evaluate(x) for x, _ in data]
    plain = [fxround.compile(model, "identity").evaluate(x) for x, _ in data]
    noise = sum(float((r.double() - p.double()).square().sum()) for r, p in zip(results, plain, strict=True))
    assert report.value == 10 * math.log10(sum(float(p.double().square().sum()) for p in plain) / noise)
    with pytest.raises(ValueError, match=r"ends in \.toml"):
        report.save_policy(tmp_path / "tuned.json")


class Odd(nn.Module):
    """A weight that two layers read, one under a second name, and a layer that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(24, 24), nn.Linear(24, 24, bias=False), nn.Linear(24, 5)
        self.second.weight, self.unused = self.first.weight, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.third(x) + F.linear(x, self.third.weight)


def test_layers_with_one_weight_have_one_format_and_what_is_not_reached_is_named() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Odd().eval()
    report = fxround.tune(model, batches(), "sqnr", ">= 20", ("bfloat16", "int4:channel"), runs=8)
    # The root module reads the weight of the third layer, and so has its format.
    assert [row.part for row in report.parts] == ["first + second", "(root) + third"]
    assert report.unreached == ("unused.weight", "unused.bias") and "never reach unused.weight" in str(report)
    tied = transformer(tied=True)
    _, graph = identity(tied, tokens())
    parts = {part.name: part.weights for part in parts_of(tied, graph, "layer")}
    assert "embed.weight" in parts["head + embed"]
    attention = "encoder.layers.0.self_attn + encoder.layers.0.self_attn.out_proj"
    assert len(parts[attention]) == 4
    assert {name for names in parts.values() for name in names} >= {name for name, _ in tied.named_parameters()}


def test_formats_of_equal_cost_are_both_tried() -> None:
    model, data = mlp(24, 16, 5), batches()
    report = fxround.tune(model, data, "sqnr", ">= 40", ("bfloat16", "e4m3fn", "e5m2"))
    assert {row.format for row in report.parts} == {"bfloat16"}
    assert all([step.format for step in row.cheaper] == ["e4m3fn", "e5m2"] for row in report.parts)
    assert all(step.value < 40 for row in report.parts for step in row.cheaper)
    with pytest.raises(ValueError, match="every layer has the same mean bits"):
        fxround.tune(model, data, "sqnr", ">= 40", ("e4m3fn", "e5m2"))


@pytest.mark.parametrize("policy", ["bfloat16", "e4m3fn", "int8:channel"])
def test_contributions_of_all_operations_are_the_error(policy: str) -> None:
    """One group of all operations has the predicted error of ``attribute``, and groups of a draw its variances."""
    model, x = mlp(24, 16, 2), batches()[0][0][:4]
    report = fxround.attribute(model, x, policy)
    subject = Subject.of(model, (x,), Policy.parse(policy), None, None, 0, 0)
    # Eight elements, a direction for each. Both are sums of the same effects in binary64, in different orders.
    one = contributions(subject, None, lambda site: None)[None]
    assert math.isclose(one.noise, (report.deviation / report.magnitude) ** 2, rel_tol=1e-4) and one.noise > 0
    drawn = fxround.attribute(model, x, "e4m3fn/stochastic")
    subject = Subject.of(model, (x,), Policy.parse("e4m3fn/stochastic"), None, None, 0, 0)
    groups = contributions(subject, None, lambda site: site.node)
    for row in drawn.rows:
        assert math.isclose(groups[row.node].noise, (row.deviation / drawn.magnitude) ** 2, rel_tol=1e-4)


def test_what_attribution_refuses_is_measured() -> None:
    model, data = mlp(24, 16, 5), batches()
    report = fxround.tune(model, data, "sqnr", ">= 30", ("bfloat16", "posit(8,2)/stochastic"), samples=2)
    assert any("Not attributed: posit" in note for note in report.notes) and report.attributions == 1
    assert report.base == "bfloat16" and report.minimal
    alone = {one.trial.formats for one in report.evaluated}
    assert {("posit(8,2)/stochastic", "bfloat16"), ("bfloat16", "posit(8,2)/stochastic")} <= alone


def test_a_plot_shows_each_assignment(tmp_path: Path) -> None:
    report = fxround.tune(mlp(24, 16, 5), batches(), "sqnr", ">= 25", FORMATS, runs=6)
    axes = report.plot(tmp_path / "tuned.svg").axes[0]
    assert (tmp_path / "tuned.svg").stat().st_size > 1000
    over, within, front, chosen, _ = axes.lines
    assert len(over.get_xdata()) + len(within.get_xdata()) == len(report.evaluated)
    assert list(front.get_ydata()) == sorted(one.trial.value for one in report.pareto)
    assert (list(chosen.get_xdata()), list(chosen.get_ydata())) == ([report.bits], [report.value])


@pytest.mark.long
def test_a_transformer_takes_at_most_forty_passes() -> None:
    model, x = transformer(), tokens()
    report = fxround.tune(model, [(x,)], "sqnr", ">= 25", ("bfloat16", "mxfp8", "mxfp4"))
    assert report.minimal and report.passes + report.attributions <= 40


@pytest.mark.parametrize(
    "asked, error, says",
    [
        ({"data": []}, ValueError, "no batch"),
        ({"metric": ["accuracy", "sqnr"]}, ValueError, "metric has 2 metrics"),
        ({"metric": "dice_pairs"}, ValueError, "pairs of samples"),
        ({"metric": "sqnr", "budget": 3}, ValueError, "sqnr is inf without roundings; expected a bound"),
        ({"budget": "<= 0.5"}, ValueError, "expected '>= 0.5'"),
        ({"budget": None}, ValueError, "neither of budget= and bits="),
        ({"formats": ()}, ValueError, "formats has 0"),
        ({"formats": ["bfloat16"]}, ValueError, "formats has 1"),
        ({"formats": "bfloat16"}, TypeError, "expected several"),
        ({"formats": ["bfloat16", "bfloat16"]}, ValueError, "'bfloat16' twice"),
        ({"formats": ["bfloat16", "bfloat17"]}, PolicyError, "did you mean"),
        ({"formats": ["bfloat16", Policy("p", (Rule("0", rounding="e4m3fn"),))]}, PolicyError, "some modules only"),
        ({"formats": ["bfloat16", Policy("p", (Rule(operator="mm", rounding="e4m3fn"),))]}, PolicyError, "in general"),
        ({"formats": ["bfloat16", "fp8_delayed"]}, PolicyError, "earlier steps"),
        ({"formats": ["bfloat16", "repdl"]}, PolicyError, "other definitions"),
        ({"formats": ["bfloat16", "binary64"]}, PolicyError, "cannot represent"),
        (
            {"formats": ["bfloat16", Policy("p", (Rule(rounding="e4m3fn", faults="any:0.1"),))]},
            PolicyError,
            "bits by chance",
        ),
        ({"per": "module"}, ValueError, "'layer', 'operator'"),
        ({"cost": "weight"}, ValueError, "'weights', 'activations', 'both'"),
        ({"proof": "none"}, ValueError, "'monotone', 'all'"),
        ({"runs": 0}, ValueError, "runs is 0"),
        ({"samples": 0}, ValueError, "samples is 0"),
        ({"model": nn.Sequential(nn.Dropout(), nn.Linear(24, 5))}, ValueError, "draws random .*model.eval"),
        ({"model": torch.relu}, TypeError, "Module"),
        ({"model": nn.Tanh().eval()}, ValueError, "reads no weights"),
    ],
)
def test_wrong_arguments(asked: dict[str, Any], error: type[Exception], says: str) -> None:
    given = {"model": mlp(24, 5), "data": batches(), "metric": "accuracy", "budget": 0.1, "formats": FORMATS} | asked
    model, data = given.pop("model"), given.pop("data")
    with pytest.raises(error, match=says):
        fxround.tune(model, data, **given)
