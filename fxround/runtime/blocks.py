"""Figures of each block, and scales as wide as the elements, on any device.

PyTorch's own kernels copy, sort and take maxima, which are exact in any order, of magnitudes from which a kernel has
removed NaNs and infinities. Only a sum rounds, once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import torch
from torch import Tensor

from fxround.graph.dialect.blocks import BlockExpand, BlockMaximum, BlockPercentile, BlockSum, HadamardTransform
from fxround.graph.dialect.contractions import Matmul
from fxround.graph.dtypes import FORMAT_OF
from fxround.kernels import from_text
from fxround.kernels.blocks import MAXIMA
from fxround.kernels.kinds import Exact
from fxround.numerics.arithmetic.hadamard import hadamard_matrix
from fxround.numerics.formats.hadamard import Hadamard
from fxround.runtime import buffers
from fxround.runtime.draw import NO_KEY, Draw
from fxround.runtime.memo import by_bytes
from fxround.runtime.operands import storage_of
from fxround.runtime.run import run_blocks, run_exact, run_kernel, run_matmul

# The elements of a part of a tensor that is one block.
_PART: Final = 1 << 12


def block_maximum(call: BlockMaximum[Tensor]) -> Tensor:
    """The largest finite magnitude of each block; 0 for a block without one."""
    blocks, x = call.blocks(), call.x.detach()
    if not x.numel():
        return buffers.empty(blocks, x.dtype, x.device).zero_()
    one = not any(call.sizes) and x.is_contiguous()
    maxima = run_blocks(MAXIMA, None, x.view(-1) if one else x, [_PART] if one else call.sizes)
    if maxima is not None and not one and maxima.dtype == x.dtype:
        return maxima
    result = buffers.empty(blocks, x.dtype, x.device)
    if maxima is not None:
        result.copy_(maxima.amax() if one else maxima)
        buffers.release(maxima)
        return result
    magnitudes = _magnitudes(x, 0.0)
    for d, (count, n) in enumerate(zip(blocks, call.sizes, strict=True)):
        if n == 0:
            magnitudes = magnitudes.amax(d, keepdim=True)
        elif n > 1:
            n = min(n, x.shape[d])
            magnitudes = _padded(magnitudes, d, count * n).unflatten(d, (count, n)).amax(d + 1)
    return result.copy_(magnitudes)


def block_percentile(call: BlockPercentile[Tensor]) -> Tensor:
    """The least finite magnitude of a block that a percentage of them do not exceed; 0 if there is none."""
    blocks, x = call.blocks(), call.x.detach()
    result = buffers.empty(blocks, x.dtype, x.device)
    if not x.numel():
        return result.zero_()
    # What is not finite, or after the end, comes last.
    ordered = _blocked(_magnitudes(x, math.inf), call.sizes, blocks, math.inf).sort(-1).values
    counts = ordered.isfinite().sum(-1)
    percent = Fraction(call.percentile)
    places = _ranks(counts, percent.numerator, 100 * percent.denominator, ordered.shape[-1])
    chosen = ordered.gather(-1, places.unsqueeze(-1)).squeeze(-1)
    return result.copy_(torch.where(counts > 0, chosen, 0.0))


def _ranks(counts: Tensor, numerator: int, denominator: int, most: int) -> Tensor:
    """max(0, ceil(n numerator / denominator) - 1) for counts n of at most ``most``."""
    if most * numerator + denominator < 1 << 63:
        return ((counts * numerator + (denominator - 1)).div(denominator, rounding_mode="floor") - 1).clamp(min=0)
    exact = {n: max(0, -(-n * numerator // denominator) - 1) for n in counts.unique().tolist()}
    return counts.cpu().apply_(exact.__getitem__).to(counts.device)


def block_sum(call: BlockSum[Tensor]) -> Tensor:
    """The exact sum of each block, rounded once to nearest."""
    blocks, x = call.blocks(), call.x.detach()
    own = f"{FORMAT_OF[x.dtype]}/nearest_even/inf"
    kernel = from_text.total("exact", own, own, storage_of(x, "block_sum's operand"))
    assert isinstance(kernel, Exact)
    elements = _blocked(x, call.sizes, blocks, 0.0)
    return run_exact(kernel, elements, Draw(), (len(blocks),))


def hadamard(call: HadamardTransform[Tensor]) -> Tensor:
    """Each ``size`` consecutive elements along ``dim`` times a matrix, by the kernel of products."""
    storage_of(call.x, "hadamard's operand")
    call.require()
    x = call.x.detach().movedim(call.dim, -1)
    whole = x.shape[-1] - x.shape[-1] % call.size
    matrix = _matrix(call.size, call.seed, x.dtype, x.device)
    steps = "binary64/nearest_even/inf" if x.dtype == torch.float64 else "binary32/nearest_even/inf"
    own, rng = f"{FORMAT_OF[x.dtype]}/nearest_even/inf", torch.zeros(2, dtype=torch.int64)
    rows = x[..., :whole].reshape(-1, call.size)
    product = run_matmul(Matmul(rows, matrix, steps, own, rng, 0))
    result = buffers.empty(call.x.shape, x.dtype, x.device)
    last = result.movedim(call.dim, -1)
    last[..., :whole] = product.view(*x.shape[:-1], whole)
    last[..., whole:] = x[..., whole:]
    return result


@by_bytes(1 << 24)
def _matrix(size: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(hadamard_matrix(Hadamard(size, seed))).to(device, dtype)


def _magnitudes(x: Tensor, other: float) -> Tensor:
    """The magnitudes of finite elements, and ``other`` in place of infinities and NaNs."""
    storage = storage_of(x, "an operand in blocks")
    # A NaN compares false.
    most = float(torch.finfo(x.dtype).max).hex()
    finite = f"t0 = abs(x0) @ exact; t1 = where_le(t0, {most}, t0, {other.hex()}) @ exact"
    (magnitudes,) = run_kernel(from_text.pointwise(finite, (storage,), storage), [x], NO_KEY)
    return magnitudes


def _blocked(x: Tensor, sizes: Sequence[int], blocks: Sequence[int], fill: float) -> Tensor:
    """The elements of each block along a last dimension that is added; ``fill`` after the end of x."""
    dims = len(blocks)
    for d, (count, n) in reversed(list(enumerate(zip(blocks, sizes, strict=True)))):
        n = min(n, x.shape[d]) or x.shape[d]
        x = _padded(x, d, count * n, fill).unflatten(d, (count, n))
    return x.permute([*range(0, 2 * dims, 2), *range(1, 2 * dims, 2)]).flatten(dims)


def _padded(x: Tensor, d: int, length: int, fill: float = 0.0) -> Tensor:
    """x with ``fill`` after its end in dimension d."""
    more = length - x.shape[d]
    return torch.cat([x, x.new_full([*x.shape[:d], more, *x.shape[d + 1 :]], fill)], d) if more else x


def block_expand(call: BlockExpand[Tensor]) -> Tensor:
    """The scale of each element of x's; a dimension that is one block keeps the size 1."""
    storage_of(call.scales, "block_expand's scales")
    size, scales = call.size(), call.scales.detach()
    result = buffers.empty(size, scales.dtype, scales.device)
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
