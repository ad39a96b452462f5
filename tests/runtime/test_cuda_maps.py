"""Maps on CUDA devices in pieces of 16 bytes, where operands allow that: the bits of the reference, on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from cuda_host import HostLauncher, assert_same, prepare
from kernel_operands import stored
from neighbours import Array
from torch import Tensor

from benchmarks.cuda import texts_of
from fxround.graph.dtypes import LOADS
from fxround.kernels.kinds import Map
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.numerics.formats.storage import Storage
from fxround.runtime import reference
from fxround.runtime.cuda import pointwise
from fxround.runtime.cuda.launcher import launching

KEY = (5, 0, 3, 17)
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def filled(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


# Two operands, and how the text reads them: contiguous, scalar, strided (d), lines, repeated; dimensions; piece.
CASES: dict[str, tuple[Callable[[], list[Tensor]], str]] = {
    "contiguous, three left over": (lambda: [filled(9, 5, 3), filled(9, 5, 3)], "cc1p4"),
    "fewer than a piece": (lambda: [filled(3), filled(3)], "cc1p4"),
    "a number": (lambda: [filled(70), torch.tensor(3.0)], "cs1p4"),
    "a row for all": (lambda: [filled(6, 8), filled(8)], "cl2p4"),
    "a number for each row": (lambda: [filled(6, 8), filled(6, 1)], "cr2p4"),
    "rows apart": (lambda: [filled(5, 16)[:, :12], filled(5, 12)], "lc2p4"),
    "rows apart by another number": (lambda: [filled(5, 14)[:, :12], filled(5, 12)], "dc2"),
    "rows of another length": (lambda: [filled(6, 6), filled(6)], "cd2"),
    "columns": (lambda: [filled(8, 6).T, filled(6, 8)], "dc2"),
    "another address": (lambda: [filled(6, 8), filled(9)[1:]], "cd2"),
    "16 bits": (lambda: [filled(5, 16, dtype=BF16), filled(16, dtype=BF16)], "cl2p8"),
    "binary64": (lambda: [filled(7, dtype=F64), filled(7, dtype=F64)], "cc1p2"),
    "a mask": (lambda: [filled(11), filled(11) > 0], "cc1p4"),
    "two widths": (lambda: [filled(11), filled(11, dtype=BF16)], "cc1p4"),
}


@cache
def kernel(loads: tuple[Storage, ...]) -> Map:
    """Two draws of different widths, so that neighbours share a word of one and 64 of the other."""
    text = "t0 = mul(x0, x1) @ bfloat16/stochastic; t1 = add(t0, x0) @ bfloat16/up_down"
    return map_kernel(Program.parse(text), loads, "f64" if "f64" in loads else loads[0])


@pytest.fixture(scope="module")
def host(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> HostLauncher:
    return HostLauncher(tmp_path_factory.mktemp("cuda"), compiler, seed=5)


@pytest.fixture(scope="module")
def prepared(host: HostLauncher) -> HostLauncher:
    """The launcher with the texts of all cases."""
    prepare(host, *(partial(run, case()) for case, _ in CASES.values()))
    return host


def run(operands: list[Tensor], out: Tensor | None = None) -> Tensor:
    (got,) = pointwise.run_kernel(kernel(tuple(LOADS[x.dtype] for x in operands)), operands, KEY, [out])
    return got


def expected(operands: list[Tensor]) -> Array:
    own = kernel(tuple(LOADS[x.dtype] for x in operands))
    return reference.map_(own, [stored(x.contiguous()).reshape(x.shape) for x in operands], KEY)


@pytest.mark.part(5)
@pytest.mark.parametrize("name", CASES)
def test_pieces_have_the_bits_of_the_reference(prepared: HostLauncher, name: str) -> None:
    case, how = CASES[name]
    operands = case()
    prepared.launched.clear()
    with launching(prepared):
        got = run(operands)
    assert_same(got, expected(operands))
    assert [text.rsplit("_", 1)[1] for text in prepared.launched] == [how]


def test_a_result_may_begin_anywhere(prepared: HostLauncher) -> None:
    """A tensor to write into that begins at no multiple of 16 bytes, between elements that stay as they are."""
    operands, whole = CASES["contiguous, three left over"][0](), torch.zeros(137)
    prepared.launched.clear()
    with launching(prepared):
        got = run(operands, whole[1:136].view(9, 5, 3))
    assert_same(got, expected(operands))
    assert whole[0] == whole[136] == 0 and whole[1:136].all()
    assert prepared.launched[0].endswith("_cc1")


def test_a_result_may_be_an_operand(prepared: HostLauncher) -> None:
    """A compiler may read again what a ``__restrict__`` pointer says that nothing writes."""
    for name in ("contiguous, three left over", "columns"):
        operands = CASES[name][0]()
        want = expected(operands)
        if not operands[0].is_contiguous():
            operands = [operands[0].contiguous(), operands[1].mT.contiguous().mT]
        texts = texts_of(lambda xs=operands: run(xs, xs[0]), lambda xs=operands: run(xs))
        assert ["* __restrict__ out" in text.source() for text in texts] == [False, True]
        assert ["* __restrict__ x0" in text.source() for text in texts] == [False, True]
        with launching(prepared):
            got = run(operands, operands[0])
        assert got is operands[0]
        assert_same(got, want)


def test_a_piece_that_is_not_aligned_is_found(prepared: HostLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that does not look at addresses would stop a GPU; the host names it."""
    monkeypatch.setattr(pointwise, "_aligned", lambda tensors: True)
    with pytest.raises(AssertionError, match="a piece that is not aligned"), launching(prepared):
        run([filled(6, 8), filled(9)[1:]])


def test_maps_in_binary32(host: HostLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose binary64 is slow adds and multiplies in binary32: the same bits, of subnormal numbers too."""
    steps = "t0 = mul(x0, x1) @ binary32/stochastic; t1 = add(t0, x1) @ binary32/up_down"
    own = map_kernel(Program.parse(f"{steps}; t2 = sub(t1, x0) @ binary32/stochastic"), ("f32", "bf16"), "f32")
    ends = [0.0, -0.0, 1e-45, 1e-38, 3e38, torch.inf, -torch.inf, torch.nan]
    x = torch.tensor(ends + [s * 2.0**e for e in range(-130, 127, 16) for s in (1, -1.5)]).repeat(40)
    y = x.repeat_interleave(40)[: len(x)].bfloat16()
    monkeypatch.setattr(host, "slow_binary64", True)
    host.launched.clear()
    with launching(host):
        (got,) = pointwise.run_kernel(own, [x, y], KEY)
    assert_same(got, reference.map_(own, [stored(x), stored(y)], KEY))
    assert own.single is not None and own.single.digest[:16] in host.launched[0]
