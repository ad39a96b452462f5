"""The dtypes of tensors: the format of each, and how kernels store it. Every table from a dtype is here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from fxround.numerics.formats.storage import QUARTERS, Storage

# The types of devices that have kernels.
DEVICES: Final = ("cpu", "cuda")
# The format of every floating-point dtype that may occur in a model.
FORMAT_OF: Final = MappingProxyType(
    {
        torch.float32: "binary32",
        torch.float64: "binary64",
        torch.float16: "binary16",
        torch.bfloat16: "bfloat16",
        torch.float8_e5m2: "e5m2",
        torch.float8_e4m3fn: "e4m3fn",
        torch.float8_e5m2fnuz: "e5m2fnuz",
        torch.float8_e4m3fnuz: "e4m3fnuz",
        torch.float8_e8m0fnu: "e8m0fnu",
    }
)
# The dtypes that kernels read and write.
STORAGES: Final[Mapping[torch.dtype, Storage]] = MappingProxyType(
    {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}
    | {getattr(torch, f"float8_{name}"): name for name in QUARTERS}
)
# The dtypes that a map reads: masks as well.
LOADS: Final[Mapping[torch.dtype, Storage]] = MappingProxyType({**STORAGES, torch.bool: "mask"})
_DTYPES: Final = {storage: dtype for dtype, storage in STORAGES.items()}


def dtype_of(storage: Storage) -> torch.dtype:
    """Return the dtype of a storage: the inverse of ``STORAGES``."""
    return _DTYPES[storage]


def stored_as(dtype: torch.dtype, what: str, known: Mapping[torch.dtype, Storage] = STORAGES) -> Storage:
    """Return how kernels store a dtype; TypeError, which begins with ``what``, for a dtype that they do not store."""
    if dtype not in known:
        names = ", ".join(str(d).removeprefix("torch.") for d in known)
        raise TypeError(f"{what}: got dtype {dtype}; expected one of {names}")
    return known[dtype]


def result_storage(dtype: torch.dtype) -> Storage:
    """Return how a result of the dtype is stored; TypeError if no kernel stores it."""
    if dtype not in STORAGES:
        raise TypeError(f"result dtype {dtype}: expected one of {', '.join(map(str, STORAGES))}")
    return STORAGES[dtype]


def literal(number: Any, dtype: torch.dtype) -> str:
    """Return a Python number as PyTorch passes it to the operation: a value of the dtype, in hexadecimal."""
    value: float = torch.tensor(float(number), dtype=torch.float64).to(dtype).to(torch.float64).item()
    return value.hex()


def real_numbers(x: object) -> torch.Tensor | None:
    """Return the floating-point numbers of a tensor: of complex ones their parts, (..., 2); None for anything else."""
    if not isinstance(x, torch.Tensor):
        return None
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x if x.is_floating_point() else None
