"""Files of exported programs: a zip archive that PyTorch wrote, with a record of fxround's.

The record says what a program takes that PyTorch's own file does not say, and has a digest of itself and of every other
member. Before anything is read whole, its size is bounded: members are stored without compression and are no larger
together than the file. Where two readers of archives could differ (bytes before or after the archive, two members of
one name), the file is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import struct
import types
import typing
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import fx, nn

from fxround.atomic_files import write_file
from fxround.capture.leftovers import forget_export
from fxround.capture.program_loading import quick_loading
from fxround.compiler.signature import packed_kinds
from fxround.errors import FxroundError, brief, shown
from fxround.exported.caches import CacheArgument
from fxround.exported.gradients import Gradients
from fxround.exported.graphs import make_writable
from fxround.exported.types import imports_of, named_tuples_of
from fxround.version import VERSION

_RECORD: Final = "/extra/fxround.json"
# Not under extra/, whose files PyTorch reads as text.
_GRADIENTS: Final = "/fxround/gradients.pt2"
# Members that hold numbers; every other one is a text, which is parsed whole.
_NUMBERS: Final = ("data/weights/", "data/constants/", "data/sample_inputs/", _GRADIENTS[1:])
# In bytes: a record has some 60 for each parameter, a text some 500 for each operation.
_MOST_OF_RECORD: Final = 16 << 20
_MOST_OF_TEXT: Final = 1 << 30
# Of the list of members, which has some 100 for each; and of the end of an archive, where that list is named.
_MOST_AT_ONCE: Final = 64 << 20
_MOST_AT_END: Final = 1 << 17
_START: Final = b"PK\3\4"
_END: Final = b"PK\5\6"
_END_SIZE: Final = 22
_ENCRYPTED: Final = 1
# What Python's reader of archives raises for one that is wrong.
_BROKEN: Final = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, ValueError, NotImplementedError, RuntimeError),
    *(struct.error, IndexError, KeyError, OverflowError),
)


@dataclass(frozen=True)
class Record:
    """What a file says of its program.

    version     of fxround
    imports     the modules that have to be imported before PyTorch reads the file
    named       the user's named tuples among the types of arguments and results, as module:name
    sequences   the number of sequences of each packed argument
    training    the mode of the model
    caches      the caches among the arguments
    gradients   what the program of gradients takes; None if there is none
    """

    version: str
    imports: tuple[str, ...]
    named: tuple[str, ...]
    sequences: tuple[int, ...]
    training: bool
    caches: tuple[CacheArgument, ...]
    gradients: Gradients | None


class _Bounded:
    """A file of which Python's reader of archives reads no more at once than the archive of a program needs."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        """Read as a file does. Raises ValueError for a size that no part of a program's archive has."""
        if size > _MOST_AT_ONCE:
            raise ValueError(f"it claims a part of {size} bytes where at most {_MOST_AT_ONCE} are expected")
        return self._file.read(_MOST_AT_END if size < 0 else size)


@contextlib.contextmanager
def _opened(file: IO[bytes], what: str) -> Iterator[tuple[zipfile.ZipFile, str]]:
    """Open the archive of a program, and name its folder. Raises ValueError if it is broken; what: for the message."""
    try:
        with zipfile.ZipFile(typing.cast(IO[bytes], _Bounded(file))) as archive:
            yield archive, _require_plain(archive, file)
    except _BROKEN as error:
        raise ValueError(f"{what}, or is truncated or changed: {error}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{what}, or is truncated or changed: a part begins outside of the file") from error


def save(
    program: Any,
    path: str | Path,
    example: Any,
    keep_inputs: bool,
    training: bool,
    gradients: tuple[Any, Gradients] | None = None,
    caches: Sequence[CacheArgument] = (),
) -> Path:
    """Write an exported program with its record; if writing fails, an existing file is kept.

    example: the example (args, kwargs). keep_inputs: whether they are stored too. training: the model's mode.
    gradients: the program of its gradients, and what that takes. caches: the caches among its arguments. Raises OSError
    if the file cannot be written.
    """
    types, sequences = program.call_spec, [kind.sequences for kind in packed_kinds(example)]
    imports, named = tuple(imports_of(types)), tuple(named_tuples_of(types))
    described = gradients[1] if gradients else None
    record = asdict(Record(VERSION, imports, named, tuple(sequences), training, tuple(caches), described))
    memory = _written(program, keep_inputs)
    with zipfile.ZipFile(memory, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        if gradients is not None:
            archive.writestr(f"{root}{_GRADIENTS}", _written(gradients[0], keep_inputs=False).getvalue())
        digest = _digest(_digest_of_members(archive), record)
        archive.writestr(f"{root}{_RECORD}", json.dumps(record | {"digest": digest}))
    return write_file(path, memory.getbuffer())


def _written(program: Any, keep_inputs: bool) -> io.BytesIO:
    """Return a program as ``torch.export.save`` writes it; the example inputs of gradients include the parameters."""
    if not keep_inputs:
        program._example_inputs = None
    for part in program.graph_module.modules():
        if isinstance(part, fx.GraphModule):
            make_writable(part)
    memory = io.BytesIO()
    torch.export.save(program, memory)
    return memory


def read(file: IO[bytes], path: str | Path, any_version: bool) -> tuple[Record, bytes | None]:
    """Return the record of a file, and the program of gradients.

    path: for messages. Raises ValueError unless the file is one that ``save`` wrote, and FxroundError for one of
    another version, unless ``any_version``.
    """
    name = shown(str(path))
    with _opened(file, f"{name} holds no program of fxround") as (archive, root):
        if f"{root}{_RECORD}" not in archive.namelist():
            raise ValueError("it has no record of a version; it was not written by export()")
        data = _parsed(_content(archive, f"{root}{_RECORD}"))
        members = _digest_of_members(archive)
        gradients = _content(archive, f"{root}{_GRADIENTS}") if f"{root}{_GRADIENTS}" in archive.namelist() else None
    digest, version = data.pop("digest", None), data.get("version")
    if digest == members:
        raise ValueError(
            f"{name} was exported by fxround before its digest covered its record: export the module again"
        )
    if digest != _digest(members, data):
        raise ValueError(f"{name} was changed after it was exported: its digest differs; export the module again")
    if version != VERSION and not any_version:
        raise FxroundError(
            f"{name} was exported by fxround {shown(version)}, and this is {VERSION}, which may give "
            "other bits: export the module again, or pass any_version=True"
        )
    try:
        record: Record = _typed(data, Record, "the record")
        if (gradients is None) != (record.gradients is None):
            raise ValueError("a record of gradients and a program of gradients belong together, and one is missing")
    except ValueError as error:
        raise ValueError(f"{name} has a wrong record: {error}; export the module again") from error
    return record, gradients


def program_of(file: IO[bytes], path: str | Path) -> tuple[nn.Module, Any]:
    """Return the program that PyTorch reads from a file, and the structures of its arguments and of its results.

    path: for messages. Raises ValueError for whatever PyTorch raises for a file that it cannot read,
    and ImportError for a module that is missing.
    """
    file.seek(0)
    try:
        with quick_loading():
            exported: Any = torch.export.load(file)
            program = exported.module()
        forget_export(exported.graph_module)
        return program, exported.call_spec
    except ImportError as error:
        raise ImportError(f"{shown(str(path))} needs a module that cannot be imported: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # of any kind: the file says which code runs
        said = brief(str(error).strip().partition("\n")[0])
        raise ValueError(
            f"{shown(str(path))} holds a program that PyTorch {torch.__version__} cannot read ({type(error).__name__}: "
            f"{said}): export the module again, with this version of PyTorch"
        ) from error


def nested(content: bytes) -> io.BytesIO:
    """Return a program that is a member of a file as a file. Raises ValueError if it is no archive of a program."""
    memory = io.BytesIO(content)
    with _opened(memory, "the program of gradients is none"):
        return memory


def _require_plain(archive: zipfile.ZipFile, file: IO[bytes]) -> str:
    """Return the folder of an archive. Raises ValueError unless every reader finds the same members in it."""
    size, members = file.seek(0, os.SEEK_END), archive.infolist()
    file.seek(0)
    start = file.read(len(_START))
    file.seek(size - _END_SIZE)
    if start != _START or file.read(len(_END)) != _END or archive.comment:
        raise ValueError("bytes before or after the archive")
    if not members or min(member.header_offset for member in members) != 0:
        raise ValueError("bytes before the archive")
    names = [member.filename for member in members]
    root = names[0].partition("/")[0]
    for name, member in zip(names, members, strict=True):
        if not name.startswith(f"{root}/"):
            raise ValueError(f"the member {shown(name)} is not in the folder {shown(root)}")
        stored = member.compress_type == zipfile.ZIP_STORED and member.compress_size == member.file_size
        if not stored or member.flag_bits & _ENCRYPTED:
            raise ValueError(f"the member {shown(name)} is compressed or encrypted, which no member of a program is")
        most = _MOST_OF_RECORD if name == f"{root}{_RECORD}" else _MOST_OF_TEXT
        if member.file_size > most and not name.startswith(tuple(f"{root}/{part}" for part in _NUMBERS)):
            raise ValueError(f"the member {shown(name)} has {member.file_size} bytes; expected {most} at most")
    if len(set(names)) < len(names):
        raise ValueError("two members have one name")
    if sum(member.file_size for member in members) > size:
        raise ValueError("the members are larger together than the file")
    return root


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its record is no JSON: {brief(str(error))}") from error
    if not isinstance(data, dict):
        raise ValueError(f"its record is {shown(data)}; expected an object")
    return data


def _digest_of_members(archive: zipfile.ZipFile) -> str:
    """Return the SHA-256 of names and contents of an archive's members, sorted by name, without fxround's record."""
    whole = hashlib.sha256()
    for name in sorted(archive.namelist()):
        if name.endswith(_RECORD):
            continue
        whole.update(f"{len(name)}:{name}={archive.getinfo(name).file_size}:".encode())
        for chunk in _chunks(archive, name):
            whole.update(chunk)
    return whole.hexdigest()


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    return b"".join(_chunks(archive, name))


def _chunks(archive: zipfile.ZipFile, name: str) -> Iterator[bytes]:
    with archive.open(name) as member:
        while chunk := member.read(1 << 20):
            yield chunk


def _digest(members: str, record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record and of the digest of the other members."""
    return hashlib.sha256(f"{members}\n{json.dumps(record, sort_keys=True)}".encode()).hexdigest()


def _typed(value: Any, kind: Any, where: str) -> Any:
    """Return parsed JSON as a value of a type: a dataclass, tuple, union, str, int, bool or None.

    Raises ValueError, with the place, for a value of another type.
    """
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        others = [part for part in parts if part is not types.NoneType]
        if value is None and types.NoneType in parts:
            return None
        return _typed(value, next((part for part in others if type(value) is part), others[0]), where)
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        kinds = (parts[0],) * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) == len(value):
            return tuple(_typed(v, k, f"{where}[{i}]") for i, (v, k) in enumerate(zip(value, kinds, strict=True)))
    elif is_dataclass(kind) and isinstance(value, dict):
        names, hints = [field.name for field in fields(kind)], typing.get_type_hints(kind)
        if set(value) == set(names):
            made: Any = kind
            return made(**{name: _typed(value[name], hints[name], f"{where}.{name}") for name in names})
        raise ValueError(f"{where} has the fields {shown(sorted(value))}; expected {', '.join(names)}")
    elif type(value) is kind:
        return value
    raise ValueError(f"{where} is {shown(value)}; expected {getattr(kind, '__name__', kind)}")
