"""The random states of a loop's iterations where (seed, sample) is on a CUDA device: nothing waits for the device."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from fxround.graph.dialect import Iterations
from fxround.numerics.arithmetic.randomness import iteration_function
from fxround.runtime import buffers
from fxround.runtime.cuda.arguments import count, key_of
from fxround.runtime.cuda.cpp.common import KEY, global_, preamble
from fxround.runtime.cuda.cpp.contract import SHAPE
from fxround.runtime.cuda.cpp.table import device_function
from fxround.runtime.cuda.launcher import Text, launch
from fxround.runtime.draw import Draw

_BODY: Final = """\
  for (u64 i = first_item(); i < count; i += item_step()) {
    u32 low, high;
    iteration_seed((u64)counters[i], key.seed_low, key.seed_high, key.sample, key.node, low, high);
    out[2 * i] = (i64)((u64)low | (u64)high << 32);
    out[2 * i + 1] = key.sample;
  }
"""


@cache
def _text() -> Text:
    """The text; its name says of which version of the function."""
    function = iteration_function()
    parameters = ["const u64 count", "i64* __restrict__ out", "const i64* __restrict__ counters", KEY]

    def source() -> str:
        return preamble(SHAPE) + device_function(function) + global_("iterations_1", parameters, _BODY)

    return Text("iterations_1", source)


def iterations(call: Iterations[Tensor]) -> Tensor:
    """(seed, sample) of each iteration, on the device of the state. Counters there are not checked."""
    device, counters = call.rng.device, call.counters
    result = buffers.empty((*counters.shape, 2), torch.int64, device)
    if counters.numel():
        draw = Draw.unread(call.rng, call.node)
        key = key_of(draw.words((draw.node,)), draw.state, device)
        launch(_text(), counters.numel(), [count(counters.numel()), result, _placed(counters, device), *key], device)
    return result


def _placed(counters: Tensor, device: torch.device) -> Tensor:
    """Counters on the device. A copy from the CPU would wait; those of a loop are a number, or follow each other."""
    if counters.device == device:
        return counters.contiguous()
    if counters.is_cpu and counters.dim() < 2:
        first, length = int(counters.reshape(-1)[0]), counters.numel()
        if torch.equal(counters.reshape(-1), torch.arange(first, first + length)):
            return torch.arange(first, first + length, device=device)
    return counters.to(device).contiguous()
