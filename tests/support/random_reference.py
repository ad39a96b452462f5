"""The NumPy reference of a lowered graph, node by node, fast enough for thousands of models.

Every operator of fxround is computed by ``fxround.runtime.reference`` from the texts of its arguments; products of
windows and gradients are built here, by the definitions of docs/numerics.md. Other operators are PyTorch's own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx

from fxround.graph.dtypes import STORAGES
from fxround.kernels import from_text
from fxround.kernels.kinds import Exact
from fxround.kernels.reductions import cumprod_kernel, cumsum_kernel, prod_kernel, scatter_kernel, sum_kernel
from fxround.numerics.arithmetic import scalar
from fxround.numerics.arithmetic.randomness import random_function
from fxround.runtime import reference
from fxround.runtime.operands import loads_of

aten = torch.ops.aten
Array = Any


# ---- elements as the kernels' bodies see them ----


def stored(x: Tensor) -> Array:
    """A tensor's elements: floats, or codes in a uint32."""
    x = x.detach().contiguous()
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return x.numpy().astype(np.uint32) if x.dtype == torch.bool else x.numpy()


def tensor(elements: Array, dtype: torch.dtype) -> Tensor:
    """The tensor of some elements."""
    elements = np.array(elements, order="C")
    if dtype in (torch.float16, torch.bfloat16):
        return torch.from_numpy(elements.astype(np.uint16).view(np.int16)).view(dtype)
    return torch.from_numpy(elements)


def encodings(x: Tensor) -> Tensor:
    """Bits as integers, every NaN the same (which one it is belongs to other tests)."""
    if not x.is_floating_point():
        return x
    x = torch.where(x.isnan(), torch.full((), math.nan, dtype=x.dtype), x)
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


# ---- the reference, a node at a time ----


def _key(rng: Tensor, node: int) -> tuple[int, int, int, int]:
    seed, sample = rng.tolist()
    return seed & 0xFFFFFFFF, seed >> 32, sample, node & 0xFFFFFFFF


def _pointwise(xs: Sequence[Tensor], program: str, dtype: torch.dtype, rng: Tensor, node: int) -> Tensor:
    kernel = from_text.pointwise(program, loads_of(xs), STORAGES[dtype])
    full = torch.broadcast_shapes(*(x.shape for x in xs))
    return tensor(np.broadcast_to(reference.map_(kernel, [stored(x) for x in xs], _key(rng, node)), full), dtype)


def _matmul(a: Tensor, b: Tensor, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    made = _contracted(
        stored(a).reshape(-1, *a.shape[-2:]),
        stored(b).reshape(-1, *b.shape[-2:]),
        a.dtype,
        accumulate,
        rounding,
        rng,
        node,
    )
    return made.reshape(*a.shape[:-1], b.shape[-1])


def _contracted(
    a: Array, b: Array, dtype: torch.dtype, accumulate: str, rounding: str, rng: Tensor, node: int
) -> Tensor:
    storage = STORAGES[dtype]
    kernel = from_text.contract(accumulate, rounding, (storage, storage), storage)
    return tensor(reference.contract(kernel, a, b, _key(rng, node)), dtype)


def _convolution(
    x: Tensor,
    w: Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    extra: Any,
    groups: int,
    *rest: Any,
) -> Tensor:
    like = aten.convolution.default(
        x.to("meta"), w.to("meta"), None, stride, padding, dilation, transposed, extra, groups
    )
    size = list(like.shape)
    if transposed:
        return _transposed(x, w, size, stride, padding, dilation, groups, rest)
    columns = _windows(
        _framed(stored(x), [1] * len(stride), padding, padding), w.shape[2:], stride, dilation, size[2:], groups
    )
    weights = stored(w).reshape(groups, w.shape[0] // groups, -1)
    return _contracted(np.tile(weights, (x.shape[0], 1, 1)), columns, x.dtype, *rest).reshape(size)


def _framed(x: Array, spacing: Sequence[int], before: Sequence[int], after: Sequence[int]) -> Array:
    """x with spacing - 1 zeros between its elements, and zeros around it; negative numbers remove elements."""
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], spacing, strict=True)]
    room = [max(0, -low) + n + max(0, high) + max(0, low) for n, low, high in zip(sizes, before, after, strict=True)]
    wide = np.zeros((*x.shape[:2], *room), x.dtype)
    inner = [slice(max(0, low), max(0, low) + n, s) for n, s, low in zip(sizes, spacing, before, strict=True)]
    wide[(..., *inner)] = x
    kept = [slice(max(0, -low), max(0, low) + n + high) for n, low, high in zip(sizes, before, after, strict=True)]
    return wide[(..., *kept)]


def _windows(x: Array, taps: Sequence[int], stride: Any, dilation: Any, size: Sequence[int], groups: int) -> Array:
    """(images * groups, channels of a group * taps, pixels)."""
    found = []
    for place in np.ndindex(*taps):
        window = [
            slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, s, n in zip(place, dilation, stride, size, strict=True)
        ]
        found.append(x[(..., *window)].reshape(*x.shape[:2], -1))
    pixels = math.prod(size)
    return np.stack(found, axis=2).reshape(x.shape[0] * groups, -1, pixels)


def _transposed(
    x: Tensor, w: Tensor, size: Any, stride: Any, padding: Any, dilation: Any, groups: int, rest: Any
) -> Tensor:
    reach = [d * (t - 1) for d, t in zip(dilation, w.shape[2:], strict=True)]
    before = [r - p for r, p in zip(reach, padding, strict=True)]
    inside = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)]
    after = [n + r - low - i for n, r, low, i in zip(size[2:], reach, before, inside, strict=True)]
    wide = _framed(stored(x), stride, before, after)
    ones = [1] * len(stride)
    columns = _windows(wide, w.shape[2:], ones, dilation, size[2:], groups)
    turned = np.flip(stored(w), tuple(range(2, w.dim()))).reshape(groups, w.shape[0] // groups, w.shape[1], -1)
    weights = turned.swapaxes(1, 2).reshape(groups, w.shape[1], -1)
    return _contracted(np.tile(weights, (x.shape[0], 1, 1)), columns, x.dtype, *rest).reshape(size)


def _input_gradient(
    grad: Tensor,
    w: Tensor,
    size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    _: Any,
    groups: int,
    *rest: Any,
) -> Tensor:
    if transposed:
        return _convolution(grad, w, stride, padding, dilation, False, [0] * len(stride), groups, *rest)
    return _transposed(grad, w, list(size), stride, padding, dilation, groups, rest)


def _weight_gradient(
    grad: Tensor,
    x: Tensor,
    size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    _: Any,
    groups: int,
    *rest: Any,
) -> Tensor:
    small, image = (x, grad) if transposed else (grad, x)
    wide = _framed(stored(image), [1] * len(stride), padding, padding)
    pixels = small.shape[2:]
    # (images * groups, channels * taps, pixels) as (groups, images * pixels, channels * taps).
    columns = _windows(wide, size[2:], stride, dilation, pixels, groups)
    columns = columns.reshape(image.shape[0], groups, -1, pixels.numel()).transpose(1, 0, 3, 2)
    columns = columns.reshape(groups, image.shape[0] * pixels.numel(), -1)
    left = stored(small).swapaxes(0, 1).reshape(groups, small.shape[1] // groups, -1)
    return _contracted(left, columns, grad.dtype, *rest).reshape(list(size))


def _lines(x: Tensor, dims: Sequence[int]) -> tuple[Array, list[int], list[int]]:
    """Rows to reduce, and the shape of the results with and without what is reduced."""
    reduced = sorted(d % x.dim() for d in dims) or list(range(x.dim()))
    kept = [d for d in range(x.dim()) if d not in reduced]
    lines = stored(x.permute(*kept, *reduced)).reshape(math.prod(x.shape[d] for d in kept), -1)
    return lines, [1 if d in reduced else n for d, n in enumerate(x.shape)], [x.shape[d] for d in kept]


def _sum(
    x: Tensor, dims: Any, keepdim: bool, order: str, accumulate: str, rounding: str, rng: Tensor, node: int
) -> Tensor:
    lines, kept, short = _lines(x, dims)
    kernel = sum_kernel(
        from_text.order(order),
        from_text.rounding(accumulate),
        from_text.rounding(rounding),
        STORAGES[x.dtype],
        STORAGES[x.dtype],
    )
    compute = reference.exact if isinstance(kernel, Exact) else reference.reduce
    return tensor(compute(kernel, lines, _key(rng, node)), x.dtype).reshape(kept if keepdim else short)  # type: ignore[operator]


def _prod(x: Tensor, dims: Any, keepdim: bool, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    lines, kept, short = _lines(x, dims)
    kernel = prod_kernel(
        from_text.rounding(accumulate), from_text.rounding(rounding), STORAGES[x.dtype], STORAGES[x.dtype]
    )
    return tensor(reference.reduce(kernel, lines, _key(rng, node)), x.dtype).reshape(kept if keepdim else short)


def _scanned(make: Any) -> Callable[..., Tensor]:
    def scan(x: Tensor, dim: int, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
        kernel = make(
            from_text.rounding(accumulate), from_text.rounding(rounding), STORAGES[x.dtype], STORAGES[x.dtype]
        )
        last = x.movedim(dim, -1)
        made = reference.scan(kernel, stored(last).reshape(-1, last.shape[-1]), _key(rng, node))
        return tensor(made, x.dtype).reshape(last.shape).movedim(-1, dim).contiguous()

    return scan


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.numel()).reshape(x.shape)


def _added(x: Tensor, places: Tensor, source: Tensor, accumulate: str, rng: Tensor, node: int) -> Tensor:
    kernel = scatter_kernel(from_text.rounding(accumulate), STORAGES[x.dtype])
    made = reference.scatter(
        kernel, stored(x).reshape(-1), places.reshape(-1).numpy(), stored(source).reshape(-1), _key(rng, node)
    )
    return tensor(made, x.dtype).reshape(x.shape)


def _scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor, accumulate: str, rng: Tensor, node: int) -> Tensor:
    index = torch.where(index < 0, index + x.shape[dim], index)
    source = source[tuple(slice(0, n) for n in index.shape)]
    return _added(x, _places(x).gather(dim, index), source, accumulate, rng, node)


def _index_put(x: Tensor, indices: Any, values: Tensor, accumulate: str, rng: Tensor, node: int) -> Tensor:
    places = aten.index.Tensor(_places(x), indices)
    return _added(x, places, values.expand(places.shape), accumulate, rng, node)


REFERENCE: Mapping[Any, Callable[..., Tensor]] = {
    torch.ops.fxround.pointwise.default: _pointwise,
    torch.ops.fxround.matmul.default: _matmul,
    torch.ops.fxround.convolution.default: _convolution,
    torch.ops.fxround.convolution_input_gradient.default: _input_gradient,
    torch.ops.fxround.convolution_weight_gradient.default: _weight_gradient,
    torch.ops.fxround.sum.default: _sum,
    torch.ops.fxround.prod.default: _prod,
    torch.ops.fxround.cumsum.default: _scanned(cumsum_kernel),
    torch.ops.fxround.cumprod.default: _scanned(cumprod_kernel),
    torch.ops.fxround.scatter_add.default: _scatter_add,
    torch.ops.fxround.index_put.default: _index_put,
}


def by_reference(lowered: fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[Any], dict[fx.Node, Any]]:
    """The results of a lowered graph, and the value of every node."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in lowered.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
            continue
        if node.op == "get_attr":
            values[node] = getattr(lowered, str(node.target))
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return list(args[0]), values
        target = REFERENCE.get(node.target, node.target)
        values[node] = target(*args, **kwargs)
    raise AssertionError("a graph without results")


# ---- what would take most of the time ----


def _fma64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once, by the sum to odd of what binary64 loses (Boldo and Melquiond 2008); by rational
    numbers where a part of it could leave the range."""
    a, b, c = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (a, b, c)))
    with np.errstate(all="ignore"):
        product, low = _two_product(a, b)
        high, rest = _two_sum(c, low)
        top, left = _two_sum(product, high)
        odd, error = _two_sum(left, rest)
        code = odd.view(np.int64)
        outward = (error > 0) == (odd > 0)
        moved = np.where(outward, code + 1, code - 1)
        result = top + np.where((error != 0) & (code & 1 == 0), moved, code).view(np.float64)
        sizes = np.abs(np.stack([a, b, c]))
        simple = (sizes == 0).any(axis=0) & ((sizes > 2.0**-200) & (sizes < 2.0**200) | (sizes == 0)).all(axis=0)
        result = np.where(simple, product + c, result)
        known = simple | ((sizes > 2.0**-200) & (sizes < 2.0**200)).all(axis=0)
    if not known.all():
        result[~known] = _EXACT_FMA(a[~known], b[~known], c[~known]).astype(np.float64)
    return result


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    (ah, al), (bh, bl) = ((high := 134217729.0 * x - (134217729.0 * x - x), x - high) for x in (a, b))
    product = a * b
    return product, al * bl - (((product - ah * bh) - al * bh) - ah * bl)


_EXACT_FMA = scalar._fma64


drawing = cache(random_function)
_PLANS: dict[Any, Any] = {}


def _evaluate(function: scalar.Function, *args: Any) -> tuple[Array, ...]:
    """``Function.evaluate``, its operators looked up once."""
    plan = _PLANS.get(function)
    if plan is None:
        place = {p: i for i, p in enumerate(function.params)}
        constants, steps = [], []
        for node in function.schedule:
            if node not in place:
                place[node] = len(place)
                if node.op == "const":
                    constants.append((place[node], scalar.constant_array(node)))
                else:
                    steps.append(
                        (
                            place[node],
                            scalar.OPS[node.op].numpy,
                            [place[a] for a in node.args],
                            scalar.DTYPES[node.type],
                        )
                    )
        plan = _PLANS[function] = (len(place), constants, steps, [place[r] for r in function.results])
    size, constants, steps, results = plan
    values: list[Any] = [None] * size
    values[: len(args)] = [np.asarray(a, scalar.DTYPES[p.type]) for a, p in zip(args, function.params, strict=True)]
    for i, constant in constants:
        values[i] = constant
    with np.errstate(all="ignore"):
        for i, compute, operands, dtype in steps:
            values[i] = np.asarray(compute(*[values[o] for o in operands])).astype(dtype, copy=False)
    return tuple(values[r] for r in results)


_WRITE = fx.GraphModule.recompile


@contextlib.contextmanager
def quickly(graphs: bool = True) -> Iterator[None]:
    """A function's operators are looked up once. graphs: a graph's code is written when it first runs."""

    def later(graph: fx.GraphModule) -> None:
        written = []

        def forward(self: fx.GraphModule, *args: Any) -> Any:
            if not written:
                written.append(_WRITE(self))
            return type(self).forward(self, *args)

        type(graph).forward = forward  # type: ignore[method-assign]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(fx.GraphModule, "recompile", later if graphs else _WRITE))
        for owner, name, value in (
            (scalar, "_fma64", _fma64),
            (scalar.Function, "evaluate", _evaluate),
            (reference, "random_function", drawing),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
