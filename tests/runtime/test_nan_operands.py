"""A NaN of any payload stays a NaN in products, sums, scans and scatters, whatever the precision of their steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxround import Policy, Rule, compile

# Quiet and signalling NaNs of both signs, among them the payload of ones.
CODES = {
    torch.float32: [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF],
    torch.float16: [0x7FFF, -1],
}
INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16}
STEPS = ["bfloat16", "bfloat16/stochastic", "bfloat16/toward_positive", "tf32", "binary16", "binary32/up_down"]
STEPS += ["bfloat16 chunk=4 combine=binary32"]

ARGUMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "left factor": lambda x: x[None] @ torch.ones(len(x), 3, dtype=x.dtype),
    "right factor": lambda x: torch.ones(3, len(x), dtype=x.dtype) @ x[:, None],
    "convolution": lambda x: torch.conv1d(x[None, None], torch.ones(1, 1, len(x), dtype=x.dtype)),
    "sum": lambda x: x.sum(),
    "cumsum": lambda x: x.cumsum(0)[-1],
    "prod": lambda x: x.prod(),
    "scatter": lambda x: torch.zeros(2, dtype=x.dtype).scatter_add(0, torch.zeros(len(x), dtype=torch.int64), x)[0],
}


@pytest.mark.part(without=("convolution", "left factor"))
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_nan_stays_a_nan(name: str) -> None:
    chunked = name in ("left factor", "right factor", "convolution")
    for dtype, codes in CODES.items():
        x = torch.ones(40, dtype=dtype)
        captured = compile(ARGUMENTS[name], "identity", example_inputs=(x,))
        for step in STEPS if chunked else dict.fromkeys(step.split()[0] for step in STEPS):
            compiled = captured.with_policy(Policy("steps", (Rule(rounding=dtype, accumulate=step),)))
            for code in codes:
                for place in (0, 39):
                    bits = x.view(INTEGERS[dtype]).clone()
                    bits[place] = code
                    result = compiled(bits.view(dtype))
                    assert result.isnan().all(), (step, dtype, hex(code), place, result)
