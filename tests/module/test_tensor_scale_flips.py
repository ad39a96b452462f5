"""Faults of the scale of the tensor, to which the scales of blocks are relative: the bits, the counts, the errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from product_operands import threads
from torch import nn

import fxround
from fxround import Policy, PolicyError, Rule
from fxround.graph.dialect import Pointwise, read
from fxround.numerics.arithmetic.randomness import random_function
from fxround.numerics.faults import numbers_of
from fxround.numerics.formats import FORMATS
from fxround.numerics.formats.encodings import Encoding
from fxround.numerics.specification.exact_faults import flip
from fxround.runtime.cpu.code import instruction_set
from fxround.runtime.cpu.llvm.engine import instruction_sets

BASE = (Rule(rounding="dtype"),)
LEAST = np.float32(2.0**-149)


def _layer() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(48, 6, bias=False).eval()


def _rule(where: str, faults: str | None) -> Policy:
    if where == "operands":
        return Policy("p", (*BASE, Rule(operator="mm", operands="nvfp4", faults=faults)))
    return Policy("p", (*BASE, Rule(role="weight", rounding="nvfp4", faults=faults)))


@pytest.mark.parametrize("where", ["rounding", "operands"])
def test_an_element_is_multiplied_by_the_product_of_both_scales(where: str) -> None:
    """q R(s s'), in binary32, with the flipped scale s' of the tensor; s' itself by the specification."""
    layer, x = _layer(), torch.randn(4, 48)
    policy = _rule(where, "tensor.any:1.0")
    compiled = fxround.compile(layer, policy, seed=2, example_inputs=x)
    changed = set()
    for sample in range(6):
        compiled.reseed(2, sample)
        values = dict(compiled.observe(x)) | compiled._called().named([x], None)
        checked = 0
        for node in compiled.lowered.graph.nodes:
            call = read(node)
            if not isinstance(call, Pointwise) or "flip_" not in call.program:
                continue
            whole = values[call.xs[0].name].numpy().reshape(-1)
            weight, source = layer.weight.detach(), read(call.xs[0]).xs[0]
            most = values[source.name].reshape(()).numpy()
            assert most in (np.float32(weight.abs().max()), np.float32(x.abs().max()))
            # E2M1's largest value is 6, that of E4M3 448.
            assert whole[0] == most / np.float32(6 * 448)
            key = (np.array([word], np.uint32) for word in (2, 0, sample, call.node))
            (words,) = random_function().evaluate(np.zeros(1, np.uint64), *key)
            numbers = numbers_of(call.program.split("(")[0].partition("= ")[2])
            assert numbers is not None
            hit = np.float32(flip(float(whole[0]), Encoding(FORMATS["binary32"]), numbers, int(words[0])))
            assert values[node.name].numpy().reshape(-1).tobytes() == hit.tobytes() != whole.tobytes()
            (outer,) = node.users
            block, _ = (values[used.name].numpy() for used in read(outer).xs)
            product = np.where((block * hit == 0) & (hit != 0), LEAST, block * hit).astype(np.float32)
            product = np.clip(product, -np.finfo(np.float32).max, np.finfo(np.float32).max)
            assert values[outer.name].numpy().tobytes() == product.tobytes()
            (wide,) = outer.users
            (result,) = wide.users
            elements = values[read(result).xs[0].name].numpy()
            with np.errstate(over="ignore"):
                product = elements * values[wide.name].numpy()
            assert values[result.name].numpy().tobytes() == product.tobytes()
            changed.add(float(hit))
            checked += 1
        assert checked == (2 if where == "operands" else 1)
    assert len(changed) > 6 if where == "operands" else len(changed) > 3


def test_the_same_faults_everywhere_and_none_for_probability_zero() -> None:
    layer, x = _layer(), torch.randn(4, 48)
    for where in ("rounding", "operands"):
        faults = "any:0.05 scale.any:0.1 tensor.significand:0.9"
        compiled = fxround.compile(layer, _rule(where, faults), seed=5)
        results = []
        for name, n in zip(instruction_sets(), (1, 2, 1, 2), strict=False):
            with instruction_set(name), threads(n):
                results.append(compiled.reseed(5, 1)(x).numpy(force=True).tobytes())
        plain = fxround.compile(layer, _rule(where, None), seed=5)(x).numpy(force=True).tobytes()
        zero = fxround.compile(layer, _rule(where, "any:0 scale.any:0 tensor.any:0"), seed=5)
        assert set(results) == {results[0]} != {plain} == {zero(x).numpy(force=True).tobytes()}
        assert zero.flips(x).flips == () and not compiled.leaks(x)


def test_counts_are_within_six_sigma() -> None:
    """One element a call: the flips of 100 samples, whose rows say which scales they are."""
    compiled = fxround.compile(_layer(), _rule("rounding", "tensor.exponent:0.4 tensor.sign:0.1"), seed=3)
    x, flipped, expected = torch.randn(1, 48), 0, 0.0
    for sample in range(100):
        found = compiled.reseed(3, sample).flips(x)
        assert [(row.value, row.elements) for row in found.flips] == [("scales of weight weight", 1)] * 2
        flipped, expected = flipped + found.flipped, expected + found.expected
    # Six standard deviations, which 2 of 10^9 counts miss. The probabilities are those of 8 exponent bits and the sign.
    assert abs(flipped - expected) < 6 * math.sqrt(expected)
    assert expected == 100 * (8 * round(2**32 * 0.4 / 8) + round(2**32 * 0.1)) / 2**32


@pytest.mark.parametrize("text, hint", [("int8:channel", "write scale.any for its scales"), ("e4m3fn", "has none")])
def test_a_format_without_a_scale_of_the_tensor_is_refused(text: str, hint: str) -> None:
    for rule in (Rule(operator="mm", operands=text, faults="tensor.any:1"), Rule(rounding=text, faults="tensor.any:1")):
        with pytest.raises(PolicyError, match=f"flips bits of a scale of the tensor .*{hint}.* as 'nvfp4'"):
            fxround.compile(_layer(), Policy("p", (rule,)), example_inputs=torch.rand(1, 48))
    with pytest.raises(PolicyError, match="an accumulator has no scale"):
        Rule(accumulate="wide faults=tensor.any:0.1")
    for field in ("scale.tensor.any", "tensor.scale.any", "tensor."):
        with pytest.raises(PolicyError, match=f"no field is named '{field}'"):
            Rule(operator="mm", operands="nvfp4", faults=f"{field}:0.5")
