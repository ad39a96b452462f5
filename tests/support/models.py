"""The models of the tests: small, random weights, no downloads. ``ZOO`` maps a name to a function that builds one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from benchmarks.harness import vision_operators


@dataclass(frozen=True)
class Example:
    """A model in eval mode, arguments for it, and the tensor of its result that the tests compare."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Callable[[Any], Tensor]


def unfused(compiled: fxround.RoundedModule) -> fxround.RoundedModule:
    """The same captured graphs, run operation by operation."""
    compiled.__dict__["fuse"] = False
    try:
        return compiled.with_policy(compiled.policy)
    finally:
        compiled.__dict__["fuse"] = True


class DigitsCNN(nn.Module):
    """conv, relu, pool, twice; then a linear classifier: an MNIST-style network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3)
        self.drop, self.fc = nn.Dropout(0.25), nn.Linear(8 * 9, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x))
        return F.log_softmax(self.fc(self.drop(torch.flatten(x, 1))), dim=1)


class _DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        layers = (nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU())
        super().__init__(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU())


class UNet(nn.Module):
    """Two levels down, two up (one by interpolation, one by a transposed convolution), with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down, self.bottom = _DoubleConv(1, 4), _DoubleConv(4, 8), _DoubleConv(8, 8)
        self.rise = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.up1, self.lift, self.up2 = _DoubleConv(16, 4), nn.ConvTranspose2d(4, 4, 2, stride=2), _DoubleConv(8, 4)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.inc(x)
        b = self.down(F.avg_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        y = self.up1(torch.cat([self.rise(c), b], 1))
        y = self.up2(torch.cat([self.lift(y), a], 1))
        return torch.sigmoid(self.out(y))


class Recurrent(nn.Module):
    """An LSTM and a GRU after an embedding, and a classifier of their last states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(11, 6), nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.gru, self.head = nn.GRU(5, 4, batch_first=True, bidirectional=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        y, _ = self.lstm(self.embed(tokens))
        y, _ = self.gru(y)
        return self.head(y[:, -1])


@cache
def vision() -> Any:
    """torchvision. With a CPU build of torch its compiled operators may be missing: declare them and try again."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        vision_operators()
        return importlib.import_module("torchvision")


def hugging_face() -> Any:
    """transformers, which imports torchvision where that is installed."""
    vision()
    return importlib.import_module("transformers")


def metrics_of_torch() -> Any:
    """torchmetrics, which imports torchvision where that is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        vision()
    return importlib.import_module("torchmetrics")


def _randomized(model: nn.Module) -> nn.Module:
    """Eval mode, with running statistics that are not those of a fresh model."""
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    return model.eval()


def digits_cnn() -> Example:
    return Example(_randomized(DigitsCNN()), (torch.randn(3, 1, 10, 10),), {}, lambda out: out)


def unet() -> Example:
    return Example(_randomized(UNet()), (torch.randn(2, 1, 16, 16),), {}, lambda out: out)


def recurrent() -> Example:
    return Example(_randomized(Recurrent()), (torch.randint(0, 11, (3, 4)),), {}, lambda out: out)


def resnet18() -> Example:
    model = vision().models.resnet18(num_classes=10)
    return Example(_randomized(model), (torch.randn(2, 3, 32, 32),), {}, lambda out: out)


def encoder() -> Example:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = True
    return Example(_randomized(model), (torch.randn(3, 5, 16),), {"src_key_padding_mask": mask}, lambda out: out)


def vit() -> Example:
    transformers = hugging_face()
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4
    )
    model = transformers.ViTForImageClassification(config)
    return Example(_randomized(model), (), {"pixel_values": torch.randn(2, 3, 16, 16)}, lambda out: out.logits)


def bert() -> Example:
    transformers = hugging_face()
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    kwargs = {"input_ids": torch.randint(3, 60, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.long)}
    kwargs["attention_mask"][0, 4:] = 0
    model = transformers.BertForSequenceClassification(config)
    return Example(_randomized(model), (), kwargs, lambda out: out.logits)


def gpt2() -> Example:
    transformers = hugging_face()
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    kwargs = {"input_ids": torch.randint(3, 60, (2, 6)), "use_cache": False}
    return Example(_randomized(transformers.GPT2LMHeadModel(config)), (), kwargs, lambda out: out.logits)


ZOO: dict[str, Callable[[], Example]] = {
    f.__name__: f for f in (digits_cnn, unet, recurrent, resnet18, encoder, vit, bert, gpt2)
}


def build(name: str) -> Example:
    """A model of the zoo, the same weights and arguments every time."""
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        return ZOO[name]()
