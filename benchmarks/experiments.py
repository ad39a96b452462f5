"""Two training runs whose every bit is specified: a LeNet on scikit-learn's digits, a transformer on the Zen of Python.

Data and initial weights are computed from integers alone: pixels are sixteenths, characters are indices, and a weight
is 24 bits of SHAKE-256 of its name, times a power of two. No generator of PyTorch or NumPy is used, because their
numbers may change between versions. Batches are taken in a fixed order. Example::

    EXPERIMENTS["cnn"].run("reproducible", steps=10)["weights"]     # sha256:..., on any machine
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import importlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround.training import compile_optimizer

SEED = 6
BATCH = 32
EARLY = 5
WINDOW = 32
DIGITS_HASH = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
TEXT_HASH = "e250f274f33b9b621a04264025d50e5fb9b1f989f444d13bb373882e734e996f"


class LeNet(nn.Module):
    """conv, pool, conv, pool, two linear layers with a dropout between them: [n, 1, 8, 8] to [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 16, 3, padding=1)
        self.hidden, self.drop, self.logits = nn.Linear(64, 32), nn.Dropout(0.2), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = F.avg_pool2d(self.conv1(x).tanh(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2)
        return self.logits(self.drop(self.hidden(torch.flatten(x, 1)).relu()))


class Block(nn.Module):
    """Causal attention and two linear layers, each after a norm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, time, width] to the same shape."""
        n, time, width = x.shape
        parts = self.qkv(self.norm1(x)).view(n, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(n, time, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """A character model: two blocks of width 32, [n, time] indices to [n, time, characters] logits."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, 32), nn.Embedding(WINDOW, 32)
        self.blocks, self.norm, self.logits = (
            nn.Sequential(Block(32, 2), Block(32, 2)),
            nn.LayerNorm(32),
            nn.Linear(32, characters),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next character at every position."""
        x = self.token(x) + self.place.weight[: x.shape[1]]
        return self.logits(self.norm(self.blocks(x)))


class WithLoss(nn.Module):
    """The mean cross entropy of a network's logits, in one graph with the network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return a scalar."""
        return F.cross_entropy(self.net(x).flatten(0, -2), target.flatten())


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return [1797, 1, 8, 8] sixteenths, and labels. Raises ValueError if scikit-learn's digits have changed."""
    data = importlib.import_module("sklearn.datasets").load_digits()
    pixels, labels = data.data.astype(np.uint8), data.target.astype(np.uint8)
    _require(hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest(), DIGITS_HASH, "scikit-learn's digits")
    return torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(labels).long()


@cache
def text() -> tuple[Tensor, int]:
    """Return the characters of Python's module ``this`` as indices, and the number of different characters."""
    with contextlib.redirect_stdout(io.StringIO()):
        zen = codecs.decode(importlib.import_module("this").s, "rot13")
    _require(hashlib.sha256(zen.encode()).hexdigest(), TEXT_HASH, "the text of Python's module this")
    alphabet = sorted(set(zen))
    return torch.tensor([alphabet.index(c) for c in zen]), len(alphabet)


def _require(digest: str, expected: str, what: str) -> None:
    if digest != expected:
        raise ValueError(f"{what} has sha256 {digest}, expected {expected}: the hashes below are of other data")


def initialize(model: nn.Module) -> nn.Module:
    """Set weights by their names: k 2^-23 2^-b for k of 24 bits in two's complement, 2^b >= sqrt(fan in).

    Norms and biases keep their values, 1 and 0.
    """
    for name, p in model.named_parameters():
        with torch.no_grad():
            if p.dim() == 1:
                p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            drawn = np.frombuffer(hashlib.shake_256(name.encode()).digest(4 * p.numel()), "<i4") >> 8
            fan_in = p[0].numel() if "token" not in name and "place" not in name else 4
            halvings = ((fan_in - 1).bit_length() + 1) // 2
            p.copy_(torch.from_numpy(np.ldexp(drawn.astype(np.float32), -23 - halvings)).view_as(p))
    return model


def _digits_batch(step: int) -> tuple[Tensor, Tensor]:
    images, labels = digits()
    rows = torch.arange(step * BATCH, (step + 1) * BATCH) % 1500
    return images[rows], labels[rows]


def _text_batch(step: int) -> tuple[Tensor, Tensor]:
    characters, _ = text()
    starts = (torch.arange(step * 8, (step + 1) * 8) * 37) % (len(characters) - WINDOW)
    windows = torch.stack([characters[s : s + WINDOW + 1] for s in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class Experiment:
    """A network, its batches by the number of the step, its optimizer, and its test at the end."""

    name: str
    network: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    asked: Callable[[], tuple[Tensor, Tensor]]

    def run(self, policy: str, steps: int, *, begin: int = 0, checkpoint: Path | None = None) -> dict[str, Any]:
        """Train from step ``begin`` to ``steps``.

        Returns hashes of the initial weights, of the weights after five steps and at the end, and of the final logits;
        and the share of right answers. checkpoint: read before step ``begin`` unless that is 0, written after the last
        step.
        """
        net, step, inference = _compiled(self.name, policy)
        initialize(net.train())
        hashes: dict[str, Any] = {"initial": fxround.hash(net)}
        step.train().reseed(SEED)
        optimizer = compile_optimizer(self.optimizer(net.parameters()), policy, seed=SEED)
        if begin and checkpoint:
            saved = torch.load(checkpoint, weights_only=True)
            step.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for number in range(begin, steps):
            optimizer.zero_grad()
            step(*self.batch(number)).backward()
            optimizer.step()
            if number + 1 == EARLY:
                hashes["early"] = fxround.hash(net)
        if checkpoint:
            torch.save({"model": step.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
        x, target = self.asked()
        net.eval()
        with torch.no_grad():
            logits = inference(x)
        right = (logits.argmax(-1) == target).double().mean().item()
        return hashes | {"weights": fxround.hash(net), "logits": fxround.hash(logits), "right": right}


@cache
def _compiled(name: str, policy: str) -> tuple[nn.Module, Any, Any]:
    """Return an experiment's network, training step and inference, captured once for all initial weights."""
    net = EXPERIMENTS[name].network()
    step = fxround.compile(WithLoss(net), policy, seed=SEED)
    return net, step, fxround.compile(net, policy, seed=SEED)


EXPERIMENTS = {
    e.name: e
    for e in (
        Experiment(
            "cnn",
            LeNet,
            _digits_batch,
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda: (digits()[0][1500:], digits()[1][1500:]),
        ),
        Experiment(
            "transformer",
            lambda: Transformer(text()[1]),
            _text_batch,
            lambda p: torch.optim.AdamW(p, lr=0.003),
            lambda: _text_batch(7),
        ),
    )
}
