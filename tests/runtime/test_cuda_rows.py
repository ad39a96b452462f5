"""Chains over rows as one CUDA kernel, run as host code: the bits of the CPU, for operands of any layout."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_host import HostLauncher, prepare
from torch import Tensor, nn

import fxround
from fxround import Policy, Rule
from fxround.runtime import buffers
from fxround.runtime.cuda.launcher import Text, launching


@pytest.fixture(scope="module")
def host(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> HostLauncher:
    return HostLauncher(tmp_path_factory.mktemp("rows"), compiler)


class Applied(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *xs: Tensor) -> Tensor:
        return self.function(*xs)


def number(seed: int, *shape: int) -> Tensor:
    """Ordinary numbers with an infinity, a NaN and zeros of both signs in a few rows."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    rows = x.view(-1, shape[-1])
    rows[1, 2], rows[2, 0], rows[3, 3:5] = torch.inf, torch.nan, torch.tensor([0.0, -0.0])
    return x


def masked(x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
    return torch.softmax((x * scale).masked_fill(mask, -100.0), -1)


def ordered(order: str, **kept: str) -> Policy:
    return Policy(order, (Rule(rounding="binary32/stochastic", order=order, **kept),))  # type: ignore[arg-type]


CHAINS: dict[str, tuple[nn.Module, Any, Callable[[], list[Tensor]]]] = {
    "layer_norm": (nn.LayerNorm(50), "stochastic", lambda: [number(0, 19, 50)]),
    "layer_norm in chunks": (nn.LayerNorm(33), ordered("lanes:8"), lambda: [number(0, 3, 5, 33)]),
    "rms_norm": (nn.RMSNorm(48), "up_down", lambda: [number(0, 35, 48)]),
    "log_softmax": (nn.LogSoftmax(-1), ordered("lanes:64"), lambda: [number(0, 9, 70)]),
    # Fewer elements than chains.
    "short rows": (nn.Softmax(-1), "stochastic", lambda: [number(0, 40, 5)]),
    # A mask that broadcasts over rows, scores whose rows are not adjacent, a number.
    "masked": (
        Applied(masked),
        "stochastic",
        lambda: [
            number(0, 7, 2, 3, 20).permute(1, 2, 0, 3),
            torch.arange(2 * 20).view(2, 1, 1, 20) % 3 == 0,
            torch.tensor(0.7),
        ],
    ),
    # Rows of which every element has the same address, and one whose elements are not adjacent.
    "expanded": (
        Applied(lambda x, y: torch.softmax(x * y, -1)),
        "reproducible",
        lambda: [number(0, 24, 5).mT[:, :1].expand(5, 24), number(1, 24, 5).mT],
    ),
    "bfloat16": (nn.LayerNorm(40, dtype=torch.bfloat16), "stochastic", lambda: [number(0, 21, 40).bfloat16()]),
    "float64": (nn.Softmax(-1), "stochastic", lambda: [number(0, 20, 17).double()]),
}


class Spy:
    """A launcher that passes texts on and keeps their names."""

    def __init__(self, host: HostLauncher) -> None:
        self.host, self.names = host, []  # type: ignore[var-annotated]

    def launch(self, text: Text, blocks: int, arguments: Any, device: torch.device) -> None:
        self.names.append(text.name.split("_")[0])
        self.host.launch(text, blocks, arguments, device)

    def has_slow_binary64(self, device: torch.device) -> bool:
        return self.host.slow_binary64

    def copies_async(self, device: torch.device) -> bool:
        return self.host.async_copies


@pytest.mark.part(3)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_one_kernel_with_the_bits_of_the_cpu(
    host: HostLauncher, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, policy, operands = CHAINS[name]
    compiled = fxround.compile(network, policy, seed=4)
    inputs = operands()

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [compiled.reseed(5)(*inputs)]

    def backward() -> list[Tensor]:
        leaf = inputs[0].detach().clone(memory_format=torch.preserve_format).requires_grad_()
        result = compiled.reseed(5)(leaf, *inputs[1:])
        return [result.detach(), *torch.autograd.grad(result.square().sum(), [leaf, *network.parameters()])]

    expected = [forward(), backward()]
    # Most as on a device whose binary64 is slow.
    monkeypatch.setattr(host, "slow_binary64", name not in ("layer_norm", "masked"))
    prepare(host, forward, backward)
    monkeypatch.setattr(host, "seed", 2 + len(name))
    for run, want in zip((forward, backward), expected, strict=True):
        spy = Spy(host)
        with launching(spy), buffers.guarded():
            got = run()
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        assert spy.names == ["rows"] if run is forward else spy.names.count("rows") >= 2


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "policy, shape",
    [(ordered("sequential"), (5, 40)), ("stochastic", (2, 20_000)), ("stochastic", (0, 40))],
    ids=["one chain", "long rows", "no rows"],
)
def test_what_has_no_text_runs_kernel_by_kernel(host: HostLauncher, policy: Any, shape: tuple[int, ...]) -> None:
    compiled, spy = fxround.compile(nn.Softmax(-1), policy), Spy(host)
    x = torch.randn(shape)
    want = compiled.reseed(1)(x)
    with launching(spy):
        got = compiled.reseed(1)(x)
    assert torch.equal(got, want)
    assert "rows" not in spy.names


@pytest.mark.parametrize(
    "module, operation",
    [
        (nn.LayerNorm(40), r"chain over rows of torch.float32 \[40\]"),
        (nn.Linear(40, 3), r"matmul and the map after it of torch.float32 \[9, 40\]"),
    ],
)
def test_a_device_without_memory_names_the_operation(
    host: HostLauncher, module: nn.Module, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the error the module runs as if it had not been called."""
    x, compiled = torch.randn(9, 40), fxround.compile(module, "stochastic", seed=3)

    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    with launching(host):
        want = compiled(x)
        compiled.reseed(3)
        with monkeypatch.context() as patched:
            patched.setattr(buffers, "empty", full)
            with pytest.raises(torch.OutOfMemoryError, match=f"{operation}.*no memory for its result.*20.00 MiB"):
                compiled(x)
        assert torch.equal(compiled(x), want)


def far_apart(x: Tensor) -> Tensor:
    """A copy of x whose rows lie 2^31 + 3 elements apart, in memory of which only these pages are there."""
    step = (1 << 31) + 3
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which Python names since 3.13
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, step * len(x) * x.itemsize, flags)
    found = torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, (step, 1))
    return found.copy_(x)


def test_offsets_have_64_bits(host: HostLauncher) -> None:
    """Maps, products and chains over rows of an operand of more than 2^32 elements."""
    x, w = torch.randn(4, 24), torch.randn(24, 5)
    far = far_apart(x)
    for function in (lambda x: x * 3, lambda x: x @ w, lambda x: torch.softmax(x, -1), lambda x: w.mT @ x.mT):
        compiled, spy = fxround.compile(function, "stochastic"), Spy(host)
        want = compiled.reseed(2)(x)
        with launching(spy):
            got = compiled.reseed(2)(far)
        assert torch.equal(got, want) and spy.names
