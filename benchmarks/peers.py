"""The peers' roundings as functions of a binary32 tensor, for ``benchmarks.rounding``.

The module imports nothing of fxround, so that it can run in an environment of the peers' own:
``python -m benchmarks.peers SIZE...`` prints seconds as JSON. A peer that is not installed is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import harness

PACKAGES = ("torch", "numpy", "qtorch", "pychop", "ml_dtypes", "gfloat")
Call = Callable[[], object]


def calls(x: torch.Tensor) -> dict[str, Call]:
    """Return the call of every installed peer that rounds ``x`` (binary32) to e4m3fn or the format that it names."""
    found: dict[str, Call] = {}
    for peer in (_qtorch, _pychop, _ml_dtypes, _gfloat):
        try:
            found |= dict(peer(x))
        except ImportError:
            continue
    return found


def _qtorch(x: torch.Tensor) -> Iterator[tuple[str, Call]]:
    from qtorch.quant import float_quantize

    for mode in ("nearest", "stochastic"):
        yield f"QPyTorch float_quantize(4, 3) {mode}", partial(float_quantize, x, exp=4, man=3, rounding=mode)


def _pychop(x: torch.Tensor) -> Iterator[tuple[str, Call]]:
    import pychop

    pychop.backend("torch")
    for mode, name in ((1, "nearest"), (5, "stochastic")):
        chop = pychop.Chop(exp_bits=4, sig_bits=3, rmode=mode)
        yield f"Pychop Chop(4, 3) {name}", partial(chop, x)


def _ml_dtypes(x: torch.Tensor) -> Iterator[tuple[str, Call]]:
    import ml_dtypes
    import numpy as np

    array = x.numpy()
    for name in ("float8_e4m3fn", "bfloat16"):
        yield f"ml_dtypes {name} and back", partial(_there_and_back, array, getattr(ml_dtypes, name), np.float32)


def _there_and_back(array: Any, there: Any, back: Any) -> Any:
    return array.astype(there).astype(back)


def _gfloat(x: torch.Tensor) -> Iterator[tuple[str, Call]]:
    import gfloat
    from gfloat.formats import format_info_ocp_e4m3

    array = x.numpy()
    yield "gfloat round_ndarray e4m3", partial(gfloat.round_ndarray, format_info_ocp_e4m3, array, sat=True)


def numbers(size: int) -> torch.Tensor:
    """Return the operand: binary32 normal deviates."""
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def report() -> None:
    """Print seconds by peer and size, and the versions, as JSON; each size is a command-line argument."""
    torch.set_num_threads(1)
    result: dict[str, Any] = {"versions": harness.versions(PACKAGES), "seconds": {}}
    for size in map(int, sys.argv[1:]):
        result["seconds"][size] = harness.medians(calls(numbers(size)))
    print(json.dumps(result))


if __name__ == "__main__":
    report()
