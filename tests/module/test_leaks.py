"""What ``leaks()`` returns: the table, the counts of real values, and the errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround import Leaks, Policy, Rule
from fxround.module import leaks as module_leaks
from fxround.numerics.formats import FORMATS
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_float
from fxround.passes.analyses.leaks import Edge, edges

NARROW = "e4m3fn/nearest_even/saturate"


class Net(nn.Module):
    """Two layers, a stock operator that no rule of the policy matches, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = torch.sin(y)
        return self.second(z) + x


def net() -> Net:
    torch.manual_seed(1)
    model = Net()
    with torch.no_grad():
        model.second.weight.copy_(torch.eye(4) / 2)  # these are values of e4m3fn
    return model


PRODUCTS = Policy("products", (Rule(operator="mm", rounding=NARROW), Rule(operator="add", rounding=NARROW)))


def test_the_table() -> None:
    x = torch.rand(3, 4)
    compiled = fxround.compile(net().eval(), PRODUCTS, example_inputs=x)
    found = compiled.leaks()
    assert isinstance(found, Leaks) and len(found) == 7
    assert [(leak.value, leak.consumer, leak.declared, leak.known) for leak in found.leaks] == [
        ("input 0", "mm", "e4m3fn", "binary32"),
        ("weight first.weight", "mm", "e4m3fn", "binary32"),
        ("weight first.bias", "add", "e4m3fn", "binary32"),
        ("aten.sin.default", "mm_1", "e4m3fn", "binary32"),
        ("weight second.weight", "mm_1", "e4m3fn", "binary32"),
        ("weight second.bias", "add_1", "e4m3fn", "binary32"),
        ("input 0", "add_2", "e4m3fn", "binary32"),
    ]
    stock, weight = found[3], found[4]
    assert (stock.source.partition(":")[0], stock.code) == ("test_leaks.py", "z = torch.sin(y)")
    assert stock.rule == f"Rule('', operator='aten.sin.default', rounding='{NARROW}')"
    assert (weight.module, weight.role, weight.rule) == (
        "second",
        "weight",
        f"Rule(role='weight', rounding='{NARROW}')",
    )
    assert found.rules == (
        Rule(role="input", rounding=NARROW),
        Rule(role="weight", rounding=NARROW),
        Rule("", operator="aten.sin.default", rounding=NARROW),
    )
    assert str(stock).startswith("aten.sin.default (sin) -> mm_1 in the root module at test_leaks.py:")
    assert not compiled.with_policy(PRODUCTS.with_rules(*found.rules)).leaks()
    assert [leak.value for leak in found.filter("second").leaks] == ["weight second.weight", "weight second.bias"]
    assert [leak.value for leak in found.sort("value").leaks][:2] == ["aten.sin.default", "input 0"]
    assert found.filter(operator="sin").leaks == (stock,)
    assert list(found.to_pandas()["consumer"]) == [leak.consumer for leak in found.leaks]
    assert found.to_dict()["proved"] == found.proved > 0
    assert "edges are proved, 7 are not." in str(found)


def test_coverage_does_not_see_a_weight() -> None:
    """The question that leaks answer and coverage cannot: no operation computes a weight."""
    policy = Policy("narrow", (Rule(rounding=NARROW, accumulate="bfloat16"),))
    compiled = fxround.compile(net().eval(), policy, example_inputs=torch.rand(3, 4))
    assert compiled.coverage().unrounded == ()
    assert {leak.role for leak in compiled.leaks().leaks} == {"input", "weight"}


def test_counts_are_those_of_the_values() -> None:
    x = torch.rand(3, 4)
    model = net().eval()
    compiled = fxround.compile(model, PRODUCTS)
    found = compiled.leaks(x)
    counted = {(leak.value, leak.consumer): leak for leak in found.leaks}
    rounding = Rounding.parse(NARROW)
    for value, tensor in (("weight first.weight", model.first.weight), ("input 0", x)):
        outside = [i for i, v in enumerate(tensor.flatten().tolist()) if round_float(v, rounding) != v]
        leak = next(leak for (name, _), leak in counted.items() if name == value)
        index = np.unravel_index(outside[0], tensor.shape)
        assert (leak.outside, leak.elements) == (len(outside), tensor.numel())
        assert leak.first == f"[{', '.join(map(str, index))}]"
        assert leak.number == tensor[tuple(index)].item()
    # A leak that is not proved need not lose a value in this call.
    harmless = counted["weight second.weight", "mm_1"]
    assert (harmless.outside, harmless.first, harmless.number) == (0, "", None)
    assert found.sort("outside", reverse=True)[0].outside == 16
    assert "outside" in str(found) and "outside" not in str(compiled.leaks())


def test_a_step_counts_gradients_too() -> None:
    x, tangent = torch.rand(3, 4), torch.rand(3, 4)
    compiled = fxround.compile(net(), Policy("results", (Rule(rounding=NARROW),)))
    found = compiled.leaks(x, tangents={0: tangent})
    gradients = [leak for leak in found.leaks if leak.value == "gradient of result 0"]
    assert gradients and {leak.direction for leak in gradients} == {"backward"}
    outside = sum(round_float(v, Rounding.parse(NARROW)) != v for v in tangent.flatten().tolist())
    assert {(leak.outside, leak.elements) for leak in gradients} == {(outside, 12)}
    assert {leak.rule for leak in gradients} == {f"Rule(role='error', rounding='{NARROW}')"}
    assert not compiled.with_policy(compiled.policy.with_rules(*found.rules)).leaks(x, tangents={0: tangent})


@pytest.mark.part("e4m3fn")
@pytest.mark.parametrize("text", ["e4m3fn", "ieee(4,5)/up_down"])
def test_no_value_is_outside_of_a_proved_format(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every proved edge is counted on the values of a training step."""
    counts = []
    kept = module_leaks._counts
    monkeypatch.setattr(module_leaks, "_counts", lambda *args: counts.append(kept(*args)) or counts[-1])
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    compiled = fxround.compile(layer, text)
    assert not compiled.leaks(torch.randn(2, 3, 8), tangents={0: torch.randn(2, 3, 8)})
    (counted,) = counts
    assert sum(count.elements for count in counted.values()) > 5000
    assert all(count.outside == 0 for count in counted.values())


def test_a_proof_that_is_wrong_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the analysis err, the values of a call say so."""
    compiled = fxround.compile(net().eval(), "e4m3fn", example_inputs=torch.rand(3, 4))
    claim = next(e for e in edges(compiled.lowered, compiled.policy) if e.proved and not e.accumulator)
    monkeypatch.setattr(module_leaks, "edges", lambda *args: [replace(claim, declared=FORMATS["e2m1fn"])])
    assert not compiled.leaks()
    (leak,) = compiled.leaks(torch.rand(3, 4)).leaks
    assert leak.outside and leak.declared == "e2m1fn"


def test_one_format_for_every_value() -> None:
    x = torch.rand(3, 4)
    compiled = fxround.compile(net().eval(), "bfloat16", example_inputs=x)
    assert not compiled.leaks()
    found = compiled.leaks(x, declared=torch.float8_e4m3fn)
    assert {leak.known for leak in found.leaks} == {"bfloat16"} and len(found) == 12
    assert all(leak.outside for leak in found.leaks if not leak.value.startswith("weight second"))
    narrow = compiled.with_policy(compiled.policy.with_rules(*found.rules))
    assert not narrow.leaks(x, declared="e4m3fn")


def test_wrong_arguments() -> None:
    compiled = fxround.compile(net().eval(), "bfloat16")
    with pytest.raises(ValueError, match="nothing is captured yet"):
        compiled.leaks()
    x = torch.rand(3, 4)
    with pytest.raises(ValueError, match="'mxfp8': a scaled format has no values of its own"):
        compiled.leaks(x, declared="mxfp8")
    with pytest.raises(ValueError, match="no format is named 'e4m3fm'; did you mean e4m3fn"):
        compiled.leaks(x, declared="e4m3fm")
    compiled(x)
    for call in (compiled.leaks, compiled.flips):
        with pytest.raises(TypeError, match=r"^inputs is an int; expected a tensor, a tuple of arguments"):
            call(3)
    with pytest.raises(ValueError, match="tangents are given without inputs"):
        compiled.leaks(tangents={0: x})


@pytest.mark.part(3)
@pytest.mark.parametrize("text", ["mxfp8", "nvfp4/stochastic", "uint8:channel", "fp8_delayed", "fixed(12,8)"])
def test_scaled_operands_of_a_call_are_counted(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the programs made is on the grid; declared in another format, it is not, and the row says so."""
    x, tangents = torch.randn(3, 4), {0: torch.randn(3, 4)}
    compiled = fxround.compile(net(), text)
    assert not compiled.leaks(x, tangents=tangents)
    other = ScaledRounding.parse("scaled(e2m1fn;fixed)")

    def declared_otherwise(*args: Any) -> list[Edge]:
        return [replace(e, declared=other) if isinstance(e.declared, ScaledRounding) else e for e in edges(*args)]

    monkeypatch.setattr(module_leaks, "edges", declared_otherwise)
    found = compiled.leaks(x, tangents=tangents)
    # Ten operands, of which both roundings of the second weight, halves and zeros, are numbers of e2m1fn.
    assert len(found) == 8 and all(leak.outside and leak.first and leak.elements for leak in found.leaks)


def test_a_value_that_was_not_rounded_is_counted_by_rounding_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 40)
    compiled = fxround.compile(nn.Linear(40, 4).eval(), "mxfp4")

    def planted(graph: Any, *args: Any) -> list[Edge]:
        x = next(node for node in graph.graph.nodes if node.op == "placeholder" and node.meta["val"].shape == (3, 40))
        edge = next(e for e in edges(graph, *args) if isinstance(e.declared, ScaledRounding))
        return [replace(edge, producer=x, proved=False)]

    monkeypatch.setattr(module_leaks, "edges", planted)
    (leak,) = compiled.leaks(x).leaks
    assert leak.outside == int((fxround.round(x, "mxfp4") != x).sum()) > 0
