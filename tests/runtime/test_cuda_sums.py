"""Sums, scans and scatters of GPUs whose binary64 is slow: steps in binary32, with the bits of the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_host import HostLauncher, assert_same, prepare
from torch import Tensor

from fxround.graph.dialect import Cumsum
from fxround.kernels.reductions import cumsum_kernel, scatter_kernel, sum_kernel
from fxround.numerics.modes import Rounding
from fxround.numerics.orders import Order
from fxround.runtime import reductions, reference
from fxround.runtime.contributions import Contributions
from fxround.runtime.cuda import reduction
from fxround.runtime.cuda.launcher import launching
from fxround.runtime.draw import Draw

KEY = (0x9ABC_DEF0, 0x1234_5678, 3, 17)
DRAW = Draw(seed=0x1234_5678_9ABC_DEF0, sample=3, node=17)


@pytest.fixture
def host(compiler: str, tmp_path: Path) -> HostLauncher:
    return HostLauncher(tmp_path, compiler, seed=11)


def leaving(*shape: int) -> Tensor:
    """Lines that leave the range of steps in binary32 and come back: subnormal, overflowing, infinite, NaN, zeros."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-3, 20, shape))
    x[1], x[2, 3:5], x[3, 5], x[4, 6] = x[1] * 1e-38, (3e38, -3e38), np.inf, np.nan
    x[5, 1::2] = -x[5, ::2][: x.shape[1] // 2]
    x[6], x[7, :9], x[7, 9] = -0.0, 1e-45, 1
    return torch.from_numpy(x).float()


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "accumulate, rounding", [("stochastic", "bfloat16/stochastic"), ("up_down", "binary32/up_down")]
)
def test_sums_in_binary32(host: HostLauncher, accumulate: str, rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose binary64 is slow adds in binary32: chains, lines in shared memory, scans and scatters."""
    monkeypatch.setattr(host, "slow_binary64", True)
    step, store = Rounding.parse(f"binary32/{accumulate}"), Rounding.parse(rounding)
    x, long = leaving(9, 73), leaving(9, 600)
    rows, source = torch.arange(40) % 4, leaving(40, 12)
    rng = torch.tensor([DRAW.seed, DRAW.sample])
    running, scattering = cumsum_kernel(step, store, "f32", "f32"), scatter_kernel(step, "f32")
    orders = [Order.parse(order) for order in ("sequential", "lanes:4", "lanes:64")]
    chains = [(sum_kernel(order, step, store, "f32", "f32"), y) for order in orders for y in (x, long)]

    def run() -> list[Tensor]:
        sums = [reduction.run_reduce(kernel, y, DRAW, [1]) for kernel, y in chains]
        scans = [
            reductions.scan(Cumsum(y, 1, str(step), str(store), rng, DRAW.node)) for y in (x, x.mT.contiguous().mT)
        ]
        return [*sums, *scans, reduction.run_scatter(scattering, source[:4], Contributions(rows, source), DRAW)]

    prepare(host, run)
    host.launched.clear()
    with launching(host):
        got = run()
    want = [reference.reduce(kernel, y.numpy(), KEY) for kernel, y in chains]
    want += [reference.scan(running, x.numpy(), KEY)] * 2
    places = (rows[:, None] * 12 + torch.arange(12)).reshape(-1).numpy()
    want.append(reference.scatter(scattering, source[:4].numpy().reshape(-1), places, source.numpy().reshape(-1), KEY))
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    general = {kernel.digest[:16] for kernel in (running, scattering, *(kernel for kernel, _ in chains))}
    assert len({*host.launched}) >= 6 and not {name.split("_")[1] for name in host.launched} & general
