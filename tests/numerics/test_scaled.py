"""Scaled formats: every element equals the specification over rational numbers, bit for bit."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scaled_blocks import specified
from torch import Tensor

import fxround
from fxround.eager import blocks as eager_blocks
from fxround.eager import round as eager_round
from fxround.graph.dtypes import FORMAT_OF
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.fixed_point import fixed_point
from fxround.numerics.formats.scaled import SCALED, ScaledFormat, ScaledRounding, is_scaled
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_float
from fxround.numerics.specification.exact_scaled import largest

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FORMS = [
    *SCALED,
    *("int8", "int4:8", "int16:channel", "int2:3", "bfp(6,16)", "bfp(2,5)"),
    "scaled(e4m3fn;32,e8m0fnu,even)",
    "scaled(e2m1fn;32,e8m0fnu,ceil)",
    "scaled(int8;7,e8m0fnu,shift)",
    "scaled(e4m3fn;16,e8m0fnu,up)",
    "scaled(e2m1fn;16,ue5m3,nearest,binary32)",
    "scaled(e5m2;tensor,binary32,nearest)",
    "scaled(nf4;16,binary32,nearest)",
    "scaled(table(-1,-0.5,0,0.25,3);7,e8m0fnu,floor)",
    "fixed(8,4)",
    "fixed(20,0)",
    "fixed(4,-2)",
    "ufixed(8,4)",
    "uint8",
    "uint4:8",
    "uint16:channel",
    "uint2:2x3",
    "scaled(int8;5,bfloat16,nearest)",
    "scaled(uint4;3,binary16,affine)",
    "int8:scale=0.1",
    "int8:scale=0.37,zero=-3",
    "uint4:scale=0.5,zero=9",
    "scaled(e4m3fn;fixed,scale=0.0123046875)",
    "int8:channel,percentile=90",
    "int4:8,percentile=50.5",
    "int4:16,fit=7:8:9.5",
    "nvfp4:16,fit=6:4",
    "mxfp8:5,percentile=70",
    "scaled(e4m3fn;tensor,binary32,inverse)",
    "scaled(e5m2;8,e8m0fnu,inverse)",
    "scaled(e4m3fn;2x8,binary32,inverse)",
]
WRAPPED = ["fixed(8,4)", "fixed(4,-2)", "ufixed(8,2)", "fixed(2,0)", "fixed(24,10)", "uint4:scale=0.5,zero=9"]
MODES = ["nearest_even", "nearest_away", "toward_zero", "toward_positive", "to_odd", "stochastic", "stochastic:5"]


def operand(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Elements of very different exponents, with zeros of both signs, subnormals, infinities, NaNs and empty blocks."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))
    with np.errstate(over="ignore"):
        found = torch.from_numpy(x).to(dtype)
    flat = found.view(-1)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, torch.finfo(dtype).tiny / 4, torch.finfo(dtype).max]
    for value in special:
        if flat.numel():
            flat[rng.integers(0, flat.numel())] = value
    if found.dim() == 2 and found.shape[0] > 3:
        found[1], found[2] = 0.0, math.nan
        found[3] = torch.finfo(dtype).tiny / 2
    return found


def require_same(x: Tensor, text: str, dim: int = -1, seed: int = 0) -> None:
    got = fxround.round(x, text, seed=seed, dim=dim)
    assert got.dtype == x.dtype and got.shape == x.shape and got.is_contiguous()
    wanted = torch.tensor(specified(x, text, dim, seed), dtype=torch.float64).reshape(x.shape)
    bits = torch.where(got.isnan(), torch.nan, got.double()).view(torch.int64)
    expected = torch.where(wanted.isnan(), torch.nan, wanted).view(torch.int64)
    wrong = (bits != expected).nonzero()
    assert not len(wrong), (text, x.dtype, [(x[tuple(i)], got[tuple(i)], wanted[tuple(i)]) for i in wrong[:3]])


def is_held(text: str, dtype: torch.dtype) -> bool:
    """Whether a tensor holds the elements: those of fixed point as they are, others within its carrier."""
    form = ScaledFormat.parse(text)
    if form.scaling is None and form.unit is None:
        return form.element.within(Format.parse(FORMAT_OF[dtype]))
    return dtype == torch.float64 or form.element.precision <= 24


@pytest.mark.part(11)
@pytest.mark.parametrize("text", FORMS)
def test_every_element_is_the_specification_s(text: str) -> None:
    for dtype in DTYPES:
        if is_held(text, dtype):
            require_same(operand((5, 41), dtype), text)


@pytest.mark.part(3)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_goes_with_every_scaling(mode: str) -> None:
    for text in ("mxfp8", "nvfp4", "int8", "int4:8", "bfp(6,16)", "fixed(8,4)"):
        require_same(operand((4, 37), torch.float32, seed=1), f"{text}/{mode}", seed=9)


@pytest.mark.parametrize("shape", [(70,), (3, 4, 33), (2, 3, 2, 5), (1, 1), (64, 2)])
@pytest.mark.parametrize("text", ["mxfp8:4", "nvfp4/stochastic", "int8:channel", "mxfp4:2x3"])
def test_blocks_run_along_any_dimension_and_the_last_may_be_shorter(text: str, shape: tuple[int, ...]) -> None:
    x = operand(shape, torch.float32, seed=2)
    if "x3" in text and len(shape) < 2:
        with pytest.raises(ValueError, match=r"needs two dimensions, .* blocks of a row, such as"):
            fxround.round(x, text)
        return
    for dim in range(-1, len(shape)):
        require_same(x, text, dim)


@given(st.integers(0, 2**32 - 1), st.sampled_from(FORMS), st.sampled_from(MODES), st.integers(1, 40))
@settings(max_examples=60)
def test_random_operands(seed: int, text: str, mode: str, length: int) -> None:
    require_same(operand((2, length), torch.float32, seed), f"{text}/{mode}", seed=seed)


@pytest.mark.part(3)
@pytest.mark.parametrize("text", [t for t in FORMS if "2x" not in t])
def test_pieces_of_a_large_tensor_change_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, dim in (((9, 41), -1), ((1, 90, 7), 1), ((200,), 0), ((9, 41), 0)):
        x = operand(shape, torch.float32, seed=6)
        wanted = fxround.round(x, text, dim=dim)
        with monkeypatch.context() as patched:
            patched.setattr(eager_blocks, "_PIECE", 50)
            patched.setattr(eager_blocks, "run_blocks", lambda *_: None)
            assert same(fxround.round(x, text, dim=dim), wanted)
            out = torch.empty_like(x)
            assert same(fxround.round(x, text, dim=dim, out=out), wanted)


@pytest.mark.part("stochastic")
@pytest.mark.parametrize("mode", ["stochastic", "up_down", "stochastic_equal"])
def test_pieces_draw_the_bits_of_the_whole_tensor(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece begins where a block of random words does, in rows of 1, 7, 48 and 64 elements and in transposes."""
    started: list[int] = []
    whole = eager_round.run_part

    def run_part(*arguments: Any) -> None:
        started.append(arguments[-2])
        whole(*arguments)

    monkeypatch.setattr(eager_round, "run_part", run_part)
    shapes = ((700,), (130, 7), (1, 13, 48), (9, 64), (130, 3, 5))
    for text in ("mxfp8", "nvfp4", "int8", "int8:channel", "uint4:8"):
        for shape in shapes:
            for x in (
                operand(shape, torch.float32, seed=7),
                operand(shape[::-1], torch.float32, seed=7).permute(*range(len(shape))[::-1]),
            ):
                wanted = fxround.round(x, f"{text}/{mode}", seed=5)
                with monkeypatch.context() as patched:
                    patched.setattr(eager_blocks, "_PIECE", 100)
                    assert same(fxround.round(x, f"{text}/{mode}", seed=5), wanted), (text, shape)
    assert len(started) > 100 and max(started) > 100


def test_shift_is_the_power_of_two_with_the_nearest_logarithm() -> None:
    """2^(2k - 1) < m^2 < 2^(2k + 1) for the scale 2^(k - 15) of int16 and the largest magnitude m."""
    rng = np.random.default_rng(0)
    root = np.float32(math.sqrt(2))
    largest_ones = np.concatenate([rng.uniform(1, 2, 60).astype(np.float32), [root, np.nextafter(root, 0), 1, 2]])
    largest_ones *= np.exp2(rng.integers(-100, 100, largest_ones.size)).astype(np.float32)
    rows = np.stack([largest_ones, np.zeros_like(largest_ones)], 1)
    got = fxround.round(rows, "scaled(int16;2,e8m0fnu,shift)")
    for m, kept in zip(largest_ones.tolist(), got[:, 0].tolist(), strict=True):
        square, two = Fraction(m) ** 2, Fraction(2)
        k = next(k for k in range(-128, 128) if two ** (2 * k - 1) < square < two ** (2 * k + 1))
        scale = Fraction(2) ** (k - 15)
        quotient = min(round(Fraction(m) / scale), 2**15 - 1)
        assert Fraction(kept) == quotient * scale, (m, kept)


def test_strides_change_nothing() -> None:
    x = operand((6, 33), torch.float32, seed=3)
    for view in (x.t(), x[:, ::2], x[1:, 3:], x.flip(0)):
        assert same(
            fxround.round(view, "mxfp8/stochastic", seed=1), fxround.round(view.clone(), "mxfp8/stochastic", seed=1)
        )


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())).all())


def test_degenerate_shapes() -> None:
    for text in ("mxfp8", "nvfp4", "int8", "fixed(8,4)", "int8:channel"):
        for shape in ((0,), (3, 0), (0, 32)):
            assert fxround.round(torch.zeros(shape), text).shape == shape
        one = fxround.round(torch.tensor(3.3), text)
        assert one.shape == () and one == fxround.round(torch.tensor([3.3]), text)[0]


def test_arrays_and_out_and_gradients() -> None:
    x = operand((4, 40), torch.float32)
    assert same(torch.from_numpy(fxround.round(x.numpy(), "mxfp4", dim=0)), fxround.round(x, "mxfp4", dim=0))
    out = torch.empty_like(x)
    assert fxround.round(x, "nvfp4", out=out) is out and same(out, fxround.round(x, "nvfp4"))
    given = torch.randn(4, 40, requires_grad=True)
    fxround.round(given, "mxfp8").sum().backward()
    assert given.grad is not None and (given.grad == 1).all()
    given.grad = None
    weights = torch.randn(4, 40)
    (fxround.round(given, "mxfp8", gradient="bfloat16") * weights).sum().backward()
    assert given.grad is not None and torch.equal(given.grad, weights.bfloat16().float())


def test_stochastic_rounding_in_a_block_is_unbiased() -> None:
    """Six standard errors: a false alarm in 5e8 elements, so 1e-7 for these 32."""
    x, samples = torch.linspace(-3, 5, 32), 4000
    found = torch.stack([fxround.round(x, "mxfp4/stochastic", seed=5, sample=i) for i in range(samples)]).double()
    error = (found.mean(0) - x.double()).abs()
    # The largest element, 5, is within the format's range at the scale 1, so that nothing saturates.
    assert (error <= 6 * found.std(0) / math.sqrt(samples) + 1e-12).all()


MICROSCALED = {"mxfp8": 448.0, "mxfp8_e5m2": 57344.0, "mxfp6": 7.5, "mxfp6_e3m2": 28.0, "mxfp4": 6.0}


@pytest.mark.parametrize("name", MICROSCALED)
def test_microscaling_examples_by_hand(name: str) -> None:
    """OCP MX v1.0, section 6.3: the shared exponent is floor(log2(max)) - emax; elements saturate."""
    most = MICROSCALED[name]
    emax = math.frexp(most)[1] - 1
    x = torch.zeros(32)
    x[0], x[1] = 2.0**10, 2.0**10 * 1.999
    scale = 2.0 ** (10 - emax)
    y = fxround.round(x, name)
    assert y[0] == 1024 and y[1] == min(most, 2.0 ** (emax + 1)) * scale


def test_names_are_parsed_and_printed() -> None:
    for text in [
        *FORMS,
        *(f"{text}/nearest_even/wrap" for text in WRAPPED),
        "mxfp8:16/stochastic:8",
        "int8:16x16",
        "nvfp4:tensor/toward_zero",
    ]:
        rounding = ScaledRounding.parse(text)
        assert ScaledRounding.parse(str(rounding)) == rounding == pickle.loads(pickle.dumps(rounding)), text
        assert is_scaled(text) and is_scaled(str(rounding))
    assert not is_scaled("e4m3fn") and not is_scaled("binary32/stochastic") and not is_scaled(torch.float16)
    assert str(ScaledRounding.parse("mxfp8")) == "scaled(e4m3fn;32,e8m0fnu,floor)/nearest_even/saturate"
    for wrong, said in {
        "mxfp5": "did you mean mxfp",
        "int1": "2 to 16 bits",
        "fixed(8,4):32": "no scale",
        "mxfp8:0": "at least 1",
        "mxfp8:channels": "channel or tensor",
        "mxfp8/nearest": "did you mean",
        "mxfp8/nearest_even/inf": "cannot overflow",
        "scaled(e4m3fn;32,e4m3fn,floor)": "powers of two",
        "scaled(e4m3fn;32,e8m0fnu,up,binary32)": "leave binary32 out",
        "mxfp8:2147483647": "at most 9 digits",
        "int8:percentile=0": "more than 0",
        "int8:percentile=x": "finite number",
        "int8:fit=7": "2 to 8",
        "int8:top=7": "no option top",
        "mxfp8:fit=7:8": "made by up or nearest",
        "uint8:percentile=90": "no percentile",
        "uint8:zero=3": "given with a scale",
        "int8:scale=0": "positive number",
        "int8:scale=1,zero=200": "one of the integers",
        "mxfp8:scale=1": "given to integers",
        "mxfp8/nearest_even/wrap": "wrap goes with fixed point",
        "uint17": "2 to 16 bits",
        "scaled(e4m3fn;8,e4m3fn,inverse)": "binary32 or powers of two",
        "scaled(e4m3fn;8,binary32,affine)": "affine goes with integers",
    }.items():
        with pytest.raises(ValueError, match=said):
            ScaledRounding.parse(wrong)


@pytest.mark.parametrize(
    "text",
    ["0.1", "1e-3", "1e-45", "1.1754943157898258e-38", "7e-46", "7.1e-46", "16777217", "16777219", "3.4028235e38"],
)
def test_a_scale_in_a_text_is_the_nearest_of_binary32(text: str) -> None:
    """Subnormal ones, ties, and the ends of the range."""
    want = round_float(float(text), Rounding.parse("binary32"))
    if want == 0:
        with pytest.raises(ValueError, match="positive number"):
            ScaledFormat.parse(f"int8:scale={text}")
    else:
        assert ScaledFormat.parse(f"int8:scale={text}").unit == want == float(np.float32(float(text)))


@pytest.mark.parametrize("text", ["3.4028235678e38", "1e39", "1.7976931348623157e308"])
def test_a_scale_beyond_binary32_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="positive number"):
        ScaledFormat.parse(f"int8:scale={text}")


def test_wrong_arguments() -> None:
    x = torch.zeros(3, 4)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"dim": 2}, IndexError, "out of range"),
        ({"dim": (0, 1)}, ValueError, "run along one dimension"),
        ({"gradient": "hadamard(16)+mxfp8"}, ValueError, "belong to operands of products"),
        ({"dim": 1.5}, TypeError, "expected an int, or several"),
        ({"dim": True}, TypeError, "expected an int, or several"),
        ({"dim": (0, 0)}, ValueError, "each once"),
        ({"dim": ()}, ValueError, "at least one dimension"),
        ({"dim": (1, -1)}, ValueError, "twice"),
    ]
    for kwargs, kind, said in cases:
        with pytest.raises(kind, match=said):
            fxround.round(x, "mxfp8", **kwargs)
    with pytest.raises(ValueError, match="did you mean mxfp8"):
        fxround.round(x, "mxpf8")
    wraps = "ufixed(12,3)/nearest_even/wrap"
    for dtype, text in ((torch.float32, "fixed(40,20)"), (torch.float16, "fixed(16,8)"), (torch.bfloat16, wraps)):
        with pytest.raises(ValueError, match=r"numbers from .* significant bits, and a \w+ tensor cannot store all"):
            fxround.round(x.to(dtype), text)


@pytest.mark.parametrize("bits, fraction", [(8, 4), (4, 0), (2, 1), (12, 12)])
def test_fixed_point_is_two_s_complement(bits: int, fraction: int) -> None:
    codes = range(-(2 ** (bits - 1)), 2 ** (bits - 1))
    values = torch.tensor([code * 2.0**-fraction for code in codes])
    assert torch.equal(fxround.round(values, f"fixed({bits},{fraction})"), values)
    beyond = torch.tensor([-1e6, 1e6, math.inf, -math.inf])
    got = fxround.round(beyond, f"fixed({bits},{fraction})").tolist()
    assert got == [values[0], values[-1], values[-1], values[0]]
    assert fixed_point(bits, fraction).maximum == values[-1]


@pytest.mark.part(3)
@pytest.mark.parametrize("text", WRAPPED)
def test_fixed_point_wraps_as_two_s_complement(text: str) -> None:
    for mode in ("nearest_even", "toward_negative", "stochastic"):
        for dtype in DTYPES:
            if "scale" in text and dtype == torch.float64:
                with pytest.raises(ValueError, match="two bits more than binary64 has"):
                    fxround.round(torch.ones(3, dtype=dtype), f"{text}/{mode}/wrap")
            elif is_held(text, dtype):
                require_same(operand((3, 41), dtype, seed=4), f"{text}/{mode}/wrap", seed=2)
    values = torch.arange(-700, 700) / 2.0
    codes = torch.round(values * 16).to(torch.int64) & 255
    assert same(fxround.round(values, "fixed(8,4)/nearest_even/wrap"), codes.to(torch.int8) / 16)


def test_a_scale_that_is_given_is_that_of_fake_quantize() -> None:
    """At powers of two, where PyTorch's product with the inverse of the scale is the quotient."""
    x = torch.randn(1000) * 20
    for zero, least, name in ((3, 0, "uint8"), (0, -128, "int8"), (-7, -128, "int8")):
        theirs = torch.fake_quantize_per_tensor_affine(x, 0.125, zero, least, least + 255)
        assert torch.equal(fxround.round(x, f"{name}:scale=0.125,zero={zero}"), theirs)


def test_integers_with_a_zero_point_cover_the_range_of_a_block() -> None:
    x = torch.tensor([[-1.0, 0.0, 3.0, 0.5], [0.0, 10.0, 20.0, 255.0], [-4.0, -3.0, -2.0, -1.0]])
    got = fxround.round(x, "uint8:channel")
    assert same(got[1], x[1])
    # 255 steps from the least value to the largest, and a zero that is exact.
    assert got[0, 1] == 0 and (got[0] / (4 / 255) - (got[0] / (4 / 255)).round()).abs().max() < 1e-4
    assert ((got - x).abs() <= torch.tensor([[4 / 255], [1.0], [4 / 255]])).all()


def test_a_block_takes_the_scale_with_the_least_error() -> None:
    """Four over six (NVFP4): a block whose largest elements are 6 and 5 is better at 4, which maps 5 to 10 / 3."""
    x = torch.zeros(2, 16)
    x[0, :2], x[1, :2] = torch.tensor([6.0, 4.0]), torch.tensor([6.0, 4.5])
    six, four, best = (
        fxround.round(x, f"scaled(e2m1fn;16,binary32,nearest{fit})") for fit in ("", ",fit=4:4.0001", ",fit=6:4")
    )
    errors = torch.stack([(y - x).square().sum(1) for y in (six, four)])
    assert errors.argmin(0).tolist() == [0, 1]
    assert torch.equal(best[0], six[0]) and (best[1] - x[1]).square().sum() < errors[0, 1]


def test_every_small_element_format_over_all_binary16_inputs() -> None:
    """At the scale 1, which a block of one large element fixes, the elements are those of the unscaled rounding."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    x = x[x.isfinite()]
    for name, plain in {"mxfp8": "e4m3fn", "mxfp6_e3m2": "e3m2fn", "mxfp6": "e2m3fn", "mxfp4": "e2m1fn"}.items():
        emax = FORMATS[plain].emax
        fixed = torch.full((len(x), 1), 2.0**emax)
        kept = x.abs() < 2.0 ** (emax + 1)
        pairs = torch.cat([fixed, x[:, None]], 1)[kept]
        assert same(fxround.round(pairs, f"{name}:2")[:, 1], fxround.round(x[kept], f"{plain}/nearest_even/saturate"))


def test_scales_at_the_edges_of_the_exponents() -> None:
    """Blocks whose largest magnitude is at an end of binary32's range, and one ulp beside each power of two."""
    for e in (-149, -148, -140, -127, -126, -125, -119, -1, 0, 7, 8, 9, 119, 126, 127):
        power = 2.0**e
        beside = [
            power,
            float(np.nextafter(np.float32(power), np.float32(0))),
            float(np.nextafter(np.float32(power), np.float32(math.inf))),
        ]
        for most in beside:
            if not math.isfinite(most) or most > torch.finfo(torch.float32).max:
                continue
            x = torch.tensor([[most, most * 0.75, most * 0.3, -most / 3, most / 500, 0.0]])
            for text in (
                "mxfp8",
                "mxfp4",
                "nvfp4",
                "int8",
                "scaled(e4m3fn;32,e8m0fnu,even)",
                "scaled(e4m3fn;32,e8m0fnu,up)",
            ):
                require_same(x, text)


def test_a_magnitude_that_rounds_to_a_power_of_two_beyond_the_carrier() -> None:
    """Its scale is that of the power: 2^128 / 2^8 for the largest binary32 number and e4m3fn."""
    x = torch.tensor([torch.finfo(torch.float32).max, 1e30])
    for text in ("scaled(e4m3fn;32,e8m0fnu,even)", "scaled(e2m1fn;32,e8m0fnu,even)"):
        require_same(x, text)
    assert fxround.round(x, "scaled(e4m3fn;32,e8m0fnu,even)/toward_positive")[1] == 2.0**120 * 2.0**-9


def test_a_scale_saturates() -> None:
    """An infinite scale would turn finite elements into NaNs."""
    wide = torch.tensor([3e39, 3e38, 1.0, 0.0], dtype=torch.float64)
    for text in ("nvfp4", "int8"):
        assert fxround.round(wide, text).isfinite().all()
        require_same(wide, text)
    require_same(torch.tensor([1e6, 1e5, 0.0]), "scaled(e2m1fn;16,e4m3fn,nearest,binary16)")
    require_same(torch.tensor([1e30, 1.0]), "scaled(e2m1fn;16,e4m3fn,up)")


def test_a_block_of_infinities_or_nans_has_the_smallest_scale() -> None:
    assert largest([math.inf, math.nan]) == Fraction(0)
    y = fxround.round(torch.tensor([math.inf, -math.inf, math.nan, 0.0]), "mxfp8")
    assert y.tolist()[:2] == [448 * 2.0**-127, -448 * 2.0**-127] and y[2].isnan() and y[3] == 0


def test_integers_are_elements_by_their_names() -> None:
    for text, name in (
        ("scaled(int8;tensor,binary32,nearest)", "int8"),
        ("scaled(uint8;32,binary32,affine)", "uint8:32"),
        ("scaled(int4;fixed,scale=0.5)", "int4:scale=0.5"),
    ):
        assert ScaledFormat.parse(text) == ScaledFormat.parse(name)
    for text in ("scaled(uint8;32,binary32,nearest)", "scaled(int8;32,binary32,affine)", "scaled(int32;8,binary32,up)"):
        with pytest.raises(ValueError, match="expected int2 to int16, or uint2 to uint16 with affine"):
            ScaledFormat.parse(text)
