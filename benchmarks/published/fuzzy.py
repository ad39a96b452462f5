"""Fuzzy PyTorch's question: how many bits of a result are real, layer by layer, and does its metric notice?

Three models take the places of the MNIST CNN, of FastSurfer (segmentation) and of WavLM (a transformer over sound): the
digits CNN (``fxround.demo``, accuracy on 500 images); a U-Net that marks the pixels of digits in scenes (``scenes``,
the Dice coefficient of 64 scenes); a causal transformer of characters (``fp4_training``, accuracy of the next character
in Python's documentation). Stock PyTorch trains each; SR (``stochastic``) and UD (``up_down``) perturb it in ten
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from benchmarks.fp4_training import LENGTH, Characters, text, train_text
from benchmarks.published.scenes import Scenes
from fxround import demo

SAMPLES: Final = 10
POLICIES: Final[Mapping[str, str]] = {"SR": "stochastic", "UD": "up_down"}
COLUMNS: Final = ("model, layer", "SR: bits", "worst", "UD: bits", "worst", "metric unperturbed", "SR", "UD")
OUTPUT: Final = "output"
# The layers of the U-Net that the page shows, beside the result.
SHOWN: Final = (OUTPUT, "middle.1", ".0", "up2", "up1", "head")
Study = tuple[nn.Module, Tensor, str, Callable[[Tensor], float]]


class UNet(nn.Module):
    """Two levels down and up: images (N, 1, 32, 32) to logits of a digit's pixel (N, 1, 32, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = self._layers(1, 16), self._layers(16, 32), self._layers(32, 64)
        self.up2, self.up1 = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.join2, self.join1 = self._layers(64, 32), self._layers(32, 16)
        self.head = nn.Conv2d(16, 1, 1)

    @staticmethod
    def _layers(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        y = self.up2(self.middle(F.max_pool2d(two, 2)))
        y = self.up1(self.join2(torch.cat([y, two], 1)))
        logits: Tensor = self.head(self.join1(torch.cat([y, one], 1)))
        return logits


def masks(scenes: Scenes) -> Tensor:
    """Return 1 at the pixels of the boxes of objects that are brighter than the noise, else 0: (N, 1, 32, 32)."""
    inside = torch.zeros_like(scenes.images)
    for i, objects in enumerate(scenes.objects):
        for left, top, width, height, _ in objects[objects[:, 4] >= 0].int().tolist():
            inside[i, 0, top : top + height, left : left + width] = 1
    return inside * (scenes.images > 0.2)


def images(seed: int) -> Study:
    """Return the digits CNN."""
    digits = demo.load_digits()
    model, _ = demo.trained(digits, seed, lambda items, total, label: items)
    x, labels = digits.test
    return model, x, "accuracy", lambda logits: float((logits.argmax(1) == labels).double().mean())


def segmentation(seed: int, count: int = 1000, epochs: int = 4) -> Study:
    """Return the U-Net, trained by Adam on batches of 50."""
    scenes, tested = Scenes.make(count, seed, test=False), Scenes.make(64, seed + 1, test=True)
    wanted, asked = masks(scenes), masks(tested)
    torch.manual_seed(seed)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(count).split(50):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(scenes.images[batch]), wanted[batch]).backward()
            optimizer.step()

    def dice(logits: Tensor) -> float:
        predicted = (logits > 0).double()
        return float(2 * (predicted * asked).sum() / (predicted.sum() + asked.sum()))

    return model.eval(), tested.images, "Dice", dice


def characters(seed: int, steps: int = 240) -> Study:
    """Return the transformer."""
    torch.manual_seed(seed)
    model = Characters(text()[2])
    train_text(model, seed, steps)
    test = text()[1]
    pieces = test[: 32 * (LENGTH + 1)].reshape(32, LENGTH + 1)
    return model.eval(), pieces[:, :-1], "accuracy", lambda y: float((y.argmax(-1) == pieces[:, 1:]).double().mean())


MODELS: Final[Mapping[str, Callable[[int], Study]]] = {
    "digits CNN": images, "U-Net": segmentation, "transformer": characters,
}  # fmt: skip


def tables() -> Iterator[dict[str, Any]]:
    """Study each model, trained from one seed, and yield the table after each."""
    rows: list[list[str]] = []
    for name, make in MODELS.items():
        model, x, metric, measure = make(0)
        with torch.no_grad():
            plain = measure(model(x))

        def metric_of(sample: Tensor, unperturbed: Tensor, measure: Callable[[Tensor], float] = measure) -> float:
            return measure(sample)

        asked: dict[str, Any] = {"capture": "layers", "metrics": [metric_of], "reference": None, "progress": False}
        reports = [fxround.variability(model, x, policy, SAMPLES, **asked) for policy in POLICIES.values()]
        rows += rows_of(name, f"{metric} {plain:.4f}", reports)
        shown = [row[0] for row in rows if not row[0].startswith("U-Net") or row[0].endswith(SHOWN)]
        yield {"published-fuzzy": {"columns": COLUMNS, "numbers": [*range(1, 8)], "rows": rows, "shown": shown}}


def rows_of(name: str, metric: str, reports: list[fxround.VariabilityReport]) -> list[list[str]]:
    """Return the row of a model's result, with its metric, and those of its layers."""
    made = []
    for figures in reports[0].figures:
        place = figures.place.name
        first, second = (_bits(report[place]) for report in reports)
        metrics = [metric, *map(_metric, reports)] if place == OUTPUT else ["", "", ""]
        made.append([f"{name}: {place}", *first, *second, *metrics])
    return made


def _bits(figures: Any) -> tuple[str, str]:
    return ("", "") if figures.bits is None else (f"{figures.bits:.1f}", f"{figures.worst:.1f}")


def _metric(report: fxround.VariabilityReport) -> str:
    (measured,) = report.metrics
    return f"{measured.mean:.4f} ± {measured.spread:.4f}"
