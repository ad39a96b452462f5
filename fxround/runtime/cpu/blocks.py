"""The largest finite magnitude of each block, and scales as wide as the elements, on the CPU.

Nothing here rounds: PyTorch's own kernels copy and take maxima, which are exact in any order, of magnitudes from which
a kernel has removed NaNs and infinities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxround.graph.dialect.blocks import BlockExpand, BlockMaximum
from fxround.kernels import parsed
from fxround.runtime.cpu import buffers
from fxround.runtime.cpu.pointwise import NO_KEY, run_kernel, storage_of


def block_maximum(call: BlockMaximum[Tensor]) -> Tensor:
    """The largest finite magnitude of each block; 0 for a block without one."""
    storage = storage_of(call.x, "block_maximum's operand")
    blocks, x = call.blocks(), call.x.detach()
    result = buffers.empty(blocks, x.dtype)
    if not x.numel():
        return result.zero_()
    # A NaN compares false.
    most = float(torch.finfo(x.dtype).max).hex()
    finite = f"t0 = abs(x0) @ exact; t1 = where_le(t0, {most}, t0, 0x0p+0) @ exact"
    (magnitudes,) = run_kernel(parsed.pointwise(finite, (storage,), storage), [x], NO_KEY)
    for d, (count, n) in enumerate(zip(blocks, call.sizes, strict=True)):
        if n == 0:
            magnitudes = magnitudes.amax(d, keepdim=True)
        elif n > 1:
            n = min(n, x.shape[d])
            magnitudes = _padded(magnitudes, d, count * n).unflatten(d, (count, n)).amax(d + 1)
    return result.copy_(magnitudes)


def _padded(x: Tensor, d: int, length: int) -> Tensor:
    """x with zeros after its end in dimension d."""
    more = length - x.shape[d]
    return torch.cat([x, x.new_zeros([*x.shape[:d], more, *x.shape[d + 1 :]])], d) if more else x


def block_expand(call: BlockExpand[Tensor]) -> Tensor:
    """The scale of each element of x's; a dimension that is one block keeps the size 1."""
    storage_of(call.scales, "block_expand's scales")
    size, scales = call.size(), call.scales.detach()
    result = buffers.empty(size, scales.dtype)
    if not result.numel():
        return result
    split: list[int] = []
    for length, n in zip(size, call.sizes, strict=True):
        n = min(n, length)
        split += [length // n, n] if n > 1 and length % n == 0 else [length]
        if n > 1 and length % n == 0:
            scales = scales.unsqueeze(len(split) - 1)
        elif n > 1:
            d = len(split) - 1
            scales = scales.repeat_interleave(n, d).narrow(d, 0, length)
    result.view(split).copy_(scales.expand(split))
    return result
