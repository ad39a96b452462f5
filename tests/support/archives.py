"""Changed files of exported programs, with a digest that fits: what someone could write by hand."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from typing import Any, Final

from fxround.exported import files as exported_files

RECORD: Final = "extra/fxround.json"


def members_of(content: bytes) -> dict[str, bytes]:
    """The members of a file, by their names without the folder."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def archive_of(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file with these members."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"archive/{name}", content)
    return memory.getvalue()


def signed(members: dict[str, bytes], record: dict[str, Any]) -> bytes:
    """A file with these members, and this record with the digest that fits them."""
    others = {name: content for name, content in members.items() if name != RECORD}
    with zipfile.ZipFile(io.BytesIO(archive_of(others))) as archive:
        digest = exported_files._digest(exported_files._digest_of_members(archive), record)
    return archive_of(others | {RECORD: json.dumps(record | {"digest": digest}).encode()})


def with_record(content: bytes, change: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
    """A file with a changed record."""
    members = members_of(content)
    record = json.loads(members[RECORD])
    del record["digest"]
    return signed(members, change(record))
