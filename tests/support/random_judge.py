"""The judge of random models: every way of running a graph must give the bits of the NumPy reference, node by node.

A graph is lowered, fused and scheduled as ``fxround.compile`` does it. Maps run as NumPy at the addresses that the
schedule hands out (``numpy_maps``), so that a model costs milliseconds, not the compilation of its kernels; products,
sums and the chains that run over rows are machine code. Small tensors take the ways of large ones, and released
memory is spoilt.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.utils._pytree as pytree
from random_builder import POLICIES, Model, Recipe
from random_graphs import build
from random_reference import Array, by_reference, drawing, encodings
from torch import Tensor, fx

import fxround.passes
from fxround.graph.dtypes import FORMAT_OF
from fxround.graph.site import META, ORIGIN, PORT, PORTS
from fxround.kernels.kinds import Map
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.arithmetic.randomness import BLOCK
from fxround.numerics.formats import Format
from fxround.operators.rules import rule_of
from fxround.passes import Plan, lower, optimize
from fxround.passes.partition import partition
from fxround.passes.rewrite import decided
from fxround.policy import Policy
from fxround.runtime import buffers
from fxround.runtime.cpu import epilogues, pointwise, row_chains
from fxround.runtime.random_state import random_state
from fxround.runtime.schedule import schedule

_MEMORY: Mapping[str, Any] = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.uint16,
    "bf16": np.uint16,
    "mask": np.uint8,
}
_ELEMENT: Mapping[str, Any] = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.uint32,
    "bf16": np.uint32,
    "mask": np.uint32,
}


# ---- maps by NumPy, where the schedule says that operands and results lie ----


class Maps:
    """A replacement of ``execute.native``: map kernels that NumPy runs at the addresses that they receive."""

    def __init__(self) -> None:
        self.native, self.known = pointwise.native, {}  # type: ignore[var-annotated]
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
        self,
        kernel: Map,
        begin: int,
        end: int,
        total: int,
        dims: int,
        sizes: int,
        sources: int,
        steps: int,
        outs: int,
        key: int,
    ) -> None:
        first, last = begin * BLOCK, min(end * BLOCK, total)
        if last <= first:
            return
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
            spans.append(
                (
                    address + low * elements.itemsize,
                    elements.nbytes,
                    len(elements) == last - first and bool((np.diff(offsets) == 1).all()),
                )
            )
            values.append(elements[offsets - low].astype(_ELEMENT[storage]))
        words = [_u32(key, 3 + kernel.nodes)[n] for n in range(3 + kernel.nodes)]
        drawn = [drawing(w.draw, w.width).evaluate(index, *words[:3], words[3 + w.node])[0] for w in kernel.draws]
        results = kernel.body.evaluate(*values, *drawn)
        for i, (storage, result) in enumerate(zip(kernel.results, results, strict=True)):
            target = _memory(_words(outs + 8 * i, 1)[0], first, last, storage)
            self.check(target, spans)
            target[:] = np.broadcast_to(result, index.shape).astype(_MEMORY[storage])

    def check(self, target: Array, spans: Sequence[tuple[int, int, bool]]) -> None:
        """Record an error if the result overlaps an operand, unless both have the same memory, block by block."""
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
    """Inside the block, maps run as NumPy."""
    maps = Maps()
    pointwise.map_call.cache_clear()
    with mock.patch.object(pointwise, "native", maps):
        try:
            yield maps
        finally:
            pointwise.map_call.cache_clear()


# ---- small tensors on the ways of large ones ----


@contextlib.contextmanager
def as_if_large(small: int = 0) -> Iterator[None]:
    """Pool every buffer, run every chain over ranges of rows and epilogues in steps, and overwrite released memory."""
    give = buffers._Pool.give

    def spoil(pool: Any, storage: Any, size: int) -> None:
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
        give(pool, storage, size)

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (buffers, "WORTHWHILE", 1),
            (row_chains, "_LEAST", 0),
            (row_chains, "_CACHE", (1, 1 << 13, 1 << 18)[small % 3]),
            (epilogues, "_STEP", (1, 1 << 10, 1 << 19)[small % 3]),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(buffers._Pool, "give", spoil))
        buffers.forget()
        stack.callback(buffers.forget)
        yield


# ---- binary64 ----

# Operators that are sums of their operands, or of products of two of them.
_SUMS = frozenset(
    {"matmul", "convolution", "convolution_input_gradient", "convolution_weight_gradient", "sum", "cumsum"}
)
_ADDED = frozenset({"scatter_add", "index_put"})


def in_binary64(model: Model, lowered: fx.GraphModule, values: Mapping[fx.Node, Any]) -> None:
    """AssertionError where a node's value is further from binary64's, of the same operands, than its roundings allow.

    A rounding to p digits moves a value by at most 2^(2-p) of itself, in every mode (up_down rounds, and jumps); a
    sum of n terms that is rounded at every step differs from the exact one by at most n u (1 + n u), u = 2^(2-p),
    times the sum of their magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section
    4.2). Nothing is accumulated from node to node, so that no condition number enters.
    """
    made: dict[str, tuple[fx.Node, Any]] = {}
    for node, value in values.items():
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
    """PyTorch's result for operands in binary64, and the bound on the difference that roundings cause."""

    dtype = node.meta["val"].dtype if node.meta["val"].is_floating_point() else torch.float64

    def computed(change: Callable[[Tensor], Tensor]) -> Tensor:
        args, kwargs = fx.map_arg(
            (source.args, source.kwargs), lambda used: pytree.tree_map_only(Tensor, change, values[used])
        )
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
    # Stock kernels of functions are right to a few units. An operand of another dtype is converted first, and rounded.
    kept = [values[used] for used in source.all_input_nodes if isinstance(values[used], Tensor)]
    converted = [x for x in kept if x.is_floating_point() and x.dtype != node.meta["val"].dtype]
    units = (2 if place.status == "rounded" else 4) + bool(converted)
    bound = want.abs() * 2.0 ** (units - fmt.precision) + least
    if rule is not None and rule.body.startswith(("add", "sub")):
        # What the conversion of an operand loses is relative to the operand, and a sum may be smaller than that.
        bound = bound + sum(x.double().abs() for x in converted) * 2.0 ** (2 - fmt.precision)
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
    """AssertionError where a way of running the recipe's model has other bits than the reference, or the reference is
    far from binary64. maps: of ``numpy_maps``."""
    model = build(recipe)
    policy = Policy.parse(POLICIES[recipe.policy % len(POLICIES)])
    # Verified after each pass once in a while: that takes most of the time.
    with contextlib.ExitStack() as stack:
        if recipe.seed % 8:
            stack.enter_context(mock.patch.object(fxround.passes, "verify"))
        lowered = lower(model.graph, Plan(policy, False))
    rng = random_state(recipe.seed, 3)
    want, values = by_reference(lowered, (*model.inputs, rng))
    in_binary64(model, lowered, values)
    ways = {"fused": _prepared(lowered, fuse=True), "unfused": _prepared(lowered, fuse=False)}
    kept = []
    for name, inputs, guarded in (
        ("fused", model.inputs, False),
        ("fused", model.others, True),
        ("unfused", model.inputs, False),
        ("fused", model.inputs, False),
    ):
        with buffers.guarded() if guarded else contextlib.nullcontext():
            got = ways[name]((*inputs, rng))
        if maps is not None and maps.errors:
            raise AssertionError(f"{name}: {maps.errors.pop(0)}")
        if inputs is model.inputs:
            kept.append((name, got))
            _compare(model, name, want, got)
    for name, got in kept:
        _compare(model, f"{name}, when other calls had run", want, got)


def _prepared(lowered: fx.GraphModule, fuse: bool) -> Callable[[Sequence[Any]], list[Any]]:
    """The scheduled graph of a lowered one, in two parts if it has a backward pass."""

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
        assert found.shape == expected.shape and found.dtype == expected.dtype, (
            f"{name}: result {i} has another shape or dtype"
        )
        wrong = (encodings(found) != encodings(expected)).sum().item()
        assert not wrong, f"{name}: {wrong} of {found.numel()} elements of result {i} are wrong\n{model.graph.graph}"
