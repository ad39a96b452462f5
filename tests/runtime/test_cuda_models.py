"""Whole models through the CUDA texts, run as host code: the bits of the CPU, forward, backward and in training."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import models
import pytest
import torch
from cuda_host import HostLauncher, prepare
from torch import Tensor, nn

import fxround
from fxround import Policy, Rule
from fxround.runtime.cuda.launcher import Text, launch, launching

POLICIES: dict[str, Any] = {
    **{name: name for name in ("reproducible", "stochastic", "up_down", "fp8", "nvfp4_training")},
    "chunks": Policy("chunks", (Rule(rounding="bfloat16", accumulate="bfloat16 chunk=32 combine=binary32"),)),
    "exact sums": Policy("exact sums", (Rule(rounding="binary32"), Rule(order="exact", optional=True))),
}


class Vision(nn.Module):
    """Convolutions of every kind, a norm of each sort, a softmax and a scan."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv2d(3, 6, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6, padding=1)
        self.back = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.head = nn.Sequential(nn.Linear(256, 10), nn.LayerNorm(10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.back(self.depthwise(torch.relu(self.norm(self.front(x)))))
        return torch.softmax(self.head(x.flatten(1)), -1).cumsum(-1)


class Language(nn.Module):
    """An embedding, attention with dropout, and a loss: gathers, scatters and batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.head(self.layer(self.tokens(tokens)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten(), reduction="none")


@cache
def model(name: str) -> tuple[nn.Module, Tensor]:
    """A model with random weights, and its input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = {"vision": Vision, "language": Language}[name]()
        images = torch.randn(4, 3, 8, 8).requires_grad_()
        return made, images if name == "vision" else torch.randint(0, 20, (3, 7))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostLauncher:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++ to run the CUDA texts on the host")
    return HostLauncher(tmp_path_factory.mktemp("cuda"), compiler)


def same(host: HostLauncher, run: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA texts give the CPU's bits, in any order of blocks and threads."""
    want = run()
    prepare(host, run)
    for seed in (1, 2):
        monkeypatch.setattr(host, "seed", seed)
        with launching(host):
            got = run()
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["vision", "language"])
def test_a_training_step_has_the_bits_of_the_cpu(
    host: HostLauncher, name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model as on a device whose binary64 is slow, the other one as on a device whose binary64 is fast."""
    monkeypatch.setattr(host, "slow_binary64", name == "language")
    network, x = model(name)
    compiled = fxround.compile(network, POLICIES[policy])

    def run() -> list[Tensor]:
        compiled.reseed(5)
        y = compiled(x)
        wanted = [p for p in (x, *network.parameters()) if p.requires_grad]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]

    same(host, run, monkeypatch)


@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_models_of_the_suite_have_the_bits_of_the_cpu(
    host: HostLauncher, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = models.build(name)
    compiled = fxround.compile(example.model, "stochastic")
    weights = [p for p in example.model.parameters() if p.requires_grad]

    def run() -> list[Tensor]:
        compiled.reseed(5)
        result = example.result(compiled(*example.args, **example.kwargs))
        found = torch.autograd.grad(result.square().sum(), weights, allow_unused=True)
        return [result.detach(), *(g for g in found if g is not None)]

    same(host, run, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_dtypes_have_the_bits_of_the_cpu(
    host: HostLauncher, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 3)).to(dtype)
        x = torch.randn(5, 24, dtype=dtype)
    compiled = fxround.compile(network, "stochastic")

    def run() -> list[Tensor]:
        return [compiled.reseed(3)(x).detach()]

    same(host, run, monkeypatch)


@pytest.mark.parametrize("policy", ["reproducible", "stochastic"])
def test_an_optimizer_has_the_bits_of_the_cpu(host: HostLauncher, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        weights = [nn.Parameter(torch.linspace(-1, 1, 300).reshape(20, 15)), nn.Parameter(torch.ones(7))]
        adam = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1)
        optimizer = fxround.compile_optimizer(adam, policy)
        for step in range(3):
            for weight in weights:
                weight.grad = torch.cos(weight.detach() * (step + 1))
            optimizer.step()
        states = [value for state in adam.state.values() for value in state.values()]
        return [weight.detach().clone() for weight in weights] + [torch.as_tensor(value).clone() for value in states]

    same(host, run, monkeypatch)


@pytest.mark.parametrize("format", ["bfloat16", "e4m3fn/stochastic", "mxfp8", "int8:channel", "nf4"])
def test_rounding_a_tensor_has_the_bits_of_the_cpu(
    host: HostLauncher, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 64, 2.0)
    same(host, lambda: [fxround.round(x, format)], monkeypatch)


def test_the_selftest_holds_the_texts_to_the_specification(host: HostLauncher) -> None:
    with launching(host):
        report = fxround.selftest()
    assert sum(c.values for c in report.comparisons) > 20_000


# ---- the host itself ----


def run_text(host: HostLauncher, body: str) -> None:
    """Run a text of one block of 64 threads that has an array of 64 numbers."""
    preamble = "#define FIRST SHARED(float, tile, 64)\n"
    name = f"planted_{abs(hash(body))}"
    source = f'{preamble}extern "C" __global__ void {name}(const int unused) {{ FIRST; {body} }}\n'
    with launching(host):
        launch(Text(name, lambda: source, 64, True), 1, [ctypes.c_int(0)], torch.device("cpu"))


@pytest.mark.parametrize(
    "body, found",
    [
        ("tile[threadIdx.x] = 1; float y = tile[(threadIdx.x + 1) % 64]; (void)y;", "race|before it was written"),
        ("tile[threadIdx.x] = 1; __syncthreads(); tile[0] = tile[threadIdx.x];", "race"),
        ("tile[0] = 1;", "race of two writes"),
        ("float y = tile[threadIdx.x]; (void)y;", "before it was written"),
        ("tile[threadIdx.x] = 1; if (threadIdx.x < 5) __syncthreads();", "not every thread meets"),
        ("tile[threadIdx.x + 1] = 1;", "beyond the end"),
    ],
)
def test_planted_errors_are_found(host: HostLauncher, body: str, found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        run_text(host, body)


def test_a_barrier_orders_what_threads_do(host: HostLauncher) -> None:
    run_text(host, "tile[threadIdx.x] = 1; __syncthreads(); float y = tile[(threadIdx.x + 1) % 64]; (void)y;")
