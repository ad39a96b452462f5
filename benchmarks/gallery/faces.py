"""Do the boxes and landmarks of faces move? MTCNN on two photographs, in narrow formats."""

# %% [markdown]
# # Do boxes and landmarks of faces move?
#
# MTCNN finds faces by three networks, each of which looks at what the one before kept. The weights are in a package
# whose pins are older than fxround's PyTorch (`pip install --no-deps facenet-pytorch`). The photographs are those of
# scikit-image (`pip install scikit-image`; an astronaut) and matplotlib (Grace Hopper). The three networks are
# compiled; what chooses and merges boxes between them stays Python.

# %%
from __future__ import annotations

import functools
from contextlib import ExitStack

import numpy as np
import torch
from matplotlib import cbook, image
from skimage import data
from torch import Tensor

import fxround
from benchmarks.harness import table, vision_operators

# Before torchvision, whose operators are of one build of PyTorch. The package has boxes' choice in NumPy, too.
vision_operators()
import facenet_pytorch.models.utils.detect_face as detection  # noqa: E402
from facenet_pytorch import MTCNN  # noqa: E402

detection.batched_nms = functools.partial(detection.batched_nms_numpy, method="Union")

hopper = image.imread(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))
photographs = [torch.from_numpy(data.astronaut().copy()), torch.from_numpy(hopper[::2, ::2].copy())]
detector = MTCNN(keep_all=True, min_face_size=60).eval()


def faces(policy: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return boxes [n, 4] and landmarks [n, 5, 2], pixels, and probabilities [n] of the faces of each photograph."""
    of_photographs = []
    with ExitStack() as stack:
        for network in (detector.pnet, detector.rnet, detector.onet):
            stack.enter_context(fxround.perturb(network, policy, seed=1))
        for photograph in photographs:
            boxes, probabilities, landmarks = detector.detect(photograph, landmarks=True)
            kept = 0 if boxes is None else len(boxes)
            shapes = ((kept, 4), (kept, 5, 2), (kept,))
            parts = (boxes, landmarks, probabilities) if kept else (np.zeros(0),) * 3
            of_photographs.append(
                tuple(torch.from_numpy(p.astype(float)).reshape(s) for p, s in zip(parts, shapes, strict=True))
            )
    return of_photographs


# %% [markdown]
# A face is found again if a box overlaps its own by half; the move of a point is its distance to the one that PyTorch
# gives, in percent of the width of the face.


# %%
def overlap(a: Tensor, b: Tensor) -> float:
    """Return the intersection of two boxes over their union."""
    low, high = torch.maximum(a[:2], b[:2]), torch.minimum(a[2:], b[2:])
    shared = float((high - low).clamp(min=0).prod())
    return shared / (float((a[2:] - a[:2]).prod()) + float((b[2:] - b[:2]).prod()) - shared)


originals = faces("identity")
columns = ("policy", "faces found", "others", "box moves, % of its width", "landmarks move, %", "least probability")
rows = []
for policy in ("stochastic", "binary16", "bfloat16", "int8:channel", "fp8", "mxfp8", "nvfp4", "mxfp4"):
    again = others = 0
    box_moves, landmark_moves, least = [0.0], [0.0], [1.0]
    for (boxes, landmarks, _), (new, points, probabilities) in zip(originals, faces(policy), strict=True):
        others += len(new)
        for box, marks in zip(boxes, landmarks, strict=True):
            near = [i for i in range(len(new)) if overlap(box, new[i]) >= 0.5]
            if not near:
                continue
            i = max(near, key=lambda i: overlap(box, new[i]))
            again, others = again + 1, others - 1
            width = float(box[2] - box[0])
            box_moves.append(100 * float((new[i] - box).abs().max()) / width)
            landmark_moves.append(100 * float((points[i] - marks).norm(dim=1).max()) / width)
            least.append(float(probabilities[i]))
    total = sum(len(boxes) for boxes, _, _ in originals)
    moves = (f"{max(each):.2g}" for each in (box_moves, landmark_moves))
    rows.append([policy, f"{again} of {total}", str(others), *moves, f"{min(least):.4f}"])
    print(rows[-1], flush=True)
print(table(columns, rows))
