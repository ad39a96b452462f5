"""The arithmetic of an accumulation: the rounding of each step, and two optional variants.

For each output element, with a and b the operands along the contracted dimension k:

    R                            acc = +0; for k ascending: acc = R(a[k] * b[k] + acc), one rounding a step
    R product=P                  acc = R(P(a[k] * b[k]) + acc), the product rounded on its own (unfused)
    R chunk=n combine=C          total = +0; for each run of n products: acc as above from +0, then
                                 total = C(acc + total); the last run may be shorter
    R shards=S                   acc as above for each of S shards of k, added as the order shards:S says
                                 (``numerics.orders``): acc = R(acc of the first half + acc of the second half)
    R faults=F                   bits of acc (and of total, in C's format) flip by chance after each of these steps

The chunked form models FP8 tensor cores, which sum n products in one format and combine the partial sums in another:
``Accumulation.parse("ieee(8,14)/toward_zero chunk=128 combine=binary32")``. An accumulation is plain data:
``Accumulation.parse(str(a)) == a``, so policies, graphs and kernels store it as text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from fxround.errors import shown
from fxround.numerics.faults import Faults
from fxround.numerics.formats import spelt
from fxround.numerics.modes import Rounding
from fxround.numerics.orders import require_shards

_OPTIONS: Final = ("product", "chunk", "combine", "shards", "faults")


@dataclass(frozen=True)
class Accumulation:
    """The roundings of an accumulation, and how many products form a partial sum.

    ``step`` rounds every multiply-add, ``product`` (optional) rounds the products first. ``chunk`` is the number of
    products in a partial sum and ``combine`` the rounding that adds partial sums; an accumulation has both or neither.
    ``shards`` is the number of shards of k; it has no chunks then.
    ``faults`` (optional) are the bits that flip in an accumulator after each of its steps; in a text, commas separate
    them: ``binary32 faults=significand:1e-6,sign:1e-9``.
    """

    step: Rounding
    product: Rounding | None = None
    chunk: int | None = None
    combine: Rounding | None = None
    shards: int | None = None
    faults: Faults | None = None

    def __post_init__(self) -> None:
        if (self.chunk is None) != (self.combine is None):
            chunk, combine = self.chunk or 128, self.combine or "binary32"
            raise ValueError(
                f"chunk={self.chunk} combine={self.combine}: an accumulation needs both or neither, the products in a "
                f"partial sum and the rounding that adds partial sums, as in chunk={chunk} combine={combine}"
            )
        if self.shards == 1:
            object.__setattr__(self, "shards", None)
        if self.shards is not None:
            require_shards(self.shards)
            if self.chunk is not None:
                raise ValueError(
                    f"chunk={self.chunk} and {self.shards} shards: the partial sums of a chain are those of chunks or "
                    "of shards; leave out chunk= and combine=, or use an order without shards"
                )
        if self.faults is not None and (self.faults.of_scales or self.faults.of_tensors):
            raise ValueError(f"faults={self.faults}: an accumulator has no scale; expected a field without 'scale.'")
        if self.chunk is not None and not 1 <= self.chunk <= 65536:
            raise ValueError(f"chunk={self.chunk}: expected 1 to 65536 products in a partial sum")

    def __str__(self) -> str:
        said = [(name, str(getattr(self, name)).replace(" ", ",")) for name in _OPTIONS if getattr(self, name)]
        return " ".join([str(self.step), *(f"{name}={value}" for name, value in said)])

    @property
    def flips(self) -> Faults | None:
        """The faults of a probability above zero; None if there are none."""
        return None if self.faults is None else self.faults.possible

    @property
    def of_sums(self) -> Accumulation:
        """What a reduction takes of it: the rounding of a step, and the faults that can happen."""
        return Accumulation(self.step, faults=self.flips)

    @property
    def of_partial_sums(self) -> Rounding | None:
        """The rounding that adds partial sums, of chunks or of shards; None if there are none."""
        return self.combine if self.shards is None else self.step

    @property
    def random(self) -> bool:
        """Whether any of its roundings draws random bits, or bits flip by chance."""
        roundings = (self.step, self.product, self.combine)
        return self.flips is not None or any(r is not None and r.mode.random_bits for r in roundings)

    @staticmethod
    def parse(text: Any) -> Accumulation:
        """Parse ``rounding [product=rounding] [chunk=n combine=rounding | shards=S] [faults=field:p,...]``.

        Anything that ``Rounding.parse`` takes is an accumulation too.

        Raises ValueError, which names the part that is wrong.
        """
        text = spelt(text)
        if isinstance(text, Accumulation):
            return text
        text = re.sub(r",\s+", ",", text) if isinstance(text, str) else text
        if isinstance(text, Rounding):
            return Accumulation(text)
        if not isinstance(text, str) or not text.split():
            raise ValueError(f"{shown(text)} is not an accumulation; expected: bfloat16 chunk=128 combine=binary32")
        step, *rest = text.split()
        options = dict(word.partition("=")[::2] for word in rest)
        if any(":" in word and "=" not in word for word in rest):
            raise ValueError(f"{shown(text)}: commas separate faults, as in faults=significand:1e-6,sign:1e-9")
        unknown = [name for name in options if name not in _OPTIONS]
        if unknown or len(options) != len(rest):
            raise ValueError(
                f"{shown(text)}: options are {', '.join(f'{o}=' for o in _OPTIONS)}, each once; got {shown(rest)}"
            )
        numbers = {name: options[name] for name in ("chunk", "shards") if name in options}
        for name, number in numbers.items():
            if not number.isdecimal() or len(number) > 9:
                raise ValueError(f"{shown(text)}: {name}={shown(number)} is not a number")
        counts = {name: int(number) for name, number in numbers.items()}
        return Accumulation(
            Rounding.parse(step),
            Rounding.parse(options["product"]) if "product" in options else None,
            counts.get("chunk"),
            Rounding.parse(options["combine"]) if "combine" in options else None,
            counts.get("shards"),
            Faults.parse(options["faults"].replace(",", " ")) if "faults" in options else None,
        )
