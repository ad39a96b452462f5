"""Loading: an exported program as a module, without the model's source.

What is true here. A file that ``RoundedModule.export`` wrote holds the graph with every rounding in it, and (seed,
sample) as a buffer of a known name: what is loaded draws the bits that the exported module drew.

Why it is safe. A file without that buffer is no program of fxround, and refused.

    before   the class of the model, its weights, and the policy
    after    loaded = fxround.load("model.pt2"); loaded.reseed(0, sample=1); loaded(x)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxround.arithmetic import require_ieee_arithmetic
from fxround.dynamo import aside
from fxround.runtime.execute import Draw

RNG_BUFFER: Final = "fxround_rng"


def load(path: str | Path) -> LoadedModule:
    """The module that ``RoundedModule.export`` wrote: the same bits, without the model's source."""
    return LoadedModule(torch.export.load(path).module())


def random_state(seed: int, sample: int) -> Tensor:
    """The run-time tensor (seed, sample) that every lowered graph takes, int64 of shape [2]."""
    drawn = Draw(seed, sample)
    return torch.tensor([drawn.seed, drawn.sample], dtype=torch.int64)


def following(seed: int, sample: int, processes: int = 1) -> tuple[int, int]:
    """What (seed, sample) become after a training call of each process: 2^32 samples are a seed's."""
    return (seed, sample + processes) if sample + 2 * processes <= 1 << 32 else (seed + 1, 0)


class LoadedModule(nn.Module):
    """An exported program: callable, reseedable, without the model's source."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        if RNG_BUFFER not in dict(program.named_buffers()):
            raise ValueError(f"the file holds no program of fxround: it has no buffer {RNG_BUFFER!r}")
        self.program = program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the exported module computed, bit for bit."""
        require_ieee_arithmetic()
        with aside(), torch.no_grad():
            return self.program(*args, **kwargs)

    def reseed(self, seed: int, sample: int = 0) -> LoadedModule:
        """Set what the random bits are a function of; returns the module itself."""
        self.program.get_buffer(RNG_BUFFER).copy_(random_state(seed, sample))
        return self
