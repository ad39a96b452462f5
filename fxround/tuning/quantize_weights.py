"""``fxround.quantize_weights``: the weights of a model on the grids of a policy's formats.

The policy's rounded graph says which weights are rounded, in which blocks and to which grid. A method chooses a value
of the grid for each weight: the nearest one, or one that the data ask for.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.compiler.signature import require_module
from fxround.errors import shown
from fxround.module import RoundedModule, compile
from fxround.numerics.formats.scaled import ScaledRounding, short_name
from fxround.policy import Policy
from fxround.runtime.draw import Draw
from fxround.significance.inputs import ModelCall, calls
from fxround.significance.metrics import decibels
from fxround.significance.progress import progress as shown_progress
from fxround.significance.stopping import interruptible
from fxround.spelling import nearest as near
from fxround.tuning.adaround import AdaRound
from fxround.tuning.discquant import DiscQuant
from fxround.tuning.gptq import GPTQ
from fxround.tuning.report import QuantizationReport, WeightRounding
from fxround.tuning.task import Method, Nearest, Task
from fxround.tuning.weights import Weight, weights_of

METHODS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "nearest": Nearest,
        "gptq": GPTQ,
        "adaround": AdaRound,
        "discquant": DiscQuant,
    }
)
# The attribute of the result that has the report.
REPORT: Final = "quantization"


def quantize_weights(
    model: nn.Module,
    policy: Any,
    data: Any,
    method: str = "nearest",
    *,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Return a copy of a model whose weights are values of a policy's formats, bit for bit.

    A weight is rounded if the policy rounds it: as the operand of a product (``operands=`` of a rule that matches the
    role ``"weight"``, or the name of a scaled format as the policy), or as it enters (``rounding=`` of a rule with this
    role). Its scales are made once, from the weights as they are; the method chooses the elements. Numbers beyond the
    grid become its end. A weight is between two values of its grid, and every method but ``"gptq"`` takes one of these.

    Args:
        model: any ``torch.nn.Module`` that ``fxround.compile`` takes. It is not changed.
        policy: as for ``fxround.compile``; its rules for other values than weights are not applied.
        data: a tensor, a tuple of positional arguments, a dict of keyword arguments, a tuple and a dict, or a
            DataLoader, as for ``variability``. It is read once and kept.
        method: ``"nearest"``, ``"gptq"``, ``"adaround"`` or ``"discquant"``: docs/few-bits.md compares them, and the
            classes ``GPTQ``, ``AdaRound`` and ``DiscQuant`` in ``fxround.tuning`` say what they compute.
        batch_size: splits tensors into batches of this many rows; None takes them whole.
        seed: 0 to 2^63 - 1, of what a method draws.
        progress: whether to show progress; None shows it in a terminal or a notebook.
        options: of the method: the fields of its class, which has their meaning and defaults.

    Returns:
        A copy of the model, in the model's training mode, with the attribute ``quantization``: a
        ``QuantizationReport``. Ctrl-C ends the method and returns what is done; weights that it did not reach are
        rounded to nearest.

    Raises:
        TypeError, ValueError: for wrong arguments; for data that are empty or have NaNs; for a policy that rounds no
            weight, or draws a scale from elsewhere; for a weight that several modules share, that the data never reach,
            or that has zeros that its grid lacks. Also what ``compile`` and the model raise.

    The model runs in eval mode. The generators of PyTorch are left as they were.

    Example::

        small = fxround.quantize_weights(model, "int4:channel", x)
        print(small.quantization)
        small(x)
    """
    require_module(model)
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method is {shown(method)}{near(str(method), METHODS)} Known: {', '.join(METHODS)}")
    chosen = _method(method, options)
    Draw(seed)
    if hasattr(model, REPORT):
        raise ValueError(f"the model has an attribute {REPORT!r}, which is the name of the report; rename or delete it")
    parsed = Policy.parse(policy)
    # Methods differentiate, also where the caller does not.
    with torch.random.fork_rng(), torch.inference_mode(False):
        batches = [_differentiable(call) for call in calls(model, data, batch_size)]
        _require_numbers(batches)
        result, original = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
        compiled = compile(original, parsed, unroll_loops=True)
        with torch.no_grad():
            weights = _weights(compiled, parsed, batches[0])
        task = Task(result, original, weights, batches, seed, compiled.with_policy("identity"))
        for name, weight in weights.items():
            task.set(name, weight.grid.nearest(weight.value))
        interrupted = _run(chosen, task, f"{type(model).__name__} {method}", progress)
        report = _report(task, parsed, method, chosen, interrupted)
    for own, other in zip(result.modules(), model.modules(), strict=True):
        own.training = other.training
    setattr(result, REPORT, report)
    return result


def _differentiable(call: ModelCall) -> ModelCall:
    """Return a call with copies of the tensors that were made under ``torch.inference_mode``."""
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda x: x.clone() if x.is_inference() else x, (call.args, call.kwargs)
    )
    return replace(call, args=args, kwargs=kwargs)


def _method(name: str, options: Mapping[str, Any]) -> Method:
    """Return the method. Raises TypeError for an option that it lacks."""
    known = [field.name for field in fields(METHODS[name])]
    for option in options:
        if option not in known:
            says = f"its options are {', '.join(known)}" if known else "it has none"
            raise TypeError(f"method {name!r} has no option {shown(option)}; {says}")
    method: Method = METHODS[name](**options)
    return method


def _require_numbers(batches: list[ModelCall]) -> None:
    """Raise ValueError for data with NaNs."""
    for position, batch in enumerate(batches):
        for tensor in batch.tensors:
            if tensor.is_floating_point() and tensor.isnan().any():
                raise ValueError(
                    f"batch {position} of the data has {int(tensor.isnan().sum()):,} NaNs, of which no weight can be "
                    "learned; leave these rows out"
                )


def _weights(compiled: RoundedModule, policy: Policy, call: ModelCall) -> dict[str, Weight]:
    entry = compiled._entry(call.args, call.kwargs)
    return weights_of(compiled.source, entry, pytree.tree_leaves((call.args, call.kwargs)), policy)


def _run(method: Method, task: Task, label: str, shown: bool | None) -> bool:
    """Run a method. Returns whether it was interrupted."""
    with shown_progress(label, method.count(task), shown) as tick, interruptible() as stopped:
        steps = method.run(task)
        for _ in steps:
            tick()
            if stopped():
                steps.close()  # type: ignore[attr-defined]
                return True
    return False


def _report(task: Task, policy: Policy, name: str, method: Method, interrupted: bool) -> QuantizationReport:
    signal, lost = _products(task)
    rows = []
    for weight in task.weights.values():
        value, kept = weight.value.double(), task.model.get_parameter(weight.name).detach()
        nearest = weight.grid.nearest(weight.value)
        outside = (weight.grid.down(weight.value) > weight.value) | (weight.grid.up(weight.value) < weight.value)
        rows.append(
            WeightRounding(
                weight.name,
                weight.path,
                _format(weight),
                value.numel(),
                name if weight.name in task.done else "nearest",
                decibels(_squares(value), _squares(value - kept.double())),
                decibels(signal[weight.name], lost[weight.name]) if weight.name in signal else None,
                int((kept != nearest).sum()) / kept.numel(),
                int(outside.sum()) / kept.numel(),
                task.done.get(weight.name),
            )
        )
    said = ", ".join(f"{field.name}={getattr(method, field.name)!r}" for field in fields(method))  # type: ignore[arg-type]
    rows_of_data = sum(call.rows for call in task.calls)
    return QuantizationReport(
        type(task.model).__name__,
        policy.name,
        f"{name}({said})" if said else name,
        len(task.calls),
        rows_of_data,
        interrupted,
        tuple(rows),
    )


def _products(task: Task) -> tuple[dict[str, float], dict[str, float]]:
    """Return the sums of squares of the products of the original model, and of their changes by the rounded weights."""
    signal: dict[str, float] = {}
    lost: dict[str, float] = {}
    for products in task.stream(task.original):
        for product in products:
            name = product.weight
            exact = product.result(task.weights[name].value).double()
            kept = product.result(task.model.get_parameter(name).detach()).double()
            signal[name] = signal.get(name, 0.0) + _squares(exact)
            lost[name] = lost.get(name, 0.0) + _squares(exact - kept)
    return signal, lost


def _squares(x: Tensor) -> float:
    return float(x.square().sum())


def _format(weight: Weight) -> str:
    """Return the text of a weight's format."""
    rounding = weight.grid.rounding
    return short_name(rounding.format) if isinstance(rounding, ScaledRounding) else rounding.format.said


__all__ = ["METHODS", "quantize_weights"]
