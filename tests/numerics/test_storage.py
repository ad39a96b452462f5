"""What memory holds: every code of 16 and 8 bits is read as ml_dtypes and NumPy read it, and written again."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from fxround.graph.dtypes import dtype_of
from fxround.numerics.arithmetic.scalar import Function, param
from fxround.numerics.formats.storage import ELEMENT_OF, HALVES, QUARTERS, Storage, load, store

# An independent reading of each storage, and the code of the NaN that is written.
READ = {
    "f16": (np.float16, 0x7E00),
    "bf16": (ml_dtypes.bfloat16, 0x7FC0),
    "e5m2": (ml_dtypes.float8_e5m2, 0x7F),
    "e4m3fn": (ml_dtypes.float8_e4m3fn, 0x7F),
    "e5m2fnuz": (ml_dtypes.float8_e5m2fnuz, 0x80),
    "e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 0x80),
    "e8m0fnu": (ml_dtypes.float8_e8m0fnu, 0xFF),
}


@pytest.mark.parametrize("storage", [*HALVES, *QUARTERS])
def test_every_code_is_read_and_written(storage: Storage) -> None:
    dtype, nan = READ[storage]
    width = 8 * np.dtype(dtype).itemsize
    codes = np.arange(1 << width, dtype=np.uint32)
    expected = codes.astype(f"u{width // 8}").view(dtype).astype(np.float32)
    code, value = param("code", ELEMENT_OF[storage]), param("value", "f32")
    (found,) = Function("load", (code,), (load(code, storage),)).evaluate(codes)
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(found[finite].view(np.uint32), expected[finite].view(np.uint32))
    assert np.isnan(found[~finite]).all()
    (again,) = Function("store", (value,), (store(value, storage),)).evaluate(expected)
    np.testing.assert_array_equal(again[finite], codes[finite])
    (one,) = Function("store", (value,), (store(value, storage),)).evaluate(np.float32([math.nan]))
    assert one[0] == nan
    if storage != "f16" and storage != "bf16":
        assert torch.tensor([math.nan]).to(dtype_of(storage)).view(torch.uint8).item() == nan, "as PyTorch writes it"
