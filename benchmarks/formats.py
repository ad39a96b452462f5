"""Scaled formats, tables and posits: speed of ``fxround.round``, and installed peers beside it.

    python -m benchmarks.formats [peers]

The first table has 10^6 elements per second, medians of interleaved calls, in the thread's own processor time, so that
other processes count less. ``out`` is a call with a result that exists; copies are PyTorch's. The second compares the
bits with torchao's ``to_mx`` and back, where both describe the same format: elements of exponents -30 to 30, a row of
zeros.
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import fxround
from benchmarks import peers
from benchmarks.harness import header, medians, table

SIZES = (10**6, 10**7)
FORMS = (
    "mxfp8",
    "mxfp8/stochastic",
    "mxfp4",
    "nvfp4",
    "nvfp4/stochastic",
    "int8",
    "int8:channel",
    "int4:128",
    "bfp(8,32)",
    "fixed(16,8)",
    "scaled(nf4;64,binary32,nearest)",
    "nf4",
    "nf4/stochastic",
    "posit16",
    "posit16/stochastic",
)
COLUMNS = 1000
_COPY = "clone(), out.copy_(x)"
# How fxround and torchao name the ways to make a scale, and the elements.
HOWS = {"floor": "FLOOR", "ceil": "CEIL", "even": "EVEN", "up": "RCEIL"}
ELEMENTS = {"e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1fn": "float4_e2m1fn_x2"}


def torchao() -> Any:
    """Return torchao's module of microscaling, None if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        except ImportError:
            return None


def through(peer: Any, x: torch.Tensor, element: str, how: str) -> torch.Tensor:
    """Return x after torchao's conversion to a microscaling format and back."""
    dtype = getattr(torch, ELEMENTS[element])
    scale, data = peer.to_mx(x, dtype, 32, getattr(peer.ScaleCalculationMode, HOWS[how]))
    back: torch.Tensor = peer.to_dtype(data, scale, dtype, 32, torch.float32)
    return back


def speeds(peer: Any) -> Iterator[list[str]]:
    """Yield rows: name, and for each size the rate with a new result and with one that exists."""
    rows: dict[str, list[str]] = {}
    for size in SIZES:
        x = torch.randn(size // COLUMNS, COLUMNS)
        blocks, out = torch.randn(size // 32, 32), torch.empty_like(x)
        calls: dict[tuple[str, bool], Callable[[], object]] = {
            (_COPY, False): x.clone,
            (_COPY, True): partial(out.copy_, x),
        }
        for form in FORMS:
            calls[form, False] = partial(fxround.round, x, form, seed=1)
            calls[form, True] = partial(fxround.round, x, form, seed=1, out=out)
        if peer is not None:
            for element in ELEMENTS:
                name = f"torchao to_mx {element} and back"
                calls[name, False] = partial(through, peer, blocks, element, "floor")
        seconds = medians(calls, time.thread_time)
        for name in dict.fromkeys(name for name, _ in calls):
            rates = [seconds.get((name, existing)) for existing in (False, True)]
            rows.setdefault(name, []).extend("" if rate is None else f"{size / rate / 1e6:.0f}" for rate in rates)
    yield from ([name, *rates] for name, rates in rows.items())


def beside_peers() -> Iterator[list[str]]:
    """Yield rows: the peer's function, the format, and for each size both rates and their ratio."""
    rows: dict[str, list[str]] = {}
    for size in SIZES:
        for row in peers.scaled(size):
            calls = {"peer": row.call, "own": partial(fxround.round, row.x, row.form, seed=1)}
            seconds = medians(calls, time.thread_time, passes=3)
            theirs, ours = (size / seconds[name] / 1e6 for name in ("peer", "own"))
            cells = rows.setdefault(f"{row.peer} {row.form}", [row.peer, row.form])
            cells += [f"{theirs:.1f}", f"{ours:.0f}", f"{ours / theirs:.1f}"]
    yield from rows.values()


def differences(peer: Any) -> Iterator[list[str]]:
    """Yield rows: format, elements, and how many of them differ from torchao's."""
    torch.manual_seed(0)
    x = torch.randn(4096, 64) * torch.exp2(torch.randint(-30, 31, (4096, 1)).float())
    x[0] = 0
    for element in ELEMENTS:
        for how in HOWS:
            form = f"scaled({element};32,e8m0fnu,{how})"
            wrong = int((through(peer, x, element, how) != fxround.round(x, form)).sum())
            yield [form, str(x.numel()), str(wrong)]


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    if sys.argv[1:] == ["peers"]:
        print(header(("torch", "torchao", "qtorch", "pychop", "llvmlite")))
        columns = [f"{name} {size:.0e}" for size in SIZES for name in ("peer", "fxround", "ratio")]
        print(table(["10^6 elements per second", "format", *columns], list(beside_peers())))
        return
    peer = torchao()
    columns = [f"{size:.0e} {what}" for size in SIZES for what in ("new", "out")]
    print(header(("torch", "torchao", "llvmlite")))
    print(table(["10^6 elements per second", *columns], list(speeds(peer))))
    if peer is None:
        print("torchao is not installed: pip install --no-deps torchao")
        return
    print(table(["format", "elements", "differ from torchao"], list(differences(peer))))


if __name__ == "__main__":
    main()
