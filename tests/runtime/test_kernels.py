"""Compiled kernels against the NumPy reference, encoding for encoding: modes, layouts, tails, threads, widths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from unittest import mock

import gmpy2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_operands import ACCUMULATORS, BINARY32, DRAW, KEY, layouts, same, stored, values
from torch import Tensor

from fxround.graph.dtypes import FORMAT_OF, STORAGES
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.kinds import Word
from fxround.kernels.maps import fused_kernel, map_kernel
from fxround.kernels.program import Program
from fxround.kernels.reductions import cumsum_kernel, scatter_kernel, sum_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.arithmetic.operators import OPERATORS
from fxround.numerics.formats import FORMATS
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.orders import Order
from fxround.numerics.specification.exact import round_exact
from fxround.runtime import reference
from fxround.runtime.cpu import pointwise
from fxround.runtime.cpu.code import current_machine, instruction_set
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.cpu.llvm.map import MapVariant, build_map
from fxround.runtime.cpu.llvm.stages import stages_of
from fxround.runtime.cpu.reduction import run_reduce, run_scan
from fxround.runtime.draw import NO_KEY, Draw
from fxround.runtime.run import run_kernel, run_map, run_product


def in_turn(cases: Sequence[str]) -> list[tuple[str, str]]:
    """Every case on the host's own instruction set, and on one of the named sets in turn."""
    named = instruction_sets()[1:]
    return [(case, isa) for i, case in enumerate(cases) for isa in ("host", named[i % len(named)])]


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of the host."""
    with instruction_set(request.param):
        yield request.param


@pytest.mark.part(5)
@pytest.mark.parametrize("mode, isa", in_turn([*MODES, "stochastic:3"]))
def test_map_equals_the_reference_in_every_mode_and_width(mode: str, isa: str) -> None:
    for fmt in ("binary32", "bfloat16", "e4m3fn", "e2m1fn", "e8m0fnu", "ue5m3", "binary16-flush"):
        program = Program.parse(f"t0 = identity(x0) @ {fmt}/{mode}")
        x = values((5, 77), 1, special=True)
        with instruction_set(isa):
            got = run_map(program, [x], torch.float32, DRAW)
        same(got, reference.map_(map_kernel(program, ("f32",), "f32"), [stored(x)], KEY))


@pytest.mark.part(9)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_equals_the_reference(name: str) -> None:
    arity = OPERATORS[name].arity
    operands = [values((131,), i, special=True) for i in range(arity)]
    for mode in ("nearest_even", "toward_negative", "stochastic", "up_down"):
        arguments = ", ".join(f"x{i}" for i in range(arity))
        program = Program.parse(f"t0 = {name}({arguments}) @ binary32/{mode}")
        kernel = map_kernel(program, ("f32",) * arity, "f32")
        same(
            run_map(program, operands, torch.float32, DRAW), reference.map_(kernel, [stored(x) for x in operands], KEY)
        )


@pytest.mark.part(5)
@pytest.mark.parametrize("dtype", STORAGES)
def test_map_takes_any_layout(dtype: torch.dtype, isa: str) -> None:
    mode = "nearest_even" if dtype == torch.float64 else "stochastic"
    program = Program.parse(f"t0 = add(x0, x1) @ {FORMAT_OF[dtype]}/{mode}")
    shape = (3, 70, 67)
    results = [run_map(program, [x, values((67,), 5, dtype)], dtype, DRAW) for x in layouts(shape, 2, dtype)]
    kernel = map_kernel(program, (STORAGES[dtype],) * 2, STORAGES[dtype])
    want = reference.map_(kernel, [stored(values(shape, 2, dtype)), stored(values((67,), 5, dtype))], KEY)
    for got in results:
        assert got.is_contiguous()
        same(got, want)


SIZES = st.sampled_from([1, 2, 3, 7, 16, 32, 49, 63, 64, 65, 130])


@st.composite
def operands(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """Values that broadcast to the shape, with dimensions permuted in memory, with steps, or of size 1."""
    order = draw(st.permutations(range(len(shape))))
    kept = [1 if draw(st.booleans()) else shape[d] for d in order]
    steps = [draw(st.sampled_from([1, 1, 2])) for _ in kept]
    x = values(tuple(n * s for n, s in zip(kept, steps, strict=True)), draw(st.integers(0, 9)))
    return x[tuple(slice(None, None, s) for s in steps)].permute(*(order.index(d) for d in range(len(shape))))


@settings(max_examples=150)
@given(st.data())
def test_map_walks_any_strides(data: st.DataObject) -> None:
    """To nearest even in its own format an addition is PyTorch's."""
    shape = tuple(data.draw(st.lists(SIZES, min_size=1, max_size=4).filter(lambda s: math.prod(s) < 50_000)))
    x, y = (torch.broadcast_to(data.draw(operands(shape)), shape) for _ in range(2))
    with mock.patch.object(pointwise, "ENOUGH", 64):  # every thread begins somewhere in the middle
        got = run_map(Program.parse("t0 = add(x0, x1) @ binary32"), [x, y], torch.float32, DRAW)
    assert torch.equal(got, x + y)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (63,), (64,), (65,), (2, 1, 2, 1, 2, 1, 2, 1, 2, 3)])
def test_map_takes_any_shape(shape: tuple[int, ...]) -> None:
    program = Program.parse("t0 = mul(x0, x1) @ binary32/stochastic")
    x, y = values(shape, 1), values((), 2)
    kernel = map_kernel(program, ("f32", "f32"), "f32")
    same(
        run_map(program, [x, y], torch.float32, DRAW),
        reference.map_(kernel, [stored(x), stored(y)], KEY).reshape(shape),
    )


@pytest.mark.part(3)
@pytest.mark.parametrize("dtype, isa", [(torch.float32, "host"), (torch.float32, "sse2"), (torch.float64, "host")])
def test_the_last_vectors_of_a_map_write_their_elements_alone(dtype: torch.dtype, isa: str) -> None:
    """Lengths that end at a vector's end and inside of one, in one stage and in several, in place and beside others."""
    name = STORAGES[dtype]
    rounding = f"{'binary64' if dtype == torch.float64 else 'binary32'}/stochastic"
    one = Program.parse(f"t0 = add(x0, x1) @ {rounding}")
    several = Program.parse(
        f"t0 = mul(x0, x1) @ {rounding}; t1 = add(t0, x0) @ {rounding}; t2 = mul(t1, x1) @ {rounding}"
    )
    for program, n in itertools.product((one, several), (1, 8, 15, 16, 24, 31, 32, 33, 48, 56, 64, 72, 80, 96)):
        kernel = map_kernel(program, (name,) * 2, name)
        wide, y = values((3, 2 * n), n, dtype), values((3, n), 1, dtype)
        for x in (wide[:1, :n], wide[:, n:], wide[:, :n].contiguous()):
            memory = torch.full((x.numel() + 2 * n,), 7.0, dtype=dtype)
            out = memory[n:-n].view(x.shape)
            out.copy_(x)
            with instruction_set(isa):
                got = run_map(program, [x, y[: len(x)]], dtype, DRAW, out)
            want = reference.map_(kernel, [stored(x), stored(y[: len(x)])], KEY)
            same(got, want)
            out.copy_(x)
            with instruction_set(isa):
                same(run_map(program, [out, y[: len(x)]], dtype, DRAW, out), want)
            assert (memory[:n] == 7).all() and (memory[-n:] == 7).all()


def test_a_program_of_several_statements_draws_for_each() -> None:
    text = "t0 = mul(x0, 0x1.8p+1) @ binary32/stochastic; t1 = add(t0, x1) @ binary16/stochastic; t2 = neg(t1) @ exact"
    program = Program.parse(text)
    assert str(Program.parse(str(program))) == str(program)
    x, y = values((200,), 1), values((200,), 2)
    kernel = map_kernel(program, ("f32", "f32"), "f32")
    assert kernel.draws == (Word(0, 0), Word(0, 1))
    same(run_map(program, [x, y], torch.float32, DRAW), reference.map_(kernel, [stored(x), stored(y)], KEY))


@pytest.mark.part(3)
@pytest.mark.parametrize("name, isa", in_turn(["float32", "bfloat16", "float64"]))
def test_a_long_body_is_cut_into_stages_that_change_no_bit(name: str, isa: str) -> None:
    """Values of every stage are read later: by the next, by the last, as a result, and in two lane counts."""
    text = (
        "t0 = add(x0, x1) @ binary32/nearest_even; t1 = mul(t0, x0) @ bfloat16/stochastic; "
        "t2 = exp(t1) @ binary32/stochastic; t3 = where_lt(t0, x1, t2, x0) @ exact; "
        "t4 = fma(t3, t0, t1) @ bfloat16/up_down; t5 = neg(t4) @ exact; t6 = mul(t4, t0) @ bfloat16/stochastic; "
        "t7 = sub(t6, t0) @ bfloat16/toward_zero; return t1, t4, t5, t7"
    )
    dtype = getattr(torch, name)
    storage = STORAGES[dtype]
    kernel = fused_kernel(Program.parse(text), (storage, storage), (storage,) * 4)
    stages = stages_of(kernel)
    assert len(stages) > 3 and stages[-1].results == kernel.body.results
    x, y = (values((3, 75), i, special=True).to(dtype) for i in (1, 2))
    nodes = tuple(range(20, 20 + kernel.nodes))
    with instruction_set(isa):
        got = pointwise.run_kernel(kernel, [x, y.t().contiguous().t()], DRAW.keys(nodes))
    for a, b in zip(got, reference.maps(kernel, [stored(x), stored(y)], KEY[:3], nodes), strict=True):
        same(a, b)


@pytest.mark.part(11)
@pytest.mark.parametrize("accumulate, isa", in_turn(ACCUMULATORS))
def test_contract_equals_the_reference(accumulate: str, isa: str) -> None:
    for batch, rows, columns, length in ((1, 7, 19, 23), (3, 1, 1, 40), (2, 9, 33, 1), (1, 2, 5, 0)):
        a = values((batch, rows, length), 1, special=length == 23)
        b = values((batch, length, columns), 2, special=length == 23)
        kernel = contract_kernel(Accumulation.parse(accumulate), BINARY32, ("f32", "f32"), "f32")
        with instruction_set(isa):
            got = run_product(kernel, a, b, 0, DRAW)
        same(got, reference.contract(kernel, stored(a), stored(b), KEY))


@pytest.mark.part(3)
@pytest.mark.parametrize("dtype", STORAGES)
def test_contract_takes_every_dtype_and_layout(dtype: torch.dtype) -> None:
    storage = STORAGES[dtype]
    own = Rounding.parse(FORMAT_OF[dtype])
    kernel = contract_kernel(Rounding.parse("bfloat16/stochastic"), own, (storage, storage), storage)
    a, b = values((2, 5, 11), 1, dtype), values((2, 11, 21), 2, dtype)
    want = reference.contract(kernel, stored(a), stored(b), KEY)
    for left in layouts((2, 5, 11), 1, dtype):
        for right in layouts((2, 11, 21), 2, dtype):
            same(run_product(kernel, left, right, 0, DRAW), want)


# The default order with every accumulator, the others in turn.
ORDERED = [
    (accumulate, order)
    for i, accumulate in enumerate(ACCUMULATORS)
    for order in ("lanes:16", ("sequential", "lanes:2", "lanes:64")[i % 3])
]


@pytest.mark.part(5)
@pytest.mark.parametrize("accumulate, order", ORDERED)
def test_reduce_equals_the_reference_along_and_across(accumulate: str, order: str) -> None:
    kernel = sum_kernel(Order.parse(order), Accumulation.parse(accumulate).step, BINARY32, "f32", "f32")
    for length in (0, 1, 5, 17, 100):
        x = values((6, length), 3, special=length == 17)
        want = reference.reduce(kernel, stored(x), KEY)
        same(run_reduce(kernel, x[:, :, None], DRAW)[:, 0], want)
        same(run_reduce(kernel, x.t()[None], DRAW)[0], want)


def test_reduce_is_the_same_in_every_width(isa: str) -> None:
    for accumulate in ("binary32", "binary32/stochastic", "binary16/up_down"):
        kernel = sum_kernel(Order.parse("lanes:16"), Rounding.parse(accumulate), BINARY32, "f32", "f32")
        x = values((37, 70), 3)
        want = reference.reduce(kernel, stored(x), KEY)
        same(run_reduce(kernel, x[:, :, None], DRAW)[:, 0], want)
        same(run_reduce(kernel, x.t()[None], DRAW)[0], want)


@pytest.mark.part(3)
@pytest.mark.parametrize("accumulate", ["binary32", "binary32/stochastic", "bfloat16/up_down", "binary64"])
def test_scan_equals_the_reference(accumulate: str, isa: str) -> None:
    kernel = cumsum_kernel(Rounding.parse(accumulate), BINARY32, "f32", "f32")
    x = values((21, 13), 3)
    want = reference.scan(kernel, stored(x), KEY)
    same(run_scan(kernel, x[:, :, None], DRAW)[:, :, 0], want)
    same(run_scan(kernel, x.t()[None], DRAW)[0].t(), want)


def test_threads_change_no_bit() -> None:
    x, y = values((300, 1000), 1), values((300, 1000), 2)
    program = Program.parse("t0 = add(x0, x1) @ binary32/stochastic")
    product = contract_kernel(Rounding.parse("binary32/stochastic"), BINARY32, ("f32", "f32"), "f32")
    total = sum_kernel(Order.parse("lanes:16"), Rounding.parse("binary32/stochastic"), BINARY32, "f32", "f32")
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(
                (
                    run_map(program, [x, y], torch.float32, DRAW),
                    run_product(product, x[None], y.t()[None], 1, DRAW),
                    run_reduce(total, x[:, :, None], DRAW),
                    run_reduce(total, x[None], DRAW),
                )
            )
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_nearest_even_contraction_is_fmaf_in_order() -> None:
    """acc = +0; acc = fmaf(a_k, b_k, acc): the hardware's step equals the general one (to odd, then rounded)."""
    a, b = values((1, 4, 50), 1), values((1, 50, 6), 2)
    kernel = contract_kernel(BINARY32, BINARY32, ("f32", "f32"), "f32")
    general = contract_kernel(Rounding.parse("binary32/nearest_even/saturate"), BINARY32, ("f32", "f32"), "f32")
    assert kernel.accumulator == "f32" and general.accumulator == "f64"
    assert torch.equal(run_product(kernel, a, b, 0, DRAW), run_product(general, a, b, 0, DRAW))


def test_shapes_are_checked_before_pointers_are_taken() -> None:
    kernel = contract_kernel(BINARY32, BINARY32, ("f32", "f32"), "f32")
    with pytest.raises(ValueError, match="inner sizes or batches differ"):
        run_product(kernel, values((1, 2, 3), 1), values((1, 4, 2), 1), 0, DRAW)
    with pytest.raises(TypeError, match=r"got dtype torch\.int64"):
        run_map(Program.parse("t0 = neg(x0) @ exact"), [torch.zeros(3, dtype=torch.int64)], torch.float32, DRAW)
    with pytest.raises(ValueError, match="values of binary64 that a binary32 tensor cannot store"):
        run_map(Program.parse("t0 = identity(x0) @ binary64"), [values((3,), 1)], torch.float32, DRAW)
    with pytest.raises(ValueError, match="cannot store"):
        run_map(Program.parse("t0 = identity(x0) @ binary32"), [values((3,), 1)], torch.float16, DRAW)


def test_every_named_format_can_be_rounded_to_in_binary64() -> None:
    x = values((100,), 1, torch.float64, special=True)
    for fmt in FORMATS:
        program = Program.parse(f"t0 = identity(x0) @ {fmt}")
        same(
            run_map(program, [x], torch.float64, DRAW),
            reference.map_(map_kernel(program, ("f64",), "f64"), [stored(x)], KEY),
        )


@pytest.mark.parametrize(
    "rounding", ["ieee(11,52)/nearest_even/inf", "binary64/toward_zero", "binary64/toward_positive"]
)
@pytest.mark.parametrize("name", ["add", "exp"])
def test_float32_operands_are_rounded_to_the_bits_of_binary64(name: str, rounding: str) -> None:
    """Sums of float32 numbers far apart, and exponentials, have more bits than binary64."""
    exponents = torch.tensor([-149, -126, -60, -30, -1, 0, 1, 30, 60, 126] if name == "add" else [-20, -3, 0, 3, 6])
    x = torch.ldexp(torch.rand(4, len(exponents)) + 0.5, exponents).flatten()
    operands = [x, x.flip(0) * -0.75] if name == "add" else [x]
    arguments = ", ".join(f"x{i}" for i in range(len(operands)))
    program = f"t0 = {name}({arguments}) @ {rounding}"
    got = torch.ops.fxround.pointwise(operands, program, torch.float64, torch.tensor([0, 0]), 1)
    with gmpy2.context(precision=300):
        for result, *given in zip(got.tolist(), *(o.tolist() for o in operands), strict=True):
            exact = (
                sum(map(Fraction, given))
                if name == "add"
                else Fraction(*map(int, gmpy2.exp(gmpy2.mpfr(given[0])).as_integer_ratio()))
            )
            assert result == round_exact(exact, exact < 0, Rounding.parse(rounding)), given


def test_scatter_kernels_are_made_once() -> None:
    assert scatter_kernel(Rounding.parse("binary32"), "f32") is scatter_kernel(Rounding.parse("binary32"), "f32")


_R = "binary32/nearest_even/inf"


@pytest.mark.parametrize(
    "program",
    [
        f"t0 = sub(x0, x1) @ {_R}; t1 = exp(t0) @ {_R}; return t1",
        f"t0 = sub(x0, x1) @ {_R}; t1 = mul(t0, t0) @ {_R}; t2 = add(t1, x1) @ {_R}; return t0, t2",
        f"t0 = div(x0, x1) @ {_R}; t1 = tanh(t0) @ {_R}; t2 = sqrt(t1) @ {_R}; t3 = log(t2) @ {_R}; return t3",
        f"t0 = mul(x0, x1) @ {_R}; t1 = neg(t0) @ exact; return t1",
        f"t0 = mul(x0, x1) @ {_R}; t1 = where_lt(x0, x1, t0, x1) @ exact; return t1",
        f"t0 = add(x0, x1) @ {_R}; t1 = mul(t0, x1) @ bfloat16/nearest_even/inf; return t1",
        f"t0 = fma(x0, x1, x0) @ {_R}; t1 = add(t0, x1) @ binary32/stochastic/inf; return t1",
    ],
)
def test_a_chain_has_the_nans_of_its_operations(program: str) -> None:
    # NaNs of both signs and many payloads, quiet and signalling, infinities and numbers, in all pairs.
    codes = [0x7F800000, 0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7FA00000, 0x7FD55555, 0, 0x3F800000, 0x00000001]
    values = torch.tensor([c - (s << 31) for c in codes for s in (0, 1)], dtype=torch.int32).view(torch.float32)
    x0, x1 = (t.reshape(-1).contiguous() for t in torch.meshgrid(values, values, indexing="ij"))
    rng = torch.tensor([1, 2])
    *statements, returned = program.split("; ")
    names = returned.removeprefix("return ").split(", ")
    found = torch.ops.fxround.fused([x0, x1], program, " ".join(["f32"] * len(names)), rng, [5, 6])
    env = {"x0": x0, "x1": x1}
    for statement in statements:
        target, rest = statement.split(" = ")
        used = rest[rest.index("(") + 1 : rest.index(")")].split(", ")
        alone = rest.replace(", ".join(used), ", ".join(f"x{i}" for i in range(len(used))), 1)
        operands = [env[name] for name in used]
        env[target] = torch.ops.fxround.pointwise(operands, f"t0 = {alone}", torch.float32, rng, 5)
    for name, result in zip(names, found, strict=True):
        assert torch.equal(result.view(torch.int32), env[name].view(torch.int32)), name


def test_maps_over_rows_begin_and_end_at_any_block() -> None:
    shape = (2, 3, 192)
    operands = [torch.rand(shape), torch.rand(2, 3, 1), torch.rand(192), torch.rand(3, 192), torch.rand(())]
    program = "t0 = fma(x0, x1, x2) @ R; t1 = add(t0, x3) @ R; t2 = mul(t1, x4) @ binary32/stochastic/inf"
    kernel = map_kernel(Program.parse(program.replace("@ R", f"@ {_R}")), ("f32",) * 5, "f32")
    call, key = pointwise.call_for(kernel, operands), Draw(3, 4, 5).key()
    assert call is not None and call.blocks == 18
    whole = torch.empty(shape)
    call.over(
        range(18), pointwise.array(pointwise.addresses(operands)), pointwise.array(pointwise.addresses([whole])), key
    )
    (expected,) = pointwise.run_kernel(kernel, [x.expand(shape).contiguous() for x in operands], key)
    assert torch.equal(whole, expected)
    for begin in range(18):
        for end in range(begin, 19):
            part = torch.full((18, 64), -1.0)
            call.over(
                range(begin, end),
                pointwise.array(pointwise.addresses(operands)),
                pointwise.array(pointwise.addresses([part])),
                key,
            )
            assert torch.equal(part[begin:end], expected.reshape(18, 64)[begin:end])
            assert bool((part[:begin] == -1).all() and (part[end:] == -1).all())


def test_what_all_elements_share_is_computed_once() -> None:
    """A quotient of operands of one element is no part of a loop, with the bits of operands that are as wide as all."""
    program = Program.parse(f"t0 = div(x1, x2) @ {BINARY32}; t1 = mul(x0, t0) @ {BINARY32}; return t1")
    kernel = fused_kernel(program, ("f32",) * 3, ("f32",))
    x, ones = torch.randn(200), [torch.tensor([7.0]), torch.tensor([3.0])]
    variant = MapVariant(kernel, ("contiguous", "scalar", "scalar"), current_machine())
    assert "fdiv <" not in build_map(variant) and "fdiv float" in build_map(variant)
    wide = MapVariant(kernel, ("contiguous",) * 3, current_machine())
    assert "fdiv <" in build_map(wide)
    for isa in instruction_sets():
        with instruction_set(isa):
            (got,) = run_kernel(kernel, [x, *ones], NO_KEY)
            (want,) = run_kernel(kernel, [x, *(one.expand(200).contiguous() for one in ones)], NO_KEY)
            assert torch.equal(got, want), isa
            # A result in the memory of the only element of an operand.
            (alone,) = run_kernel(kernel, [x[:1], *ones], NO_KEY)
            for i in range(3):
                operands = [x[:1].clone(), *(one.clone() for one in ones)]
                run_kernel(kernel, operands, NO_KEY, [operands[i]])
                assert torch.equal(operands[i], alone), (isa, i)
