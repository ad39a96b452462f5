"""``flips()`` counts what flips inside of loops: the rows are those of NumPy's arithmetic, iteration by iteration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import cond, scan, while_loop

import fxround
from fxround import Policy, Rule
from fxround.numerics.arithmetic.randomness import iteration_function, random_function
from fxround.numerics.faults import Fault, flip_operator, numbers_of
from fxround.numerics.formats import FORMATS
from fxround.numerics.formats.encodings import Encoding
from fxround.numerics.specification.exact_faults import flip
from fxround.passes.streams import of_fault

SEED, SAMPLE, STEPS, SIZE = 7, 3, 30, 33
POLICY = Policy("p", (Rule(rounding="dtype"), Rule(operator="mul", faults="significand:0.05")))


def scanned(s: Tensor, us: Tensor) -> Any:
    def step(s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        product = s * u
        return product, product + 1

    return scan(step, s, us)[0]


def repeated(s: Tensor, us: Tensor) -> Any:
    def step(i: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, s * us.index_select(0, i.reshape(1)).squeeze(0)

    return while_loop(lambda i, s: i < STEPS, step, (torch.tensor(0), s))[1]


def chosen(s: Tensor, us: Tensor) -> Any:
    return cond(us[0, 0] > 0, lambda s, u: (s * u, s + 0), lambda s, u: (s + u, s * u), (s, us[0]))[0]


def _words(size: int, number: int, seed: tuple[int, int]) -> list[int]:
    key = (np.full(size, word, np.uint32) for word in (*seed, SAMPLE, number))
    return [int(word) for word in random_function().evaluate(np.arange(size, dtype=np.uint64), *key)[0]]


@pytest.mark.parametrize("model, steps", [(scanned, STEPS), (repeated, STEPS), (chosen, 1)])
def test_the_faults_of_a_loop_are_numpys(model: Any, steps: int) -> None:
    s, us = torch.rand(SIZE) + 1, torch.rand(STEPS, SIZE) + 0.5
    compiled = fxround.compile(model, POLICY, seed=SEED).reseed(SEED, SAMPLE)
    encoding = Encoding(FORMATS["binary32"])
    numbers = numbers_of(flip_operator(Fault("significand", 0.05), encoding))
    assert numbers is not None
    state, flipped = s.numpy(), 0
    for i in range(steps):
        key = (np.array([word], np.uint32) for word in (SEED, 0, SAMPLE, 0))
        low, high = iteration_function().evaluate(np.array([i], np.uint64), *key)
        product = state * us[i].numpy()
        words = _words(SIZE, of_fault(0, 0), (int(low[0]), int(high[0])))
        hit = [flip(float(v), encoding, numbers, word) for v, word in zip(product, words, strict=True)]
        state = np.array(hit, np.float32)
        flipped += int((state != product).sum())
    assert compiled(s, us).detach().numpy().tobytes() == state.tobytes()
    found = compiled.reseed(SEED, SAMPLE).flips((s, us))
    assert [(row.elements, row.flipped, row.value) for row in found.flips] == [
        (steps * SIZE, flipped, "aten.mul.Tensor")
    ]
    _, bits, q = numbers
    assert flipped > 0 and found[0].expected == steps * SIZE * bits * q / 2**32


def test_recurrent_layers_have_the_rows_of_their_steps() -> None:
    """Names reach through the loop, counts are within six standard deviations, and backward loops have rows too."""
    torch.manual_seed(0)
    layer, x = nn.LSTM(6, 5), torch.rand(12, 3, 6)
    rules = (
        Rule(rounding="dtype", accumulate="binary32 faults=significand:0.02"),
        Rule(operator="tanh", faults="any:0.05"),
        Rule(operator="mm", direction="forward", operands="int8:channel", faults="any:0.05 scale.any:0.2"),
    )
    compiled = fxround.compile(layer, Policy("p", rules), seed=1)
    found = compiled.flips(x)
    own = [row for row in found.flips if ".step." in row.node]
    assert {row.value for row in own} >= {
        *(
            "aten.tanh.default",
            "accumulators of aten.mm.default",
            "weight weight_hh_l0",
            "scales of weight weight_hh_l0",
        )
    }
    tanh = [row.elements for row in own if row.value == "aten.tanh.default"]
    assert tanh == [12 * 3 * 5] * 2
    chains = [row.elements for row in own if row.value.startswith("accumulators")]
    assert chains == [12 * 3 * (4 * 5) * 5]
    assert all(abs(row.flipped - row.expected) < 6 * math.sqrt(row.expected) for row in found.flips)
    assert found.flips == compiled.flips(x).flips != compiled.reseed(2).flips(x).flips
    assert {row.node for row in own} <= {row.node for row in compiled.summary().operations}
    step = compiled.flips(x, tangents={0: torch.rand(12, 3, 5), 1: torch.rand(1, 3, 5), 2: torch.rand(1, 3, 5)})
    assert {row.direction for row in step.flips if ".step." in row.node} == {"forward", "backward"}
