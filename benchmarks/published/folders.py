"""Images of a folder that a user has: MNIST's files, CIFAR-10's for Python, or pictures by class as of ImageNet."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

# For training and for the test: images float32 (N, channels, height, width) in 0..1, and labels int64 (N,).
Images = tuple[TensorDataset, TensorDataset]
# Pictures by class are cut to squares of this side, so that a set fits into memory.
SIDE: Final = 64
PICTURES: Final = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


def images(folder: Path) -> Images:
    """Return the images of a folder, whichever of the three kinds it has.

    Raises FileNotFoundError if it has none of them, and ValueError for a file that is not what its name says.
    """
    if any(folder.rglob("train-images-idx3-ubyte*")):
        return mnist(folder)
    if any(folder.rglob("data_batch_1")):
        return cifar10(folder)
    if (folder / "train").is_dir():
        return pictures(folder)
    raise FileNotFoundError(
        f"{folder} has no images; expected train-images-idx3-ubyte and the other three files of MNIST, data_batch_1 to"
        " data_batch_5 and test_batch of CIFAR-10 for Python, or the folders train and val (or test) with a folder of "
        "pictures for each class"
    )


def read_idx(path: Path) -> Tensor:
    """Read a file of bytes in the format of MNIST's, which may be packed by gzip.

    Raises ValueError for another file.
    """
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise ValueError(f"{path} is no file of unsigned bytes in the format IDX: it begins with {data[:4]!r}")
    shape = np.frombuffer(data, ">i4", data[3], 4).tolist()
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).copy()).reshape(shape)


def mnist(folder: Path) -> Images:
    """Return MNIST's images (N, 1, 28, 28) and labels. Raises FileNotFoundError for a missing file."""

    def read(part: str) -> TensorDataset:
        pixels, labels = (
            read_idx(_file(folder, f"{part}-{name}")) for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
        )
        return _set(pixels[:, None], labels)

    return read("train"), read("t10k")


def cifar10(folder: Path) -> Images:
    """Return CIFAR-10's images (N, 3, 32, 32) and labels. Raises FileNotFoundError for a missing file."""

    def read(names: list[str]) -> TensorDataset:
        batches = [pickle.loads(_file(folder, name).read_bytes(), encoding="bytes") for name in names]
        pixels = torch.from_numpy(np.concatenate([batch[b"data"] for batch in batches]))
        return _set(pixels.reshape(-1, 3, 32, 32), torch.tensor([y for batch in batches for y in batch[b"labels"]]))

    return read([f"data_batch_{i}" for i in range(1, 6)]), read(["test_batch"])


def pictures(folder: Path) -> Images:
    """Return pictures (N, 3, SIDE, SIDE), the middle square of each; labels number the classes by their names.

    Raises FileNotFoundError without a folder val or test, or without pictures, and ValueError for classes that were not
    trained on.
    """
    tested = next((folder / name for name in ("val", "test") if (folder / name).is_dir()), None)
    if tested is None:
        raise FileNotFoundError(f"{folder} has a folder train, but none that is named val or test")
    classes = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    return _of_classes(folder / "train", classes), _of_classes(tested, classes)


def _of_classes(folder: Path, classes: list[str]) -> TensorDataset:
    from PIL import Image, ImageOps

    pixels, labels = [], []
    for path in sorted(folder.glob("*/*")):
        if path.suffix.lower() not in PICTURES:
            continue
        if path.parent.name not in classes:
            raise ValueError(f"{path.parent} is a class that is not under train: {', '.join(classes)}")
        with Image.open(path) as picture:
            pixels.append(np.asarray(ImageOps.fit(picture.convert("RGB"), (SIDE, SIDE))))
        labels.append(classes.index(path.parent.name))
    if not pixels:
        raise FileNotFoundError(f"{folder} has no pictures: expected CLASS/NAME{PICTURES[0]} and the like")
    return _set(torch.from_numpy(np.stack(pixels)).movedim(-1, 1).contiguous(), torch.tensor(labels))


def _set(pixels: Tensor, labels: Tensor) -> TensorDataset:
    return TensorDataset(pixels.float().div(255), labels.long())


def _file(folder: Path, name: str) -> Path:
    """Return the file of this name, or of this name with .gz. Raises FileNotFoundError if there is none."""
    files = [path for end in ("", ".gz") for path in sorted(folder.rglob(name + end))]
    if not files:
        raise FileNotFoundError(f"{folder} has no file {name} or {name}.gz")
    return files[0]
