"""Policies: which rounding each operation of a model gets.

A policy is an ordered list of rules. A rule selects operations by module path, operator and role, and sets roundings:
of the result, of every step of an accumulator, of the operands, of gradients; and the order of a reduction. For each of
these, the last matching rule that sets it wins; an operation without a matching rule is left unchanged. A policy is
checked when it is made, and stores text only, so that dict and TOML lose nothing. A rule that matches no operation of a
model is an error.
"""

from __future__ import annotations

import contextlib
import functools
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from fxround.errors import PolicyError, brief, shown, type_of
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.faults import Faults
from fxround.numerics.formats import FORMATS, Format, candidates, spelt
from fxround.numerics.formats.names import other_numbers, own_name
from fxround.numerics.formats.scaled import OTHERS, SCALED, SPELLINGS, ScaledRounding, is_scaled
from fxround.numerics.formats.stored_bits import has_stored_bits
from fxround.numerics.gradients import STRAIGHT, Gradient
from fxround.numerics.lazy import cached_property
from fxround.numerics.modes import GRID_MODES, MODES, Rounding
from fxround.numerics.orders import LANES, Order
from fxround.policy.rule import (
    DIRECTIONS,
    DTYPE,
    ENTERING,
    IDENTITY,
    NATIVE,
    OF_RESULTS,
    WIDE,
    Assignment,
    Rule,
    faults_of,
    in_dtype,
    resolve,
    with_dtype,
    with_wide,
)
from fxround.short_reprs import Short
from fxround.spelling import nearest, require_keys, selects, toml

# The formulas of composite operators (fxround.operators.formulas).
OWN: Final = "fxround"
DEFINITIONS: Final = (OWN, "repdl")


@dataclass(frozen=True, repr=False)
class Policy(Short):
    """An ordered list of rules that says how every operation of a model is rounded.

    name         the name in reports and messages
    rules        a tuple of ``Rule``; for each field, the last matching rule that sets it decides
    strict       whether a floating-point operation that cannot be rounded is an error
    definitions  the formulas of composite operators such as softmax, "fxround" or "repdl"

    Policies are immutable and hashable. Raises PolicyError for unknown definitions, for a rule that is not a ``Rule``,
    and for fields of other types. Example::

        policy = Policy("narrow", (Rule(rounding="e4m3fn/nearest_even/saturate", accumulate="bfloat16"),))
        Policy.from_toml(policy.to_toml()) == policy
    """

    name: str
    rules: tuple[Rule, ...] = ()
    strict: bool = False
    definitions: str = OWN

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise PolicyError(f"the name of a policy is {type_of(self.name)} ({shown(self.name)}); expected a str")
        if isinstance(self.rules, str | Mapping) or not isinstance(self.rules, Iterable):
            raise PolicyError(
                f"policy {shown(self.name)}: rules is {type_of(self.rules)}; expected a sequence of Rules, as in "
                f"Policy(..., (Rule(...),))"
            )
        object.__setattr__(self, "rules", tuple(self.rules))
        if not isinstance(self.strict, bool):
            raise PolicyError(f"policy {shown(self.name)}: strict is {shown(self.strict)}; expected True or False")
        if self.definitions not in DEFINITIONS:
            near = f"{nearest(str(self.definitions), DEFINITIONS)} Known: {', '.join(DEFINITIONS)}"
            raise PolicyError(f"policy {shown(self.name)}: no definitions are named {shown(self.definitions)}{near}")
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise PolicyError(
                    f"policy {shown(self.name)}: a rule is a Rule, got {type(rule).__name__} {shown(rule)}"
                )

    def __str__(self) -> str:
        return "\n".join(
            [f"policy {brief(self.name)}{' (strict)' if self.strict else ''}", *(f"  {r}" for r in self.rules)]
        )

    def _line(self) -> str:
        base = self._base
        if base is None:
            count = f"{len(self.rules)} rule{'s' * (len(self.rules) != 1)}"
            return f"{self.name}, {': '.join(filter(None, (count, '; '.join(map(str, self.rules)))))}"
        options = [key for key in ("strict", "definitions") if getattr(self, key) != getattr(base, key)]
        more = "; ".join(
            [*(f"{key}={getattr(self, key)}" for key in options), *map(str, self.rules[len(base.rules) :])]
        )
        preset = "the preset" if self.name == base.name else f"the preset {base.name}"
        return f"{self.name}, {preset}{more and f' and {more}'}"

    @property
    def _base(self) -> Policy | None:
        """The preset with the most rules of those that the policy begins with; the one of its name before others."""
        named: tuple[Policy, ...] = ()
        with contextlib.suppress(PolicyError):
            named = (Policy.preset(self.name.rstrip("+")),)
        presets = (*named, *(preset for preset in NAMED.values() if preset.rules))
        begun = [preset for preset in presets if self.rules[: len(preset.rules)] == preset.rules]
        return max(begun, key=lambda preset: len(preset.rules), default=None)

    @property
    def treats_gradients(self) -> bool:
        """Whether some rounding changes the gradient that passes it."""
        return any(rule.gradient not in (None, STRAIGHT) for rule in self.rules)

    @property
    def delays_scales(self) -> bool:
        """Whether some operand has a scale that is state of a compiled model: from earlier steps, or held."""
        texts = [rule.operands for rule in self.rules if rule.operands is not None and is_scaled(rule.operands)]
        scalings = [ScaledRounding.parse(text).format.scaling for text in texts]
        return any(scaling is not None and scaling.is_state for scaling in scalings)

    @cached_property
    def draws(self) -> bool:
        """Whether some rounding draws random bits, or some bit flips by chance."""
        listed = (rule.faults or faults_of(rule.accumulate) for rule in self.rules)
        if any(Faults.parse(text).possible for text in listed if text is not None):
            return True
        said = (str(getattr(rule, key)) for rule in self.rules for key in ("rounding", "accumulate", "operands"))
        words = (word for text in said for option in text.split() for word in re.split("[/:=]", option))
        modes = {**MODES, **GRID_MODES}
        return any(word in modes and modes[word].random_bits > 0 for word in words)

    def with_rules(self, *rules: Rule, name: str | None = None) -> Policy:
        """Return this policy with more rules after its own, so that the new ones decide where both match.

        name: the name of the new policy; None appends "+" to this one's.
        """
        return replace(self, name=name or f"{self.name}+", rules=(*self.rules, *rules))

    def with_optional_rules(self, paths: Iterable[str] | None = None) -> Policy:
        """Return this policy with rules that may match nothing: all, or those for one of these modules' paths."""
        places = None if paths is None else list(paths)

        def concerns(rule: Rule) -> bool:
            return places is None or any(selects(rule.match, None, path=path, name="", kind="") for path in places)

        return replace(self, rules=tuple(replace(r, optional=r.optional or concerns(r)) for r in self.rules))

    def matching(
        self, *, path: str, operator: str, kind: str, role: str, direction: str = "forward"
    ) -> tuple[int, ...]:
        """Return the positions of the rules that match an operation's result; arguments as in ``assign``."""
        place = {"path": path, "operator": operator, "kind": kind, "role": role, "direction": direction}
        return tuple(i for i, rule in enumerate(self.rules) if rule.speaks_of_results and rule.matches(**place))

    def matching_operand(
        self, *, path: str, operator: str, kind: str, role: str, direction: str, result: str = ""
    ) -> tuple[int, ...]:
        """Return the positions of the rules that match an operand; arguments as in ``assign_operand``."""
        place = {"path": path, "operator": operator, "kind": kind, "role": role, "direction": direction}
        place["result"] = result
        return tuple(i for i, rule in enumerate(self.rules) if rule.matches_operand(**place))

    def assign_operand(
        self, *, path: str, operator: str, kind: str, role: str, direction: str, dtype: str, result: str = ""
    ) -> Assignment | None:
        """Return the rounding of one operand, of the format ``dtype``, before the operation; None leaves it unchanged.

        path, operator and kind are the operation's, role and direction the operand's; result is the role of the
        operation's result. Raises PolicyError if ``dtype`` lacks values of the rounding's format.
        """
        matching = self.matching_operand(
            path=path, operator=operator, kind=kind, role=role, direction=direction, result=result
        )
        text = self.rules[matching[-1]].operands if matching else None
        if text is None or text == IDENTITY:
            return None
        rule, said = str(self.rules[matching[-1]]), self.rules[matching[-1]].faults
        faults = Faults.parse(said).possible if said else None
        _require_scales(faults, text, rule)
        if is_scaled(text):
            scaled = ScaledRounding.parse(text)
            return Assignment(scaled.element, NATIVE, LANES, rule, scaled=scaled, faults=faults)
        rounding = in_dtype(resolve(text, dtype), dtype)
        _require_within(rounding, dtype, rule, f"an operand of {operator}", path)
        return Assignment(rounding, NATIVE, LANES, rule, faults=faults)

    def assign(
        self, *, path: str, operator: str, kind: str, role: str, dtype: str, direction: str = "forward"
    ) -> Assignment | None:
        """Return the roundings of one operation, or None if no rule matches it.

        path: of its module, "" for the root. operator: for example ``"aten.mm.default"``. kind: of the operator, for
        example ``"contraction"``. role, direction: of the result, as in ``Rule``. dtype: the format of the result
        ("binary32").

        The defaults of fields that no rule sets are ``dtype/nearest_even``, ``wide/nearest_even`` and ``lanes:16``.
        Raises PolicyError if ``dtype`` lacks values of the rounding's format.
        """
        place = {"path": path, "operator": operator, "kind": kind, "role": role, "direction": direction}
        rules = [self.rules[i] for i in self.matching(**place)]
        if not rules:
            return None
        said = {key: [r for r in rules if getattr(r, key) is not None] for key in OF_RESULTS}
        said["faults"] = [r for r in said["faults"] if r.operands is None]
        last = {key: getattr(rows[-1], key) for key, rows in said.items() if rows}
        chosen = (said["rounding"] or rules)[-1]
        if last.get("rounding") == IDENTITY:
            return Assignment(None, None, LANES, str(chosen))
        text = last.get("rounding", DTYPE)
        blocks = ScaledRounding.parse(text) if is_scaled(text) else None
        try:
            rounding = in_dtype(resolve(DTYPE if blocks else text, dtype, enters=role in ENTERING), dtype)
        except ValueError as error:
            raise PolicyError(f"rule {str(chosen)!r} at {path or 'the root module'}: {error}") from error
        accumulate = last.get("accumulate", WIDE)
        _require_within(rounding, dtype, str(chosen), operator, path)
        how: Accumulation | Literal["native"] = NATIVE
        if accumulate != NATIVE:
            parsed = Accumulation.parse(with_dtype(with_wide(accumulate, dtype), dtype))
            how = replace(parsed, faults=parsed.flips)
        gradient = Gradient.parse(with_dtype(last.get("gradient", STRAIGHT), dtype))
        faults = Faults.parse(last["faults"]).possible if "faults" in last else None
        _require_scales(faults, text, str(chosen))
        order = Order.parse(last.get("order", LANES))
        if isinstance(how, Accumulation) and how.chunk is not None and order.shards > 1 and kind == "contraction":
            raise PolicyError(
                f"{operator} at {path or 'the root module'} has accumulate={str(how)!r} and order={str(order)!r}: the "
                "partial sums of a contraction are those of chunks or of shards; set order= of one shard, or leave out "
                "chunk= and combine="
            )
        return Assignment(rounding, how, order, str(chosen), gradient, faults=faults, blocks=blocks)

    def require_matched(
        self,
        matched: Collection[int],
        paths: Iterable[str] = (),
        directions: Collection[str] = DIRECTIONS,
        operators: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Raise PolicyError if a rule that is not optional has its position outside ``matched``.

        paths: the module paths of the model, for suggestions. directions: the passes of the graph; a rule that applies
        to none of them may match nothing. operators: the operators of the model, with their kinds, for suggestions.
        """
        known, pairs = sorted(set(paths)), sorted(set(operators))
        for position, rule in enumerate(self.rules):
            if position not in matched and not rule.optional and not rule.directions.isdisjoint(directions):
                raise PolicyError(
                    f"policy {shown(self.name)}: rule {position + 1}, {str(rule)!r}, matches no operation of the model"
                    f"{_advice(rule, known, pairs)}"
                )

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def preset(name: str) -> Policy:
        """Return the preset of this name, in capitals or not, or the policy of a format or rounding.

        The policy of a format or rounding ("e4m3fn", "e5m2/stochastic/saturate", "fp16") rounds every result, weight
        and input with it, and accumulates in binary32; that of ``sbits(t)``, and of a format that binary32 does not
        hold, accumulates in the dtype, or in binary32 for 16 bits. The policy of a scaled format ("mxfp8",
        "int8:channel/stochastic") rounds the operands of contractions, and leaves every result in its dtype. Raises
        PolicyError for an unknown name, with the known ones.
        """
        name = own_name(name)
        if name in NAMED:
            return NAMED[name]
        try:
            if is_scaled(name):
                return of_operands(name, Rule(operands=name))
            if has_stored_bits(name):
                return in_format(name, name, WIDE)
            rounding = Rounding.parse(name)
            fits = rounding.format.within(FORMATS["binary32"])
            return in_format(name, rounding, "binary32" if fits else WIDE)
        except ValueError as error:
            if name.partition("/")[0] == DTYPE:
                raise PolicyError(
                    f"policy {shown(name)}: {DTYPE!r} is a format in the rules of a policy, as in "
                    f"Rule(rounding={name!r}); a policy alone names the format, as in 'binary32' or 'binary64'"
                ) from error
            if (
                name != name.lower()
            ):  # no name has capitals; if this is none either, the message is about the text given
                with contextlib.suppress(PolicyError):
                    return Policy.preset(name.lower())
            if any(mark in name for mark in "/(:") or other_numbers(name):
                raise PolicyError(f"policy {shown(name)}: {error}") from error
            known = list(dict.fromkeys([*NAMED, *FORMATS, *SCALED]))
            other = candidates(name)
            spellings = dict.fromkeys([*known, *SPELLINGS])
            near = f"; did you mean {' or '.join(map(repr, other))}?" if other else nearest(name.lower(), spellings)
            raise PolicyError(f"no policy is named {shown(name)}{near} Known: {', '.join(known)}, {OTHERS}") from error

    @staticmethod
    def parse(source: Any) -> Policy:
        """Return a policy from a preset's name, a rounding, a path to a .toml file, a dict, or a policy.

        A rounding is a text, a Rounding, a Format, or a floating-point dtype of PyTorch or NumPy. Raises TypeError for
        anything else, PolicyError for an invalid policy.
        """
        source = spelt(source)
        if isinstance(source, Policy):
            return source
        if isinstance(source, Mapping):
            return Policy.from_dict(source)
        if isinstance(source, Rounding | ScaledRounding):
            return Policy.preset(str(source))
        if isinstance(source, Path) or (isinstance(source, str) and source.endswith(".toml")):
            return _read(Path(source))
        if isinstance(source, str):
            return Policy.preset(source)
        raise TypeError(
            f"a policy is a name, a path, a dict, a dtype, a Rounding or a Policy; got {type(source).__name__}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; ``Policy.from_dict(p.to_dict()) == p``. Default values of rules are left out."""
        rules = [{f.name: getattr(r, f.name) for f in fields(r) if getattr(r, f.name) != f.default} for r in self.rules]
        other = {} if self.definitions == OWN else {"definitions": self.definitions}
        return {"name": self.name, "strict": self.strict, **other, "rules": rules}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Policy:
        """Return the policy that ``to_dict`` wrote. Raises PolicyError naming a wrong key and the allowed ones."""
        require_keys("a policy", data, {"name": str, "strict": bool, "rules": list, "definitions": str})
        rows = []
        for row in data.get("rules", []):
            if not isinstance(row, Mapping):
                raise PolicyError(f"a rule is a table of keys, got {type(row).__name__} {shown(row)}")
            row = {key: spelt(value) for key, value in row.items()}
            rows.append(row)
            require_keys("a rule", row, {f.name: bool if f.name == "optional" else str for f in fields(Rule)})
        rules = tuple(Rule(**row) for row in rows)
        return Policy(data.get("name", "unnamed"), rules, data.get("strict", False), data.get("definitions", OWN))

    def to_toml(self) -> str:
        """Return the policy as a TOML document; ``Policy.from_toml(p.to_toml()) == p``."""
        data = self.to_dict()
        rules = data.pop("rules")
        tables = [data, *rules]
        texts = ["".join(f"{key} = {toml(value)}\n" for key, value in table.items()) for table in tables]
        return "\n[[rules]]\n".join(texts)

    @staticmethod
    def from_toml(text: str) -> Policy:
        """Return the policy of a TOML document. Raises PolicyError for a text that is not a policy in TOML."""
        try:
            return Policy.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise PolicyError(f"this is not a TOML document: {error}") from error
        except RecursionError:
            raise PolicyError("this is not a policy: its tables are nested too deeply") from None


def in_format(name: str, rounding: Rounding | str, accumulate: str = "binary32") -> Policy:
    """Round results, weights and inputs to a format."""
    text = str(rounding)
    entering = tuple(Rule(role=role, rounding=text, optional=True) for role in (*ENTERING, "error", "gradient"))
    return Policy(name, (Rule(rounding=text, accumulate=accumulate, optional=True), *entering))


def of_operands(name: str, *rules: Rule) -> Policy:
    """Return a policy with rules for the operands of contractions, which are stock kernels.

    Every result keeps the operation's own format: norms, softmax, residuals, contractions.
    """
    kept = (Rule(rounding=DTYPE, accumulate=WIDE), Rule(operator="contraction", accumulate=NATIVE))
    own = (replace(rule, operator="contraction") for rule in rules)
    return Policy(name, tuple(replace(rule, optional=True) for rule in (*kept, *own)))


def _require_scales(faults: Faults | None, rounding: str, rule: str) -> None:
    """Raise PolicyError for faults of scales if the rounding has none, or one that is given."""
    scaling = ScaledRounding.parse(rounding).format.scaling if is_scaled(rounding) else None
    if faults is not None and faults.of_scales and scaling is None:
        raise PolicyError(
            f"rule {rule!r}: {faults.of_scales[0]} flips bits of the scales of blocks, and {rounding} has no such "
            "scales; expected a format as 'mxfp8', 'nvfp4' or 'int8:channel'"
        )
    if faults is not None and faults.of_tensors and (scaling is None or scaling.whole is None):
        own = f"; write scale.{faults.of_tensors[0].part} for its scales" if scaling is not None else ""
        raise PolicyError(
            f"rule {rule!r}: {faults.of_tensors[0]} flips bits of a scale of the tensor to which those of blocks are "
            f"relative, and {rounding} has none{own}; expected a format as 'nvfp4'"
        )


def _require_within(rounding: Rounding, dtype: str, rule: str, what: str, path: str) -> None:
    """Raise PolicyError if a tensor of the format ``dtype`` lacks values of the rounding."""
    if not rounding.format.within(Format.parse(dtype)):
        raise PolicyError(
            f"rule {rule!r} rounds {what} at {path or 'the root module'} to {rounding.format}, but the result is "
            f"stored in {dtype}, which cannot represent all of its values: choose a narrower format or a wider dtype"
        )


def _read(path: Path) -> Policy:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyError(f"the policy file {shown(str(path))} cannot be read: {error.strerror}") from error
    except ValueError as error:
        # The path has a zero byte, or the file is not UTF-8.
        raise PolicyError(f"the policy file {shown(str(path))} cannot be read: {error}") from error
    try:
        return Policy.from_toml(text)
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from error


# The presets by name, which ``presets`` puts here.
NAMED: Final[dict[str, Policy]] = {}


def _advice(rule: Rule, paths: Sequence[str], operators: Sequence[tuple[str, str]]) -> str:
    """Return the end of a sentence about a rule that matches nothing: what the model has in its place."""
    said = "Correct it, or set optional=True if it may match nothing."
    known = any(selects("*", rule.operator, path="", name=name, kind=kind) for name, kind in operators)
    if rule.operator is None and rule.match in paths:
        return (
            f": {rule.match!r} is a module of the model, but no operation that the rule applies to is inside of it. "
            f"The operations of a module that has two names are listed under one of them, which summary() shows. {said}"
        )
    if rule.operator is None or known or not operators:
        return (
            f"{nearest(rule.match, paths)} {said} The model's modules: {', '.join(p or '(root)' for p in paths[:20])}"
        )
    names = sorted({name.split(".")[1] if name.count(".") > 1 else name for name, _ in operators})
    kinds = sorted({kind for _, kind in operators})
    return (
        f", which has no operator {rule.operator!r}{nearest(rule.operator, [*names, *kinds])} {said} It could "
        f"match the operators {', '.join(names[:40])} of the kinds {', '.join(kinds)}. A layer or a function of "
        "PyTorch's may be a formula of several operators, which summary() shows."
    )
