"""Whole models through the CUDA texts, run as host code: the bits of the CPU, forward, backward and in training."""

from __future__ import annotations

import ctypes
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


# Every policy, and every kind of rounding on both devices; test_cuda compares all accumulators on both.
STEPS = [
    *(("vision", policy) for policy in ("reproducible", "stochastic", "up_down", "nvfp4_training", "exact sums")),
    *(("language", policy) for policy in ("reproducible", "stochastic", "fp8", "chunks")),
]


@cache
def captured(name: str) -> tuple[fxround.RoundedModule, Tensor]:
    """A compiled model with random weights that was called once, and its input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = {"vision": Vision, "language": Language}[name]()
        x = torch.randn(4, 3, 8, 8).requires_grad_() if name == "vision" else torch.randint(0, 20, (3, 7))
        compiled = fxround.compile(made, "reproducible")
        compiled(x)
        return compiled, x


@pytest.fixture(scope="module")
def host(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> HostLauncher:
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


@pytest.mark.part("vision-nvfp4_training", "language-fp8", "vision-exact sums")
@pytest.mark.parametrize("name, policy", STEPS)
def test_a_training_step_has_the_bits_of_the_cpu(
    host: HostLauncher, name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model as on a device whose binary64 is slow, the other one as on a device whose binary64 is fast."""
    monkeypatch.setattr(host, "slow_binary64", name == "language")
    known, x = captured(name)
    compiled = known.with_policy(POLICIES[policy])

    def run() -> list[Tensor]:
        compiled.reseed(5)
        y = compiled(x)
        wanted = [p for p in (x, *compiled.parameters()) if p.requires_grad]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]

    same(host, run, monkeypatch)


@pytest.mark.long
def test_a_unet_has_the_bits_of_the_cpu(host: HostLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    example = models.build("unet")
    compiled = fxround.compile(example.model, "stochastic")
    weights = [p for p in example.model.parameters() if p.requires_grad]

    def run() -> list[Tensor]:
        compiled.reseed(5)
        result = example.result(compiled(*example.args, **example.kwargs))
        found = torch.autograd.grad(result.square().sum(), weights, allow_unused=True)
        return [result.detach(), *(g for g in found if g is not None)]

    same(host, run, monkeypatch)


@pytest.mark.part("dtype0")
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


@pytest.mark.part("reproducible")
@pytest.mark.parametrize("policy", ["reproducible", "stochastic"])
def test_an_optimizer_has_the_bits_of_the_cpu(host: HostLauncher, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two dtypes, with parameters of many chunks, of no elements, and one that is not aligned."""
    monkeypatch.setattr(host, "slow_binary64", policy == "stochastic")

    def run() -> list[Tensor]:
        weights = [torch.linspace(-1, 1, 9000).reshape(60, 150), torch.ones(7), torch.ones(0, 3), torch.ones(())]
        weights += [torch.linspace(-1, 1, 48)[1:]]
        weights += [torch.ones(5, dtype=torch.bfloat16)] if policy == "stochastic" else []
        weights = [nn.Parameter(w) for w in weights]
        adam = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1)
        optimizer = fxround.compile_optimizer(adam, policy)
        for step in range(3):
            for weight in weights:
                weight.grad = torch.cos(weight.detach() * (step + 1))
            optimizer.step()
        states = [value for state in adam.state.values() for value in state.values()]
        return [weight.detach().clone() for weight in weights] + [torch.as_tensor(value).clone() for value in states]

    same(host, run, monkeypatch)


def test_an_optimizer_launches_one_kernel_for_a_group(host: HostLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of 100 parameters needs the tables of two launches; each parameter draws with its own seed."""

    def run() -> list[Tensor]:
        weights = [nn.Parameter(torch.linspace(-1, 1, 40 + n % 3)) for n in range(100)]
        optimizer = fxround.compile_optimizer(torch.optim.SGD(weights, lr=0.3), "bfloat16/stochastic")
        for weight in weights:
            weight.grad = torch.cos(weight.detach())
        optimizer.step()
        return [weight.detach() for weight in weights]

    same(host, run, monkeypatch)
    launched: list[str] = []
    monkeypatch.setattr(host, "launch", lambda text, *_: launched.append(text.name))
    with launching(host):
        run()
    assert len(launched) == 2 and len(set(launched)) == 1


def test_pytorchs_switches_of_precision_change_no_launch(host: HostLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32, sums in reduced precision and benchmarked algorithms are PyTorch's: the same texts run with any of them."""
    compiled, x = captured("vision")
    matmul: Any = torch.backends.cuda.matmul
    switches = [
        (matmul, "allow_tf32"),
        (matmul, "allow_bf16_reduced_precision_reduction"),
        (matmul, "allow_fp16_reduced_precision_reduction"),
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cudnn, "benchmark"),
    ]
    launched: list[tuple[str, int]] = []
    monkeypatch.setattr(host, "launch", lambda text, blocks, *_: launched.append((text.name, blocks)))
    found = []
    before = [getattr(place, name) for place, name in switches]
    try:
        for on in (False, True):
            for place, name in switches:
                setattr(place, name, on)
            launched.clear()
            with launching(host):
                torch.autograd.grad(compiled(x).sum(), list(compiled.parameters()))
            found.append(list(launched))
    finally:
        for (place, name), value in zip(switches, before, strict=True):
            setattr(place, name, value)
    assert found[0] == found[1]
    assert sum(name.startswith("contract") for name, _ in found[0]) >= 8


@pytest.mark.parametrize("format", ["bfloat16", "e4m3fn/stochastic", "mxfp8", "int8:channel", "nf4"])
def test_rounding_a_tensor_has_the_bits_of_the_cpu(
    host: HostLauncher, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 64, 2.0)
    same(host, lambda: [fxround.round(x, format)], monkeypatch)


@pytest.mark.long
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
