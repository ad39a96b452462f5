"""Small tables in LLVM, of every width and number of entries, on every instruction set of this host."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from llvmlite import ir

from fxround.numerics.arithmetic.scalar import Function, lookup, param
from fxround.runtime.cpu.llvm.engine import compile_module, instruction_sets
from fxround.runtime.cpu.llvm.lookups import definitions
from fxround.runtime.cpu.llvm.loops import PTR, define, load_vector, store_vector
from fxround.runtime.cpu.llvm.render import emit


def looked_up(count: int, lanes: int) -> tuple[str, Function]:
    """The text of ``look(x, out)`` for a number of lanes, and its meaning."""
    x = param("x", "u32")
    function = Function("f", (x,), (lookup(x, [(j * 0x9E3779B9) % 2**32 for j in range(count)]),))
    module = ir.Module("lookups")
    b, a = define(module, "look", [("x", PTR), ("out", PTR)])
    (found,) = emit(function, b, [b.bitcast(load_vector(b, a["x"], "f32", lanes), vector(lanes))], lanes)
    store_vector(b, found, a["out"], "f32", lanes)
    b.ret_void()
    return str(module), function


def vector(lanes: int) -> ir.Type:
    return ir.IntType(32) if lanes == 1 else ir.VectorType(ir.IntType(32), lanes)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("lanes", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("count", [2, 16, 32, 64])
def test_every_lane_finds_its_entry(isa: str, lanes: int, count: int) -> None:
    text, function = looked_up(count, lanes)
    look = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(compile_module(text, ("look",), isa)["look"])
    for seed in range(4):
        index = np.random.default_rng(seed).integers(0, 2**32, lanes, dtype=np.uint32)
        out = np.zeros(lanes, np.uint32)
        look(index.ctypes.data, out.ctypes.data)
        np.testing.assert_array_equal(out, function.evaluate(index)[0])


def test_a_module_without_tables_needs_no_definitions() -> None:
    assert definitions("define void @f() { ret void }", wide=False) == ""
