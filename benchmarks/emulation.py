"""Kernels of another processor, run by an emulator in the place of this machine's own.

Inside ``emulated()`` everything above the machine code is as usual: operators, launchers, plans and tables. A kernel is
compiled for AArch64, and a call goes to a process under ``qemu-aarch64``, which fetches the pages that the kernel
touches and returns them. So kernels are called as the launchers call them, with the same addresses. ``compiled()`` only
compiles. Needs qemu-aarch64 and aarch64-linux-gnu-gcc; ``missing`` says how to install them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch

from fxround.runtime.cpu import code, threads
from fxround.runtime.cpu.llvm import engine
from fxround.runtime.cpu.llvm.engine import object_for

SET: Final = "neon"
TRIPLE: Final = "aarch64-unknown-linux-gnu"
EMULATOR: Final = "qemu-aarch64"
COMPILER: Final = "aarch64-linux-gnu-gcc"
_LIBRARIES: Final = Path("/usr/aarch64-linux-gnu")
_SOURCE: Final = Path(__file__).with_name("emulated_runner.c")
_PAGE: Final = 4096
_TRIES: Final = 5
# What the runner asks and answers (emulated_runner.c).
_LOAD, _CALL = 1, 2
_REFUSED, _LOADED, _FETCH, _DONE = 0, 1, 3, 4


def missing() -> str:
    """Return what emulation needs and this machine lacks, as a sentence; an empty text if nothing is missing."""
    lacking = [tool for tool in (EMULATOR, COMPILER) if shutil.which(tool) is None]
    if not lacking and not (_LIBRARIES / "lib/libc.so.6").exists():
        lacking = [str(_LIBRARIES)]
    names = "qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
    return f"{' and '.join(lacking)} not found; on Debian, install {names}" if lacking else ""


class Runner:
    """A process that runs kernels for AArch64. It ends with this one."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fxround-aarch64-"))
        self._lock = threading.Lock()
        self._objects = 0
        self.calls = 0
        self._memory = os.open("/proc/self/mem", os.O_RDWR)
        program = self._folder / "runner"
        _run([COMPILER, "-O2", "-Wall", "-Wextra", "-Werror", str(_SOURCE), "-o", str(program), "-ldl"])
        self._process = self._started(program)
        atexit.register(self.close)

    def _started(self, program: Path) -> subprocess.Popen[bytes]:
        """Start the program where the emulator's own memory has addresses that this process does not use."""
        for _ in range(_TRIES):
            command = [EMULATOR, "-L", str(_LIBRARIES), str(program)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            # It has answered a first request, so all of its libraries are mapped.
            self._process = process
            with suppress(RuntimeError):
                self.load(b"", "nothing")
            # A page that the emulator itself has would be read without a fault, and with other contents.
            if not _overlap(_mapped(process.pid), _mapped(os.getpid())):
                return process
            process.kill()
            process.wait()
        raise RuntimeError(f"{EMULATOR} was started {_TRIES} times at addresses that this process uses: run it again")

    def close(self) -> None:
        """End the process and remove its files."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def load(self, content: bytes, name: str) -> int:
        """Load an object file; return the address of its function. RuntimeError names symbols that are not found."""
        with self._lock:
            self._objects += 1
            path = self._folder / f"{self._objects}.so"
            if content:
                path.with_suffix(".o").write_bytes(content)
                _run([COMPILER, "-shared", "-nostdlib", str(path.with_suffix(".o")), "-o", str(path)])
            told = str(path).encode(), name.encode()
            self._ask(struct.pack("<3Q", _LOAD, *map(len, told)) + b"".join(told))
            kind, value = self._words(2)
            return value if kind == _LOADED else self._fail(kind, value)

    def call(self, address: int, arguments: Sequence[int]) -> None:
        """Call the function at an address, with this process's addresses among its arguments.

        Raises RuntimeError if it touches memory that this process does not have, or changes its caller's floating-point
        environment.
        """
        with self._lock:
            self.calls += 1
            words = [a % (1 << 64) for a in arguments]
            self._ask(struct.pack(f"<{3 + len(words)}Q", _CALL, address, len(words), *words))
            fetched: dict[int, bytes] = {}
            while True:
                kind, value = self._words(2)
                if kind == _DONE:
                    break
                if kind != _FETCH:
                    self._fail(kind, value)
                fetched[value] = self._page(value)
                self._ask(struct.pack("<Q", len(fetched[value]) == _PAGE) + fetched[value])
            for _ in range(value):
                (page,) = self._words(1)
                self._store(page, fetched[page], self._bytes(_PAGE))

    def _page(self, address: int) -> bytes:
        """The bytes of a page of this process; none if it is not mapped."""
        try:
            return os.pread(self._memory, _PAGE, address)
        except OSError:
            return b""

    def _store(self, address: int, before: bytes, after: bytes) -> None:
        """Write the bytes that the call changed, and no others: this process may have written to the rest."""
        changed = np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], changed, [False]))))
        for first, end in edges.reshape(-1, 2).tolist():
            ctypes.memmove(address + first, after[first:end], end - first)

    def _ask(self, content: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(content)
        self._process.stdin.flush()

    def _bytes(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise RuntimeError(f"{EMULATOR} ended with status {self._process.wait()}")
        return data

    def _words(self, number: int) -> tuple[int, ...]:
        return struct.unpack(f"<{number}Q", self._bytes(8 * number))

    def _fail(self, kind: int, length: int) -> int:
        raise RuntimeError(self._bytes(length).decode() if kind == _REFUSED else f"answer {kind} was not expected")


def versions() -> str:
    """Return the versions of the emulator and of the cross compiler."""
    return "; ".join(_run([tool, "--version"]).splitlines()[0] for tool in (EMULATOR, COMPILER))


@dataclass(frozen=True)
class Compiled:
    """A kernel's object file, the name of its function, and the name of what built it (``build_map``)."""

    builder: str
    function: str
    content: bytes


@dataclass(frozen=True)
class Remote:
    """A kernel in the runner; called like the ctypes function that it replaces."""

    runner: Runner
    address: int

    def __call__(self, *arguments: Any) -> None:
        """Call it there."""
        self.runner.call(self.address, [a if isinstance(a, int) else ctypes.addressof(a) for a in arguments])


@cache
def runner() -> Runner:
    """Return this process's runner."""
    return Runner()


@contextmanager
def emulated() -> Iterator[None]:
    """Run the block's kernels as AArch64 code under the emulator, on one thread."""
    here = runner()
    with _replaced(lambda kernel: Remote(here, here.load(kernel.content, kernel.function))):
        yield


@contextmanager
def compiled() -> Iterator[list[Compiled]]:
    """Compile the block's kernels for AArch64 and run none: results have any bits. Yields the kernels."""
    objects: list[Compiled] = []

    def make(kernel: Compiled) -> Nothing:
        objects.append(kernel)
        return Nothing()

    # A name of its own, so that no cache gives a kernel that does nothing to a later block.
    name = f"{SET}, not run"
    with patch.object(engine, "SETS", {**engine.SETS, name: engine.SETS[SET]}), _replaced(make, name):
        yield objects


@dataclass(frozen=True)
class Nothing:
    """A kernel that does nothing."""

    address: int = 0

    def __call__(self, *arguments: Any) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Alone:
    """A pool without threads."""

    def share(self, function: Callable[[int], None], task: int, members: int) -> None:
        """Call function(task) once."""
        function(task)


@contextmanager
def _replaced(make: Callable[[Compiled], Any], name: str = SET) -> Iterator[None]:
    """Compile the block's kernels for AArch64, and let ``make`` return what calls them and has their ``address``."""

    def function(digest: str, build: Callable[..., str], subject: Any, name: str, prototype: Any, isa: str) -> Any:
        return make(Compiled(build.__name__, name, object_for(build(subject), SET, TRIPLE)))

    before, isa = torch.get_num_threads(), code._ISA[0]
    torch.set_num_threads(1)
    # Threads of this process could not call what is in another one.
    with patch.object(code, "_function", function), patch.object(threads, "_pool", Alone):
        code._ISA[0] = name
        try:
            yield
        finally:
            code._ISA[0] = isa
            torch.set_num_threads(before)


def undefined_symbols(content: bytes) -> list[str]:
    """Return the names that a 64-bit ELF object leaves to the linker; ValueError if it is not one for AArch64."""
    if content[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", content, 18) != (183,):
        raise ValueError("this is no little-endian ELF object for AArch64")
    start, size, number = (
        struct.unpack_from(kind, content, at)[0] for kind, at in (("<Q", 40), ("<H", 58), ("<H", 60))
    )
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, start + i * size) for i in range(number)]
    symbols = []
    for _, kind, _, _, offset, length, strings, *_ in sections:
        if kind != 2:
            continue
        names = sections[strings][4]
        for at in range(offset + 24, offset + length, 24):
            name, _, _, section = struct.unpack_from("<IBBH", content, at)
            if section == 0:
                symbols.append(content[names + name : content.index(b"\0", names + name)].decode())
    return symbols


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _mapped(process: int) -> list[tuple[int, int]]:
    """The address ranges of a process."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    ranges = (line.split(maxsplit=1)[0].split("-") for line in lines if not line.endswith("[vsyscall]"))
    return sorted((int(first, 16), int(end, 16)) for first, end in ranges)


def _overlap(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
    return any(first < end and begin < last for first, last in some for begin, end in others)
