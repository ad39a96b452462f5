"""``torch.linalg.lstsq`` in a trace of Dynamo, by PyTorch's private interfaces.

Dynamo refuses the function, because the shapes of some of its results depend on its driver and on data. This module
tells Dynamo the shapes for the drivers of matrices of full rank. A formula replaces the function in Dynamo's graph.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

# What the formula computes: PyTorch's default on the CPU, its name, and the driver without a test of the rank.
DRIVERS: Final = (None, "gelsy", "gels")


def lstsq(A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """Declare the signature of torch.linalg.lstsq, which is a builtin."""


_SIGNATURE: Final = inspect.signature(lstsq)


def is_vector(a: Tensor, b: Tensor) -> bool:
    """Whether b is a vector for each matrix of a, not a matrix."""
    return b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])


def traced_least_squares() -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo trace least squares of full rank."""
    from torch._dynamo.variables import TorchInGraphFunctionVariable

    return mock.patch.dict(TorchInGraphFunctionVariable._get_handlers(), {torch.linalg.lstsq: _call})


def _call(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._dynamo.utils import proxy_args_kwargs
    from torch._dynamo.variables.builder import wrap_fx_proxy

    given = _SIGNATURE.bind(*args, **kwargs).arguments
    driver = given["driver"].as_python_constant() if "driver" in given else None
    a, b = (given[name].as_proxy().node.meta["example_value"] for name in "AB")
    if driver not in DRIVERS or a.dim() < 2 or not a.is_floating_point() or a.dtype != b.dtype:
        return None
    with tx.fake_mode:
        shapes = _shapes(a, b, driver)
    proxy = tx.output.create_proxy("call_function", torch.linalg.lstsq, *proxy_args_kwargs(args, kwargs))
    return wrap_fx_proxy(tx, proxy, example_value=shapes)


def _shapes(a: Tensor, b: Tensor, driver: str | None) -> Any:
    """Return tensors of the shapes and dtypes of the results, that have gradients where the results have."""
    vector = is_vector(a, b)
    wide = b.unsqueeze(-1) if vector else b
    solution = a.mT @ wide
    left = (solution.sum(-2) if driver == "gels" and a.shape[-2] > a.shape[-1] else a.new_empty([0])).detach()
    rank = a.new_empty([0] if driver == "gels" else a.shape[:-2], dtype=torch.int64)
    return torch.return_types.linalg_lstsq(  # type: ignore[attr-defined]
        (solution.squeeze(-1) if vector else solution, left, rank, a.new_empty([0]))
    )
