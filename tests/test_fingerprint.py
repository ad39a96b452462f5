"""fxround.hash: equal if and only if the bits are."""

from __future__ import annotations

import copy
import hashlib

import numpy as np
import pytest
import torch
from torch import nn

import fxround


def test_equal_bits_give_equal_texts() -> None:
    x = torch.randn(3, 4)
    assert fxround.hash(x) == fxround.hash(x.clone()) == fxround.hash(x.t().contiguous().t()) == fxround.hash(x.numpy())
    assert fxround.hash(torch.tensor([float("nan")])) == fxround.hash(torch.tensor([float("nan")]))


def test_one_element_has_a_hash_whatever_its_stride() -> None:
    x = torch.randn(4, 5)
    assert fxround.hash(x[:1, 2]) == fxround.hash(x[:1, 2].clone())
    assert fxround.hash(x[1:2, 3:4]) == fxround.hash(x[1:2, 3:4].clone())


def test_other_bits_dtypes_and_shapes_give_other_texts() -> None:
    x = torch.zeros(2, 3)
    others = [x, -x, x.reshape(3, 2), x.double(), x.half(), x.bfloat16(), x.int(), torch.zeros(0, 3), torch.zeros(())]
    assert len({fxround.hash(other) for other in others}) == len(others)


def test_a_module_is_its_state() -> None:
    model = nn.Linear(2, 2)
    same, other = copy.deepcopy(model), nn.Sequential(copy.deepcopy(model))
    assert fxround.hash(model) == fxround.hash(same) == fxround.hash(fxround.compile(model, "identity"))
    assert fxround.hash(model) != fxround.hash(other)
    with torch.no_grad():
        same.bias[0] += 1
    assert fxround.hash(model) != fxround.hash(same)


def test_the_text_is_stable() -> None:
    x = np.arange(3, dtype="<f4")
    assert fxround.hash(x) == "sha256:" + hashlib.sha256(b"float32[3]:" + x.tobytes()).hexdigest()
    assert fxround.hash(x) == "sha256:601d6ef5b0c45a46d6466e36ddbde1306509d82f09742e4b191b71a39282571f"


def test_anything_else_is_refused() -> None:
    with pytest.raises(TypeError, match="x is a list; expected a torch tensor"):
        fxround.hash([1.0])  # type: ignore[arg-type]
