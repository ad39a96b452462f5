"""``fxround.store_integers``: a model whose weights are integers of a highest width, and the switch to lower widths.

The integers, the scales and the widths are buffers of the modules that own the weights, so that state, copies and files
have them. The weights themselves are floating-point parameters, as before: a switch decodes the integers into their
memory, where captured graphs read them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.capture import inside_backward
from fxround.compiler.executable import Entry
from fxround.compiler.signature import require_module
from fxround.errors import FxroundError, shown, type_of
from fxround.module import compile
from fxround.numerics.formats.fixed_point import integers
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.modes import Mode
from fxround.policy import Policy
from fxround.significance.inputs import ModelCall, calls
from fxround.spelling import nearest as near
from fxround.tuning.integers import LEAST, MOST, Scales, blocks_of, decode, decoded, encode
from fxround.tuning.weights import Weight, weights_of

# The attribute of the result that switches.
SWITCH: Final = "switch"
# The ends of the names of the buffers that belong to a weight.
_INTEGERS, _SCALE, _BLOCKS, _BITS = _BUFFERS = ("_integers", "_scale", "_blocks", "_bits")
# Scales of random weights show which elements share one, and those of two draws differ.
_PROBES: Final = 2


def store_integers(
    model: nn.Module, policy: Any, data: Any, *, widths: Iterable[int] | None = None, batch_size: int | None = None
) -> nn.Module:
    """Return a copy of a model whose weights are stored as integers, and that serves them in fewer bits.

    The weights that the policy rounds to integers, as for ``quantize_weights``, become integers of the format's width h
    with the format's scales. ``switch(l)`` rounds these integers again, to l bits:
    clip(round(q / 2^(h - l)), -2^(l-1), 2^(l-1) - 1) with the scale s * 2^(h - l), ties to even. This is Double
    Rounding (Huang et al., arXiv 2502.01199, section 3.1, equations 1 to 3, without zero points). The first rounding is
    in the mode of the format, ``nearest_even`` unless it names another one to nearest.

    Args:
        model: any ``torch.nn.Module`` that ``fxround.compile`` takes. It is not changed.
        policy: as for ``fxround.compile``, with symmetric integers as the format of weights: ``"int8:channel"``,
            ``"int8"`` (one scale for a tensor), ``"int8:32"`` (one for 32 elements along the sum), or rules with the
            role ``"weight"``. Its rules for other values are not applied.
        data: as for ``quantize_weights``. Its first batch alone is used: it says which weights the model reads.
        widths: the widths that ``switch`` may choose; None for 2 to h bits. The stored width belongs to them.
        batch_size: splits tensors into batches of this many rows; None takes them whole.

    Returns:
        A copy of the model, in the model's training mode, with its weights at the stored width, and with the attribute
        ``switch``: a ``Switch``. For a parameter ``weight`` its module has the buffers ``weight_integers`` (int8, int16
        for more than 8 bits, of the weight's shape), ``weight_scale`` (one number for each block), ``weight_blocks``
        (the elements that share a scale along each dimension) and ``weight_bits`` (the width that is served, then all
        widths); int64 both.

    Raises:
        TypeError, ValueError: for wrong arguments, widths and formats; what ``quantize_weights`` raises for weights and
            data; for scales whose products with the largest integers overflow; for names that are taken.

    Example::

        stored = fxround.store_integers(model, "int8:channel", x)
        compiled = fxround.compile(stored, "bfloat16", example_inputs=x)
        compiled.switch(4)
        compiled.switch({"0": 8, "2": 2})
    """
    chosen = require_storable(model, widths)
    with torch.random.fork_rng(), torch.inference_mode(False), torch.no_grad():
        result = copy.deepcopy(model).eval()
        weights = integer_weights(result, Policy.parse(policy), next(calls(model, data, batch_size)), chosen)
        for name, weight in weights.items():
            add_integers(result, name, weight.value, weight.scales, weight.widths, weight.mode)
    return with_switch(result, like=model)


@dataclass(frozen=True)
class IntegerWeight:
    """A parameter that a policy rounds to integers.

    value    the parameter as it is
    scales   those of the stored width
    widths   in order; the last is the stored one
    mode     to nearest: how a quotient is rounded
    """

    value: Tensor
    scales: Scales
    widths: tuple[int, ...]
    mode: Mode


def require_storable(model: nn.Module, widths: Iterable[int] | None) -> list[int] | None:
    """Return widths in order. Raises TypeError and ValueError for wrong ones, and for a model that has a ``switch``."""
    require_module(model)
    if hasattr(model, SWITCH):
        raise ValueError(f"the model has an attribute {SWITCH!r}, the name of what switches; rename or delete it")
    return None if widths is None else _require_widths(widths)


def integer_weights(
    model: nn.Module, policy: Policy, call: ModelCall, widths: Sequence[int] | None
) -> dict[str, IntegerWeight]:
    """Return the parameters that a policy rounds to integers, by name. The parameters of the model are lost.

    widths: in order; None for all. Raises ValueError for another format, for widths above the largest stored one or
    without a stored one, and what ``weights_of`` raises.
    """
    entry = compile(model, policy, unroll_loops=True)._entry(call.args, call.kwargs)
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    weights = weights_of(model, entry, leaves, policy)
    stored = {name: _stored_bits(weight) for name, weight in weights.items()}
    most = max(stored.values())
    if widths is not None and widths[-1] > most:
        raise ValueError(f"widths has {widths[-1]}, and the policy stores at most {most} bits; expected no more")
    for name, bits in stored.items():
        if widths is not None and bits not in widths:
            raise ValueError(f"the weight {name} is stored in {bits} bits; expected this width among the widths")
    blocks = _blocks(model, entry, leaves, policy, weights)
    return {
        name: IntegerWeight(
            weight.value,
            Scales.of(weight.grid.scales[0], blocks[name]),
            tuple(bits for bits in widths or range(LEAST, MOST + 1) if bits <= stored[name]),
            weight.grid.rounding.mode,
        )
        for name, weight in weights.items()
    }


def add_integers(model: nn.Module, name: str, value: Tensor, scales: Scales, widths: Sequence[int], mode: Mode) -> None:
    """Store a weight of a model as integers in buffers, and set it to the numbers that they stand for.

    value: the weight. widths: in order; the last is the stored one. mode: of equation 1. Raises ValueError for buffers
    whose names are taken, and for scales whose products with the largest integers overflow.
    """
    stored = widths[-1]
    # Of all widths, the least integer with its scale is the same number.
    least = torch.full_like(scales.values, -(1 << stored - 1)).to(torch.int32)
    if not decode(least, scales.values, stored, widths[0], value.dtype).isfinite().all():
        raise ValueError(
            f"the weight {name}: -2^{stored - 1} times its scale overflows {value.dtype}; scale the weight down"
        )
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    for end in _BUFFERS:
        if hasattr(module, f"{leaf}{end}"):
            raise ValueError(f"the module {owner or type(model).__name__} has an attribute {leaf}{end}; rename it")
    module.register_buffer(f"{leaf}{_INTEGERS}", encode(value, scales.full(value.shape), stored, mode))
    module.register_buffer(f"{leaf}{_SCALE}", scales.values)
    for end, numbers in ((_BLOCKS, scales.blocks), (_BITS, (stored, *widths))):
        module.register_buffer(f"{leaf}{end}", torch.tensor(numbers, dtype=torch.int64, device=value.device))
    _write(_stored(model, name), stored)


def with_switch(model: nn.Module, like: nn.Module) -> nn.Module:
    """Give a model with stored integers its ``switch``, and another's training flags; returns the model."""
    for own, other in zip(model.modules(), like.modules(), strict=True):
        own.training = other.training
    setattr(model, SWITCH, Switch(model))
    return model


class Switch:
    """What chooses the width of stored integers: the attribute ``switch`` of what ``store_integers`` returns.

    A compiled model has it too: graphs read the weights in place, so that nothing is captured, compiled or allocated
    anew. A switch decodes every weight twice, to see that nobody has changed it and to write it, piece by piece. No
    other thread may run the model meanwhile. ``Switch(module)`` makes one for a module with such buffers, as for
    ``fxround.load(path).program``. Example::

        stored.switch(4)
        stored.switch({"layer1": 4, "layer1.conv": 8})
        stored.switch.bits                                  # {"layer1.conv.weight": 8, ...}
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, bits: int | Mapping[str, int], *, overwrite: bool = False) -> None:
        """Serve weights in other widths.

        Args:
            bits: a width for all stored weights, or widths by the paths of modules, which stand for all that is inside,
                and names of weights. Of several that fit, the longest decides; a weight that none fits keeps its width.
            overwrite: whether to write over weights that are not the numbers of their integers any more, because an
                optimizer or a part of a state was written to them.

        Raises:
            TypeError: for another type.
            ValueError: for a width that a weight was not stored for, a name that no stored weight has, a module without
                stored weights, and, without ``overwrite``, a weight that was changed. Nothing is then switched.
            FxroundError: inside of a backward pass, which reads the weights of its forward pass. A backward pass after
                the switch of a forward pass before it raises PyTorch's error about a changed tensor.
        """
        if inside_backward():
            raise FxroundError(
                "the width is switched inside of a backward pass, which reads the weights of its forward pass: switch "
                "before the forward pass or after the backward pass"
            )
        weights = self._weights()
        if not weights:
            raise ValueError("the module has no stored integers; fxround.store_integers makes a model that has")
        chosen = _chosen(weights, bits)
        with torch.inference_mode(False), torch.no_grad():
            for name, weight in weights.items():
                _require_scale(weight)
                if name in chosen and not overwrite:
                    _require_unchanged(weight)
            for name, width in chosen.items():
                _write(weights[name], width)

    @property
    def bits(self) -> dict[str, int]:
        """The widths that are served, by the names of weights."""
        return {name: weight.served for name, weight in self._weights().items()}

    @property
    def widths(self) -> dict[str, tuple[int, ...]]:
        """The widths that can be served, by the names of weights; the last is the stored one."""
        return {name: weight.widths for name, weight in self._weights().items()}

    def __repr__(self) -> str:
        rows = (f"  {w.name}: {w.served} of {', '.join(map(str, w.widths))} bits" for w in self._weights().values())
        return "\n".join(("Switch", *rows))

    def _weights(self) -> dict[str, _Stored]:
        names = dict(self._module.named_buffers())
        known = dict(self._module.named_parameters())
        ends = [name.removesuffix(_INTEGERS) for name in names if name.endswith(_INTEGERS)]
        stored = [n for n in ends if n in known and all(f"{n}{end}" in names for end in _BUFFERS)]
        return {name: _stored(self._module, name) for name in stored}


@dataclass(frozen=True)
class _Stored:
    """A weight with its integers, as a module holds them."""

    name: str
    weight: Tensor
    integers: Tensor
    scales: Scales
    bits: Tensor
    served: int
    widths: tuple[int, ...]

    @property
    def stored(self) -> int:
        return self.widths[-1]

    def pieces(self, served: int) -> Iterator[tuple[Any, Tensor]]:
        return decoded(self.integers, self.scales, self.stored, served, self.weight.dtype)


def _stored(module: nn.Module, name: str) -> _Stored:
    q, scale, blocks, bits = (module.get_buffer(f"{name}{end}") for end in _BUFFERS)
    served, *widths = bits.tolist()
    return _Stored(
        name, module.get_parameter(name), q, Scales(scale, tuple(blocks.tolist())), bits, served, tuple(widths)
    )


def _write(weight: _Stored, served: int) -> None:
    for rows, value in weight.pieces(served):
        weight.weight[rows].copy_(value)
    weight.bits[0] = served


def _require_unchanged(weight: _Stored) -> None:
    """Raise ValueError for a weight that is not what its integers stand for."""
    if all(torch.equal(weight.weight[rows], value) for rows, value in weight.pieces(weight.served)):
        return
    raise ValueError(
        f"the weight {weight.name} is not its integers in {weight.served} bits any more: something has changed it. "
        "Store the integers of the changed model, or lose the change by overwrite=True"
    )


def _require_scale(weight: _Stored) -> None:
    """Raise ValueError for scales that were converted to another dtype, which rounds them."""
    wanted = torch.float64 if weight.weight.dtype == torch.float64 else torch.float32
    if weight.scales.values.dtype != wanted:
        raise ValueError(
            f"the scales of the weight {weight.name} are {weight.scales.values.dtype}; expected {wanted} for a weight "
            f"of {weight.weight.dtype}: convert the model before store_integers"
        )


def _chosen(weights: Mapping[str, _Stored], bits: int | Mapping[str, int]) -> dict[str, int]:
    """Return the widths of the weights to switch, by their names."""
    if not isinstance(bits, Mapping):
        return {name: _require_width(weight, bits) for name, weight in weights.items()}
    if not bits:
        raise ValueError("bits is empty; expected a width, or widths by the paths of modules")
    known = {name: _paths(name) for name in weights}
    every = sorted({path for paths in known.values() for path in paths})
    for path in bits:
        if path not in every:
            names = ", ".join(map(repr, every))
            raise ValueError(
                f"no stored weight is {shown(path)} or inside of it{near(str(path), every)} Known: {names}"
            )
    chosen = {}
    for name, paths in known.items():
        fitting = [path for path in paths if path in bits]
        if fitting:
            chosen[name] = _require_width(weights[name], bits[fitting[0]])
    return chosen


def _paths(name: str) -> list[str]:
    """Return the name of a weight and the paths of the modules around it, the longest first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _require_width(weight: _Stored, bits: Any) -> int:
    known = ", ".join(map(str, weight.widths))
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise TypeError(f"the width of the weight {weight.name} is {type_of(bits)}; expected an int, one of {known}")
    if bits not in weight.widths:
        raise ValueError(f"the weight {weight.name} is not stored for {bits} bits; expected one of {known}")
    return bits


def _require_widths(widths: Iterable[int]) -> list[int]:
    """Return the widths, in order. Raises TypeError and ValueError."""
    if isinstance(widths, int | str) or not isinstance(widths, Iterable):
        raise TypeError(f"widths is {type_of(widths)}; expected several widths, as (8, 4, 2)")
    chosen = list(widths)
    for width in chosen:
        if isinstance(width, bool) or not isinstance(width, int):
            raise TypeError(f"widths has {type_of(width)}; expected ints")
        if not LEAST <= width <= MOST:
            raise ValueError(f"widths has {width}; expected {LEAST} to {MOST} bits")
    if not chosen:
        raise ValueError("widths is empty; expected several widths, as (8, 4, 2)")
    return sorted(set(chosen))


def _stored_bits(weight: Weight) -> int:
    """Return the width of the integers of a weight's format. Raises ValueError for another format."""
    rounding = weight.grid.rounding
    if isinstance(rounding, ScaledRounding) and rounding.format.scaling is not None:
        known = {integers(bits): bits for bits in range(LEAST, MOST + 1)}
        bits = known.get(rounding.format.element)
        if bits is not None and rounding.format.scaling.how not in ("inverse", "affine", "delayed"):
            return bits
    raise ValueError(
        f"the format of the weight {weight.name} is {rounding}; expected symmetric integers of {LEAST} to {MOST} bits "
        "with scales of their own, such as 'int8:channel', 'int8' or 'int8:32'"
    )


def _blocks(
    model: nn.Module, entry: Entry, leaves: list[Any], policy: Policy, weights: Mapping[str, Weight]
) -> dict[str, tuple[int, ...]]:
    """Return which elements of each weight share a scale.

    Random weights say it, so that it depends on the model and the policy alone; scales of the weights themselves, some
    of which may be equal by chance, are looked at too, so that it cannot be wrong. The weights of the model are lost.
    """
    scales = {name: [weight.grid.scales[0]] for name, weight in weights.items()}
    for seed in range(_PROBES):
        generator = torch.Generator().manual_seed(seed)
        for name, weight in weights.items():
            value = torch.randn(weight.value.shape, generator=generator)
            value *= torch.exp2(torch.randint(-6, 7, value.shape, generator=generator))
            model.get_parameter(name).copy_(value)
        for name, weight in weights_of(model, entry, leaves, policy).items():
            scales[name].append(weight.grid.scales[0])
    return {name: blocks_of(several) for name, several in scales.items()}
