"""Writing files completely or not at all: beside the target under another name, then renamed."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

# The end of the name of a file that is not complete.
PARTIAL: Final = ".part"
# The links to what a process has open: replacing one of them would not reach its reader.
_OPEN: Final = tuple(map(Path, ("/dev", "/dev/fd", "/proc/self/fd")))


def write_file(path: str | Path, content: str | bytes | memoryview, *, private: bool = False) -> Path:
    """Write a file, UTF-8 for a text; returns the path.

    An existing file is kept until the new one is complete, which has its permissions. Of a symbolic link the target is
    replaced. A path of a device or a pipe, such as /dev/stdout, is written to.

    private: whether no other user may read or write the file.

    Raises OSError, with the path, if the file cannot be written.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    status = path.stat() if path.exists() else None
    try:
        if path.absolute().parent in _OPEN or (status and not stat.S_ISREG(status.st_mode)):
            with open(path, "wb") as file:
                file.write(data)
        else:
            _replace(path.resolve(), data, 0o600 if private else stat.S_IMODE(status.st_mode) if status else None)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return path


def _replace(target: Path, data: bytes | memoryview, mode: int | None) -> None:
    """Write ``data`` beside a file and rename it. mode: the permissions; None: those that new files have."""
    partial = target.with_name(f".fxround-{secrets.token_hex(8)}{PARTIAL}")
    try:
        with open(partial, "xb", opener=None if mode is None else _private) as file:
            file.write(data)
        if mode is not None:
            os.chmod(partial, mode)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
