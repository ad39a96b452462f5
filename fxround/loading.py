"""Exported programs: written whole or not at all, and checked when they are loaded as a module.

A file that ``RoundedModule.export`` wrote holds the graph with every rounding in it, (seed, sample) as a buffer of a
known name, the version of fxround that wrote it, and a digest of all the rest. A file that is truncated, changed or of
another version is refused. The digest tells accidents, not attacks: loading unpickles, so that a file of a stranger can
run any code.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxround.arithmetic import require_ieee_arithmetic
from fxround.dynamo import aside
from fxround.errors import FxroundError, shown
from fxround.runtime.execute import Draw, require_state

VERSION: Final = "0.1.0"
_RECORD: Final = "/extra/fxround.json"
RNG_BUFFER: Final = "fxround_rng"


def save(program: Any, path: str | Path, keep_inputs: bool) -> Path:
    """Write an exported program with its record; an error leaves the file that was there before.

    keep_inputs: whether the example inputs are in the file too. Raises OSError where the file cannot be written.
    """
    if not keep_inputs:
        program._example_inputs = None
    memory = io.BytesIO()
    torch.export.save(program, memory)
    with zipfile.ZipFile(memory, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        record = {"version": VERSION, "digest": _digest(archive)}
        archive.writestr(f"{root}{_RECORD}", json.dumps(record))
    # Through a symbolic link, the file that it leads to is replaced.
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
    """The module that ``RoundedModule.export`` wrote: the same bits, without the model's source.

    any_version: whether a file of another version of fxround is loaded too, which may give other bits. Raises OSError
    where there is no such file, ValueError for one that is truncated, changed or no program of fxround, FxroundError
    for another version. PyTorch unpickles what is in the file: never load a file from strangers.
    """
    _check(Path(path), any_version)
    return LoadedModule(torch.export.load(path).module())


def _check(path: Path, any_version: bool) -> None:
    """Raises unless the file is what ``save`` wrote."""
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
            f"{name} holds no program of fxround, as it has no record of a version: it is truncated, or was written by "
            "something else than export()"
        )
    if not isinstance(record, Mapping) or record.get("digest") != digest:
        raise ValueError(f"{name} was changed after it was exported: its digest is another; export the module again")
    if record.get("version") != VERSION and not any_version:
        raise FxroundError(
            f"{name} was exported by fxround {shown(record.get('version'))}, and this is {VERSION}, which may give "
            "other bits: export the module again, or pass any_version=True"
        )


def _digest(archive: zipfile.ZipFile) -> str:
    """SHA-256 over the names and contents of an archive's members, in order of the names; fxround's record left out."""
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
    """(seed, sample) of a saved random state, a tensor or a list; ValueError for what is none."""
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
    """The run-time tensor (seed, sample) that every lowered graph takes, int64 of shape [2]."""
    drawn = Draw(seed, sample)
    return torch.tensor([drawn.seed, drawn.sample], dtype=torch.int64)


def following(seed: int, sample: int, world_size: int = 1) -> tuple[int, int]:
    """What (seed, sample) become after a training call of each process: 2^32 samples are a seed's."""
    return (seed, sample + world_size) if sample + 2 * world_size <= 1 << 32 else (seed + 1, 0)


class LoadedModule(nn.Module):
    """An exported program: callable, reseedable, without the model's source."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        if RNG_BUFFER not in dict(program.named_buffers()):
            raise ValueError(f"the file holds no program of fxround: it has no buffer {RNG_BUFFER!r}")
        state_of(program.get_buffer(RNG_BUFFER), RNG_BUFFER)
        self.program = program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the exported module computed, bit for bit."""
        require_ieee_arithmetic()
        with aside(), torch.no_grad():
            return self.program(*args, **kwargs)

    def reseed(self, seed: int, sample: int = 0) -> LoadedModule:
        """Set what the random bits are a function of; returns the module itself."""
        self.program.get_buffer(RNG_BUFFER).copy_(random_state(seed, sample))
        return self
