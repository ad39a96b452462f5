"""Policies made of a base and of axes, each combination under a name.

A value of an axis is applied to the base in one of three ways: as an argument of a function that returns a policy, as a
text in the place of ``{axis}``, or by a change of the base's rules that has a name (``AXES``). The order is this one,
and the order of the axes within each. A combination that no policy can say is dropped with the reason.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, Final

from fxround.errors import FxroundError, brief, shown
from fxround.numerics.formats import Format
from fxround.numerics.formats.hadamard import Hadamard
from fxround.numerics.formats.scaled import ScaledFormat, ScaledRounding, is_scaled
from fxround.numerics.modes import MODES, Rounding
from fxround.policy import Policy, Rule
from fxround.policy.rule import DTYPE, IDENTITY
from fxround.spelling import nearest
from fxround.views.table import Table, Tabled

_NONE: Final = (None, False)


@dataclass(frozen=True, repr=False)
class Sweep(Tabled, Mapping[str, Policy]):
    """Named policies, which ``fxround.compare`` takes as they are: a mapping from names to policies.

    policies   the policies by name
    choices    by the name of a policy, the label of its value on each axis
    axes       the labels of each axis
    dropped    the combinations that no policy can say, or that are another one again, with the reason

    ``print(sweep)`` shows all of them.
    """

    policies: Mapping[str, Policy]
    choices: Mapping[str, Mapping[str, str]]
    axes: Mapping[str, tuple[str, ...]]
    dropped: Mapping[str, str]

    def __getitem__(self, name: str) -> Policy:
        """Return a policy. Raises KeyError for a name that has none."""
        return self.policies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.policies)

    def __len__(self) -> int:
        return len(self.policies)

    __hash__ = None  # type: ignore[assignment]

    def where(self, **labels: Any) -> tuple[str, ...]:
        """Return the names of the policies with these values: ``sweep.where(scale="ue5m3", hadamard=16)``.

        Raises ValueError for an axis or a value that the sweep does not have.
        """
        wanted = {axis: _label(value) for axis, value in labels.items()}
        for axis, label in wanted.items():
            if axis not in self.axes or label not in self.axes[axis]:
                known = self.axes.get(axis, tuple(self.axes))
                raise ValueError(f"the sweep has no {axis}={label}; it has {', '.join(known)}")
        return tuple(name for name, own in self.choices.items() if all(own[axis] == wanted[axis] for axis in wanted))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        policies = {name: policy.to_dict() for name, policy in self.policies.items()}
        choices = {name: dict(own) for name, own in self.choices.items()}
        axes = {axis: list(labels) for axis, labels in self.axes.items()}
        return {"policies": policies, "choices": choices, "axes": axes, "dropped": dict(self.dropped)}

    def table(self) -> Table:
        """Return a row for each policy, with its value on each axis; the note lists what was dropped."""
        rows = tuple((name, *own.values()) for name, own in self.choices.items())
        said = [f"dropped {name}: {reason}" for name, reason in self.dropped.items()]
        count = f"{len(self)} polic{'y' if len(self) == 1 else 'ies'}"
        return Table(("policy", *self.axes), rows, f"{count} of {len(self) + len(self.dropped)}", "\n".join(said))


def combined(base: Any, axes: Mapping[str, Any]) -> Sweep:
    """Return the policies of a base and axes; arguments and errors as of ``fxround.sweep``."""
    labelled = _labelled(axes)
    _require_known(base, labelled)
    policies: dict[str, Policy] = {}
    choices: dict[str, dict[str, str]] = {}
    dropped: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for labels in product(*labelled.values()):
        chosen = dict(zip(labelled, labels, strict=True))
        name = ", ".join(f"{axis}={label}" for axis, label in chosen.items())
        try:
            policy = _policy(base, {axis: labelled[axis][label] for axis, label in chosen.items()}, name)
        except (FxroundError, ValueError, TypeError) as error:
            dropped[name] = brief(str(error), 300)
            continue
        own = policy.rules, policy.strict, policy.definitions
        if own in seen:
            dropped[name] = f"the same policy as {seen[own]}"
            continue
        seen[own], policies[name], choices[name] = name, policy, chosen
    sweep = Sweep(policies, choices, {axis: tuple(values) for axis, values in labelled.items()}, dropped)
    _require_used(sweep)
    return sweep


def _labelled(axes: Any) -> dict[str, dict[str, Any]]:
    """Return the values of each axis by their labels. Raises TypeError or ValueError for wrong axes."""
    if not isinstance(axes, Mapping) or not axes:
        raise TypeError(f"axes is {shown(axes)}; expected a dict such as {{'scale': ['e4m3fn', 'ue5m3']}}")
    labelled: dict[str, dict[str, Any]] = {}
    for axis, given in axes.items():
        if not isinstance(axis, str) or not axis.isidentifier():
            raise ValueError(f"axes has the name {shown(axis)}; expected a word such as 'scale'")
        if isinstance(given, str | Rule) or not isinstance(given, Mapping | Sequence):
            raise TypeError(f"axis {axis!r} is {shown(given)}; expected a list of values, or a dict from labels")
        pairs = list(given.items()) if isinstance(given, Mapping) else [(_label(value), value) for value in given]
        if not pairs:
            raise ValueError(f"axis {axis!r} has no values; expected one or several, or leave the axis out")
        labels = [label for label, _ in pairs]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"axis {axis!r} has two values {shown(twice)}; give them labels: {{'label': value, ...}}")
        wrong = next((label for label in labels if not isinstance(label, str)), None)
        if wrong is not None:
            raise TypeError(f"axis {axis!r} has the label {shown(wrong)}; expected texts as labels")
        labelled[axis] = dict(pairs)
    return labelled


def _label(value: Any) -> str:
    if value is None or isinstance(value, str | bool | int | float):
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)
    return str(getattr(value, "name", None) or value)


def _require_used(sweep: Sweep) -> None:
    """Raise ValueError for a value that no policy has, unless its combinations are other ones again."""
    if not sweep.policies:
        name, reason = next(iter(sweep.dropped.items()))
        raise ValueError(f"no combination is a policy; {name}: {reason}")
    for axis, labels in sweep.axes.items():
        used = {own[axis] for own in sweep.choices.values()}
        for label in labels:
            if label in used:
                continue
            reasons = [why for name, why in sweep.dropped.items() if f"{axis}={label}" in name.split(", ")]
            wrong = next((why for why in reasons if not why.startswith("the same policy as ")), None)
            if wrong is not None:
                raise ValueError(f"axis {axis!r}: no combination has the value {label}: {wrong}")


def _require_known(base: Any, labelled: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError for an axis that changes nothing of the base."""
    own = [*_arguments(base), *_places(base)]
    for axis, values in labelled.items():
        rules = all(value is None or _as_rules(value) is not None for value in values.values())
        if axis not in own and axis not in AXES and not rules:
            known = ", ".join(dict.fromkeys([*own, *AXES]))
            raise ValueError(
                f"no axis is named {axis!r}{nearest(axis, [*own, *AXES])} Known for this base: {known}; a text with "
                f"{{{axis}}} in the base, or Rules as values, make an axis of your own"
            )
    for place in _places(base):
        if place not in labelled:
            raise ValueError(f"the base has {{{place}}}, and no axis has this name; the axes are {', '.join(labelled)}")


def _is_function(base: Any) -> bool:
    return callable(base) and not isinstance(base, type | Policy | Mapping)


def _arguments(base: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(base).parameters) if _is_function(base) else ()


def _places(base: Any) -> tuple[str, ...]:
    """Return the names in braces in the texts of a base."""
    if isinstance(base, str):
        return tuple(dict.fromkeys(name for _, name, _, _ in string.Formatter().parse(base) if name))
    if isinstance(base, Mapping) and not isinstance(base, Sweep):
        return tuple(dict.fromkeys(name for value in base.values() for name in _places(value)))
    if isinstance(base, list | tuple):
        return tuple(dict.fromkeys(name for value in base for name in _places(value)))
    return ()


def _filled(base: Any, values: Mapping[str, str]) -> Any:
    """Return the base with texts in the places of names in braces."""
    if isinstance(base, str):
        return base.format(**values) if _places(base) else base
    if isinstance(base, Mapping) and not isinstance(base, Sweep):
        return {key: _filled(value, values) for key, value in base.items()}
    return [_filled(value, values) for value in base] if isinstance(base, list | tuple) else base


def _policy(base: Any, values: Mapping[str, Any], name: str) -> Policy:
    """Return the policy of one combination."""
    arguments = {axis: value for axis, value in values.items() if axis in _arguments(base)}
    places = {axis: str(value) for axis, value in values.items() if axis in _places(base)}
    policy = Policy.parse(base(**arguments) if _is_function(base) else _filled(base, places))
    rest = {axis: value for axis, value in values.items() if axis not in arguments and axis not in places}
    formats = {axis: value for axis, value in rest.items() if axis in FORMATS}
    rules: Rules = _formats(policy.rules, formats) if formats else policy.rules
    for axis, value in rest.items():
        if axis in CHANGES:
            rules = CHANGES[axis](rules, value)
    added = [rule for value in rest.values() for rule in _as_rules(value) or ()]
    return replace(policy, name=name, rules=(*rules, *added))


def _as_rules(value: Any) -> tuple[Rule, ...] | None:
    """Return the rules that a value adds; None for a value of another kind."""
    if isinstance(value, Rule):
        return (value,)
    if isinstance(value, list | tuple) and value and all(isinstance(rule, Rule) for rule in value):
        return tuple(value)
    return None


# ---- changes with a name ----

Rules = Sequence[Rule]
Change = Callable[[Rules, Any], Rules]


def _with(rule: Rule, field: str, text: str) -> Rule:
    """Return a rule with another text in one of its fields."""
    changes: dict[str, Any] = {field: text}
    return replace(rule, **changes)


def _scaled(rules: Rules, change: Callable[[ScaledRounding], ScaledRounding]) -> Rules:
    """Change the scaled formats of rules. Raises ValueError if there are none."""
    changed, count = [], 0
    for rule in rules:
        for field in ("operands", "rounding"):
            text = getattr(rule, field)
            if is_scaled(text):
                rule, count = _with(rule, field, str(change(ScaledRounding.parse(text)))), count + 1
        changed.append(rule)
    if not count:
        raise ValueError("the base has no scaled format to change")
    return changed


def _formats(rules: Rules, values: Mapping[str, Any]) -> Rules:
    """Take other elements, blocks and scales, all at once: in between, a format may be none that can be said.

    values: of the axes ``FORMATS``, those that the sweep has.
    """
    element = Format.parse(str(values["element"])) if "element" in values else None
    scaling = {_FIELDS[axis]: read(values[axis]) for axis, read in _READ.items() if axis in values}
    changed: list[Rule] = []
    count = dict.fromkeys(values, 0)
    for rule in rules:
        of_weights = rule.role == "weight"
        block = values.get("weights" if of_weights else "block")
        own = scaling | ({} if block is None else {"block": _block_of(block)})
        for field in ("operands", "rounding"):
            text = getattr(rule, field)
            if text is None or text == IDENTITY or text.partition("/")[0] == DTYPE:
                continue
            if is_scaled(text):
                rule = _with(rule, field, str(_reformed(ScaledRounding.parse(text), element, own)))
                hit = {"element", *(_READ.keys() & values.keys()), "weights" if of_weights else "block"}
            else:
                plain = Rounding.parse(text)
                other = plain if element is None else Rounding(element, plain.mode, plain.overflow)
                rule, hit = _with(rule, field, str(other)), {"element"}
            count |= {axis: count[axis] + 1 for axis in hit & count.keys()}
        changed.append(rule)
    idle = [axis for axis, times in count.items() if not times]
    if idle:
        kind = {"element": "format", "weights": "rule of its own for weights"}.get(idle[0], "scaled format")
        raise ValueError(f"the base has no {kind}, which {idle[0]} would change")
    return changed


def _reformed(rounding: ScaledRounding, element: Format | None, scaling: Mapping[str, Any]) -> ScaledRounding:
    """Return a rounding with another element format and other fields of its scaling."""
    form = rounding.format
    if form.scaling is None and scaling:
        raise ValueError(f"{form} has no scale of a block to change")
    scale = None if form.scaling is None else replace(form.scaling, **scaling)
    other = replace(form, scaling=scale) if element is None else ScaledFormat(element, scale)
    return replace(rounding, format=other)


def _block_of(value: Any) -> str | tuple[int, ...]:
    if value in ("channel", "tensor"):
        return str(value)
    try:
        return tuple(int(size) for size in str(value).split("x"))
    except ValueError:
        raise ValueError(f"a block is {shown(value)}; expected 16, '16x16', 'channel' or 'tensor'") from None


def _mode(rules: Rules, value: Any) -> Rules:
    """Take another mode for all operands, or for all results of a base without formats of operands."""
    mode = MODES.get(str(value))
    if mode is None:
        raise ValueError(f"no mode is named {shown(value)}{nearest(str(value), list(MODES))}")
    field = "operands" if any(rule.operands not in (None, IDENTITY) for rule in rules) else "rounding"
    return [_in_mode(rule, field, str(value)) for rule in rules]


def _in_mode(rule: Rule, field: str, mode: str) -> Rule:
    text = getattr(rule, field)
    if text is None or text == IDENTITY:
        return rule
    head, _, rest = text.partition("/")
    overflow = rest.partition("/")[2]
    return _with(rule, field, "/".join([head, mode, *([overflow] if overflow else [])]))


def _errors(rules: Rules, value: Any) -> Rules:
    """Take another mode for the operands that are errors: those of the backward pass."""
    if str(value) not in MODES:
        raise ValueError(f"no mode is named {shown(value)}{nearest(str(value), list(MODES))}")
    changed: list[Rule] = []
    for position, rule in enumerate(rules):
        if rule.operands in (None, IDENTITY):
            changed.append(rule)
        elif rule.direction == "backward" or rule.role == "error":
            changed.append(_in_mode(rule, "operands", str(value)))
        else:
            changed.append(rule)
            pairs = (other for other in rules[position + 1 :] if other.direction == "backward")
            if rule.direction is None and rule.role is None and not any(_is_pair(rule, other) for other in pairs):
                changed.append(_in_mode(replace(rule, direction="backward"), "operands", str(value)))
    if not any(rule.direction == "backward" or rule.role == "error" for rule in changed if rule.operands):
        raise ValueError("the base has no operands of the backward pass")
    return changed


def _is_pair(rule: Rule, other: Rule) -> bool:
    """Whether a rule of the backward pass is what another one says of the forward pass."""
    return other.operands is not None and (rule.match, rule.operator, rule.result) == (
        *(other.match, other.operator, other.result),
    )


def _hadamard(rules: Rules, value: Any) -> Rules:
    """Transform the operands of the products that yield gradients of weights; None for no transform at all."""
    transform = None if value in _NONE else Hadamard(int(value))
    plain = _scaled(rules, lambda rounding: replace(rounding, hadamard=None))
    kept = [rule for rule in plain if not (rule.operands and rule.result == "gradient")]
    if transform is None:
        return kept
    operands = [rule for rule in kept if is_scaled(rule.operands) and rule.role is None and rule.result is None]
    if not operands:
        raise ValueError("the base has no scaled operands of all products to transform")
    turned = [replace(rule, result="gradient", operands=f"{transform}+{rule.operands}") for rule in operands]
    return [*kept, *turned]


def _gradient(rules: Rules, value: Any) -> Rules:
    """Set what roundings of results do to the gradient that passes them."""
    formats = [rule for rule in rules if rule.rounding not in (None, IDENTITY)]
    rounds = [rule for rule in formats if str(rule.rounding).partition("/")[0] != DTYPE]
    if not rounds and value != "straight_through":
        raise ValueError(
            "the base rounds operands alone, whose gradients pass straight through; gradient goes with a base that "
            "rounds results"
        )
    return [replace(rule, gradient=str(value)) if rule in rounds else rule for rule in rules]


def _accumulate(rules: Rules, value: Any) -> Rules:
    """Accumulate products in this way."""
    return [*rules, Rule(operator="contraction", accumulate=str(value), optional=True)]


def _whole(value: Any) -> Format | None:
    return None if value in _NONE else Format.parse("binary32" if value is True else str(value))


# The axes of formats that are fields of a ``Scaling``, with what reads their values.
_READ: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {"scale": lambda value: Format.parse(str(value)), "how": str, "tensor": _whole}
)
_FIELDS: Final = MappingProxyType({"scale": "format", "how": "how", "tensor": "whole"})
FORMATS: Final = ("element", "block", "weights", *_READ)
CHANGES: Final[Mapping[str, Change]] = MappingProxyType(
    {
        "mode": _mode,
        "errors": _errors,
        "hadamard": _hadamard,
        "gradient": _gradient,
        "accumulate": _accumulate,
    }
)
AXES: Final = (*FORMATS, *CHANGES)


__all__ = ["AXES", "Sweep", "combined"]
