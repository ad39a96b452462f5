"""The stages of shared memory that the texts of contractions copy their operands to, on the host.

The host finds a use of what an asynchronous copy has not brought yet, and races between threads (``cuda_host.hpp``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cuda_host import HostLauncher, prepare
from torch import Tensor

from benchmarks.cuda import texts_of
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.kinds import Contract
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats.storage import Storage
from fxround.numerics.modes import Rounding
from fxround.runtime import reference
from fxround.runtime.contractions import Product, Right
from fxround.runtime.cuda import contraction
from fxround.runtime.cuda.contraction import run_product
from fxround.runtime.cuda.cpp.common import preamble
from fxround.runtime.cuda.cpp.contract import SHAPE, Tile
from fxround.runtime.cuda.cpp.copies import COPIES
from fxround.runtime.cuda.launcher import Text, launch, launching
from fxround.runtime.draw import Draw

DRAW = Draw(seed=1, sample=0, node=2)
# In binary32 sides of 8 and 2 have 8 and 32 steps in a stage.
BATCH, ROWS, LENGTH, COLUMNS = 2, 129, 37, 21


@cache
def kernel(storage: Storage = "f32") -> Contract:
    rounding = "binary64" if storage == "f64" else "binary32"
    return contract_kernel(Accumulation.parse(rounding), Rounding.parse(rounding), (storage, storage), storage)


def stored(shape: tuple[int, ...], order: Sequence[int], pad: int = 0, dtype: type = np.float32) -> Tensor:
    """Numbers of this shape whose dimensions lie in memory in this order, with ``pad`` more elements in each line."""
    sizes = [shape[d] for d in order]
    sizes[-1] += pad
    x = torch.from_numpy(np.random.default_rng(sum(shape)).standard_normal(sizes).astype(dtype))
    x = x[..., : sizes[-1] - pad] if pad else x
    return x.permute(*(list(order).index(d) for d in range(len(shape))))


def products() -> dict[str, tuple[Product, str]]:
    """Products whose operands are copied in each way, and how: k or n, the elements of a copy, t for tables."""
    a, b, size = (BATCH, ROWS, LENGTH), (BATCH, LENGTH, COLUMNS), (BATCH, ROWS, COLUMNS)
    found = {}
    for name, left, right, how in (
        ("k adjacent", stored(a, (0, 1, 2)), stored(b, (0, 2, 1)), "k1_k1"),
        # 129 + 3 and 21 + 3 elements: every line begins at a multiple of 16 bytes.
        ("lines aligned", stored(a, (0, 2, 1), 3), stored(b, (0, 1, 2), 3), "n4_n4"),
        ("lines not aligned", stored(a, (0, 2, 1)), stored(b, (0, 1, 2)), "n1_n1"),
        ("an address that is not aligned", stored(a, (0, 1, 2)), stored(b, (0, 1, 2), 3)[:, :, 1:], "k1_n1"),
    ):
        places = Right.matrices(right.shape, right.stride())
        found[name] = Product(kernel(), left, right, places, 0, DRAW, (*size[:2], right.shape[2])), how
    left, right = (stored(*x, dtype=np.float64) for x in ((a, (0, 2, 1), 1), (b, (0, 1, 2), 1)))
    places = Right.matrices(right.shape, right.stride())
    found["binary64"] = Product(kernel("f64"), left, right, places, 0, DRAW, size), "n2_n2"
    left, right = stored(a, (0, 1, 2)), stored(b, (0, 1, 2))
    tables = Right.matrices(right.shape, right.stride())
    for along in (False, True):
        places = replace(tables, steps=None, along=along)
        found[f"tables, {along=}"] = Product(kernel(), left, right, places, 0, DRAW, size), f"k1_{'nk'[along]}1t"
    return found


@pytest.fixture(scope="module")
def host(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> HostLauncher:
    found = HostLauncher(tmp_path_factory.mktemp("cuda"), compiler, seed=3)
    # A block computes several tiles of a result one after the other.
    found.most_blocks = 3
    return found


def run(product: Product, side: int) -> Tensor:
    with patch.object(contraction, "_tile", lambda product, *sizes: Tile(product.kernel, side)):
        return run_product(product)


def expected(product: Product) -> Tensor:
    a, b = (x.contiguous().numpy() for x in (product.a, product.b))
    return torch.from_numpy(reference.contract(product.kernel, a, b, product.draw.key()).reshape(product.size))


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.part("False")
@pytest.mark.parametrize("async_copies", [True, False])
def test_every_way_of_copying_has_the_bits_of_the_reference(
    host: HostLauncher, async_copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "async_copies", async_copies)
    cases = [
        (name, product, how, side)
        for name, (product, how) in products().items()
        # Through registers, lines that are aligned are copied as the others.
        if async_copies or name != "lines aligned"
        for side in ((4,) if product.a.dtype == torch.float64 else (8, 2) if async_copies else (8,))
    ]
    prepare(host, *(partial(run, product, side) for _, product, _, side in cases))
    for name, product, how, side in cases:
        host.launched.clear()
        with launching(host):
            got = run(product, side)
        assert same(got, expected(product)), (name, side)
        ways = how if async_copies else re.sub(r"\d", "0", how)
        assert [re.sub(r"_s\d", "", each).split("_", 3)[3] for each in host.launched] == [ways], name


def test_a_product_of_no_steps_is_zero(host: HostLauncher) -> None:
    a, b = torch.ones(1, 5, 0), torch.ones(1, 0, 3)
    with launching(host):
        got = run(Product(kernel(), a, b, Right.matrices(b.shape, b.stride()), 0, DRAW, (1, 5, 3)), 1)
    assert same(got, torch.zeros(1, 5, 3))


# ---- planted errors ----

# What to change in a text of asynchronous copies or without them, and what the host says then.
PLANTED = {
    "no wait": (True, "wait_for_copies();", "", "before its copy arrived"),
    "no barrier": (True, "__syncthreads();", "", "race|before"),
    "no barrier, through registers": (False, "__syncthreads();", "", "race|before"),
    "reads the other stage": (True, "from = stage *", "from = (stage ^ 1) *", "before"),
    "copies to the stage that is read": (True, "{steps}, stage ^ 1);", "{steps}, stage);", "race|before"),
    "stores to the stage that is read": (False, "if (more) put(stage ^ 1)", "if (more) put(stage)", "race"),
    "never changes the stage": (True, "stage ^= 1;", "", "race|before"),
}


def changed(text: Text, name: str) -> Text:
    """The text with the planted error of this name."""
    old, new = (part.replace("{steps}", "64") for part in PLANTED[name][1:3])
    assert old in text.source()
    other = f"{text.name}_{list(PLANTED).index(name)}"
    return replace(text, name=other, source=lambda: text.source().replace(old, new).replace(text.name, other))


@cache
def small() -> Product:
    """Four tiles of side 1, and three of k."""
    a, b = stored((1, 20, 150), (0, 1, 2)), stored((1, 150, 20), (0, 2, 1))
    return Product(kernel(), a, b, Right.matrices(b.shape, b.stride()), 0, DRAW, (1, 20, 20))


@pytest.fixture(scope="module")
def prepared(host: HostLauncher) -> HostLauncher:
    """The launcher with all texts of planted errors."""
    (asynchronous,), (registers,) = (texts_of(partial(run, small(), 1), async_copies=way) for way in (True, False))
    texts = [changed(asynchronous if row[0] else registers, name) for name, row in PLANTED.items()]
    bodies = [*(body for body, _ in PLANTED_COPIES), SHORT_COPIES]
    host.compile([*texts, *(copies_text(number, body) for number, body in enumerate(bodies))])
    return host


@pytest.mark.part(3)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_in_a_contraction_are_found(
    prepared: HostLauncher, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async_copies, _, _, found = PLANTED[name]
    monkeypatch.setattr(prepared, "async_copies", async_copies)
    text_of = contraction._text
    monkeypatch.setattr(contraction, "_text", lambda tile: changed(text_of(tile), name))
    with pytest.raises(AssertionError, match=found), launching(prepared):
        run(small(), 1)


def copies_text(number: int, body: str) -> Text:
    """A text of 64 threads with an array of 256 numbers, and x in memory."""
    name = f"copies_{number}"
    head = f'extern "C" __global__ void {name}(float* x) {{\n  SHARED(float, tile, 256);\n  const int t = threadIdx.x;'
    return Text(name, lambda: f"{preamble(SHAPE)}{COPIES}{head}\n  {body}\n}}\n", 64, True)


def run_copies(host: HostLauncher, number: int, body: str) -> Tensor:
    """Run a text of one block and return its 256 numbers in memory, which were 0 to 255."""
    x = torch.arange(256.0)
    with launching(host):
        launch(copies_text(number, body), 1, [x], x.device)
    return x


COPY, MEET = "copy_async<4>(tile, 4 * t, x + 4 * t, 4); ", "wait_for_copies(); __syncthreads(); "
PLANTED_COPIES = (
    (COPY + "float y = tile[4 * t]; (void)y; wait_for_copies();", "read before its copy arrived"),
    (COPY + "tile[4 * t + 3] = 0; wait_for_copies();", "written before its copy arrived"),
    (COPY + "wait_for_copies(); float y = tile[(4 * t + 4) % 256]; (void)y;", "race of a read with a write|before"),
    (COPY + "__syncthreads(); wait_for_copies();" + "float y = tile[4 * t ^ 4]; (void)y;", "race|before"),
    (COPY + MEET + "float y = tile[4 * t ^ 4]; (void)y; " + COPY + "wait_for_copies();", "race"),
    (COPY, "a copy that is not waited for"),
    (COPY + "x[4 * t] = 7; wait_for_copies();", "its source changed"),
    ("copy_async<4>(tile, 4 * t, x + 1, 4); wait_for_copies();", "not aligned"),
    ("copy_async<4>(tile, t + 1, x, 4); wait_for_copies();", "not aligned"),
    ("copy_async<2>(tile, 4 * t, x, 2); copy_async<1>(tile, 256, x, 1); wait_for_copies();", "beyond the end"),
    (COPY + MEET + "float y[4]; take<4>(tile, 4 * t + 1, y);", "a piece that is not aligned"),
)


# Piece t has t % 5 elements; thread t stores the piece of its neighbour.
SHORT_COPIES = (
    "copy_async<4>(tile, 4 * t, x + 4 * t, t % 5); wait_for_copies(); __syncthreads(); "
    "float y[4]; take<4>(tile, 4 * t ^ 4, y); for (int i = 0; i < 4; ++i) x[4 * t + i] = y[i];"
)


@pytest.mark.parametrize("number", range(len(PLANTED_COPIES)))
def test_planted_errors_in_copies_are_found(prepared: HostLauncher, number: int) -> None:
    body, found = PLANTED_COPIES[number]
    with pytest.raises(AssertionError, match=found):
        run_copies(prepared, number, body)


def test_copies_bring_elements_and_zeros(prepared: HostLauncher) -> None:
    places = torch.arange(256).reshape(32, 2, 4).flip(1).reshape(64, 4)
    want = torch.where(places % 4 < places // 4 % 5, places, 0).float().reshape(-1)
    assert torch.equal(run_copies(prepared, len(PLANTED_COPIES), SHORT_COPIES), want)
