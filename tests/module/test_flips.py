"""Faults in a model: which values they hit, the bits by the specification, the counts, and what stays as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models import unfused
from torch import Tensor, nn

import fxround
from fxround import Policy, PolicyError, Rule, ScaledFormat
from fxround.graph.dialect import Pointwise, read
from fxround.kernels.program import Program
from fxround.numerics.arithmetic.randomness import random_function
from fxround.numerics.faults import numbers_of
from fxround.numerics.formats.encodings import Encoding
from fxround.numerics.specification.exact_faults import flip
from fxround.passes.inject_faults import before_flips
from fxround.passes.rewrite import source_of

NARROW = "e4m3fn/nearest_even/saturate"
FAULTY = Policy(
    "faulty",
    (
        Rule(rounding="dtype"),
        Rule("0", operator="contraction", rounding="bfloat16", faults="significand:1e-2 sign:2e-3"),
        Rule("2", operator="contraction", rounding=NARROW, faults="any:0.02"),
        Rule(role="weight", faults="exponent:5e-3"),
        Rule(operator="mm", direction="backward", faults="any:0.01"),
    ),
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 8))


X, TANGENT = torch.rand(16, 32), torch.rand(16, 8)


def values_of(compiled: fxround.RoundedModule) -> dict[str, Any]:
    """The values of a training step by their nodes, weights and arguments included."""
    with torch.enable_grad():
        values = dict(compiled.observe_step({0: TANGENT}, X))
    entry = compiled._called()
    return values | entry.named([X], {0: TANGENT})


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


SCALED = Policy("scaled", (Rule(operator="mm", operands="nvfp4/stochastic", faults="significand:0.05 sign:0.02"),))


# Two fields of the first product, one of the second, weights, three gradients; two of both operands of five products.
@pytest.mark.parametrize("policy, count", [(FAULTY, 2 + 1 + 4 + 3), (SCALED, 2 * 2 * 5)])
def test_every_element_is_flipped_as_the_specification_says(policy: Policy, count: int) -> None:
    """By the random word of (seed, sample, node, element), in the encoding of the declared format."""
    compiled = fxround.compile(net(), policy, seed=7).reseed(7, 3)
    values, checked = values_of(compiled), 0
    for node in compiled.lowered.graph.nodes:
        call = read(node)
        if not isinstance(call, Pointwise) or "flip_" not in call.program:
            continue
        (statement,) = Program.parse(call.program).statements
        numbers = numbers_of(statement.operator)
        assert numbers is not None and statement.rounding is not None
        before, after = (values[n].detach().double().flatten().numpy() for n in (call.xs[0].name, node.name))
        key = (np.full(before.size, n, np.uint32) for n in (7, 0, 3, call.node))
        (words,) = random_function().evaluate(np.arange(before.size, dtype=np.uint64), *key)
        expected = [
            flip(float(v), statement.rounding.format, numbers, int(r)) for v, r in zip(before, words, strict=True)
        ]
        assert np.array_equal(np.array(expected), after, equal_nan=True)
        assert np.array_equal(np.signbit(expected), np.signbit(after))
        checked += 1
    assert checked == count


def test_a_flipped_value_is_one_value_for_all_who_read_it() -> None:
    """The gradient of x is a product with the flipped weight, and the fused graph has the same bits."""
    torch.manual_seed(1)
    layer, x, g = nn.Linear(6, 5, bias=False), torch.rand(4, 6, requires_grad=True), torch.eye(4, 5)
    policy = Policy("p", (Rule(role="weight", rounding="dtype", faults="significand:0.3"),))
    compiled = fxround.compile(layer, policy, seed=2)
    compiled(x).backward(g)
    values = dict(compiled.reseed(2).observe_step({0: g}, x))
    weight = values["weight_flipped"]
    assert not torch.equal(weight, layer.weight)
    assert x.grad is not None and torch.equal(x.grad, weight[:4])
    compiled = fxround.compile(net().eval(), FAULTY, seed=3, example_inputs=X)
    assert torch.equal(compiled.evaluate(X), unfused(compiled).evaluate(X))


def test_operands() -> None:
    """The forward and the backward product read the same flipped operands; the layer's input itself stays."""
    rule = Rule(operator="mm", direction="forward", operands=NARROW, faults="significand:0.1")
    policy = Policy("p", (rule,))
    torch.manual_seed(1)
    layer, x, g = nn.Linear(16, 12, bias=False), torch.rand(24, 16, requires_grad=True), torch.eye(24, 12)
    compiled = fxround.compile(layer, policy, seed=2)
    assert Policy.from_toml(policy.to_toml()) == policy and policy.draws
    compiled(x).backward(g)
    found = compiled.reseed(2).flips(x.detach())
    assert [(row.value, row.elements) for row in found.flips] == [("input 0", 24 * 16), ("weight weight", 16 * 12)]
    assert all(abs(row.flipped - row.expected) < 6 * math.sqrt(row.expected) for row in found.flips)
    values = dict(compiled.reseed(2).observe_step({0: g}, x))
    weights = [v for n, v in values.items() if "_operand_flipped" in n and v.shape == layer.weight.shape]
    assert weights and all(torch.equal(w, weights[0]) for w in weights)
    rounded = fxround.round(layer.weight.detach(), NARROW)
    assert sum(row.flipped for row in found.filter().flips[1:]) == int((weights[0] != rounded).sum()) > 0
    assert x.grad is not None and torch.equal(x.grad[:12], weights[0]) and not x.grad[12:].any()
    assert not compiled.leaks(x.detach(), tangents={0: g})


def exact_flips(node: Any, compiled: fxround.RoundedModule, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What a node read and returned, after a comparison of each element with the specification."""
    call = read(node)
    assert isinstance(call, Pointwise)
    (statement,) = Program.parse(call.program).statements
    numbers = numbers_of(statement.operator)
    assert numbers is not None and statement.rounding is not None
    bounds = [float(b) for b in statement.operands[1:]]
    encoding = Encoding(statement.rounding.format, (bounds[0], bounds[1]) if bounds else None)
    before, after = (values[n].detach().double().flatten() for n in (call.xs[0].name, node.name))
    key = (np.full(before.numel(), n, np.uint32) for n in (*compiled.rng.tolist()[:1], 0, 0, call.node))
    (words,) = random_function().evaluate(np.arange(before.numel(), dtype=np.uint64), *key)
    expected = [flip(v, encoding, numbers, int(r)) for v, r in zip(before.tolist(), words, strict=True)]
    assert np.array_equal(np.array(expected), after.numpy(), equal_nan=True)
    assert np.array_equal(np.signbit(expected), np.signbit(after.numpy())) or encoding.format.posit
    return before, after


WHERE = ("operands", "rounding", "operands")
FORMATS_WITH_FAULTS = [
    ("fixed(8,4)", "any:0.05", ""),
    ("ufixed(12,9)/stochastic/wrap", "significand:0.05", ""),
    ("uint8:scale=0.05,zero=100", "any:0.05", ""),
    ("int8:scale=0.05", "sign:0.05", ""),
    ("nf4", "any:0.05", ""),
    ("posit16", "any:0.05", ""),
    ("uint4:channel/stochastic", "significand:0.05", "scale.significand:0.1"),
    ("scaled(nf4;16,binary32,nearest)", "any:0.05", "scale.exponent:0.1"),
    ("scaled(posit(8,2);16,bfloat16,up)", "sign:0.05", "scale.any:0.1"),
    ("mxfp8/stochastic", "exponent:0.05", "scale.any:0.1"),
    ("mxfp4", "", "scale.exponent:0.2"),
    ("nvfp4", "sign:0.05", "scale.any:0.2"),
    ("nvfp4:16,fit=6:4", "any:0.05", "scale.exponent:0.2"),
    ("scaled(e5m2;8x8,e8m0fnu,inverse)", "any:0.05", "scale.exponent:0.2"),
]


@pytest.mark.part(2)
@pytest.mark.parametrize("where, row", [(w, r) for i, r in enumerate(FORMATS_WITH_FAULTS) for w in WHERE[i % 3 :: 3]])
def test_codes_of_elements_and_of_scales_flip_and_nothing_else(where: str, row: tuple[str, str, str]) -> None:
    """A value is R(q s) of the flipped element and scale; where neither flipped, it is what it is without faults."""
    torch.manual_seed(1)
    (text, elements, scales), layer, x = row, nn.Linear(40, 12, bias=False).eval(), torch.randn(24, 40)
    rule = Rule(operator="mm", operands=text) if where == "operands" else Rule(role="weight", rounding=text)
    base = (Rule(rounding="dtype"),)
    plain = fxround.compile(layer, Policy("plain", (*base, rule)), seed=2)
    rules = (*base, replace(rule, faults=f"{elements} {scales}".strip()))
    compiled = fxround.compile(layer, Policy("p", rules), seed=2, example_inputs=x)
    found = compiled.flips(x)
    assert found.flipped > 0
    for one in found.flips:
        assert abs(one.flipped - one.expected) < 6 * math.sqrt(max(one.expected, 1))
        assert one.value.startswith("scales of ") == one.fault.startswith("scale.")
    assert not compiled.leaks(x)
    values = dict(compiled.observe(x)) | compiled._called().named([x], None)
    without = dict(plain.observe(x)) | plain._called().named([x], None)
    graph, was = compiled.lowered.graph, plain.lowered.graph
    flips = [node for node in graph.nodes if isinstance(c := read(node), Pointwise) and "flip_" in c.program]
    assert len(flips) == len(found.flips)
    for node in flips:
        exact_flips(node, compiled, values)
    mm, mm_without = (next(n for n in g.nodes if "matmul" in str(n.target)) for g in (graph, was))
    for used, before in zip(mm.all_input_nodes[:2], mm_without.all_input_nodes[:2], strict=True):
        made, call = source_of(used), read(source_of(used))
        if not isinstance(call, Pointwise):
            continue
        result, expected = values[made.name], without[source_of(before).name]
        # Without faults a transposed weight is rounded as it lies in memory.
        expected = expected if expected.shape == result.shape else expected.mT
        moved = torch.zeros(result.shape, dtype=torch.bool)
        q = values[call.xs[0].name].double()
        clean = q if "flip_" in call.program else values[before_flips(call.xs[0]).name].double()
        if "flip_" in call.program:
            moved = values[before_flips(made).name] != result
        else:
            moved |= ~((q == clean) | (q.isnan() & clean.isnan()))
            if scales:
                held = values[call.xs[1].name].double()
                given = values[read(before_flips(call.xs[0])).xs[1].name].double()
                moved |= ~((held == given) | (held.isnan() & given.isnan()))
                back = (1 / held).float().double() if "inverse" in text else held
                zero = values[call.xs[2].name].double() if len(call.xs) > 2 else 0.0
                # A product of an element and a binary32 scale is exact in binary64.
                assert torch.equal(((q - zero) * back).float().nan_to_num(7.0), result.nan_to_num(7.0))
        assert moved.any() and torch.equal(result[~moved], expected[~moved])


def test_faults_of_scales_need_scales() -> None:
    for text in ("fixed(8,4)", "uint8:scale=0.05,zero=128", "e4m3fn"):
        for rule in (
            Rule(operator="mm", operands=text, faults="scale.any:0.1"),
            Rule(rounding=text, faults="scale.any:1"),
        ):
            with pytest.raises(PolicyError, match=r"flips bits of the scales of blocks, and .* has no such scales"):
                fxround.compile(net().eval(), Policy("p", (rule,)), example_inputs=X)
    with pytest.raises(PolicyError, match="an accumulator has no scale"):
        Rule(accumulate="wide faults=scale.any:0.1")
    rule = Rule(operator="mm", operands="mxfp8", faults="scale.sign:0.1")
    with pytest.raises(fxround.UnsupportedRounding, match="e8m0fnu has no bits of the sign"):
        fxround.compile(net().eval(), Policy("p", (rule,)), example_inputs=X)


def test_counts_of_scales_are_within_six_sigma_and_the_same_everywhere() -> None:
    """A false alarm has a probability below 1e-8 for all 4 counts (two tails of a normal distribution: 2e-9 each)."""
    torch.manual_seed(0)
    model, x = nn.Linear(2048, 64, bias=False).eval(), torch.randn(64, 2048)
    policy = Policy("p", (Rule(operator="mm", operands="mxfp4", faults="scale.any:0.02 any:0.001"),))
    compiled = fxround.compile(model, policy, seed=4)
    found = compiled.flips(x)
    assert [row.elements for row in found.flips] == [4096, 64 * 2048] * 2
    for row in found.flips:
        p = row.expected / row.elements
        assert abs(row.flipped - row.expected) <= 6 * math.sqrt(row.elements * p * (1 - p)), row


def test_a_gradient_is_zeroed_where_an_element_was_clamped_and_not_where_its_bits_flipped() -> None:
    """The same gradient as without faults: a clamped element is one of the quotient."""
    torch.manual_seed(0)
    x, grads = torch.randn(8, 64), []
    for faults in (None, "any:0.3 scale.any:0.3"):
        model = nn.Linear(64, 32, bias=False)
        torch.nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(1))
        rule = Rule(role="weight", rounding="mxfp4", gradient="zero_clamped", faults=faults)
        compiled = fxround.compile(model, Policy("p", (rule,)), seed=1)
        compiled(x).sum().backward()
        grads.append(model.weight.grad)
    zeros = grads[0] == 0
    assert zeros.any() and not zeros.all() and torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("text", ["mxint8", "bfp(5,16)/stochastic", "int8:channel"])
def test_integer_elements_flip_in_two_s_complement(text: str) -> None:
    """A flip of the sign's bit moves an element by half of the range: by M plus one quantum, times the scale."""
    torch.manual_seed(1)
    layer, x, g = nn.Linear(40, 12, bias=False), torch.randn(24, 40), torch.randn(24, 12)
    policy = Policy("p", (Rule(operator="mm", operands=text, faults="sign:0.05"),))
    compiled = fxround.compile(layer, policy, seed=2)
    found = compiled.flips(x, tangents={0: g})
    assert found.flipped > 20 and all(abs(r.flipped - r.expected) < 6 * math.sqrt(r.expected) for r in found.flips)
    assert not compiled.leaks(x, tangents={0: g})
    element = ScaledFormat.parse(text.partition("/")[0]).element
    half = element.maximum + 2.0**element.quantum_exponent
    values, checked = dict(compiled.observe_step({0: g}, x)), 0
    for node in compiled.lowered.graph.nodes:
        call = read(node)
        if isinstance(call, Pointwise) and "flip_" in call.program:
            before, after = values[call.xs[0].name], values[node.name]
            moved = (before - after).abs()[before != after]
            checked += moved.numel()
            assert (moved == half).all() and ((after < 0) == (before >= 0))[before != after].all()
    assert checked == found.flipped


@pytest.mark.parametrize("text", ["mxfp8", "mxfp4/stochastic", "scaled(e5m2;tensor,e8m0fnu,inverse)"])
def test_elements_of_scaled_operands_flip_between_the_quotient_and_the_scale(text: str) -> None:
    """Scales of powers of two: the quotient by the scale and its product with a flipped element are exact."""
    torch.manual_seed(1)
    layer, x, g = nn.Linear(40, 12, bias=False), torch.randn(24, 40), torch.randn(24, 12)
    whole = fxround.compile(layer, Policy("whole", (Rule(operator="mm", operands=text),)), seed=2)
    rules = (Rule(operator="mm", operands=text, faults="exponent:0.05"),)
    compiled = fxround.compile(layer, Policy("p", rules), seed=2)
    found = compiled.flips(x, tangents={0: g})
    assert found.flipped > 20 and all(abs(r.flipped - r.expected) < 6 * math.sqrt(r.expected) for r in found.flips)
    assert not compiled.leaks()
    values = dict(compiled.observe_step({0: g}, x))
    plain = dict(whole.observe_step({0: g}, x))
    names = [name for name in plain if name.endswith("_operand") or "_operand_" in name]
    assert len(names) == 4
    for node in compiled._called().lowered.graph.nodes:
        call = read(node)
        flipped = isinstance(call, Pointwise) and read(call.xs[0]) if call is not None and hasattr(call, "xs") else None
        if not isinstance(flipped, Pointwise) or "flip_" not in flipped.program or "flip_" in call.program:
            continue
        before, after = values[flipped.xs[0].name], values[call.xs[0].name]
        scales = values[call.xs[1].name]
        scale = 1 / scales if "inverse" in text else scales
        # Without faults a transposed operand is rounded as it lies in memory.
        same_bits = [torch.equal(before * scale, y) for name in names for y in (plain[name], plain[name].mT)]
        assert any(same_bits) and torch.equal((after * scale).isnan(), values[node.name].isnan())
        kept = ~after.isnan()
        assert torch.equal((after * scale)[kept], values[node.name][kept]) and not torch.equal(before, after)
    quiet = fxround.compile(layer, Policy("0", (Rule(operator="mm", operands=text, faults="any:0"),)), seed=2)
    assert torch.equal(quiet(x), whole(x))


@pytest.mark.parametrize("base", ["stochastic", "e4m3fn"])
def test_a_probability_of_zero_changes_no_bit(base: str) -> None:
    plain = Policy.parse(base)
    zero = plain.with_rules(Rule(faults="any:0 sign:0.0"), Rule(role="weight", faults="exponent:0"))
    results = []
    for policy in (
        plain,
        plain.with_rules(Rule(role="weight", rounding="dtype")) if base == "stochastic" else plain,
        zero,
    ):
        model, x = net(), X.clone().requires_grad_()
        y = fxround.compile(model, policy, seed=1)(x)
        y.backward(TANGENT)
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for other in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0], other, strict=True))
    assert not Policy("p", (Rule(faults="any:0"),)).draws and Policy("p", (Rule(faults="any:1e-3"),)).draws


def test_faults_change_no_random_bit_of_a_rounding() -> None:
    plain = fxround.compile(net().eval(), "stochastic", seed=1)
    faulty = plain.with_policy(plain.policy.with_rules(Rule("2", operator="mm", faults="any:0.5")))
    before, after = dict(plain.observe(X)), dict(faulty.observe(X))
    assert all(same(before[name], after[name]) for name in ("mm", "add", "tanh", "mm_1"))
    assert not same(after["mm_1"], after["mm_1_flipped"])


def test_counts_are_within_six_sigma() -> None:
    """A false alarm has a probability below 2e-8 for all 10 counts (two tails of a normal distribution: 2e-9 each)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)).eval()
    x = torch.rand(512, 64)
    policy = Policy(
        "p",
        (
            Rule("0", rounding="bfloat16", faults="significand:3e-3 exponent:1e-3 sign:2e-3"),
            Rule("1", rounding=NARROW, faults="any:0.01"),
            Rule(role="weight", rounding="bfloat16", faults="any:0.05"),
        ),
    )
    compiled = fxround.compile(model, policy, example_inputs=x)
    rows = [row for sample in range(2) for row in compiled.reseed(5, sample).flips(x).flips]
    assert len(rows) == 12 and len({row.flipped for row in rows}) > 6
    for row in rows:
        p = row.expected / row.elements
        assert math.isclose(p, float(row.fault.partition(":")[2]), rel_tol=1e-5)  # p is a multiple of n / 2^32
        assert abs(row.flipped - row.expected) <= 6 * math.sqrt(row.elements * p * (1 - p)), row
    assert {(row.value, row.elements) for row in rows} == {
        ("weight 0.weight", 64 * 256),
        ("weight 1.weight", 64 * 256),
        ("aten.mm.default", 512 * 256),
        ("aten.mm.default", 512 * 64),
    }


def test_the_same_faults_everywhere() -> None:
    report = fxround.check_invariance(net().eval(), X, ("threads", "isa"), policy=FAULTY)
    report.check()


def test_the_report() -> None:
    compiled = fxround.compile(net().eval(), FAULTY, example_inputs=X)
    found = compiled.flips(X)
    weights = ["weight 0.bias", "weight 0.weight", "weight 2.bias", "weight 2.weight"]
    assert sorted(row.value for row in found.flips) == [*["aten.mm.default"] * 3, *weights]
    assert [row.fault for row in found.filter("0", operator="mm").flips] == ["significand:0.01", "sign:0.002"]
    assert found.flipped == sum(row.flipped for row in found.flips) > 0
    quiet = compiled.with_policy(Policy("quiet", tuple(r for r in FAULTY.rules if r.role is None))).evaluate(X)
    assert found.results == quiet.numel() and 0 < found.changed <= found.results
    assert f"{found.flipped:,} bits flipped in" in str(found) and found.sort("flipped", reverse=True)[0].flipped > 0
    assert list(found.to_pandas().columns)[:3] == ["value", "node", "module"]
    step = compiled.flips(X, tangents={0: TANGENT})
    assert {row.direction for row in step.flips} == {"forward", "backward"}
    without = compiled.with_policy("bfloat16").flips(X)
    assert (without.flips, without.changed) == ((), 0)
    assert "bfloat16 flips significand:0.01" in str(compiled.summary())


def test_flipped_values_are_in_their_format() -> None:
    compiled = fxround.compile(net(), Policy.parse(NARROW).with_rules(Rule(faults="any:0.05")))
    assert not compiled.leaks(X, tangents={0: TANGENT})


def test_a_rule_with_faults_is_a_text() -> None:
    assert Policy.from_toml(FAULTY.to_toml()) == Policy.from_dict(FAULTY.to_dict()) == FAULTY
    assert Rule(faults="sign:1e-3").faults == "sign:0.001"
    assert "faults=any:0.02" in str(FAULTY.rules[2])
    with pytest.raises(PolicyError, match="faults = 'mantissa:1': no field is named 'mantissa'"):
        Rule(faults="mantissa:1")
    with pytest.raises(PolicyError, match="that needs operands= of a format, such as"):
        Rule(role="weight", operands="identity", faults="sign:1")


@pytest.mark.parametrize(
    "rule, message",
    [
        (Rule(rounding="e8m0fnu", faults="sign:0.1"), "e8m0fnu has no bits of the sign"),
        (Rule(rounding="nf4", faults="exponent:0.1"), "the code of a table's value is its position; write any:"),
        (Rule(rounding="posit16", faults="exponent:0.1"), "fields of a posit begin where its regime ends"),
        (Rule(rounding="ue5m3", faults="sign:0.1"), "ue5m3 has no bits of the sign"),
        (Rule(faults="any:1e-12"), r"a field of 32 bits can flip with probability 7\.45e-09"),
    ],
)
def test_formats_without_these_bits_are_refused(rule: Rule, message: str) -> None:
    with pytest.raises(fxround.UnsupportedRounding, match=message):
        fxround.compile(net().eval(), Policy("p", (rule,)), example_inputs=X)


@pytest.mark.parametrize(
    "tangents, error, said",
    [
        (None, TypeError, "expected a dict with the gradients of the results .0."),
        ("a", TypeError, "tangents is a str; expected a dict"),
        ({5: torch.rand(4, 3)}, TypeError, "tangents is a dict with .5.; expected a dict with the gradients"),
        ({0: 1.0}, TypeError, r"tangents\[0\] is a float; expected a tensor shaped like result 0"),
        ({0: torch.rand(3)}, ValueError, r"tangents\[0\] is a torch.float32 tensor of shape \(3,\); result 0 is a"),
        ({0: torch.rand(1, 3)}, ValueError, r"of shape \(1, 3\); result 0 is a torch.float32 tensor of shape \(4, 3\)"),
        ({0: torch.rand(5, 3)}, ValueError, r"of shape \(5, 3\); result 0 is a torch.float32 tensor of shape \(4, 3\)"),
        ({0: torch.rand(4, 2)}, ValueError, r"of shape \(4, 2\); result 0 is a torch.float32 tensor of shape"),
        ({0: torch.rand(4, 3).double()}, ValueError, r"is a torch.float64 tensor"),
    ],
)
def test_gradients_of_results_are_checked(tangents: Any, error: type[Exception], said: str) -> None:
    compiled, x = fxround.compile(nn.Linear(3, 3), "bfloat16"), torch.rand(4, 3)
    compiled(x)
    with pytest.raises(error, match=said):
        list(compiled.observe_step(tangents, x))
    if tangents is not None:
        with pytest.raises(error, match=said):
            compiled.leaks(x, tangents=tangents)
        with pytest.raises(error, match=said):
            compiled.flips(x, tangents=tangents)
