"""The tables of docs/from-*.md: each call of a peer beside its spelling here, compared number by number.

    python -m benchmarks.equivalents [--write]

Peers that are not installed are left out: ``pip install --no-deps pychop==0.6.2 qtorch==0.3.0``; microxcaling is a
repository (commit 7bc4195, on PYTHONPATH). A row has the page, the call, what fxround calls it, the number of
elements, and how many of them differ; ``most`` is what the page says of them. ``--write`` stores digests of the numbers
and of fxround's results that were compared in docs/equivalents.json, by which tests know them without the peers.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import fxround
from benchmarks.harness import header, table

STORED: Final = Path(__file__).parents[1] / "docs" / "equivalents.json"
COUNT: Final = 1 << 18
MODULES: Final = {"pychop": "pychop", "qpytorch": "qtorch", "microxcaling": "mx"}


@dataclass(frozen=True)
class Equivalent:
    """A call of a peer, and what fxround calls it.

    page       of docs/from-PAGE.md; its peer's module is ``MODULES[page]``
    row        how the first cell of the row begins
    ours       the rounding
    call       the peer's call, which imports the peer
    exponents  of the numbers: the least and the largest
    most       how many of 2^18 numbers may differ
    dim        of ``fxround.round``
    ties       whether a quarter of the numbers are ties of 8 bits
    """

    page: str
    row: str
    ours: str
    call: Callable[[Tensor], Any]
    exponents: tuple[int, int] = (-30, 30)
    most: int = 0
    dim: int | None = None
    ties: bool = True

    def numbers(self) -> Tensor:
        """Return the numbers: normal deviates times powers of two."""
        torch.manual_seed(0)
        least, most = self.exponents
        x = torch.randn(COUNT // 64, 64) * torch.exp2(torch.randint(least, most + 1, (COUNT // 64, 64)).float())
        ties = (torch.randint(64, 256, x.shape) / 128) * torch.exp2(torch.randint(least, most + 1, x.shape).float())
        if self.ties:
            x = torch.where(torch.rand(x.shape) < 0.25, ties * x.sign(), x)
        limit = 2.0 ** (most + 1)
        return x.clamp(-limit, limit)

    def differing(self, x: Tensor) -> int:
        """Return how many results differ; zeros are equal, whatever their signs."""
        theirs = torch.as_tensor(self.call(x.clone())).float()
        ours = fxround.round(x, self.ours, dim=self.dim)
        return int((theirs != ours).sum())

    def digests(self, x: Tensor) -> dict[str, str]:
        """Return digests of the numbers and of fxround's results."""
        ours = fxround.round(x, self.ours, dim=self.dim)
        return {name: hashlib.sha256(v.numpy().tobytes()).hexdigest()[:16] for name, v in (("x", x), ("ours", ours))}

    @property
    def name(self) -> str:
        """The name of the row in docs/equivalents.json."""
        return f"{self.page} {self.row} {self.ours}"

    def installed(self) -> bool:
        """Whether the peer is installed."""
        return find_spec(MODULES[self.page]) is not None


def _chop(exponent: int, significand: int, mode: int) -> Callable[[Tensor], Any]:
    def call(x: Tensor) -> Any:
        import pychop

        pychop.backend("torch")
        return pychop.Chop(exp_bits=exponent, sig_bits=significand, rmode=mode)(x)

    return call


def _chopf(mode: int) -> Callable[[Tensor], Any]:
    def call(x: Tensor) -> Any:
        import pychop

        pychop.backend("torch")
        return pychop.Chopf(4, 4, mode)(x)

    return call


def _pychop_mx(name: str) -> Callable[[Tensor], Any]:
    def call(x: Tensor) -> Any:
        import pychop

        pychop.backend("torch")
        return pychop.mx_quantize(x, format=name)

    return call


def _float_quantize(exponent: int, significand: int) -> Callable[[Tensor], Any]:
    def call(x: Tensor) -> Any:
        from qtorch.quant import float_quantize

        return float_quantize(x, exponent, significand, rounding="nearest")

    return call


def _fixed_point(x: Tensor) -> Any:
    from qtorch.quant import fixed_point_quantize

    return fixed_point_quantize(x, 8, 4, rounding="nearest")


def _block(bits: int) -> Callable[[Tensor], Any]:
    def call(x: Tensor) -> Any:
        from qtorch.quant import block_quantize

        return block_quantize(x, bits, dim=0, rounding="nearest")

    return call


def _mx(name: str, *, mode: str = "nearest", axis: int = -1, size: int = 32) -> Callable[[Tensor], Any]:
    def call(x: Tensor) -> Any:
        from mx.mx_ops import _quantize_mx

        return _quantize_mx(x, 8, name, axes=[axis], block_size=size, round=mode)

    return call


def _elementwise(name: str, *arguments: Any, **options: Any) -> Callable[[Tensor], Any]:
    def call(x: Tensor) -> Any:
        from mx import elemwise_ops

        return getattr(elemwise_ops, name)(x, *arguments, **options)

    return call


def equivalents() -> Iterator[Equivalent]:
    """Yield the rows that say equal, of all pages."""
    modes = {1: "nearest_even", 2: "toward_positive", 3: "toward_negative", 4: "toward_zero"}
    for mode, own in modes.items():
        row = "`Chop(exp_bits, sig_bits, rmode=1)`" if mode == 1 else "`rmode=2`, `3`, `4`"
        yield Equivalent("pychop", row, f"ieee(5,11)/{own}", _chop(5, 10, mode), (-20, 14), most=0 if mode == 1 else 3)
        yield Equivalent("pychop", row, f"ieee(8,8)/{own}", _chop(8, 7, mode), most=int(mode == 4))
    for mode in (1, 2, 3):
        yield Equivalent("pychop", "`Chopf(4, 4, rmode)`", f"fixed(8,4)/{modes[mode]}", _chopf(mode), (-6, 5))
    yield Equivalent("pychop", "`mx_quantize(x, format=...)`", "mxfp8", _pychop_mx("mxfp8_e4m3"), (-4, 4))
    for exponent, significand, inside in ((5, 10, (-13, 14)), (5, 2, (-13, 14)), (4, 3, (-5, 6))):
        own = f"ieee({exponent},{significand + 1})/nearest_away"
        yield Equivalent(
            "qpytorch",
            '`float_quantize(x, exp, man, rounding="nearest")`',
            own,
            _float_quantize(exponent, significand),
            inside,
        )
    yield Equivalent(
        "qpytorch", '`fixed_point_quantize(x, 8, 4, rounding="nearest")`', "fixed(8,4)", _fixed_point, (-6, 5)
    )
    for bits, most in ((8, 2), (4, 0)):
        yield Equivalent(
            "qpytorch", "`block_quantize(x, wl, dim=0)`", f"bfp({bits},64)", _block(bits), (-3, 3), most, ties=False
        )
    for name, own in (
        ("fp8_e4m3", "mxfp8"),
        ("fp8_e5m2", "mxfp8_e5m2"),
        ("fp6_e3m2", "mxfp6_e3m2"),
        ("fp6_e2m3", "mxfp6"),
        ("fp4_e2m1", "mxfp4"),
        ("int8", "mxint8"),
        ("int4", "bfp(4,32)"),
        ("int2", "bfp(2,32)"),
    ):
        row = "`_quantize_mx(x, 8," if own == "mxfp8" else '`"int4"`' if own.startswith("bfp") else '`"fp8_e5m2"`'
        yield Equivalent("microxcaling", row, f"{own}/nearest_away", _mx(name))
    for mode, own in (("nearest", "nearest_away"), ("even", "nearest_even"), ("floor", "toward_zero")):
        yield Equivalent("microxcaling", '`round="nearest"`', f"mxfp8/{own}", _mx("fp8_e4m3", mode=mode))
    yield Equivalent("microxcaling", "`axes=[0]`", "mxfp8:16/nearest_away", _mx("fp8_e4m3", axis=0, size=16), dim=0)
    yield Equivalent(
        "microxcaling", "`_quantize_bfloat(x, 12)`", "ieee(8,4)/nearest_away", _elementwise("_quantize_bfloat", 12)
    )
    yield Equivalent(
        "microxcaling",
        "`_quantize_bfloat(x, 12)`",
        "ieee(5,6)/nearest_away",
        _elementwise("_quantize_fp", 5, 5),
        (-20, 14),
    )
    yield Equivalent(
        "microxcaling",
        "`_quantize_elemwise(",
        "e4m3fn/nearest_even/saturate",
        _elementwise("_quantize_elemwise", "fp8_e4m3", round="even", saturate_normals=True),
        (-12, 12),
    )


def report() -> Iterator[list[str]]:
    """Yield the rows of the table."""
    for row in equivalents():
        if row.installed():
            wrong = row.differing(row.numbers())
            yield [row.page, row.row.strip("`"), row.ours, str(COUNT), str(wrong), str(row.most)]


def main() -> int:
    """Print the table; the exit status is 1 if more numbers differ than a page says."""
    warnings.simplefilter("ignore")
    print(header(("torch", "pychop", "qtorch", "llvmlite")))
    rows = list(report())
    print(table(["page", "call", "fxround", "numbers", "differ", "most"], rows))
    missing = sorted({row.page for row in equivalents() if not row.installed()})
    if missing:
        print(f"not installed: {', '.join(missing)}")
    wrong = any(int(row[4]) > int(row[5]) for row in rows)
    if sys.argv[1:] == ["--write"] and not missing and not wrong:
        digests = {row.name: row.digests(row.numbers()) for row in equivalents()}
        STORED.write_text(json.dumps(digests, indent=1) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
