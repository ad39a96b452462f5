"""The body of a map as stages, each a loop of its own over the elements of a block.

A processor works on several vectors at once as far as it looks ahead, some hundred instructions. Where one vector takes
more, most instructions wait for the one before them. A long body is therefore cut after statements of its program, and
the values between two stages are stored on the stack in full, so that no bit changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fxround.kernels.kinds import Map
from fxround.numerics.arithmetic.branches import needed
from fxround.numerics.arithmetic.scalar import Expr

# The operators of a stage at most, unless one statement has more: two additions that draw have 48 and are two stages.
_LONGEST: Final = 30
# The lanes of a vector of 32 bits each; vectors with values of 64 bits have half as many.
LANES: Final = 16


@dataclass(frozen=True)
class Stage:
    """A part of a body: its results, what it reads (parameters, results of earlier stages), and its lanes."""

    results: tuple[Expr, ...]
    reads: tuple[Expr, ...]
    lanes: int


def stages_of(kernel: Map) -> tuple[Stage, ...]:
    """Return the stages of a map's body in order. The last one has the body's results."""
    results = _results_of_stages(kernel)
    known: dict[Expr, None] = dict.fromkeys(kernel.body.params)
    stages = []
    for own in results:
        stages.append(Stage(own, _reads(own, known), lanes_of(own, known)))
        known |= dict.fromkeys(own)
    return tuple(stages)


def _results_of_stages(kernel: Map) -> list[tuple[Expr, ...]]:
    """Return the values that each stage stores: those that a later stage reads."""
    known: dict[Expr, None] = dict.fromkeys(kernel.body.params)
    always = set(needed(kernel.body.results, known))
    parts: list[list[Expr]] = []
    room = 0
    for value in dict.fromkeys(kernel.values):
        if value not in always or value.op == "const":
            continue
        length = sum(n.op != "const" for n in needed((value,), known))
        known[value] = None
        if parts and length <= room:
            parts[-1].append(value)
            room -= length
            continue
        parts.append([value])
        room = _LONGEST - length
    # The last part is computed with the body's results, into which its values are converted.
    stages = [kernel.body.results]
    wanted = dict.fromkeys(kernel.body.results)
    for i in reversed(range(len(parts) - 1)):
        earlier = dict.fromkeys([*kernel.body.params, *(v for part in parts[: i + 1] for v in part)])
        read = set(_reads(wanted, earlier))
        own = tuple(v for v in parts[i] if v in read)
        wanted |= dict.fromkeys(own)
        if own:
            stages.append(own)
    return stages[::-1]


def lanes_of(results: tuple[Expr, ...], known: dict[Expr, None]) -> int:
    """The lanes of a vector that fills one AVX-512 register: 16 if all that is always needed has 32 bits, else 8."""
    return LANES // 2 if any(n.type in ("u64", "f64") for n in (*needed(results, known), *results)) else LANES


def _reads(results: Iterable[Expr], known: dict[Expr, None]) -> tuple[Expr, ...]:
    """Return the known values that these results need, also those that they need rarely."""
    read: set[Expr] = set()
    seen: set[Expr] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node in known:
            read.add(node)
        elif node not in seen:
            seen.add(node)
            stack.extend(node.args)
    return tuple(n for n in known if n in read)
