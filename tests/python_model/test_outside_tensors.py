"""A step reads tensors from outside as they are at each call, and they have gradients."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan

import fxround
from fxround.module.iteration import _compiled

SHIFT = torch.tensor([1.0, -2.0, 0.3])


class Holder:
    """An object with a tensor, a method, and a call."""

    def __init__(self) -> None:
        self.inner = {"shift": [SHIFT.clone()]}

    def step(self, s: Tensor) -> Tensor:
        """Return the next state."""
        return s * 0.3 + self.inner["shift"][0]

    __call__ = step


def _enclosed() -> Callable[[Tensor], Tensor]:
    shift = SHIFT.clone()
    return lambda s: s * 0.3 + shift


def _applied(s: Tensor, shift: Tensor) -> Tensor:
    return s * 0.3 + shift


def _defaulted(s: Tensor, shift: Tensor = SHIFT) -> Tensor:
    return s * 0.3 + shift


def _numpy(s: Any, shift: Any, steps: int) -> Any:
    for _ in range(steps):
        s = s * np.float32(0.3) + shift
    return s


@pytest.mark.parametrize(
    "step",
    [
        lambda s: s * 0.3 + SHIFT,
        _enclosed(),
        functools.partial(_applied, shift=SHIFT),
        _defaulted,
        Holder().step,
        Holder(),
    ],
    ids=["global", "closure", "partial", "default", "method", "object"],
)
def test_a_step_reads_tensors_from_outside(step: Callable[[Tensor], Tensor]) -> None:
    start = torch.tensor([0.1, 0.2, 0.7])
    found = fxround.iterate(step, start, 9, "reproducible")
    assert found.numpy().tobytes() == _numpy(start.numpy(), SHIFT.numpy(), 9).tobytes()


def test_each_call_reads_the_values_of_its_time() -> None:
    holder, start = Holder(), torch.ones(3)
    rate = 0.3

    def step(s: Tensor) -> Tensor:
        return s * rate + holder.inner["shift"][0]

    def check() -> None:
        wanted = start.numpy()
        for _ in range(5):
            wanted = wanted * np.float32(rate) + holder.inner["shift"][0].numpy()
        assert fxround.iterate(step, start, 5, "reproducible").numpy().tobytes() == wanted.tobytes()

    check()
    captures = _compiled.cache_info().misses
    holder.inner["shift"][0].add_(1)
    check()
    holder.inner["shift"][0] = torch.rand(3)
    check()
    assert _compiled.cache_info().misses == captures
    rate = 0.7
    check()
    assert _compiled.cache_info().misses == captures + 1


def test_whole_numbers_from_outside_are_those_of_the_call() -> None:
    class Settings:
        def __init__(self) -> None:
            self.ways = {"rows": [0]}

    places, settings = 1, Settings()

    def turned(s: Tensor) -> Tensor:
        return s.roll(places, settings.ways["rows"])

    def step(s: Tensor) -> Tensor:
        return turned(s) + 1

    x = torch.arange(12.0).reshape(3, 4)
    for places, way in ((1, 0), (2, 0), (2, 1), (1, 0)):
        settings.ways["rows"] = [way]
        assert torch.equal(fxround.iterate(step, x, 2, "reproducible"), x.roll(2 * places, way) + 2)


def test_tensors_from_outside_may_share_memory() -> None:
    rows = torch.rand(6, 3)
    first, second = rows[0], rows[1]

    def step(s: Tensor, u: Tensor) -> Tensor:
        return s * first + second * u

    found, wanted = fxround.iterate(step, second, 6, "reproducible", inputs=rows), second.numpy()
    for u in rows.numpy():
        wanted = wanted * first.numpy() + second.numpy() * u
    assert found.numpy().tobytes() == wanted.tobytes()


def test_gradients_flow_to_tensors_and_modules_from_outside() -> None:
    leaf, scale = torch.tensor([0.5, 0.05, 3.0], requires_grad=True), nn.PReLU(3)
    start = torch.tensor([[1.5, -0.7, -1.3]])
    shift = leaf * 2

    def step(s: Tensor) -> Tensor:
        return scale(s) + shift

    fxround.iterate(step, start, 2, "reproducible").sum().backward()
    # By hand: the slope at a state is 1, or the weight 0.25 where it is negative, which multiplies without rounding.
    assert leaf.grad is not None and scale.weight.grad is not None
    first = torch.where(start > 0, start, start * 0.25) + shift.detach()
    slope = torch.where(first > 0, 1.0, 0.25)
    assert torch.equal(leaf.grad, 2 * (1 + slope[0]))
    down = torch.where(start > 0, 0, start) * slope + torch.where(first > 0, 0, first)
    assert torch.equal(scale.weight.grad, down[0]) and down[0, 1] != 0


def test_threads_bring_tensors_of_their_own() -> None:
    own, found = threading.local(), dict[int, set[float]]()

    def step(s: Tensor) -> Tensor:
        return s * 0.5 + own.shift

    def run(i: int) -> None:
        own.shift = torch.full((2,), float(i))
        found[i] = {float(fxround.iterate(step, torch.zeros(2), 2, "reproducible")[0]) for _ in range(20)}

    threads = [threading.Thread(target=run, args=(i,)) for i in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: {1.5}, 2: {3.0}}


def test_a_change_in_place_is_an_error_and_does_not_happen() -> None:
    count, norm = torch.zeros(3), nn.BatchNorm1d(3)

    def step(s: Tensor) -> Tensor:
        count.add_(1)
        return s * count

    with pytest.raises(ValueError, match=r"the step changes count.* in place.*part of the state"):
        fxround.iterate(step, torch.ones(3), 2, "reproducible")
    with pytest.raises(ValueError, match=r"the step changes norm\.num_batches_tracked.*eval\(\)"):
        fxround.iterate(lambda s: norm(s), torch.ones(2, 3), 2, "reproducible")
    assert count.sum() == 0 and norm.num_batches_tracked == 0


def loop(s: Tensor, xs: Tensor) -> Any:
    return scan(lambda c, x: (c * SHIFT + x, c * 2), s, xs)


def branch(s: Tensor, xs: Tensor) -> Any:
    return torch.cond(xs.sum() > 0, lambda s: s * SHIFT, lambda s: s + 1, (s,))


@pytest.mark.parametrize("function", [loop, branch])
def test_a_loop_of_pytorch_reads_from_outside_in_a_function(function: Any) -> None:
    """A function holds what it reads; of a module that does not, the error names the tensor."""
    s, xs = torch.rand(3), torch.rand(4, 3)
    got = fxround.compile(function, "reproducible")(s, xs)
    if function is loop:
        want = [s]
        for x in xs:
            want.append(want[-1] * SHIFT + x)
        assert torch.equal(got[0], want[-1]) and torch.equal(got[1], torch.stack(want[:-1]) * 2)
    else:
        assert torch.equal(got, s * SHIFT)

    class Model(nn.Module):
        def forward(self, s: Tensor, xs: Tensor) -> Any:
            return function(s, xs)

    with pytest.raises(fxround.CaptureError, match=r"reads the tensor SHIFT.*pass it as an argument"):
        fxround.compile(Model(), "reproducible")(s, xs)


def test_a_step_that_calls_a_compiled_module_is_refused_with_the_remedy() -> None:
    compiled = fxround.compile(nn.Linear(3, 3), "bfloat16")
    with pytest.raises(TypeError, match="the step calls compiled, a compiled module: pass compiled itself as the step"):
        fxround.iterate(lambda s: compiled(s), torch.ones(3), 2, "bfloat16")
