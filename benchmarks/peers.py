"""The peers' roundings as functions of a binary32 tensor, for ``benchmarks.rounding``.

The module imports nothing of fxround, so that it can run in an environment of the peers' own:
``python -m benchmarks.peers SIZE...`` prints seconds as JSON. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import harness

PACKAGES = ("torch", "numpy", "qtorch", "pychop", "ml_dtypes", "gfloat")
Call = Callable[[], object]


def calls(x: torch.Tensor) -> dict[str, Call]:
    """Return the call of every installed peer that rounds ``x`` (binary32) to e4m3fn or the format that it names."""
    named: dict[str, Call] = {}
    for peer in (_qtorch, _pychop, _ml_dtypes, _gfloat):
        try:
            named |= dict(peer(x))
        except ImportError:
            continue
    return named


@dataclass(frozen=True)
class Scaled:
    """A peer's rounding to a scaled format or to fixed point, and what fxround calls the same format and mode."""

    peer: str
    form: str
    x: torch.Tensor
    call: Call


def scaled(size: int) -> list[Scaled]:
    """Return the roundings to scaled formats of every installed peer, of ``size`` elements in blocks of 32."""
    x = torch.randn(size // 32, 32)
    listed: list[Scaled] = []
    for peer in (_microxcaling, _torchao, _qtorch_scaled, _pychop_scaled):
        try:
            listed += peer(x)
        except ImportError:
            continue
    return listed


def _microxcaling(x: torch.Tensor) -> Iterator[Scaled]:
    from mx.mx_ops import _quantize_mx

    for name, form in (("fp8_e4m3", "mxfp8"), ("fp4_e2m1", "mxfp4"), ("int8", "mxint8")):
        call = partial(_quantize_mx, x, 8, name, axes=[-1], block_size=32, round="even")
        yield Scaled(f"microxcaling _quantize_mx {name}", form, x, call)


def _torchao(x: torch.Tensor) -> Iterator[Scaled]:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    def through(dtype: torch.dtype) -> torch.Tensor:
        scale, data = to_mx(x, dtype, 32)
        back: torch.Tensor = to_dtype(data, scale, dtype, 32, torch.float32)
        return back

    for name, form in (("float8_e4m3fn", "mxfp8"), ("float8_e5m2", "mxfp8_e5m2"), ("float4_e2m1fn_x2", "mxfp4")):
        yield Scaled(f"torchao to_mx {name} and back", form, x, partial(through, getattr(torch, name)))


def _qtorch_scaled(x: torch.Tensor) -> Iterator[Scaled]:
    from qtorch.quant import block_quantize, fixed_point_quantize

    for mode, own in (("nearest", "nearest_even"), ("stochastic", "stochastic")):
        call = partial(block_quantize, x, 8, dim=0, rounding=mode)
        yield Scaled(f"QPyTorch block_quantize {mode}", f"bfp(8,32)/{own}", x, call)
        call = partial(fixed_point_quantize, x, 16, 8, rounding=mode)
        yield Scaled(f"QPyTorch fixed_point_quantize {mode}", f"fixed(16,8)/{own}", x, call)


def _pychop_scaled(x: torch.Tensor) -> Iterator[Scaled]:
    from pychop import Chopf, backend, mx_quantize

    backend("torch")
    yield Scaled("Pychop mx_quantize mxfp8_e4m3", "mxfp8", x, partial(mx_quantize, x, format="mxfp8_e4m3"))
    for mode, own in ((1, "nearest_even"), (5, "stochastic")):
        yield Scaled(f"Pychop Chopf rmode={mode}", f"fixed(16,8)/{own}", x, partial(Chopf(8, 8, mode), x))


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="+", type=int, metavar="SIZE", help="numbers of elements, for example 1000000")
    sizes = parser.parse_args().sizes
    torch.set_num_threads(1)
    result: dict[str, Any] = {"versions": harness.versions(PACKAGES), "seconds": {}}
    for size in sizes:
        result["seconds"][size] = harness.medians(calls(numbers(size)))
    print(json.dumps(result))


if __name__ == "__main__":
    report()
