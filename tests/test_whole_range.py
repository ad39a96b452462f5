"""float64 operands of every exponent, in every deterministic mode, against rational arithmetic (``rationals``).

FXROUND_RANGE_SEED=n draws others than seed 0 does, FXROUND_RANGE_ROUNDS=100 a hundred times as many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import rationals
import torch
from torch import Tensor
from whole_range import DETERMINISTIC, NO_KEY, RNG, ROUNDS, Operands, check

import fxround  # noqa: F401  (registers the operators)
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.kinds import Contract
from fxround.kernels.maps import fused_kernel, map_kernel
from fxround.kernels.program import Program
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats import FORMATS
from fxround.numerics.modes import Rounding
from fxround.runtime import reference

OPS = torch.ops.fxround
WIDE = ["custom(51,-900,0x1p+1023,signed+inf+nan+zero)", "custom(30,-500,0x1p+600,signed+inf+nan+zero)"]
WIDE += ["ieee(11,51)", "ieee(11,12)"]
NARROW = [name for name in FORMATS if name != "binary64"] + ["binary32-flush", *WIDE]


@pytest.mark.parametrize("mode", DETERMINISTIC)
def test_every_operator_rounds_the_exact_value_once(mode: str) -> None:
    draw = Operands("operators", mode)
    for name, (arity, exact) in rationals.OPERATORS.items():
        for _ in range(2 * ROUNDS):
            rounding = Rounding.parse(f"{draw.choice(NARROW)}/{mode}")
            text = f"t0 = {name}({', '.join(f'x{i}' for i in range(arity))}) @ {rounding}"
            operands = draw.of(name, 60)
            body = map_kernel(Program.parse(text), ("f64",) * arity, "f64").body
            rows = [[float(x) for x in row] for row in zip(*operands, strict=True)]
            check(body.evaluate(*operands)[0], [exact(*row, rounding) for row in rows], text, rows)


def test_compiled_operators_do_too() -> None:
    for mode in Operands("compiled").rng.choice(DETERMINISTIC, 2 * ROUNDS):
        draw = Operands("compiled", mode)
        rounding = Rounding.parse(f"{draw.choice(['binary32', 'bfloat16', 'e4m3fn', *WIDE])}/{mode}")
        texts, operands = [], []
        for name, (arity, _) in rationals.OPERATORS.items():
            names = ", ".join(f"x{len(operands) + i}" for i in range(arity))
            texts.append(f"t{len(texts)} = {name}({names}) @ {rounding}")
            operands += draw.of(name, 64)
        program = "; ".join((*texts, "return " + ", ".join(f"t{i}" for i in range(len(texts)))))
        xs = [torch.from_numpy(np.asarray(x)) for x in operands]
        found = OPS.fused(xs, program, " ".join(["f64"] * len(texts)), RNG, [])
        body = fused_kernel(Program.parse(program), ("f64",) * len(xs), ("f64",) * len(texts)).body
        for got, want in zip(found, body.evaluate(*operands), strict=True):
            check(got.numpy(), want, program)


OPTIONS = ["", " product={0}", " chunk=3 combine={0}", " product={0} chunk=2 combine={1}"]


def accumulation(draw: Operands, mode: str, formats: list[str]) -> Accumulation:
    others = [f"{draw.choice(formats)}/{draw.choice(DETERMINISTIC)}" for _ in range(2)]
    return Accumulation.parse(f"{draw.choice(formats)}/{mode}" + draw.choice(OPTIONS).format(*others))


def chained(how: Accumulation, store: Rounding, short: bool) -> rationals.Contraction:
    """The contraction by rational numbers. short: of operands of at most 32 bits, so that chains have their range."""
    step, combine = (r if r is None or not short else rationals.in_chain(r) for r in (how.step, how.combine))
    assert step is not None
    return lambda a, b: rationals.contraction(a, b, step, store, how.product, how.chunk, combine)


CHAIN_FORMATS = ["binary32", "bfloat16", "binary16", "e4m3fn", "tf32", *WIDE]


@pytest.mark.parametrize("mode", DETERMINISTIC)
def test_contractions_round_every_step(mode: str) -> None:
    draw = Operands("contractions", mode)
    for _ in range(4 * ROUNDS):
        how, store = accumulation(draw, mode, CHAIN_FORMATS), Rounding.parse("binary64")
        kernel = contract_kernel(how, store, ("f64", "f64"), "f64")
        rows = [draw.chain(int(draw.rng.integers(1, 9))) for _ in range(8)]
        for a, b in rows:
            got = product(kernel, a, b)
            check([got], [chained(how, store, False)(a, b)], how, [[*a, *b]])


def product(kernel: Contract, a: list[float], b: list[float]) -> float:
    """One chain, by the formula that the compiled kernels are compared with."""
    left, right = np.asarray(a).reshape(1, 1, -1), np.asarray(b).reshape(1, -1, 1)
    return float(reference.contract(kernel, left, right, NO_KEY)[0, 0, 0])


@pytest.mark.parametrize("mode", DETERMINISTIC)
def test_options_of_an_accumulator_leave_its_range_alone(mode: str) -> None:
    """Over float32 operands too: sums that leave binary32's range and come back."""
    draw = Operands("options", mode)
    for _ in range(4 * ROUNDS):
        how = accumulation(draw, mode, ["binary32", "bfloat16", "binary16", "tf32"])
        store = Rounding.parse("binary32")
        kernel = contract_kernel(how, store, ("f32", "f32"), "f32")
        powers = np.ldexp(1.0, draw.rng.choice([127, 126, -149, -140, 0], 6))
        a = (powers * draw.rng.choice([-1, 1], 6)).astype(np.float32)
        b = draw.rng.choice([1.0, 1.5, 2.0], 6).astype(np.float32)
        got = reference.contract(kernel, a.reshape(1, 1, -1), b.reshape(1, -1, 1), NO_KEY)
        check(got, [chained(how, store, True)(a.tolist(), b.tolist())], how, [[*a, *b]])


def test_no_option_brings_back_what_overflowed() -> None:
    x = torch.tensor([[2.0**127, 2.0**127, -(2.0**127), -(2.0**127), 1]])
    for option in ("", " product=bfloat16", " product=binary64", " chunk=5 combine=bfloat16/toward_zero"):
        text = str(Accumulation.parse("binary32" + option))
        assert OPS.matmul(x, torch.ones(5, 1), text, "binary32/nearest_even/inf", RNG, 0).item() == math.inf, option


def lists(x: Tensor) -> Any:
    return x.tolist()


@dataclass(frozen=True)
class Plane:
    """Shapes of a convolution and of a transposed one that has the first one's result as its input."""

    image: tuple[int, ...]
    channels: int
    results: int
    taps: tuple[int, ...]
    windows: rationals.Windows
    extra: tuple[int, ...]


def plane(draw: Operands, dims: int) -> Plane:
    """Small ones, of which each dimension has its own stride, padding, dilation and output padding."""

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(v) for v in draw.rng.integers(low, high, dims))

    groups = int(draw.rng.integers(1, 3))
    stride, dilation = each(1, 3), each(1, 3)
    windows = rationals.Windows(stride, each(0, 2), dilation, groups)
    # PyTorch's condition: below the stride or below the dilation.
    extra = tuple(int(draw.rng.integers(0, max(s, d))) for s, d in zip(stride, dilation, strict=True))
    image = (7,) if dims == 1 else each(3, 5 if dims == 2 else 4)
    channels, results = (groups * int(n) for n in draw.rng.integers(1, 3, 2))
    return Plane(image, channels, results, each(1, 3), windows, extra)


@pytest.mark.part("2")
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_and_their_gradients(dims: int) -> None:
    for turn in range((2 if dims == 2 else 1) * ROUNDS):
        draw = Operands("convolutions", dims, turn)
        how, store = accumulation(draw, draw.choice(DETERMINISTIC), CHAIN_FORMATS), Rounding.parse("binary64")
        this = plane(draw, dims)
        windows, groups = this.windows, this.windows.groups
        shape = (2, this.channels, *this.image)
        taps = (this.results, this.channels // groups, *this.taps)
        # Products at the ends, sums that cancel: factors of one chain, cut in the shapes wanted.
        a, b = (np.asarray(v) for v in draw.chain(max(math.prod(shape), math.prod(taps))))
        x, w = a[: math.prod(shape)].reshape(shape), b[: math.prod(taps)].reshape(taps)
        tail, exact = (str(how), str(store), RNG, 0), chained(how, store, False)
        steps = [list(v) for v in (windows.stride, windows.pad, windows.dilation)]

        def tensors(*xs: Any) -> list[Tensor]:
            return [torch.from_numpy(v) for v in xs]

        geometry = (*steps, False, [0] * dims, groups)
        y = OPS.convolution(*tensors(x, w), *geometry, *tail)
        check(y, rationals.convolution(x, w, windows, exact), how, geometry)
        g = draw.values(y.numel(), 0.01).reshape(y.shape)
        got = OPS.convolution_input_gradient(*tensors(g, w), shape, *geometry, *tail)
        check(got, rationals.transposed(g, w, windows, this.image, exact), how, geometry)
        got = OPS.convolution_weight_gradient(*tensors(g, x), taps, *geometry, *tail)
        check(got, rationals.weight_gradient(g, x, this.taps, windows, exact), how, geometry)
        # A transposed convolution: the weight's gradient runs over the pixels of its input.
        geometry = (*steps, True, list(this.extra), groups)
        z = OPS.convolution(*tensors(g, w), *geometry, *tail)
        check(z, rationals.transposed(g, w, windows, z.shape[2:], exact), how, geometry)
        h = draw.values(z.numel(), 0.01).reshape(z.shape)
        got = OPS.convolution_weight_gradient(*tensors(h, g), taps, *geometry, *tail)
        check(got, rationals.weight_gradient(g, h, this.taps, windows, exact), how, geometry)
        got = OPS.convolution_input_gradient(*tensors(h, w), g.shape, *geometry, *tail)
        # An output padding that is not below the stride leaves room for more windows than there were.
        full = rationals.convolution(h, w, windows, exact)[(..., *(slice(n) for n in g.shape[2:]))]
        check(got, full, how, geometry)


def test_reductions_round_every_addition() -> None:
    for turn in range(3 * ROUNDS):
        draw = Operands("reductions", turn)
        step = Rounding.parse(f"{draw.choice(CHAIN_FORMATS)}/{draw.choice(DETERMINISTIC)}")
        tail = (str(step), "binary64/nearest_even/inf", RNG, 0)
        rows = []
        for _ in range(6):
            a, b = draw.chain(19)
            with np.errstate(all="ignore"):
                rows.append([v if math.isfinite(v) else 1.0 for v in np.multiply(a, b).tolist()])
        x = torch.tensor(rows, dtype=torch.float64)
        want = {
            "sequential": [rationals.sequential(row, step)[-1] for row in rows],
            "lanes:16": [rationals.lanes(row, 16, step) for row in rows],
            "exact": [rationals.exact_sum(row, step) for row in rows],
        }
        for order, totals in want.items():
            check(OPS.sum(x, [1], False, order, *tail), totals, order, step, rows)
        check(OPS.cumsum(x, 1, *tail), [rationals.sequential(row, step) for row in rows], "cumsum", step)
        a, b = draw.values(12, 0.01), draw.values(12, 0.01)
        with np.errstate(all="ignore"):
            factors = torch.from_numpy(np.stack([a, np.where(np.isfinite(b / a), b / a, 1.0)], 1)).reshape(2, 12)
        prefixes = [rationals.products(row, step) for row in lists(factors)]
        check(OPS.cumprod(factors, 1, *tail), prefixes, "cumprod", step)
        check(OPS.prod(factors, [1], False, *tail), [row[-1] for row in prefixes], "prod", step)
        begin = torch.from_numpy(draw.values(1, 0.0))
        got = OPS.scatter_add(begin, 0, torch.zeros(19, dtype=torch.int64), x[0], str(step), RNG, 0)
        check(got, [rationals.sequential(rows[0], step, begin.item())[-1]], "scatter_add", step)
