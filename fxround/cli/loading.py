"""The model, the inputs and the device that a command names: files, ``MODULE:CALLABLE``, shapes."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pickle
import struct
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from fxround.errors import FxroundError, brief, shown
from fxround.spelling import nearest

# What NumPy and PyTorch raise for a file that they cannot read; what the system refuses stays as it is.
_BROKEN: Final = (
    *(ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError),
    *(pickle.UnpicklingError, struct.error, zipfile.BadZipFile),
)


def load_inputs(spec: str) -> Any:
    """Return the inputs of a .pt (weights only), .npy (one tensor) or .npz (keywords) file, or of a callable."""
    import numpy as np
    import torch

    path = Path(spec)
    if path.suffix not in (".pt", ".pth", ".npy", ".npz"):
        return _called(spec)
    if not path.is_file():
        raise ValueError(f"--inputs {spec}: no such file")
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path))
        if path.suffix == ".npz":
            return {name: torch.from_numpy(array) for name, array in np.load(path).items()}
        return torch.load(path, weights_only=True)
    except _BROKEN as error:
        raise ValueError(
            f"--inputs {spec}: no {path.suffix} file of tensors or arrays of numbers ({type(error).__name__})"
        ) from error


def loaded(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model of ``model``, and the inputs of ``--inputs``, of ``--shape``, or that the callable returned.

    Both are on the device of ``--device``.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    model, inputs = _built(arguments.model)
    inputs = load_inputs(arguments.inputs) if arguments.inputs else _examples(arguments.shape) or inputs
    if inputs is None or inputs == ():
        raise ValueError(f"{arguments.model} returned no inputs: return (model, inputs), or give --inputs or --shape")
    device = device_of(arguments.device)
    moved = tree_map_only(torch.Tensor, lambda x: x.to(device), inputs)
    return model.to(device), moved


def device_of(name: str) -> Any:
    """Return a device of the command line. Raises ValueError for one that this machine does not have."""
    import torch

    from fxround.runtime.cuda.driver import devices_found

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: expected cpu or cuda, cuda:1, ...") from error
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        raise ValueError(f"--device {name}: {devices_found()}")
    return device


def _built(spec: str) -> tuple[Any, Any]:
    """Return a model in eval mode, and the inputs that came with it; () if there are none."""
    import torch

    built = _called(spec)
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, ())
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{spec} returned {type(model).__name__}: expected a torch.nn.Module, or (module, inputs)")
    return model.eval(), inputs


def _called(spec: str) -> Any:
    """Call ``MODULE:CALLABLE`` and return its result."""
    function = named(spec)
    with _blamed(spec):
        return function()


@contextlib.contextmanager
def _blamed(code: str) -> Iterator[None]:
    """Turn what the user's code raises into a ValueError of one line, with the place where it was raised.

    A SystemExit is one too: its status would be taken for that of a check.
    """
    try:
        yield
    except FxroundError:
        raise
    except ImportError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # transformers names what it cannot import, and not why
            cause = cause.__cause__
        reason = "" if cause is error else f" ({type(cause).__name__}: {first_line(cause)})"
        raise ImportError(f"{code}: {first_line(error)}{reason}") from error
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f" at {place.filename}:{place.lineno}" if not isinstance(error, SyntaxError) else ""
        raise ValueError(f"{code} raised {type(error).__name__}{where}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return (str(error).splitlines() or [""])[0]


def named(spec: str) -> Callable[..., Any]:
    """Return the object that ``MODULE:CALLABLE`` names."""
    name, colon, attribute = spec.partition(":")
    if not colon or not name or not attribute:
        raise ValueError(f"{shown(spec)}: expected MODULE:CALLABLE, like torchvision.models:resnet18 or net.py:build")
    module = _imported(name)
    build = getattr(module, attribute, None)
    if not callable(build):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        known = brief(", ".join(key for key in own if callable(getattr(module, key)))) or "none of its own"
        raise ValueError(f"{name} has no callable {attribute!r}{nearest(attribute, own)} It has {known}")
    builder: Callable[..., Any] = build
    return builder


def _examples(shapes: Sequence[str]) -> tuple[Any, ...]:
    return tuple(_example(shape) for shape in shapes)


def _imported(name: str) -> Any:
    path = Path(name)
    if path.suffix == ".py":
        if not path.is_file():
            raise ValueError(f"{name}: no such file")
        sys.path.insert(0, str(path.resolve().parent))
        name = path.stem
    else:
        sys.path.insert(0, os.getcwd())
    with _blamed(f"the import of {path}"):
        return importlib.import_module(name)


def _example(shape: str) -> Any:
    import torch

    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        raise ValueError(f"--shape {shown(shape)}: expected sizes like 1,3,224,224") from None
    try:
        return torch.rand(sizes, generator=torch.Generator().manual_seed(0))
    except (RuntimeError, TypeError) as error:  # negative, beyond 64 bits, or more than there is memory for
        raise ValueError(f"--shape {shown(shape)}: {first_line(error)}") from None
