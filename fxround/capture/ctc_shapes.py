"""The CTC loss in a trace of Dynamo, by PyTorch's private interfaces.

Dynamo computes the shapes of results by calling PyTorch's function without data, and that function reads its lengths.
This module tells Dynamo the shape. A formula replaces the function in Dynamo's graph.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

_SIGNATURE = inspect.signature(F.ctc_loss)


def traced_ctc_losses() -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo trace the CTC loss."""
    from torch._dynamo.variables import TorchInGraphFunctionVariable

    # By its default, torch.ctc_loss reduces nothing.
    own = {F.ctc_loss: _called(F.ctc_loss, "mean"), torch.ctc_loss: _called(torch.ctc_loss, "none")}
    return mock.patch.dict(TorchInGraphFunctionVariable._get_handlers(), own)


def _called(function: Callable[..., Any], default: str) -> Callable[..., Any]:
    from torch._dynamo.utils import proxy_args_kwargs
    from torch._dynamo.variables.builder import wrap_fx_proxy

    def call(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        given = _SIGNATURE.bind(*args, **kwargs).arguments
        reduction = given["reduction"].as_python_constant() if "reduction" in given else default
        x = given["log_probs"].as_proxy().node.meta["example_value"]
        with tx.fake_mode:
            one = x.dim() != 3 or reduction not in ("none", 0)
            shape = x.sum() if one else x.sum((0, 2))
        proxy = tx.output.create_proxy("call_function", function, *proxy_args_kwargs(args, kwargs))
        return wrap_fx_proxy(tx, proxy, example_value=shape)

    return call
