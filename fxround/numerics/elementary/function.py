"""A row of the table of elementary functions: a definition, its bound, and what it is in words.

Each family's file ends with the rows of its functions, and ``ELEMENTARY`` joins them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fxround.numerics.arithmetic.scalar import Expr, Function, param, select, widen
from fxround.numerics.elementary.approximation import Approximation, Loss
from fxround.numerics.elementary.quick import Quick
from fxround.numerics.elementary.single import Single


@dataclass(frozen=True)
class Elementary:
    """A function of binary64 arguments.

    ``error_bound``: of ``build``, in binary64 ulps, subnormal results included. ``near_zeros``: an additional absolute
    error at negative arguments; it matters next to a zero of the function that is no binary64 number. ``special``: the
    values at special arguments, in words. ``reference``: the function in mpmath's notation. ``source``: the source of
    the method. ``quick``: a short evaluation for binary32 arguments and results to nearest even, or None. ``single``:
    an evaluation in binary32 that is tried before ``quick``, or None. ``extended``: a definition in pairs, for modes
    that draw in binary64; None if ``define`` serves.
    """

    name: str
    arity: int
    define: Callable[..., Approximation]
    error_bound: float
    special: str
    reference: str
    source: str
    quick: Callable[..., Quick] | None = None
    single: Callable[..., Single] | None = None
    near_zeros: float = 0.0
    extended: Callable[..., Approximation] | None = None

    def build(self, *args: Expr) -> Expr:
        """Return the value in binary64, within ``error_bound`` ulps, for f64 expressions."""
        return self.define(*self._checked(args)).nearest()

    def build_lost(self, graded: bool, *args: Expr) -> Loss:
        """Return the nearest binary64 number, the sign of what it lost, and how much, by the definition in pairs.

        Where that does not show the sign, as in 1 - tanh(100), the other one does, unless only the size is needed
        (``graded``).
        """
        lost = self._extended(args).lost()
        if graded or self.extended is None:
            return lost
        other = self.define(*args).lost().sign
        return lost._replace(sign=select(lost.sure | other.equals(0.0), lost.sign, other))

    def build_nearest(self, *args: Expr) -> Expr:
        """Return the nearest binary64 number, but for one value in 2^30 that lies next to a midpoint."""
        return self._extended(args).nearest()

    def _extended(self, args: tuple[Expr, ...]) -> Approximation:
        return (self.extended or self.define)(*self._checked(args))

    def build_sticky(self, *args: Expr) -> Expr:
        """Return the value rounded to odd, for a later rounding to at most 51 bits in any deterministic mode."""
        return self.define(*self._checked(args)).sticky()

    @property
    def digest(self) -> str:
        """SHA-256 of the code that binary32 arguments run: a proof by enumeration holds for this code only."""
        params = tuple(param(f"x{i}", "f32") for i in range(self.arity))
        args = tuple(map(widen, params))
        quick = self.quick(*args) if self.quick else None
        short = [quick.value, quick.doubtful()] if quick else []
        if quick and quick.vanishes is not None:
            short.append(quick.vanishes)
        if self.single:
            first = self.single(*params)
            short += [first.value, first.doubtful()]
        return Function(self.name, params, (self.build_sticky(*args), *short)).digest

    def _checked(self, args: tuple[Expr, ...]) -> tuple[Expr, ...]:
        types = [a.type for a in args]
        if types != ["f64"] * self.arity:
            raise TypeError(f"{self.name} takes {self.arity} f64 expressions, got {types}: widen f32 ones first")
        return args
