"""The largest finite magnitude of each block, on the CPU.

A maximum is exact in any order, so that PyTorch's own kernels compute it: they round nothing, and NaNs and infinities
are taken out before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxround.graph.dialect.blocks import BlockMaximum
from fxround.runtime.cpu import buffers
from fxround.runtime.cpu.pointwise import storage_of


def block_maximum(call: BlockMaximum[Tensor]) -> Tensor:
    """For each element, the largest finite magnitude in its block; 0 in a block without one."""
    storage_of(call.x, "block_maximum's operand")
    size = call.require()
    x = call.x.detach()
    if not x.numel():
        return buffers.empty(size, x.dtype).zero_()
    magnitudes = x.abs()
    # A NaN compares false.
    magnitudes = torch.where(magnitudes <= torch.finfo(x.dtype).max, magnitudes, 0)
    for d, n in enumerate(call.sizes):
        if n == 0:
            magnitudes = magnitudes.amax(d, keepdim=True)
        elif n > 1:
            magnitudes = _along(magnitudes, d, n)
    return buffers.empty(size, x.dtype).copy_(magnitudes.expand(size))


def _along(x: Tensor, d: int, n: int) -> Tensor:
    """The maxima of blocks of n elements along dimension d, each as often as the block has elements."""
    length = x.shape[d]
    n = min(n, length)
    count = -(-length // n)
    if count * n > length:
        x = torch.cat([x, x.new_zeros([*x.shape[:d], count * n - length, *x.shape[d + 1 :]])], d)
    found = x.unflatten(d, (count, n)).amax(d + 1, keepdim=True)
    each: Tensor = found.expand(*found.shape[: d + 1], n, *found.shape[d + 2 :]).flatten(d, d + 1)
    return each.narrow(d, 0, length)
