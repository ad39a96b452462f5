"""``fxround.selftest``: compare the kernels of this machine with the specification, in a few seconds.

Roundings, products of matrices and sums are compared with ``numerics.specification.exact``, which uses rational
numbers and Python's integers alone; Philox and SplitMix64 with published vectors; elementary functions with stored
hashes of their correctly rounded values (``tests/test_selftests.py`` makes them with MPFR). The expected values use
neither the algorithm nor the code generator of the kernels, and the kernels are those that models run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fxround.errors import FxroundError
from fxround.fingerprint import hash
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.maps import fused_kernel
from fxround.kernels.program import Program, Statement
from fxround.kernels.reductions import sum_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.orders import Order
from fxround.numerics.specification.exact import quantum, round_exact, round_float
from fxround.runtime.cpu.code import current_set
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_kernel, run_map, run_product, run_reduce
from fxround.significance.provenance import processor
from fxround.views.table import Table, Tabled

# Any numbers: seed, sample, and node of the words that are drawn.
_DRAW: Final = Draw(seed=0x1234_5678_9ABC_DEF0, sample=3, node=17)
_WORD: Final = (1 << 32) - 1
_BINARY32: Final = Rounding.parse("binary32")
# Random123 1.14, tests/kat_vectors: counter, key, result of philox4x32 with 10 rounds.
_PHILOX: Final = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
# The first outputs of SplitMix64 for a seed, from Rosetta Code, "Pseudo-random numbers/Splitmix64".
_SPLITMIX64: Final = (
    1234567,
    (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821),
)
# fxround.hash of the correctly rounded values at ``arguments(name)``.
STORED: Final = MappingProxyType(
    {
        "exp": "sha256:53e85944af44e8f09bd2a6d87e7a646bbc1ff2817e72e4431c1d5fe92f315c6d",
        "log": "sha256:e24726ba03f175f25f4ff7f231c82e9fb8b40be0e8f0eda814e8016e2c68a4d1",
        "tanh": "sha256:15a6f2fa5a21a02a6de1924d18f02134372ddce0f2b4b89b2da50dcc14d9118e",
        "sin": "sha256:ef32a034c78a3abb51f30e18f1c34193d6f8ef1b032a491ddb5b9061800720f7",
        "erf": "sha256:8767a6e1a5a61da0e96c59e1ac8e8b4c08fb89d8c05a42ec48596b2b63fc1121",
    }
)


class SelftestFailed(FxroundError):
    """Raised by ``selftest`` if a kernel's bits differ from the specification: this machine, its compiler or its cache
    cannot be trusted.
    """


@dataclass(frozen=True)
class Comparison:
    """One comparison of ``fxround.selftest``.

    what      the kernels that were compared
    values    the number of values that were compared
    against   what the values were compared with
    """

    what: str
    values: int
    against: str


@dataclass(frozen=True, repr=False)
class SelftestReport(Tabled):
    """The comparisons of ``fxround.selftest``; all values were equal, bit for bit.

    machine           the name of the processor
    instruction_set   the instruction set of the code, for example "avx2"; a GPU's architecture, for example "sm_90"
    comparisons       one ``Comparison`` per kind of kernel

    Example::

        print(fxround.selftest().table())
    """

    machine: str
    instruction_set: str
    comparisons: tuple[Comparison, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        return asdict(self)

    def table(self) -> Table:
        """Return a table with one row per comparison."""
        rows = tuple((c.what, c.values, c.against) for c in self.comparisons)
        total = sum(c.values for c in self.comparisons)
        title = f"fxround on {self.machine}, instruction set {self.instruction_set}"
        return Table(("what", "values", "equal to"), rows, title=title, note=f"{total:,} values, all equal.")


def selftest(device: str | torch.device = "cpu") -> SelftestReport:
    """Compare kernels with the specification, bit for bit.

    The kernels are compiled as those of models are: for this machine, or for the instruction set that
    ``fxround.instruction_set`` selects. Elementary functions are compared at 1024 arguments each.

    Args:
        device: ``"cpu"``, or a CUDA device, whose kernels are compiled for it.

    Returns:
        A ``SelftestReport``, which prints as a table.

    Raises:
        SelftestFailed: at the first wrong value; the message names it.
        FxroundError: for a CUDA device without the extra ``cuda``.

    Example::

        print(fxround.selftest())
    """
    where = torch.device(device)
    checks = (_roundings, _contractions, _sums, _elementary)
    comparisons = (*_generators(), *(comparison for check in checks for comparison in check(where)))
    if where.type != "cuda":
        return SelftestReport(processor(), current_set(), comparisons)
    name, (major, minor) = torch.cuda.get_device_name(where), torch.cuda.get_device_capability(where)
    return SelftestReport(name, f"sm_{major}{minor}", comparisons)


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Compute Philox4x32-10 (Salmon et al., SC 2011) over Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for i in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        r0, r1 = (k0 + i * 0x9E3779B9) & _WORD, (k1 + i * 0xBB67AE85) & _WORD
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ r0, p1 & _WORD, (p0 >> 32) ^ c3 ^ r1, p0 & _WORD
    return c0, c1, c2, c3


def word(element: int, node: int, bits: int = 32) -> int:
    """Return the random bits of an element of a node's result, as docs/numerics.md defines them.

    bits: 1, 16 or 32. They are the highest of 32, and the others are zero.
    """
    words, share = _block(0, 0, node), 64 // bits
    output = splitmix64(words[1] << 32 | words[0], element // share)
    return (output >> bits * (element % share) & (1 << bits) - 1) << 32 - bits


def stream(element: int, node: int) -> Iterator[int]:
    """Yield the random bits of the steps of a chain, in order, as docs/numerics.md defines them."""
    words = _block(0, 0xFFFF, node)
    x = splitmix64(words[1] << 32 | words[0], element) % 2**52
    while True:
        yield x >> 20
        x = (0xCAC74EE5 * x + 0x9E3779B97F4A7) % 2**52


def splitmix64(seed: int, number: int) -> int:
    """Return output ``number`` of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    x = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def _block(counter: int, draw: int, node: int) -> tuple[int, ...]:
    low, high = _DRAW.seed & _WORD, _DRAW.seed >> 32
    return philox((counter & _WORD, (counter >> 32) + (draw << 16), node, _DRAW.sample), (low, high))


def _generators() -> Iterator[Comparison]:
    for counter, key, expected in _PHILOX:
        _same(f"Philox4x32-10 of {counter}", list(philox(counter, key)), list(expected))
    yield Comparison("Philox4x32-10", 4 * len(_PHILOX), "its published vectors")
    seed, outputs = _SPLITMIX64
    _same(f"SplitMix64 of {seed}", [splitmix64(seed, i) for i in range(len(outputs))], list(outputs))
    yield Comparison("SplitMix64", len(outputs), "its published vector")


def _roundings(device: torch.device) -> Iterator[Comparison]:
    """Compare every mode of a format in one kernel: boundaries, ties, zeros, infinities, NaN."""
    for fmt in FORMATS.values():
        if not fmt.within(FORMATS["binary32"]):
            continue
        x = boundaries(fmt).to(device)
        roundings = [Rounding(fmt, mode, fmt.default_overflow) for mode in MODES.values()]
        drawing = [r for r in roundings if r.mode.random_bits]
        program = Program(tuple(Statement(f"t{i}", "identity", ("x0",), r) for i, r in enumerate(roundings)))
        program = Program(program.statements, tuple(s.target for s in program.statements))
        kernel = fused_kernel(program, ("f32",), ("f32",) * len(roundings))
        results = run_kernel(kernel, (x,), _DRAW.keys(range(1, 1 + len(drawing))))
        for rounding, got in zip(roundings, results, strict=True):
            node = 1 + drawing.index(rounding) if rounding in drawing else 0
            bits = 1 if rounding.mode.random_bits == 1 else 32
            want = [round_float(v, rounding, word(i, node, bits) if node else 0) for i, v in enumerate(x.tolist())]
            _equal(str(rounding), got, want, partial(_argument, x))
        yield Comparison(f"{fmt.name}, {len(roundings)} modes", x.numel() * len(roundings), "the specification")


def _argument(x: Tensor, i: int) -> str:
    return f"of {x[i].item()!r}"


def boundaries(fmt: Format) -> Tensor:
    """Return binary32 numbers close to where the roundings of the format change."""
    middle = (fmt.emin + fmt.emax) // 2
    near = [Fraction(2) ** fmt.emin, Fraction(2) ** middle, Fraction(3) * Fraction(2) ** middle, Fraction(fmt.maximum)]
    steps = [Fraction(i, 4) for i in range(-4, 9)]
    below = [Fraction(2) ** fmt.quantum_exponent * Fraction(i, 4) for i in range(7)]
    magnitudes = [*below, *(b + s * quantum(b, fmt) for b in near for s in steps)]
    with np.errstate(over="ignore"):
        finite = np.array([float(min(m, Fraction(2) ** 129)) for m in magnitudes]).astype(np.float32)
    return torch.from_numpy(np.concatenate([finite, -finite, np.array([np.inf, -np.inf, np.nan], np.float32)]))


def _contractions(device: torch.device) -> Iterator[Comparison]:
    """Compare acc = R(a_k b_k + acc), k ascending from 0; operands have 14 bits, so that binary32 loses some."""
    a, b = (_numbers(name, 33 * n).to(device) for name, n in (("a", 3), ("b", 5)))
    a, b = a.reshape(1, 3, 33), b.reshape(1, 33, 5)
    for text in ("binary32", "binary32/toward_zero", "bfloat16", "binary32/stochastic"):
        step = Rounding.parse(text)
        kernel = contract_kernel(Accumulation.parse(text), _BINARY32, ("f32", "f32"), "f32")
        got = run_product(kernel, a, b, 0, _DRAW).flatten()
        left, right = a[0].tolist(), b[0].T.tolist()
        pairs = [(row, column) for row in left for column in right]
        want = [_chain(zip(row, column, strict=True), step, i) for i, (row, column) in enumerate(pairs)]
        _equal(f"a product of matrices, accumulated in {text}", got, want, lambda i: f"at element {i}")
        yield Comparison(f"product of matrices, {text}", len(want), "the specification")


def _chain(terms: Any, rounding: Rounding, element: int) -> float:
    drawn, acc = stream(element, _DRAW.node), 0.0
    for x, y in terms:
        value = Fraction(x) * Fraction(y) + Fraction(acc)
        acc = round_exact(value, value < 0, rounding, next(drawn) if rounding.mode.random_bits else 0)
    return acc


def _sums(device: torch.device) -> Iterator[Comparison]:
    """Compare sums of rows of 200 elements, in 16 lanes and exact."""
    x = torch.ldexp(_numbers("sum", 4 * 200), torch.arange(800) % 17 - 8).reshape(4, 200).to(device)
    for text, lanes in (("lanes:16", _lanes), ("exact", _total)):
        for accumulate in (Rounding.parse("binary32"), Rounding.parse("binary32/toward_positive")):
            kernel = sum_kernel(Order.parse(text), accumulate, _BINARY32, "f32", "f32")
            got = run_reduce(kernel, x, _DRAW)
            _equal(f"a sum in {text}", got, [lanes(row, accumulate) for row in x.tolist()], lambda i: f"of row {i}")
        yield Comparison(f"sums, {text}", 2 * len(x), "the specification")


def _total(row: Sequence[float], rounding: Rounding) -> float:
    total = sum(map(Fraction, row), Fraction(0))
    return round_exact(total, total < 0, rounding)


def _lanes(row: Sequence[float], rounding: Rounding) -> float:
    acc = [0.0] * 16
    for k, value in enumerate(row):
        acc[k % 16] = _total((acc[k % 16], value), rounding)
    width = 16
    while width > 1:
        width //= 2
        acc = [_total((acc[i], acc[i + width]), rounding) for i in range(width)]
    return acc[0]


def _elementary(device: torch.device) -> Iterator[Comparison]:
    for name, expected in STORED.items():
        program = Program((Statement("t0", name, ("x0",), _BINARY32),))
        x = arguments(name).to(device)
        digest = hash(run_map(program, (x,), torch.float32, _DRAW))
        if digest != expected:
            raise SelftestFailed(f"{name} of {x.numel()} numbers has {digest}, stored is {expected}. {_advice()}")
        yield Comparison(name, x.numel(), "the hash of its correctly rounded values")


def arguments(name: str) -> Tensor:
    """Return 1024 binary32 arguments of a function: from -8 to 8, positive for a logarithm."""
    x = torch.ldexp(_numbers(name, 1024), -(torch.arange(1024) % 12))
    return x.abs() if name == "log" else x


def _numbers(name: str, count: int) -> Tensor:
    """Return odd multiples of 2^-10 below 16 in magnitude, from 14 bits each of SHAKE-256 of a name."""
    drawn = np.frombuffer(hashlib.shake_256(name.encode()).digest(2 * count), "<i2").astype(np.float32)
    return torch.from_numpy((2 * np.floor(drawn / 4) + 1) / np.float32(2.0**10))


def _equal(what: str, got: Tensor, want: Sequence[float], where: Callable[[int], str]) -> None:
    """Raise SelftestFailed at the first element that is not the same number, the sign of zero included."""
    for i, (value, expected) in enumerate(zip(got.tolist(), want, strict=True)):
        same = value == expected and math.copysign(1, value) == math.copysign(1, expected)
        if not same and not (math.isnan(value) and math.isnan(expected)):
            raise SelftestFailed(f"{what}, {where(i)}: got {value!r}, the specification says {expected!r}. {_advice()}")


def _same(what: str, got: Any, want: Any) -> None:
    if got != want:
        raise SelftestFailed(f"{what}: got {got}, expected {want}. {_advice()}")


def _advice() -> str:
    return (
        f"Instruction set {current_set()} on {processor()}. Try again with FXROUND_CACHE_DIR=off, to compile it again. "
        "If the fault stays, results of this machine are not those of others: please report this message."
    )
