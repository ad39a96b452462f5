"""Kernels as AArch64 code: all shapes compile, and give this machine's bits where an emulator can run them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llvmlite import ir
from torch import Tensor

import fxround
from benchmarks import aarch64, emulation
from benchmarks.aarch64 import Case, differing, numbers
from fxround.kernels.program import Program
from fxround.runtime.cpu import pointwise, threads
from fxround.runtime.cpu.code import current_set
from fxround.runtime.cpu.llvm import engine, environment
from fxround.runtime.cpu.llvm.environment import Architecture
from fxround.runtime.cpu.llvm.loops import I32, PTR, at, define
from fxround.runtime.cpu.llvm.thread_pool import build_thread_pool
from fxround.runtime.run import run_map

# Cases that need every builder, and random bits, directions of rounding and tables.
SHAPES = (
    "rounding: bfloat16/stochastic of binary32",
    "layout: strided, bfloat16",
    "contraction: binary32/up_down",
    "reduction: sum, lanes:16, binary32/stochastic",
    "scan: cumsum, binary32/stochastic",
    "exact sum: binary32/stochastic",
    "scatter: binary32/stochastic",
    "convolution: depthwise convolution, stochastic",
    "row chain: softmax, stochastic",
)
FURTHER = (
    "arithmetic: fma @ binary32/toward_positive of binary32",
    "arithmetic: identity @ exact of binary32",
    "arithmetic: relu @ exact of binary64",
    "function: exp @ binary32/stochastic of binary32",
    "function: erf @ binary64/nearest_even of binary64",
    "layout: strided, e4m3fn",
    "layout: three statements and a mask",
    "layout: a product and a sum, not fused",
    "contraction: binary32/stochastic",
    "contraction: binary32/toward_negative",
)
# ``build_direct`` masks its loads, which NEON does not: no product takes it there.
BUILDERS = {
    *("build_map", "build_contract", "build_planes", "build_along", "build_across", "build_rows", "build_scan"),
    *("build_exact", "build_scatter", "build_launches", "build_team", "build_pad"),
}
DRAW = aarch64.DRAW
# What LLVM may call for copies and zeros: a part of every C library.
LIBRARY = {"memcpy", "memset", "memmove"}

needs_emulator = pytest.mark.skipif(bool(emulation.missing()), reason=emulation.missing() or "none")


def split_among_threads() -> list[Tensor]:
    """A map whose pieces are taken by the loop of a team."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        patch.setattr(pointwise, "ENOUGH", 64)
        return [
            run_map(Program.parse("t0 = mul(x0, x0) @ binary32/stochastic"), [numbers((999,), 1)], torch.float32, DRAW)
        ]


# The same objects for both tests: a case keeps the model that it has compiled.
CASES = {f"{case.kind}: {case.name}": case for case in aarch64.cases()}
THREADS = Case("threads", "pieces of a map", split_among_threads)


def test_every_kernel_compiles_for_aarch64() -> None:
    """Object code for AArch64, with no name left open but the C library's copies."""
    with emulation.compiled() as kernels:
        for case in (*(CASES[name] for name in SHAPES), THREADS):
            case.run()
    assert {kernel.builder for kernel in kernels} == BUILDERS
    for kernel in kernels:
        assert set(emulation.undefined_symbols(kernel.content)) <= LIBRARY, kernel.builder


@needs_emulator
@pytest.mark.parametrize(
    "case", [*(CASES[name] for name in SHAPES + FURTHER), THREADS], ids=lambda case: f"{case.kind}: {case.name}"
)
def test_aarch64_gives_the_bits_of_this_machine(case: Case) -> None:
    """Whatever floating-point environment its caller has: the runner's is a hostile one, and must be restored."""
    assert differing(case) == ""


@needs_emulator
def test_the_comparison_sees_a_bit() -> None:
    x = torch.tensor([1.0, -0.0])
    said = differing(Case("", "", lambda: [x.abs() if current_set() == emulation.SET else x]))
    assert said == "result 0: 1 of 2, at (1,) -0.0 here and 0.0 there"


@needs_emulator
def test_a_kernel_in_its_caller_s_environment_gives_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner's environment is hostile indeed."""
    x = numbers((100,), 1)
    declared, enter, leave = environment._WRITERS["aarch64"]

    def entered(direction: str, watched: bool) -> str:
        return re.sub(r".*@llvm\.aarch64\.set\.fpcr.*\n", "", enter(direction, watched))

    monkeypatch.setitem(environment._WRITERS, "aarch64", (declared, entered, leave))
    program = Program.parse("t0 = add(x0, 0x1.23456p-3) @ binary32")
    assert "here and" in differing(Case("", "", lambda: [run_map(program, [x], torch.float32, DRAW)]))


def loaded(build: Callable[[ir.IRBuilder, dict[str, Any]], None]) -> emulation.Remote:
    """The function that ``build`` fills, in the runner; its argument ``p`` is a pointer."""
    module = ir.Module("test")
    b, a = define(module, "test", [("p", PTR)])
    build(b, a)
    b.ret_void()
    runner = emulation.runner()
    return emulation.Remote(
        runner, runner.load(engine.object_for(str(module), emulation.SET, emulation.TRIPLE), "test")
    )


@needs_emulator
def test_a_kernel_reads_and_writes_this_process() -> None:
    memory = (ctypes.c_int32 * 3000)(*range(3000))

    def body(b: ir.IRBuilder, a: dict[str, Any]) -> None:
        for index in (0, 2999):
            place = at(b, a["p"], I32(index), I32)
            b.store(b.add(b.load(place, typ=I32), I32(7)), place)

    loaded(body)(memory)
    assert list(memory) == [7, *range(1, 2999), 3006]


@needs_emulator
def test_a_kernel_that_leaves_its_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    own = emulation.Runner()
    monkeypatch.setattr(emulation, "runner", lambda: own)
    touch = loaded(lambda b, a: b.store(I32(1), a["p"]))
    with pytest.raises(RuntimeError, match="the kernel left its operands"):
        touch(64)


@pytest.mark.parametrize(
    "architecture, sets, directed", [("aarch64", ("host", "neon"), True), ("other", ("host",), False)]
)
def test_instruction_sets_are_those_of_the_host_s_architecture(
    architecture: Architecture, sets: tuple[str, ...], directed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "host_architecture", lambda: architecture)
    monkeypatch.setattr(engine, "instruction_sets", engine.instruction_sets.__wrapped__)
    assert engine.instruction_sets() == sets
    machine = engine.machine_of.__wrapped__("host")
    assert (machine.vector_bytes, machine.directed) == (16, directed)


def test_a_set_of_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x86_64-unknown-linux-gnu cannot run 'neon' code; it is code of aarch64"):
        engine.object_for("", "neon", "x86_64-unknown-linux-gnu")
    other = "neon" if "neon" not in engine.instruction_sets() else "sse2"
    with (
        pytest.raises(ValueError, match=f"this host cannot run '{other}' code; it can: host, "),
        fxround.instruction_set(other),
    ):
        pass


def test_what_is_no_object_for_aarch64_is_refused() -> None:
    with pytest.raises(ValueError, match="no little-endian ELF object for AArch64"):
        emulation.undefined_symbols(engine.object_code("define void @f() {\n ret void\n}"))


def test_threads_of_the_emulator_are_one() -> None:
    before = torch.get_num_threads()
    with emulation.compiled():
        assert torch.get_num_threads() == 1 and threads._pool() == emulation.Alone()
    assert torch.get_num_threads() == before


def test_the_threads_of_a_pool_compile_for_aarch64() -> None:
    content = engine.object_for(build_thread_pool("aarch64"), emulation.SET, emulation.TRIPLE)
    assert emulation.undefined_symbols(content) == []
