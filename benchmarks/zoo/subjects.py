"""The subjects of a walk: a name, and a function that builds the model and its arguments.

Weights are random, from a seed that is a function of the name; no file is downloaded. Constants of a fresh model
(running statistics, zero biases, layer scales of 1e-6) get values that make an error of their layer visible.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.harness import vision_operators

SEED: Final = 20_26
BATCH: Final = 2


class Unbuildable(Exception):
    """The zoo itself cannot build or run the model here, which says nothing about fxround."""


@dataclass(frozen=True)
class Example:
    """A model in eval mode and its arguments; ``batch`` is the size of dimension 0 of tensors with rows, 0 for none."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    batch: int = BATCH


@dataclass(frozen=True)
class Subject:
    """One architecture: ``zoo/name``, and a function that builds it."""

    zoo: str
    name: str
    make: Callable[[], Example]

    @property
    def title(self) -> str:
        return f"{self.zoo}/{self.name}"

    def build(self) -> Example:
        """Return the same weights and arguments every time. Raises whatever the zoo's own code raises."""
        torch.manual_seed(zlib.crc32(self.title.encode()) ^ SEED)
        example = self.make()
        unsettle(example.model)
        return example


def unsettle(model: nn.Module) -> None:
    """Set eval mode, make constants of a fresh model random, and give values to uninitialized tensors."""
    model.eval().requires_grad_(True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.1)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
        for parameter in model.parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            largest = parameter.abs().max()
            if not bool(largest < 1e3) or bool(largest == 0):
                parameter.normal_(0, 0.02)
            elif bool(largest < 1e-3) and bool((parameter == parameter.flatten()[0]).all()):
                parameter.uniform_(0.5, 1)


# The modules of this package for each zoo, and the package that each needs; zoos that run quickly come first.
ZOOS: Final[Mapping[str, tuple[str, str]]] = {
    "torchvision": ("benchmarks.zoo.vision", "torchvision"),
    "segmentation": ("benchmarks.zoo.segmentation", "segmentation_models_pytorch"),
    "torchaudio": ("benchmarks.zoo.audio", "torchaudio"),
    "diffusers": ("benchmarks.zoo.diffusion", "diffusers"),
    "transformers": ("benchmarks.zoo.language", "transformers"),
    "timm": ("benchmarks.zoo.images", "timm"),
}


def subjects(zoos: Sequence[str] = tuple(ZOOS)) -> Iterator[Subject]:
    """Yield every subject of the zoos whose package is installed."""
    loosen()
    for zoo in zoos:
        module, package = ZOOS[zoo]
        if importlib.util.find_spec(package) is not None:
            yield from importlib.import_module(module).subjects()


def loosen() -> None:
    """Make torchvision and torchaudio importable if their compiled operators, never called, need another PyTorch."""
    vision_operators()
    try:
        import torchaudio  # noqa: F401 (transformers and others import it where it is installed)
    except ImportError:
        pass
    except OSError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchaudio"]:
            del sys.modules[name]
        stub = types.ModuleType("torchaudio._extension")
        stub.__dict__.update(_IS_TORCHAUDIO_EXT_AVAILABLE=False, _IS_ALIGN_AVAILABLE=False)
        stub.__dict__.update(fail_if_no_align=lambda f: f)
        sys.modules[stub.__name__] = stub


def images(size: int = 64, channels: int = 3, batch: int = BATCH) -> Tensor:
    """Return images [batch, channels, size, size] of standard normal numbers."""
    return torch.randn(batch, channels, size, size)
