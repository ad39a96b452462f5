"""How kernels for CUDA devices read lines of numbers and store results, run as host code: the bits of the reference.

Lines are read where they are, pass through shared memory or not, and go in pieces of 16 bytes where the layout allows
that. Each case names the way that its launch must choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cuda_host import HostLauncher, assert_same, prepare
from kernel_operands import stored
from torch import Tensor

from benchmarks.cuda import texts_of
from fxround.graph.dialect import Cumsum
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.kinds import Contract, Exact, Reduce
from fxround.kernels.reductions import cumsum_kernel, exact_kernel, scatter_kernel, sum_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats.storage import Storage
from fxround.numerics.modes import Rounding
from fxround.numerics.orders import Order
from fxround.runtime import buffers, reductions, reference
from fxround.runtime.contractions import Placing, Product, Right
from fxround.runtime.contributions import Contributions
from fxround.runtime.cuda import contraction, reduction
from fxround.runtime.cuda.cpp.contract import Tile
from fxround.runtime.cuda.launcher import launching
from fxround.runtime.draw import Draw

DRAW = Draw(seed=5, sample=1, node=3)
KEY = DRAW.key()


@pytest.fixture(scope="module")
def host(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> HostLauncher:
    found = HostLauncher(tmp_path_factory.mktemp("layouts"), compiler, seed=7)
    found.most_blocks = 3
    return found


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return (x * torch.exp2(torch.arange(x.numel()).reshape(shape) % 9 - 4)).to(dtype)


def one_infinite(*shape: int) -> Tensor:
    x = numbers(*shape)
    x[-2, 1, 4, 5] = -torch.inf
    return x


# ---- sums ----


@cache
def kernel(order: str, storage: Storage = "f32") -> Reduce | Exact:
    rounding = Rounding.parse({"f32": "binary32", "bf16": "bfloat16"}.get(storage, storage))
    if order == "exact":
        return exact_kernel(rounding, rounding, storage, storage)
    accumulate = Accumulation.parse("binary32/stochastic" if storage == "f32" else "binary32")
    return sum_kernel(Order.parse(order), accumulate, rounding, storage, storage)


@dataclass(frozen=True)
class Sum:
    """Numbers that are summed over dims, and the end of the text's name; enough: the blocks that fill a GPU."""

    order: str
    x: Callable[[], Tensor]
    dims: tuple[int, ...]
    how: str
    enough: int = 1
    storage: Storage = "f32"


BF16 = torch.bfloat16
LANES = "lanes:16"
SUMS = {
    # Few long lines: a block for each, which reads 16 bytes a thread.
    "a number": Sum(LANES, lambda: numbers(5000), (0,), "_l1p4"),
    "a number of 16 bits": Sum(LANES, lambda: numbers(4104, dtype=BF16), (0,), "_l1p8", storage="bf16"),
    "an odd number of elements": Sum("lanes:64", lambda: numbers(3, 2049), (1,), "_l1p1"),
    "rows that are not aligned": Sum(LANES, lambda: numbers(3, 604)[:, 1:601], (1,), "_l1p1"),
    # The statistics of a batch norm are read where they are, in runs of an image's pixels.
    "a batch norm": Sum(LANES, lambda: numbers(11, 3, 8, 8), (0, 2, 3), "_l1p4"),
    "a batch norm of 7 x 7": Sum(LANES, lambda: numbers(11, 3, 7, 7), (0, 2, 3), "_l1p1"),
    "a small batch norm": Sum(LANES, lambda: numbers(5, 3, 3, 3), (0, 2, 3), "_t128", 128),
    "channels last": Sum(
        LANES, lambda: numbers(3, 40, 5, 7).to(memory_format=torch.channels_last), (0, 2, 3), "_t128", 128
    ),
    # Columns side by side: neighbouring threads read neighbouring columns.
    "a bias": Sum(LANES, lambda: numbers(70, 37), (0,), "_t128", 128),
    "many columns": Sum(LANES, lambda: numbers(70, 37), (0,), ""),
    "transposed rows": Sum(LANES, lambda: numbers(70, 37).t(), (1,), ""),
    "expanded": Sum(LANES, lambda: numbers(7, 1, 9).expand(7, 40, 9), (0, 1), ""),
    "four dimensions apart": Sum(LANES, lambda: numbers(3, 4, 5, 6, 7), (0, 2, 4), ""),
    "three columns": Sum("lanes:8", lambda: numbers(2, 600, 3), (1,), "_l1p1"),
    # One chain: lines pass through shared memory, as many at once as leave enough blocks.
    "128 rows": Sum("sequential", lambda: numbers(130, 72), (1,), "_l128p4"),
    "32 rows": Sum("sequential", lambda: numbers(39, 67), (1,), "_l32p1"),
    "8 rows": Sum("sequential", lambda: numbers(9, 300), (1,), "_l8p4"),
    "one row": Sum("sequential", lambda: numbers(2, 3, 2100), (2,), "_l1p4"),
    "16 bits": Sum("sequential", lambda: numbers(130, 72, dtype=BF16), (1,), "_l128p8", storage="bf16"),
    "8 bits": Sum("sequential", lambda: numbers(130, 72, dtype=torch.float8_e4m3fn), (1,), "_l128p8", storage="e4m3fn"),
    "one chain of columns": Sum("sequential", lambda: numbers(71, 9), (0,), ""),
    "exact, in runs": Sum("exact", lambda: numbers(5, 3, 7, 7), (0, 2, 3), ""),
    "exact, shared, in runs": Sum("exact", lambda: numbers(32, 2, 8, 9), (0, 2, 3), "_shared"),
    "exact, in parts": Sum("exact", lambda: one_infinite(9, 3, 33, 47), (0, 2, 3), "_parts _joined", 8),
}


def add(case: Sum) -> Tensor:
    with patch.object(reduction, "_ENOUGH", case.enough):
        return reduction.run_reduce(kernel(case.order, case.storage), case.x(), DRAW, case.dims)


def lines_of(x: Tensor, dims: Sequence[int]) -> np.ndarray[Any, Any]:
    kept = [d for d in range(x.dim()) if d not in dims]
    lines = x.permute(*kept, *dims).contiguous()
    return stored(lines.reshape(-1, int(np.prod([x.shape[d] for d in dims]))))


@pytest.fixture(scope="module")
def adding(host: HostLauncher) -> HostLauncher:
    """The launcher with the texts of all sums."""
    prepare(host, *(partial(add, case) for case in SUMS.values()))
    return host


@pytest.mark.part(9)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_every_layout(adding: HostLauncher, name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SUMS[name]
    monkeypatch.setattr(adding, "seed", seed)
    adding.launched.clear()
    with launching(adding):
        got = add(case)
    found = kernel(case.order, case.storage)
    compute: Any = reference.exact if isinstance(found, Exact) else reference.reduce
    assert_same(got, compute(found, lines_of(case.x(), case.dims), KEY))
    assert [text.split("_", 1)[1][16:] for text in adding.launched] == (case.how.split() or [""])


# What to take from a text whose lines pass through shared memory, and what the host says then.
PLANTED = {
    "no barrier before the steps": (
        "      __syncthreads();\n      const int end",
        "      const int end",
        "race|before",
    ),
    "no barrier after the steps": ("      __syncthreads();\n    }\n", "    }\n", "race"),
    "the next lines": ("tile[line_of * ", "tile[(line_of + 1) * ", "before|beyond"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_in_shared_lines_are_found(
    adding: HostLauncher, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = SUMS["8 rows"]
    old, new, found = PLANTED[name]
    (text,) = texts_of(partial(add, case))
    assert text.source().count(old) == 1
    other = f"{text.name}_{list(PLANTED).index(name)}"
    changed = replace(text, name=other, source=lambda: text.source().replace(old, new).replace(text.name, other))
    monkeypatch.setattr(reduction, "_text", lambda kernel, shape: changed)
    with pytest.raises(AssertionError, match=found), launching(adding):
        add(case)


# ---- scans ----

SCANS: dict[str, tuple[Callable[[], Tensor], int, str, int]] = {
    "rows": (lambda: numbers(130, 72), 1, "_l128p4", 1),
    "rows of odd length": (lambda: numbers(41, 67), 1, "_l32p1", 1),
    "a long row": (lambda: numbers(2, 2104), -1, "_l1p4", 128),
    "transposed": (lambda: numbers(70, 9).t(), 1, "_l8p1", 1),
    "columns": (lambda: numbers(3, 70, 9), 1, "", 1),
    "permuted": (lambda: numbers(3, 9, 70, 2).permute(2, 0, 3, 1), 0, "", 1),
    "dimensions apart": (lambda: numbers(4, 5, 66, 3).transpose(1, 3), 2, "", 1),
}
STEPS, ROUND = "binary32/stochastic", "bfloat16/stochastic/inf"


def running(name: str) -> Tensor:
    make, dim, _, enough = SCANS[name]
    rng = torch.tensor([DRAW.seed, DRAW.sample])
    with patch.object(reduction, "_ENOUGH", enough):
        return reductions.scan(Cumsum(make(), dim, STEPS, ROUND, rng, DRAW.node))


@pytest.fixture(scope="module")
def scanning(host: HostLauncher) -> HostLauncher:
    """The launcher with the texts of all scans."""
    prepare(host, *(partial(running, name) for name in SCANS))
    return host


@pytest.mark.part(3)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", SCANS)
def test_scans_of_every_layout(scanning: HostLauncher, name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make, dim, how, _ = SCANS[name]
    monkeypatch.setattr(scanning, "seed", seed)
    scanning.launched.clear()
    with launching(scanning):
        got = running(name)
    x = make()
    scan = cumsum_kernel(Accumulation.parse(STEPS), Rounding.parse(ROUND), "f32", "f32")
    want = reference.scan(scan, lines_of(x, [dim % x.dim()]), KEY)
    assert got.is_contiguous()
    assert_same(got.movedim(dim, -1).contiguous(), want.astype(np.float32))
    assert scanning.launched == [f"scan_{scan.digest[:16]}{how}"]


# ---- scatters ----


@pytest.mark.parametrize("width, offset, piece", [(24, 0, 4), (22, 0, 1), (24, 1, 1)])
def test_scatters_of_rows(
    host: HostLauncher, width: int, offset: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread adds four adjacent elements of rows where all rows begin at multiples of 16 bytes."""
    monkeypatch.setattr(reduction, "_ENOUGH", 0)
    found = scatter_kernel(Accumulation.parse("binary32/stochastic"), "f32")
    own, rows = numbers(7, width), torch.arange(50) ** 2 % 5
    source = numbers(50 * width + offset)[offset:].reshape(50, width)
    host.launched.clear()
    with launching(host):
        got = reduction.run_scatter(found, own, Contributions(rows, source), DRAW)
    places = (rows[:, None] * width + torch.arange(width)).reshape(-1).numpy()
    assert_same(got, reference.scatter(found, own.numpy().reshape(-1), places, source.numpy().reshape(-1), KEY))
    assert host.launched == [f"scatter_{found.digest[:16]}{'_p4' if piece == 4 else ''}"]


# ---- results of products ----


@cache
def product_kernel(accumulate: str, result: Storage = "f32") -> Contract:
    rounding = {"f32": "binary32", "f64": "binary64", "bf16": "bfloat16"}.get(result, result)
    loads: tuple[Storage, Storage] = ("f64", "f64") if result == "f64" else ("f32", "f32")
    return contract_kernel(Accumulation.parse(accumulate), Rounding.parse(rounding), loads, result)


@dataclass(frozen=True)
class Stored:
    """A product of (2, 37, 20) and (2, 20, columns), the side of its tiles, and the results that are stored at once."""

    found: Callable[[], Contract]
    side: int
    columns: int
    at_once: int
    single: bool = False
    offset: int = 0


PRODUCTS = {
    "16 bytes": Stored(lambda: product_kernel("binary32"), 8, 132, 4),
    "four columns, no more": Stored(lambda: product_kernel("binary32"), 4, 4, 4),
    "8 bytes": Stored(lambda: product_kernel("binary32"), 2, 34, 2),
    "columns that are not aligned": Stored(lambda: product_kernel("binary32"), 4, 34, 1),
    "an address that is not aligned": Stored(lambda: product_kernel("binary32"), 4, 32, 1, offset=1),
    "16 bits": Stored(lambda: product_kernel("binary32", "bf16"), 4, 72, 4),
    "8 bits": Stored(lambda: product_kernel("binary32", "e4m3fn"), 4, 72, 4),
    "binary64": Stored(lambda: product_kernel("binary64", "f64"), 4, 66, 2),
    "chunks": Stored(lambda: product_kernel("bfloat16 chunk=8 combine=binary32"), 4, 68, 2),
    "steps in binary64": Stored(lambda: product_kernel("binary32/stochastic"), 4, 70, 2),
    "steps in binary32": Stored(lambda: product_kernel("binary32/stochastic"), 4, 68, 4, single=True),
}


def multiply(case: Stored) -> Tensor:
    found = case.found()
    dtype = torch.float64 if found.loads[0] == "f64" else torch.float32
    a, b = numbers(2, 37, 20, dtype=dtype), numbers(2, 20, case.columns, dtype=dtype)
    # Sums that begin subnormal are computed again.
    a[:, 3] *= 1e-40
    places = Right.matrices(b.shape, b.stride())
    product = Product(found, a, b, places, 0, DRAW, (2, 37, case.columns))
    with (
        patch.object(contraction, "_tile", lambda product, *sizes: Tile(product.kernel, case.side)),
        patch.object(contraction.buffers, "empty", partial(_empty, case.offset)),
    ):
        return contraction.run_product(product)


def _empty(offset: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of NaNs that begins this many elements after a multiple of 16 bytes."""
    count = int(np.prod(shape))
    return torch.full((count + offset,), torch.nan, dtype=dtype, device=device)[offset:].view(*shape)


def test_products_store_pieces(host: HostLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    for single in (False, True):
        monkeypatch.setattr(host, "slow_binary64", single)
        prepare(host, *(partial(multiply, case) for case in PRODUCTS.values() if case.single is single))
    for name, case in PRODUCTS.items():
        monkeypatch.setattr(host, "slow_binary64", case.single)
        host.launched.clear()
        with launching(host):
            got = multiply(case)
        found = case.found()
        dtype = torch.float64 if found.loads[0] == "f64" else torch.float32
        a, b = numbers(2, 37, 20, dtype=dtype), numbers(2, 20, case.columns, dtype=dtype)
        a[:, 3] *= 1e-40
        assert_same(got, reference.contract(found, a.numpy(), b.numpy(), KEY))
        (launched,) = host.launched
        assert ("_single" in launched) == case.single, name
        assert launched.endswith(f"_s{case.at_once}") if case.at_once > 1 else "_s" not in launched, name


def test_which_results_are_adjacent() -> None:
    """Runs, rows and batches must all begin at multiples of a piece; a result of 8 bytes has two in 16."""
    made, wide, table = torch.empty(64), torch.empty(64, dtype=torch.float64), torch.arange(64)
    assert contraction._stored(4, Placing(640, 64, table, 16), [made]) == 4
    assert contraction._stored(4, Placing(640, 64, table, 16), [made, wide]) == 1
    assert contraction._stored(2, Placing(640, 64, table, 16), [made, wide]) == 2
    for placing in (Placing(642, 64, table, 16), Placing(640, 66, table, 16), Placing(640, 64, table, 49)):
        assert contraction._stored(4, placing, [made]) == 1
    assert contraction._stored(4, Placing(640, 64, table, 16), [made[1:]]) == 1
    assert buffers.empty((4,), torch.float32, made.device).data_ptr() % 16 == 0


def test_convolutions_store_pixels_at_once(host: HostLauncher) -> None:
    """A column is a pixel: pieces where an image has a multiple of four, also where images are taken together."""
    convolution = torch.ops.fxround.convolution.default
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for size, pieces in ((8, True), (7, False)):
        x, weight = numbers(3, 4, size, size), numbers(6, 4, 3, 3)
        rng = torch.tensor([1, 0])
        operands = (x, weight, *geometry, "binary32/nearest_even/inf", "binary32/nearest_even/inf", rng, 3)
        want = convolution(*operands)
        with patch.object(contraction, "_tile", lambda product, *sizes: Tile(product.kernel, 4)), launching(host):
            host.launched.clear()
            got = convolution(*operands)
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))
        assert host.launched[0].endswith("_s4") is pieces
