"""Widths of stored integers: bit for bit two roundings by hand, in the memory that captured graphs read."""

from __future__ import annotations

import copy
import math
import pickle
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rationals import rounded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from weight_models import Mixed, Shared, Unreached, mlp, only_weights, rows

import fxround
from fxround.policy import Policy, Rule
from fxround.policy.policy import of_operands
from fxround.runtime.cpu.code import origins
from fxround.tuning import integers

FORMATS = {
    torch.float64: "binary64",
    torch.float32: "binary32",
    torch.float16: "binary16",
    torch.bfloat16: "bfloat16",
}


@cache
def once() -> nn.Module:
    return fxround.store_integers(mlp(), "int8:channel", rows())


def stored_mlp() -> Any:
    """A copy of ``mlp()`` with integers of 8 bits, which serve 2 to 8."""
    return copy.deepcopy(once())


def nearest(value: Fraction, dtype: torch.dtype) -> float:
    return rounded(value, False, fxround.Rounding.parse(f"{FORMATS[dtype]}/nearest_even/inf"))


def twice(w: float, scale: float, stored: int, served: int) -> tuple[int, int, Fraction]:
    """The stored and the served integer, and the exact product with the scale; Python rounds ties to even."""
    q = max(-(2 ** (stored - 1)), min(2 ** (stored - 1) - 1, round(Fraction(w) / Fraction(scale))))
    part = max(-(2 ** (served - 1)), min(2 ** (served - 1) - 1, round(Fraction(q, 2 ** (stored - served)))))
    return q, part, part * Fraction(scale) * 2 ** (stored - served)


def scales_by_hand(module: nn.Module, name: str) -> np.ndarray[Any, Any]:
    """The scale of each element: each number of the buffer for as many elements as share it."""
    values, shape = module.get_buffer(f"{name}_scale").double().numpy(), module.get_parameter(name).shape
    for d, size in enumerate(module.get_buffer(f"{name}_blocks").tolist()):
        values = np.repeat(values, size, axis=d).take(range(shape[d]), axis=d)
    return values


def require_by_hand(model: nn.Module, stored: nn.Module, name: str, served: int) -> None:
    w, given = stored.get_parameter(name).detach(), model.get_parameter(name).detach()
    held, bits = stored.get_buffer(f"{name}_integers"), stored.get_buffer(f"{name}_bits")
    assert bits[0] == served and held.dtype == (torch.int8 if bits[-1] <= 8 else torch.int16)
    scales = scales_by_hand(stored, name)
    for got, q, x, scale in zip(
        *(w.flatten().double().tolist(), held.flatten().tolist(), given.flatten().double().tolist()),
        scales.flatten().tolist(),
        strict=True,
    ):
        whole, _, exact = twice(x, scale, int(bits[-1]), served)
        assert q == whole
        wanted = nearest(exact, w.dtype)
        assert got == wanted and math.copysign(1, got) == math.copysign(1, wanted or 1.0)


@pytest.mark.parametrize("stored", [8, 5])
def test_every_integer_in_every_width(stored: int) -> None:
    every = torch.arange(-(2 ** (stored - 1)), 2 ** (stored - 1))
    for served in range(2, stored + 1):
        half, least, most = 2 ** (stored - served), -(2 ** (served - 1)), 2 ** (served - 1) - 1
        wanted = [max(least, min(most, round(Fraction(q, half)))) for q in every.tolist()]
        assert integers.narrow(every.to(torch.int8), stored, served).tolist() == wanted
        scale = torch.tensor(0.0123)
        numbers = integers.decode(every.to(torch.int8), scale, stored, served, torch.float32)
        assert numbers.tolist() == [nearest(q * Fraction(float(scale)) * half, torch.float32) for q in wanted]


def test_integers_of_sixteen_bits() -> None:
    every = torch.arange(-(2**15), 2**15)
    for served in (2, 3, 8, 9, 15, 16):
        half, least, most = 2 ** (16 - served), -(2 ** (served - 1)), 2 ** (served - 1) - 1
        wanted = [max(least, min(most, round(Fraction(q, half)))) for q in every.tolist()]
        assert integers.narrow(every.to(torch.int16), 16, served).tolist() == wanted


def test_quotients_are_rounded_once() -> None:
    """Quotients just beside a tie, which become the tie when they are divided in binary32 first."""
    scale = np.float32(0.1)
    ties = [np.float32((k + 0.5) * 0.1) for k in range(-100, 100)]
    beside = [np.nextafter(t, np.float32(side), dtype=np.float32) for t in ties for side in (-99, 99)]
    x = torch.tensor(np.array([*ties, *beside]))
    got = integers.encode(x, torch.tensor(scale), 8).tolist()
    assert got == [twice(float(v), float(scale), 8, 8)[0] for v in x.tolist()]
    divided = torch.tensor(np.round(x.numpy() / scale).astype(np.int64))
    assert (divided != torch.tensor(got)).any()


def test_the_first_rounding_has_the_mode_of_the_format() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, :4] = torch.tensor([127.0, 0.5, 2.5, -2.5])  # ties of the scale 1
    integers_of = {}
    for text in ("int8", "int8/nearest_away", "int8/stochastic"):
        stored = fxround.store_integers(model, only_weights(text), rows())
        integers_of[text] = stored[0].weight_integers[0, :4].tolist()
    assert integers_of["int8"] == integers_of["int8/stochastic"] == [127, 0, 2, -2]
    assert integers_of["int8/nearest_away"] == [127, 1, 3, -3]
    model[0].requires_grad_(False)
    data = [(rows(), torch.zeros(32, dtype=torch.int64))]
    options: dict[str, Any] = {"widths": (8,), "epochs": 1, "rate": 1e-30, "progress": False}
    trained = fxround.train_widths(model, only_weights("int8/nearest_away"), data, **options)
    assert trained[0].weight_integers[0, :4].tolist() == [127, 1, 3, -3]


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "text", ["int8:channel", "int8", "int8:3", "int6:8", "int12:channel", "scaled(int8;8,e8m0fnu,up)"]
)
def test_all_widths_are_two_roundings_by_hand(text: str) -> None:
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(3, 4, 10)
    policy = only_weights(text)
    stored = fxround.store_integers(model, policy, x)
    names = ["groups.weight", "back.weight", "attention.in_proj_weight", "attention.out_proj.weight", "head.weight"]
    assert sorted(stored.switch.bits) == sorted(names)
    rounded = fxround.quantize_weights(model, policy, x)
    assert all((stored.get_parameter(name) == rounded.get_parameter(name)).all() for name in names)
    for served in reversed(stored.switch.widths["head.weight"]):
        stored.switch(served)
        for name in names:
            require_by_hand(model, stored, name, served)
    assert stored.switch.widths["head.weight"][0] == 2


@pytest.mark.parametrize(
    "text, sizes", [("int8:channel", (16, 1)), ("int8", (1, 1)), ("int8:8", (16, 3)), ("int8:5", (16, 5))]
)
def test_scales_are_stored_once_for_a_block(text: str, sizes: tuple[int, int]) -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight.fill_(0.5)  # blocks whose scales are equal by chance
    stored = fxround.store_integers(model, text, rows())
    assert stored[0].weight_scale.shape == sizes
    largest = np.float32(0.5)
    assert (stored[0].weight_scale == float(nearest(Fraction(float(largest)) / 127, torch.float32))).all()


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    stored = fxround.store_integers(model, "int8:channel", rows().to(dtype))
    assert stored[0].weight_scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for served in (8, 5, 2):
        stored.switch(served)
        require_by_hand(model, stored, "0.weight", served)


def test_a_switch_captures_compiles_and_allocates_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)).eval()
    x = torch.randn(4, 1024)
    stored = fxround.store_integers(model, "int8:channel", x)
    compiled = fxround.compile(stored, "bfloat16", example_inputs=x)
    compiled(x)
    places = [p.data_ptr() for p in stored.parameters()]
    kernels, seen = origins(), {}
    for served in (4, 2, 7, 8):
        with Sizes() as sizes:
            compiled.switch(served)
        assert 0 < sizes.largest <= integers._PIECE < stored[0].weight.numel()
        seen[served] = compiled(x)
    assert len(compiled.captures()) == 1 and origins() == kernels
    assert [p.data_ptr() for p in stored.parameters()] == places
    fresh = fxround.store_integers(model, "int8:channel", x)
    fresh.switch(2)
    assert torch.equal(fxround.compile(fresh, "bfloat16")(x), seen[2])
    assert len({fxround.hash(result) for result in seen.values()}) == 4


class Sizes(TorchDispatchMode):
    """The elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, x.numel())
        return result


def test_layers_have_widths_of_their_own() -> None:
    model, x = mlp(), rows()
    stored = fxround.store_integers(model, "int8:channel", x, widths=(8, 4, 2))
    compiled = fxround.compile(stored, "reproducible", example_inputs=x)
    compiled.switch({"": 4, "2": 2})
    assert compiled.switch.bits == {"0.weight": 4, "2.weight": 2}
    compiled.switch({"0.weight": 8})
    assert compiled.switch.bits == {"0.weight": 8, "2.weight": 2}
    require_by_hand(model, stored, "0.weight", 8)
    require_by_hand(model, stored, "2.weight", 2)
    assert "0.weight: 8 of 2, 4, 8 bits" in repr(compiled.switch)
    assert torch.equal(fxround.compile(stored, "reproducible")(x), compiled(x))


def test_rules_choose_weights_and_stored_widths() -> None:
    kept = of_operands(
        "kept", Rule(role="weight", operands="int8:channel"), Rule("2", role="weight", operands="int4:8")
    )
    stored = fxround.store_integers(mlp(), kept, rows(), widths=(8, 4, 3))
    assert stored.switch.widths == {"0.weight": (3, 4, 8), "2.weight": (3, 4)}
    stored.switch(3)
    with pytest.raises(ValueError, match=r"weight 2\.weight is not stored for 8 bits; expected one of 3, 4"):
        stored.switch(8)
    assert stored.switch.bits == {"0.weight": 3, "2.weight": 3}
    alone = of_operands("first", Rule("0", role="weight", operands="int8:channel"))
    model = mlp()
    stored = fxround.store_integers(model, alone, rows())
    assert list(stored.switch.bits) == ["0.weight"] and torch.equal(stored[2].weight, model[2].weight)


def test_state_copies_and_files_keep_integers_scales_and_widths(tmp_path: Path) -> None:
    model, x = mlp(), rows()
    stored = fxround.store_integers(model, "int8:channel", x)
    compiled = fxround.compile(stored, "bfloat16", example_inputs=x)
    compiled.switch({"0": 3, "2": 5})
    wanted = compiled(x)
    other = fxround.store_integers(mlp(seed=1), "int8:channel", x)
    again = fxround.compile(other, "bfloat16", example_inputs=x)
    again.load_state_dict(compiled.state_dict())
    assert again.switch.bits == {"0.weight": 3, "2.weight": 5} and torch.equal(again(x), wanted)
    for made in (again, copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        made.switch(2)
        assert compiled.switch.bits == {"0.weight": 3, "2.weight": 5} and torch.equal(compiled(x), wanted)
        require_by_hand(model, made.source, "2.weight", 2)
    loaded = fxround.load(compiled.export(tmp_path / "model.pt2", x))
    switch = fxround.Switch(loaded.program)
    assert switch.bits == compiled.switch.bits and torch.equal(loaded(x), wanted)
    switch(6)
    compiled.switch(6)
    assert torch.equal(loaded(x), compiled(x))


def test_a_program_with_gradients_and_a_model_around_switch_too(tmp_path: Path) -> None:
    stored = stored_mlp().train()
    compiled = fxround.compile(stored, "bfloat16")
    loaded = fxround.load(compiled.export(tmp_path / "model.pt2", rows().requires_grad_(), gradients=True))
    around = fxround.compile(nn.Sequential(stored), "bfloat16", example_inputs=rows())
    for bits in (4, 2):
        stored.switch(bits)
        fxround.Switch(loaded.program)(bits)
        assert set(fxround.Switch(around).bits.values()) == {bits}
        results = []
        for module in (compiled, loaded, around):
            x = rows().requires_grad_()
            y = module(x)
            y.square().sum().backward()
            assert x.grad is not None
            results.append((y, x.grad))
        for y, gradient in results[1:]:
            assert torch.equal(y, results[0][0]) and torch.equal(gradient, results[0][1])


def test_the_model_and_generators_stay_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)).train()
    model[1].eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with torch.inference_mode():
        stored = fxround.store_integers(model, "int8:channel", rows())
        stored.switch(4)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(model.state_dict()) == list(before) and all(
        torch.equal(v, before[n]) for n, v in model.state_dict().items()
    )
    assert [m.training for m in stored.modules()] == [m.training for m in model.modules()]
    assert not hasattr(model, "switch")
    require_by_hand(model, stored, "0.weight", 4)


def test_a_layout_that_is_not_row_major_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    stored = fxround.store_integers(model, "int8:channel", torch.randn(1, 3, 5, 5))
    strides = stored[0].weight.stride()
    stored.switch(3)
    assert stored[0].weight.stride() == strides == model[0].weight.stride()
    require_by_hand(model, stored, "0.weight", 3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("compiles", [True, False])
def test_a_switch_between_a_forward_and_its_backward_pass_is_an_error(training: bool, compiles: bool) -> None:
    stored = stored_mlp().train(training)
    module: Any = fxround.compile(stored, "reproducible") if compiles else stored
    x = rows().requires_grad_()
    result = module(x).sum()
    module.switch(4)
    with pytest.raises((RuntimeError, fxround.FxroundError), match=r"modified by an inplace operation|was changed"):
        result.backward()
    x.grad = None
    module(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_a_switch_inside_of_a_backward_pass_is_refused() -> None:
    stored = stored_mlp()
    x = rows().requires_grad_()
    y = stored(x)
    y.register_hook(lambda gradient: stored.switch(4))
    with pytest.raises(fxround.FxroundError, match="inside of a backward pass"):
        y.sum().backward()
    assert set(stored.switch.bits.values()) == {8}


def test_changed_weights_are_not_lost_unnoticed() -> None:
    model, stored = mlp(), stored_mlp()
    optimizer = torch.optim.SGD(stored.parameters(), 0.1)
    stored(rows()).sum().backward()
    optimizer.step()
    changed = stored[2].weight.detach().clone()
    for bits in (4, {"2": 4}):
        with pytest.raises(ValueError, match=r"is not its integers in 8 bits any more.*overwrite=True"):
            stored.switch(bits)
    assert torch.equal(stored[2].weight, changed) and set(stored.switch.bits.values()) == {8}
    stored.switch(4, overwrite=True)
    require_by_hand(model, stored, "2.weight", 4)
    with torch.no_grad():
        stored[0].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"0\.weight is not its integers in 4 bits"):
        stored.switch(8)


def test_integers_alone_make_a_file_and_restore_the_weights() -> None:
    stored = stored_mlp()
    state = {name: value for name, value in stored.state_dict().items() if name not in stored.switch.bits}
    other = fxround.store_integers(mlp(seed=1), "int8:channel", rows())
    other.load_state_dict(state, strict=False)
    other.switch(8, overwrite=True)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), stored.parameters(), strict=True))


def with_first(value: float) -> nn.Module:
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0] = value
    return model


def named(model: nn.Module, name: str, value: Any) -> nn.Module:
    setattr(model, name, value)
    return model


def with_buffer(name: str) -> nn.Module:
    model = mlp()
    model[0].register_buffer(name, torch.zeros(1))
    return model


@pytest.mark.parametrize(
    "model, policy, options, said",
    [
        (Shared(24), "int8:channel", {}, "is shared: a, b read it"),
        (Unreached(24), "int8:channel", {}, r"never reach the weight spare\.weight"),
        (nn.ReLU(), "int8:channel", {}, "rounds no weight|matches nothing|no operation"),
        (with_first(math.nan), "int8:channel", {}, r"the weight 0\.weight has NaNs or infinities"),
        (with_first(math.inf), "int8:channel", {}, r"the weight 0\.weight has NaNs or infinities"),
        (with_first(3.4e38), "int8:channel", {}, r"0\.weight: -2\^7 times its scale overflows torch\.float32"),
        (mlp(), "uint8:channel", {}, "expected symmetric integers of 2 to 16 bits"),
        (mlp(), "nvfp4", {}, "expected symmetric integers"),
        (mlp(), "scaled(int8;tensor,binary32,inverse)", {}, "expected symmetric integers"),
        (mlp(), "reproducible", {}, "rounds no weight"),
        (mlp(), "int8:channel", {"widths": (8, 1)}, "widths has 1; expected 2 to 16 bits"),
        (mlp(), "int8:channel", {"widths": (8, 17)}, "widths has 17"),
        (mlp(), "int8:channel", {"widths": (9, 8)}, "widths has 9, and the policy stores at most 8 bits"),
        (mlp(), "int8:channel", {"widths": (4, 2)}, "is stored in 8 bits; expected this width"),
        (mlp(), "int8:channel", {"widths": ()}, "widths is empty"),
        (named(mlp(), "switch", 1), "int8:channel", {}, "an attribute 'switch'"),
        (with_buffer("weight_scale"), "int8:channel", {}, "module 0 has an attribute weight_scale"),
    ],
)
def test_what_cannot_be_stored(model: nn.Module, policy: str, options: dict[str, Any], said: str) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=said):
        fxround.store_integers(model, policy, rows(), **options)
    assert list(model.state_dict()) == list(before)


@pytest.mark.parametrize("widths", [8, "84", (8, 4.0), (8, True), None])
def test_types_of_widths(widths: Any) -> None:
    if widths is None:
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
            fxround.store_integers(lambda x: x, "int8:channel", rows())  # type: ignore[arg-type]
        return
    with pytest.raises(TypeError, match="widths"):
        fxround.store_integers(mlp(), "int8:channel", rows(), widths=widths)


@pytest.mark.parametrize(
    "bits, error, said",
    [
        (3, ValueError, r"the weight 0\.weight is not stored for 3 bits; expected one of 2, 4, 8"),
        (16, ValueError, "not stored for 16 bits"),
        (0, ValueError, "not stored for 0 bits"),
        (-4, ValueError, "not stored for -4 bits"),
        (4.0, TypeError, r"the width of the weight 0\.weight is a float; expected an int, one of 2, 4, 8"),
        (True, TypeError, "is a bool"),
        ("4", TypeError, "is a str"),
        (None, TypeError, "is a NoneType"),
        ({}, ValueError, "bits is empty"),
        ({"0": 4, "2": 3}, ValueError, r"the weight 2\.weight is not stored for 3 bits"),
        ({"0.wieght": 4}, ValueError, r"no stored weight is '0\.wieght' or inside of it; did you mean '0\.weight'"),
        ({"1": 4}, ValueError, "no stored weight is '1'"),
        ({1: 4}, ValueError, "no stored weight is 1"),
    ],
)
def test_widths_that_cannot_be_served(bits: Any, error: type[Exception], said: str) -> None:
    stored = stored_mlp()
    for layer in (stored[0], stored[2]):
        layer.weight_bits = torch.tensor([8, 2, 4, 8])
    before = {name: value.clone() for name, value in stored.state_dict().items()}
    with pytest.raises(error, match=said):
        fxround.compile(stored, "bfloat16").switch(bits)
    assert all(torch.equal(value, before[name]) for name, value in stored.state_dict().items())


def test_converted_scales_and_modules_without_integers_are_refused() -> None:
    stored = stored_mlp().to(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"the scales of the weight 0\.weight are torch\.bfloat16; expected torch\.float32"
    ):
        stored.switch(4)
    with pytest.raises(ValueError, match="no stored integers"):
        fxround.Switch(mlp())(4)


def test_a_rule_keeps_what_is_shared() -> None:
    kept = Policy.parse("int8:channel").with_rules(Rule("spare", role="weight", operands="identity", optional=True))
    stored = fxround.store_integers(Unreached(24), kept, rows())
    assert list(stored.switch.bits) == ["used.weight"]
