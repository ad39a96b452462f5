"""Machine code on disk: what one process compiled, the next one reads.

What is true here. An entry is a file named by the SHA-256 of everything that its content depends on: the kernel, the
processor, the compiler's version and fxround's own source. It holds that key, a checksum and the code. The directory
is ``$FXROUND_CACHE_DIR``, else ``fxround`` under ``$XDG_CACHE_HOME``, else under ``~/.cache``; set to nothing, or to
``off``, the variable switches the cache off. It moves files; it changes no number.

Why it is safe. An entry appears whole (written aside, then renamed) and is read whole: one that is short, altered or of
another key is removed and compiled anew. Code is read only from files that this user owns and no other user
can write to. The least recently used entries go when all together exceed the limit. A directory that cannot be
used costs time, never an error: the logger ``fxround.cache`` says why at level DEBUG.

    before   every process compiles its kernels again
    after    fetch(key("map", digest, target), lambda: object_code(text))
"""

from __future__ import annotations

import hashlib
import logging
import os
import pwd
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import fxround.numerics

VARIABLE: Final = "FXROUND_CACHE_DIR"
LIMIT_BYTES: Final = 256 << 20
_MAGIC: Final = b"fxround code 1\n"
_DIGEST: Final = hashlib.sha256().digest_size
_HEADER: Final = len(_MAGIC) + 2 * _DIGEST
_ENTRY: Final = ".code"
_ASIDE: Final = ".part"
# A file written aside is renamed within milliseconds: one this old belongs to a process that died.
_ABANDONED: Final = 3600.0
# Eviction leaves this much of the limit, so that it is rare; looking whether it is due costs a visit to every file, so
# that a process does so at its first entry, and again when it has written this much.
_KEPT: Final = 0.75
_UNSEEN_BYTES: Final = LIMIT_BYTES >> 6
_LOG: Final = logging.getLogger("fxround.cache")
# What is on disk from here on is not what was imported.
_STARTED: Final = time.time()


def directory() -> Path | None:
    """Where entries are kept; None if the cache is switched off or there is no home."""
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
    """The directory (None: switched off), how many entries and bytes are in it, and why it is not used ("": it is)."""

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
    """``$HOME``; where that is empty or no absolute path, what the system knows of this user."""
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    return Path(home) if os.path.isabs(home) else None


@cache
def fingerprint() -> str | None:
    """The SHA-256 of fxround's source files; None if they are unknown: then code cannot be told from older code.

    Files that changed since this process imported them do not say what it runs.
    """
    root = Path(fxround.numerics.__file__).parents[1]
    files = sorted(root.rglob("*.py"))
    total = hashlib.sha256()
    for file in files:
        try:
            status, text = file.stat(), file.read_bytes()
        except OSError as error:
            _LOG.debug("no cache: %s", error)
            return None
        if max(status.st_mtime, status.st_ctime) > _STARTED:
            _LOG.debug("no cache: %s changed after it was imported", file)
            return None
        total.update(f"{file.relative_to(root)} {len(text)}\n".encode() + text)
    return total.hexdigest() if files else None


def key(*parts: str) -> bytes | None:
    """The key of what ``parts`` and fxround's source determine; None if nothing may be kept."""
    source = fingerprint()
    if source is None or directory() is None:
        return None
    total = hashlib.sha256()
    for part in (source, *parts):
        total.update(f"{len(part)}:{part}\n".encode())
    return total.digest()


def fetch(key: bytes | None, make: Callable[[], bytes]) -> tuple[bytes, bool]:
    """The code under ``key`` and True; or what ``make`` returns, kept for the next process, and False."""
    place = directory()
    if key is None or place is None:
        return make(), False
    found = _read(place, key)
    if found is not None:
        return found, True
    made = make()
    try:
        _write(place, key, made)
        if _is_due(len(made)):
            _evict(place)
    except OSError as error:
        _LOG.debug("not kept: %s", error)
    return made, False


def _path(place: Path, key: bytes) -> Path:
    return place / f"{key.hex()}{_ENTRY}"


def _read(place: Path, key: bytes) -> bytes | None:
    path, code = _path(place, key), None
    try:
        content = _content(path)
        code = None if content is None else _opened(content, key)
        if code is not None:
            os.utime(path)
        elif content is not None:
            _LOG.debug("damaged, compiled anew: %s", path)
            path.unlink()
    except OSError as error:
        _LOG.debug("not used: %s", error)
    return code


def _content(path: Path) -> bytes | None:
    """The bytes of a file; None if another user could have written them."""
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
    return _MAGIC + key + hashlib.sha256(key + code).digest() + code


def _opened(content: bytes, key: bytes) -> bytes | None:
    """The code of an entry; None unless the content is an entry of this key, whole and unaltered."""
    code = content[_HEADER:]
    return code if content == _sealed(code, key) else None


def _write(place: Path, key: bytes, code: bytes) -> None:
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(place.stat()):
        raise PermissionError(f"another user owns {place}, or can write to it")
    descriptor, aside = tempfile.mkstemp(suffix=_ASIDE, dir=place)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_sealed(code, key))
        os.replace(aside, _path(place, key))
    except OSError:
        Path(aside).unlink(missing_ok=True)
        raise


class _Unseen:
    """Bytes that this process wrote since it last looked at the directory: all of it, to begin with."""

    total = _UNSEEN_BYTES


def _is_due(written: int) -> bool:
    _Unseen.total += written
    if _Unseen.total < _UNSEEN_BYTES:
        return False
    _Unseen.total = 0
    return True


def _evict(place: Path) -> None:
    """Remove what was abandoned and, beyond the limit, the entries that were used longest ago."""
    with os.scandir(place) as listing:
        files = [(status, Path(found.path)) for found in listing if (status := _status(found)) is not None]
    now = time.time()
    _remove(path for status, path in files if path.suffix == _ASIDE and now - status.st_mtime > _ABANDONED)
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


def _status(found: os.DirEntry[str]) -> os.stat_result | None:
    """None for a file that another process removed in between."""
    try:
        return found.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
