"""CUDA texts: compiled as host C++ and run, they give NumPy's bits; compiled by NVRTC, they compile.

The host runs the very text of the GPU (``cuda_host``), through the functions that launch it on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cuda_host import Functions, HostLauncher, assert_same, built, prepare
from kernel_operands import stored
from neighbours import ALL_MODES, Array, boundaries, encodings, held, random_words
from torch import Tensor

from fxround.graph.dialect import Cumsum
from fxround.graph.dtypes import dtype_of
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.kinds import Contract, Exact, Map, Reduce, Scan, Scatter
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.kernels.reductions import cumsum_kernel, exact_kernel, largest_kernel, scatter_kernel, sum_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.arithmetic.operators import OPERATORS
from fxround.numerics.arithmetic.randomness import (
    coins_function,
    philox_function,
    random_function,
    seed_function,
    stream_functions,
)
from fxround.numerics.arithmetic.rounding import rounding_function
from fxround.numerics.arithmetic.scalar import DTYPES, OPS, Function
from fxround.numerics.formats import Format
from fxround.numerics.formats.storage import Storage
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.orders import Order
from fxround.runtime import reductions, reference
from fxround.runtime.contractions import Product, Right
from fxround.runtime.contributions import Contributions
from fxround.runtime.cpu.llvm import render
from fxround.runtime.cuda import contraction as contraction_module
from fxround.runtime.cuda import pointwise, reduction
from fxround.runtime.cuda.contraction import run_product
from fxround.runtime.cuda.cpp.contract import Tile
from fxround.runtime.cuda.cpp.table import TABLE
from fxround.runtime.cuda.launcher import launching
from fxround.runtime.draw import Draw

KEY = (0x9ABC_DEF0, 0x1234_5678, 3, 17)
DRAW = Draw(seed=0x1234_5678_9ABC_DEF0, sample=3, node=17)
FORMATS_HERE = ("bfloat16", "binary16", "tf32", "e4m3fn", "e2m1fn", "e8m0fnu", "ue5m3", "binary16-flush", "ieee(11,12)")
BINARY32 = Rounding.parse("binary32")


# ---- what is compiled: names for the tests' ids, built at first use ----


def _formats() -> list[Format]:
    return [Format.parse(f) for f in FORMATS_HERE]


# Every mode of some formats in both carriers under the default overflow; one format that saturates.
ROUNDINGS = [
    *(Rounding(f, m, f.default_overflow) for f in _formats() for m in ALL_MODES),
    *(Rounding(Format.parse("binary16"), m, "saturate") for m in MODES.values()),
]
OTHERS_HERE = (
    *("posit(16,2)", "posit(8,1)/stochastic", "binary8p1se", "nf4/nearest_even", "nf4/stochastic_c:4"),
    f"table({','.join(map(str, range(-20, 30)))})/toward_zero",
)
ROUNDING_FUNCTIONS = [f"{r} {c}" for r in ROUNDINGS for c in ("f32", "f64") if held(r.format, c)]
ROUNDING_FUNCTIONS += [f"{text} {c}" for text in OTHERS_HERE for c in ("f32", "f64")]
RANDOM_FUNCTIONS = ("philox", "random 0", "random 7", "random 16", "random 1", "seed", "start", "advance", "coins")
OPERATOR_KERNELS = [
    *(f"{name} @ binary32" for name in OPERATORS),
    *(f"{name} @ bfloat16/stochastic" for name, row in OPERATORS.items() if row.native),
]
FAULTS = {
    "posit(16,2)": "flip_0_16_134217728(t0)",
    "nf4": "flip_0_4_536870912(t0)",
    "e8m0fnu": "flip_0_8_268435456(t0)",
    "custom(7,2,0x1p+3,signed+zero)": "flip_0_8_268435456(t0, -0x1p+3, 0x1.fcp+2)",
}


def faulty(fmt: str, fault: str) -> str:
    """The program of a rounding to the format and a fault, of which half of the words flip a bit."""
    return f"t0 = identity(x0) @ {fmt}/nearest_even/saturate; t1 = {fault} @ {fmt}/stochastic/saturate"


MAP_KERNELS: dict[str, tuple[str, tuple[Storage, ...], Storage]] = {
    "two draws": (
        "t0 = mul(x0, x1) @ binary32/stochastic; t1 = add(t0, 0x1.8p+1) @ bfloat16/stochastic_equal",
        ("f32", "f32"),
        "f32",
    ),
    "half in, bfloat16 out": ("t0 = add(x0, x1) @ bfloat16/up_down", ("f16", "bf16"), "bf16"),
    "8 bits": ("t0 = add(x0, x1) @ e5m2/stochastic", ("e4m3fn", "e5m2fnuz"), "e5m2"),
    "powers of two": ("t0 = mul(x0, x1) @ e4m3fnuz/nearest_even", ("e8m0fnu", "f32"), "e4m3fnuz"),
    "bfloat16 in, half out": ("t0 = identity(x0) @ binary16/stochastic:3", ("bf16",), "f16"),
    "binary64": ("t0 = fma(x0, x1, x2) @ binary32/toward_zero", ("f64", "f64", "f64"), "f64"),
    "binary64 drawn": ("t0 = fma(x0, x1, x2) @ binary64/stochastic", ("f64", "f64", "f64"), "f64"),
    "exact": ("t0 = neg(x0) @ exact", ("f32",), "f32"),
    **{
        f"faults of {fmt} in {c}": (faulty(fmt, fault), (c,), c)
        for fmt, fault in FAULTS.items()
        for c in ("f32", "f64")
    },
}
SUM_KERNELS = [
    *product(
        ("sequential", "lanes:2", "lanes:16"),
        ("binary32", "binary32/stochastic", "bfloat16/toward_zero", "e5m2/up_down"),
        ("bfloat16/stochastic",),
        ("f32",),
    ),
    ("lanes:4", "binary32", "binary16", "f16"),
    ("lanes:2", "e4m3fn/stochastic/saturate faults=any:0.1", "binary32", "f32"),
]
SCAN_KERNELS = ("binary32", "bfloat16/stochastic", "bfloat16 faults=exponent:0.1", "fixed(9,3)/stochastic")
SCATTER_KERNELS: list[tuple[str, Storage]] = [
    ("binary32", "f32"),
    ("binary32/stochastic", "f32"),
    ("e5m2/up_down", "bf16"),
    ("binary16/toward_zero", "f16"),
    ("binary32/stochastic", "f64"),
    ("binary32 faults=sign:0.1", "f32"),
]
EXACT_KERNELS: list[tuple[str, str, Storage]] = [
    ("binary32", "binary32", "f32"),
    ("binary32/stochastic", "bfloat16/stochastic", "f32"),
    ("bfloat16/up_down", "bfloat16", "bf16"),
    ("binary16/to_odd", "binary16", "f16"),
    ("binary64", "binary64", "f64"),
    ("tf32/toward_negative", "binary32", "f64"),
]
SHARED_EXACT_KERNELS = EXACT_KERNELS[1:6:2]
CONTRACT_KERNELS: dict[str, tuple[str, str, tuple[Storage, Storage], Storage]] = {
    "binary32": ("binary32", "binary32", ("f32", "f32"), "f32"),
    "binary32/stochastic": ("binary32/stochastic", "binary32", ("f32", "f32"), "f32"),
    "binary32/to_odd": ("binary32/to_odd", "binary32", ("f32", "f32"), "f32"),
    "bfloat16": ("bfloat16", "bfloat16", ("f32", "f32"), "f32"),
    "faults": ("binary32/stochastic faults=significand:0.1,sign:0.05", "binary32", ("f32", "f32"), "f32"),
    "e4m3fn": ("e4m3fn/up_down/saturate", "binary32", ("f32", "f32"), "f32"),
    "chunks": ("ieee(8,14)/toward_zero chunk=5 combine=binary32/stochastic", "binary32", ("f32", "f32"), "f32"),
    "products": ("binary32/stochastic product=binary32/stochastic", "binary32", ("f32", "f32"), "f32"),
    "fixed": ("fixed(9,3)/toward_negative/wrap", "binary32", ("f32", "f32"), "f32"),
    "mixed": ("binary32", "bfloat16/stochastic", ("bf16", "f16"), "bf16"),
    "8 bits": ("binary32", "e4m3fn/stochastic/saturate", ("e4m3fn", "e5m2"), "e4m3fn"),
    "binary64": ("binary64", "binary64", ("f64", "f64"), "f64"),
    "binary64 drawn": ("binary64/stochastic", "binary64", ("f64", "f64"), "f64"),
}


@cache
def functions() -> dict[str, Function]:
    """Every scalar function by name."""
    found = {name: rounding_function(Rounding.parse(name.split()[0]), name.split()[1]) for name in ROUNDING_FUNCTIONS}
    randoms = (
        philox_function(),
        random_function(0),
        random_function(7),
        random_function(7, 16),
        random_function(7, 1),
        seed_function(),
        *stream_functions(),
        coins_function(),
    )
    return found | dict(zip(RANDOM_FUNCTIONS, randoms, strict=True))


@cache
def operator_kernel(name: str) -> Map:
    operator, _, rounding = name.split()
    arity = OPERATORS[operator].arity
    text = f"t0 = {operator}({', '.join(f'x{i}' for i in range(arity))}) @ {rounding}"
    return map_kernel(Program.parse(text), ("f32",) * arity, "f32")


@cache
def layout_kernel(name: str) -> Map:
    text, loads, result = MAP_KERNELS[name]
    return map_kernel(Program.parse(text), loads, result)


@cache
def sum_of(order: str, accumulate: str, rounding: str, storage: Storage) -> Reduce:
    return sum_kernel(Order.parse(order), Accumulation.parse(accumulate), Rounding.parse(rounding), storage, storage)


@cache
def scan_of(accumulate: str) -> Scan:
    return cumsum_kernel(Accumulation.parse(accumulate), Rounding.parse("binary16/stochastic"), "f32", "f32")


@cache
def scatter_of(accumulate: str, storage: Storage) -> Scatter:
    return scatter_kernel(Accumulation.parse(accumulate), storage)


@cache
def exact_of(accumulate: str, rounding: str, storage: Storage) -> Exact:
    return exact_kernel(Rounding.parse(accumulate), Rounding.parse(rounding), storage, storage)


@cache
def contraction(name: str) -> Contract:
    accumulate, rounding, loads, result = CONTRACT_KERNELS[name]
    return contract_kernel(Accumulation.parse(accumulate), Rounding.parse(rounding), loads, result)


def taken(request: pytest.FixtureRequest, test: Callable[..., None]) -> list[str]:
    """The names among the cases of a test that this run takes; others need no text."""
    cases: list[Any] = [item for item in request.session.items if getattr(item, "function", None) is test]
    return list(dict.fromkeys(case.callspec.params["name"] for case in cases))


def every_run(operators: Iterable[str], contractions: Iterable[str]) -> Iterator[Callable[[], object]]:
    """What the tests run, for the texts alone."""
    for name in operators:
        kernel = operator_kernel(name)
        yield partial(pointwise.run_kernel, kernel, [elements((70,), s, 0) for s in kernel.loads], KEY)
    for name in MAP_KERNELS:
        for operands in (map_operands(name), rows_of(map_operands(name))):
            yield partial(pointwise.run_kernel, layout_kernel(name), operands, KEY)
    for reduce in (*(sum_of(*row) for row in SUM_KERNELS), *(exact_of(*row) for row in EXACT_KERNELS)):
        yield partial(reduction.run_reduce, reduce, elements((2, 3, 2), reduce.loads[0], 0), DRAW, [1])
    for row in SHARED_EXACT_KERNELS:
        yield partial(shared_exact, exact_of(*row), elements((2, 3, 2), row[2], 0))
    yield partial(reduction.run_reduce, largest_kernel("f32"), elements((2, 3, 2), "f32", 0), DRAW, [1])
    for accumulate in SCAN_KERNELS:
        yield partial(run_scan, accumulate, elements((2, 3, 2), "f32", 0))
    for row in SCATTER_KERNELS:
        yield partial(run_scatter, row)
    for name, side in product(contractions, SIDES):
        yield partial(contract, name, 0, side)


@pytest.fixture(scope="module")
def scalars(request: pytest.FixtureRequest, compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Functions:
    names = (*taken(request, test_rounding_functions_equal_numpy), *RANDOM_FUNCTIONS)
    return built({name: functions()[name] for name in names}, compiler, tmp_path_factory.mktemp("functions"))


@pytest.fixture(scope="module")
def host(
    request: pytest.FixtureRequest, compiler: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostLauncher]:
    """A launcher that has all texts of this run of the file; operators run through it."""
    found = HostLauncher(tmp_path_factory.mktemp("cuda"), compiler, seed=11)
    prepare(found, *every_run(taken(request, test_every_operator), taken(request, test_contractions)))
    with launching(found):
        yield found


# ---- scalar functions ----


def test_the_tables_of_targets_spell_every_operator() -> None:
    assert set(TABLE) == set(render.TABLE) == set(OPS)


@pytest.mark.part(3)
@pytest.mark.parametrize("name", ROUNDING_FUNCTIONS)
def test_rounding_functions_equal_numpy(scalars: Functions, name: str) -> None:
    rounding, carrier = name.split()
    x = boundaries(Rounding.parse(rounding).format, carrier)
    random = random_words(x.size)
    (got,) = scalars.run(name, x, random)
    np.testing.assert_array_equal(encodings(got), encodings(functions()[name].evaluate(x, random)[0]))


@pytest.mark.parametrize("name", RANDOM_FUNCTIONS)
def test_random_functions_equal_numpy(scalars: Functions, name: str) -> None:
    function, rng = functions()[name], np.random.default_rng(4)
    args = [rng.integers(0, 2 ** (48 if p.type == "u64" else 32), 500, dtype=DTYPES[p.type]) for p in function.params]
    for got, want in zip(scalars.run(name, *args), function.evaluate(*args), strict=True):
        np.testing.assert_array_equal(got, want)


# ---- kernels ----


def elements(shape: tuple[int, ...], storage: Storage, seed: int) -> Tensor:
    """Stored elements: ordinary numbers, every sixth special."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))
    special = rng.choice([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-8, 65504.0, -(2.0**-126)], shape)
    return as_stored(np.where(rng.random(shape) < 1 / 6, special, x), storage)


def as_stored(x: Array, storage: Storage) -> Tensor:
    return torch.from_numpy(x.astype(np.float32)).to(dtype_of(storage))


@pytest.mark.part(6)
@pytest.mark.parametrize("name", OPERATOR_KERNELS)
def test_every_operator(host: HostLauncher, name: str) -> None:
    kernel = operator_kernel(name)
    operands = [elements((70,), s, seed) for seed, s in enumerate(kernel.loads)]
    (got,) = pointwise.run_kernel(kernel, operands, KEY)
    assert_same(got, reference.map_(kernel, [stored(x) for x in operands], KEY))


def map_operands(name: str) -> list[Tensor]:
    """Operands of any strides that broadcast to (9, 5, 3), one of them a number."""
    kernel = layout_kernel(name)
    storages = (kernel.loads * 3)[:3]
    shapes: list[tuple[int, ...]] = [(5, 3, 9), (9,), ()]
    full, row, number = (elements(s, t, i) for i, (s, t) in enumerate(zip(shapes, storages, strict=True)))
    return [full.permute(2, 0, 1), row[torch.arange(8, -1, -1)][:, None, None], number][: len(kernel.loads)]


def rows_of(operands: list[Tensor]) -> list[Tensor]:
    return [x.expand(operands[0].shape).contiguous() for x in operands]


@pytest.mark.parametrize("name", MAP_KERNELS)
@pytest.mark.parametrize("seed", range(3))
def test_maps_of_any_layout(host: HostLauncher, name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of blocks and threads, which the seed draws, changes nothing."""
    monkeypatch.setattr(host, "seed", seed)
    kernel, operands = layout_kernel(name), map_operands(name)
    (got,) = pointwise.run_kernel(kernel, operands, KEY)
    assert_same(got, reference.map_(kernel, [stored(x.contiguous()).reshape(x.shape) for x in operands], KEY))
    rows = rows_of(operands)
    (got,) = pointwise.run_kernel(kernel, rows, KEY)
    assert_same(got, reference.map_(kernel, [stored(x) for x in rows], KEY))


def test_a_map_of_nothing(host: HostLauncher) -> None:
    (got,) = pointwise.run_kernel(layout_kernel("exact"), [elements((0, 4), "f32", 0)], KEY)
    assert got.shape == (0, 4)


def lines_of(x: Tensor) -> Array:
    """(outer, length, inner) as (lines, length), the form that ``reference`` takes."""
    return stored(x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], x.shape[1]))


SHAPES = [(3, 37, 2), (1, 16, 5), (4, 1, 1), (2, 5, 3), (2, 0, 2), (20, 33, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("row", SUM_KERNELS, ids=" ".join)
def test_sums(host: HostLauncher, row: tuple[str, str, str, Storage], shape: tuple[int, int, int]) -> None:
    kernel, x = sum_of(*row), elements(shape, row[3], 5)
    want = reference.reduce(kernel, lines_of(x), KEY)
    assert_same(reduction.run_reduce(kernel, x, DRAW, [1]), want)
    # The dimensions around the lines are reduced together: they are not adjacent.
    assert_same(reduction.run_reduce(kernel, x, DRAW, [0, 2]), reference.reduce(kernel, across(x), KEY))


def across(x: Tensor) -> Array:
    """(outer, length, inner) as (length, lines)."""
    return stored(x.permute(1, 0, 2).reshape(x.shape[1], x.shape[0] * x.shape[2]).contiguous())


@pytest.mark.parametrize("shape", SHAPES)
def test_maxima(host: HostLauncher, shape: tuple[int, int, int]) -> None:
    """The first value is -inf, which C++ has no literal for."""
    kernel, x = largest_kernel("f32"), elements(shape, "f32", 5)
    assert_same(reduction.run_reduce(kernel, x, DRAW, [1]), reference.reduce(kernel, lines_of(x), KEY))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accumulate", SCAN_KERNELS)
def test_scans(host: HostLauncher, accumulate: str, shape: tuple[int, int, int]) -> None:
    x = elements(shape, "f32", 5)
    got = run_scan(accumulate, x)
    lines = reference.scan(scan_of(accumulate), lines_of(x), KEY).reshape(shape[0], shape[2], shape[1])
    assert_same(got, np.ascontiguousarray(lines.transpose(0, 2, 1), np.float32))


def run_scan(accumulate: str, x: Tensor) -> Tensor:
    rng = torch.tensor([DRAW.seed, DRAW.sample])
    return reductions.scan(Cumsum(x, 1, accumulate, "binary16/stochastic/inf", rng, DRAW.node))


def exact_operands(storage: Storage) -> Iterator[Tensor]:
    """Ordinary and special numbers, both ends of the range, and sums that cancel to their last bit."""
    yield from (elements(shape, storage, 5) for shape in (*SHAPES, (2, 300, 3)))
    finite = elements((1, 64, 5), "f64", 6).numpy()
    finite = np.where(np.isfinite(finite), finite, 1.0)
    far = {"f64": 900, "f16": 8}.get(storage, 100)
    spread = finite * np.exp2(np.linspace(-far, far, 64))[:, None]
    x = np.concatenate([finite, spread, -finite, -spread, finite[:, :1] * 2.0**-20], 1)
    yield torch.from_numpy(x).to(dtype_of(storage))


@pytest.mark.parametrize("row", EXACT_KERNELS, ids=" ".join)
def test_exact_sums(host: HostLauncher, row: tuple[str, str, Storage]) -> None:
    kernel = exact_of(*row)
    for x in exact_operands(row[2]):
        assert_same(reduction.run_reduce(kernel, x, DRAW, [1]), reference.exact(kernel, lines_of(x), KEY))


def shared_exact(kernel: Exact, x: Tensor) -> Tensor:
    """An exact sum of any length by a block of threads for each result."""
    with patch.object(reduction, "_LONG_EXACT", 0):
        return reduction.run_reduce(kernel, x, DRAW, [1])


@pytest.mark.parametrize("row", SHARED_EXACT_KERNELS, ids=" ".join)
def test_exact_sums_of_many_threads(host: HostLauncher, row: tuple[str, str, Storage]) -> None:
    kernel = exact_of(*row)
    *_, x = exact_operands(row[2])
    assert_same(shared_exact(kernel, x), reference.exact(kernel, lines_of(x), KEY))
    long = elements((2, reduction._LONG_EXACT, 1), row[2], 9)
    long = torch.where(long.isfinite(), long, 1)
    host.launched.clear()
    assert_same(reduction.run_reduce(kernel, long, DRAW, [1]), reference.exact(kernel, lines_of(long), KEY))
    assert host.launched == [f"exact_{kernel.digest[:16]}_shared"]


def run_scatter(row: tuple[str, Storage]) -> tuple[Tensor, Array]:
    """A scatter on the launcher in place, and by the reference."""
    kernel, storage = scatter_of(*row), row[1]
    own, source = elements((6, 3), storage, 1), elements((40, 3), storage, 2)
    rows = np.random.default_rng(3).integers(0, 5, 40)
    got = reduction.run_scatter(kernel, own, Contributions(torch.from_numpy(rows), source), DRAW)
    places = (rows[:, None] * 3 + np.arange(3)).reshape(-1)
    return got, reference.scatter(kernel, stored(own).reshape(-1), places, stored(source).reshape(-1), KEY)


@pytest.mark.parametrize("row", SCATTER_KERNELS, ids=" ".join)
def test_scatters(host: HostLauncher, row: tuple[str, Storage]) -> None:
    assert_same(*run_scatter(row))


SIDES = (1, 2, 4, 8)


def contract(name: str, groups: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """A product of tiles with edges in both dimensions and a last round of a few steps, and its operands."""
    batch, rows, length, columns = 4, 19, 37, 21
    kernel = contraction(name)
    # a is stored transposed, b with its batch innermost: any steps will do.
    a = elements((groups or batch, length, rows), kernel.loads[0], 1).transpose(1, 2)
    b = elements((length, columns, batch), kernel.loads[1], 2).permute(2, 0, 1)
    right = Right.matrices(b.shape, b.stride())
    with patch.object(contraction_module, "_tile", lambda product, *sizes: Tile(product.kernel, side)):
        got = run_product(Product(kernel, a, b, right, groups, DRAW, (batch, rows, columns)))
    return got, a[torch.arange(batch) % (groups or batch)], b


@pytest.mark.part(5)
@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("name", CONTRACT_KERNELS)
def test_contractions(host: HostLauncher, name: str, groups: int) -> None:
    """Tiles of every size give the same bits."""
    for side in SIDES:
        got, a, b = contract(name, groups, side)
        if side == SIDES[0]:
            want = reference.contract(contraction(name), stored(a.contiguous()), stored(b.contiguous()), KEY)
        assert_same(got, want)


@pytest.mark.part(3)
@pytest.mark.parametrize("side", [1, 4])
@pytest.mark.parametrize(
    "accumulate, rounding", [("stochastic", "bfloat16/stochastic"), ("up_down", "binary32/up_down")]
)
def test_contractions_in_binary32(
    host: HostLauncher, accumulate: str, rounding: str, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device whose binary64 is slow steps in binary32, and computes again what leaves the range: the same bits."""
    monkeypatch.setattr(host, "slow_binary64", True)
    kernel = contract_kernel(
        Accumulation.parse(f"binary32/{accumulate}"), Rounding.parse(rounding), ("f32", "bf16"), "f32"
    )
    rng = np.random.default_rng(8)
    a, b = rng.standard_normal((2, 40, 70)), rng.standard_normal((2, 70, 21))
    # Sparse rows, one whose sums begin subnormal, one that overflows in between, infinities and NaNs.
    a[:, :8] *= rng.random((2, 8, 70)) < 0.1
    a[:, 8, :9], a[0, 9, 3:5], a[0, 10, 5], a[1, 10, 6] = 1e-40, (3e38, -3e38), np.inf, np.nan
    b[:, 3:5, 2:] = b[:, 3:4, 2:] * 2
    left, right = as_stored(a, "f32"), as_stored(b, "bf16")
    places = Right.matrices(right.shape, right.stride())
    with patch.object(contraction_module, "_tile", lambda product, *sizes: Tile(product.kernel, side)):
        got = run_product(Product(kernel, left, right, places, 0, DRAW, (2, 40, 21)))
    assert_same(got, reference.contract(kernel, stored(left), stored(right), KEY))
    assert f"contract_{kernel.digest[:16]}_{side}_k1_n0_single" in host.functions
