"""Loops in the graph that Dynamo returns: how they are differentiated, and what PyTorch calls in their place.

PyTorch computes parts of an iteration again in its backward pass. Stochastic rounding would draw other bits there, so
here the forward loop returns every value that the backward loop reads, and each value is rounded once. A backward loop
runs over the iterations in reverse, and adds the gradients of what all iterations read, the last iteration first. The
body of a loop is traced without formulas; they are applied when the loop itself is traced, as to any other graph.
Inside of ``unrolled_loops``, a scan or map of a known number of iterations is traced as its iterations, one by one.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.capture.guards import spelled
from fxround.errors import CaptureError
from fxround.graph.dialect.loops import COND, MAP, SCAN, WHILE
from fxround.graph.site import located

Body = Callable[..., Any]
_UNROLLED: Final[ContextVar[bool]] = ContextVar("unrolled", default=False)


@contextlib.contextmanager
def unrolled_loops() -> Iterator[None]:
    """Trace the iterations of scans and maps one by one, so that each operation of each iteration is a node."""
    token = _UNROLLED.set(True)
    try:
        yield
    finally:
        _UNROLLED.reset(token)


def own_loops(graph: fx.GraphModule) -> None:
    """Let the loops of Dynamo's graph, and of their bodies, be differentiated by this file."""
    for child in graph.children():
        if isinstance(child, fx.GraphModule):
            own_loops(child)
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in _OWN:
            node.target = _OWN[node.target]
    graph.recompile()


def refuse_reads(graph: fx.GraphModule, outside: Collection[str]) -> None:
    """Raise CaptureError if a loop reads a tensor from outside, which PyTorch's loops cannot hold as a constant.

    outside: the sources of the tensors that are neither arguments of the model, nor its parameters or buffers.
    """
    for node in graph.graph.nodes:
        if node.target not in _OWN or (_UNROLLED.get() and node.target in (SCAN, MAP)):
            continue
        for operand in node.all_input_nodes:
            source = str(getattr(getattr(operand, "_dynamo_source", None), "name", ""))
            if source in outside:
                raise CaptureError(
                    f"{located(node)}: a loop reads the tensor {spelled(source)}, which is neither an argument nor "
                    "a parameter or buffer: pass it as an argument, or make the function an nn.Module that holds it."
                )


def scan(step: Body, carries: Sequence[Any], xs: Sequence[Any], others: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Return the last carries and the stacked results of ``step(*carries, *x, *others)`` for each x of ``xs``.

    step: returns the next carries and its results as one flat list. Every tensor is an argument of ``step``. Raises
    CaptureError if a carry changes its shape or dtype.
    """
    if _UNROLLED.get():
        return one_by_one(step, carries, xs, others)
    # A layer that a function reads from outside: its parameters are constants of the trace.
    others = [x.detach() if type(x) is torch.nn.Parameter else x for x in others]
    own = _apart([*(_row_major(x) for x in carries), *others])
    carries, others = own[: len(carries)], own[len(carries) :]
    operands = (*carries, *xs, *others)
    guarded = _separate(step, len(carries))
    if _differentiated(operands):
        results: tuple[Any, ...] = _Scan.apply(guarded, len(carries), len(xs), *operands)  # type: ignore[no-untyped-call]
        return results
    return tuple(SCAN(guarded, list(carries), list(xs), tuple(others)))


def one_by_one(step: Body, carries: Sequence[Any], xs: Sequence[Any], others: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Return what ``scan`` returns, with the operations of each iteration one by one."""
    run, state, rows = _interpreted(step), list(carries), []
    for x in zip(*(torch.unbind(x) for x in xs), strict=True):
        results = list(run(*state, *x, *others))
        for i, before in enumerate(state):
            _require_kept(i, before, results[i])
        state = results[: len(state)]
        rows.append(results[len(state) :])
    return *state, *(torch.stack(column) for column in zip(*rows, strict=True))


def mapped(step: Body, xs: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
    """Return the stacked results of ``step(*x, *others)`` for each x of ``xs``."""
    return scan(step, (), xs, others)


def chosen(predicate: Any, step: Body, other: Body, operands: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Return the results of ``step(*operands)`` if the predicate is true, else those of ``other``."""
    operands = _apart(operands)
    steps = _separate(step, 0), _separate(other, 0)
    if _differentiated(operands):
        results: tuple[Any, ...] = _Cond.apply(predicate, *steps, *operands)  # type: ignore[no-untyped-call]
        return results
    return tuple(COND(predicate, *steps, tuple(operands)))


def repeated(test: Body, step: Body, carries: Sequence[Any], others: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Return the carries after ``step(*carries, *others)`` as long as ``test`` of them is true."""
    if _differentiated((*carries, *others)):
        raise CaptureError(
            "while_loop has no gradient, because the number of its iterations depends on data: call the compiled model "
            "under torch.no_grad(), or write the loop as a scan over a fixed number of steps."
        )
    return tuple(WHILE(test, step, tuple(carries), tuple(others)))


_OWN: Final[dict[Any, Any]] = {SCAN: scan, MAP: mapped, COND: chosen, WHILE: repeated}


def _differentiated(operands: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in operands)


def _is_differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _separate(step: Body, carries: int) -> Body:
    """Return the step with results that share no memory with its arguments or with each other."""
    run = _interpreted(step)

    @functools.wraps(run)
    def separate(*args: Any) -> list[Any]:
        given = {_memory(x) for x in args if isinstance(x, Tensor)}
        results = []
        for i, result in enumerate(run(*args)):
            if isinstance(result, Tensor):
                if i < carries:
                    _require_kept(i, args[i], result)
                    result = _row_major(result)
                result = result.clone() if _memory(result) in given else result
                given.add(_memory(result))
            results.append(result)
        return results

    return separate


def _apart(operands: Sequence[Any]) -> list[Any]:
    """Return the operands with a copy of each that shares memory with an earlier one, which PyTorch's loops refuse."""
    taken, copies = set(), []
    for x in operands:
        if isinstance(x, Tensor):
            x = x.clone() if _memory(x) in taken else x
            taken.add(_memory(x))
        copies.append(x)
    return copies


def _row_major(x: Any) -> Any:
    """Return a tensor with the strides of a row-major one, also in dimensions of size 1."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    if not isinstance(x, Tensor):
        return x
    step: Any = 1
    for size, stride in reversed(list(zip(x.shape, x.stride(), strict=True))):
        if guard_or_true(stride != step):
            return x.clone(memory_format=torch.contiguous_format)
        step = step * torch.sym_max(size, 1)  # as PyTorch's own strides, for sizes that come from data
    return x


def _require_kept(i: int, before: Tensor, after: Tensor) -> None:
    if before.dtype != after.dtype or tuple(before.shape) != tuple(after.shape):
        raise CaptureError(
            f"part {i} of the state of a loop is {before.dtype} of shape {tuple(before.shape)}, and a step makes it "
            f"{after.dtype} of shape {tuple(after.shape)}: return the shape and dtype that the step was given."
        )


def _memory(x: Tensor) -> Any:
    from torch._higher_order_ops.utils import _tensor_storage

    plain = torch._from_functional_tensor(x.elem) if hasattr(x, "elem") else x
    return _tensor_storage(plain)


def _interpreted(step: Body) -> Body:
    """Return a graph as a function that keeps the origin of its nodes while it is traced."""
    from torch._higher_order_ops.utils import _maybe_run_with_interpreter

    run: Body = _maybe_run_with_interpreter(step)
    return run


@dataclass(frozen=True)
class _Parts:
    """A differentiated body.

    forward     (*operands) -> (*results, *saved)
    backward    (*read, *saved, *tangents) -> gradients
    read        the positions of the operands that the backward part reads
    saved       fake values of what the forward part saves
    wanted      the positions of the operands that have gradients
    given       the positions of the results that have tangents
    results     the number of results
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    read: tuple[int, ...]
    saved: tuple[Any, ...]
    wanted: tuple[int, ...]
    given: tuple[int, ...]
    results: int


def _differentiate(step: Body, operands: Sequence[Any], carries: int) -> _Parts:
    """Return the parts of a body. The first ``carries`` operands change, so that they are saved and not read."""
    from torch._higher_order_ops.utils import materialize_as_graph

    wanted = tuple(i for i, x in enumerate(operands) if _is_differentiable(x) and (i < carries or x.requires_grad))
    plain = tuple(
        x.detach().requires_grad_(i in wanted) if isinstance(x, Tensor) else x for i, x in enumerate(operands)
    )
    trace = functools.partial(materialize_as_graph, subgraph_decomp_table={})
    shapes: list[Any] = []
    flags: list[bool] = []

    def probe(*args: Any) -> Any:
        results = step(*args)
        flags[:] = [_is_differentiable(r) and r.requires_grad for r in results]
        shapes[:] = [_outputs(r) for r in results]
        return results

    traced = trace(probe, plain, force_enable_grad=True)
    values = [node.meta["val"] for node in _results(traced)]
    given = tuple(i for i, flag in enumerate(flags) if flag)
    tangents = [torch.empty_like(values[i], memory_format=torch.contiguous_format) for i in given]

    def joint(*args: Any) -> Any:
        primals, cotangents = args[: len(plain)], args[len(plain) :]
        sources = [primals[i] for i in wanted]
        results = step(*primals)
        ends = [results[i] for i in given]
        gradients = (
            torch.autograd.grad(ends, sources, list(cotangents), allow_unused=True) if ends else [None] * len(sources)
        )
        return *results, *(torch.zeros_like(x) if g is None else g for g, x in zip(gradients, sources, strict=True))

    graph = trace(joint, (*plain, *tangents), force_enable_grad=True)
    if any(_mutates(node) for node in graph.graph.nodes):
        graph = trace(torch.func.functionalize(graph, remove="mutations"), (*plain, *tangents))
    return _split(graph, len(plain), carries, len(values), wanted, given)


def _outputs(x: Any) -> Any:
    return tuple(x.shape) if isinstance(x, Tensor) else None


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _results(graph: fx.GraphModule) -> list[Any]:
    results: Any = graph.graph.output_node().args[0]
    return list(results)


def _split(
    joint: fx.GraphModule, primals: int, carries: int, results: int, wanted: tuple[int, ...], given: tuple[int, ...]
) -> _Parts:
    entries = joint.graph.find_nodes(op="placeholder")
    operands, tangents = entries[:primals], entries[primals:]
    outputs = _results(joint)
    forward = _needed(joint, outputs[:results])
    backward = _needed(joint, outputs[results:])
    # The parts of a forward operation's result are saved, not the tuple of them.
    forward |= {n for n in backward if n.target is operator.getitem and n.args[0] in forward and not _is_cheap(n)}
    backward -= forward
    crossing: dict[fx.Node, None] = {}
    stack = [used for node in backward for used in node.all_input_nodes]
    stack += [x for x in outputs[results:] if isinstance(x, fx.Node)]
    copied: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in backward or node in tangents or node in copied or node.op == "get_attr":
            continue
        if node.op == "call_function" and _is_cheap(node):
            copied.add(node)
            stack += node.all_input_nodes
        else:
            crossing[node] = None
    order = {node: i for i, node in enumerate(joint.graph.nodes)}
    read = [i for i, node in enumerate(operands) if node in crossing and i >= carries]
    saved = sorted((n for n in crossing if n not in operands or operands.index(n) < carries), key=order.__getitem__)
    kept = _part(joint, operands, forward, outputs[:results], saved)
    later = _part(joint, [*(operands[i] for i in read), *saved, *tangents], backward | copied, outputs[results:], ())
    values = tuple(node.meta["val"] for node in saved)
    return _Parts(kept, later, tuple(read), values, wanted, given, results)


def _needed(graph: fx.GraphModule, ends: Sequence[Any]) -> set[fx.Node]:
    needed = {end for end in ends if isinstance(end, fx.Node)}
    for node in reversed(graph.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return {node for node in needed if node.op == "call_function"}


def _is_cheap(node: fx.Node) -> bool:
    """Whether the backward part computes the value itself: a view, a part of views, or a number."""
    value: Any = node.meta.get("val")
    if not isinstance(value, Tensor | list | tuple):
        return True
    source = node.args[0] if node.target is operator.getitem else node
    schema = getattr(getattr(source, "target", None), "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _part(
    joint: fx.GraphModule,
    inputs: Sequence[fx.Node],
    kept: set[fx.Node],
    outputs: Sequence[Any],
    saved: Sequence[fx.Node],
) -> fx.GraphModule:
    """Return a graph of the kept nodes. Saved values are copies of inputs or results, and rows of memory."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = part.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in joint.graph.nodes:
        if node in kept or (node.op == "get_attr" and any(user in kept for user in node.users)):
            copies[node] = part.node_copy(node, copies.__getitem__)
    made = [copies[x] if isinstance(x, fx.Node) else x for x in outputs]
    for node in saved:
        copy = copies[node]
        if node in inputs or copy in made or not node.meta["val"].is_contiguous():
            meta = copy.meta
            copy = part.call_function(torch.ops.aten.clone.default, (copy,), {"memory_format": torch.contiguous_format})
            copy.meta = dict(meta)
        made.append(copy)
    part.output(tuple(made))
    return fx.GraphModule(joint, part)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Body, carries: int, mapped_: int, *operands: Any) -> Any:
        from torch._higher_order_ops.utils import first_slice_copy
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

        first, xs, others = operands[:carries], operands[carries : carries + mapped_], operands[carries + mapped_ :]
        with disable_proxy_modes_tracing():
            flags = [isinstance(x, Tensor) and x.requires_grad for x in operands]
            one = [*first, *(first_slice_copy(x) for x in xs), *others]
            example = [
                x.detach().requires_grad_(f) if _is_differentiable(x) else x for x, f in zip(one, flags, strict=True)
            ]
            parts = _differentiate(step, example, carries)
        with torch._C._AutoDispatchBelowAutograd():
            computed = tuple(SCAN(parts.forward, list(first), list(xs), tuple(others)))
        ctx.parts, ctx.sizes = parts, (carries, mapped_)
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in operands]
        results, saved = computed[: parts.results], computed[parts.results :]
        ctx.save_for_backward(*(x for x in operands if isinstance(x, Tensor)), *saved)
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in parts.given))
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        parts, (carries, mapped_) = ctx.parts, ctx.sizes
        tensors = list(ctx.saved_tensors)
        operands = [tensors.pop(0) if x is None else x for x in ctx.numbers]
        saved, xs_end = tensors, carries + mapped_
        # The wanted operands are carries, then xs, then others.
        of_carries = [i for i in parts.wanted if i < carries]
        of_others = [i for i in parts.wanted if i >= xs_end]
        last = {i: tangents[i] for i in parts.given if i < carries}
        read_xs = [i for i in parts.read if i < xs_end]
        read_others = [i for i in parts.read if i >= xs_end]
        results = [i for i in parts.given if i >= carries]
        begun = [last.get(i) for i in of_carries]
        begun = [torch.zeros_like(operands[i]) if g is None else g for g, i in zip(begun, of_carries, strict=True)]
        begun = [_row_major(g) for g in (*begun, *(torch.zeros_like(operands[i]) for i in of_others))]
        reversed_ = [
            torch.flip(x, (0,)) for x in (*(tangents[i] for i in results), *(operands[i] for i in read_xs), *saved)
        ]
        # A loop has a row for each iteration, if only for their number.
        reversed_ = reversed_ or [torch.flip(operands[carries], (0,))]
        run = _interpreted(parts.backward)

        def step(*args: Any) -> list[Any]:
            state, args = args[: len(begun)], args[len(begun) :]
            own, args = args[: len(reversed_)], args[len(reversed_) :]
            rows = dict(zip(read_xs, own[len(results) :], strict=False)) | dict(zip(read_others, args, strict=True))
            carried = dict(zip(of_carries, state, strict=False))
            stacked = dict(zip(results, own, strict=False))
            cotangents = [carried[i] if i < carries else stacked[i] for i in parts.given]
            kept = own[len(results) + len(read_xs) :][: len(saved)]
            computed = dict(zip(parts.wanted, run(*(rows[i] for i in parts.read), *kept, *cotangents), strict=True))
            sums = [total + computed[i] for total, i in zip(state[len(of_carries) :], of_others, strict=True)]
            return [
                *(computed[i] for i in of_carries),
                *sums,
                *(computed[i] for i in parts.wanted if carries <= i < xs_end),
            ]

        computed = tuple(SCAN(_separate(step, len(begun)), begun, reversed_, tuple(operands[i] for i in read_others)))
        gradients: dict[int, Any] = dict(zip([*of_carries, *of_others], computed, strict=False))
        rows = zip([i for i in parts.wanted if carries <= i < xs_end], computed[len(begun) :], strict=True)
        gradients |= {i: torch.flip(g, (0,)) for i, g in rows}
        return None, None, None, *(gradients.get(i) for i in range(len(operands)))


class _Cond(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, predicate: Any, step: Body, other: Body, *operands: Any) -> Any:
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

        with disable_proxy_modes_tracing():
            example = [x.detach().requires_grad_(x.requires_grad) if _is_differentiable(x) else x for x in operands]
            parts = [_differentiate(f, example, 0) for f in (step, other)]
        results = parts[0].results
        saved = [len(part.saved) for part in parts]

        def branch(k: int) -> Body:
            run = _interpreted(parts[k].forward)

            def forward(*args: Any) -> list[Any]:
                computed = list(run(*args))
                missing = [torch.zeros(tuple(v.shape), dtype=v.dtype) for v in parts[1 - k].saved]
                own = computed[results:]
                return [*computed[:results], *((own + missing) if k == 0 else (missing + own))]

            return forward

        with torch._C._AutoDispatchBelowAutograd():
            computed = tuple(COND(predicate, branch(0), branch(1), tuple(operands)))
        ctx.parts, ctx.saved = parts, saved
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in operands]
        ctx.save_for_backward(predicate, *(x for x in operands if isinstance(x, Tensor)), *computed[results:])
        given = {i for part in parts for i in part.given}
        ctx.mark_non_differentiable(*(r for i, r in enumerate(computed[:results]) if i not in given))
        return computed[:results]

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        parts, saved = ctx.parts, ctx.saved
        predicate, *tensors = ctx.saved_tensors
        operands = [tensors.pop(0) if x is None else x for x in ctx.numbers]
        given = sorted({i for part in parts for i in part.given})
        flat = (*operands, *tensors, *(tangents[i] for i in given))

        def branch(k: int) -> Body:
            run = _interpreted(parts[k].backward)

            def backward(*args: Any) -> list[Any]:
                own, rest = args[: len(operands)], args[len(operands) :]
                begin = 0 if k == 0 else saved[0]
                kept, ends = rest[begin : begin + saved[k]], dict(zip(given, rest[sum(saved) :], strict=True))
                return list(run(*(own[i] for i in parts[k].read), *kept, *(ends[i] for i in parts[k].given)))

            return _separate(backward, 0)

        computed = COND(predicate, branch(0), branch(1), flat)
        gradients = dict(zip(parts[0].wanted, computed, strict=True))
        return None, None, None, *(gradients.get(i) for i in range(len(operands)))
