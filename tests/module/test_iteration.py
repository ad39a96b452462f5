"""Iterations have the bits of NumPy's arithmetic step by step, and are captured once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fxround
from fxround.module.iteration import _compiled, _require_state


def lorenz(s: Tensor) -> Tensor:
    """A step of Euler's method."""
    x, y, z = s.unbind(0)
    return s + 0.01 * torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])


def _numpy(s: Any, steps: int) -> list[Any]:
    f, path = np.float32, []
    for _ in range(steps):
        x, y, z = s
        change = np.array([f(10) * (y - x), x * (f(28) - z) - y, x * y - f(8 / 3) * z])
        s = s + f(0.01) * change
        path.append(s)
    return path


def test_the_lorenz_system_is_numpys() -> None:
    start = torch.tensor([1.0, 2.0, 3.0])
    path = _numpy(start.numpy(), 300)
    last, kept = fxround.iterate(lorenz, start, 300, "reproducible", keep=7)
    assert last.numpy().tobytes() == path[-1].tobytes()
    assert kept.numpy().tobytes() == np.stack(path[6::7]).tobytes()
    assert fxround.iterate(lorenz, start, 211, "reproducible", keep=300)[1].shape == (0, 3)
    assert torch.equal(fxround.iterate(lorenz, start, 123, "reproducible", keep=7)[0], torch.from_numpy(path[122]))
    compiled = _compiled(
        lorenz, fxround.policies["reproducible"], None, 7, _require_state(lorenz, start, None).signature
    )
    assert len(compiled.captures()) == 1


def test_states_may_be_nested_and_read_inputs() -> None:
    def step(state: dict[str, Any], u: Tensor) -> dict[str, Any]:
        a, (b,) = state["a"], state["b"]
        return {"a": a * 0.5 + u, "b": (b + a,)}

    state, us = {"a": torch.rand(4), "b": (torch.rand(4),)}, torch.rand(20, 4)
    found = fxround.iterate(step, state, 20, "reproducible", inputs=us)
    a, b = state["a"].numpy(), state["b"][0].numpy()
    for u in us.numpy():
        a, b = a * np.float32(0.5) + u, b + a
    assert found["a"].numpy().tobytes() == a.tobytes() and found["b"][0].numpy().tobytes() == b.tobytes()


def test_a_format_wider_than_binary32_is_computed_in_a_state_of_binary64() -> None:
    def step(s: Tensor) -> Tensor:
        return s * 1.5 - s * s * 0.5

    state = torch.tensor([0.3, 0.4], dtype=torch.float64)
    compiled, expected = fxround.compile(step, "ieee(10,12)"), state
    for _ in range(5):
        expected = compiled(expected)
    assert torch.equal(fxround.iterate(step, state, 5, "ieee(10,12)"), expected)
    with pytest.raises(fxround.FxroundError, match="binary32"):
        fxround.iterate(step, state.float(), 5, "ieee(10,12)")


def test_random_bits_differ_from_step_to_step_and_follow_the_seed() -> None:
    start = torch.ones(64)

    def third(x: Tensor) -> Tensor:
        return x * 0 + x / x / 3

    _, kept = fxround.iterate(third, start, 32, "stochastic", keep=1, seed=3)
    assert len({row.numpy().tobytes() for row in kept}) == 32
    _, again = fxround.iterate(third, start, 32, "stochastic", keep=1, seed=3)
    _, fewer = fxround.iterate(third, start, 20, "stochastic", keep=2, seed=3)
    assert torch.equal(kept, again) and torch.equal(kept[:20][1::2], fewer)
    assert not torch.equal(kept, fxround.iterate(third, start, 32, "stochastic", keep=1, seed=4)[1])


def test_a_compiled_step_brings_its_policy_and_seed() -> None:
    step, start = fxround.compile(lorenz, "bfloat16", seed=5), torch.ones(3)
    assert torch.equal(fxround.iterate(step, start, 9), fxround.iterate(lorenz, start, 9, "bfloat16", seed=5))
    with pytest.raises(TypeError, match="has a policy"):
        fxround.iterate(step, start, 9, "bfloat16")


def test_gradients_flow_through_all_steps() -> None:
    start = torch.rand(5).requires_grad_()
    fxround.iterate(lambda x: x * x, start, 3, "reproducible").sum().backward()
    x = start.detach().numpy()
    squares = [x, x * x, (x * x) * (x * x)]
    gradient = np.ones(5, np.float32)
    for s in reversed(squares):
        gradient = gradient * s + gradient * s
    assert start.grad is not None and start.grad.numpy().tobytes() == gradient.tobytes()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"steps": -1}, ValueError, r"steps is -1; expected at least 1"),
        ({"steps": 0}, ValueError, r"steps is 0; expected at least 1"),
        ({"steps": 2.0}, TypeError, r"steps is a float; expected an int"),
        ({"steps": True}, TypeError, r"steps is a bool"),
        ({"keep": 0}, ValueError, r"keep is 0; expected at least 1"),
        ({"policy": None}, TypeError, r"needs a policy"),
        ({"state": (1.0,)}, TypeError, r"state\[0\] is a float"),
        ({"state": ()}, ValueError, r"no tensor"),
        ({"step": lambda s: torch.cat([s, s])}, ValueError, r"state is torch.float32 of shape \(3,\).*shape \(6,\)"),
        ({"step": lambda s: s.double()}, ValueError, r"torch.float64"),
        ({"step": lambda s: (s, s)}, ValueError, r"returns \(x, x\), and was given the state x: return"),
        ({"step": lambda s, u: s, "inputs": torch.rand(4, 3)}, ValueError, r"expected 5 rows"),
        ({"step": lambda s, u: s, "inputs": [1.0]}, TypeError, r"inputs\[0\] is a float"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"step": lorenz, "state": torch.ones(3), "steps": 5, "policy": "bfloat16"} | change
    with pytest.raises(error, match=message):
        fxround.iterate(**given)


@pytest.mark.parametrize("steps", [12, 13, 40])
def test_the_first_step_that_overflows_is_named(steps: int) -> None:
    def step(state: dict[str, Tensor], u: Tensor) -> dict[str, Tensor]:
        return {"x": state["x"] * u, "y": state["y"]}

    start, us = {"x": torch.tensor([1.0, -3.0]), "y": torch.zeros(2)}, torch.full((steps, 1), 256.0)
    # 3 * 256^15 is less than 2^128, and 3 * 256^16 is more: the sixteenth step overflows, in binary32 and in bfloat16.
    settings: dict[str, Any] = {"inputs": us, "check_finite": True}
    if steps < 16:
        assert fxround.iterate(step, start, steps, "bfloat16", **settings)["x"].tolist() == [
            2.0 ** (8 * steps),
            -3.0 * 2.0 ** (8 * steps),
        ]
        return
    with pytest.raises(
        FloatingPointError, match=r"step 16 of 40 makes state\['x'\] inf at \[0\], which was 1\.3.*e\+36"
    ):
        fxround.iterate(step, start, steps, "bfloat16", **settings)
    assert fxround.iterate(step, start, steps, "bfloat16", inputs=us)["x"].isinf().all()
    start["y"][1] = float("nan")
    with pytest.raises(
        FloatingPointError, match=r"state\['y'\] is nan at \[1\] before the first step: expected finite"
    ):
        fxround.iterate(step, start, steps, "bfloat16", **settings)


def test_the_search_for_an_overflow_draws_the_same_random_bits() -> None:
    def step(x: Tensor) -> Tensor:
        return x * 1.7

    start = torch.ones(8, requires_grad=True)
    path = fxround.iterate(step, start, 200, "bfloat16/stochastic", keep=1, seed=5)[1]
    first = int((~path.isfinite()).any(1).nonzero()[0]) + 1
    with pytest.raises(FloatingPointError, match=rf"step {first} of 200"):  # the call records gradients, as training
        fxround.iterate(step, start, 200, "bfloat16/stochastic", seed=5, check_finite=True)


def test_a_step_whose_gradient_reads_no_value_has_one() -> None:
    start = torch.tensor([1.0, 3.0], requires_grad=True)
    fxround.iterate(lambda x: x * 2.0, start, 10, "reproducible").sum().backward()
    assert start.grad is not None and start.grad.tolist() == [1024.0, 1024.0]
