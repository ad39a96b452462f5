"""``sbits(t)``: t stored bits with the exponents of the dtype, in policies, rules, loops and single roundings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround import Policy, PolicyError, Rule
from fxround.numerics.formats.stored_bits import with_stored_bits

FORMS = {torch.float64: (11, 52), torch.float32: (8, 23), torch.bfloat16: (8, 7), torch.float16: (5, 10)}


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("mode", ["nearest_even", "toward_zero", "stochastic"])
def test_it_is_the_format_with_the_exponents_of_the_dtype(dtype: torch.dtype, mode: str) -> None:
    """At both ends of the range too: infinities, and subnormal numbers of the dtype."""
    exponent_bits, stored = FORMS[dtype]
    bias = 2 ** (exponent_bits - 1)
    exponents = np.linspace(-bias - stored, bias - 1, 500).round().astype(int)
    x = torch.from_numpy(np.ldexp(np.random.default_rng(0).standard_normal(500), exponents)).to(dtype)
    for bits in range(1, stored, max(1, stored // 5)):
        y = fxround.round(x, f"sbits({bits})/{mode}", seed=2)
        want = fxround.round(x, f"ieee({exponent_bits},{bits + 1})/{mode}", seed=2)
        assert y.dtype == dtype and torch.equal(y, want)
    assert torch.equal(fxround.round(x, f"sbits({stored})"), x)


def test_arrays_have_a_dtype_too() -> None:
    x = np.array([1.23, -7.9])
    np.testing.assert_array_equal(fxround.round(x, "sbits(3)"), [1.25, -8.0])
    assert fxround.round(np.array(1.23), "sbits(3)") == 1.25
    with pytest.raises(TypeError, match="expected float16, float32 or float64"):
        fxround.round(np.arange(3.0).astype(np.longdouble), "bfloat16")
    np.testing.assert_array_equal(fxround.round(x.astype(np.float32), "sbits(3)"), np.float32([1.25, -8.0]))


@pytest.mark.parametrize(
    "text, dtype, says",
    [
        ("sbits(0)", torch.float64, r"sbits\(0\) of binary64 values, which have 52 stored bits: expected 1 to 52"),
        ("sbits(-1)", torch.float32, r"sbits\(-1\) of binary32 values, which have 23 stored bits: expected 1 to 23"),
        ("sbits", torch.float32, r"no format is named 'sbits'; did you mean sbits\(bits\)\?"),
        ("sbits(24)", torch.float32, "which have 23 stored bits: expected 1 to 23"),
        ("sbits(1)", torch.float8_e5m2, "of e5m2 values.* expected values of binary64, binary32, bfloat16 or binary16"),
        ("sbits()", torch.float32, r"expected sbits\(bits\) with numbers"),
        ('sbits("x")', torch.float64, r"no format is named 'sbits\(\"x\"\)'; expected sbits\(bits\) with numbers"),
        ("sbits(53)", torch.float64, "which have 52 stored bits: expected 1 to 52"),
        ("sbits(3)/nearest", torch.float32, "no rounding mode is named"),
    ],
)
def test_other_numbers_of_bits_are_refused(text: str, dtype: torch.dtype, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fxround.round(torch.zeros(3).to(dtype), text)


def test_a_format_alone_has_no_dtype() -> None:
    with pytest.raises(ValueError, match=r"'sbits\(3\)' has the exponents of the values' dtype, .* not known here"):
        fxround.Rounding.parse("sbits(3)")


@pytest.mark.part(2)
@pytest.mark.parametrize("dtype", FORMS)
def test_a_policy_is_that_of_the_format(dtype: torch.dtype) -> None:
    exponent_bits, _ = FORMS[dtype]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
    x = torch.randn(3, 4).to(dtype)
    short = Policy.parse("sbits(5)/stochastic")
    text = f"ieee({exponent_bits},6)/stochastic"
    entering = (Rule(role=role, rounding=text) for role in ("weight", "input", "error", "gradient"))
    named = Policy("named", (Rule(rounding=text, accumulate="wide"), *entering))
    results = []
    for policy in (short, named):
        model.zero_grad()
        y = fxround.compile(model, policy, seed=4)(x)
        y.sum().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_rules_hold_the_text_and_policies_are_files() -> None:
    rule = Rule(rounding="sbits( 7 )", accumulate="sbits(10)/stochastic", operands="sbits(3)", gradient="sbits(4)")
    assert (rule.rounding, rule.operands) == ("sbits(7)/nearest_even/inf", "sbits(3)/nearest_even/inf")
    assert rule.accumulate == "sbits(10)/stochastic/inf" and rule.gradient == "sbits(4)/nearest_even/inf"
    policy = Policy("p", (rule,))
    assert Policy.from_toml(policy.to_toml()) == policy
    model, x = nn.Linear(8, 3), torch.randn(2, 8)
    texts = [with_stored_bits(str(getattr(rule, key)), "binary32") for key in ("rounding", "accumulate", "operands")]
    plain = Policy("q", (Rule(rounding=texts[0], accumulate=texts[1], operands=texts[2]),))
    assert torch.equal(fxround.compile(model, policy)(x), fxround.compile(model, plain)(x))
    with pytest.raises(PolicyError, match=r"sbits\(60\) of binary64 values, which have 52 stored bits"):
        Rule(rounding="sbits(60)")
    with pytest.raises(ValueError, match=r"sbits\(40\) of binary32 values"):
        fxround.compile(model, "sbits(40)")(x)


def field(state: Tensor) -> Tensor:
    """Lorenz 63 with constants of few bits: sums and products of numbers of 13 bits are exact in binary64."""
    x, y, z = state.unbind(-1)
    return torch.stack([10.0 * (y - x), x * (28.0 - z) - y, x * y - 2.625 * z], -1)


def test_a_state_of_binary64_runs_with_few_stored_bits() -> None:
    """Against NumPy, whose results are rounded after each operation."""

    def step(state: Tensor) -> Tensor:
        return state + 0.0078125 * field(state)

    def r(value: np.ndarray) -> np.ndarray:
        return fxround.round(value, "ieee(11,13)")

    start = torch.tensor([[1.0, 1.0, 1.0], [-3.0, 2.5, 20.0]], dtype=torch.float64)
    got = fxround.iterate(step, start, 300, "sbits(12)")
    state = start.numpy()
    for _ in range(300):
        x, y, z = state.T
        slopes = (
            r(10.0 * r(y - x)),
            r(r(x * r(28.0 - z)) - y),
            r(r(x * y) - r(2.625 * z)),
        )
        state = r(state + r(0.0078125 * np.stack(slopes, -1)))
    np.testing.assert_array_equal(got.numpy() if isinstance(got, Tensor) else got, state)
    tiny = fxround.iterate(lambda s: s * s, torch.tensor([2.0**-300], dtype=torch.float64), 2, "sbits(50)")
    assert float(tiny) == 0.0


def test_one_member_runs_alone_with_the_bits_of_an_ensemble_to_nearest() -> None:
    start = torch.tensor([[1.0, 1.0, 1.0], [2.0, -1.0, 20.0]], dtype=torch.float64)
    both = fxround.iterate(lambda s: s + 0.01 * field(s), start, 20, "sbits(9)")
    for i in range(2):
        alone = fxround.iterate(lambda s: s + 0.01 * field(s), start[i : i + 1], 20, "sbits(9)")
        assert torch.equal(alone, both[i : i + 1])
