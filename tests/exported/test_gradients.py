"""Exported gradients: a loaded program trains to the bits of the compiled module that was exported."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import fxround
from fxround.errors import FxroundError


class Net(nn.Module):
    """A convolution, a batch norm whose buffers change, dropout, and a tied and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.first = nn.Linear(4 * 16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight.requires_grad_(False)
        self.third = nn.Linear(16, 16)
        self.third.bias = self.second.bias

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        h = self.drop(self.norm(self.conv(x)).relu()).flatten(1)
        h = self.first(h if scale is None else h * scale)
        return {"class": h.argmax(-1), "y": self.third(self.second(h).tanh()), "unused": h.exp()}


def loaded(compiled: Any, inputs: Any, tmp_path: Path) -> Any:
    return fxround.load(compiled.export(tmp_path / "model.pt2", inputs, gradients=True))


@pytest.mark.part("reproducible-False")
@pytest.mark.parametrize("policy, training", [("stochastic", True), ("reproducible", False)])
def test_a_loaded_program_trains_to_the_same_bits(policy: str, training: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net().train(training)
    compiled = fxround.compile(model, policy, seed=3, strict=False)
    program = loaded(compiled, torch.randn(4, 1, 4, 4), tmp_path)
    names = dict(program.program.named_parameters())
    assert not names["second.weight"].requires_grad
    ours = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    theirs = torch.optim.SGD([p for p in program.parameters() if p.requires_grad], lr=0.1)
    for batch in (4, 7, 2):
        x = torch.randn(batch, 1, 4, 4)
        for module, optimizer in ((compiled, ours), (program, theirs)):
            optimizer.zero_grad()
            found = module(x)
            (found["y"].square().sum() + found["y"].mean()).backward()
            optimizer.step()
        assert torch.equal(compiled.rng, program.program.get_buffer("fxround_rng"))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, names[name]), name
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, program.program.get_buffer(name)), name


def test_arguments_have_gradients_and_unused_results_none(tmp_path: Path) -> None:
    model = Net().eval()
    compiled = fxround.compile(model, "stochastic", seed=1)
    x, scale = torch.randn(3, 1, 4, 4), torch.rand(64, requires_grad=True)
    program = loaded(compiled, (x, scale), tmp_path)
    wanted = torch.autograd.grad(compiled(x, scale)["unused"].sum(), [scale, model.conv.weight])
    names = dict(program.program.named_parameters())
    found = torch.autograd.grad(program(x, scale)["unused"].sum(), [scale, names["conv.weight"]])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    result = program(x, scale)
    assert not result["class"].requires_grad
    result["unused"].sum().backward(retain_graph=True)
    assert names["third.weight"].grad is None
    first = scale.grad.clone()
    result["unused"].sum().backward()
    assert torch.equal(scale.grad, first + first)
    with torch.no_grad():
        assert not program(x, scale)["y"].requires_grad


def test_a_gradient_that_the_program_lacks_is_an_error(tmp_path: Path) -> None:
    x = torch.randn(3, 1, 4, 4)
    program = loaded(fxround.compile(Net().eval(), "reproducible"), x, tmp_path)
    with pytest.raises(FxroundError, match="argument 0 requires a gradient, which the program does not compute"):
        program(x.requires_grad_())
    dict(program.program.named_parameters())["second.weight"].requires_grad_()
    with pytest.raises(FxroundError, match=r"parameter second\.weight requires a gradient"):
        program(x.detach())


def test_a_parameter_that_changes_before_the_backward_pass_is_an_error(tmp_path: Path) -> None:
    x = torch.randn(3, 1, 4, 4)
    program = loaded(fxround.compile(Net().eval(), "reproducible"), x, tmp_path)
    y = program(x)["y"].sum()
    with torch.no_grad():
        dict(program.program.named_parameters())["conv.weight"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_what_has_no_gradient_is_not_exported_with_one(tmp_path: Path) -> None:
    frozen = Net().eval().requires_grad_(False)
    with pytest.raises(FxroundError, match="depends on anything that requires a gradient"):
        fxround.compile(frozen, "reproducible").export(tmp_path / "a.pt2", torch.randn(2, 1, 4, 4), gradients=True)
    delayed = fxround.compile(nn.Linear(8, 8), "fp8_delayed", strict=False)
    with pytest.raises(FxroundError, match="is a scale that is state"):
        delayed.export(tmp_path / "a.pt2", torch.randn(4, 8), gradients=True)
    assert not (tmp_path / "a.pt2").exists()


def test_packed_sequences_of_all_lengths_and_of_one_number(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.GRU(2, 3).eval()
    compiled = fxround.compile(model, "reproducible")
    packed = [pack_sequence([torch.randn(n, 2) for n in lengths]) for lengths in ((3, 2), (5, 1), (2, 2, 1))]
    program = loaded(compiled, (packed[0],), tmp_path)
    for argument in packed[:2]:
        found = []
        for module, parameters in ((compiled, model.parameters()), (program, program.parameters())):
            y, last = module(argument)
            found.append((y.data, *torch.autograd.grad(y.data.square().sum() + last.sum(), list(parameters))))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with pytest.raises(ValueError, match="have 3 sequences, and the program was exported for 2: export one for"):
        program(packed[2])


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = fxround.compile(nn.Linear(3, 2), "reproducible").export(
        tmp_path / "m.pt2", torch.randn(2, 3), gradients=True
    )
    content = path.read_bytes()
    place = content.index(b"fxround/gradients.pt2") + 200
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(ValueError, match="changed"):
        fxround.load(path)


TRAINS = """
import sys, torch, fxround
program = fxround.load(sys.argv[1])
x = torch.arange(12.0).reshape(4, 3)
program(x).square().sum().backward()
print([value.hex() for p in program.parameters() for value in p.grad.flatten().tolist()])
"""


@pytest.mark.long
def test_another_process_trains_without_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    compiled = fxround.compile(copy.deepcopy(model), "stochastic", seed=9)
    path = compiled.export(tmp_path / "m.pt2", torch.randn(2, 3), gradients=True)
    compiled(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", TRAINS, str(path)], check=True, capture_output=True)
    assert found.stdout.decode().strip() == str(
        [value.hex() for p in compiled.parameters() for value in p.grad.flatten().tolist()]
    )


class Masked(nn.Module):
    """A product with a constant, and a result that is changed in place to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        y[:, 0] = 0
        return y


def test_a_model_with_constants_trains(tmp_path: Path) -> None:
    model, x = Masked(), torch.randn(3, 4)
    compiled = fxround.compile(model, "stochastic", seed=3)
    program = loaded(compiled, x, tmp_path)
    for module in (compiled, program):
        module(x).square().sum().backward()
    assert model.linear.weight.grad is not None and model.linear.weight.grad.any()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(program.parameters(), model.parameters(), strict=True))


def test_a_program_has_one_mode_and_one_dtype(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    program = loaded(fxround.compile(Masked(), "identity"), x, tmp_path)
    assert program.training and program.train() is program
    with pytest.raises(FxroundError, match=r"exported after model\.train\(\).*: call model\.eval\(\) on the model"):
        program.eval()
    with pytest.raises(FxroundError, match=r"here torch\.float32: convert the model"):
        program.to(torch.float64)
    assert program.float() is program and program(x).dtype == torch.float32
    fixed = fxround.load(fxround.compile(Masked().eval(), "identity").export(tmp_path / "fixed.pt2", x))
    assert fixed.eval() is fixed and not fixed.training
    with pytest.raises(FxroundError, match=r"exported after model\.eval\(\)"):
        fixed.train()
