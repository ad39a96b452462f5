"""Policies: which rounding each operation of a model gets.

What is true here. A policy is an ordered list of rules. A rule selects operations by module path,
operator and role, and says up to three things about them: the rounding of the result, the rounding of
every step of an accumulator, the order of a reduction. The last rule that matches and says a thing wins,
one thing at a time; an operation about which no rule says anything is left alone.

Why it is safe. A policy is checked when it is made: a format, mode, order, role or key that does not exist
is an error that suggests the nearest one. Text is the only form that is stored, so dict and TOML lose nothing.
A rule that matches no operation of a model is an error too, never a silent nothing.

    before   quant = {"conv1": float_quantize(exp=4, man=3)}     # and conv1's accumulator? and its bias?
    after    Policy.preset("stochastic").with_rules(Rule("conv1", rounding="e4m3fn", accumulate="bfloat16"))
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from fxround.errors import PolicyError, shown
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats import FORMATS, OTHER_NAMES, Format
from fxround.numerics.gradients import STRAIGHT, ZEROED, Gradient, clamps
from fxround.numerics.modes import Rounding
from fxround.numerics.orders import LANES, Order

IDENTITY: Final = "identity"
NATIVE: Final = "native"
DTYPE: Final = "dtype"

# What a value is to the model. Only a rule that names the role speaks of what enters a graph (the first
# four, and a gradient that comes from outside): a weight is no operation, and up_down must not move it.
ENTERING: Final = ("weight", "input", "buffer", "constant")
# Results: forwards; backwards (of a weight; of anything else); in an optimizer's step.
ROLES: Final = (*ENTERING, "activation", "statistic", "gradient", "error", "state", "update")
DIRECTIONS: Final = ("forward", "backward", "update")
# Whose formulas composite operators have (fxround.formulas).
OWN: Final = "fxround"
DEFINITIONS: Final = (OWN, "repdl")
# What a rule can say.
_SAID: Final = ("rounding", "accumulate", "order", "gradient")
_STRAIGHT: Final = Gradient()
_DIRECTIONS_OF_ROLE: Final = {
    **dict.fromkeys(ENTERING, ("forward", "update")),
    "error": ("backward",),
    "gradient": ("backward", "update"),
    "state": ("update",),
    "update": ("update",),
}


@dataclass(frozen=True)
class Assignment:
    """What a policy says of one operation. ``rounding`` None: leave it alone, accumulator included.

    ``accumulate`` is how a contraction accumulates (a reduction takes its ``step``), or ``"native"``: the stock
    kernel computes and its result is rounded once. ``rule`` is the text of the rule that chose ``rounding``;
    ``gradient`` is what the rounding does to the gradient that passes it.
    """

    rounding: Rounding | None
    accumulate: Accumulation | Literal["native"] | None
    order: Order
    rule: str
    gradient: Gradient = _STRAIGHT

    def __str__(self) -> str:
        return IDENTITY if self.rounding is None else f"{self.rounding} accumulate {self.accumulate} order {self.order}"


@dataclass(frozen=True)
class Rule:
    """One line of a policy.

    match       glob over module paths; a module's path speaks of what is inside it as well ("layer1", "*.attention")
    operator    glob over the operator ("mm", "aten.mm.default") or its kind ("contraction"); None: any
    role        one of ROLES; None: the result of any operation
    direction   the pass: "forward", "backward" or "update" (an optimizer's step); None: all of them
    rounding    "format/mode/overflow", format "dtype" for the operation's own; "identity": leave alone
    accumulate  each step's rounding, maybe with "product=..." or "chunk=n combine=..." behind it (Accumulation), or
                "native": the stock kernel, rounded once
    order       "sequential", "lanes:n" or "exact"
    optional    whether the rule may match nothing
    gradient    what the rounding does to the gradient that passes it (Gradient): "straight_through", "zero_clamped",
                a rounding, or the last two

    Raises PolicyError when a text does not parse or the rule says nothing.
    """

    match: str = "*"
    operator: str | None = None
    role: str | None = None
    rounding: str | None = None
    accumulate: str | None = None
    order: str | None = None
    optional: bool = False
    direction: str | None = None
    gradient: str | None = None

    def __post_init__(self) -> None:
        for field, kind in (("match", str), ("operator", str), ("optional", bool)):
            value = getattr(self, field)
            if not isinstance(value, kind) and (field, value) != ("operator", None):
                raise PolicyError(f"a rule: {field} is {shown(value)}, expected {kind.__name__}")
        for field, kept in (("rounding", IDENTITY), ("accumulate", NATIVE)):
            object.__setattr__(self, field, _canonical(getattr(self, field), field, kept))
        if self.order is not None:
            object.__setattr__(self, "order", str(_parsed(Order.parse, self.order, "order")))
        object.__setattr__(self, "gradient", self._full_gradient())
        for what, said, known in (("role", self.role, ROLES), ("direction", self.direction, DIRECTIONS)):
            if said is not None and said not in known:
                near = f"{_nearest(str(said), known)} Known: {', '.join(known)}"
                raise PolicyError(f"no {what} is named {shown(said)}{near}")
        if self.role is not None and not self.directions:
            raise PolicyError(
                f"the rule {self} can match nothing: {self.role} has no direction {self.direction!r}. What enters a "
                "graph is rounded once, and the backward pass works with the same values as the forward pass"
            )
        if all(getattr(self, field) is None for field in _SAID):
            raise PolicyError(f"the rule {self} says nothing: give it {'=, '.join(_SAID[:-1])}= or {_SAID[-1]}=")

    def __str__(self) -> str:
        selectors = ("operator", "role", "direction")
        where = [f"{key}={getattr(self, key)}" for key in selectors if getattr(self, key)]
        said = [f"{key}={getattr(self, key)}" for key in _SAID if getattr(self, key) is not None]
        return " ".join([self.match or '""', *where, "->", *said])

    def _full_gradient(self) -> str | None:
        """The gradient's text with all its parts. Raises PolicyError for zeros where the rounding clamps nothing."""
        if self.gradient is None:
            return None
        _parsed(lambda text: Gradient.parse(_with_dtype(text, "binary32")), self.gradient, "gradient")
        words = [w if w in (STRAIGHT, ZEROED) else _full_rounding(w) for w in str(self.gradient).split()]
        if ZEROED in words and self.rounding not in (None, IDENTITY):
            rounding = _resolve(str(self.rounding), "binary32")
            if not clamps(rounding):
                raise PolicyError(
                    f"gradient = {self.gradient!r}: {self.rounding} clamps nothing; write {rounding.format}/"
                    f"{'nearest_even' if rounding.mode.jitter else rounding.mode}/saturate"
                )
        return " ".join(words)

    @property
    def directions(self) -> frozenset[str]:
        """The passes that the rule can speak of."""
        of_role = _DIRECTIONS_OF_ROLE.get(self.role or "", DIRECTIONS)
        return frozenset(d for d in of_role if self.direction in (None, d))

    def matches(self, *, path: str, operator: str, kind: str, role: str, direction: str = "forward") -> bool:
        """Whether the rule speaks of an operation (``operator`` like ``"aten.mm.default"``) in the module ``path``."""
        if self.direction not in (None, direction):
            return False
        entering = kind == "placeholder" or (role in ENTERING and direction != "update")
        if role != self.role and (self.role is not None or entering):
            return False
        names = (kind, operator, *_short(operator))
        if self.operator is not None and not any(fnmatchcase(name, self.operator) for name in names):
            return False
        return fnmatchcase(path, self.match) or fnmatchcase(path, f"{self.match}.*")


@dataclass(frozen=True)
class Policy:
    """A name, ordered rules, and whether what cannot be rounded is an error (``strict``).

    definitions: whose formulas composite operators have, one of DEFINITIONS.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    strict: bool = False
    definitions: str = OWN

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        if self.definitions not in DEFINITIONS:
            near = f"{_nearest(str(self.definitions), DEFINITIONS)} Known: {', '.join(DEFINITIONS)}"
            raise PolicyError(f"policy {self.name!r}: no definitions are named {shown(self.definitions)}{near}")
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise PolicyError(f"policy {self.name!r}: a rule is a Rule, got {type(rule).__name__} {shown(rule)}")

    def __str__(self) -> str:
        return "\n".join([f"policy {self.name}{' (strict)' if self.strict else ''}", *(f"  {r}" for r in self.rules)])

    @property
    def treats_gradients(self) -> bool:
        """Whether some rounding does not pass its gradient straight through."""
        return any(rule.gradient not in (None, STRAIGHT) for rule in self.rules)

    def with_rules(self, *rules: Rule, name: str | None = None) -> Policy:
        """This policy with more rules after its own, so that they win."""
        return replace(self, name=name or f"{self.name}+", rules=(*self.rules, *rules))

    def matching(
        self, *, path: str, operator: str, kind: str, role: str, direction: str = "forward"
    ) -> tuple[int, ...]:
        """The positions of the rules that speak of an operation."""
        place = {"path": path, "operator": operator, "kind": kind, "role": role, "direction": direction}
        return tuple(i for i, rule in enumerate(self.rules) if rule.matches(**place))

    def assign(
        self, *, path: str, operator: str, kind: str, role: str, dtype: str, direction: str = "forward"
    ) -> Assignment | None:
        """What the policy says of one operation whose result has the format ``dtype`` ("binary32"), or None.

        What the matching rules leave unsaid is ``dtype/nearest_even`` and ``lanes:16``. Raises PolicyError
        where the values of the result's rounding would not fit ``dtype``.
        """
        place = {"path": path, "operator": operator, "kind": kind, "role": role, "direction": direction}
        rules = [self.rules[i] for i in self.matching(**place)]
        if not rules:
            return None
        said = {key: [r for r in rules if getattr(r, key) is not None] for key in _SAID}
        last = {key: getattr(rows[-1], key) for key, rows in said.items() if rows}
        chosen = (said["rounding"] or rules)[-1]
        if last.get("rounding") == IDENTITY:
            return Assignment(None, None, LANES, str(chosen))
        rounding = _resolve(last.get("rounding", DTYPE), dtype)
        accumulate = last.get("accumulate", DTYPE)
        if not rounding.format.within(Format.parse(dtype)):
            raise PolicyError(
                f"rule {str(chosen)!r} rounds {operator} at {path or 'the root module'} to {rounding.format}, but the"
                f" result is kept in {dtype}, which lacks some of its values: choose a narrower format or a wider dtype"
            )
        how: Accumulation | Literal["native"] = NATIVE
        if accumulate != NATIVE:
            how = Accumulation.parse(_with_dtype(accumulate, dtype))
        gradient = Gradient.parse(_with_dtype(last.get("gradient", STRAIGHT), dtype))
        return Assignment(rounding, how, Order.parse(last.get("order", LANES)), str(chosen), gradient)

    def require_matched(
        self, matched: Collection[int], paths: Iterable[str] = (), directions: Collection[str] = DIRECTIONS
    ) -> None:
        """Raises PolicyError if a rule that is not optional has its position outside ``matched``.

        ``paths``, the module paths of the model, serve to suggest what was meant. ``directions``: the passes that the
        graph has; a rule that speaks of none of them may match nothing.
        """
        known = sorted(set(paths))
        for position, rule in enumerate(self.rules):
            if position not in matched and not rule.optional and not rule.directions.isdisjoint(directions):
                raise PolicyError(
                    f"policy {self.name!r}: rule {position + 1}, {str(rule)!r}, matches no operation of the model"
                    f"{_nearest(rule.match, known)} Correct it, or set optional=True if it may match nothing."
                    f" The model's modules: {', '.join(p or '(root)' for p in known[:20])}"
                )

    @staticmethod
    def preset(name: str) -> Policy:
        """One of PRESETS, or any format or rounding by its text ("e4m3fn", "e5m2/stochastic/saturate").

        A format's policy rounds every result, weight and input to it and accumulates in binary32.
        """
        if name in PRESETS:
            return PRESETS[name]
        try:
            return _in_format(name, Rounding.parse(name))
        except ValueError as error:
            if any(mark in name for mark in "/(:"):
                raise PolicyError(f"policy {shown(name)}: {error}") from error
            known = list(dict.fromkeys([*PRESETS, *FORMATS]))
            other = OTHER_NAMES.get(name.lower())
            near = f"; did you mean {' or '.join(map(repr, other))}?" if other else _nearest(name, known)
            raise PolicyError(f"no policy is named {shown(name)}{near} Known: {', '.join(known)}") from error

    @staticmethod
    def parse(source: str | Path | Mapping[str, Any] | Rounding | Policy) -> Policy:
        """A policy from a preset's name, a rounding, a path to a .toml file, a dict, or a policy."""
        if isinstance(source, Policy):
            return source
        if isinstance(source, Mapping):
            return Policy.from_dict(source)
        if isinstance(source, Rounding):
            return Policy.preset(str(source))
        if isinstance(source, Path) or (isinstance(source, str) and source.endswith(".toml")):
            return _read(Path(source))
        if isinstance(source, str):
            return Policy.preset(source)
        raise TypeError(f"a policy is a name, a path, a dict, a Rounding or a Policy; got {type(source).__name__}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data; ``Policy.from_dict(p.to_dict()) == p``. What a rule leaves unsaid is left out."""
        rules = [{f.name: getattr(r, f.name) for f in fields(r) if getattr(r, f.name) != f.default} for r in self.rules]
        other = {} if self.definitions == OWN else {"definitions": self.definitions}
        return {"name": self.name, "strict": self.strict, **other, "rules": rules}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Policy:
        """The policy that ``to_dict`` wrote. Raises PolicyError naming a wrong key and the allowed ones."""
        _check_keys("a policy", data, {"name": str, "strict": bool, "rules": list, "definitions": str})
        rows = data.get("rules", [])
        for row in rows:
            if not isinstance(row, Mapping):
                raise PolicyError(f"a rule is a table of keys, got {type(row).__name__} {shown(row)}")
            _check_keys("a rule", row, {f.name: bool if f.name == "optional" else str for f in fields(Rule)})
        rules = tuple(Rule(**row) for row in rows)
        return Policy(data.get("name", "unnamed"), rules, data.get("strict", False), data.get("definitions", OWN))

    def to_toml(self) -> str:
        """The policy as a TOML document; ``Policy.from_toml(p.to_toml()) == p``."""
        data = self.to_dict()
        rules = data.pop("rules")
        tables = [data, *rules]
        texts = ["".join(f"{key} = {_toml(value)}\n" for key, value in table.items()) for table in tables]
        return "\n[[rules]]\n".join(texts)

    @staticmethod
    def from_toml(text: str) -> Policy:
        """The policy of a TOML document. Raises PolicyError."""
        try:
            return Policy.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise PolicyError(f"this is no TOML document: {error}") from error
        except RecursionError:
            raise PolicyError("this is no policy: its tables are nested too deeply") from None


def _in_format(name: str, rounding: Rounding) -> Policy:
    """Results, weights and inputs rounded to a format, accumulators in binary32."""
    entering = tuple(
        Rule(role=role, rounding=str(rounding), optional=True) for role in (*ENTERING, "error", "gradient")
    )
    return Policy(name, (Rule(rounding=str(rounding), accumulate="binary32", optional=True), *entering))


def _everywhere(
    name: str, mode: str, *, order: str = "lanes:16", strict: bool = False, definitions: str = OWN
) -> Policy:
    """Every operation and every step of an accumulator rounded in the operation's own format."""
    text = f"{DTYPE}/{mode}"
    return Policy(name, (Rule(rounding=text, accumulate=text, order=order, optional=True),), strict, definitions)


def _tensor_level(name: str, *, forward: str, backward: str) -> Policy:
    """Weights, arguments and activations in one format, errors and gradients in another; contractions are the stock's.

    Statistics, an optimizer's step and what no rule speaks of stay in the operation's own format.
    """
    rules = (
        Rule(rounding=DTYPE, accumulate=DTYPE),
        Rule(operator="contraction", accumulate=NATIVE),
        *(Rule(role=role, direction="forward", rounding=forward) for role in ("weight", "input", "activation")),
        *(Rule(role=role, direction="backward", rounding=backward) for role in ("error", "gradient")),
    )
    return Policy(name, tuple(replace(rule, optional=True) for rule in rules))


def _resolve(text: str, dtype: str) -> Rounding:
    """The rounding of a text whose format may be ``dtype``."""
    head, slash, rest = text.partition("/")
    return Rounding.parse(f"{dtype}{slash}{rest}" if head == DTYPE else text)


def _with_dtype(text: str, dtype: str) -> str:
    """The text of an accumulation, with the format ``dtype`` named."""
    return re.sub(rf"\b{DTYPE}\b", dtype, text)


def _canonical(text: object, field: str, kept: str) -> str | None:
    """A rounding's text with all its parts, so that equal rules are equal; ``kept`` stays as it is."""
    if text is None or text == kept:
        return text if text is None else kept
    if not isinstance(text, str | Rounding | Accumulation):
        raise PolicyError(f"{field} is a text like 'e4m3fn/stochastic/saturate' or {kept!r}, got {shown(text)}")
    if field == "rounding":
        full: str = _parsed(_full_rounding, str(text), field)
        return full
    _parsed(lambda t: Accumulation.parse(_with_dtype(t, "binary32")), str(text), field)
    step, *options = str(text).split()
    words = (word.partition("=") for word in options)
    spelt = [f"{name}={value if name == 'chunk' else _full_rounding(value)}" for name, _, value in words]
    return " ".join([_full_rounding(step), *spelt])


def _full_rounding(text: str) -> str:
    parsed = _resolve(text, "binary32")
    return f"{DTYPE}/{parsed.mode}/{parsed.overflow}" if text.partition("/")[0] == DTYPE else str(parsed)


def _parsed(parse: Any, text: str, field: str) -> Any:
    """``parse(text)``, its ValueError told as the rule's."""
    try:
        return parse(text)
    except (ValueError, TypeError, AttributeError) as error:
        raise PolicyError(f"{field} = {shown(text)}: {error}") from error


def _short(operator: str) -> tuple[str, ...]:
    """Shorter names of ``aten.mm.default``: ``aten.mm`` and ``mm``."""
    parts = operator.split(".")
    return (".".join(parts[:2]), parts[1]) if len(parts) > 1 else ()


def _nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: a question if some known word is like it."""
    near = get_close_matches(word[:80], list(known), n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else "."


def _check_keys(what: str, data: Mapping[str, Any], allowed: Mapping[str, type]) -> None:
    for key, value in data.items():
        if key not in allowed:
            near = f"{_nearest(str(key), allowed)} Allowed: {', '.join(allowed)}"
            raise PolicyError(f"{what} has no key {shown(key)}{near}")
        if not isinstance(value, allowed[key]) and not (allowed[key] is list and isinstance(value, tuple)):
            expected = allowed[key].__name__
            raise PolicyError(f"{what}: {key!r} is {shown(value)} ({type(value).__name__}), expected {expected}")


def _read(path: Path) -> Policy:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyError(f"the policy file {shown(str(path))} cannot be read: {error.strerror}") from error
    except ValueError as error:
        # A name with a zero byte, or bytes that are no UTF-8.
        raise PolicyError(f"the policy file {shown(str(path))} cannot be read: {error}") from error
    try:
        return Policy.from_toml(text)
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from error


def _toml(value: str | bool) -> str:
    """A TOML value: JSON's spelling, but that TOML wants DEL escaped as well."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


_PRESETS: Final = (
    Policy(IDENTITY),
    _everywhere("stochastic", "stochastic"),
    _everywhere("up_down", "up_down"),
    _everywhere("cestac", "stochastic_equal"),
    _everywhere("reproducible", "nearest_even", strict=True),
    _everywhere("repdl", "nearest_even", order="sequential", strict=True, definitions="repdl"),
    _in_format("bfloat16", Rounding.parse("bfloat16")),
    _in_format("binary16", Rounding.parse("binary16")),
    _tensor_level("fp8", forward="e4m3fn/nearest_even/saturate", backward="e5m2/nearest_even/saturate"),
)
PRESETS: Final = MappingProxyType({policy.name: policy for policy in _PRESETS})
