"""Kernels with every operand, result and table between inaccessible pages: ``python tests/support/guarded_kernels.py``.

Each case is a random shape, layout and dtype of one kind of kernel, on each instruction set of the host, with the
operands at the beginning and at the end of their pages; its bits are those of ordinary memory.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import guard_pages
import random_graphs
import torch
from random_builder import POLICIES, Recipe
from random_graphs import OPERATIONS, build
from random_judge import as_if_large
from torch import Tensor

import fxround
from fxround.kernels.from_text import pointwise
from fxround.passes import Plan, lower, optimize
from fxround.policy import Policy, Rule
from fxround.runtime.cpu.code import instruction_set
from fxround.runtime.cpu.gather import run_gather
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.cpu.pointwise import MapCall, array
from fxround.runtime.cpu.pooling import run_max_pool2d
from fxround.runtime.schedule import schedule

RNE, SR = "binary32/nearest_even/inf", "bfloat16/stochastic/inf"
OPS = torch.ops.fxround
RNG = torch.tensor([5, 2])
SIZES: Final = (1, 2, 3, 5, 7, 8, 9, 15, 17, 31, 33, 64, 65, 100)
Case = tuple[Callable[..., Any], list[Tensor], str]


class Draw(random.Random):
    """The random choices of a case."""

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of these sizes, with dimensions permuted in memory, some repeated, some with gaps."""
        order = self.sample(range(len(shape)), len(shape))
        gaps = [self.choice((1, 1, 1, 2)) for _ in shape]
        repeated = [self.random() < 0.1 for _ in shape]
        wide = [1 if repeated[d] else shape[d] * gaps[d] for d in order]
        generator = torch.Generator().manual_seed(self.randrange(1 << 30))
        x = torch.randn(wide, generator=generator).to(dtype)
        x = x.permute([order.index(d) for d in range(len(shape))])
        x = x[tuple(slice(None, None, 1 if repeated[d] else gaps[d]) for d in range(len(shape)))]
        return x.expand(shape)

    def sizes(self, most: int, limit: int = 4096) -> list[int]:
        found: list[int] = []
        for _ in range(self.randint(1, most)):
            fitting = [n for n in SIZES if n <= limit]
            found.append(self.choice(fitting))
            limit //= found[-1]
        return found


def maps(draw: Draw) -> Case:
    shape = draw.sizes(4)
    xs = [draw.tensor(*shape, dtype=draw.choice((torch.float32, torch.bfloat16))) for _ in range(2)]
    xs.append(draw.tensor(*shape[draw.randint(0, len(shape)) :]) > 0)
    program = f"t0 = mul(x0, x1) @ {SR}; t1 = mul(t0, x2) @ bfloat16; return t0, t1"
    return lambda *t: OPS.fused(t, program, "f32 bf16", RNG, [4]), xs, "fused"


def rounds(draw: Draw) -> Case:
    dtype = draw.choice((torch.float64, torch.float16))
    return (
        lambda x: OPS.pointwise([x], "t0 = identity(x0) @ e5m2/up_down", dtype, RNG, 1),
        [draw.tensor(*draw.sizes(4), dtype=dtype)],
        "pointwise",
    )


def blocks(draw: Draw) -> Case:
    shape = draw.sizes(3)
    x = draw.tensor(*shape, dtype=draw.choice((torch.float32, torch.float64, torch.bfloat16)))
    form = draw.choice(("mxfp8", "mxfp4:16", "int4:7", "nvfp4", "int8:channel", "mxfp8/toward_zero"))
    dim = draw.randrange(len(shape))
    return lambda x: fxround.round(x, form, dim=dim), [x], f"{form} along {dim}"


def reductions(draw: Draw) -> Case:
    shape = draw.sizes(4)
    dims = sorted(draw.sample(range(len(shape)), draw.randint(1, len(shape))))
    order = draw.choice(("lanes:16", "sequential", "exact"))
    steps = draw.choice((RNE, SR))
    return lambda x: OPS.sum(x, dims, False, order, steps, RNE, RNG, 1), [draw.tensor(*shape)], f"sum {dims} {order}"


def products_of(draw: Draw) -> Case:
    shape = draw.sizes(3)
    dims = [draw.randrange(len(shape))]
    return lambda x: OPS.prod(x, dims, True, RNE, RNE, RNG, 1), [draw.tensor(*shape)], f"prod {dims}"


def scans(draw: Draw) -> Case:
    shape = draw.sizes(3)
    dim = draw.randrange(len(shape))
    return lambda x: OPS.cumsum(x, dim, SR, RNE, RNG, 1), [draw.tensor(*shape)], f"cumsum {dim}"


def matmuls(draw: Draw) -> Case:
    m, k, n = (draw.choice(SIZES) for _ in range(3))
    batch = draw.choice(([], [3]))
    dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16))
    steps = draw.choice((RNE, SR, f"{RNE} chunk=7 combine=binary32"))
    a, b = draw.tensor(*batch, m, k, dtype=dtype), draw.tensor(*batch, k, n, dtype=dtype)
    final = RNE if dtype == torch.float32 else "bfloat16"
    return lambda a, b: OPS.matmul(a, b, steps, final, RNG, 1), [a, b], f"matmul {steps}"


def convolutions(draw: Draw) -> Case:
    dims, transposed = draw.choice((1, 2, 2)), draw.random() < 0.3
    groups, narrow, wide = draw.choice((1, 1, 3)), draw.choice((1, 2, 5)), draw.choice((1, 3, 8))
    size = [draw.choice((3, 7, 8, 13, 18)) for _ in range(dims)]
    taps, padding = ([draw.choice(of) for _ in range(dims)] for of in ((1, 2, 3), (0, 1)))
    stride, dilation = ([draw.choice((1, 1, 2)) for _ in range(dims)] for _ in range(2))
    into, out = groups * narrow, groups * wide
    x = draw.tensor(draw.choice((1, 2)), into, *size)
    w = draw.tensor(*((into, wide) if transposed else (out, narrow)), *taps)
    place = (stride, padding, dilation, transposed, [0] * dims, groups)
    steps = draw.choice((RNE, SR))
    tail = (steps, RNE, RNG, 1)
    try:
        like = OPS.convolution(x, w, *place, *tail)
    except ValueError:
        return convolutions(draw)
    grad = draw.tensor(*like.shape)
    kind = draw.choice(("result", "input gradient", "weight gradient"))
    said = f"convolution's {kind} {place} {steps}"
    if kind == "result":
        return lambda x, w: OPS.convolution(x, w, *place, *tail), [x, w], said
    if kind == "input gradient":
        return lambda g, w: OPS.convolution_input_gradient(g, w, list(x.shape), *place, *tail), [grad, w], said
    return lambda g, x: OPS.convolution_weight_gradient(g, x, list(w.shape), *place, *tail), [grad, x], said


def scatters(draw: Draw) -> Case:
    shape = draw.sizes(3)
    dim = draw.randrange(len(shape))
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    index = torch.randint(0, shape[dim], shape, generator=generator)
    x, source = draw.tensor(*shape), draw.tensor(*shape)
    if draw.random() < 0.5:
        return lambda x, i, s: OPS.scatter_add(x, dim, i, s, SR, RNG, 1), [x, index, source], f"scatter_add {dim}"
    rows = index.reshape(-1)[:7].remainder(shape[0])
    values = draw.tensor(len(rows), *shape[1:])
    return lambda x, i, v: OPS.index_put(x, [i], v, SR, RNG, 1), [x, rows, values], "index_put"


def gathers(draw: Draw) -> Case:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    rows, size, inner = draw.randint(1, 3), draw.randint(1, 40), (1 << 14) + draw.randrange(20)
    x = torch.randn(rows, size, generator=generator).to(draw.choice((torch.float32, torch.float64, torch.bfloat16)))
    index = torch.randint(0, size, (draw.randint(1, rows), inner), generator=generator)
    return lambda x, i: run_gather(x, 1, i), [x, index], "gather"


def pools(draw: Draw) -> Case:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    kernel = draw.randint(1, 4), draw.randint(1, 5)
    step, dilation = ((draw.randint(1, 3), draw.randint(1, 3)) for _ in range(2))
    padding = draw.randint(0, kernel[0] // 2), draw.randint(0, kernel[1] // 2)
    height, width = draw.randint(13, 30), draw.randint(13, 40)
    x = torch.randn(1 << 10, height, width, generator=generator).to(draw.choice((torch.float32, torch.float64)))
    return lambda x: run_max_pool2d(x, kernel, step, padding, dilation), [x], f"max pooling {kernel} {step} {padding}"


def schedules(draw: Draw) -> Case:
    """Chains over rows, contractions with the map that follows them, and the buffers between."""
    steps = [(draw.choice(GATHERED), draw.randrange(3), draw.randrange(3), draw.randrange(8)) for _ in range(3)]
    chosen = [(OPERATIONS.index(function), *rest) for function, *rest in steps]
    recipe = Recipe(tuple(chosen), policy=3 + draw.randrange(2), layout=draw.randrange(4), small=draw.randrange(3))
    model = build(recipe)
    running = schedule(optimize(lower(model.graph, Plan(Policy.parse(POLICIES[recipe.policy]), False))))

    def call(*inputs: Tensor) -> Any:
        with as_if_large(recipe.small):
            return running(*inputs, RNG)

    return call, list(model.inputs), f"schedule of {recipe}"


@cache
def softmax(order: str) -> fxround.RoundedModule:
    rule = Rule(rounding="binary32/stochastic", accumulate="binary32/stochastic", order=order)
    return fxround.compile(torch.nn.Softmax(-1), Policy("softmax", (rule,)), seed=3)


def chains(draw: Draw) -> Case:
    """A softmax in ranges of rows, of which the last one is usually shorter."""
    order, rows = (
        draw.choice(("sequential", "sequential", "lanes:16")),
        64 * draw.randint(1, 3) + draw.choice((1, 6, 13, 40)),
    )
    x = torch.randn(rows, draw.choice((24, 700)), generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))

    def call(x: Tensor) -> Tensor:
        with as_if_large(), torch.no_grad():
            return softmax(order)(x)  # type: ignore[no-any-return]

    return call, [x], f"softmax, {order}"


GATHERED: Final = (random_graphs.softmax, random_graphs.convolved, random_graphs.product, random_graphs.scaled)
KINDS: Final = (
    maps,
    rounds,
    blocks,
    reductions,
    products_of,
    scans,
    matmuls,
    matmuls,
    convolutions,
    convolutions,
    scatters,
    gathers,
    pools,
    schedules,
    chains,
)


def bits(result: Any) -> list[bytes]:
    """The bytes of a result's tensors."""
    tensors = result if isinstance(result, list | tuple) else [result]
    return [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def run(number: int) -> str | None:
    """Try a case on every instruction set; return the fault, or None."""
    draw = Draw(number)
    call, operands, said = KINDS[number % len(KINDS)](draw)
    layouts = ", ".join(f"{tuple(x.shape)} {x.stride()} {x.dtype}" for x in operands)
    for isa in instruction_sets():
        with instruction_set(isa):
            want = bits(call(*operands))
            for at_end in (True, False):
                place = "end" if at_end else "beginning"
                guard_pages.announce(number, f"{said} over {layouts}, {isa}, operands at the {place} of their pages")
                with guard_pages.everywhere(at_end):
                    if bits(call(*(guard_pages.guarded(x, at_end) for x in operands))) != want:
                        return f"{number} {said} over {layouts}, {isa}: other bits"
    return None


def one_element_too_far() -> None:
    """Run a kernel on one block more than its operand has, which must end the process."""
    kernel = pointwise(f"t0 = identity(x0) @ {RNE}", ("f32",), "f32")
    x, out = (guard_pages.empty((1024,), (1,), torch.float32, True) for _ in range(2))
    call = MapCall.of(kernel, [((1025,), (1,))])
    assert call is not None
    guard_pages.announce(0, "one element too far")
    call.over(range(call.blocks), array([x.data_ptr()]), array([out.data_ptr()]), (guard_pages.ctypes.c_uint32 * 4)())


def main() -> int:
    """Try the cases of the command line; print a line for each failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="begin", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--too-far", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.too_far:
        one_element_too_far()
        return 0
    for number in range(given.begin, given.cases):
        wrong = run(number)
        if wrong:
            print(f"FAIL {wrong}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
