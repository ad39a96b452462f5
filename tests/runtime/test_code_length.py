"""Compiled code stays short, measured by the number of kernels and the length of their texts, never by time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fxround
from fxround.graph.dtypes import STORAGES
from fxround.kernels import from_text
from fxround.kernels import long_programs as parts_of_programs
from fxround.passes.optimizations.fuse import MAX_OPERATORS
from fxround.runtime.cpu import code, contraction, long_programs, planes, pointwise
from fxround.runtime.cpu.llvm.engine import compile_module

convolution = torch.ops.fxround.convolution.default
input_gradient = torch.ops.fxround.convolution_input_gradient.default
weight_gradient = torch.ops.fxround.convolution_weight_gradient.default

RNG = torch.tensor([3, 1])
# LLVM takes less than 3 s for so many characters of a contraction, and of straight-line code for five times as many.
MOST = 600_000
MOST_STRAIGHT = 5 * MOST


@contextmanager
def emitted() -> Iterator[list[str]]:
    """The texts that LLVM would compile inside the block, in which every kernel is built again and does nothing."""
    found: list[str] = []
    nothing = compile_module("define void @nothing() { ret void }", ("nothing",))["nothing"]

    def address(digest: str, build: Callable[[Any], str], subject: Any, name: str, isa: str) -> int:
        found.append(build(subject))
        return nothing

    pointwise.map_call.cache_clear()
    # On one thread, so that no code of threads is among the texts.
    with (
        mock.patch.object(code, "_address", address),
        mock.patch.object(code, "_CODE", {}),
        mock.patch.object(torch, "get_num_threads", return_value=1),
    ):
        yield found
    for known in (
        pointwise.map_call,
        long_programs._call,
        planes._planned,
        contraction._packed,
        contraction._direct,
    ):
        known.cache_clear()


@pytest.mark.parametrize("accumulate", ["binary32/nearest_even", "binary32/stochastic"])
def test_the_code_of_a_convolution_does_not_grow_with_kernel_and_stride(accumulate: str) -> None:
    call = (accumulate, "binary32/nearest_even/inf", RNG, 1)
    with emitted() as found:
        for size, stride in ((16, 16), (64, 64), (64, 5)):
            x, w = torch.randn(1, 2, 17 * stride + size), torch.randn(2, 1, size)
            rest = ([stride], [0], [1], False, [0], 2, *call)
            y = convolution(x, w, *rest)
            input_gradient(y, w, list(x.shape), *rest)
            weight_gradient(y, x, list(w.shape), *rest)
        convolution(
            torch.randn(1, 1, 8, 64, 64),
            torch.randn(1, 1, 2, 16, 16),
            [2, 9, 9],
            [0] * 3,
            [1] * 3,
            False,
            [0] * 3,
            1,
            *call,
        )
    assert found and max(map(len, found)) < MOST
    # Strides of one and two have code of their own; every other one shares it, whatever the kernel's size.
    assert len(found) <= 5


def program(statements: int, rounding: str, operators: tuple[str, ...]) -> str:
    """A chain of operators, each on what the one before returned."""

    def one(i: int) -> str:
        more = {"add": ", x1", "mul": f", {float(1 + i % 97).hex()}"}.get(operators[i % len(operators)], "")
        return f"t{i} = {operators[i % len(operators)]}({f't{i - 1}' if i else 'x0'}{more}) @ {rounding}"

    return "; ".join(map(one, range(statements)))


@pytest.mark.parametrize("rounding", ["binary32/stochastic/inf", "bfloat16/nearest_even/inf"])
def test_a_program_of_many_statements_is_compiled_by_kinds_of_statement(rounding: str) -> None:
    x, y = torch.rand(2, 70)
    with emitted() as found:
        torch.ops.fxround.pointwise([x, y], program(900, rounding, ("add", "mul", "digamma")), torch.float32, RNG, 4)
    assert len(found) <= 4 and max(map(len, found)) < MOST_STRAIGHT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_parts_of_a_program_have_the_bits_of_the_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rounding = {torch.bfloat16: "bfloat16/stochastic/inf", torch.float64: "binary64/stochastic/inf"}[dtype]
    nearest = rounding.replace("stochastic", "nearest_even")
    text = program(5, rounding, ("add", "mul"))
    text += f"; t5 = relu(t4) @ exact; t6 = neg(t4) @ exact; t7 = add(t5, t0) @ {nearest}"
    x, y = torch.randn(5, 1, 40).to(dtype), torch.randn(1, 3, 1).to(dtype)
    stored = STORAGES[dtype]
    numbers = list(range(20, 25))

    def both() -> list[Any]:
        parts_of_programs.is_long.cache_clear()
        one = torch.ops.fxround.pointwise([x, y], text, dtype, RNG, 4)
        named = torch.ops.fxround.fused(
            [x, y], text + "; return t5, t3, t7", f"{stored} {stored} {stored}", RNG, numbers
        )
        return [one, *named]

    whole = both()
    monkeypatch.setattr(parts_of_programs, "MOST", 0)
    monkeypatch.setattr(from_text, "pointwise", None)
    apart = both()
    parts_of_programs.is_long.cache_clear()
    assert [t.shape for t in apart] == [(5, 3, 40)] * 4
    for a, b in zip(whole, apart, strict=True):
        assert a.dtype == b.dtype == dtype and torch.equal(
            a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
        )


def test_a_chain_of_long_functions_becomes_several_programs() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(9):
                x = torch.lgamma(x + 2.0)
            return x

    rounded = fxround.compile(Chain(), "stochastic")
    with emitted():
        rounded(torch.rand(3, 5))
    found = [n.args[1] for n in rounded._called().fused.graph.nodes if n.target is torch.ops.fxround.fused.default]
    lengths = [len(from_text.fused(text, ("f32",), "f32").body.schedule) for text in found if isinstance(text, str)]
    assert len(lengths) > 1 and max(lengths) <= 1.1 * MAX_OPERATORS
