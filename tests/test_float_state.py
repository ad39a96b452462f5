"""A thread that flushes subnormal numbers, or does not round to nearest, is refused."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxround
from fxround.errors import FxroundError
from fxround.float_state import require_ieee_arithmetic

POLICY = {"policy": "reproducible"}
# Toward minus infinity, toward plus infinity, toward zero, as fesetround of the C library counts them.
MODES = {"x86_64": (0x400, 0x800, 0xC00), "aarch64": (0x800000, 0x400000, 0xC00000)}


@contextmanager
def flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush subnormals")
def test_every_way_into_a_graph_refuses_a_thread_that_flushes(tmp_path: Path) -> None:
    model, x = nn.ReLU(), torch.tensor([1e-42, 1.0], requires_grad=True)
    compiled = fxround.compile(model, "reproducible")
    y = compiled(x)
    loaded = fxround.load(compiled.export(tmp_path / "relu.pt2", x.detach()))
    elsewhere = torch.compile(nn.ReLU(), backend="fxround", options=POLICY)
    elsewhere(x)
    ways: list[Callable[[], Any]] = [
        lambda: compiled(x),
        lambda: compiled.evaluate(x),
        lambda: list(compiled.observe(x)),
        lambda: y.sum().backward(),
        lambda: loaded(x.detach()),
        lambda: elsewhere(x),
        lambda: fxround.compile(nn.ReLU(), "reproducible")(x),
        lambda: fxround.compile(nn.ReLU(), "reproducible", example_inputs=x),
    ]
    for way in ways:
        with flushing(), pytest.raises(FxroundError, match="subnormal numbers as zero"):
            way()
    assert compiled(x).view(torch.int32)[0] == x.view(torch.int32)[0] != 0


def test_another_rounding_of_the_processor_is_refused() -> None:
    library = ctypes.CDLL(None)
    for mode in MODES[platform.machine()]:
        assert library.fesetround(mode) == 0
        try:
            told = None
            try:
                require_ieee_arithmetic()
            except FxroundError as error:
                told = str(error)
        finally:
            library.fesetround(0)
        assert told is not None and "does not round to the nearest" in told
    require_ieee_arithmetic()
