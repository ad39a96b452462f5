"""Every tensor of a model stays on the model's device.

PyTorch's "meta" device, whose tensors hold no data, stands for a GPU here. Nothing may read a value on the way:
a read from a device's memory waits for the device, and a meta tensor has nothing to read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.runtime.cuda.launcher import Text, launching

POLICIES = ["stochastic", "nvfp4_training", "int8"]


class Sink:
    """A launcher that runs nothing and notes on which devices it would."""

    def __init__(self) -> None:
        self.devices: set[str] = set()

    def launch(self, text: Text, blocks: int, arguments: Sequence[Any], device: torch.device) -> None:
        self.devices.add(str(device))

    def has_slow_binary64(self, device: torch.device) -> bool:
        return False

    def copies_async(self, device: torch.device) -> bool:
        return True


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Sink:
    for module in ("graph.dtypes", "runtime.operands", "capture.refusals"):
        monkeypatch.setattr(f"fxround.{module}.DEVICES", ("cpu", "meta"))
    return Sink()


class Images(nn.Module):
    """Convolutions, norms, pooling, interpolation, dropout, and a constant made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.up, self.groups = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.GroupNorm(2, 4)
        self.larger = nn.Upsample(scale_factor=2, mode="bilinear")
        self.largest, self.mean = nn.MaxPool2d(2), nn.AvgPool2d(3, 2, 1, count_include_pad=False)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(256, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.groups(self.up(self.norm(self.first(x)))))
        x = self.dropout(self.mean(self.larger(self.largest(x))))
        return self.head(x.flatten(1)) + torch.arange(0.0, 1.0, 0.2, device=x.device)


class Tokens(nn.Module):
    """An embedding, attention, sums along a dimension and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        self.recurrent = nn.LSTM(16, 5, batch_first=True)
        self.pool = nn.AdaptiveAvgPool1d(3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.recurrent(self.layer(self.tokens(tokens)))[0]
        return self.pool(x.transpose(1, 2)).cumsum(1)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "images": (Images, lambda: torch.randn(4, 3, 8, 8)),
    "tokens": (Tokens, lambda: torch.zeros(3, 4, dtype=torch.long)),
}


@pytest.mark.part("images")
@pytest.mark.parametrize("name", CASES)
def test_a_model_stays_on_its_device(sink: Sink, name: str) -> None:
    build, example = CASES[name]
    model, x = build().to("meta"), example().to("meta")
    if x.is_floating_point():
        x.requires_grad_()
    captured = fxround.compile(model, POLICIES[0])
    with launching(sink):
        captured(x)
    for policy in POLICIES:
        # Seed and sample have no values, which only kernels may read.
        compiled = captured.with_policy(policy).reseed(1, device="meta")
        sink.devices.clear()
        with launching(sink):
            y = compiled(x)
            wanted = [*model.parameters(), *([x] if x.requires_grad else [])]
            gradients = torch.autograd.grad(y.square().sum(), wanted)
        assert {str(t.device) for t in (y, *gradients, *model.buffers())} == {"meta"}, policy
        assert sink.devices == {"meta"}, policy


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_training_step_stays_on_its_device(sink: Sink, optimizer: type[torch.optim.Optimizer]) -> None:
    model, x = Images().to("meta"), torch.randn(4, 3, 8, 8, device="meta")
    compiled = fxround.compile(model, "stochastic").reseed(1, device="meta")
    steps = fxround.compile_optimizer(optimizer(model.parameters(), lr=0.1), "stochastic")
    with launching(sink):
        compiled(x).sum().backward()
        steps.step()
    states = [t for state in steps.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()]
    assert {str(t.device) for t in (*model.parameters(), *states)} == {"meta"}
    assert sink.devices == {"meta"}


@pytest.mark.parametrize(
    "target",
    ["bfloat16", "e4m3fn/stochastic", "mxfp8", "nvfp4", "int8:channel", "int8:percentile=99.9", "nf4/stochastic"],
)
def test_a_rounding_stays_on_its_device(sink: Sink, target: str) -> None:
    with launching(sink):
        assert str(fxround.round(torch.randn(8, 64, device="meta"), target).device) == "meta"
    assert sink.devices == {"meta"}
