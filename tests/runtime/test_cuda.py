"""CUDA texts: compiled as host C++ and run, they give NumPy's bits; compiled for sm_90, they compile.

The host runs the very text of the GPU: ``HOST_PRELUDE`` supplies the intrinsics, and a wrapper walks the grid.
Every function and kernel of this file goes into one shared object.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from cuda_host import Host, Key, Shape, built, layout
from neighbours import ALL_MODES, Array, boundaries, encodings, held, random_words

from fxround.kernels.contractions import contract_kernel
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.kernels.reductions import cumsum_kernel, exact_kernel, largest_kernel, scatter_kernel, sum_kernel
from fxround.kernels.shapes import Contract, Exact, Kernel, Map, Reduce, Scan, Scatter
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats import Format
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.operators import OPERATORS
from fxround.numerics.orders import Order
from fxround.numerics.randomness import (
    coins_function,
    philox_function,
    random_function,
    seed_function,
    stream_functions,
)
from fxround.numerics.rounding import rounding_function
from fxround.numerics.scalar import DTYPES, OPS, Function
from fxround.numerics.storage import Storage
from fxround.runtime import reference
from fxround.runtime.cuda.cpp.loops import kernel_source
from fxround.runtime.cuda.cpp.table import DEVICE_FLAGS, TABLE, device_function

KEY = (0x9ABC_DEF0, 0x1234_5678, 3, 17)
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
RANDOM_FUNCTIONS = ("philox", "random draw 0", "random draw 7", "seed", "start", "advance", "coins")
OPERATOR_KERNELS = [
    *(f"{name} @ binary32" for name in OPERATORS),
    *(f"{name} @ bfloat16/stochastic" for name, row in OPERATORS.items() if row.native),
]
MAP_KERNELS: dict[str, tuple[str, tuple[Storage, ...], Storage]] = {
    "two draws": (
        "t0 = mul(x0, x1) @ binary32/stochastic; t1 = add(t0, 0x1.8p+1) @ bfloat16/stochastic_equal",
        ("f32", "f32"),
        "f32",
    ),
    "half in, bfloat16 out": ("t0 = add(x0, x1) @ bfloat16/up_down", ("f16", "bf16"), "bf16"),
    "bfloat16 in, half out": ("t0 = identity(x0) @ binary16/stochastic:3", ("bf16",), "f16"),
    "binary64": ("t0 = fma(x0, x1, x2) @ binary32/toward_zero", ("f64", "f64", "f64"), "f64"),
    "exact": ("t0 = neg(x0) @ exact", ("f32",), "f32"),
}
SUM_KERNELS = [
    *product(
        ("sequential", "lanes:2", "lanes:16"),
        ("binary32", "binary32/stochastic", "bfloat16/toward_zero", "e5m2/up_down"),
        ("bfloat16/stochastic",),
        ("f32",),
    ),
    ("lanes:4", "binary32", "binary16", "f16"),
]
SCAN_KERNELS = ("binary32", "bfloat16/stochastic")
SCATTER_KERNELS: list[tuple[str, Storage]] = [
    ("binary32", "f32"),
    ("binary32/stochastic", "f32"),
    ("e5m2/up_down", "bf16"),
    ("binary16/toward_zero", "f16"),
    ("binary32/stochastic", "f64"),
]
EXACT_KERNELS: list[tuple[str, str, Storage]] = [
    ("binary32", "binary32", "f32"),
    ("binary32/stochastic", "bfloat16/stochastic", "f32"),
    ("bfloat16/up_down", "bfloat16", "bf16"),
    ("binary16/to_odd", "binary16", "f16"),
    ("binary64", "binary64", "f64"),
    ("tf32/toward_negative", "binary32", "f64"),
]
CONTRACT_KERNELS: dict[str, tuple[str, str, tuple[Storage, Storage], Storage]] = {
    "binary32": ("binary32", "binary32", ("f32", "f32"), "f32"),
    "binary32/stochastic": ("binary32/stochastic", "binary32", ("f32", "f32"), "f32"),
    "binary32/to_odd": ("binary32/to_odd", "binary32", ("f32", "f32"), "f32"),
    "bfloat16": ("bfloat16", "bfloat16", ("f32", "f32"), "f32"),
    "e4m3fn": ("e4m3fn/up_down/saturate", "binary32", ("f32", "f32"), "f32"),
    "chunks": ("ieee(8,14)/toward_zero chunk=5 combine=binary32/stochastic", "binary32", ("f32", "f32"), "f32"),
    "products": ("binary32/stochastic product=binary32/stochastic", "binary32", ("f32", "f32"), "f32"),
    "mixed": ("binary32", "bfloat16/stochastic", ("bf16", "f16"), "bf16"),
    "binary64": ("binary64", "binary64", ("f64", "f64"), "f64"),
}


@cache
def functions() -> dict[str, Function]:
    """Every scalar function by name."""
    found = {name: rounding_function(Rounding.parse(name.split()[0]), name.split()[1]) for name in ROUNDING_FUNCTIONS}
    randoms = (
        philox_function(),
        random_function(0),
        random_function(7),
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
    return sum_kernel(Order.parse(order), Rounding.parse(accumulate), Rounding.parse(rounding), storage, storage)


@cache
def scan_of(accumulate: str) -> Scan:
    return cumsum_kernel(Rounding.parse(accumulate), Rounding.parse("binary16/stochastic"), "f32", "f32")


@cache
def scatter_of(accumulate: str, storage: Storage) -> Scatter:
    return scatter_kernel(Rounding.parse(accumulate), storage)


@cache
def exact_of(accumulate: str, rounding: str, storage: Storage) -> Exact:
    return exact_kernel(Rounding.parse(accumulate), Rounding.parse(rounding), storage, storage)


@cache
def contraction(name: str) -> Contract:
    accumulate, rounding, loads, result = CONTRACT_KERNELS[name]
    return contract_kernel(Accumulation.parse(accumulate), Rounding.parse(rounding), loads, result)


@cache
def kernels() -> tuple[Kernel, ...]:
    """Every kernel of this file."""
    return (
        *map(operator_kernel, OPERATOR_KERNELS),
        *map(layout_kernel, MAP_KERNELS),
        *(sum_of(*row) for row in SUM_KERNELS),
        largest_kernel("f32"),
        *map(scan_of, SCAN_KERNELS),
        *map(contraction, CONTRACT_KERNELS),
        *(scatter_of(*row) for row in SCATTER_KERNELS),
        *(exact_of(*row) for row in EXACT_KERNELS),
    )


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++ to run the CUDA texts on the host")
    return built(functions(), kernels(), compiler, tmp_path_factory.mktemp("cuda"))


def codes(x: Array) -> Array:
    """Bits, with one encoding for all NaNs if the IR does not define the NaN of an operation."""
    return encodings(x) if x.dtype.kind == "f" else x


# ---- scalar functions ----


def test_the_table_spells_every_operator() -> None:
    assert set(TABLE) == set(OPS)


@pytest.mark.parametrize("name", ROUNDING_FUNCTIONS)
def test_rounding_functions_equal_numpy(host: Host, name: str) -> None:
    rounding, carrier = name.split()
    x = boundaries(Rounding.parse(rounding).format, carrier)
    random = random_words(x.size)
    (got,) = host.run(name, x, random)
    np.testing.assert_array_equal(encodings(got), encodings(functions()[name].evaluate(x, random)[0]))


@pytest.mark.parametrize("name", RANDOM_FUNCTIONS)
def test_random_functions_equal_numpy(host: Host, name: str) -> None:
    function, rng = functions()[name], np.random.default_rng(4)
    args = [rng.integers(0, 2 ** (48 if p.type == "u64" else 32), 500, dtype=DTYPES[p.type]) for p in function.params]
    for got, want in zip(host.run(name, *args), function.evaluate(*args), strict=True):
        np.testing.assert_array_equal(got, want)


# ---- kernels ----


def memory(storage: Storage) -> type[np.generic]:
    """Stored elements as the texts declare them: 16-bit codes as unsigned short."""
    return {"f32": np.float32, "f64": np.float64}.get(storage, np.uint16)


def elements(shape: tuple[int, ...], storage: Storage, seed: int) -> Array:
    """Stored elements: ordinary numbers, every sixth special."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))
    special = rng.choice([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-8, 65504.0, -(2.0**-126)], shape)
    return as_stored(np.where(rng.random(shape) < 1 / 6, special, x).astype(np.float32), storage)


def as_stored(x: Array, storage: Storage) -> Array:
    if storage == "f64":
        return x.astype(np.float64)
    x = x.astype(np.float32)
    if storage == "f16":
        return x.astype(np.float16).view(np.uint16)
    if storage == "bf16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(memory(storage))


def widened(x: Array) -> Array:
    """Stored elements in the form that ``reference`` takes."""
    return x.astype(np.uint32) if x.dtype == np.uint16 else x


def assert_same(got: Array, want: Array) -> None:
    np.testing.assert_array_equal(codes(widened(got)), codes(want))


def run_map(host: Host, kernel: Map, operands: list[Array], grid: tuple[int, int]) -> Array:
    shape = np.broadcast_shapes(*(x.shape for x in operands))
    out = np.empty(shape, memory(kernel.results[0]))
    host.launch(kernel, grid, layout(shape, operands), out, *operands, Key(*KEY))
    return out


@pytest.mark.parametrize("name", OPERATOR_KERNELS)
def test_every_operator(host: Host, name: str) -> None:
    kernel = operator_kernel(name)
    operands = [elements((70,), s, seed) for seed, s in enumerate(kernel.loads)]
    assert_same(run_map(host, kernel, operands, (1, 16)), reference.map_(kernel, operands, KEY))


@pytest.mark.parametrize("name", MAP_KERNELS)
@pytest.mark.parametrize("grid", [(1, 1), (2, 32), (7, 5)])
def test_maps_of_any_layout(host: Host, name: str, grid: tuple[int, int]) -> None:
    kernel = layout_kernel(name)
    storages = (kernel.loads * 3)[:3]
    full, row, column = (
        elements((5, 3, 9), storages[0], 0),
        elements((9,), storages[1], 1),
        elements((3,), storages[2], 2),
    )
    operands = [full.transpose(2, 0, 1), row[::-1, None, None], column[::-1]][: len(kernel.loads)]
    want = reference.map_(kernel, [widened(x) for x in operands], KEY)
    assert_same(run_map(host, kernel, operands, grid), want)


def test_a_map_of_nothing(host: Host) -> None:
    kernel = layout_kernel("exact")
    assert run_map(host, kernel, [elements((0, 4), "f32", 0)], (2, 4)).shape == (0, 4)


def lines_of(x: Array) -> Array:
    """(outer, length, inner) as (lines, length), the form that ``reference`` takes."""
    return widened(x.transpose(0, 2, 1).reshape(x.shape[0] * x.shape[2], x.shape[1]))


def run_lines(host: Host, kernel: Reduce | Scan | Exact, x: Array, shape: tuple[int, ...]) -> Array:
    outer, length, inner = x.shape
    out = np.zeros(shape, memory(kernel.result))
    sizes = [ctypes.c_uint64(v) for v in (outer * inner, length, inner)]
    host.launch(kernel, (2, 3), *sizes, out, x, Key(*KEY))
    return out


SHAPES = [(3, 37, 2), (1, 16, 5), (4, 1, 1), (2, 5, 3), (2, 0, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("row", SUM_KERNELS, ids=" ".join)
def test_sums(host: Host, row: tuple[str, str, str, Storage], shape: tuple[int, int, int]) -> None:
    kernel, x = sum_of(*row), elements(shape, row[3], 5)
    want = reference.reduce(kernel, lines_of(x), KEY).reshape(shape[0], shape[2])
    assert_same(run_lines(host, kernel, x, want.shape), want)


@pytest.mark.parametrize("shape", SHAPES)
def test_maxima(host: Host, shape: tuple[int, int, int]) -> None:
    """The first value is -inf, which C++ has no literal for."""
    kernel, x = largest_kernel("f32"), elements(shape, "f32", 5)
    want = reference.reduce(kernel, lines_of(x), KEY).reshape(shape[0], shape[2])
    assert_same(run_lines(host, kernel, x, want.shape), want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accumulate", SCAN_KERNELS)
def test_scans(host: Host, accumulate: str, shape: tuple[int, int, int]) -> None:
    kernel, x = scan_of(accumulate), elements(shape, "f32", 5)
    lines = reference.scan(kernel, lines_of(x), KEY).reshape(shape[0], shape[2], shape[1])
    assert_same(run_lines(host, kernel, x, shape), np.ascontiguousarray(lines.transpose(0, 2, 1), np.float32))


@pytest.mark.parametrize("row", EXACT_KERNELS, ids=" ".join)
def test_exact_sums(host: Host, row: tuple[str, str, Storage]) -> None:
    """Ordinary and special numbers, both ends of the range, and sums that cancel to their last bit."""
    kernel, storage = exact_of(*row), row[2]
    for shape in (*SHAPES, (2, 300, 3)):
        x = elements(shape, storage, 5)
        assert_same(run_exact(host, kernel, x), reference.exact(kernel, lines_of(x), KEY))
    finite = elements((1, 64, 5), "f64", 6)
    finite = np.where(np.isfinite(finite), finite, 1.0)
    far = {"f64": 900, "f16": 8}.get(storage, 100)
    spread = finite * np.exp2(np.linspace(-far, far, 64))[:, None]
    x = as_stored(np.concatenate([finite, spread, -finite, -spread, finite[:, :1] * 2.0**-20], 1), storage)
    assert_same(run_exact(host, kernel, x), reference.exact(kernel, lines_of(x), KEY))


def run_exact(host: Host, kernel: Exact, x: Array) -> Array:
    return run_lines(host, kernel, x, (x.shape[0] * x.shape[2],))


@pytest.mark.parametrize("row", SCATTER_KERNELS, ids=" ".join)
def test_scatters(host: Host, row: tuple[str, Storage]) -> None:
    kernel, storage = scatter_of(*row), row[1]
    own, source = elements((6, 3), storage, 1), elements((40, 3), storage, 2)
    rows = np.random.default_rng(3).integers(0, 5, 40)
    order, starts = np.argsort(rows, kind="stable"), np.searchsorted(np.sort(rows), np.arange(7))
    out = np.empty((6, 3), memory(storage))
    sizes = [ctypes.c_uint64(v) for v in (own.size, 3)]
    host.launch(kernel, (2, 3), *sizes, out, own, source, starts.astype(np.int64), order.astype(np.int64), Key(*KEY))
    places = (rows[:, None] * 3 + np.arange(3)).reshape(-1)
    want = reference.scatter(kernel, widened(own).reshape(-1), places, widened(source).reshape(-1), KEY)
    assert_same(out.reshape(-1), want)


@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("name", CONTRACT_KERNELS)
def test_contractions(host: Host, name: str, groups: int) -> None:
    kernel, (batch, rows, length, columns) = contraction(name), (4, 3, 11, 5)
    # a is stored transposed, b with its batch innermost: any steps will do.
    a = elements((groups or batch, length, rows), kernel.loads[0], 1).transpose(0, 2, 1)
    b = elements((length, columns, batch), kernel.loads[1], 2).transpose(2, 0, 1)
    out = np.empty((batch, rows, columns), memory(kernel.result))
    steps = [s // x.itemsize for x in (a, b) for s in x.strides]
    shape = Shape(batch, rows, length, columns, groups, *steps)
    host.launch(kernel, (3, 4), shape, out, a, b, Key(*KEY))
    repeated = a[np.arange(batch) % (groups or batch)]
    assert_same(out, reference.contract(kernel, widened(repeated), widened(b), KEY))


# ---- for the device ----


def test_every_text_compiles_for_sm_90(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc: install the CUDA toolkit to compile the texts for sm_90")
    text = kernel_source(kernels())
    text += "".join(device_function(f, f"f{i}") for i, f in enumerate(functions().values()))
    (tmp_path / "device.cu").write_text(text)
    command = [nvcc, "-arch=sm_90", "-cubin", *DEVICE_FLAGS, "-o", "device.cubin", "device.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    assert (tmp_path / "device.cubin").stat().st_size > 0
