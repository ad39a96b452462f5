"""Exported programs: files that are written completely or not at all, and verified when they are loaded.

A file that ``RoundedModule.export`` wrote holds the graph with every rounding, (seed, sample) as a named buffer, the
version of fxround, and a digest of everything else. A file that is truncated, changed or of another version is refused.
The digest detects accidents, not attacks: loading unpickles, so that a file from an untrusted source can run any code.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import secrets
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.capture.dynamo import aside
from fxround.compiler.executable import Entry
from fxround.compiler.signature import signature_of
from fxround.errors import FxroundError, shown
from fxround.float_state import require_ieee_arithmetic
from fxround.graph.dialect import require_state
from fxround.runtime.draw import Draw

VERSION: Final = "0.1.0"
_RECORD: Final = "/extra/fxround.json"
RNG_BUFFER: Final = "fxround_rng"


class Exportable(nn.Module):
    """The lowered graph of a model with the model's own state, and (seed, sample) as one more buffer."""

    def __init__(self, source: nn.Module, rng: Tensor, entry: Entry) -> None:
        super().__init__()
        self.__dict__.update(_parameters=source._parameters, _modules=source._modules)
        self._buffers = {**source._buffers, RNG_BUFFER: rng.clone()}
        self._non_persistent_buffers_set = set(source._non_persistent_buffers_set)
        root = source.get_submodule("")
        owners = tuple((self if o[0] is root else o[0], o[1]) if o else None for o in entry.owners)
        entry = replace(entry, running=entry.fused, owners=owners)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return entry.run(pytree.tree_leaves((args, kwargs)), self.get_buffer(RNG_BUFFER))

        forward.__signature__ = signature_of(source.forward)  # type: ignore[attr-defined]
        self.__dict__["forward"] = forward


def save(program: Any, path: str | Path, keep_inputs: bool) -> Path:
    """Write an exported program with its record; if writing fails, an existing file is kept.

    keep_inputs: whether the example inputs are stored too. Raises OSError if the file cannot be written.
    """
    if not keep_inputs:
        program._example_inputs = None
    memory = io.BytesIO()
    torch.export.save(program, memory)
    with zipfile.ZipFile(memory, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        record = {"version": VERSION, "digest": _digest(archive), "imports": sorted(_imports(program.call_spec))}
        archive.writestr(f"{root}{_RECORD}", json.dumps(record))
    # For a symbolic link, its target is replaced and the link stays.
    target = Path(path).resolve()
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with open(partial, "xb") as file:
            file.write(memory.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return Path(path)


def load(path: str | Path, *, any_version: bool = False) -> LoadedModule:
    """Load a program that ``RoundedModule.export`` wrote; it gives the same bits without the model's source.

    PyTorch unpickles the contents of the file: never load a file from an untrusted source.

    Args:
        path: the file.
        any_version: whether to load a file of another version of fxround, which may give other bits.

    Returns:
        A ``LoadedModule``.

    Raises:
        OSError: if the file cannot be read.
        ImportError: if a module whose types the results have (transformers' outputs) cannot be imported.
        ValueError: for a file that is truncated, changed or not a program of fxround.
        FxroundError: for a file of another version, unless ``any_version``.

    Example::

        compiled.export("model.pt2", x)
        y = fxround.load("model.pt2").reseed(0, sample=9)(x)
    """
    for name in _check(Path(path), any_version):
        _import(name, path)
    return LoadedModule(torch.export.load(path).module())


def _imports(spec: Any) -> set[str]:
    """Return the modules whose types arguments and results have, such as a model's output class of transformers.

    PyTorch reads a file with such a type only after its module has registered it.
    """
    specs = [spec.in_spec, spec.out_spec]
    found = set()
    while specs:
        one = specs.pop()
        specs += one.children()
        found.add(getattr(one.type, "__module__", "builtins"))
    return {name for name in found if name not in sys.stdlib_module_names and name.partition(".")[0] != "torch"}


def _import(name: str, path: str | Path) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{shown(str(path))} holds a program whose arguments or results have types of the module {name}, which "
            f"cannot be imported: {error}"
        ) from error


def _check(path: Path, any_version: bool) -> list[str]:
    """Return the modules that the program needs. Raises unless the file is one that ``save`` wrote."""
    name, record = shown(str(path)), None
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            found = [member for member in archive.namelist() if member.endswith(_RECORD)]
            record = json.loads(archive.read(found[0])) if found else None
            digest = _digest(archive)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{name} is truncated or changed: {error}; export the module again") from error
    if record is None:
        raise ValueError(
            f"{name} holds no program of fxround: it has no record of a version. It is truncated, or was not written "
            "by export()"
        )
    if not isinstance(record, Mapping) or record.get("digest") != digest:
        raise ValueError(f"{name} was changed after it was exported: its digest differs; export the module again")
    if record.get("version") != VERSION and not any_version:
        raise FxroundError(
            f"{name} was exported by fxround {shown(record.get('version'))}, and this is {VERSION}, which may give "
            "other bits: export the module again, or pass any_version=True"
        )
    return list(record.get("imports", ()))


def _digest(archive: zipfile.ZipFile) -> str:
    """Return the SHA-256 of names and contents of an archive's members, sorted by name, without fxround's record."""
    whole = hashlib.sha256()
    for name in sorted(archive.namelist()):
        if name.endswith(_RECORD):
            continue
        whole.update(f"{len(name)}:{name}={archive.getinfo(name).file_size}:".encode())
        with archive.open(name) as member:
            while chunk := member.read(1 << 20):
                whole.update(chunk)
    return whole.hexdigest()


def state_of(saved: Any, what: str) -> tuple[int, int]:
    """Return (seed, sample) of a saved random state, a tensor or a list. Raises ValueError for anything else."""
    if isinstance(saved, Tensor):
        try:
            require_state(saved)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
    values = saved.tolist() if isinstance(saved, Tensor) else saved
    if not isinstance(values, list | tuple) or len(values) != 2 or not all(type(v) is int for v in values):
        raise ValueError(f"{what} is {shown(saved)}; expected (seed, sample), two numbers")
    try:
        drawn = Draw(*values)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    return drawn.seed, drawn.sample


def random_state(seed: int, sample: int) -> Tensor:
    """Return the run-time tensor (seed, sample) that every lowered graph takes, int64 of shape [2]."""
    drawn = Draw(seed, sample)
    return torch.tensor([drawn.seed, drawn.sample], dtype=torch.int64)


def following(seed: int, sample: int, world_size: int = 1) -> tuple[int, int]:
    """Return (seed, sample) after a training call of every process; a seed has 2^32 samples."""
    return (seed, sample + world_size) if sample + 2 * world_size <= 1 << 32 else (seed + 1, 0)


class LoadedModule(nn.Module):
    """An exported program, loaded by ``fxround.load``: callable and reseedable, without the model's source.

    It takes the arguments of the exported module, of any batch size, and computes without gradients. Raises ValueError
    for a program that has no (seed, sample). Example::

        y = fxround.load("model.pt2").reseed(0, sample=9)(x)
    """

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        if RNG_BUFFER not in dict(program.named_buffers()):
            raise ValueError(f"the file holds no program of fxround: it has no buffer {RNG_BUFFER!r}")
        state_of(program.get_buffer(RNG_BUFFER), RNG_BUFFER)
        self.program = program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the exported module computes, bit for bit, for the same (seed, sample)."""
        require_ieee_arithmetic()
        with aside(), torch.no_grad():
            return self.program(*args, **kwargs)

    def reseed(self, seed: int, sample: int = 0) -> LoadedModule:
        """Set the seed (0 to 2^63 - 1) and sample (0 to 2^32 - 1); returns the module itself."""
        self.program.get_buffer(RNG_BUFFER).copy_(random_state(seed, sample))
        return self
