"""A second device without a GPU: ``python second_device.py FOLDER CASE...`` runs cases on it.

The device, "second", is made by ``second_device.cpp``: PyTorch keeps its tensors apart from the CPU's. fxround runs
them as it runs CUDA tensors, with the texts of the GPU compiled for the host (``cuda_host``). What is registered in
PyTorch stays for the life of a process, so that the cases have one of their own. It prints a line of JSON for each
case, ``[case, ""]`` or ``[case, traceback]``.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from cuda_host import HostLauncher
from torch import Tensor, nn

import fxround
from fxround import Policy, Rule
from fxround.runtime import torch_ops
from fxround.runtime.cuda import launcher

SOURCE = Path(__file__).with_suffix(".cpp")
DEVICE = "second"


def install(folder: Path) -> None:
    """Register the device in PyTorch and in fxround."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler
    home = Path(torch.__file__).parent
    include = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    made = folder / "second_device.so"
    flags = [
        "-std=c++20",
        "-O0",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    subprocess.run([compiler, *flags, *include, str(SOURCE), "-o", str(made), *libraries], check=True)
    torch.ops.load_library(str(made))
    torch.utils.rename_privateuse1_backend(DEVICE)
    module: Any = types.ModuleType(f"torch.{DEVICE}")
    module.is_available = lambda: True
    module.device_count = lambda: 2
    module.current_device = lambda: 0
    module.set_device = module.manual_seed_all = lambda _: None
    module._is_in_bad_fork = lambda: False
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: None
    torch._register_device_module(DEVICE, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    _run_texts_on_it(HostLauncher(folder, compiler))


def _run_texts_on_it(host: HostLauncher) -> None:
    """Let fxround take the device's tensors for CUDA tensors."""

    def runs_texts(tensors: Any) -> bool:
        return any(isinstance(x, Tensor) and x.device.type == DEVICE for x in tensors)

    for name, module in list(sys.modules.items()):
        if name.startswith("fxround"):
            if hasattr(module, "runs_texts"):
                module.runs_texts = runs_texts  # type: ignore[attr-defined]
            if hasattr(module, "DEVICES"):
                module.DEVICES = ("cpu", DEVICE)  # type: ignore[attr-defined]
    launcher._DEVICE = host  # type: ignore[assignment]
    for overload, kernel in torch_ops.KERNELS.items():
        torch_ops.LIBRARY.impl(torch_ops.CALLS[overload].name, kernel, "PrivateUse1")


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
    policy = Policy("faults", (Rule(rounding="bfloat16", faults="any:1e-2"),))
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
    y = fxround.compile(layer, "stochastic", seed=1)(x)[0]
    return y, torch.autograd.grad(y.sum(), list(layer.parameters()))


def lorenz(_: nn.Module, x: Tensor) -> Any:
    def step(s: Tensor) -> Tensor:
        return s + 0.01 * torch.stack([s[1] - s[0], s[0] * (28 - s[2]) - s[1], s[0] * s[1] - s[2] * 8 / 3])

    return fxround.iterate(step, torch.ones(3, device=x.device), 20, policy="stochastic")


def exported(layers: nn.Module, x: Tensor) -> Any:
    file = Path(sys.argv[1]) / "model.pt2"
    fxround.compile(copy.deepcopy(layers).cpu().eval(), "stochastic", seed=1).export(file, x.cpu())
    return fxround.load(file).to(x.device)(x)


def moved() -> None:
    """One compiled module on each device in turn."""
    layers, x = model()
    compiled = fxround.compile(layers.eval(), "stochastic", seed=1)
    here = compiled(x)
    there = compiled.to(DEVICE).reseed(1)(x.to(DEVICE))
    equal(here, there)
    assert fxround.hash(compiled.to("cpu").reseed(1)(x)) == fxround.hash(here)


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
    with pytest.raises((RuntimeError, ValueError), match="device"):
        compiled(x)


def invariance() -> None:
    """The axis of devices, and the others on the device."""
    from fxround.invariance import cases

    cases.devices = lambda: ["cpu", f"{DEVICE}:0", f"{DEVICE}:1"]  # type: ignore[assignment]
    layers, x = model()
    axes = ("batch", "slice", "stride", "threads", "device")
    report = fxround.check_invariance(layers.eval().to(DEVICE), x.to(DEVICE), axes, gradients=True).check()
    assert report["device"].runs == 3
    compiled = fxround.compile(layers, "stochastic")
    assert fxround.check_invariance(compiled, x.to(DEVICE), ("device",)).check()["device"].runs == 3


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
        )
    },
}
ALONE: dict[str, Callable[[], None]] = {f.__name__: f for f in (moved, two_devices, mixed, invariance)}


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
    results = []
    for device in ("cpu", DEVICE):
        layers, x = model()
        results.append(CASES[name](layers.to(device), x.to(device)))
    return equal(*results)


def main() -> None:
    """Run the cases of the command line."""
    warnings.simplefilter("ignore")
    install(Path(sys.argv[1]))
    for name in sys.argv[2:]:
        try:
            run(name)
            problem = ""
        except Exception:  # whatever a case raises is its result
            problem = traceback.format_exc()
        print(json.dumps([name, problem]), flush=True)
    sys.stdout.flush()
    # Autograd's threads of the device cannot be joined.
    os._exit(0)


if __name__ == "__main__":
    main()
