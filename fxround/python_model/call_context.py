"""Contexts in which a compiled module or a loaded program cannot compute."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from fxround.capture import inside_backward
from fxround.capture.dynamo import tracer
from fxround.capture.transforms import TANGENTS_REFUSED, differentiates_forward, has_tangent, is_transformed
from fxround.errors import FxroundError
from fxround.float_state import require_ieee_arithmetic


def require_untraced() -> None:
    """Raise FxroundError where PyTorch traces the call of a compiled module for a graph of its own."""
    tracing = tracer()
    if tracing == "torch.compile":
        raise FxroundError(
            "torch.compile traces a compiled module, whose kernels are compiled already: call it outside of "
            'torch.compile, or write torch.compile(model, backend="fxround", options={"policy": ...}) with the model '
            "itself"
        )
    if tracing:
        raise FxroundError(
            f"{tracing} traces a compiled module, whose captures it cannot hold: compiled.export(path, example_inputs) "
            "writes the rounded program, which torch.export.load reads too, and compiled.graph is the rounded graph"
        )


def refuse_tangents(values: Iterable[Any], reads: Iterable[Any] = ()) -> None:
    """Raise FxroundError if a value has a tangent of forward-mode differentiation, which kernels would drop.

    reads: what a graph reads from elsewhere, tensors among it.
    """
    if not differentiates_forward():
        return
    if any(map(has_tangent, chain(values, (getattr(read, "tensor", None) for read in reads)))):
        raise FxroundError(TANGENTS_REFUSED)


def check_context(recorded: bool) -> None:
    """Raise FxroundError inside of a transform of ``torch.func``, and in a backward pass that would record gradients.

    recorded: whether the call records gradients in training mode.
    """
    if is_transformed():
        raise FxroundError(
            "torch.func (vmap, grad, jacrev, jvp) transforms a compiled module, whose kernels have no rules for that: "
            "compile what it makes of the model, as in fxround.compile(torch.func.vmap(model), policy)"
        )
    if recorded and inside_backward():
        raise FxroundError(
            "a compiled module runs again in a backward pass (torch.utils.checkpoint around it), after its sample "
            "has advanced: use checkpointing inside the model, or none."
        )


def require_computable() -> None:
    """Raise FxroundError where the processor rounds in another way, or a mode changes what PyTorch's functions do.

    A graph has no calls of these functions left, which the mode could change.
    """
    require_ieee_arithmetic()
    if torch._C._len_torch_function_stack():
        modes = [type(mode) for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
        if modes:
            raise FxroundError(
                f"a TorchFunctionMode ({modes[-1].__name__}) is active, which a compiled module cannot ask: call the "
                "module outside of the mode, or let the model enter it"
            )
