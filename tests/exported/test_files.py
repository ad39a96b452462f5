"""Files that are damaged or made by hand: one clear error, no crash, no import, no memory for what a file claims."""

from __future__ import annotations

import builtins
import io
import json
import random
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from archives import RECORD, archive_of, members_of, signed, with_record
from torch import Tensor, nn

import fxround
from fxround.errors import FxroundError
from fxround.exported import files as exported_files
from fxround.version import VERSION


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.rand(2, 4)


@pytest.fixture(scope="module")
def content(x: Tensor, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A program with gradients."""
    compiled = fxround.compile(nn.Sequential(nn.Linear(4, 3), nn.Tanh()).eval(), "reproducible")
    return compiled.export(tmp_path_factory.mktemp("files") / "model.pt2", x, gradients=True).read_bytes()


def refused(path: Path, content: bytes, said: str = "") -> None:
    """A file is refused with one error that names it."""
    path.write_bytes(content)
    with pytest.raises((ValueError, FxroundError), match=said) as error:
        fxround.load(path)
    assert str(path) in str(error.value) and len(str(error.value)) < 600, str(error.value)[:900]


def loaded_or_refused(path: Path) -> fxround.LoadedModule | Exception:
    try:
        return fxround.load(path)
    except (ValueError, FxroundError) as error:
        return error


def changed(record: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    return record | {"gradients": record["gradients"] | {field: value}}


def cache(**fields: Any) -> dict[str, Any]:
    layer = {"heads": 1, "key_width": 1, "value_width": 1, "dtype": "float32", "room": 0}
    return {"caches": [{"place": 0, "layers": [layer | fields], "dynamic": True}]}


def test_a_hand_made_file_with_the_right_record_is_loaded(content: bytes, x: Tensor, tmp_path: Path) -> None:
    """So that what the others refuse is the change that they make."""
    path = tmp_path / "same.pt2"
    path.write_bytes(with_record(content, lambda record: record))
    (tmp_path / "own.pt2").write_bytes(content)
    assert torch.equal(fxround.load(path)(x), fxround.load(tmp_path / "own.pt2")(x))


RECORDS: Final[dict[str, tuple[Callable[[dict[str, Any]], Any], str]]] = {
    "no fields": (lambda _: {"version": VERSION}, "expected version, imports, named, sequences"),
    "another field": (lambda r: r | {"more": 1}, "the record has the fields"),
    "version": (lambda r: r | {"version": 5}, "was exported by fxround 5"),
    "imports": (lambda r: r | {"imports": "os"}, r"the record.imports is 'os'"),
    "import": (lambda r: r | {"imports": [["os"]]}, r"the record.imports\[0\] is \['os'\]; expected str"),
    "named": (lambda r: r | {"named": ["a:B", None]}, r"named\[1\] is None; expected str"),
    "sequences": (lambda r: r | {"sequences": [1.5]}, r"sequences\[0\] is 1.5; expected int"),
    "training": (lambda r: r | {"training": 0}, "training is 0; expected bool"),
    "caches": (lambda r: r | {"caches": {"a": 1}}, "caches is"),
    "a cache": (lambda r: r | {"caches": [{"place": 0}]}, "expected place, layers, dynamic"),
    "a place": (lambda r: r | {"caches": [{"place": -1, "layers": [], "dynamic": True}]}, "argument -1 is a cache"),
    "a dtype": (lambda r: r | cache(dtype="load"), "the dtype 'load', which is none"),
    "a size": (lambda r: r | cache(room=-1), "sizes below zero"),
    "a flag": (lambda r: r | cache(heads=True), "heads is True; expected int"),
    "no gradients": (lambda r: r | {"gradients": None}, "one is missing"),
    "gradients": (lambda r: r | {"gradients": [1]}, "the record.gradients is"),
    "kind": (lambda r: changed(r, "inputs", [["file", "x", 0]] * 3), "expected parameter, buffer or argument"),
    "name": (lambda r: changed(r, "inputs", [["parameter", "no.weight", 0]] * 3), "'no.weight', which its program"),
    "argument": (lambda r: changed(r, "inputs", [["argument", "", 7]] * 3), "argument 7, which its program does not"),
    "position": (lambda r: changed(r, "gradients", [0, 9]), "expected 0 to 2"),
    "reached": (lambda r: changed(r, "reached", [[0]]), "do not fit together"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_of_another_structure_is_refused(case: str, content: bytes, tmp_path: Path) -> None:
    change, said = RECORDS[case]
    refused(tmp_path / "model.pt2", with_record(content, change), said)


@pytest.mark.parametrize("text", ["", "5", "[]", "null", "{", "[" * 100_000, '{"a": ' * 100_000, "9" * 10_000, "\xff"])
def test_a_record_that_is_no_object_is_refused(text: str, content: bytes, tmp_path: Path) -> None:
    members = members_of(content) | {RECORD: text.encode("latin-1")}
    refused(tmp_path / "model.pt2", archive_of(members), "its record is")


def test_a_digest_that_does_not_cover_the_record_is_refused(content: bytes, tmp_path: Path) -> None:
    """The digest of earlier files was that of the other members."""
    members = members_of(content)
    record = json.loads(members[RECORD])
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        record["digest"] = exported_files._digest_of_members(archive)
    earlier = archive_of(members | {RECORD: json.dumps(record).encode()})
    refused(tmp_path / "model.pt2", earlier, "before its digest covered its record: export the module again")


def test_archives_that_readers_could_read_differently_are_refused(content: bytes, tmp_path: Path) -> None:
    path, members = tmp_path / "model.pt2", members_of(content)
    refused(path, b"#!/bin/sh\n" + content, "bytes before or after the archive")
    refused(path, content + b"\n", "bytes before or after the archive")
    refused(path, archive_of(members, zipfile.ZIP_DEFLATED), "is compressed or encrypted")
    memory = io.BytesIO(content)
    with zipfile.ZipFile(memory, "a") as archive:
        archive.writestr("elsewhere/models/model.json", "{}")
    refused(path, memory.getvalue(), "is not in the folder")
    folder, memory = next(iter(zipfile.ZipFile(io.BytesIO(content)).namelist())).partition("/")[0], io.BytesIO(content)
    with zipfile.ZipFile(memory, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(f"{folder}/models/model.json", members["models/model.json"])
    refused(path, memory.getvalue(), "two members have one name")
    refused(path, archive_of({name: c for name, c in members.items() if name != RECORD}), "no record of a version")


def test_members_that_are_swapped_are_refused(content: bytes, tmp_path: Path) -> None:
    members = members_of(content)
    first, second = "data/weights/weight_0", "models/model.json"
    swapped = members | {first: members[second], second: members[first]}
    refused(tmp_path / "model.pt2", archive_of(swapped), "its digest differs")
    record = json.loads(members[RECORD])
    del record["digest"]
    refused(tmp_path / "model.pt2", signed(swapped, record), "that PyTorch .* cannot read")
    refused(tmp_path / "model.pt2", signed(members | {"fxround/gradients.pt2": b"x"}, record), "program of gradients")


@pytest.mark.parametrize("name", [RECORD, "models/model.json"])
def test_a_text_that_claims_gigabytes_is_not_read(name: str, content: bytes, tmp_path: Path) -> None:
    """8 GiB of zeros, which the file system does not store."""
    path, size = tmp_path / "model.pt2", 8 << 30
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members_of(content).items():
            if member != name:
                archive.writestr(f"archive/{member}", text)
    with zipfile.ZipFile(path, "a") as archive:
        with archive.open(f"archive/{name}", "w", force_zip64=True) as member:
            member.write(b"0")
        info = archive.getinfo(f"archive/{name}")
        info.file_size = info.compress_size = size
        archive.start_dir += size
    assert path.stat().st_size > size > 1000 * path.stat().st_blocks * 512
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"{name}.*8589934592 bytes; expected"):
            fxround.load(path)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_a_list_of_members_that_claims_gigabytes_is_not_read(tmp_path: Path) -> None:
    path, size = tmp_path / "model.pt2", 8 << 30
    end = struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, size, 0)
    end += struct.pack("<4sLQL", b"PK\6\7", 0, size, 1)
    end += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    with open(path, "wb") as file:
        file.write(b"PK\3\4")
        file.seek(size)
        file.write(end)
    with pytest.raises(ValueError, match="claims a part of 8589934592 bytes"):
        fxround.load(path)


def test_no_module_is_imported_that_a_file_names(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign_module.py").write_text("import builtins\nbuiltins.foreign = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "model.pt2"
    for name in ("foreign_module", "antigravity", "foreign_module.inner", "", "..", "transformers_of_mine"):
        path.write_bytes(with_record(content, lambda record, name=name: record | {"imports": [name]}))
        with pytest.raises(ImportError, match="is not imported: import it first"):
            fxround.load(path)
    assert not hasattr(builtins, "foreign") and "antigravity" not in sys.modules
    path.write_bytes(with_record(content, lambda record: record | {"imports": ["foreign_module"]}))
    monkeypatch.setattr(builtins, "foreign", False, raising=False)
    fxround.load(path, imports=["foreign_module"])
    assert builtins.foreign  # type: ignore[attr-defined]


def test_random_damage_is_refused_or_without_effect(content: bytes, x: Tensor, tmp_path: Path) -> None:
    """What no reader looks at (times, permissions) may change; whatever loads has the same bits."""
    path, rng = tmp_path / "model.pt2", random.Random(5)
    path.write_bytes(content)
    expected, modules, loaded = fxround.load(path)(x), set(sys.modules), 0
    for number in range(400):
        data, at = bytearray(content), rng.randrange(len(content))
        if number % 4 == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif number % 4 == 1:
            del data[at:]
        elif number % 4 == 2:
            del data[at : at + rng.randrange(1, 60)]
        else:  # the list of members is at the end
            for _ in range(3):
                data[rng.randrange(len(data) - 1500, len(data))] = rng.randrange(256)
        path.write_bytes(data)
        found = loaded_or_refused(path)
        if isinstance(found, Exception):
            assert str(path) in str(found)
        else:
            loaded += 1
            assert torch.equal(found(x), expected)
    assert loaded < 100 and set(sys.modules) == modules
