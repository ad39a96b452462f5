"""Cases for a device that is not the CPU: models in training and in studies, and every layer of ``layers.LAYERS``."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.utils._pytree as pytree
from cuda_host import HostLauncher
from host_gpu import COMPILER
from layers import LAYERS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxround
from fxround import Policy, Rule, cli, demo
from fxround.compiler import captures as captures_of_models
from fxround.runtime import buffers
from fxround.runtime.cuda import launcher

DEVICE = "cuda"


def enable(folder: Path) -> None:
    """Let PyTorch's Python part and fxround use the device."""
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 2
    cuda._exchange_device = lambda device: 0
    cuda._maybe_exchange_device = lambda device: 0
    cuda.is_current_stream_capturing = lambda: False
    cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: None
    launcher._DEVICE = HostLauncher(folder, COMPILER)  # type: ignore[assignment]


# ---- cases: a function of a model and its input, or of nothing ----


def model() -> tuple[nn.Module, Tensor]:
    """A model with random weights, and its input."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(6), nn.Linear(6, 3))
    return layers, torch.randn(5, 8)


def training(policy: str) -> Callable[[nn.Module, Tensor], Any]:
    """Two training steps and an evaluation."""

    def run(layers: nn.Module, x: Tensor) -> Any:
        compiled = fxround.compile(layers, policy, seed=1)
        optimizer = fxround.compile_optimizer(torch.optim.AdamW(layers.parameters(), lr=0.1), "stochastic", seed=2)
        for _ in range(2):
            optimizer.zero_grad()
            compiled(x).square().sum().backward()
            optimizer.step()
        states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()]
        gradients = [p.grad for p in layers.parameters()]
        return compiled.eval()(x), states, gradients, [p.detach() for p in layers.parameters()]

    return run


def observe(layers: nn.Module, x: Tensor) -> Any:
    return [value for _, value in fxround.compile(layers.eval(), "stochastic", seed=1).observe(x)]


def variability(layers: nn.Module, x: Tensor) -> Any:
    return str(fxround.variability(layers.eval(), x, samples=4, capture="nodes"))


def localize(layers: nn.Module, x: Tensor) -> Any:
    return str(fxround.localize(layers.eval(), x, min_bits=20))


def flips_and_leaks(layers: nn.Module, x: Tensor) -> Any:
    scaled = Rule(role="weight", rounding="nvfp4", faults="any:0.05 scale.any:0.5 tensor.any:1")
    policy = Policy("faults", (Rule(rounding="bfloat16", faults="any:1e-2"), scaled))
    compiled = fxround.compile(layers.eval(), policy, seed=1)
    return compiled(x), str(compiled.reseed(1).flips(x)), str(compiled.leaks(x))


def calibrate(layers: nn.Module, x: Tensor) -> Any:
    return fxround.compile(layers.eval(), fxround.calibrate(layers.eval(), [x], "int8"))(x)


def torch_compile(layers: nn.Module, x: Tensor) -> Any:
    y = torch.compile(layers.eval(), backend="fxround", options={"policy": "stochastic"})(x)
    return y, torch.autograd.grad(y.sum(), list(layers.parameters()))


def recurrent(_: nn.Module, x: Tensor) -> Any:
    torch.manual_seed(0)
    layer = nn.LSTM(8, 3).to(x.device)
    # The states of the iterations are computed where seed and sample are.
    y = fxround.compile(layer, "stochastic").reseed(1, device=x.device)(x)[0]
    return y, torch.autograd.grad(y.sum(), list(layer.parameters()))


def lorenz(_: nn.Module, x: Tensor) -> Any:
    def step(s: Tensor) -> Tensor:
        return s + 0.01 * torch.stack([s[1] - s[0], s[0] * (28 - s[2]) - s[1], s[0] * s[1] - s[2] * 8 / 3])

    return fxround.iterate(step, torch.ones(3, device=x.device), 20, policy="stochastic")


def exported(layers: nn.Module, x: Tensor) -> Any:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"
        # A build without CUDA cannot load a tensor that was saved on the device.
        fxround.compile(copy.deepcopy(layers).cpu().eval(), "stochastic", seed=1).export(file, x.cpu())
        loaded = fxround.load(file).to(x.device)
        with NoReads():
            return loaded(x), loaded.reseed(5, 7)(x)


def state_on_the_device(layers: nn.Module, x: Tensor) -> Any:
    """Training calls advance seed and sample where they are, past the last sample of a seed; rank 1 of 2 processes."""
    compiled = fxround.compile(layers, "stochastic").reseed(3, 2**32 - 6, device=x.device).distribute(1, 2)
    address = compiled.rng.data_ptr()
    for _ in range(4):
        compiled(x).square().sum().backward()
    assert x.is_cpu or compiled.rng.data_ptr() == address
    assert compiled.rng.tolist() == [4, 2]
    return compiled.rng, [p.grad for p in layers.parameters()]


class NoReads(TorchDispatchMode):
    """Refuses everything that waits for the device: a value of its memory on the host, and copies from or to it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        given, made = ([t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)] for x in ((args, kwargs), found))
        copies = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        assert function not in copies or len({t.is_cuda for t in (*given, *made)}) == 1, function
        # What reads a value returns a number.
        assert made or not any(t.is_cuda for t in given), function
        return found


def roundings() -> None:
    """Single roundings, results in place and refused ones."""
    x = torch.randn(9, 40)
    for target in ("bfloat16/stochastic", "mxfp8", "nvfp4", "int8:channel", "int8:percentile=99.9", "nf4/stochastic"):
        equal(fxround.round(x, target, seed=3), fxround.round(x.to(DEVICE), target, seed=3))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        y = x.to(dtype)
        equal(fxround.round(y, "e4m3fn/stochastic", seed=3), fxround.round(y.to(DEVICE), "e4m3fn/stochastic", seed=3))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        y = x.to(dtype)
        short = "custom(2,-4,0x1p3,signed+zero)/stochastic"
        equal(fxround.round(y, short, seed=3).float(), fxround.round(y.to(DEVICE), short, seed=3).float())
        convert = fxround.compile(lambda t, dtype=dtype: (t * t.to(dtype).float()).to(dtype), "stochastic")
        equal(convert(x).view(torch.uint8), convert.reseed(0)(x.to(DEVICE)).view(torch.uint8))
    out = torch.empty_like(x, device=DEVICE)
    equal(fxround.round(x, "bfloat16"), fxround.round(x.to(DEVICE), "bfloat16", out=out))
    for other in (torch.empty_like(x), torch.empty_like(x, device=f"{DEVICE}:1")):
        with pytest.raises(ValueError, match="out is on"):
            fxround.round(x.to(DEVICE), "bfloat16", out=other)
    scaled = fxround.compile(lambda t: t * torch.tensor(0.1), "bfloat16")
    equal(scaled(x), scaled(x.to(DEVICE)))


def moved() -> None:
    """One compiled module on each device in turn."""
    layers, x = model()
    compiled = fxround.compile(layers.eval(), "stochastic", seed=1)
    here = compiled(x)
    there = compiled.to(DEVICE).reseed(1)(x.to(DEVICE))
    equal(here, there)
    assert fxround.hash(compiled.to("cpu").reseed(1)(x)) == fxround.hash(here)
    # Each device has its graph, and each graph its plans and kernels, when the model comes back.
    host: Any = launcher._DEVICE
    captures, texts = len(compiled.captures().rows), {*host.functions}
    for device in (DEVICE, "cpu", DEVICE):
        assert fxround.hash(compiled.to(device).reseed(1)(x.to(device)).cpu()) == fxround.hash(here)
    assert len(compiled.captures().rows) == captures == 2 and {*host.functions} == texts


def moved_without_arguments() -> None:
    """A model that takes no tensors runs where its own are."""

    class Ramp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.tensor([0.3, 0.7]))

        def forward(self) -> Tensor:
            return self.slope * torch.arange(2, device=self.slope.device) + torch.ones(2).to(self.slope.device)

    compiled = fxround.compile(Ramp(), "stochastic", seed=1)
    here = compiled()
    for device in (DEVICE, "cpu", DEVICE):
        got = compiled.to(device).reseed(1)()
        assert got.device.type == device
        assert torch.equal(got.cpu(), here)


def autocast() -> None:
    """A graph of one autocast, of the CPU or of the device, is used under that one alone."""
    layer = nn.Linear(8, 6)
    x = torch.randn(5, 8)
    compiled = fxround.compile(layer, "stochastic")
    found = []
    for device in ("cpu", DEVICE):
        compiled.to(device)
        for on in (False, True, False):
            with torch.autocast(device, torch.float16, enabled=on):
                found.append(compiled.reseed(1)(x.to(device)))
            assert found[-1].dtype == (torch.float16 if on else torch.float32)
    equal(found[:3], found[3:])
    assert [row[5] for row in compiled.captures().rows][2:] == [
        "argument 0 is float32 of 2 dimensions on cuda:0; before, it was float32 of 2 dimensions on cpu",
        "autocast is torch.float16; before, it was off",
    ]


def moved_before_backward() -> None:
    """A model that moved after a forward pass: an error that names both devices, and a next pass that works."""
    layers, x = model()
    compiled = fxround.compile(layers.to(DEVICE), "stochastic", seed=1)
    y = compiled(x.to(DEVICE))
    layers.to("cpu")
    with pytest.raises((RuntimeError, ValueError), match=r"cpu.*cuda|cuda.*cpu"):
        y.sum().backward()
    layers.zero_grad()
    compiled.reseed(1)(x).sum().backward()
    here = [p.grad for p in layers.parameters()]
    layers.zero_grad()
    layers.to(DEVICE)
    compiled.reseed(1)(x.to(DEVICE)).sum().backward()
    equal(here, [p.grad for p in layers.parameters()])


def replayed() -> None:
    """Launches that are repeated, as a CUDA graph repeats them, draw the bits of what the state holds then."""
    layers, x = model()
    compiled = fxround.compile(layers.eval(), "stochastic", seed=4)
    here = [compiled.reseed(4, sample)(x) for sample in (3, 8)]
    x = x.to(DEVICE)
    compiled.to(DEVICE).reseed(4, device=DEVICE)(x)
    launched, kept, launch, empty = [], [], launcher._DEVICE.launch, buffers.empty

    def recorded(*arguments: Any) -> None:
        launched.append(arguments)
        launch(*arguments)

    def remembered(*arguments: Any) -> Tensor:
        kept.append(empty(*arguments))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher._DEVICE, "launch", recorded)
        patch.setattr(buffers, "empty", remembered)
        with NoReads():
            there = compiled(x)
    assert len(launched) == 3, [text.name for text, *_ in launched]
    for sample, want in zip((3, 8), here, strict=True):
        compiled.reseed(4, sample)
        for arguments in launched:
            launch(*arguments)
        equal(want, there)


def captured_step() -> None:
    """A CUDA graph would repeat the random bits and the bias corrections of a step, but not a plain SGD's numbers."""
    kinds = torch.optim.SGD, torch.optim.Adam
    for kind, policy, what in zip((*kinds, kinds[0]), ("stochastic", "bfloat16", "bfloat16"), WHAT, strict=True):
        layers, x = model()
        layers(x).sum().backward()
        layers.to(DEVICE)
        optimizer = fxround.compile_optimizer(kind(layers.parameters(), lr=0.1), policy)
        before = [p.detach().clone() for p in layers.parameters()]
        refused = pytest.raises(fxround.FxroundError, match=what) if what else contextlib.nullcontext()
        with pytest.MonkeyPatch.context() as patch, refused:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            optimizer.step()
        same = [torch.equal(p.cpu(), old.cpu()) for p, old in zip(layers.parameters(), before, strict=True)]
        assert all(same) if what else not any(same), same
        optimizer.step()


WHAT = ("SGD takes random bits from the host", "Adam takes numbers that change", "")


def two_devices() -> None:
    """A model on two devices, and on the one that is not the current one."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lower, self.upper = nn.Linear(8, 6).to(f"{DEVICE}:0"), nn.Linear(6, 3).to(f"{DEVICE}:1")

        def forward(self, x: Tensor) -> Tensor:
            return self.upper(self.lower(x.to(f"{DEVICE}:0")).relu().to(f"{DEVICE}:1"))

    layers, x = Halves(), model()[1]
    y = fxround.compile(layers, "stochastic", seed=1)(x.to(f"{DEVICE}:0"))
    y.sum().backward()
    assert str(y.device) == f"{DEVICE}:1"
    for half, name in ((layers.lower, f"{DEVICE}:0"), (layers.upper, f"{DEVICE}:1")):
        assert {str(p.grad.device) for p in half.parameters() if p.grad is not None} == {name}


def mixed() -> None:
    """Operands on two devices are an error."""
    layers, x = model()
    compiled = fxround.compile(layers.eval().to(DEVICE), "stochastic")
    with pytest.raises((RuntimeError, ValueError, fxround.CaptureError), match="device"):
        compiled(x)


def invariance() -> None:
    """The axis of devices, and the others on the device."""
    layers, x = model()
    axes = ("batch", "stride", "device")
    report = fxround.check_invariance(layers.eval().to(DEVICE), x.to(DEVICE), axes, gradients=True).check()
    assert report["device"].runs == 3
    compiled = fxround.compile(layers, "stochastic")
    assert fxround.check_invariance(compiled, x.to(DEVICE), ("device",)).check()["device"].runs == 3


class Small(nn.Sequential):
    """A model for commands."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 3), nn.Tanh())


def commands() -> None:
    """A command prints for a model on the device what it prints for one on the CPU."""
    model = (f"{__name__}:Small", "--shape", "5,8")
    for command, *options in (
        ("inspect", "--leaks"),
        ("variability", "--samples", "2"),
        ("localize", "--min-bits", "20"),
        ("invariance", "--axes", "batch"),
    ):
        printed = []
        for device in ("cpu", DEVICE):
            with contextlib.redirect_stdout(io.StringIO()) as text:
                assert cli.main([command, *model, *options, "--device", device]) in (0, 1)
            printed.append(re.sub(r"[\d.]+ (s|ms)\b", "", text.getvalue()))
        assert printed[0] == printed[1].replace(DEVICE, "cpu"), printed


def digits() -> None:
    """The demo's perturbed runs have the CPU's results. Stock PyTorch's, and the times, may differ."""
    found = [demo.run(samples=2, device=device) for device in ("cpu", DEVICE)]
    results = [(one.bits, one.layers, one.accuracy, one.rounded, one.unrounded) for one in found]
    assert results[0] == results[1], results


CASES: dict[str, Callable[..., Any]] = {
    "training, stochastic": training("stochastic"),
    "training, fp8_delayed": training("fp8_delayed"),
    "training, nvfp4_training": training("nvfp4_training"),
    **{
        f.__name__: f
        for f in (
            observe,
            variability,
            localize,
            flips_and_leaks,
            calibrate,
            torch_compile,
            recurrent,
            lorenz,
            exported,
            state_on_the_device,
        )
    },
}
ALONE: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        commands,
        roundings,
        moved,
        moved_without_arguments,
        autocast,
        moved_before_backward,
        replayed,
        captured_step,
        digits,
        two_devices,
        mixed,
        invariance,
    )
}


def layer(name: str) -> None:
    """Results and gradients of a layer."""
    module, arguments = LAYERS[name]
    results = []
    for device in ("cpu", DEVICE):
        placed = copy.deepcopy(module).to(device)
        given = pytree.tree_map_only(Tensor, lambda x: _leaf(x, device), arguments)  # noqa: B023
        found = fxround.compile(placed, "stochastic", strict=False)(*given)
        leading = [t for t in pytree.tree_leaves(found) if isinstance(t, Tensor) and t.requires_grad]
        leaves = [*placed.parameters(), *(t for t in pytree.tree_leaves(given) if isinstance(t, Tensor))]
        wanted = [t for t in leaves if t.requires_grad]
        sums = [t.float().sum() for t in leading]
        results.append((found, torch.autograd.grad(sums, wanted, allow_unused=True) if leading and wanted else ()))
    equal(*results)


def _leaf(x: Tensor, device: str) -> Tensor:
    return x.detach().to(device, copy=True).requires_grad_(x.is_floating_point())


def equal(here: Any, there: Any) -> None:
    """Raise AssertionError unless results are on the device, with the bits of the CPU's; texts must be equal."""
    expected, found = pytree.tree_leaves(here), pytree.tree_leaves(there)
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        if isinstance(a, Tensor):
            assert b.device.type == DEVICE, b.device
            assert fxround.hash(a) == fxround.hash(b.cpu()), (a, b.cpu())
        else:
            assert a == b, f"{a}\n{b}"


def run(name: str) -> None:
    """Run a case; on both devices unless it is one of its own."""
    if name in ALONE:
        return ALONE[name]()
    if name in LAYERS:
        return layer(name)
    results = []
    for device in ("cpu", DEVICE):
        layers, x = model()
        results.append(CASES[name](layers.to(device), x.to(device)))
    return equal(*results)


def main(folder: Path, names: Sequence[str]) -> None:
    """Run cases, "layers" for all layers, and print the result of each."""
    warnings.simplefilter("ignore")
    enable(folder)
    # The device lacks the cells' own kernels, which a GPU has.
    captures_of_models.asked = create_autospec(captures_of_models.asked, return_value=True)
    for name in LAYERS if names == ["layers"] else names:
        try:
            run(name)
            problem = ""
        except Exception:  # whatever a case raises is its result
            problem = traceback.format_exc()
        print(json.dumps([name, problem]), flush=True)
    sys.stdout.flush()
    # Autograd's threads of the device cannot be joined.
    os._exit(0)
