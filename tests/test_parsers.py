"""Random texts as formats, roundings, policies and programs: a short error, or a value that prints itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxround
from fxround import Policy, Rule
from fxround.errors import PolicyError
from fxround.kernels.program import Program
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.faults import Faults
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.gradients import Gradient
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.orders import Order

PARSERS: Final[dict[str, Callable[[Any], Any]]] = {
    "format": Format.parse,
    "rounding": Rounding.parse,
    "accumulation": Accumulation.parse,
    "order": Order.parse,
    "gradient": Gradient.parse,
    "program": Program.parse,
    "faults": Faults.parse,
    "scaled": ScaledRounding.parse,
}
POLICIES: Final[dict[str, Callable[[Any], Any]]] = {
    "preset": Policy.preset,
    "rule": lambda text: Rule(text, operator=text, rounding=text, accumulate=text, gradient=text),
    "toml": Policy.from_toml,
    "faults": lambda text: Rule(faults=text),
    "match": lambda text: Rule(text),
    "names": lambda text: Policy.from_dict({"name": text, "rules": [{"match": text, "operator": text}]}),
    "key": lambda text: Policy.from_dict({text: text}),
}
LONGEST: Final = 800
WORDS: Final = (
    *(*FORMATS, *MODES, "dtype", "ieee(", "custom(", ")", "-flush", "/", ":", ",", " ", "=", "lanes", "exact", "inf"),
    *("signed", "+", "-", "nan", "0x1p", "1e", ".", "chunk", "combine", "product", "zero_clamped", "saturate", "9" * 9),
    *("t0 = ", "add(", "x0", "x1", " @ ", "; ", "return ", "t1", "[[rules]]\n", "rounding", '"', "[", "]", "\n", "\0"),
)
TEXTS: Final = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(WORDS) | st.integers(-99999, 99999).map(str), max_size=12).map("".join),
)
# What a search does not find in a moment.
HARD: Final = (
    *("e4m3fn" + "-flush" * 5000, "custom(3,5000,1e308,signed)", "custom(3,-99999,1.0,signed)", "x" * 100000),
    *("custom(3,-2,0x1p99999,signed)", "bfloat16/stochastic:" + "9" * 5000, "lanes:" + "9" * 5000, "٣"),
    *("bfloat16 chunk=" + "9" * 5000 + " combine=binary32", "bfloat16 " + "a=b " * 9999, "a = " + "[" * 9999, "\ud800"),
    *(
        "t0 = add(x0, 0x1p99999) @ exact",
        "t0 = add(x" + "9" * 99 + ") @ exact",
        "t0 = add(" + "1," * 9999 + ") @ exact",
    ),
    *("t0 = add(x0, x0) @ exact; return " + "a, " * 9999, "name = " + "'" * 9999, "\0.toml"),
)


def refused_or_printed(parse: Callable[[Any], Any], text: Any, errors: tuple[type[Exception], ...]) -> None:
    try:
        found = parse(text)
    except errors as error:
        refused = error
    else:
        assert isinstance(found, Policy | Rule) or parse(str(found)) == found
        return
    assert type(refused) in errors, f"{text!r:.200}: {type(refused).__name__}"
    assert 0 < len(str(refused)) < LONGEST, f"{text!r:.200}: {len(str(refused))} characters"


@pytest.mark.part(2)
@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=150)
@given(text=TEXTS)
def test_a_text_is_parsed_or_refused(kind: str, text: str) -> None:
    refused_or_printed(PARSERS[kind], text, (ValueError,))


@pytest.mark.parametrize("kind", POLICIES)
@settings(max_examples=150)
@given(text=TEXTS)
def test_a_policy_is_parsed_or_refused(kind: str, text: str) -> None:
    refused_or_printed(POLICIES[kind], text, (PolicyError,))


@pytest.mark.parametrize("text", HARD, ids=range(len(HARD)))
def test_a_hard_text_is_refused(text: str) -> None:
    for parse in PARSERS.values():
        refused_or_printed(parse, text, (ValueError,))
    for parse in POLICIES.values():
        refused_or_printed(parse, text, (PolicyError,))


@pytest.mark.part(3)
@pytest.mark.parametrize("part", ["x", "1e-6 ", "significand:1e-6 ", ":", "9", "[", "a,", "/", "\n"], ids=str.strip)
@pytest.mark.parametrize("start", ["", "significand:", "bfloat16/", "bfloat16 faults=", "scaled(e4m3fn;", 'name = "'])
def test_a_million_characters_are_refused_in_a_few(start: str, part: str) -> None:
    text = start + part * (1_000_000 // len(part))
    before = time.process_time()
    for parse in PARSERS.values():
        refused_or_printed(parse, text, (ValueError,))
    for parse in POLICIES.values():
        refused_or_printed(parse, text, (PolicyError,))
    assert time.process_time() - before < 10  # linear in the length: 0.1 to 1.2 s were seen


def test_arguments_of_studies_are_shortened_too() -> None:
    text, model, x = "x" * 1_000_000, torch.nn.Linear(2, 2), torch.ones(2, 2)
    calls: tuple[Callable[[], Any], ...] = (
        *(lambda key=key: fxround.variability(model, x, **{key: text}) for key in ("capture", "isolate", "method")),
        lambda: fxround.variability(model, x, metrics=(text,)),
        lambda: fxround.variability(model, x, samples=text),  # type: ignore[arg-type]
        lambda: fxround.check_invariance(model, x, axes=(text,)),
        lambda: fxround.localize(model, x, lambda _: True, level=text),  # type: ignore[arg-type]
        lambda: fxround.localize(model, x, text),  # type: ignore[arg-type]
        lambda: Rule(rounding="bfloat16", gradient="zero_clamped " + "\n" * 1_000_000),
    )
    for call in calls:
        with pytest.raises((ValueError, TypeError)) as error:
            call()
        assert len(str(error.value)) < LONGEST, str(error.value)[:LONGEST]


@pytest.mark.parametrize("value", [None, 5, b"e5m2", ["e5m2"], {}, 1.5])
def test_what_is_no_text_is_refused(value: Any) -> None:
    for parse in PARSERS.values():
        refused_or_printed(parse, value, (TypeError, ValueError))
    for field in ("match", "operator", "role", "rounding", "accumulate", "order", "direction", "gradient", "optional"):
        if value is not None:
            with pytest.raises(PolicyError):
                Rule(**({"rounding": "bfloat16"} | {field: value}))


def test_policy_files_that_are_no_text_are_refused(tmp_path: Any) -> None:
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyError, match="cannot be read"):
        Policy.parse(path)
    with pytest.raises(PolicyError, match="cannot be read"):
        Policy.parse("\0.toml")


def test_a_number_beyond_the_carrier_is_refused() -> None:
    program = "t0 = add(x0, 1e300) @ binary32"
    with pytest.raises(ValueError, match="is not a binary32 value"):
        torch.ops.fxround.pointwise([torch.ones(3)], program, torch.float32, torch.tensor([0, 0]), 0)
