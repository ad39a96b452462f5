"""The bits of AArch64: every kind of kernel as NEON code under an emulator, compared with this machine's own.

    python -m benchmarks.aarch64 [--kinds rounding contraction ...] [--every N] [--list]

Both run the same operators on the same operands: all encodings in turn (subnormals, infinities and NaNs of any sign and
payload among them) for maps, numbers of many binades and of either end of the range for chains. Every bit of every
result is compared. ``benchmarks/emulation.py`` says how the code runs and what it needs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from benchmarks import emulation
from benchmarks.harness import header, table
from fxround.demo import DigitsCNN
from fxround.graph.dtypes import STORAGES
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.kinds import Exact
from fxround.kernels.program import Program
from fxround.kernels.reductions import (
    cumprod_kernel,
    cumsum_kernel,
    largest_kernel,
    prod_kernel,
    scatter_kernel,
    sum_kernel,
)
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.arithmetic.operators import OPERATORS
from fxround.numerics.elementary import ELEMENTARY
from fxround.numerics.formats import FORMATS
from fxround.numerics.formats.storage import FORMAT_OF
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.orders import Order
from fxround.runtime.contributions import scatter_rows
from fxround.runtime.cpu.exact_sum import run_exact
from fxround.runtime.cpu.reduction import run_reduce, run_scan
from fxround.runtime.cpu.scatter import run_scatter
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map, run_product

DRAW: Final = Draw(seed=0x1234_5678_9ABC_DEF0, sample=3, node=17)
OWN: Final = {dtype: FORMAT_OF[storage].name for dtype, storage in STORAGES.items()}
_BINARY32: Final = Rounding.parse("binary32")
# Accumulators: every mode in binary32, formats of every kind, unfused and in chunks. Those in _DIRECTED have a quick
# kernel, which rounds in a direction of the hardware and looks at its exception flags.
_DIRECTED: Final = (
    *(f"binary32/{m}" for m in ("toward_zero", "toward_positive", "toward_negative", "up_down")),
    *(f"bfloat16/nearest_{m}" for m in ("even", "away", "zero", "odd")),
    *(f"bfloat16/{m}" for m in ("toward_positive", "toward_negative")),
    "tf32/nearest_even",
)
_GENERAL: Final = (
    *(f"binary32/{m}" for m in MODES if f"binary32/{m}" not in _DIRECTED),
    "binary64",
    "bfloat16/stochastic:5",
    "bfloat16/up_down",
    "binary16/stochastic",
    "binary16/toward_zero/saturate",
    "e5m2/up_down",
    "e4m3fn/nearest_even/saturate",
    "tf32/to_odd",
    "bfloat16 chunk=8 combine=binary32",
    "ieee(8,14)/toward_zero chunk=5 combine=binary32/stochastic",
    "binary32 chunk=16 combine=binary32",
    "binary32/stochastic product=binary32/stochastic",
    "binary32 product=bfloat16",
    "fixed(16,8)/toward_negative/wrap",
    "fixed(12,4)/stochastic",
)
# Numbers of a chain's operands: of many binades; near either end of binary32's range; with specials among them.
_CHAINS: Final = ("normal", "tiny", "huge", "special")
_SPECIALS: Final = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 2.0**-149, -(2.0**-126), 3.4e38, -65504.0, 1e-8]


@dataclass(frozen=True)
class Case:
    """A call of kernels of one kind; ``run`` returns all of its results."""

    kind: str
    name: str
    run: Callable[[], Sequence[Tensor]]


@cache
def encodings(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Return random encodings; where they have more than 8 bits, the first ones are special numbers."""
    random = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    x = torch.from_numpy(random).view(dtype)
    if dtype.itemsize == 1:
        return x
    # Signalling NaNs among them: a positive and a negative one, whose payload is 1 and whose quiet bit is 0.
    infinity = int(torch.tensor(np.inf, dtype=dtype).reshape(1).view(_signed(dtype)))
    payloads = torch.tensor([infinity + 1, infinity + 1 - (1 << (8 * dtype.itemsize - 1))], dtype=_signed(dtype))
    first = torch.cat([torch.tensor(_SPECIALS, dtype=torch.float64).to(dtype), payloads.view(dtype)])
    x[: len(first)] = first.roll(seed)
    return x


def _signed(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def numbers(shape: tuple[int, ...], seed: int, kind: str = "normal", dtype: torch.dtype = torch.float32) -> Tensor:
    """Return operands of a chain (``_CHAINS``)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))
    if kind in ("tiny", "huge"):
        x = x * 2.0 ** (-70 if kind == "tiny" else 62)
    if kind == "special":
        x = np.where(rng.random(shape) < 0.2, rng.choice(_SPECIALS, shape), x)
    return torch.from_numpy(np.asarray(x)).to(dtype)


def _map(text: str, operands: Sequence[Tensor], dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    return lambda: [run_map(Program.parse(text), operands, dtype, DRAW)]


def roundings() -> Iterator[Case]:
    """Every format in every mode, with every overflow that differs, from binary32 and from binary64."""
    modes = (*MODES, "stochastic:3")
    for name, fmt in FORMATS.items():
        for mode in modes:
            wide = not fmt.within(FORMATS["binary32"])
            dtype = torch.float64 if wide else torch.float32
            if wide and mode not in ("nearest_even", "up_down", "stochastic"):
                continue
            yield _rounding(f"{name}/{mode}", dtype)
    for text in ("e5m2/nearest_even/saturate", "e5m2/stochastic/nan", "e4m3fn/up_down/saturate", "binary16-flush"):
        yield _rounding(text, torch.float32)
    for text in ("binary32/nearest_even", "binary32/toward_negative", "bfloat16/stochastic", "ieee(8,14)/to_odd"):
        yield _rounding(text, torch.float64)


def _rounding(text: str, dtype: torch.dtype) -> Case:
    x = encodings(dtype, 1000, 1)
    return Case("rounding", f"{text} of {OWN[dtype]}", _map(f"t0 = identity(x0) @ {text}", [x], dtype))


def _applied(name: str, text: str, dtype: torch.dtype) -> Case:
    """An operator on random encodings, and on numbers of a usual size."""
    arity = OPERATORS[name].arity
    program = f"t0 = {name}({', '.join(f'x{i}' for i in range(arity))}) @ {text}"
    operands = [torch.cat([encodings(dtype, 700, i), numbers((300,), i, dtype=dtype)]) for i in range(arity)]
    kind = "function" if name in ELEMENTARY else "arithmetic"
    return Case(kind, f"{name} @ {text} of {OWN[dtype]}", _map(program, operands, dtype))


def operations() -> Iterator[Case]:
    """Every operator: arithmetic in all modes, elementary functions in one of each kind, on binary32 and binary64."""
    for name in OPERATORS:
        modes = ("nearest_even", "toward_negative", "stochastic") if name in ELEMENTARY else (*MODES,)
        for mode in modes:
            yield _applied(name, f"binary32/{mode}", torch.float32)
        for mode in ("nearest_even", "up_down"):
            yield _applied(name, f"binary64/{mode}", torch.float64)
        yield _applied(name, "bfloat16/to_odd", torch.float64)
        for dtype in STORAGES if OPERATORS[name].selects else ():
            yield _applied(name, "exact", dtype)


def layouts() -> Iterator[Case]:
    """Maps of operands of every dtype, stored in every way that a map reads; masks; several statements."""
    for dtype, own in OWN.items():
        mode = "up_down" if dtype == torch.float64 else "stochastic"
        x = numbers((3, 70, 128), 1, "special", dtype)
        wide = numbers((3, 70, 257), 2, dtype=dtype)[..., 1::2]
        for said, operand in (
            ("adjacent", x.flip(0)),
            ("one", x[0, 0, 3]),
            ("a row", x[0, 0]),
            ("a column", x[:, :, :1]),
            ("strided", wide),
            ("transposed", x.transpose(0, 2).contiguous().transpose(0, 2)),
        ):
            yield Case("layout", f"{said}, {own}", _map(f"t0 = add(x0, x1) @ {own}/{mode}", [x, operand], dtype))
    x = encodings(torch.float32, 500, 1)
    text = (
        "t0 = mul(x0, 0x1.8p+1) @ binary32/stochastic; t1 = add(t0, x1) @ binary16/stochastic; t2 = mul(t1, x2) @ e5m2"
    )
    yield Case("layout", "three statements and a mask", _map(text, [x, x.flip(0), x > 0], torch.float32))
    y = numbers((500,), 1)
    text = "t0 = mul(x0, x1) @ binary32; t1 = add(t0, x2) @ binary32"
    yield Case("layout", "a product and a sum, not fused", _map(text, [y, y.flip(0), y.roll(7)], torch.float32))


def contractions() -> Iterator[Case]:
    """Products of matrices: every accumulator with every kind of numbers, dtypes, layouts and sizes."""
    for accumulate in (*_DIRECTED, *_GENERAL):
        yield Case("contraction", accumulate, lambda a=accumulate: list(_products(a)))
    for dtype in STORAGES:
        for accumulate in ("bfloat16/stochastic", "binary32", "binary64/up_down"):
            yield Case(
                "contraction", f"{accumulate} of {OWN[dtype]}", lambda a=accumulate, d=dtype: list(_stored(a, d))
            )


def _products(accumulate: str) -> Iterator[Tensor]:
    kernel = contract_kernel(Accumulation.parse(accumulate), _BINARY32, ("f32", "f32"), "f32")
    for kind in _CHAINS:
        yield run_product(kernel, numbers((1, 9, 40), 1, kind), numbers((1, 40, 35), 2, kind), 0, DRAW)
    for batch, rows, columns, length in ((3, 1, 1, 40), (1, 2, 5, 0), (2, 17, 3, 200)):
        yield run_product(kernel, numbers((batch, rows, length), 1), numbers((batch, length, columns), 2), 0, DRAW)


def _stored(accumulate: str, dtype: torch.dtype) -> Iterator[Tensor]:
    storage = STORAGES[dtype]
    kernel = contract_kernel(Accumulation.parse(accumulate), Rounding.parse(OWN[dtype]), (storage, storage), storage)
    a, b = numbers((2, 5, 11), 1, "special", dtype), numbers((2, 11, 21), 2, "special", dtype)
    for right in (b, b.mT.contiguous().mT, numbers((2, 11, 43), 3, dtype=dtype)[..., 1::2]):
        yield run_product(kernel, a, right, 0, DRAW)


def reductions() -> Iterator[Case]:
    """Sums in every order, products, maxima and prefixes, along and across the memory; exact sums."""
    for accumulate in (*(f"binary32/{m}" for m in MODES), "binary64", "bfloat16/stochastic", "e5m2/up_down/saturate"):
        for order in ("lanes:16", "sequential"):
            kernel = sum_kernel(Order.parse(order), Rounding.parse(accumulate), _BINARY32, "f32", "f32")
            yield Case("reduction", f"sum, {order}, {accumulate}", lambda k=kernel: list(_reduced(k)))
        scan = cumsum_kernel(Rounding.parse(accumulate), _BINARY32, "f32", "f32")
        yield Case("scan", f"cumsum, {accumulate}", lambda k=scan: list(_scanned(k)))
    for accumulate in ("binary32", "binary32/stochastic", "bfloat16/toward_negative"):
        product = prod_kernel(Rounding.parse(accumulate), _BINARY32, "f32", "f32")
        yield Case("reduction", f"prod, {accumulate}", lambda k=product: list(_reduced(k)))
        scan = cumprod_kernel(Rounding.parse(accumulate), _BINARY32, "f32", "f32")
        yield Case("scan", f"cumprod, {accumulate}", lambda k=scan: list(_scanned(k)))
    for dtype, storage in STORAGES.items():
        largest = largest_kernel(storage)
        yield Case("reduction", f"maximum of {OWN[dtype]}", lambda k=largest, d=dtype: list(_reduced(k, d)))
        for mode in ("nearest_even", "stochastic", "toward_positive"):
            if dtype == torch.float64 and mode != "nearest_even":
                continue
            rounding = Rounding.parse(f"{OWN[dtype]}/{mode}")
            kernel = sum_kernel(Order.parse("exact"), rounding, rounding, storage, storage)
            yield Case("exact sum", f"{OWN[dtype]}/{mode}", lambda k=kernel, d=dtype: list(_reduced(k, d)))


def _reduced(kernel: Any, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    run = run_exact if isinstance(kernel, Exact) else run_reduce
    for kind in _CHAINS:
        for length in (1, 17, 100, 700):
            x = numbers((19, length), 3, kind, dtype)
            yield run(kernel, x, DRAW)
            yield run(kernel, x.t(), DRAW, (0,))
            yield run(kernel, x.reshape(1, 19, length).expand(2, 19, length), DRAW, (0, 2))
    if isinstance(kernel, Exact):
        finite = encodings(dtype, 4096, 5).double().nan_to_num(0.0, 1.0, -1.0).to(dtype)
        yield run(kernel, finite.reshape(8, 512), DRAW)


def _scanned(kernel: Any) -> Iterator[Tensor]:
    for kind in _CHAINS:
        x = numbers((21, 40), 3, kind)
        yield run_scan(kernel, x, DRAW)
        yield run_scan(kernel, x, DRAW, 0)
        yield run_scan(kernel, x.t(), DRAW)


def scatters() -> Iterator[Case]:
    """Contributions to elements and to rows."""
    for dtype, storage in STORAGES.items():
        for mode in ("nearest_even", "stochastic", "up_down"):
            if dtype == torch.float64 and mode == "stochastic":
                continue
            kernel = scatter_kernel(Rounding.parse(f"{OWN[dtype]}/{mode}"), storage)
            yield Case("scatter", f"{OWN[dtype]}/{mode}", lambda k=kernel, d=dtype: list(_scattered(k, d)))


def _scattered(kernel: Any, dtype: torch.dtype) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for kind in _CHAINS:
        for shape in ((40,), (30, 19)):
            x, source = numbers(shape, 1, kind, dtype), numbers((100, *shape[1:]), 2, kind, dtype)
            index = torch.randint(0, shape[0], (100,), generator=generator)
            index = index.reshape(-1, *[1] * (len(shape) - 1)).expand(source.shape)
            yield run_scatter(kernel, x, scatter_rows(x, 0, index, source), DRAW)


def models() -> Iterator[Case]:
    """Compiled models, forwards and backwards: convolutions of all kinds, chains over rows, whole networks."""
    for policy in ("reproducible", "stochastic", "up_down", "bfloat16"):
        for name, make, shape in _MODELS:
            kind = "row chain" if name in ("softmax", "layer norm") else "model" if shape[0] > 4 else "convolution"
            yield Case(kind, f"{name}, {policy}", partial(_trained, cache(partial(_compiled, make, policy)), shape))


_MODELS: Final[tuple[tuple[str, Callable[[], nn.Module], tuple[int, ...]], ...]] = (
    ("convolution", lambda: nn.Conv2d(3, 5, 3, padding=1, stride=2), (2, 3, 13, 11)),
    ("grouped convolution", lambda: nn.Conv1d(6, 6, 3, groups=3, dilation=2), (2, 6, 30)),
    ("depthwise convolution", lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), (2, 8, 14, 14)),
    ("transposed convolution", lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), (2, 4, 7, 7)),
    ("softmax", lambda: nn.Softmax(-1), (201, 120)),
    ("layer norm", lambda: nn.LayerNorm(120), (201, 120)),
    ("digits CNN", DigitsCNN, (9, 1, 8, 8)),
    ("transformer layer", lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), (5, 7, 16)),
)


def _compiled(make: Callable[[], nn.Module], policy: str) -> fxround.RoundedModule:
    """Compile a model with weights that depend on their number alone."""
    model = make()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(numbers(tuple(p.shape), i) / 64)
    return fxround.compile(model, policy)


def _trained(make: Callable[[], fxround.RoundedModule], shape: tuple[int, ...]) -> list[Tensor]:
    """Return a model's result and every gradient."""
    model, x = make(), numbers(shape, 99).requires_grad_()
    model.zero_grad()
    result = model.reseed(5)(x)
    F.mse_loss(result, torch.zeros_like(result)).backward()
    return [result.detach(), *(g for g in (x.grad, *(p.grad for p in model.parameters())) if g is not None)]


def cases() -> Iterator[Case]:
    """Return all cases, kind by kind."""
    for make in (roundings, operations, layouts, contractions, reductions, scatters, models):
        yield from make()


def differing(case: Case) -> str:
    """Run a case here and under the emulator: the first result that differs, in words; an empty text if none does."""
    here = case.run()
    with emulation.emulated():
        there = case.run()
    for number, (own, other) in enumerate(zip(here, there, strict=True)):
        places = (own.contiguous().view(_signed(own.dtype)) != other.contiguous().view(_signed(own.dtype))).nonzero()
        if len(places):
            at = tuple(places[0].tolist())
            return f"result {number}: {len(places)} of {own.numel()}, at {at} {own[at]} here and {other[at]} there"
    return ""


def main() -> None:
    """Compare the cases of the command line and print a table by kind; the exit status is 1 where bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", help="only these kinds")
    parser.add_argument("--every", type=int, default=1, help="every N-th case alone")
    parser.add_argument("--list", action="store_true", help="name the cases and run none")
    given = parser.parse_args()
    chosen = list(islice((c for c in cases() if not given.kinds or c.kind in given.kinds), 0, None, given.every))
    if given.list:
        print("\n".join(f"{case.kind}: {case.name}" for case in chosen))
        return
    lacking = emulation.missing()
    if lacking:
        print(f"not run: {lacking}")
        return
    print(f"{header(['torch', 'llvmlite'])}; {emulation.versions()}\n", flush=True)
    counts: dict[str, list[int]] = {}
    started = time.perf_counter()
    for case in chosen:
        before = emulation.runner().calls
        wrong = differing(case)
        row = counts.setdefault(case.kind, [0, 0, 0])
        row[0] += 1
        row[1] += emulation.runner().calls - before
        row[2] += bool(wrong)
        if wrong:
            print(f"{case.kind}, {case.name}: {wrong}", flush=True)
    rows = [(kind, *map(str, row)) for kind, row in counts.items()]
    print(table(("kind", "cases", "calls of kernels", "cases that differ"), rows))
    print(f"\n{len(chosen)} cases in {time.perf_counter() - started:.0f} s")
    if any(row[2] for row in counts.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
