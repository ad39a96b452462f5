"""``fxround.rescale_channels``: factors for the channels that products sum over, which cancel between both operands.

The captured graph says which products read one value, and which parameters can multiply it (``absorbing``). A method
chooses a number s for each channel from the data; the value is multiplied by 1 / s and each weight by s.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from fxround.compiler.signature import require_module
from fxround.errors import shown, type_of
from fxround.graph.site import site
from fxround.graph.values import memory_of
from fxround.module import compile
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.modes import Rounding
from fxround.passes.rewrite import moved_by
from fxround.policy import Policy
from fxround.significance.inputs import ModelCall, calls, positive
from fxround.significance.progress import progress as shown_progress
from fxround.tuning.absorbing import Absorbed, absorb, readers, source_along
from fxround.tuning.channel_factors import Choice, Method, Operand, activation_aware, divided, multiplied, smooth
from fxround.tuning.products import Stream
from fxround.tuning.rescaling_report import Rescaling, RescalingReport
from fxround.tuning.scaled_inputs import can_scale_inputs, scale_inputs
from fxround.tuning.weights import weights_of

# The attribute of the result that has the report.
REPORT: Final = "rescaling"


def rescale_channels(
    model: nn.Module,
    data: Any,
    method: Method = "smoothquant",
    policy: Any = None,
    *,
    alpha: float = 0.5,
    grid: int = 20,
    power_of_two: bool = True,
    batch_size: int | None = None,
    progress: bool | None = None,
) -> nn.Module:
    """Return a copy of a model whose weights and activations are easier to quantize, and that computes the same.

    A product of an activation X and a weight W becomes the one of X_j f_j and W_j / f_j, with a factor f_j = 1 / s_j
    for each channel j over which it sums. In exact arithmetic that changes nothing. All products that read one value
    share its factors.

    ``"smoothquant"`` moves outliers of activations into weights: s_j = max |X_j|^alpha / max |W_j|^(1 - alpha), with
    the largest magnitudes over all data and all weights (Xiao et al., SmoothQuant, ICML 2023, equation 4). ``"awq"``
    protects the weights of large activations: s_j = (mean |X_j|)^a, divided by the root of the product of the largest
    and the least s, with the a of 0, 1 / grid, ..., 1 for which rounded weights change the products least: the sum of
    the squares of X (Q(W / f) f - W), in binary64 (Lin et al., AWQ, MLSys 2024, section 3.2, and its program). A
    channel of zeros has s = 1.

    Factors become a part of the parameters that multiply the value: weight and bias of a norm, or rows of weight and
    bias of a layer before, also through a ReLU. If there are none, or if something else reads the value, a linear layer
    or a convolution multiplies its inputs: it becomes a subclass with the buffer ``input_factor``.

    Args:
        model: any ``torch.nn.Module`` that ``fxround.compile`` takes. It is not changed, and runs in eval mode.
        data: a tensor, arguments, or a DataLoader, as for ``variability``. It is read once and kept.
        method: ``"smoothquant"`` or ``"awq"``.
        policy: for ``"awq"``: what rounds the weights, as for ``quantize_weights``.
        alpha: for ``"smoothquant"``: 0 to 1, how much of the difficulty weights take.
        grid: for ``"awq"``: in how many steps the exponents are tried.
        power_of_two: whether each s is the nearest power of two (of its logarithm). Results without roundings then have
            the bits of the model, as long as no number of a call leaves the normal range; a channel where a parameter
            would leave it keeps the factor 1. If not, factors and parameters are rounded once to their dtype.
        batch_size: splits tensors into batches of this many rows; None takes them whole.
        progress: whether to show progress; None shows it in a terminal or a notebook.

    Returns:
        A copy of the model, in the model's training mode, with the attribute ``rescaling``: a ``RescalingReport``,
        which also says what stayed, and why: transposed convolutions and those of groups, weights that several products
        read, products by other modules than linear layers and convolutions where no parameter can take the factors.

    Raises:
        TypeError, ValueError: for wrong arguments; for data that are empty, or of which a product's input has NaNs or
            infinities; for ``"awq"``, what ``quantize_weights`` raises for policies and weights. Also what ``compile``
            and the model raise.

    Example::

        smooth = fxround.rescale_channels(model, loader)
        print(smooth.rescaling)
        fxround.compile(smooth, fxround.calibrate(smooth, loader, "int8", "mse"))(x)
    """
    require_module(model)
    _require_arguments(method, policy, alpha, power_of_two)
    positive("grid", grid)
    if hasattr(model, REPORT):
        raise ValueError(f"the model has an attribute {REPORT!r}, which is the name of the report; rename or delete it")
    with torch.random.fork_rng(), torch.inference_mode(False), torch.no_grad():
        result = copy.deepcopy(model).eval()
        batches = list(calls(model, data, batch_size))
        roundings = _roundings(result, Policy.parse(policy), batches[0]) if method == "awq" else {}
        names = [name for name, parameter in result.named_parameters() if parameter.dim() > 1]
        with shown_progress(f"{type(model).__name__} {method}", None, progress) as tick:
            read = []
            for products in Stream(result, batches, names):
                read.append(Operand.of(products, keeps_squares=method == "awq"))
                tick()
        rows = []
        for group in _groups(result, read):
            if group.reason:
                rows.append(Rescaling(group.names, (), group.operands[0].channels, None, reason=group.reason))
                continue
            weights = [result.get_parameter(name).detach() for name in group.names]
            if method == "awq":
                choice = activation_aware(group.operands, weights, roundings, grid, power_of_two)
            else:
                choice = smooth(group.operands, weights, alpha, power_of_two)
            rows.append(_applied(result, group, choice, power_of_two))
    for own, other in zip(result.modules(), model.modules(), strict=True):
        own.training = other.training
    count = sum(call.rows for call in batches)
    report = RescalingReport(type(model).__name__, method, len(batches), count, power_of_two, tuple(rows))
    setattr(result, REPORT, report)
    return result


@dataclass(frozen=True)
class _Group:
    """Operands of products whose channels share factors.

    into    the parameters that take the factors; None if the layer at ``path`` multiplies its inputs
    reason  why there can be no factors, or ""
    """

    operands: tuple[Operand, ...]
    into: Absorbed | None = None
    path: str = ""
    reason: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights."""
        return tuple(operand.weight for operand in self.operands)


def _require_arguments(method: Any, policy: Any, alpha: Any, power_of_two: Any) -> None:
    """Raise TypeError or ValueError for wrong arguments."""
    if method not in get_args(Method):
        raise ValueError(f"method is {shown(method)}; expected {' or '.join(map(repr, get_args(Method)))}")
    if (policy is None) is (method == "awq"):
        says = "needs the policy that rounds the weights" if policy is None else "does not read a policy"
        raise TypeError(f"policy is {shown(policy)}, and the method {method!r} {says}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise TypeError(f"alpha is {type_of(alpha)}; expected a number from 0 to 1")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; expected a number from 0 to 1")
    if not isinstance(power_of_two, bool):
        raise TypeError(f"power_of_two is {shown(power_of_two)}; expected True or False")


def _roundings(model: nn.Module, policy: Policy, call: ModelCall) -> dict[str, Rounding | ScaledRounding]:
    """Return how a policy rounds each weight. Raises what ``weights_of`` raises."""
    entry = compile(model, policy, unroll_loops=True)._entry(call.args, call.kwargs)
    weights = weights_of(model, entry, pytree.tree_leaves((call.args, call.kwargs)), policy)
    return {name: weight.grid.rounding for name, weight in weights.items()}


def _groups(model: nn.Module, read: Sequence[Operand]) -> Iterator[_Group]:
    """Yield the operands that share factors, in the order of the graph."""
    times = Counter(operand.weight for operand in read)
    memory = Counter(memory_of(p) for _, p in model.named_parameters(remove_duplicate=False))
    values: dict[tuple[fx.Node, int], list[Operand]] = {}
    kept: dict[Operand, str] = {}
    for operand in read:
        reason = operand.unfit
        if times[operand.weight] > 1 or memory[memory_of(model.get_parameter(operand.weight))] > 1:
            reason = "several products or modules read the weight"
        if reason:
            kept[operand] = reason
        else:
            values.setdefault((source_along(operand.inputs, operand.axis), operand.axis), []).append(operand)
    for operand, reason in kept.items():
        yield _Group((operand,), reason=reason)
    for (value, axis), operands in values.items():
        into = _parameters(value, axis, operands)
        if into and all(memory[memory_of(model.get_parameter(name))] == 1 for name in into):
            yield _Group(tuple(operands), into)
        else:
            yield from (_in_layer(model, operand) for operand in operands)


def _parameters(value: fx.Node, axis: int, operands: Sequence[Operand]) -> Absorbed | None:
    """Return the parameters that can multiply a value which products alone read."""
    if set(_final_readers(value)) != {operand.node for operand in operands}:
        return None
    return absorb(value, axis, operands[0].channels)


def _final_readers(value: fx.Node) -> Iterator[fx.Node]:
    for user in readers(value):
        if user.op == "call_function" and moved_by(user) is value:
            yield from _final_readers(user)
        else:
            yield user


def _in_layer(model: nn.Module, operand: Operand) -> _Group:
    """Return the group of an operand by itself, whose layer multiplies its inputs."""
    place, modules = site(operand.node), dict(model.named_modules(remove_duplicate=False))
    path = place.path if place is not None else ""
    layer = modules.get(path)
    owns = f"{path}.weight".lstrip(".") == operand.weight and can_scale_inputs(layer)
    if not owns or sum(module is layer for module in modules.values()) > 1:
        reason = "no parameter can take the factors, and no layer of the types Linear and Conv computes the product"
        return _Group((operand,), reason=reason)
    return _Group((operand,), None, path)


def _applied(model: nn.Module, group: _Group, choice: Choice, exact: bool) -> Rescaling:
    """Write the factors of a group into the model; return what was done."""
    into = group.into or {}
    taking = [(model.get_parameter(name), dim) for name, dim in into.items()]
    weights = [model.get_parameter(name) for name in group.names]
    factors = choice.factors
    if exact:
        # What a factor of a power of two changes beyond the exponent is lost: such a channel stays.
        for operand, weight in zip(group.operands, weights, strict=True):
            factors = torch.where(operand.keeps(weight.detach(), factors), factors, 1.0)
        for parameter, dim in taking:
            value = (
                parameter.detach().movedim(dim, 0).flatten(1) if parameter.dim() > 1 else parameter.detach()[:, None]
            )
            back = divided(multiplied(value, factors[:, None]), factors[:, None])
            factors = torch.where((back == value).all(1), factors, 1.0)
    for operand, weight in zip(group.operands, weights, strict=True):
        weight.copy_(operand.rescaled(weight.detach(), factors))
    for parameter, dim in taking:
        parameter.copy_(multiplied(parameter.detach(), factors.view(-1, *[1] * (parameter.dim() - 1 - dim))))
    if not all(parameter.isfinite().all() for parameter in (*weights, *(p for p, _ in taking))):
        raise ValueError(
            f"factors from {float(factors.min())} to {float(factors.max())} make numbers that are not finite of "
            f"{', '.join((*group.names, *into))}; expected weights and data of usual sizes"
        )
    if group.into is None and (factors != 1).any():
        scale_inputs(model.get_submodule(group.path), factors.to(weights[0].dtype))
    least, greatest = float(factors.min()), float(factors.max())
    return Rescaling(group.names, tuple(into), group.operands[0].channels, choice.alpha, least, greatest, choice.error)


__all__ = ["REPORT", "rescale_channels"]
