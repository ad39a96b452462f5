"""What tools ask of a compiled module: its signature, and the version of the package."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround import cli
from fxround.version import VERSION


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0, *, negate: bool = False) -> Tensor:
        return x * (-scale if negate else scale)


def doubled(a: Tensor, b: float = 2.0) -> Tensor:
    return a * b


class Decorated(nn.Module):
    @fxround.compile(policy="bfloat16")
    def forward(self, x: Tensor, y: float = 1.0) -> Tensor:
        return x * y


def test_a_compiled_module_has_the_signature_of_its_model() -> None:
    compiled = fxround.compile(Scaled(), "reproducible")
    expected = inspect.signature(Scaled().forward)
    assert inspect.signature(compiled) == expected and list(expected.parameters) == ["x", "scale", "negate"]
    compiled(torch.ones(2))
    for other in (compiled, copy.deepcopy(compiled), compiled.with_policy("bfloat16")):
        assert inspect.signature(other) == expected
    assert inspect.signature(fxround.compile(doubled, "bfloat16")) == inspect.signature(doubled)
    assert list(inspect.signature(Decorated().forward).parameters) == ["x", "y"]
    assert "model" in inspect.signature(fxround.RoundedModule).parameters


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert fxround.__version__ == VERSION
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"fxround {VERSION}\n"


@pytest.mark.parametrize(
    "written, name",
    [
        ("FP8", "fp8"),
        ("MXFP4", "mxfp4"),
        ("BFloat16", "bfloat16"),
        ("Half", "binary16"),
        ("INT8:channel", "int8:channel"),
    ],
)
def test_policies_may_be_written_in_capitals(written: str, name: str) -> None:
    assert fxround.Policy.parse(written) == fxround.Policy.parse(name)
    with pytest.raises(fxround.PolicyError, match=r"no policy is named 'FP9'"):
        fxround.Policy.parse("FP9")
