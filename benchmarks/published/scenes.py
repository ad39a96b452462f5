"""A small detector, trained on scenes of scikit-learn's digits, and its mean average precision.

A scene is an image of 32 x 32 with one to three digits of 8 to 14 pixels that do not overlap, over noise. The digits of
scenes for the test are those that no scene for training has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE: Final = 32
CELLS: Final = 8
CELL: Final = SIDE // CELLS
LARGEST: Final = 16.0
SMALLEST, BIGGEST = 8, 14
DIGITS_FOR_TRAINING: Final = 1200
THRESHOLDS: Final = tuple(0.5 + 0.05 * i for i in range(10))
_NEAR: Final = 1e-9


class Detector(nn.Module):
    """Five convolutions with batch norm: images (N, 1, 32, 32) to 15 numbers for each of 8 x 8 cells.

    They are the logit of an object, the logits of its centre within the cell and of its width and height relative to
    16 pixels, and ten logits of classes: (N, 15, 8, 8).
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        inputs = 1
        for outputs, stride in ((16, 1), (32, 2), (32, 1), (64, 2), (64, 1)):
            self.layers.append(nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False))
            self.layers.append(nn.BatchNorm2d(outputs))
            self.layers.append(nn.ReLU())
            inputs = outputs
        self.head = nn.Conv2d(inputs, 15, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the numbers of the cells."""
        cells: Tensor = self.head(self.layers(x))
        return cells


@dataclass(frozen=True)
class Scenes:
    """Images (N, 1, 32, 32), and for each of up to three objects left, top, width, height and class, -1 for none."""

    images: Tensor
    objects: Tensor

    @staticmethod
    def make(count: int, seed: int, test: bool) -> Scenes:
        """Draw scenes."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        pool = range(DIGITS_FOR_TRAINING, len(digits.images)) if test else range(DIGITS_FOR_TRAINING)
        drawn = torch.Generator().manual_seed(seed)

        def integer(least: int, end: int) -> int:
            return int(torch.randint(least, end, (1,), generator=drawn))

        images, objects = torch.rand(count, 1, SIDE, SIDE, generator=drawn) * 0.2, torch.full((count, 3, 5), -1.0)
        pictures = torch.tensor(digits.images[:, None], dtype=torch.float32) / 16
        for i in range(count):
            taken: list[tuple[int, int, int]] = []
            for _ in range(integer(1, 4)):
                size, digit = integer(SMALLEST, BIGGEST + 1), pool[integer(0, len(pool))]
                left, top = integer(0, SIDE - size + 1), integer(0, SIDE - size + 1)
                if any(abs(left - x) < max(size, s) and abs(top - y) < max(size, s) for x, y, s in taken):
                    continue
                picture = F.interpolate(pictures[digit : digit + 1], (size, size), mode="bilinear")[0, 0]
                place = images[i, 0, top : top + size, left : left + size]
                place.copy_(torch.maximum(place, picture))
                objects[i, len(taken)] = torch.tensor([left, top, size, size, digits.target[digit]])
                taken.append((left, top, size))
        return Scenes(images, objects)


def loss_of(cells: Tensor, objects: Tensor) -> Tensor:
    """Return the loss: cross-entropies of objects and classes, and squared errors of boxes in the cells of centres."""
    present = objects[..., 4] >= 0
    scene = torch.arange(len(objects))[:, None].expand_as(present)[present]
    left, top, width, height, kind = objects[present].unbind(1)
    x, y = (left + width / 2) / CELL, (top + height / 2) / CELL
    column, row = x.long().clamp(max=CELLS - 1), y.long().clamp(max=CELLS - 1)
    wanted = torch.zeros(cells[:, 0].shape)
    wanted[scene, row, column] = 1
    cell = cells[scene, :, row, column]
    boxes = torch.stack([x - column, y - row, width / LARGEST, height / LARGEST], 1)
    place = F.mse_loss(cell[:, 1:5].sigmoid(), boxes)
    return (
        10 * F.binary_cross_entropy_with_logits(cells[:, 0], wanted)
        + F.cross_entropy(cell[:, 5:], kind.long())
        + 10 * place
    )


def trained(scenes: Scenes, seed: int, epochs: int) -> Detector:
    """Train by Adam on batches of 64 with stock PyTorch, the rate falling to zero."""
    torch.manual_seed(seed)
    model = Detector()
    steps = epochs * (len(scenes.images) // 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(scenes.images)).split(64)[: len(scenes.images) // 64]:
            optimizer.zero_grad()
            loss_of(model(scenes.images[batch]), scenes.objects[batch]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def boxes_of(cells: Tensor) -> Tensor:
    """Return left, top, right, bottom, class and score of each cell: (N, 64, 6)."""
    cells = cells.double().nan_to_num(0.0, 1e300, -1e300).flatten(2).transpose(1, 2)
    grid = torch.arange(CELLS * CELLS)
    x, y = ((grid % CELLS + cells[..., 1].sigmoid()) * CELL, (grid // CELLS + cells[..., 2].sigmoid()) * CELL)
    width, height = cells[..., 3].sigmoid() * LARGEST, cells[..., 4].sigmoid() * LARGEST
    share, kind = cells[..., 5:].softmax(-1).max(-1)
    score = cells[..., 0].sigmoid() * share
    return torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2, kind.double(), score], -1)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over the union of each of the boxes (n, 4) with each of (m, 4)."""
    least, most = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:4], b[None, :, 2:4])
    common = (most - least).clamp(min=0).prod(-1)
    areas = [(c[:, 2] - c[:, 0]) * (c[:, 3] - c[:, 1]) for c in (a, b)]
    return common / (areas[0][:, None] + areas[1][None] - common + _NEAR)


def kept(boxes: Tensor) -> Tensor:
    """Return the boxes of a scene by falling score, without those that overlap a better one by half, at most ten."""
    boxes = boxes[boxes[:, 5].argsort(descending=True, stable=True)]
    chosen: list[int] = []
    overlaps = overlap(boxes, boxes)
    for i in range(len(boxes)):
        if len(chosen) < 10 and all(overlaps[i, j] <= 0.5 for j in chosen):
            chosen.append(i)
    return boxes[chosen]


@torch.no_grad()
def mean_average_precision(cells: Tensor, objects: Tensor) -> float:
    """Return the mean over the classes of the objects and overlaps 0.5, 0.55, ..., 0.95 of the area of
    precision by recall.

    Precision is the largest at this recall or a larger one, at every recall that is reached (COCO takes 101 of them).
    """
    kept_boxes = [kept(boxes) for boxes in boxes_of(cells)]
    scene = torch.cat([torch.full((len(boxes),), i) for i, boxes in enumerate(kept_boxes)])
    boxes = torch.cat(kept_boxes)
    areas = []
    for kind in sorted({int(k) for k in objects[..., 4].flatten().tolist() if k >= 0}):
        matches = _matches(boxes, scene, objects.double(), kind)
        total = int((objects[..., 4] == kind).sum())
        areas += [_area(matches, total, least) for least in THRESHOLDS]
    return sum(areas) / len(areas)


def _matches(boxes: Tensor, scene: Tensor, objects: Tensor, kind: int) -> list[tuple[tuple[int, int], float]]:
    """Return for the boxes of a class, by falling score, the object that each overlaps most, and how much."""
    chosen = (boxes[:, 4] == kind).nonzero()[:, 0]
    chosen = chosen[boxes[chosen, 5].argsort(descending=True, stable=True)]
    matches = []
    for i in chosen.tolist():
        mine = objects[scene[i]]
        corners = torch.cat([mine[:, :2], mine[:, :2] + mine[:, 2:4]], 1)
        overlaps = overlap(boxes[i : i + 1], corners)[0] * (mine[:, 4] == kind)
        best = int(overlaps.argmax())
        matches.append(((int(scene[i]), best), float(overlaps[best])))
    return matches


def _area(matches: list[tuple[tuple[int, int], float]], total: int, least: float) -> float:
    taken: set[tuple[int, int]] = set()
    right = []
    for thing, overlaps in matches:
        right.append(overlaps >= least and thing not in taken)
        taken |= {thing} if right[-1] else set()
    hits = torch.tensor(right).cumsum(0) if right else torch.zeros(1)
    precision = hits / torch.arange(1, len(hits) + 1)
    envelope = precision.flip(0).cummax(0).values.flip(0)
    gained = torch.diff(hits.double() / total, prepend=torch.zeros(1, dtype=torch.float64))
    return float((envelope * gained).sum())
