"""CUDA texts compile with NVRTC for every architecture from Turing on, and keep the arithmetic that they ask for."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs the extra cuda: pip install 'fxround[cuda]'")

import fxround
from benchmarks.cuda import ARCHITECTURES, faults_of, resources, sanitized, texts_of
from benchmarks.cuda import main as benchmark
from fxround import cli
from fxround.cli.diagnosis import diagnose
from fxround.errors import FxroundError
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.kernels.reductions import cumsum_kernel, exact_kernel, scatter_kernel, sum_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.modes import Rounding
from fxround.numerics.orders import Order
from fxround.runtime import disk_cache
from fxround.runtime.cuda import contraction, driver, iterations, reduction
from fxround.runtime.cuda.cpp.common import preamble
from fxround.runtime.cuda.cpp.contract import SHAPE, Tile
from fxround.runtime.cuda.cpp.copies import Way
from fxround.runtime.cuda.cpp.lines import LineLoop, Staging
from fxround.runtime.cuda.cpp.map import LAYOUT, CudaMapVariant, map_name, map_text
from fxround.runtime.cuda.driver import architecture, compiled
from fxround.runtime.cuda.launcher import Text, launch

BINARY32 = Rounding.parse("binary32")
STEPS = (
    "binary32",
    "binary32/stochastic",
    "binary32/up_down",
    "bfloat16",
    "ieee(8,14)/toward_zero chunk=5 combine=binary32",
)
PROGRAMS = (
    "t0 = mul(x0, x1) @ binary32/stochastic; t1 = exp(t0) @ binary32",
    "t0 = div(x0, x1) @ e4m3fn/nearest_even/saturate",
)


# Asynchronous copies: of elements, of 16 bytes, and of what tables say.
ASYNC = ((Way(True, 1), Way(False, 4)), (Way(False, 4), Way(True, 1)), (Way(True, 1), Way(False, 1, tables=True)))

# How the threads of a sum in chains, a sum in one, a scan and a scatter share the work.
SHAPES = (LineLoop(Staging(1)), LineLoop(Staging(32, 8)), LineLoop(Staging(128, 4)), LineLoop(piece=4))


@cache
def texts() -> tuple[Text, ...]:
    """A kernel of every shape, with tiles of every size."""
    found = []
    for steps in STEPS:
        kernel = contract_kernel(Accumulation.parse(steps), BINARY32, ("f32", "f32"), "f32")
        sides = (1, 8) if steps == "binary32" else (4,)
        found += [contraction._text(Tile(kernel, side)) for side in sides]
        if steps == "binary32":
            found.append(contraction._text(Tile(kernel, 8, ways=ASYNC[0], stored=4)))
        if kernel.single is not None:
            found.append(contraction._text(Tile(kernel, 4, single=True)))
    stochastic = Rounding.parse("binary32/stochastic")
    loops = (
        sum_kernel(Order.parse("lanes:16"), stochastic, BINARY32, "f32", "f32"),
        sum_kernel(Order.parse("sequential"), BINARY32, Rounding.parse("binary16"), "f16", "f16"),
        cumsum_kernel(stochastic, BINARY32, "f32", "f32"),
        scatter_kernel(stochastic, "f32"),
        exact_kernel(BINARY32, BINARY32, "f32", "f32"),
    )
    found += [reduction._text(kernel) for kernel in loops]
    # Those of a device whose binary64 is slow.
    found += [reduction._text(kernel.single) for kernel in (loops[0], loops[2], loops[3]) if kernel.single is not None]
    found += [reduction._text(loops[-1], LineLoop(exact=way)) for way in ("shared", "parts", "joined")]
    found += [reduction._text(kernel, shape) for kernel, shape in zip(loops, SHAPES, strict=False)]
    for program, access, piece in zip(PROGRAMS, ("lines", "strided"), (4, 1), strict=True):
        kernel = map_kernel(Program.parse(program), ("f32", "f32"), "f32")
        variant = CudaMapVariant(kernel, ("contiguous", access), 3, True, piece)
        found.append(Text(map_name(variant), lambda v=variant: preamble(SHAPE) + LAYOUT + map_text(v)))  # type: ignore[misc]
    return (*found, *rows(), *optimizers(), *epilogues(), iterations._text())


def optimizers() -> list[Text]:
    """The step of an optimizer for all parameters of a group."""
    weight = torch.nn.Parameter(torch.ones(5))
    weight.grad = torch.ones(5)
    adam = fxround.compile_optimizer(torch.optim.AdamW([weight]), "stochastic")
    found = [*texts_of(adam.step), *texts_of(adam.step, slow_binary64=True)]
    assert [text.name[:8] for text in found] == ["several_"] * 2
    return found


def epilogues() -> list[Text]:
    """A product with a bias, a hyperbolic tangent and a residual."""
    x, found = torch.ones(40, 40), []
    for policy, side in (("stochastic", 4), ("reproducible", 8)):
        weight, bias = torch.ones(40, 40), torch.ones(40)
        compiled = fxround.compile(lambda x, w=weight, b=bias: x + torch.tanh(x @ w + b), policy)
        with mock.patch.object(contraction, "_tile", lambda product, *sizes, side=side: Tile(product.kernel, side)):
            found += texts_of(partial(compiled, x))
    assert [re.sub("_[0-9a-f]{16}", "", text.name)[:10] for text in found] == ["contract_4", "contract_8"]
    assert all("_then_" in text.name for text in found)
    return found


def rows() -> list[Text]:
    """A softmax and a norm of rows as one kernel each, with their gradients."""
    x = torch.ones(40, 1024, requires_grad=True)
    runs = []
    for module in (torch.nn.Softmax(-1), torch.nn.LayerNorm(1024)):
        compiled = fxround.compile(module, "stochastic")
        runs.append(lambda c=compiled: torch.autograd.grad(c(x).square().sum(), x))  # type: ignore[misc]
    found = [text for text in texts_of(*runs) if text.name.startswith("rows")]
    assert len(found) == 4
    return found


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_texts_compile_without_spills(arch: str) -> None:
    """Fewer than 64 bytes of spilled registers; a stack only for an exact sum, and between a contraction and a map."""
    able = [t for t in texts() if arch != "sm_75" or not re.search(r"_[kn][14]t?_", f"{t.name}_")]
    for found in resources(able, arch):
        assert found.spilled < 64, found
        results = 256 if "_then_" in found.name else 64
        assert found.stack <= (128 if found.name.startswith("exact") else results), found
        assert 0 < found.occupancy() <= 1, found


def test_arithmetic_is_what_the_text_asks_for() -> None:
    """Every float operation names its rounding, so that no later compiler fuses two, and none flushes subnormals."""
    unit = "".join(f"namespace unit_{i} {{\n{text.source()}}}\n" for i, text in enumerate(texts()))
    ptx = driver.intermediate(unit, "compute_90").decode()
    arithmetic = re.findall(
        r"^\s*(?:@\S+\s+)?((?:add|sub|mul|fma|mad|div|sqrt|rcp)\.\S*f(?:32|64))\b", ptx, re.MULTILINE
    )
    assert len(arithmetic) > 100
    assert {operation for operation in arithmetic if ".rn." not in operation} == set()
    assert ".ftz" not in ptx
    assert ".approx" not in ptx


def test_copies_are_asynchronous() -> None:
    """An operand has as many copies as its tile has pieces a thread, in a first tile of k and in the following ones."""
    kernel = contract_kernel(BINARY32, BINARY32, ("f32", "f32"), "f32")
    for ways, pieces, elements in zip(ASYNC, (1, 1, 0), (4, 4, 8), strict=True):
        ptx = driver.intermediate(contraction._text(Tile(kernel, 8, ways=ways)).source(), "compute_80").decode()
        assert len(re.findall(r"cp\.async\.cg\.shared\.global \[%r\d+\], \[%rd\d+\], 16, %r\d+;", ptx)) == 2 * pieces
        assert len(re.findall(r"cp\.async\.ca\.shared\.global \[%r\d+\], \[%rd\d+\], 4, %r\d+;", ptx)) == 2 * elements
        assert ptx.count("cp.async.wait_all") == ptx.count("bar.sync") == 1


def test_pieces_are_one_access() -> None:
    """Of 16 bytes: a product stores results, a scan and an optimizer read and store, a scatter does so with rows."""
    product = contract_kernel(BINARY32, BINARY32, ("f32", "f32"), "f32")
    found = {text.name.split("_")[0]: text for text in texts() if re.search(r"_(l128p4|p4)$", text.name)}
    found |= {"contract": contraction._text(Tile(product, 8, stored=4)), "several": optimizers()[0]}
    # A scan reads two pieces before its lines' first elements, and two while it computes.
    expected = {"contract": (0, 16), "scan": (4, 2), "scatter": (5, 1), "several": (4, 3)}
    for name, counts in expected.items():
        ptx = driver.intermediate(found[name].source(), "compute_80").decode()
        pieces = [re.findall(rf"{access}(?:\.nc|\.wb)?\.v4\.[fbu]32", ptx) for access in ("ld.global", "st.global")]
        assert tuple(map(len, pieces)) == counts, name


def test_an_error_of_the_compiler_is_shown() -> None:
    with pytest.raises(FxroundError, match=r"NVRTC cannot compile a kernel for sm_90: (.|\n)*nonsense"):
        compiled("nonsense", "sm_90")


def test_an_old_gpu_is_refused() -> None:
    assert architecture((9, 0)) == "sm_90"
    with pytest.raises(FxroundError, match=r"capability 6\.1; fxround needs 7\.5 or later"):
        architecture((6, 1))


@pytest.mark.parametrize(
    "capability, slow",
    [((7, 5), True), ((8, 0), False), ((8, 9), True), ((9, 0), False), ((10, 0), False), ((12, 0), True)],
)
def test_what_gpus_can_do(capability: tuple[int, int], slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    launcher, device = driver.DeviceLauncher(), torch.device("cuda", 0)
    assert launcher.has_slow_binary64(device) is slow
    assert launcher.copies_async(device) is (capability != (7, 5))
    for forced in ("slow", "fast"):
        monkeypatch.setenv(driver.FORCE_BINARY64, forced)
        assert launcher.has_slow_binary64(device) is (forced == "slow")
    monkeypatch.setenv(driver.FORCE_BINARY64, "no")
    with pytest.raises(FxroundError, match="FXROUND_CUDA_BINARY64 is 'no'; expected 'slow', 'fast', or nothing"):
        launcher.has_slow_binary64(device)


def test_a_missing_gpu_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|cuda|NVIDIA driver"):
        launch(texts()[0], 1, [], torch.device("cuda", 0))


class Driver:
    """What ``DeviceLauncher`` asks of a driver: it keeps the values that a launch passes by address."""

    class CUresult:
        CUDA_SUCCESS = "success"

    def __init__(self, status: Any = CUresult.CUDA_SUCCESS) -> None:
        self.status, self.version = status, 13_000
        self.launches: list[Any] = []

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        return self.CUresult.CUDA_SUCCESS, self.version

    def cuCtxGetCurrent(self) -> tuple[Any, int]:
        return self.CUresult.CUDA_SUCCESS, 1

    def cuLaunchKernel(self, function: int, *rest: int) -> tuple[Any]:
        *grid, shared, stream, parameters, extra = rest
        addresses = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        first = ctypes.cast(addresses[0], ctypes.POINTER(ctypes.c_int64))[0]
        self.launches.append((function, tuple(grid), shared, stream, extra, first))
        return (self.status,)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine that says that it has a GPU, up to its driver."""
    found = SimpleNamespace(driver=Driver(), capturing=False, loaded=[])

    def load(code: bytes) -> Any:
        found.loaded.append(code)
        return SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=4096))

    monkeypatch.setattr(driver, "_bindings", lambda: found.driver)
    monkeypatch.setattr(driver, "_version", lambda: "13.0")
    monkeypatch.setattr("cuda.core.ObjectCode", SimpleNamespace(from_cubin=load, from_ptx=load))
    for name, value in {
        "device": lambda index: contextlib.nullcontext(),
        "current_stream": lambda index: SimpleNamespace(cuda_stream=77),
        "current_device": lambda: 0,
        "get_device_capability": lambda index: (9, 0),
        "is_current_stream_capturing": lambda: found.capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def test_a_launch_passes_grid_stream_and_arguments(gpu: SimpleNamespace) -> None:
    launcher, text = driver.DeviceLauncher(), texts()[-1]
    for index in (None, 0, 1, 1):
        device = torch.device("cuda") if index is None else torch.device("cuda", index)
        launcher.launch(text, 5, [ctypes.c_int64(42), ctypes.c_void_p(8)], device)
    assert gpu.driver.launches == [(4096, (5, 1, 1, text.threads, 1, 1), 0, 77, 0, 42)] * 4
    # Once for each device.
    assert len(gpu.loaded) == 2 and all(code.startswith(b"\x7fELF") for code in gpu.loaded)


def test_a_binary_is_kept_on_disk(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under the architecture and NVRTC's version: another process, or another device of the kind, compiles nothing."""
    text = iterations._text()
    texts_compiled: list[str] = []
    compile = driver.compiled
    monkeypatch.setattr(driver, "compiled", lambda source, arch: texts_compiled.append(arch) or compile(source, arch))
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "cache"))
    for capability in ((9, 0), (9, 0), (8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, found=capability: found)
        driver.DeviceLauncher().launch(text, 1, [ctypes.c_int64(1)], torch.device("cuda", 0))
    monkeypatch.setattr(driver, "_version", lambda: "13.9")
    driver.DeviceLauncher().launch(text, 1, [ctypes.c_int64(1)], torch.device("cuda", 0))
    assert texts_compiled == ["sm_90", "sm_80", "sm_90"]
    assert len(gpu.loaded) == 5


def test_an_old_driver_is_named(gpu: SimpleNamespace) -> None:
    gpu.driver.version = 12_080
    with pytest.raises(FxroundError, match=r"one for CUDA 12\.8, and .* NVRTC 13\.0: install a driver for CUDA 13 or"):
        driver.DeviceLauncher().launch(iterations._text(), 1, [], torch.device("cuda", 0))
    assert not gpu.loaded


def test_without_the_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(FxroundError, match=r"need the packages cuda-core and NVRTC .*pip install 'fxround\[cuda\]'"):
        driver._bindings.__wrapped__()


def test_a_gpu_that_nvrtc_does_not_know_gets_ptx(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = max(driver._known())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (newest // 10 + 1, 0))
    driver.DeviceLauncher().launch(texts()[-1], 1, [ctypes.c_int64(1)], torch.device("cuda", 0))
    (code,) = gpu.loaded
    assert f".target sm_{newest}".encode() in code and texts()[-1].name.encode() in code
    assert len(gpu.driver.launches) == 1


def test_faults_in_machine_code_are_found() -> None:
    exact, product = Text("exact_1", lambda: "x + y"), Text("product_1", lambda: "__fmaf_rn(a, b, c)")
    listing = "\n".join(
        f"\t.section\t.text.{name},\n        /*0000*/  {operation} R1, R2, R3, R4 ;"
        for name, operation in (
            ("exact_1", "FADD"),
            ("product_1", "FFMA"),
            ("exact_1", "@P0 FFMA"),
            ("product_1", "DFMA.RZ"),
            ("product_1", "FMUL.FTZ"),
        )
    )
    fused, flushed = faults_of(listing, [exact, product])
    assert fused.startswith("exact_1 fuses a product and a sum") and flushed.startswith("product_1 flushes subnormal")


@pytest.mark.parametrize("status, said", [(0, "clean"), (9, "Invalid __global__ read\n")])
def test_what_the_sanitizer_says_is_kept(
    status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\necho Invalid __global__ read\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert sanitized() == {"memcheck": said, "racecheck": said}
    assert (tmp_path / "calls").read_text().count("-m fxround selftest --device cuda") == 2


def test_a_first_launch_inside_of_a_capture_is_an_error(gpu: SimpleNamespace) -> None:
    gpu.capturing = True
    with pytest.raises(FxroundError, match=r"never launched on cuda:0, and a CUDA graph is being captured: run the"):
        driver.DeviceLauncher().launch(iterations._text(), 1, [], torch.device("cuda", 0))
    assert not gpu.loaded


def test_a_failed_launch_is_named(gpu: SimpleNamespace) -> None:
    gpu.driver = Driver(SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"))
    with pytest.raises(FxroundError, match=r"the launch of iterations_1 on cuda:0 with 3 blocks failed: CUDA_ERROR_"):
        driver.DeviceLauncher().launch(iterations._text(), 3, [ctypes.c_int64(1)], torch.device("cuda", 0))


def test_the_doctor_says_whether_a_gpu_can_be_used(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    assert "a GPU: usable" in str(diagnose())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (6, 1))
    assert diagnose().gpus == {"cuda:0, a GPU": "this GPU has compute capability 6.1; fxround needs 7.5 or later"}
    gpu.driver.version = 12_040
    assert "install a driver for CUDA 13 or later" in diagnose().gpus["cuda:0, a GPU"]


@pytest.mark.parametrize("built, said", [(None, "one without CUDA"), ("13.0", "nvidia-smi")])
def test_where_there_is_no_gpu(built: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and the benchmark say what is missing."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        assert cli.main(["selftest", "--device", "cuda"]) == benchmark([]) == 2
    assert output.getvalue().count(said) == 2
    assert said in str(diagnose())
