"""Policies: which rule applies, what it sets, and that texts lose nothing."""

from __future__ import annotations

from collections import UserList
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxround
from fxround.errors import PolicyError
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats import FORMATS
from fxround.numerics.gradients import Gradient
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.orders import LANES, Order
from fxround.policy import DEFINITIONS, ENTERING, PRESETS, ROLES, Assignment, Policy, Rule

MM = {"path": "layer1.0.conv1", "operator": "aten.mm.default", "kind": "contraction", "role": "activation"}
BINARY32 = {**MM, "dtype": "binary32"}


def assigned(policy: Policy, **changed: str) -> Assignment | None:
    return policy.assign(**(BINARY32 | changed))


@pytest.mark.parametrize(
    "rule, speaks",
    [
        ({}, True),
        ({"match": "layer1"}, True),
        ({"match": "layer1.*"}, True),
        ({"match": "*.conv1"}, True),
        ({"match": "layer[1-3]"}, True),
        ({"match": "layer"}, False),
        ({"match": "layer10"}, False),
        ({"match": "conv1"}, False),
        ({"match": ""}, False),
        ({"operator": "mm"}, True),
        ({"operator": "aten.mm"}, True),
        ({"operator": "aten.mm.*"}, True),
        ({"operator": "contraction"}, True),
        ({"operator": "m"}, False),
        ({"operator": "bmm"}, False),
        ({"role": "activation"}, True),
        ({"role": "weight"}, False),
    ],
)
def test_a_rule_speaks_of_what_it_names(rule: dict[str, str], speaks: bool) -> None:
    assert Rule(**rule, rounding="bfloat16").matches(**MM) is speaks


@pytest.mark.parametrize("role", ROLES)
def test_what_enters_a_graph_is_rounded_only_by_a_rule_that_names_its_role(role: str) -> None:
    at = {**MM, "role": role}
    assert Rule(rounding="bfloat16").matches(**at) is (role not in ENTERING)
    assert Rule(role=role, rounding="bfloat16").matches(**at)


def test_an_empty_match_is_the_root_module_alone() -> None:
    rule = Rule("", rounding="bfloat16")
    assert rule.matches(**{**MM, "path": ""})
    assert not rule.matches(**MM)


def test_the_last_rule_wins_field_by_field() -> None:
    policy = Policy(
        "p",
        (
            Rule(rounding="bfloat16", accumulate="tf32", order="sequential"),
            Rule("layer1", accumulate="dtype/stochastic:8"),
            Rule("layer2", rounding="e5m2"),
        ),
    )
    assert assigned(policy) == Assignment(
        Rounding.parse("bfloat16"),
        Accumulation.parse("binary32/stochastic:8"),
        Order.parse("sequential"),
        str(policy.rules[0]),
    )


def test_what_no_rule_mentions_is_left_alone_and_what_is_unsaid_is_the_dtypes() -> None:
    assert assigned(Policy("empty")) is None
    assert assigned(Policy("other", (Rule("elsewhere", rounding="bfloat16"),))) is None
    said = assigned(Policy("order alone", (Rule(order="sequential"),)), dtype="binary64")
    assert said is not None
    assert (str(said.rounding), str(said.accumulate)) == ("binary64/nearest_even/inf",) * 2
    assert assigned(Policy("rounding alone", (Rule(rounding="bfloat16"),))) == Assignment(
        Rounding.parse("bfloat16"), Accumulation.parse("binary32"), LANES, "* -> rounding=bfloat16/nearest_even/inf"
    )


def test_identity_leaves_an_operation_alone_with_its_accumulator() -> None:
    policy = PRESETS["stochastic"].with_rules(Rule("layer1", rounding="identity"))
    said = assigned(policy)
    assert said is not None
    assert (said.rounding, said.accumulate, str(said)) == (None, None, "identity")
    again = policy.with_rules(Rule(operator="mm", rounding="dtype"))
    assert str(assigned(again)) == ("binary32/nearest_even/inf accumulate binary32/stochastic/inf order lanes:16")


def test_native_is_kept_as_a_word() -> None:
    said = assigned(Policy("qpytorch", (Rule(rounding="e5m2/stochastic", accumulate="native"),)))
    assert said is not None
    assert said.accumulate == "native"


@pytest.mark.parametrize("dtype", ["binary64", "binary32", "binary16", "bfloat16"])
@pytest.mark.parametrize(
    "preset, mode", [("stochastic", "stochastic"), ("up_down", "up_down"), ("cestac", "stochastic_equal")]
)
def test_perturbing_presets_round_in_the_operations_own_format(preset: str, mode: str, dtype: str) -> None:
    said = assigned(PRESETS[preset], dtype=dtype)
    assert said is not None
    assert str(said.rounding) == f"{dtype}/{mode}/inf"
    assert str(said.accumulate) == f"{'binary64' if dtype == 'binary64' else 'binary32'}/{mode}/inf"
    assert assigned(PRESETS[preset], role="weight", dtype=dtype) is None


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_a_policy(name: str) -> None:
    policy = Policy.parse(name)
    for role in ROLES:
        said = assigned(policy, role=role, dtype="binary64")
        assert said is not None
        assert said.rounding == Rounding.parse(name)
        widest = "binary64" if name == "binary64" else "binary32"
        assert said.accumulate == Accumulation.parse(widest) or role in ENTERING
    assert Policy.parse(Rounding.parse(name)).rules == policy.rules


def test_presets_are_named_and_those_that_promise_bits_are_strict() -> None:
    assert set(PRESETS) >= {"identity", "stochastic", "up_down", "cestac", "reproducible", "bfloat16", "binary16"}
    assert [p.name for p in PRESETS.values() if p.strict] == ["reproducible", "reproducible_sharded", "repdl"]
    assert all(name == p.name == Policy.parse(name).name for name, p in PRESETS.items())
    assert PRESETS["identity"].rules == ()


def test_a_wider_format_than_the_operations_is_refused_with_its_place() -> None:
    with pytest.raises(PolicyError, match=r"binary64.*aten\.mm\.default at layer1\.0\.conv1.*stored in binary32"):
        assigned(Policy.parse("binary64"))
    with pytest.raises(PolicyError, match="stored in binary16"):
        assigned(Policy.parse("bfloat16"), dtype="binary16")


def test_a_rule_that_matches_nothing_is_named() -> None:
    policy = Policy(
        "p", (Rule(rounding="bfloat16"), Rule("layer2", rounding="e5m2"), Rule("x", rounding="e5m2", optional=True))
    )
    policy.require_matched({0, 1})
    with pytest.raises(
        PolicyError, match=r"rule 2, 'layer2 -> rounding=e5m2/nearest_even/inf'.*did you mean 'layer1'"
    ) as error:
        policy.require_matched({0}, ["", "layer1", "fc"])
    assert "(root), fc, layer1" in str(error.value)
    for preset in PRESETS.values():
        preset.require_matched(())


def test_an_operator_that_the_model_lacks_is_named_with_those_that_it_has() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(-1))
    for operator, said in (
        ("softmax", "may be a formula"),
        ("expp", "did you mean 'exp'?"),
        ("contract", "'contraction'"),
    ):
        policy = Policy("p", (Rule(operator=operator, rounding="bfloat16"),))
        with pytest.raises(PolicyError) as error:
            fxround.compile(model, policy, example_inputs=torch.randn(2, 4))
        told = str(error.value)
        assert f"which has no operator {operator!r}" in told and said in told
        assert "the operators add, amax, div, exp, mm, mul, sub, sum of the kinds" in told and "summary() shows" in told
    # Nothing of the kind that the rule speaks of is there, or the operator is, and the module is not.
    with pytest.raises(PolicyError, match=r"The model's modules: 0$"):
        Policy("p", (Rule(operator="mm", rounding="bfloat16"),)).require_matched((), ["0"])
    policy = Policy("p", (Rule("0.x", operator="mm", rounding="bfloat16"),))
    with pytest.raises(PolicyError, match=r"did you mean '0'\?.*The model's modules: \(root\), 0, 1"):
        fxround.compile(model, policy, example_inputs=torch.randn(2, 4))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Policy.parse("stocastic"), "did you mean 'stochastic'"),
        (lambda: Policy.parse("dtype/mca:30"), r"'dtype' is a format in the rules of a policy, .*'dtype/mca:30'"),
        (lambda: Policy.parse("bfloat61"), "did you mean 'bfloat16'"),
        (lambda: Policy.parse("MXFB8"), "did you mean 'mxfp8'"),
        (lambda: Policy.parse("e4m3fm/stochastic"), "did you mean e4m3fn"),
        (lambda: Policy.parse("bfloat16/stochastik"), "did you mean stochastic"),
        (lambda: Policy.parse("e2m1fn/stochastic/inf"), "cannot overflow"),
        (lambda: Policy.parse("no/such/file.toml"), r"no/such/file\.toml.*cannot be read"),
        (lambda: Rule(rounding="bfloat16", role="wieght"), "did you mean 'weight'"),
        (lambda: Policy.parse(torch.int64), "policy 'torch.int64': .*is a dtype of integers"),
        (lambda: Policy.parse("uint64"), "integers have 2 to 16 bits"),
        (lambda: Rule(operands="int40"), "operands = 'int40': .*integers have 2 to 16 bits"),
        (lambda: Policy.parse("Binary17"), "did you mean 'binary16'"),
        (lambda: Rule(rounding=torch.int8), "rounding = 'torch.int8': .*is a dtype of integers"),  # type: ignore[arg-type]
        (lambda: Rule(rounding=3), "rounding is a text"),  # type: ignore[arg-type]
        (lambda: Rule(rounding="fp8"), r"fp8 is a policy, .* scaled\(e4m3fn;tensor,binary32,inverse\)"),
        (lambda: Rule(rounding="mxfp9"), "or did you mean mxfp8 or mxfp6"),
        (lambda: Rule(rounding="native"), "no format is named 'native'"),
        (lambda: Rule(accumulate="identity"), "no format is named 'identity'"),
        (lambda: Rule(order="random"), "order = 'random'"),
        (lambda: Rule(accumulate="binary32 chunk=8"), "both or neither, .* as in chunk=8 combine=binary32"),
        (lambda: Rule(accumulate="binary32 combine=bfloat16"), "as in chunk=128 combine=bfloat16/nearest_even/inf"),
        (lambda: Rule(accumulate="binary32 chunks=8"), "options are product=, chunk=, combine="),
        (lambda: Rule("layer1"), "layer1 -> sets nothing"),
        (lambda: Rule(gradient="zero_clampd"), "did you mean 'zero_clamped'"),
        (
            lambda: Rule(gradient="e5m2 zero_clamped"),
            "expected straight_through, zero_clamped, estimate, a rounding, or",
        ),
        (
            lambda: Rule(rounding="e4m3fn", gradient="zero_clamped"),
            "clamps nothing; write e4m3fn/nearest_even/saturate",
        ),
        (lambda: Rule(role="weight", direction="backward", rounding="e5m2"), "weight has no direction 'backward'"),
        (lambda: Policy(3, ()), r"the name of a policy is an int \(3\); expected a str"),  # type: ignore[arg-type]
        (lambda: Policy("p", Rule(rounding="bfloat16")), "rules is a Rule; expected a sequence of Rules"),  # type: ignore[arg-type]
        (lambda: Policy("p", "abc"), "rules is a str; expected a sequence of Rules"),  # type: ignore[arg-type]
        (lambda: Policy("p", (), strict="yes"), "strict is 'yes'; expected True or False"),  # type: ignore[arg-type]
        (lambda: Policy("p", ({"rounding": "bfloat16"},)), "a rule is a Rule, got dict"),  # type: ignore[arg-type]
        (lambda: Policy.from_dict({"rule": []}), r"no key 'rule'; did you mean 'rules'\? Allowed: name, strict, rules"),
        (
            lambda: Policy.from_dict({"rules": [{"rouding": "x"}]}),
            r"no key 'rouding'; did you mean 'rounding' or 'gradient'\? Allowed: match",
        ),
        (lambda: Policy.from_dict({"rules": [3]}), "table of keys, got int"),
        (lambda: Policy.from_dict({"strict": "yes"}), "'strict' is 'yes' .str., expected bool"),
        (lambda: Policy.from_dict({"rules": [{"order": 16}]}), "'order' is 16"),
        (lambda: Policy("p", definitions="repld"), "no definitions are named 'repld'; did you mean 'repdl'"),
        (lambda: Policy.from_dict({"definitions": 3}), "'definitions' is 3"),
        (lambda: Policy.from_toml("name ="), "not a TOML document"),
    ],
)
def test_mistakes_are_reported_with_the_remedy(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(PolicyError, match=message) as error:
        make()
    assert isinstance(error.value, ValueError)


def test_a_list_of_rules_may_be_any_sequence() -> None:
    rules = [{"rounding": "bfloat16"}]
    assert Policy.from_dict({"rules": UserList(rules)}) == Policy.from_dict({"rules": rules})
    for text in ("bfloat16", b"bfloat16"):
        with pytest.raises(PolicyError, match="'rules' is"):
            Policy.from_dict({"rules": text})


def test_a_policy_of_the_wrong_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="got int"):
        Policy.parse(3)  # type: ignore[arg-type]


def test_a_file_gives_the_policy_and_its_name_stands_in_its_errors(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(PRESETS["bfloat16"].to_toml(), encoding="utf-8")
    assert Policy.parse(file) == Policy.parse(str(file)) == PRESETS["bfloat16"]
    file.write_text('[[rules]]\nmode = "RNE"\n', encoding="utf-8")
    with pytest.raises(PolicyError, match=r"mine\.toml.*no key 'mode'"):
        Policy.parse(file)


roundings = st.builds(
    lambda fmt, mode: f"{fmt}/{mode}",
    st.sampled_from(["dtype", *FORMATS, "ieee(5,7)"]),
    st.sampled_from([*MODES, "stochastic:3"]),
)
wide = st.sampled_from(["wide", *(f"wide/{mode}" for mode in MODES), "dtype chunk=4 combine=wide/stochastic"])
accumulations = roundings | st.builds("{} product={} chunk=8 combine={}".format, roundings, roundings, roundings)
rules = st.builds(
    Rule,
    match=st.text(st.characters(exclude_categories=["Cs"])),
    operator=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    role=st.none() | st.sampled_from(ROLES),
    rounding=roundings | st.just("identity"),
    accumulate=st.none() | accumulations | st.just("native") | wide,
    order=st.none() | st.sampled_from(["sequential", "lanes", "lanes:4", "exact"]),
    optional=st.booleans(),
    gradient=st.none() | st.just("straight_through") | roundings,
)
rules |= st.builds(
    Rule,
    operator=st.sampled_from(["contraction", "exp"]),
    role=st.none() | st.sampled_from(["weight", "error"]),
    operands=roundings | st.just("identity"),
)
policies = st.builds(
    Policy,
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(rules, max_size=4),
    st.booleans(),
    st.sampled_from(DEFINITIONS),
)


@given(policies)
def test_dict_and_toml_lose_nothing(policy: Policy) -> None:
    assert Policy.from_dict(policy.to_dict()) == policy
    assert Policy.from_toml(policy.to_toml()) == policy


@pytest.mark.parametrize("policy", PRESETS.values(), ids=PRESETS)
def test_presets_survive_dict_and_toml(policy: Policy) -> None:
    assert Policy.from_toml(policy.to_toml()) == Policy.from_dict(policy.to_dict()) == policy


def test_a_gradient_is_kept_with_all_its_parts() -> None:
    rule = Rule(rounding="e4m3fn/nearest_even/saturate", gradient="zero_clamped dtype/stochastic")
    assert rule.gradient == "zero_clamped dtype/stochastic/inf"
    policy = Policy("treated", (rule,))
    assert policy.treats_gradients and Policy.from_toml(policy.to_toml()) == policy
    said = assigned(policy)
    assert said is not None and said.gradient == Gradient.parse("zero_clamped binary32/stochastic")
    assert not Policy("straight", (Rule(gradient="straight_through"),)).treats_gradients


def test_an_accumulation_keeps_its_options() -> None:
    rule = Rule(accumulate="bfloat16 chunk=128 combine=dtype product=dtype/toward_zero")
    assert rule.accumulate == (
        "bfloat16/nearest_even/inf chunk=128 combine=dtype/nearest_even/inf product=dtype/toward_zero/inf"
    )
    said = assigned(Policy("chunked", (Rule(rounding="dtype"), rule))).accumulate
    assert said == Accumulation.parse("bfloat16 product=binary32/toward_zero chunk=128 combine=binary32")
    with pytest.raises(PolicyError, match="needs both or neither"):
        Rule(accumulate="bfloat16 chunk=128")
    with pytest.raises(PolicyError, match="options are product=, chunk=, combine="):
        Rule(accumulate="bfloat16 chunks=128")


def test_a_wide_accumulator_is_binary32_for_16_bits_and_what_is_unsaid_is_wide() -> None:
    for text, expected in (("wide/stochastic", "binary32/stochastic/inf"), ("dtype", "bfloat16/nearest_even/inf")):
        said = assigned(Policy("p", (Rule(accumulate=text),)), dtype="bfloat16")
        assert said is not None and str(said.accumulate) == expected
    unsaid = assigned(Policy("p", (Rule(rounding="bfloat16"),)), dtype="bfloat16")
    assert unsaid is not None and str(unsaid.accumulate) == "binary32/nearest_even/inf"
    mixed = assigned(Policy("p", (Rule(accumulate="dtype chunk=4 combine=wide/stochastic"),)), dtype="binary16")
    assert mixed is not None and str(mixed.accumulate) == (
        "binary16/nearest_even/inf chunk=4 combine=binary32/stochastic/inf"
    )
    with pytest.raises(PolicyError, match="'wide' is a format of accumulators"):
        Rule(rounding="wide")


def test_operands_are_chosen_by_their_own_role_and_direction() -> None:
    product = {"path": "fc", "operator": "aten.mm.default", "kind": "contraction"}
    policy = Policy(
        "p",
        (
            Rule(operator="contraction", direction="forward", operands="e4m3fn"),
            Rule(operator="contraction", role="weight", operands="dtype/stochastic"),
            Rule("fc2", operator="contraction", operands="identity"),
        ),
    )

    def said(role: str, direction: str, **other: str) -> str:
        found = policy.assign_operand(**product | other, role=role, direction=direction, dtype="bfloat16")
        return str(found and found.rounding)

    assert said("activation", "forward") == said("input", "forward") == "e4m3fn/nearest_even/nan"
    assert said("weight", "forward") == "bfloat16/stochastic/inf"
    assert said("error", "backward") == said("weight", "forward", path="fc2") == "None"
    assert said("activation", "forward", operator="aten.exp.default", kind="elementary") == "None"
    # Of results, such rules say nothing.
    assert policy.assign(**product, role="activation", dtype="binary32") is None
    with pytest.raises(PolicyError, match=r"an operand of aten\.mm\.default at fc to binary32, but"):
        Policy("w", (Rule(operands="binary32"),)).assign_operand(
            **product, role="weight", direction="forward", dtype="bfloat16"
        )
    with pytest.raises(PolicyError, match="Write two rules"):
        Rule(role="weight", rounding="bfloat16", operands="e4m3fn")


def test_gradients_of_operands_cannot_be_treated() -> None:
    with pytest.raises(PolicyError, match="which gradients pass straight through: set rounding= too"):
        Rule(operands="nvfp4", gradient="zero_clamped")
    assert Rule(operands="nvfp4", gradient="straight_through").gradient == "straight_through"
    assert Rule(operands="nvfp4", rounding="e4m3fn/nearest_even/saturate", gradient="zero_clamped").operands


@pytest.mark.parametrize("half", ["float16", "fp16", "half", "torch.float16", torch.float16, np.float16])
def test_other_names_and_dtypes_give_the_policies_of_fxrounds_names(half: Any) -> None:
    assert Policy.parse(half) is PRESETS["binary16"]
    assert Rule(rounding=half, accumulate=half) == Rule(rounding="binary16", accumulate="binary16")
    spelled = Rule(operands=half, rounding=half, gradient=half)
    assert spelled == Rule(operands="binary16", rounding="binary16", gradient="binary16")
    rules = Policy.from_dict({"name": "p", "rules": [{"rounding": half, "accumulate": torch.float32}]}).rules
    assert rules == (Rule(rounding="binary16", accumulate="binary32"),)


def test_other_names_in_longer_texts() -> None:
    assert Policy.parse("fp8_e4m3/stochastic/saturate") == Policy.parse("e4m3fn/stochastic/saturate")
    assert Policy.parse(torch.float8_e5m2) == Policy.parse("e5m2") and Policy.parse(torch.bfloat16).name == "bfloat16"
    toml = '[[rules]]\nrounding = "half"\naccumulate = "float32 chunk=8 combine=torch.float32"\n'
    assert Policy.from_toml(toml).rules == (Rule(rounding="binary16", accumulate="binary32 chunk=8 combine=binary32"),)
    assert Policy.parse("fp8") is PRESETS["fp8"]


def test_an_unknown_name_has_the_nearest_of_all_kinds_and_the_list_of_all_kinds() -> None:
    with pytest.raises(PolicyError, match=r"did you mean 'nf4'.* Known: identity, .*, int2 to int16, .*binary8p3$"):
        Policy.parse("nf3")
    with pytest.raises(PolicyError, match=r"no rounding mode is named 'wrap'\. Known: nearest_even"):
        Policy.parse("e4m3fn/wrap")


def test_a_buffer_of_fewer_bits_keeps_its_exponents_where_the_format_has_more() -> None:
    """A float32 buffer of a float64 model; an operation that is stored in float32 is refused still."""
    for text, entered in (("ieee(10,12)", "ieee(8,12)"), ("sbits(51)", "binary32"), ("binary64", "binary32")):
        said = assigned(Policy.parse(text), role="buffer", dtype="binary32")
        assert said is not None
        assert said.rounding == Rounding.parse(entered)
        with pytest.raises(PolicyError, match=r"binary32.*(stored|wider dtype)"):
            assigned(Policy.parse(text), dtype="binary32")
