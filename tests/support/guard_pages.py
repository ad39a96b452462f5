"""Memory between inaccessible pages, and child processes that end if a kernel leaves its operands.

``guarded`` copies a tensor, its strides included, so that its first or its last byte is next to such a page: an
access one element beyond it crashes. ``everywhere`` does the same for results, tables and scratch memory. ``survive``
runs numbered cases in a child process; if a child dies, its case is named, and another child continues after it.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from fxround.runtime import buffers, contractions
from fxround.runtime.cpu import contraction, launches, planes

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LINE: Final = 64


class Memory:
    """Pages of bytes between two inaccessible pages, which are kept until the process ends."""

    kept: Final[list[Any]] = []

    @classmethod
    def of(cls, size: int, at_end: bool) -> int:
        """The address of ``size`` bytes that begin after the first inaccessible page, or end before the last one."""
        page = mmap.PAGESIZE
        inner = max(page, -(-size // page) * page)
        area = mmap.mmap(-1, inner + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        cls.kept.append(area)
        for guard in (start, start + page + inner):
            if _LIBC.mprotect(guard, page, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        return start + page + (inner - size if at_end else 0)


def empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, at_end: bool) -> Tensor:
    """An uninitialized tensor of these strides next to an inaccessible page."""
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype)
    extent = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    size = extent * dtype.itemsize
    flat: Any = (ctypes.c_char * size).from_address(Memory.of(size, at_end))
    return torch.frombuffer(flat, dtype=dtype).as_strided(tuple(shape), tuple(strides))


def guarded(x: Tensor, at_end: bool) -> Tensor:
    """A copy of x next to an inaccessible page."""
    made = empty(x.shape, x.stride(), x.dtype, at_end)
    # Repeated elements are written once.
    once = tuple(slice(None) if step else slice(0, 1) for step in x.stride())
    made[once].copy_(x[once])
    return made


@contextmanager
def everywhere(at_end: bool) -> Iterator[None]:
    """Put results, tables of offsets and scratch memory next to inaccessible pages."""

    def result(shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Tensor:
        made: Any = empty(shape, torch.empty(tuple(shape), device="meta").stride(), dtype, at_end)
        # As ``buffers.empty`` does: a schedule may release it.
        made.untyped_storage().lent = True
        return made

    def table(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: guarded(make(*args), at_end)

    def scratch(size: int, shared: bool) -> tuple[Tensor, int]:
        whole = -(-size // _LINE) * _LINE
        return empty((whole * torch.get_num_threads(),), (1,), torch.uint8, at_end), whole

    with ExitStack() as stack:
        stack.enter_context(patch.object(buffers, "empty", result))
        for user in (contraction, launches):
            stack.enter_context(patch.object(user, "scratch", scratch))
        for module, name in (
            (contractions, "offsets"),
            (contractions, "_sums"),
            (planes, "_taps"),
            (planes, "_places"),
        ):
            stack.enter_context(patch.object(module, name, table(getattr(module, name))))
        for cached in (contraction._packed, contractions.windows_of, contractions._placed, planes._planned):
            cached.cache_clear()
        yield


def survive(script: str, arguments: Sequence[str], cases: int) -> list[str]:
    """Run ``script --from i --cases n`` until every case was tried; return a line for each failure."""
    found: list[str] = []
    begin = 0
    while begin < cases:
        command = [sys.executable, str(Path(__file__).parent / script), *arguments]
        child = subprocess.run(
            [*command, "--from", str(begin), "--cases", str(cases)], capture_output=True, text=True, timeout=3600
        )
        lines = child.stdout.splitlines()
        found += [line.removeprefix("FAIL ") for line in lines if line.startswith("FAIL ")]
        if child.returncode == 0:
            return found
        last = next((line for line in reversed(lines) if line.startswith("CASE ")), None)
        if last is None:
            return [*found, f"the child ended before its first case: {child.stderr[-2000:]}"]
        number = int(last.split()[1])
        found.append(f"{last.removeprefix('CASE ')}: died with status {child.returncode} {child.stderr[-500:]}")
        begin = number + 1
    return found


def announce(number: int, said: str) -> None:
    """Print the number of the next case, before it can end the process."""
    print(f"CASE {number} {said}", flush=True)
