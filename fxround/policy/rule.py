"""A rule of a policy: which values it selects, and how their roundings are made."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from fxround.errors import PolicyError, brief, shown
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.faults import Faults
from fxround.numerics.formats import Format, spelt
from fxround.numerics.formats.scaled import ScaledRounding, any_rounding, is_scaled
from fxround.numerics.formats.storage import QUARTERS, own_overflow
from fxround.numerics.formats.stored_bits import has_stored_bits, with_stored_bits
from fxround.numerics.gradients import ESTIMATED, STRAIGHT, ZEROED, Gradient
from fxround.numerics.modes import Rounding
from fxround.numerics.orders import Order
from fxround.short_reprs import Sparse
from fxround.spelling import nearest, selects

IDENTITY: Final = "identity"
NATIVE: Final = "native"
DTYPE: Final = "dtype"
# An accumulator's format: binary32 for 16-bit dtypes, because hardware accumulates them in binary32; else the dtype.
WIDE: Final = "wide"

# The roles of a value. Only a rule that names the role applies to values that enter a graph (the first
# four, and a gradient that comes from outside): a weight is no operation, and up_down must not move it.
ENTERING: Final = ("weight", "input", "buffer", "constant")
# Results: in the forward pass; in the backward pass (of a weight; of anything else); in an optimizer's step.
ROLES: Final = (*ENTERING, "activation", "statistic", "gradient", "error", "state", "update")
DIRECTIONS: Final = ("forward", "backward", "update")
# The fields of a rule that set something: of results, and of operands.
OF_RESULTS: Final = ("rounding", "accumulate", "order", "gradient", "faults")
_SAID: Final = (*OF_RESULTS, "operands")
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
    """The roundings of one operation; ``rounding`` None leaves it unchanged, accumulator included.

    rounding    of the result
    accumulate  how a contraction accumulates (a reduction takes its ``step``), or ``"native"``: the stock kernel
                computes, and its result is rounded once
    order       of a reduction; its shards are those of a contraction's k too
    rule        the text of the rule that set ``rounding``
    gradient    what the rounding does to the gradient that passes it
    scaled      the scaled rounding of an operand, whose elements have ``rounding``; None for any other
    faults      the bits that flip by chance in the rounded value; None for none
    blocks      the scaled rounding of a result, after ``rounding``, which is that of its dtype; None for none
    """

    rounding: Rounding | None
    accumulate: Accumulation | Literal["native"] | None
    order: Order
    rule: str
    gradient: Gradient = _STRAIGHT
    scaled: ScaledRounding | None = None
    faults: Faults | None = None
    blocks: ScaledRounding | None = None

    @property
    def is_scaled(self) -> bool:
        """Whether a value of this assignment has elements of a scaled format."""
        return self.scaled is not None or self.blocks is not None

    @property
    def of_products(self) -> Accumulation | None:
        """How a contraction accumulates, in the shards of the order; None where the stock kernel computes."""
        if not isinstance(self.accumulate, Accumulation):
            return None
        return self.accumulate if self.order.shards == 1 else replace(self.accumulate, shards=self.order.shards)

    @property
    def said(self) -> str:
        """The text of the rounding, scaled or not."""
        return str(self.scaled or self.blocks or self.rounding)

    def __str__(self) -> str:
        return IDENTITY if self.rounding is None else f"{self.said} accumulate {self.accumulate} order {self.order}"


@dataclass(frozen=True, repr=False)
class Rule(Sparse):
    """One rule of a policy: which values it selects, and how they are rounded.

    The fields ``match``, ``operator``, ``role``, ``direction`` and ``result`` select values. Each of the others, except
    ``optional``, sets a property of these values if it is not None.

    match       glob over module paths; a path matches everything inside the module too ("layer1", "*.attention")
    operator    glob over the operator ("mm", "aten.mm.default") or its kind ("contraction"); None: any
    role        the part of the value in the model: "weight", "input", "buffer" and "constant" enter the graph;
                "activation", "statistic", "gradient", "error", "state" and "update" are results; None: any result
    rounding    "format/mode/overflow"; the format "dtype" is the operation's own; "identity" leaves values unchanged
    accumulate  the rounding of each step of an accumulator, optionally followed by "product=..." or "chunk=n
                combine=..."; the format "wide" is binary32 for 16-bit dtypes, else the dtype; "native": the stock
                kernel accumulates, and its result is rounded once. "faults=field:probability,...", the last option,
                flips bits of the accumulator after each of its steps
    order       of a reduction: "sequential", "lanes:n" or "exact"; "shards:S/sequential" and "shards:S/lanes:n" add
                S parts of it in a tree, and those of the k of a contraction
    optional    whether the rule may match nothing; False: that is an error
    direction   the pass: "forward", "backward" or "update" (an optimizer's step); None: all of them
    gradient    what the rounding does to the gradient that passes it: "straight_through", "zero_clamped", "estimate", a
                rounding, or "zero_clamped" or "estimate" and a rounding. Gradients pass the roundings of ``operands``
                straight through
    operands    the rounding of the operands before the operation, also to a scaled format ("mxfp8"), or "identity";
                role and direction are then those of the operand. A backward operation reads the rounded value that the
                forward operation read, except that the blocks of a scaled format run along the sum of each operation
    faults      "field:probability", several separated by spaces: with this probability one bit of the field flips in
                the rounded value, or in the rounded operands if the rule sets ``operands``; the fields are
                "significand", "exponent", "sign" and "any" of the encoding of the rounding's format, and with
                "scale." before them those of the scales of a scaled format's blocks, and with "tensor." those of the
                scale of the tensor in a format as "nvfp4"
    result      for ``operands``: the role of the operation's result, for example "gradient" for the products that yield
                gradients of weights; None: any

    Raises PolicyError if a text does not parse, the rule sets nothing, or it can match nothing. Example::

        Rule("layer1", operator="contraction", rounding="bfloat16", accumulate="binary32")
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
    operands: str | None = None
    faults: str | None = None
    result: str | None = None

    def __post_init__(self) -> None:
        for field, kind in (("match", str), ("operator", str), ("optional", bool)):
            value = getattr(self, field)
            if not isinstance(value, kind) and (field, value) != ("operator", None):
                raise PolicyError(f"a rule: {field} is {shown(value)}, expected {kind.__name__}")
        for field, kept in (("rounding", IDENTITY), ("accumulate", NATIVE), ("operands", IDENTITY)):
            object.__setattr__(self, field, _canonical(getattr(self, field), field, kept))
        if self.order is not None:
            object.__setattr__(self, "order", str(_parsed(Order.parse, self.order, "order")))
        if self.faults is not None:
            object.__setattr__(self, "faults", str(_parsed(Faults.parse, self.faults, "faults")))
        object.__setattr__(self, "gradient", spelt(self.gradient))
        object.__setattr__(self, "gradient", self._full_gradient())
        for what, said, known in (
            ("role", self.role, ROLES),
            ("role", self.result, ROLES),
            ("direction", self.direction, DIRECTIONS),
        ):
            if said is not None and said not in known:
                near = f"{nearest(str(said), known)} Known: {', '.join(known)}"
                raise PolicyError(f"no {what} is named {shown(said)}{near}")
        if self.role is not None and not self.directions:
            raise PolicyError(
                f"the rule {self} can match nothing: {self.role} has no direction {self.direction!r}. What enters a "
                "graph is rounded once, and the backward pass works with the same values as the forward pass"
            )
        if all(getattr(self, field) is None for field in _SAID):
            raise PolicyError(f"the rule {self} sets nothing: set {'=, '.join(_SAID[:-1])}= or {_SAID[-1]}=")
        if self.faults is not None and self.operands == IDENTITY:
            raise PolicyError(
                f"the rule {self} flips bits of operands: that needs operands= of a format, such as 'e4m3fn', 'dtype', "
                "'mxfp8' or 'int8'"
            )
        if self.operands is not None and self.rounding is None and self.gradient not in (None, STRAIGHT):
            raise PolicyError(
                f"the rule {self} treats gradients and rounds operands, which gradients pass straight through: set "
                "rounding= too, or round the values themselves by rules with rounding= and gradient="
            )
        if self.result is not None and self.operands is None:
            raise PolicyError(f"the rule {self} has result={self.result!r}, which selects operands: set operands=")
        if self.operands is not None and self.speaks_of_results and (self.role or self.direction or self.result):
            raise PolicyError(
                f"the rule {self} sets operands= and another property: its role and direction would be the operand's "
                "for operands= and the result's for the other. Write two rules"
            )

    def __str__(self) -> str:
        selectors = ("operator", "role", "direction", "result")
        where = [f"{key}={brief(getattr(self, key))}" for key in selectors if getattr(self, key)]
        said = [f"{key}={brief(getattr(self, key))}" for key in _SAID if getattr(self, key) is not None]
        return " ".join([brief(self.match) or '""', *where, "->", *said])

    def _full_gradient(self) -> str | None:
        """Return the gradient's text in full. Raises PolicyError for a factor that the rounding does not have."""
        if self.gradient is None:
            return None
        _parsed(lambda text: Gradient.parse(with_dtype(text, _wide_dtype(text))), self.gradient, "gradient")
        words = [w if w in (STRAIGHT, ZEROED, ESTIMATED) else _full_rounding(w) for w in str(self.gradient).split()]
        if self.rounding not in (None, IDENTITY):
            how = Gradient.parse(" ".join(w for w in words if w in (ZEROED, ESTIMATED)) or STRAIGHT)
            scaled = is_scaled(self.rounding)
            rounding = (
                ScaledRounding.parse(str(self.rounding))
                if scaled
                else resolve(str(self.rounding), _wide_dtype(self.rounding))
            )
            if refusal := how.refusal(rounding):
                raise PolicyError(f"gradient = {shown(self.gradient)}: {refusal}")
        return " ".join(words)

    @property
    def directions(self) -> frozenset[str]:
        """The passes in which the rule can match."""
        of_role = _DIRECTIONS_OF_ROLE.get(self.role or "", DIRECTIONS)
        return frozenset(d for d in of_role if self.direction in (None, d))

    @property
    def speaks_of_results(self) -> bool:
        """Whether the rule sets anything but ``operands`` and their faults."""
        return any(getattr(self, key) is not None for key in OF_RESULTS if key != "faults" or self.operands is None)

    def matches(self, *, path: str, operator: str, kind: str, role: str, direction: str = "forward") -> bool:
        """Whether the rule matches an operation (``operator`` like ``"aten.mm.default"``) in the module ``path``.

        kind, role and direction are those of the operation's result.
        """
        if self.direction not in (None, direction):
            return False
        entering = kind == "placeholder" or (role in ENTERING and direction != "update")
        if role != self.role and (self.role is not None or entering):
            return False
        return selects(self.match, self.operator, path=path, name=operator, kind=kind)

    def matches_operand(
        self, *, path: str, operator: str, kind: str, role: str, direction: str, result: str = ""
    ) -> bool:
        """Whether the rule matches an operand, of this role and direction, of an operation in the module ``path``.

        operator and kind are those of the operation, and result is the role of its result.
        """
        if self.result not in (None, result):
            return False
        if self.operands is None or self.direction not in (None, direction) or self.role not in (None, role):
            return False
        return selects(self.match, self.operator, path=path, name=operator, kind=kind)


def resolve(text: str, dtype: str, enters: bool = False) -> Rounding:
    """Return the rounding of a text whose format may be ``dtype``, or a number of stored bits.

    enters: of a value that no operation computes: a dtype that the format does not fit keeps its own exponents, and at
    most its own bits (``as_stored``). A dtype without infinities overflows as PyTorch's conversion to it does, unless
    the text asks for saturation or NaN.
    """
    head, _, rest = text.partition("/")
    if head != DTYPE:
        rounding = Rounding.parse(with_stored_bits(text, dtype, at_most=enters))
        return as_stored(rounding, dtype) if enters else rounding
    mode, _, overflow = rest.partition("/")
    if overflow in ("", "inf"):
        overflow = own_overflow(dtype)
    return Rounding.parse(f"{dtype}/{mode or 'nearest_even'}/{overflow}")


def in_dtype(rounding: Rounding, dtype: str) -> Rounding:
    """Return the rounding of a value that is stored in the dtype's format.

    A tensor of 8 bits is rounded once, to its own format in the mode of the rounding, if the rounding's format has
    all values of it.
    """
    own = Format.parse(dtype)
    if dtype not in QUARTERS or rounding.format.within(own) or not own.within(rounding.format):
        return rounding
    return resolve(f"{DTYPE}/{rounding.mode}/{rounding.overflow}", dtype)


def as_stored(rounding: Rounding, dtype: str) -> Rounding:
    """Return the rounding of a value that enters a model in the dtype's format, which no operation computes.

    A dtype with fewer exponents or bits than the rounding's format keeps its exponents: the value is rounded to the
    format's precision with these, as ``sbits`` does, or stays if the dtype has no more bits.
    """
    own, fmt = Format.parse(dtype), rounding.format
    plain = fmt.is_grid and fmt.span is None and fmt.subnormals and fmt.has_minus_zero and fmt.precision > 1
    if fmt.within(own) or not plain or dtype in QUARTERS:
        return rounding
    bits = min(fmt.precision, own.precision) - 1
    return Rounding.parse(f"{with_stored_bits(f'sbits({bits})', dtype)}/{rounding.mode}/{rounding.overflow}")


def with_dtype(text: str, dtype: str) -> str:
    """Return the text of an accumulation with the word ``dtype``, and ``sbits(t)``, replaced by the dtype's formats."""
    return with_stored_bits(re.sub(rf"\b{DTYPE}\b", dtype, text), dtype)


def with_wide(text: str, dtype: str) -> str:
    """Return the text of an accumulation with the word ``wide`` replaced by its format."""
    return re.sub(rf"\b{WIDE}\b", dtype if dtype == "binary64" else "binary32", text)


def _canonical(text: object, field: str, kept: str) -> str | None:
    """Return a rounding's text with all its parts, so that equal rules are equal; ``kept`` is returned as it is."""
    text = spelt(text)
    if text is None or text == kept:
        return text if text is None else kept
    if not isinstance(text, str | Rounding | ScaledRounding | Accumulation):
        raise PolicyError(f"{field} is a text like 'e4m3fn/stochastic/saturate' or {kept!r}, got {shown(text)}")
    text = re.sub(r",\s+", ",", str(text)) if field == "accumulate" else text
    if field == "accumulate":
        _refuse_integers(str(text))
    fixed_steps = field == "accumulate" and re.match(r"u?fixed\(", str(text)) is not None
    if not fixed_steps and _parsed(is_scaled, str(text), field):
        rounding: ScaledRounding = _parsed(ScaledRounding.parse, str(text), field)
        if field == "accumulate":
            why = "a scale depends on values that are not known before a sum has ended"
            why = why if rounding.format.scaling is not None else "the quantum of an accumulator is a power of two"
            raise PolicyError(
                f"{field} = {shown(str(text))}: {why}; expected a floating-point format, or fixed(bits,fraction)"
            )
        if field == "rounding" and rounding.of_products:
            raise PolicyError(
                f"{field} = {shown(str(text))}: a transform and a scale that is state belong to operands; write "
                "operands="
            )
        return str(rounding)
    if field != "accumulate":
        if str(text).partition("/")[0] == WIDE:
            raise PolicyError(
                f"{field} = {shown(str(text))}: {WIDE!r} is a format of accumulators; expected a format or {DTYPE!r}"
            )
        head = str(text).partition("/")[0]
        if head != DTYPE and not has_stored_bits(head):
            _parsed(any_rounding, str(text), field)  # its messages know scaled formats too
        full: str = _parsed(_full_rounding, str(text), field)
        return full
    if re.search(r"\sshards=", str(text)):
        raise PolicyError(f"{field} = {shown(str(text))}: shards belong to the order; set order='shards:8/lanes:16'")
    dtype = _wide_dtype(str(text))
    _parsed(lambda t: Accumulation.parse(with_dtype(with_wide(t, dtype), dtype)), str(text), field)
    step, *options = str(text).split()
    words = (word.partition("=") for word in options)
    said = [f"{name}={value if name in ('chunk', 'faults') else _full_step(value)}" for name, _, value in words]
    return " ".join([_full_step(step), *said])


def _refuse_integers(text: str) -> None:
    """Raise PolicyError for an accumulator, a product or a combination of integers, whose words are fixed point."""
    match = re.search(r"(?:^|=)((u?)int([0-9]{1,2}))(?![0-9(:])", text)
    if match is None:
        return
    word, sign, bits = match[1], match[2], int(match[3])
    raise PolicyError(
        f"accumulate = {shown(text)}: {word} is scaled, and a scale depends on values that are not known before a sum "
        f"has ended; an accumulator of integers is {sign}fixed({min(bits, 52)},0), with up to 52 bits, and "
        f"{sign}fixed(bits,f) holds multiples of 2^-f; {sign}fixed({min(bits, 48)},0)/nearest_even/wrap wraps"
    )


def faults_of(accumulate: str | None) -> str | None:
    """Return the faults in the text of an accumulation, or None."""
    written = [word.partition("=")[2] for word in (accumulate or "").split() if word.startswith("faults=")]
    return written[0].replace(",", " ") if written else None


def _full_rounding(text: str) -> str:
    return str(ScaledRounding.parse(text)) if is_scaled(text) else _full_step(text)


def _full_step(text: str) -> str:
    """Return the text of a rounding without scales, of an accumulator too, where fixed point is a format."""
    word = re.sub(r"\s", "", text.partition("/")[0])
    dtype = _wide_dtype(text)
    parsed = resolve(with_wide(text, dtype), dtype)
    depends = word in (DTYPE, WIDE) or has_stored_bits(word)
    return f"{word}/{parsed.mode}/{parsed.overflow}" if depends else str(parsed)


def _wide_dtype(text: object) -> str:
    """Return a dtype for which a text can be parsed: one that stores as many bits as any, where it speaks of these."""
    return "binary64" if has_stored_bits(text) or "mca" in str(text) else "binary32"


def _parsed(parse: Any, text: str, field: str) -> Any:
    """Return ``parse(text)``, or raise its error as a PolicyError that names the field."""
    try:
        return parse(text)
    except (ValueError, TypeError, AttributeError) as error:
        raise PolicyError(f"{field} = {shown(text)}: {error}") from error
