"""``fxround.round``: round a tensor or an array eagerly.

The function runs the program ``t0 = identity(x0) @ R`` by the kernel that compiled graphs use. The carrier is binary64
for float64 operands and binary32 for all others, so that a float64 value is rounded once, from its own bits. A
gradient passes straight through, is zeroed where the rounding clamped, or is rounded itself (``numerics.gradients``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false

from fxround.capture.dynamo import aside
from fxround.capture.transforms import is_transformed
from fxround.eager.blocks import draws, in_blocks, operands_of_elements, pieces, reads_all
from fxround.errors import shown, type_of
from fxround.graph.dtypes import FORMAT_OF
from fxround.kernels.program import Program, Statement
from fxround.kernels.scaled import clamped_program, estimated_program
from fxround.locks import applied
from fxround.numerics.formats import Format, spelt
from fxround.numerics.formats.names import own_name
from fxround.numerics.formats.scaled import ScaledRounding, any_rounding
from fxround.numerics.formats.stored_bits import has_stored_bits, with_stored_bits
from fxround.numerics.gradients import STRAIGHT, Gradient, unclamped
from fxround.numerics.modes import Rounding
from fxround.runtime import buffers
from fxround.runtime.draw import Draw
from fxround.runtime.operands import storage_of
from fxround.runtime.run import run_map, run_part

FloatArray = npt.NDArray[np.floating[Any]]
RoundingLike = str | Rounding | ScaledRounding | Format | torch.dtype


def rounding_program(rounding: Rounding) -> Program:
    """Return the program that rounds its operand."""
    return Program((Statement("t0", "identity", ("x0",), rounding),))


@overload
def round(
    x: Tensor,
    rounding: RoundingLike,
    seed: int = 0,
    sample: int = 0,
    out: Tensor | None = None,
    gradient: RoundingLike | Gradient = STRAIGHT,
    dim: int | Sequence[int] | None = None,
) -> Tensor: ...


@overload
def round(
    x: FloatArray,
    rounding: RoundingLike,
    seed: int = 0,
    sample: int = 0,
    out: FloatArray | None = None,
    *,
    dim: int | Sequence[int] | None = None,
) -> FloatArray: ...


def round(
    x: Any,
    rounding: RoundingLike,
    seed: int = 0,
    sample: int = 0,
    out: Any = None,
    gradient: RoundingLike | Gradient = STRAIGHT,
    dim: int | Sequence[int] | None = None,
) -> Any:
    """Round every element of ``x`` to the values of a format.

    Args:
        x: a torch tensor (float32, float64, float16, bfloat16 or a float8 dtype), or a NumPy array or number (float32,
            float64 or float16 in any byte order), of any shape and strides.
        rounding: ``"format[/mode[/overflow]]"``, for example ``"e4m3fn/stochastic/saturate"``; a Rounding, a Format or
            a floating-point dtype, for example ``torch.bfloat16``; a table, ``fxround.table([-1, 0, 1])`` or ``"nf4"``;
            ``"sbits(10)"``, which is the format with 10 stored bits and the exponents of x's dtype; or a scaled format,
            for example ``"mxfp8"``, ``"nvfp4/stochastic"``, ``"int8:channel"``, ``"bfp(8,32)"``, ``"fixed(16,8)"``.
        seed: 0 to 2^63 - 1; sample: 0 to 2^32 - 1. The random bits of the stochastic modes are a function of (seed,
            sample, row-major index of the element).
        out: a tensor or array of x's type, shape and dtype that receives the result. It is x itself, or shares no
            memory with x.
        gradient: what happens to the gradient of a tensor: ``"straight_through"``; ``"zero_clamped"`` (zero where the
            rounding clamped); ``"estimate"`` (multiplied by the derivative of a smooth curve between the neighbours of
            each number: Wang et al., ICML 2025, with k = 5, at most 3); a rounding, which rounds the gradient with
            random bits of its own; or one of both and a rounding, for example ``"zero_clamped e5m2/stochastic"``. An
            element of a scaled format is clamped if its quotient by the scale, rounded as if elements had any size, is
            beyond the largest one. Factors and scales are constants to further derivatives.
        dim: the dimension along which the blocks of a scaled format run; for ``:channel``, the dimensions in which all
            elements share a scale. None: the last.

    Returns:
        A row-major tensor or array of x's shape and dtype, a NumPy number for one; ``out`` if it is passed.

    Raises:
        TypeError: for another type of operand, a masked array, an array of another dtype, or a ``dim`` of another type.
        IndexError: for a ``dim`` that the operand lacks.
        ValueError: for an unknown format or mode (the message names the nearest), a precision or range that the carrier
            cannot hold, ``"zero_clamped"`` for a rounding that clamps nothing, ``"estimate"`` for one to a table or a
            posit or with jitter, a ``dim`` where no format is scaled, an ``out`` of another shape or dtype, one that
            needs a gradient, and an ``out`` whose elements share memory with each other or with other elements of x.

    Example::

        fxround.round(torch.rand(3), "e5m2/stochastic/saturate", seed=1)
    """
    rounding, gradient = (_of_dtype(said, x) for said in (rounding, gradient))
    if isinstance(x, Tensor) and torch.compiler.is_compiling():
        return _traced(x, rounding, seed, sample, out, gradient, dim)
    with aside():
        return _rounded(x, rounding, seed, sample, out, gradient, dim)


def _of_dtype(said: Any, x: Any) -> Any:
    """Return a rounding with the formats of x's dtype in place of stored bits."""
    if not has_stored_bits(said) or not isinstance(x, Tensor | np.ndarray | np.generic):
        return said
    name = FORMAT_OF.get(x.dtype, str(x.dtype)) if isinstance(x, Tensor) else own_name(x.dtype.name)
    return with_stored_bits(said, name)


def _traced(x: Tensor, rounding: Any, seed: int, sample: int, out: Any, gradient: Any, dim: Any) -> Tensor:
    """Call ``round`` as an operator, which graphs hold."""
    if out is not None:
        raise ValueError("out= is for calls that run at once: leave it away where torch.compile traces")
    texts = [said if isinstance(said, str) else str(spelt(said)) for said in (rounding, gradient)]
    dims = [dim] if isinstance(dim, int) else dim
    return torch.ops.fxround.round_tensor(x, texts[0], seed, sample, texts[1], 0, dims)  # type: ignore[no-any-return]


def _dims(dim: Any) -> tuple[int, ...]:
    """Return the dimensions; TypeError for anything but ints, ValueError for none or one that is named twice."""
    dims = dim if isinstance(dim, list | tuple) else (-1 if dim is None else dim,)
    if not all(type(d) is int for d in dims):
        raise TypeError(f"dim is {shown(dim)}; expected an int, or several")
    if not dims or len(set(dims)) < len(dims):
        raise ValueError(f"dim is {shown(dim)}; expected at least one dimension, each once")
    return tuple(dims)


def _rounded(x: Any, rounding: RoundingLike, seed: int, sample: int, out: Any, gradient: Any, dim: Any) -> Any:
    parsed, how, dims = _parsed(rounding, gradient, dim)
    if isinstance(x, Tensor):
        _check_out(x, out, Tensor)
        if is_transformed() or (x.requires_grad and torch.is_grad_enabled()):
            if out is not None:
                raise ValueError("out= cannot be differentiated; detach x or leave out= away")
            return _differentiable(x, parsed, seed, sample, how, 0, dims)
        return _round_tensor(x, parsed, seed, sample, out, dims=dims)
    if not isinstance(x, np.ndarray | np.generic):
        raise TypeError(f"x is {type_of(x)}; expected a torch tensor or a NumPy array")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("x is a masked array, whose mask no rounding keeps; pass x.data, or x.filled()")
    if how != Gradient():
        raise ValueError(f"gradient = {str(how)!r}: a NumPy array has no gradient")
    _check_out(x, out, np.ndarray)
    rounded = _round_tensor(_as_tensor(np.asarray(x)), parsed, seed, sample, dims=dims).numpy()
    if out is None:
        # A number without dimensions that is no array is one again; an array has the byte order of x.
        return x.dtype.type(rounded) if isinstance(x, np.generic) else rounded.astype(x.dtype, copy=False)
    out[...] = rounded
    return out


def _parsed(rounding: Any, gradient: Any, dim: Any) -> tuple[Rounding | ScaledRounding, Gradient, tuple[int, ...]]:
    """Return a rounding, the treatment of its gradient and dimensions; ValueError for what ``round`` refuses."""
    parsed, how = any_rounding(rounding), Gradient.parse(gradient)
    if isinstance(parsed, ScaledRounding) and parsed.hadamard is not None:
        raise ValueError(f"{parsed.hadamard} transforms operands of products; round takes {parsed.format} without it")
    if refusal := how.refusal(parsed):
        raise ValueError(f"gradient = {str(how)!r}: {refusal}")
    if dim is not None and not any(isinstance(r, ScaledRounding) for r in (parsed, how.rounding)):
        raise ValueError(
            f"dim is {shown(dim)}: {parsed} is not scaled; leave dim away, or name a format such as 'mxfp8'"
        )
    return parsed, how, _dims(dim)


def _clamped(
    x: Tensor, rounding: Rounding | ScaledRounding, seed: int, sample: int, stream: int, dims: tuple[int, ...]
) -> Tensor:
    """Return where a rounding clamps an element."""
    if isinstance(rounding, Rounding):
        wide = _round_tensor(x, unclamped(rounding), seed, sample, stream=stream)
        return wide.abs() > rounding.format.maximum
    _, operands = operands_of_elements(x.resolve_neg(), rounding, dims)
    program = clamped_program(rounding, Format.parse(FORMAT_OF[x.dtype]))
    return run_map(program, operands, x.dtype, Draw(seed, sample, stream)) > 0


def _slopes(x: Tensor, rounding: Rounding | ScaledRounding, dims: tuple[int, ...]) -> Tensor:
    """Return the estimated derivative of a rounding at each element."""
    x = x.resolve_neg()
    operands = [x] if isinstance(rounding, Rounding) else operands_of_elements(x, rounding, dims)[1]
    return run_map(estimated_program(rounding, Format.parse(FORMAT_OF[x.dtype])), operands, x.dtype, Draw())


def _as_tensor(x: FloatArray) -> Tensor:
    native = x.dtype.newbyteorder("=")
    if native not in (np.float32, np.float64, np.float16):
        raise TypeError(f"x has dtype {x.dtype}; expected float16, float32 or float64")
    # A tensor has this machine's byte order, whole elements as strides, none of them negative, and is always writable.
    plain = x.flags.writeable and x.flags.aligned and all(s >= 0 and s % x.itemsize == 0 for s in x.strides)
    return torch.from_numpy(x if plain and x.dtype == native and x.dtype.isnative else x.astype(native))


def _check_out(x: Any, out: Any, kind: type[Any]) -> None:
    if out is None:
        return
    if kind is Tensor and isinstance(out, Tensor):
        storage_of(out.resolve_neg(), "out")
        if out.device != x.device:
            raise ValueError(f"out is on {out.device} and x on {x.device}; pass an out on the device of x")
    if not isinstance(out, kind) or out.shape != x.shape or out.dtype != x.dtype:
        got = f"{type(out).__name__} {getattr(out, 'dtype', '')} {tuple(getattr(out, 'shape', ()))}"
        raise ValueError(f"out is a {got}; expected {kind.__name__} {x.dtype} {tuple(x.shape)}, as x")
    strides = out.stride() if isinstance(out, Tensor) else [step // out.itemsize for step in out.strides]
    if _repeats(out.shape, strides):
        raise ValueError(f"out has elements that share memory (strides {tuple(strides)}); pass a tensor without them")
    if isinstance(out, Tensor):
        if out.requires_grad and torch.is_grad_enabled():
            raise ValueError("out= cannot be differentiated; pass a tensor that requires no gradient")
        if out.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError("out is an inference tensor, which is written in inference mode alone; pass a clone")


def _round_tensor(
    x: Tensor,
    rounding: Rounding | ScaledRounding,
    seed: int,
    sample: int,
    out: Tensor | None = None,
    stream: int = 0,
    dims: tuple[int, ...] = (-1,),
) -> Tensor:
    x = x.resolve_neg()
    storage_of(x, "x")
    compute = partial(_computed, rounding=rounding, draw=Draw(seed, sample, stream), dims=dims)
    if out is None:
        return compute(x)
    shared = _meet(x, out) and not (x.data_ptr() == out.data_ptr() and x.stride() == out.stride())
    if shared and all(map(is_non_overlapping_and_dense_or_false, (x, out))):
        raise ValueError("out shares some of x's memory, so that x would change while it is read; pass x.clone()")
    with torch.no_grad():
        if shared or not out.is_contiguous() or out.is_neg():
            return out.copy_(compute(x))
    compute(x, out=out)
    # The new version makes autograd raise if out was saved for a backward.
    torch.autograd.graph.increment_version(out)
    return out


def _computed(
    x: Tensor, rounding: Rounding | ScaledRounding, draw: Draw, dims: tuple[int, ...], out: Tensor | None = None
) -> Tensor:
    """Return x rounded, in ``out`` if it is passed, which is row-major."""
    if isinstance(rounding, Rounding):
        return run_map(rounding_program(rounding), (x,), x.dtype, draw, out)
    blocks = in_blocks(x, rounding, dims, out)
    if blocks is not None:
        return blocks
    d, size = pieces(x, rounding, dims)
    if size >= (x.shape[d] if x.dim() else 1):
        program, operands = operands_of_elements(x, rounding, dims)
        return run_map(program, operands, x.dtype, draw, out)
    result = buffers.empty(x.shape, x.dtype, x.device) if out is None else out
    parts, most = x.split(size, d), None
    if reads_all(rounding):
        maxima = [torch.ops.fxround.block_maximum(part, [0] * x.dim()) for part in parts]
        most = torch.stack(maxima).amax(0)
    for i, (part, into) in enumerate(zip(parts, result.split(size, d), strict=True)):
        program, operands = operands_of_elements(part, rounding, dims, most)
        if draws(rounding):
            run_part(program, x, operands[1:], result, draw, d, i * size, part.shape[d])
        else:
            run_map(program, operands, x.dtype, draw, into)
    return result


def _meet(a: Tensor, b: Tensor) -> bool:
    """Whether the memory ranges of two tensors overlap, gaps between elements included."""

    def end(x: Tensor) -> int:
        span = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
        return x.data_ptr() + span * x.itemsize

    return a.numel() > 0 and a.data_ptr() < end(b) and b.data_ptr() < end(a)


def _repeats(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements share memory."""
    span = 0
    walked = sorted((abs(step), n) for n, step in zip(shape, strides, strict=True) if n > 1)
    if 0 in shape:
        return False
    for step, n in walked:
        if step <= span:
            break
        span += step * (n - 1)
    else:
        return False
    places = np.zeros(1, np.int64)
    for step, n in walked:
        places = (places[:, None] + step * np.arange(n)).reshape(-1)
    return len(np.unique(places)) < len(places)


def _differentiable(
    x: Tensor, rounding: Rounding | ScaledRounding, seed: int, sample: int, how: Gradient, stream: int, dims: Any
) -> Tensor:
    """Round a tensor with the requested gradient, which draws from the stream numbered one after the rounding's own."""
    result: Tensor = applied(_Round, x, rounding, seed, sample, how, stream, dims)[0]
    return result


class _Round(torch.autograd.Function):
    """A rounding, and the factor of its gradient if it has one; ``torch.func`` transforms it too."""

    @staticmethod
    def forward(
        x: Tensor, rounding: Any, seed: int, sample: int, how: Gradient, stream: int, dims: Any
    ) -> tuple[Tensor, Tensor | None]:
        x = x.detach()
        factor = _clamped(x, rounding, seed, sample, stream, dims) if how.zero_clamped else None
        factor = _slopes(x, rounding, dims) if how.estimated else factor
        return _round_tensor(x, rounding, seed, sample, stream=stream, dims=dims), factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        _, _, seed, sample, ctx.how, stream, dims = inputs
        ctx.draw = seed, sample, Gradient(), stream + 1, dims
        if output[1] is not None:
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(output[1])
            ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        g = _weighted(ctx, gradients[0])
        if ctx.how.rounding is not None:
            g = _differentiable(g, ctx.how.rounding, *ctx.draw)
        return g, None, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, None]:
        if ctx.how.rounding is not None:
            raise ValueError(f"gradient = {str(ctx.how)!r}: a tangent of forward mode is not rounded")
        return _weighted(ctx, tangents[0].clone()), None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, *said: Any
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        # One call for each element, all of which draw the same random bits.
        calls = [_Round.apply(part, *said) for part in x.unbind(in_dims[0])]  # type: ignore[no-untyped-call]
        results = [None if parts[0] is None else torch.stack(parts) for parts in zip(*calls, strict=True)]
        return tuple(results), tuple(None if part is None else 0 for part in results)


def _weighted(ctx: Any, derivative: Tensor) -> Tensor:
    """Return a gradient or a tangent, with zeros where the rounding clamped or times the estimated derivative."""
    factors: tuple[Tensor, ...] = ctx.saved_tensors
    for factor in factors:
        derivative = _times(derivative, factor) if ctx.how.estimated else derivative.masked_fill(factor, 0.0)
    return derivative


def _times(derivative: Tensor, slope: Tensor) -> Tensor:
    """Return the product, which is zero where the slope is, also of an infinity."""
    return (derivative * slope).masked_fill(slope == 0.0, 0.0)


@torch.library.custom_op("fxround::round_tensor", mutates_args=())
def _operator(
    x: Tensor, rounding: str, seed: int, sample: int, gradient: str, stream: int, dims: Sequence[int] | None
) -> Tensor:
    """``round`` of a tensor as an operator; stream: of the random bits."""
    parsed, _, places = _parsed(rounding, gradient, dims)
    return _round_tensor(x.detach(), parsed, seed, sample, stream=stream, dims=places)


@torch.library.custom_op("fxround::round_clamps", mutates_args=())
def _clamps(x: Tensor, rounding: str, seed: int, sample: int, stream: int, dims: Sequence[int] | None) -> Tensor:
    """Where ``round_tensor`` clamps, bool."""
    return _clamped(x.detach(), any_rounding(rounding), seed, sample, stream, _dims(dims))


@torch.library.custom_op("fxround::round_slopes", mutates_args=())
def _estimates(x: Tensor, rounding: str, dims: Sequence[int] | None) -> Tensor:
    """The estimated derivatives of ``round_tensor``."""
    return _slopes(x.detach(), any_rounding(rounding), _dims(dims))


@_operator.register_fake
def _(x: Tensor, rounding: str, seed: int, sample: int, gradient: str, stream: int, dims: Any) -> Tensor:
    _parsed(rounding, gradient, dims)
    return x.new_empty(x.shape)


@_clamps.register_fake
def _(x: Tensor, rounding: str, seed: int, sample: int, stream: int, dims: Sequence[int] | None) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bool)


@_estimates.register_fake
def _(x: Tensor, rounding: str, dims: Sequence[int] | None) -> Tensor:
    return x.new_empty(x.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, rounding, seed, sample, gradient, stream, dims = inputs
    ctx.said = rounding, seed, sample, gradient, stream, dims
    how = Gradient.parse(gradient)
    ctx.save_for_backward(*([x] if how.zero_clamped or how.estimated else []))


def _differentiated(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    rounding, seed, sample, gradient, stream, dims = ctx.said
    how = Gradient.parse(gradient)
    for x in ctx.saved_tensors:
        if how.estimated:
            g = _times(g, torch.ops.fxround.round_slopes(x, rounding, dims))
        else:
            g = g.masked_fill(torch.ops.fxround.round_clamps(x, rounding, seed, sample, stream, dims), 0.0)
    if how.rounding is not None:
        places = dims if isinstance(how.rounding, ScaledRounding) else None
        g = torch.ops.fxround.round_tensor(g, str(how.rounding), seed, sample, STRAIGHT, stream + 1, places)
    return g, None, None, None, None, None, None


_operator.register_autograd(_differentiated, setup_context=_remember)
