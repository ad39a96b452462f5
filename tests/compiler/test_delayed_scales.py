"""Delayed scales: multipliers and operands equal the specification over rational numbers, step by step."""

from __future__ import annotations

import copy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.compiler.torch_backend import rounding_backend
from fxround.errors import FxroundError, PolicyError
from fxround.graph.dtypes import FORMAT_OF
from fxround.localization.masked_model import Masked
from fxround.numerics.formats import Format
from fxround.numerics.formats.scaled import ScaledFormat, ScaledRounding
from fxround.numerics.specification.exact_scaled import largest, multiplied, next_multiplier
from fxround.policy import Policy, Rule, delayed_scaling


def small(history: int = 3, **choices: Any) -> Policy:
    """Delayed scales, and products with an accumulator of binary32."""
    policy = delayed_scaling(history=history, **choices)
    return policy.with_rules(Rule(operator="contraction", accumulate="binary32"))


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(12, 5, bias=False)


def rounded(x: Tensor, multiplier: Fraction, text: str) -> Tensor:
    stored, bits = Format.parse(FORMAT_OF[x.dtype]), [0] * x.numel()
    found = multiplied(x.reshape(-1).tolist(), multiplier, ScaledRounding.parse(text), stored, bits)
    return torch.tensor(found, dtype=x.dtype).reshape(x.shape)


@pytest.mark.part(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("margin", [0, 2])
def test_operands_and_scales_of_every_step_are_the_specification_s(dtype: torch.dtype, margin: int) -> None:
    model = layer().to(dtype)
    compiled = fxround.compile(model, small(margin=margin))
    text = f"scaled({{}};tensor,binary32,delayed,history=3,margin={margin})"
    texts = {"input0": text.format("e4m3fn"), "weight0": text.format("e4m3fn"), "error0": text.format("e5m2")}
    multipliers, histories = dict.fromkeys(texts, Fraction(1)), {name: [Fraction(0)] * 3 for name in texts}
    for step, size in enumerate((1.0, 30.0, 0.001, 0.0, 0.0, 0.0, 0.0, 5.0)):
        x = (torch.randn(4, 12) * size).to(dtype).requires_grad_()
        g = (torch.randn(4, 5) * size * 100).to(dtype)
        values = {"input0": x.detach(), "weight0": model.weight.detach(), "error0": g}
        wanted = {name: rounded(v, multipliers[name], texts[name]) for name, v in values.items()}
        seen = [v for name, v in compiled.observe_step({0: g}, x) if "_operand" in name]
        reads = [wanted[name] for name in ("input0", "weight0", "error0", "input0", "error0", "weight0")]
        for value in reads:
            assert any(torch.equal(value, s) or torch.equal(value.t(), s) for s in seen), step
        assert len(seen) == 6
        model.weight.grad = None
        compiled(x).backward(g)
        for name, value in values.items():
            histories[name] = [largest(value.reshape(-1).tolist()), *histories[name][:-1]]
            multipliers[name] = next_multiplier(
                max(histories[name]), multipliers[name], ScaledRounding.parse(texts[name])
            )
        state = {name: list(map(Fraction, s.tolist())) for name, s in compiled.delayed_scales.items()}
        assert state == {name: [multipliers[name], *histories[name]] for name in texts}
        with torch.no_grad():
            model.weight.mul_(0.5 + step)


def test_infinities_take_no_part_and_tiny_magnitudes_saturate_the_multiplier() -> None:
    compiled = fxround.compile(layer(), small(1))
    x = torch.randn(4, 12)
    x[0, 0], x[1, 1] = torch.inf, torch.nan
    compiled(x)
    assert compiled.delayed_scales["input0"][1] == x[x.isfinite()].abs().max()
    compiled(torch.full((4, 12), 2.0**-149))
    assert compiled.delayed_scales["input0"][0] == torch.finfo(torch.float32).max


def test_only_calls_that_train_change_the_scales() -> None:
    model = layer()
    compiled, x = fxround.compile(model, small()), torch.randn(4, 12)
    compiled(x).sum().backward()
    before = compiled.state_dict()
    with torch.no_grad():
        compiled(x * 9)
    compiled.eval()
    first = compiled(x * 9)
    first.sum().backward()
    compiled.evaluate(x * 9)
    list(compiled.observe(x * 9))
    assert torch.equal(first, compiled(x * 9))
    after = compiled.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_a_gradient_in_eval_mode_reads_the_scales_of_its_call() -> None:
    model, x = layer(), torch.randn(4, 12)
    compiled = fxround.compile(model, small())
    compiled(x).sum().backward()

    def gradient(trains_between: bool) -> Tensor:
        own = copy.deepcopy(compiled)
        own.eval()
        leaf = (3 * x).requires_grad_()
        result = own(leaf)
        if trains_between:
            own.train()
            own(x * 50).sum().backward()
            own.eval()
        result.square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert torch.equal(gradient(False), gradient(True))


def test_two_calls_before_their_backward_passes_count_as_two_steps() -> None:
    compiled, x = fxround.compile(layer(), small()), torch.randn(4, 12)
    (compiled(x).sum() + 2 * compiled(x).sum()).backward()
    assert sorted(compiled.delayed_scales["error0"][1:].tolist()) == [0.0, 1.0, 2.0]
    most = float(x.abs().max())
    assert compiled.delayed_scales["input0"][1:].tolist() == [most, most, 0.0]


def test_a_saved_training_goes_on_with_the_same_bits() -> None:
    def steps(compiled: fxround.RoundedModule, first: int, last: int) -> dict[str, str]:
        optimizer = torch.optim.SGD(compiled.parameters(), 0.1)
        for step in range(first, last):
            torch.manual_seed(step)
            optimizer.zero_grad()
            compiled(torch.randn(4, 12)).square().sum().backward()
            optimizer.step()
        return {key: fxround.hash(value) for key, value in compiled.state_dict().items()}

    policy = small(2, forward="e4m3fn", backward="e5m2")
    one = fxround.compile(layer(), policy)
    steps(one, 0, 3)
    two = fxround.compile(layer(), policy)
    two.load_state_dict(one.state_dict())
    three = copy.deepcopy(one)
    assert steps(one, 3, 6) == steps(two, 3, 6) == steps(three, 3, 6)
    parent = nn.ModuleDict({"part": two})
    other = nn.ModuleDict({"part": fxround.compile(layer(), policy)})
    other.load_state_dict(parent.state_dict())
    assert other["part"].delayed_scales.keys() == two.delayed_scales.keys()
    longer = fxround.compile(layer(), small(7))
    longer.load_state_dict(one.state_dict())
    with pytest.raises(FxroundError, match="float32 and 2 steps, and the policy needs"):
        longer(torch.randn(4, 12))
    wrong = {**one.state_dict(), "fxround_scales.input0": torch.ones(())}
    with pytest.raises(RuntimeError, match="expected a multiplier and the largest magnitudes"):
        two.load_state_dict(wrong)
    plain = layer()
    two.load_state_dict(plain.state_dict())
    assert two.delayed_scales


def test_shared_values_have_one_scale_and_convolutions_and_attention_have_theirs() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.q, self.k = nn.Conv1d(6, 8, 3, padding=1, groups=2), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x).transpose(1, 2)
            return self.q(h) @ self.k(h).transpose(1, 2)

    compiled, x = fxround.compile(Net(), small()), torch.randn(2, 6, 5)
    compiled(x).sum().backward()
    assert not compiled.leaks()
    forward = {"conv.input0", "conv.weight0", "q.activation0", "q.weight0", "k.weight0", "activation0", "activation1"}
    names = set(compiled.delayed_scales)
    assert forward <= names and all("error" in name for name in names - forward)
    compiled.eval()
    with torch.no_grad():
        compiled(x)
    assert set(compiled.delayed_scales) == names


def test_files_keep_the_scales_and_other_entries_refuse_them(tmp_path: Path) -> None:
    model, x = layer(), torch.randn(4, 12)
    compiled = fxround.compile(model, small())
    compiled(x * 3).sum().backward()
    compiled.eval()
    with torch.no_grad():
        compiled.export(tmp_path / "model.pt2", x)
        assert torch.equal(fxround.load(tmp_path / "model.pt2")(x), compiled(x))
    module = torch.compile(model, backend=rounding_backend, options={"policy": small()}, fullgraph=True)
    with pytest.raises(PolicyError, match="state of a compiled module"):
        module(x)
    with pytest.raises(ValueError, match="a delayed scale is state of a compiled model"):
        fxround.round(x, "scaled(e4m3fn;tensor,binary32,delayed)")
    fresh = fxround.compile(model, small())
    with torch.no_grad():
        fresh.export(tmp_path / "fresh.pt2", x)
        assert torch.equal(fxround.load(tmp_path / "fresh.pt2")(x), fresh(x))
    masked = Masked(model, small(), x)
    assert torch.equal(masked.run(masked.sites), fxround.compile(model, small()).eval()(x))


def test_models_with_python_state_train_with_delayed_scales() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = layer(), {"made": 0}

        def forward(self, x: Tensor) -> Tensor:
            self.calls["made"] += 1
            return self.layer(x)

    model, x = Counts(), torch.randn(4, 12)
    compiled = fxround.compile(model, small())
    for step in range(1, 4):
        compiled(x * step).sum().backward()
        assert model.calls["made"] == step
        assert compiled.delayed_scales["layer.input0"][1] == (x * step).abs().max()


def test_texts() -> None:
    found = ScaledFormat.parse("scaled(e4m3fn;tensor,binary32,delayed)")
    assert found.scaling is not None and found.scaling.history == 1024
    assert ScaledFormat.parse(str(found)) == found
    assert Policy.from_toml(small().to_toml()) == small()
    assert "16 earlier steps" in str(fxround.describe("scaled(e4m3fn;tensor,binary32,delayed,history=16)"))
    assert delayed_scaling(most_recent=True).rules[-1] == delayed_scaling(history=1).rules[-1]
    for text, said in (
        ("scaled(e4m3fn;32,binary32,delayed)", "belong to whole tensors"),
        ("scaled(e4m3fn;tensor,binary32,delayed,history=0)", "expected 1 to 65536"),
        ("scaled(e4m3fn;tensor,binary32,delayed,margin=0.5)", "expected an integer for margin"),
        ("scaled(e4m3fn;tensor,binary32,inverse,history=4)", "0 for others"),
        ("scaled(e4m3fn;tensor,binary16,delayed)", "in binary32 or powers of two"),
    ):
        with pytest.raises(ValueError, match=said):
            ScaledFormat.parse(text)
    with pytest.raises(PolicyError, match="goes without a transform"):
        Rule(operands="hadamard(16)+scaled(e4m3fn;tensor,binary32,delayed)")
