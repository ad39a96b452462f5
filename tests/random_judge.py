"""The judge of random models: every way of running a graph gives the bits of the NumPy reference, node by node.

A graph is lowered, fused and scheduled as ``fxround.compile`` does it. Maps run as NumPy at the addresses that the schedule
hands out (``numpy_maps``), so that a model costs milliseconds, not the compilation of its kernels; products, sums and the
chains that run over rows are machine code. Small tensors take the ways of large ones, and released memory is spoilt.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.utils._pytree as pytree
from random_graphs import POLICIES, Model, Recipe, build
from torch import Tensor, fx

import fxround.passes
from fxround.graph import META, ORIGIN, PORT, PORTS
from fxround.kernel import Exact, Map
from fxround.loading import random_state
from fxround.numerics import scalar
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats import Format
from fxround.numerics.randomness import BLOCK, random_function
from fxround.ops import rule_of
from fxround.passes import Plan, lower, optimize
from fxround.passes.partition import partition
from fxround.passes.rewrite import decided
from fxround.policy import Policy
from fxround.refusals import FORMAT_OF
from fxround.runtime import buffers, epilogues, execute, reference, rows, texts
from fxround.runtime.contractions import contract_of
from fxround.runtime.convolution import Geometry
from fxround.runtime.execute import STORAGES, loads_of
from fxround.runtime.schedule import schedule
from fxround.specialize import cumprod_kernel, cumsum_kernel, prod_kernel, scatter_kernel, sum_kernel

aten = torch.ops.aten
Array = Any
_MEMORY: Mapping[str, Any] = {"f32": np.float32, "f64": np.float64, "f16": np.uint16, "bf16": np.uint16, "mask": np.uint8}
_ELEMENT: Mapping[str, Any] = {"f32": np.float32, "f64": np.float64, "f16": np.uint32, "bf16": np.uint32, "mask": np.uint32}


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
    kernel = texts.pointwise(program, loads_of(xs), STORAGES[dtype])
    full = torch.broadcast_shapes(*(x.shape for x in xs))
    return tensor(np.broadcast_to(reference.map_(kernel, [stored(x) for x in xs], _key(rng, node)), full), dtype)


def _matmul(a: Tensor, b: Tensor, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    made = _contracted(stored(a).reshape(-1, *a.shape[-2:]), stored(b).reshape(-1, *b.shape[-2:]), a.dtype, accumulate, rounding, rng, node)
    return made.reshape(*a.shape[:-1], b.shape[-1])


def _contracted(a: Array, b: Array, dtype: torch.dtype, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    storage = STORAGES[dtype]
    kernel = contract_of(accumulate, rounding, (storage, storage), storage)
    return tensor(reference.contract(kernel, a, b, _key(rng, node)), dtype)


def _convolution(
    x: Tensor, w: Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool, extra: Any, groups: int, *rest: Any
) -> Tensor:
    size = Geometry(stride, padding, dilation, transposed, extra, groups).output_size(x, w)
    if transposed:
        return _transposed(x, w, size, stride, padding, dilation, groups, rest)
    columns = _windows(_framed(stored(x), [1] * len(stride), padding, padding), w.shape[2:], stride, dilation, size[2:], groups)
    weights = stored(w).reshape(groups, w.shape[0] // groups, -1)
    return _contracted(np.tile(weights, (x.shape[0], 1, 1)), columns, x.dtype, *rest).reshape(size)


def _framed(x: Array, spacing: Sequence[int], before: Sequence[int], after: Sequence[int]) -> Array:
    """x with spacing - 1 zeros between its elements and so many around it; a negative edge takes elements away."""
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


def _transposed(x: Tensor, w: Tensor, size: Any, stride: Any, padding: Any, dilation: Any, groups: int, rest: Any) -> Tensor:
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
    grad: Tensor, w: Tensor, size: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, _: Any, groups: int, *rest: Any
) -> Tensor:
    if transposed:
        return _convolution(grad, w, stride, padding, dilation, False, [0] * len(stride), groups, *rest)
    return _transposed(grad, w, list(size), stride, padding, dilation, groups, rest)


def _weight_gradient(
    grad: Tensor, x: Tensor, size: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, _: Any, groups: int, *rest: Any
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


def _sum(x: Tensor, dims: Any, keepdim: bool, order: str, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    lines, kept, short = _lines(x, dims)
    kernel = sum_kernel(texts.order(order), texts.rounding(accumulate), texts.rounding(rounding), STORAGES[x.dtype], STORAGES[x.dtype])
    compute = reference.exact if isinstance(kernel, Exact) else reference.reduce
    return tensor(compute(kernel, lines, _key(rng, node)), x.dtype).reshape(kept if keepdim else short)  # type: ignore[operator]


def _prod(x: Tensor, dims: Any, keepdim: bool, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
    lines, kept, short = _lines(x, dims)
    kernel = prod_kernel(texts.rounding(accumulate), texts.rounding(rounding), STORAGES[x.dtype], STORAGES[x.dtype])
    return tensor(reference.reduce(kernel, lines, _key(rng, node)), x.dtype).reshape(kept if keepdim else short)


def _scanned(make: Any) -> Callable[..., Tensor]:
    def scan(x: Tensor, dim: int, accumulate: str, rounding: str, rng: Tensor, node: int) -> Tensor:
        kernel = make(texts.rounding(accumulate), texts.rounding(rounding), STORAGES[x.dtype], STORAGES[x.dtype])
        last = x.movedim(dim, -1)
        made = reference.scan(kernel, stored(last).reshape(-1, last.shape[-1]), _key(rng, node))
        return tensor(made, x.dtype).reshape(last.shape).movedim(-1, dim).contiguous()

    return scan


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.numel()).reshape(x.shape)


def _added(x: Tensor, places: Tensor, source: Tensor, accumulate: str, rng: Tensor, node: int) -> Tensor:
    kernel = scatter_kernel(texts.rounding(accumulate), STORAGES[x.dtype])
    made = reference.scatter(kernel, stored(x).reshape(-1), places.reshape(-1).numpy(), stored(source).reshape(-1), _key(rng, node))
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
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return list(args[0]), values
        target = REFERENCE.get(node.target, node.target)
        values[node] = target(*args, **kwargs)
    raise AssertionError("a graph without results")


# ---- maps by NumPy, where the schedule says that operands and results lie ----


class Maps:
    """In place of ``execute.native``: map kernels that NumPy runs at the addresses that they are given."""

    def __init__(self) -> None:
        self.native, self.known = execute.native, {}  # type: ignore[var-annotated]
        self.errors: list[str] = []

    def __call__(self, digest: str, make: Any, variant: Any, name: str, prototype: Any) -> Any:
        if name != "map":
            return self.native(digest, make, variant, name, prototype)
        if digest not in self.known:
            function = prototype(self.guarded(variant.kernel))
            function.address = ctypes.cast(function, ctypes.c_void_p).value
            self.known[digest] = function
        return self.known[digest]

    def guarded(self, kernel: Map) -> Callable[..., None]:
        def run(*arguments: int) -> None:
            try:
                self.run(kernel, *arguments)
            except Exception as error:  # a callback cannot raise
                self.errors.append(f"{type(error).__name__}: {error}")

        return run

    def run(
        self, kernel: Map, begin: int, end: int, total: int, dims: int, sizes: int, sources: int, steps: int, outs: int, key: int
    ) -> None:
        first, last = begin * BLOCK, min(end * BLOCK, total)
        index = np.arange(first, last, dtype=np.uint64)
        shape, places = _words(sizes, dims), None
        values, spans = [], []
        for i, storage in enumerate(kernel.loads):
            own = _words(steps + 8 * i * dims, dims)
            if places is None:
                places = np.unravel_index(np.arange(first, last), shape) if dims else ()
            offsets = sum((p * s for p, s in zip(places, own, strict=True)), np.zeros(last - first, np.int64))
            low, high = int(offsets.min()), int(offsets.max())
            address = _words(sources + 8 * i, 1)[0]
            elements = _memory(address, low, high + 1, storage)
            spans.append((address + low * elements.itemsize, elements.nbytes, len(elements) == last - first and bool((np.diff(offsets) == 1).all())))
            values.append(elements[offsets - low].astype(_ELEMENT[storage]))
        words = [_u32(key, 3 + kernel.nodes)[n] for n in range(3 + kernel.nodes)]
        drawn = [_drawing(w.draw).evaluate(index, *words[:3], words[3 + w.node])[0] for w in kernel.draws]
        results = kernel.body.evaluate(*values, *drawn)
        for i, (storage, result) in enumerate(zip(kernel.results, results, strict=True)):
            target = _memory(_words(outs + 8 * i, 1)[0], first, last, storage)
            self.check(target, spans)
            target[:] = np.broadcast_to(result, index.shape).astype(_MEMORY[storage])

    def check(self, target: Array, spans: Sequence[tuple[int, int, bool]]) -> None:
        """A block is read before it is written, and no other is: an operand lies apart from a result, or just there."""
        at, size = target.ctypes.data, target.nbytes
        for address, length, whole in spans:
            if address < at + size and at < address + length and not (whole and address == at and length == size):
                self.errors.append("a map writes over what it has still to read")


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address)) if count else []


def _u32(address: int, count: int) -> list[np.uint32]:
    return [np.uint32(word) for word in (ctypes.c_uint32 * count).from_address(address)]


def _memory(address: int, begin: int, end: int, storage: str) -> Array:
    kind = np.dtype(_MEMORY[storage])
    room = (ctypes.c_char * ((end - begin) * kind.itemsize)).from_address(address + begin * kind.itemsize)
    return np.frombuffer(room, kind)


@contextlib.contextmanager
def numpy_maps() -> Iterator[Maps]:
    """Maps run as NumPy inside."""
    maps = Maps()
    execute._map_call.cache_clear()
    with mock.patch.object(execute, "native", maps):
        try:
            yield maps
        finally:
            execute._map_call.cache_clear()


# ---- small tensors on the ways of large ones ----


@contextlib.contextmanager
def as_if_large(small: int = 0) -> Iterator[None]:
    """Every buffer is pooled, every chain runs over ranges of rows, epilogues step by step; dead memory is spoilt."""
    give = buffers._Pool.give

    def spoil(pool: Any, storage: Any, size: int) -> None:
        waiting = {buffer.data_ptr() for kept in pool.waiting.values() for buffer in kept}
        assert storage.data_ptr() not in waiting, "memory is released twice"
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
        give(pool, storage, size)

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (buffers, "_WORTHWHILE", 1),
            (rows, "_LEAST", 0),
            (rows, "_CACHE", (1, 1 << 13, 1 << 18)[small % 3]),
            (epilogues, "_STEP", (1, 1 << 10, 1 << 19)[small % 3]),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(buffers._Pool, "give", spoil))
        buffers.forget()
        stack.callback(buffers.forget)
        yield


# ---- what would take most of the time ----


def _fma64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once, by the sum to odd of what binary64 loses (Boldo and Melquiond 2008); by rational numbers where
    a part of it could leave the range."""
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


_drawing = cache(random_function)
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
                    steps.append((place[node], scalar.OPS[node.op].numpy, [place[a] for a in node.args], scalar.DTYPES[node.type]))
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


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """A graph's code is written when it first runs; a function's operators are looked up once."""
    write = fx.GraphModule.recompile

    def later(graph: fx.GraphModule) -> None:
        written = []

        def forward(self: fx.GraphModule, *args: Any) -> Any:
            if not written:
                written.append(write(self))
            return type(self).forward(self, *args)

        type(graph).forward = forward  # type: ignore[method-assign]

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (fx.GraphModule, "recompile", later),
            (scalar, "_fma64", _fma64),
            (scalar.Function, "evaluate", _evaluate),
            (reference, "random_function", _drawing),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


# ---- binary64 ----

# Operators that are sums of their operands, or of products of two of them.
_SUMS = frozenset({"matmul", "convolution", "convolution_input_gradient", "convolution_weight_gradient", "sum", "cumsum"})
_ADDED = frozenset({"scatter_add", "index_put"})


def in_binary64(model: Model, lowered: fx.GraphModule, values: Mapping[fx.Node, Any]) -> None:
    """AssertionError where a node's value is further from binary64's, of the same operands, than its roundings allow.

    A rounding to p digits moves a value by at most 2^(2-p) of itself, in every mode (up_down rounds, and jumps); a sum of n terms that is rounded at
    every step differs from the exact one by at most n u (1 + n u), u = 2^(2-p), times the sum of their magnitudes (Higham,
    Accuracy and Stability of Numerical Algorithms, 2nd edition, section 4.2). Nothing is accumulated from node to node, so
    that no condition number enters.
    """
    made: dict[str, tuple[fx.Node, Any]] = {}
    for node, value in values.items():
        if node.op != "call_function" or not str(node.target).startswith("aten.sym"):
            made[str(node.meta.get(ORIGIN))] = node, value
    for node in model.graph.graph.nodes:
        if node.op != "call_function" or node.name not in made:
            continue
        last, got = made[node.name]
        source = node.args[0] if node.target is operator.getitem else node
        if not isinstance(got, Tensor) or not all(used.name in made for used in source.all_input_nodes):
            continue
        want, bound = _binary64(node, source, last, {used: made[used.name][1] for used in source.all_input_nodes})
        if not got.is_floating_point():
            assert torch.equal(got, want), f"{node.name} has other elements than PyTorch's\n{model.graph.graph}"
            continue
        limit = _format_of(last, got.dtype).maximum
        known = got.isfinite() & want.isfinite() & (want.abs() + bound <= limit / 2)
        wrong = known & ((got.double() - want).abs() > bound)
        assert not wrong.any(), f"{node.name} is far from binary64 in {int(wrong.sum())} elements\n{model.graph.graph}"


def _binary64(node: fx.Node, source: fx.Node, last: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[Tensor, Any]:
    """PyTorch's result for operands in binary64, and how far roundings may lead away from it."""

    dtype = node.meta["val"].dtype if node.meta["val"].is_floating_point() else torch.float64

    def computed(change: Callable[[Tensor], Tensor]) -> Tensor:
        args, kwargs = fx.map_arg((source.args, source.kwargs), lambda used: pytree.tree_map_only(Tensor, change, values[used]))
        args = pytree.tree_map_only(float, lambda number: torch.tensor(number, dtype=dtype).item(), args)
        floating = isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point
        kwargs = kwargs | {"dtype": torch.float64} if floating else kwargs
        result = source.target(*args, **kwargs)
        return result if source is node else result[node.args[1]]

    want = computed(lambda x: x.double() if x.is_floating_point() else x)
    if not want.is_floating_point():
        return want, 0.0
    rule, place, fmt = rule_of(node), last.meta.get(META), _format_of(last, node.meta["val"].dtype)
    lower_ = rule.lower if rule is not None else ""
    least = 2.0 ** (2 - fmt.precision) * 2.0**fmt.emin
    # Stock kernels of functions are right to a few units.
    bound = want.abs() * 2.0 ** ((2 if place.status == "rounded" else 4) - fmt.precision) + least
    if lower_ in _SUMS | _ADDED | {"prod", "cumprod"}:
        terms = max(values[used].numel() for used in source.all_input_nodes if isinstance(values[used], Tensor))
        unit = 2.0 ** (2 - _precision(last, fmt.precision))
        size = want if "prod" in lower_ else computed(lambda x: x.double().abs() if x.is_floating_point() else x)
        bound = bound + terms * (unit * (1 + terms * unit) * size.abs() + least)
    return want, bound


def _format_of(node: fx.Node, dtype: torch.dtype) -> Format:
    """The format that a value of a lowered node was rounded to."""
    place = node.meta.get(META)
    wanted = decided(place) if place is not None and place.status == "rounded" else None
    return wanted[1].format if wanted is not None else Format.parse(FORMAT_OF[dtype])


def _precision(node: fx.Node, precision: int) -> int:
    """The digits of the narrowest step of a sum."""
    wanted = decided(node.meta[META])
    if wanted is None or not isinstance(how := wanted[0].accumulate, Accumulation):
        return precision
    return min(r.format.precision for r in (how.step, how.product, how.combine, wanted[1]) if r is not None)


# ---- the verdict ----


def judge(recipe: Recipe, maps: Maps | None = None) -> None:
    """AssertionError where a way of running the recipe's model has other bits than the reference, or the reference is far
    from binary64. maps: of ``numpy_maps``."""
    model = build(recipe)
    policy = Policy.parse(POLICIES[recipe.policy % len(POLICIES)])
    # Verified after each pass once in a while: that takes most of the time.
    with contextlib.ExitStack() as stack:
        if recipe.seed % 8:
            stack.enter_context(mock.patch.object(fxround.passes, "verify", lambda *_: None))
        lowered = lower(model.graph, Plan(policy, False))
    rng = random_state(recipe.seed, 3)
    want, values = by_reference(lowered, (*model.inputs, rng))
    in_binary64(model, lowered, values)
    ways = {"fused": _prepared(lowered, fuse=True), "unfused": _prepared(lowered, fuse=False)}
    kept = []
    for turn, (name, inputs) in enumerate(
        (("fused", model.inputs), ("fused", model.others), ("unfused", model.inputs), ("fused", model.inputs))
    ):
        got = ways[name]((*inputs, rng))
        if maps is not None and maps.errors:
            raise AssertionError(f"{name}: {maps.errors.pop(0)}")
        if inputs is model.inputs:
            kept.append((f"{name}, call {turn + 1}", got))
            _compare(model, name, want, got)
    for name, got in kept:
        _compare(model, f"{name}, when other calls had run", want, got)


def _prepared(lowered: fx.GraphModule, fuse: bool) -> Callable[[Sequence[Any]], list[Any]]:
    """What runs a lowered graph: in two parts, where it has a backward."""

    def ready(graph: fx.GraphModule) -> fx.GraphModule:
        return schedule(optimize(graph) if fuse else graph, fuse)

    places = [node.meta[PORT].kind for node in lowered.graph.find_nodes(op="placeholder")]
    if "tangent" not in places:
        whole = ready(lowered)
        return lambda inputs: list(whole(*inputs))
    parts = partition(lowered)
    forward, backward = ready(parts.forward), ready(parts.backward)
    results = sum(port.kind != "gradient" for port in lowered.graph.output_node().meta[PORTS])

    def run(inputs: Sequence[Any]) -> list[Any]:
        tangents = [x for x, kind in zip(inputs, places, strict=True) if kind == "tangent"]
        made = list(forward(*(x for x, kind in zip(inputs, places, strict=True) if kind != "tangent")))
        return [*made[:results], *backward(*made[results:], *tangents, inputs[-1])]

    return run


def _compare(model: Model, name: str, want: Sequence[Any], got: Sequence[Any]) -> None:
    for i, (expected, found) in enumerate(zip(want, got, strict=True)):
        assert found.shape == expected.shape and found.dtype == expected.dtype, f"{name}: result {i} has another shape or dtype"
        wrong = (encodings(found) != encodings(expected)).sum().item()
        assert not wrong, f"{name}: {wrong} of {found.numel()} elements of result {i} are wrong\n{model.graph.graph}"
