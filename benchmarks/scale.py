"""Cost of one perturbed sample in time and memory, from a million parameters to hundreds of millions.

    python -m benchmarks.scale [--models mnist unet wavlm roberta] [--threads N] [--repeats N]

Weights are random, because time and memory do not depend on them. A model runs under stock PyTorch, then compiled under
each policy; times are the least of the repeats of interleaved calls, without the first one, which captures and
compiles. On one thread they are the process's processor time, which other processes do not change; on more, wall time.
Memory is the process's greatest resident size during calls of that kind, parameters and compiled code included; the
stock model's is that of its first call, before anything else ran, and UD's includes the memory that SR keeps.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from benchmarks.harness import header, table, vision_operators

POLICIES = {"SR": "stochastic", "UD": "up_down"}


@dataclass(frozen=True)
class Work:
    """A model, its arguments, and Fuzzy PyTorch's published figures for the model it represents (SR, UD; Verrou)."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    published: str = "-"


class MnistCNN(nn.Module):
    """PyTorch's MNIST example, 1,199,882 parameters: [n, 1, 28, 28] to [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.hidden, self.logits = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv2(self.conv1(x).relu()).relu(), 2)
        return F.log_softmax(self.logits(self.hidden(x.flatten(1)).relu()), 1)


class Competitive(nn.Module):
    """FastSurfer's competitive dense block: 5x5 convolutions whose results are joined by their maximum."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, filters, 5, padding=2), nn.Conv2d(filters, filters, 5, padding=2)
        self.third = nn.Conv2d(filters, filters, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(filters) for _ in range(3))
        self.activations = nn.ModuleList(nn.PReLU() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a = self.norms[0](self.first(self.activations[0](x)))
        b = torch.maximum(self.norms[1](self.second(self.activations[1](a))), a)
        c: Tensor = self.norms[2](self.third(self.activations[2](b)))
        return c


class SegmentationUNet(nn.Module):
    """Four levels of competitive blocks of 64 filters, seven slices in, 79 classes out, as in FastSurfer's network.

    FastSurfer unpools by indices; this network repeats pixels.
    """

    def __init__(self, filters: int = 64, levels: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(Competitive(7 if i == 0 else filters, filters) for i in range(levels))
        self.bottom = Competitive(filters, filters)
        self.up = nn.ModuleList(Competitive(filters, filters) for _ in range(levels))
        self.classes = nn.Conv2d(filters, 79, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for block in self.up:
            x = block(torch.maximum(F.interpolate(x, scale_factor=2.0, mode="nearest"), skips.pop()))
        y: Tensor = self.classes(x)
        return y


def _wavlm() -> nn.Module:
    vision_operators()
    from transformers import WavLMConfig, WavLMModel

    config = WavLMConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        feat_extract_norm="layer", do_stable_layer_norm=True, layerdrop=0.0, apply_spec_augment=False,
    )  # fmt: skip
    return _LastState(WavLMModel(config))


def _roberta() -> nn.Module:
    vision_operators()
    from transformers import RobertaConfig, RobertaModel

    config = RobertaConfig(
        vocab_size=50265, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        max_position_embeddings=514, type_vocab_size=1,
    )  # fmt: skip
    return _LastState(RobertaModel(config))


class _LastState(nn.Module):
    """A transformer's last hidden state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        state: Tensor = self.model(x).last_hidden_state
        return state


WORKS = {
    "mnist": Work("MNIST CNN, 64 images", MnistCNN, lambda: (torch.rand(64, 1, 28, 28),), "10.9, 7.9; 335"),
    "unet": Work(
        "FastSurfer-like UNet, 1x7x128x128", SegmentationUNet, lambda: (torch.rand(1, 7, 128, 128),), "4.1, 3.6; 198"
    ),
    "wavlm": Work("WavLM-large, 1 s of sound", _wavlm, lambda: (torch.randn(1, 16000),), "53, 64; 419"),
    "roberta": Work("RoBERTa-large, 64 tokens", _roberta, lambda: (torch.randint(3, 50000, (1, 64)),)),
}


def forget_peak() -> None:
    """Reset the greatest resident size (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_megabytes() -> float:
    """Return the greatest resident size since ``forget_peak``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


@dataclass
class Cost:
    """Seconds of the first call and of the fastest after it; the greatest resident size in both, in megabytes."""

    grows: bool = True
    first: float = 0.0
    least: float = float("inf")
    peak: float = 0.0

    def run(self, call: Callable[[], object], clock: Callable[[], float]) -> None:
        forget_peak()
        began = clock()
        call()
        taken = clock() - began
        peak = peak_megabytes()
        if self.first == 0.0:
            self.first = taken
            self.peak = peak
        else:
            self.least = min(self.least, taken)
            self.peak = max(self.peak, peak) if self.grows else self.peak


def costs(work: Work, repeats: int) -> tuple[int, dict[str, Cost]]:
    """Return the number of parameters, and the cost of the stock model and of each policy."""
    torch.manual_seed(0)
    model, inputs = work.build().eval(), work.inputs()
    calls: dict[str, Callable[[], object]] = {"stock": lambda: model(*inputs)}
    for name, policy in POLICIES.items():
        compiled = fxround.compile(model, policy)
        calls[name] = lambda compiled=compiled: compiled(*inputs)  # type: ignore[misc]
    measured = {name: Cost(grows=name in POLICIES) for name in calls}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    with torch.no_grad():
        for _ in range(repeats + 1):
            for name, call in calls.items():
                measured[name].run(call, clock)
    return sum(p.numel() for p in model.parameters()), measured


def rows(names: list[str], repeats: int) -> Iterator[list[str]]:
    """Yield one row per model."""
    for name in names:
        work = WORKS[name]
        load = os.getloadavg()[0]
        parameters, measured = costs(work, repeats)
        stock = measured["stock"]
        row = [work.name, f"{parameters / 1e6:.1f}", f"{stock.least:.3f}", f"{stock.peak:.0f}"]
        for policy in POLICIES:
            cost = measured[policy]
            row += [f"{cost.least / stock.least:.1f}x", f"{cost.peak / stock.peak:.2f}x", f"{cost.first:.1f}"]
        yield [*row, work.published, f"{load:.1f}"]


def main() -> None:
    """Print the table, each row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(header(("torch", "transformers", "fxround")))
    head = ["model", "parameters, M", "stock, s", "stock peak, MB"]
    for name in POLICIES:
        head += [f"{name} time", f"{name} peak", f"{name} first call, s"]
    done = []
    for row in rows(options.models, options.repeats):
        done.append(row)
        print("  ", *row, flush=True)
    print(table([*head, "Fuzzy PyTorch SR, UD; Verrou", "load"], done))


if __name__ == "__main__":
    main()
