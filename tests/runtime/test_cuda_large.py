"""CUDA texts over more than 2^32 elements, run as host code: the last blocks of a grid, in memory of few pages."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cuda_host import HostLauncher, assert_same
from neighbours import Array
from torch import Tensor

from fxround.kernels.contractions import contract_kernel
from fxround.kernels.kinds import Contract, Map
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.arithmetic.randomness import random_function
from fxround.numerics.modes import Rounding
from fxround.runtime import buffers, reference
from fxround.runtime.contractions import Product, Right
from fxround.runtime.cuda import pointwise
from fxround.runtime.cuda.contraction import Following, run_followed
from fxround.runtime.cuda.launcher import launching
from fxround.runtime.draw import Draw

DRAW = Draw(seed=5, sample=1, node=2)
KEY = DRAW.words((DRAW.node,))
# 2^32 and 19 rows of 1,000 elements more, so that blocks and tiles end before the rows do.
ROWS, COLUMNS = (1 << 32) // 1000 + 20, 1000


def large(shape: Sequence[int], dtype: torch.dtype = torch.float32, *_: Any) -> Tensor:
    """Zeros, in memory that is there once it is touched."""
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which Python names since 3.13
    size = int(np.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, size, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


@pytest.fixture(scope="module")
def host(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> HostLauncher:
    found = HostLauncher(tmp_path_factory.mktemp("large"), compiler)
    found.last = 2
    return found


def rounded(text: str, operands: int) -> Map:
    return map_kernel(Program.parse(text), ("f32",) * operands, "f32")


def expected(kernel: Map, operands: Sequence[Array], index: Array) -> Array:
    """Elements of a map, from those of its operands and their numbers."""
    words = [random_function(w.draw, w.width).evaluate(index.astype(np.uint64), *KEY)[0] for w in kernel.draws]
    (found,) = kernel.body.evaluate(*operands, *words)
    return np.asarray(found)


@pytest.mark.parametrize("aligned", [True, False])
def test_a_map_of_many_elements(host: HostLauncher, aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last blocks; each thread takes elements as far apart as the grid, the last of them beyond 2^32."""
    kernel = rounded("t0 = fma(x0, x1, x2) @ binary32/stochastic", 3)
    # Elements read at their own index, in lines, and one for a line.
    x, row, column = large((ROWS, COLUMNS)), torch.randn(COLUMNS), large((ROWS, 1))
    x[-40:], column[-40:] = torch.randn(40, COLUMNS), torch.randn(40, 1)
    if not aligned:
        row = torch.cat([row, row[:1]])[1:]
    out = large(x.shape)
    # A grid may have 4095 threads more than its last round has elements.
    monkeypatch.setattr(host, "last", 20)
    host.launched.clear()
    with launching(host):
        pointwise.run_kernel(kernel, [x, row, column], KEY, [out])
    (name,) = host.launched
    assert name.rsplit("_", 1)[1] == ("clr2wp4" if aligned else "cdd2w")
    index = np.flatnonzero(out[-40:].numpy()) + (ROWS - 40) * COLUMNS
    assert index.size > 1000 and index[-1] == ROWS * COLUMNS - 1 > 1 << 32
    i, j = index // COLUMNS, index % COLUMNS
    operands = [x.view(-1).numpy()[index], row.numpy()[j], column.numpy()[i, 0]]
    assert_same(out.view(-1)[torch.from_numpy(index)], expected(kernel, operands, index))


def numbered(kernel: Contract, a: Array, b: Array, first: int, monkeypatch: pytest.MonkeyPatch) -> Array:
    """A product of last rows, whose elements have numbers from ``first`` on."""
    streams = reference.Streams
    monkeypatch.setattr(reference, "Streams", lambda elements, *rest: streams(elements + first, *rest))
    return reference.contract(kernel, a[None], b[None], KEY)[0]


@pytest.mark.long
def test_a_product_of_many_elements_and_a_map(host: HostLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tiles, with the numbers of the streams and of the map's elements."""
    steps = contract_kernel(
        Accumulation.parse("binary32/stochastic"), Rounding.parse("binary32"), ("f32", "f32"), "f32"
    )
    kernel = rounded("t0 = add(x0, x1) @ bfloat16/stochastic; t1 = mul(t0, x2) @ binary32/stochastic", 3)
    a, b, bias, column = large((ROWS, 3)), torch.randn(3, COLUMNS), torch.randn(COLUMNS), large((ROWS, 1))
    a[-64:], column[-64:] = torch.randn(64, 3), torch.randn(64, 1)
    right = Right.matrices((1, *b.shape), (0, *b.stride()))
    product = Product(steps, a[None], b[None], right, 1, DRAW, (ROWS, COLUMNS))
    layouts = [((ROWS, COLUMNS), (COLUMNS, 1)), *((tuple(x.shape), x.stride()) for x in (bias, column))]
    following = Following.of(kernel, layouts, (True, False, False), True, (DRAW.node,))
    assert following is not None and following.after.variant.wide
    monkeypatch.setattr(buffers, "empty", large)
    with launching(host):
        kept, (made,) = run_followed(product, following, [bias, column])
    assert kept is not None
    # Two tiles of 64 rows and columns, which end where the result ends: the last columns of the last rows.
    rows, columns = ROWS % 64 or 64, COLUMNS % 64 + 64
    first = (ROWS - rows) * COLUMNS
    want = numbered(steps, a[-rows:].numpy(), b.numpy(), first, monkeypatch)
    assert_same(kept[-rows:, -columns:].contiguous(), np.ascontiguousarray(want[:, -columns:]))
    index = first + np.arange(rows * COLUMNS).reshape(rows, COLUMNS)
    assert index[-1, -1] > 1 << 32
    after = expected(kernel, [want, bias.numpy()[None], column.numpy()[-rows:]], index)
    assert_same(made[-rows:, -columns:].contiguous(), np.ascontiguousarray(after[:, -columns:]))
    assert not made[: 1 << 20].any()
