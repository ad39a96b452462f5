"""Machine code on disk: what one process compiled, the next one reads.

An entry is a file that is named by the SHA-256 of everything that its content depends on: the kernel, the processor,
the compiler's version and the source files of fxround that build such code. It holds that key, a checksum and the code.
The directory is ``$FXROUND_CACHE_DIR``, else ``fxround`` under ``$XDG_CACHE_HOME``, else under ``~/.cache``; an empty
variable, or ``off``, switches the cache off. The cache stores files and changes no number.

An entry appears whole (it is written under another name, then renamed) and is read whole: one that is short, altered or
of another key is removed and compiled again. Code is read only from files that this user owns and that no other user
can write to. When all entries exceed the limit, the least recently used ones are removed. A directory that cannot be
used costs time and is never an error: the logger ``fxround.cache`` gives the reason at level DEBUG.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import fxround.numerics
from fxround.atomic_files import PARTIAL, write_file

VARIABLE: Final = "FXROUND_CACHE_DIR"
LIMIT_BYTES: Final = 256 << 20
_MAGIC: Final = b"fxround code 1\n"
_DIGEST: Final = hashlib.sha256().digest_size
_HEADER: Final = len(_MAGIC) + 2 * _DIGEST
_ENTRY: Final = ".code"
# A temporary file is renamed within milliseconds: one this old belongs to a process that died.
_ABANDONED: Final = 3600.0
# Eviction keeps this part of the limit, so that it is rare. To find whether it is due takes a visit to every file: a
# process does that at its first entry, and again when it has written this many bytes.
_KEPT: Final = 0.75
_UNSEEN_BYTES: Final = LIMIT_BYTES >> 6
_LOG: Final = logging.getLogger("fxround.cache")
# A source file that is newer than this may differ from what was imported.
_STARTED: Final = time.time()
# Patterns of the source files that a text of a kernel depends on, whatever its device is. What composes a kernel is not
# among them (numerics/elementary, kernels/maps.py): it acts through the kernel's digest, which is a part of the key.
SOURCES_OF_KERNELS: Final = (
    "errors.py",
    "short_reprs.py",
    "locks.py",
    "kernels/kinds.py",
    "numerics/*.py",
    "numerics/arithmetic/*.py",
    "numerics/arithmetic/forms/*.py",
    "numerics/formats/*.py",
    "numerics/formats/scaled/*.py",
    "numerics/modes/*.py",
)
EVERYTHING: Final = ("**/*.py",)


def directory() -> Path | None:
    """The directory of the entries; None if the cache is switched off, there is no home, or files have no owner."""
    if not hasattr(os, "geteuid"):  # Windows: nothing would tell whose code an entry holds
        return None
    chosen, home = os.environ.get(VARIABLE), _home()
    if chosen is not None:
        if chosen == "~" or chosen.startswith("~/"):
            return None if home is None else home / chosen[2:]
        return None if chosen.lower() in ("", "off") else Path(os.path.expanduser(chosen)).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):
        return Path(shared) / "fxround"
    return None if home is None else home / ".cache" / "fxround"


@dataclass(frozen=True)
class Usage:
    """The directory (None: switched off), its numbers of entries and bytes, and why it is not used (empty: it is)."""

    directory: Path | None
    entries: int = 0
    bytes: int = 0
    problem: str = ""


def usage() -> Usage:
    """What the cache holds, and whether this process could add to it; nothing is written."""
    place = directory()
    if place is None:
        return Usage(None)
    try:
        with os.scandir(place) as listing:
            sizes = [s.st_size for f in listing if f.name.endswith(_ENTRY) and (s := _status(f)) is not None]
        private = _is_private(place.stat())
    except FileNotFoundError:
        above = next(folder for folder in place.parents if folder.exists())
        writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
        return Usage(place, problem="" if writable else f"cannot be made: {above} is not writable")
    except OSError as error:
        return Usage(place, problem=f"cannot be read: {error.strerror}")
    problem = "" if os.access(place, os.W_OK | os.X_OK) else "not writable"
    return Usage(place, len(sizes), sum(sizes), problem if private else "not used: another user can write to it")


def _home() -> Path | None:
    """``$HOME``; if that is no absolute path, the home directory that the system knows for this user."""
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        import pwd  # not on Windows, where there is no cache

        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    return Path(home) if os.path.isabs(home) else None


@cache
def fingerprint(patterns: tuple[str, ...]) -> str | None:
    """The SHA-256 of source files of fxround; None if they are unknown, since code could then be of another version.

    Files that changed after this process imported them do not say what it runs.

    patterns: globs below fxround's folder, each of which must match a file.
    """
    root = Path(fxround.numerics.__file__).parents[1]
    matches = {pattern: list(root.glob(pattern)) for pattern in patterns}
    if unmatched := [pattern for pattern, files in matches.items() if not files]:
        _LOG.debug("no cache: no source file is %s", ", ".join(unmatched))
        return None
    total = hashlib.sha256()
    for file in sorted({file for files in matches.values() for file in files}):
        try:
            status, text = file.stat(), file.read_bytes()
        except OSError as error:
            _LOG.debug("no cache: %s", error)
            return None
        if max(status.st_mtime, status.st_ctime) > _STARTED:
            _LOG.debug("no cache: %s changed after it was imported", file)
            return None
        total.update(f"{file.relative_to(root)} {len(text)}\n".encode() + text)
    return total.hexdigest()


def key(patterns: tuple[str, ...], *parts: str) -> bytes | None:
    """The key of everything that ``parts`` and the matching source files determine; None if nothing may be kept."""
    source = fingerprint(patterns) if directory() is not None else None
    if source is None:
        return None
    total = hashlib.sha256()
    for part in (source, *parts):
        total.update(f"{len(part)}:{part}\n".encode())
    return total.digest()


def fetch(key: bytes | None, make: Callable[[], bytes]) -> tuple[bytes, bool]:
    """The code under ``key`` and True; or the result of ``make``, kept for the next process, and False."""
    place = directory()
    if key is None or place is None:
        return make(), False
    content = _read(place, key)
    if content is not None:
        return content, True
    made = make()
    try:
        _write(place, key, made)
        if _is_due(len(made)):
            _evict(place)
    except OSError as error:
        _LOG.debug("not kept: %s", error)
    return made, False


def _path(place: Path, key: bytes) -> Path:
    """The file of a key."""
    return place / f"{key.hex()}{_ENTRY}"


def _read(place: Path, key: bytes) -> bytes | None:
    """The code under a key; None if there is none that may be used."""
    path, code = _path(place, key), None
    try:
        content = _content(path)
        code = None if content is None else _opened(content, key)
        if code is not None:
            # The time of the last use, by which ``_evict`` orders entries.
            os.utime(path)
        elif content is not None:
            _LOG.debug("damaged, compiled anew: %s", path)
            path.unlink()
    except OSError as error:
        _LOG.debug("not used: %s", error)
    return code


def _content(path: Path) -> bytes | None:
    """The bytes of a file; None if another user could have written them."""
    # The checks are made on the open file, which no rename can exchange. A symbolic link is refused, a pipe does not
    # block.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and _is_private(status):
            return file.read()
    _LOG.debug("ignored: another user can write to %s", path)
    return None


def _is_private(status: os.stat_result) -> bool:
    """Whether this user owns the file and no other can write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _sealed(code: bytes, key: bytes) -> bytes:
    """An entry: the key, a checksum of key and code, and the code."""
    return _MAGIC + key + hashlib.sha256(key + code).digest() + code


def _opened(content: bytes, key: bytes) -> bytes | None:
    """The code of an entry; None unless the content is an unaltered entry of this key."""
    code = content[_HEADER:]
    return code if content == _sealed(code, key) else None


def _write(place: Path, key: bytes, code: bytes) -> None:
    """Write an entry under a temporary name, and rename it."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(place.stat()):
        raise PermissionError(f"another user owns {place}, or can write to it")
    write_file(_path(place, key), _sealed(code, key), private=True)


class _Unseen:
    """The bytes that this process wrote since it last visited the directory; at first enough for a visit."""

    total = _UNSEEN_BYTES


def _is_due(written: int) -> bool:
    """Whether a visit to the directory is due after ``written`` bytes more."""
    _Unseen.total += written
    if _Unseen.total < _UNSEEN_BYTES:
        return False
    _Unseen.total = 0
    return True


def _evict(place: Path) -> None:
    """Remove abandoned temporary files and, beyond the limit, the entries used longest ago."""
    with os.scandir(place) as listing:
        files = [(status, Path(entry.path)) for entry in listing if (status := _status(entry)) is not None]
    now = time.time()
    _remove(path for status, path in files if path.suffix == PARTIAL and now - status.st_mtime > _ABANDONED)
    entries = sorted((status.st_mtime, status.st_size, path) for status, path in files if path.suffix == _ENTRY)
    total = sum(size for _, size, _ in entries)
    if total <= LIMIT_BYTES:
        return
    doomed = []
    for _, size, path in entries:
        if total <= _KEPT * LIMIT_BYTES:
            break
        doomed.append(path)
        total -= size
    _remove(doomed)


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """The status of a file; None if another process removed it in the meantime."""
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
