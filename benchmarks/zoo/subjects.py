"""What is walked: a name, and how to build the model and its arguments.

Weights are random, from a seed that is a function of the name; no file is downloaded. What a fresh model sets to a
constant (running statistics, zero biases, layer scales of 1e-6) gets values that make an error of its layer visible.
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
    """The zoo itself cannot build or run the model here: nothing is said about fxround."""


@dataclass(frozen=True)
class Example:
    """A model in eval mode and arguments for it; ``batch`` is the size of dimension 0 of what has rows, 0 for none."""

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
        """The same weights and arguments every time. Raises whatever the zoo's own code raises."""
        torch.manual_seed(zlib.crc32(self.title.encode()) ^ SEED)
        example = self.make()
        unsettle(example.model)
        return example


def unsettle(model: nn.Module) -> None:
    """Eval mode; constants of a fresh model become random, and what was left uninitialized gets a value."""
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


# The modules of this package that know a zoo, and the package that each needs. Cheap zoos first.
ZOOS: Final[Mapping[str, tuple[str, str]]] = {
    "torchvision": ("benchmarks.zoo.vision", "torchvision"),
    "segmentation": ("benchmarks.zoo.segmentation", "segmentation_models_pytorch"),
    "torchaudio": ("benchmarks.zoo.audio", "torchaudio"),
    "diffusers": ("benchmarks.zoo.diffusion", "diffusers"),
    "transformers": ("benchmarks.zoo.language", "transformers"),
    "timm": ("benchmarks.zoo.images", "timm"),
}


def subjects(zoos: Sequence[str] = tuple(ZOOS)) -> Iterator[Subject]:
    """Every subject of the zoos whose package is installed."""
    loosen()
    for zoo in zoos:
        module, package = ZOOS[zoo]
        if importlib.util.find_spec(package) is not None:
            yield from importlib.import_module(module).subjects()


def loosen() -> None:
    """Make torchvision and torchaudio importable where their compiled operators fit another PyTorch: none is called."""
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
    """Images [batch, channels, size, size] of standard normal numbers."""
    return torch.randn(batch, channels, size, size)
