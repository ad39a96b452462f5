"""The texts of graph arguments as objects: programs, roundings, orders, and the kernels that they describe.

A graph carries its arithmetic as text, and a call looks the parsed object up. Every parsed object is frozen, so it can
be shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, cast, get_args

from fxround.errors import shown
from fxround.kernels.accumulators import accumulator_of, chain_rounding
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.kinds import Contract, Exact, Map, Reduce, Scatter
from fxround.kernels.maps import draws, fused_kernel, map_kernel
from fxround.kernels.program import Program
from fxround.kernels.reductions import scatter_kernel, sum_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats.storage import CARRIER_OF, Storage
from fxround.numerics.modes import Rounding
from fxround.numerics.orders import Order

program: Final = lru_cache(maxsize=4096)(Program.parse)
rounding: Final = lru_cache(maxsize=1024)(Rounding.parse)
# In place of the rounding of a sum: its accumulators are stored as they are, and the sum goes on elsewhere.
UNFINISHED: Final = "unfinished"
accumulation: Final = lru_cache(maxsize=1024)(Accumulation.parse)
order: Final = lru_cache(maxsize=64)(Order.parse)


@lru_cache(maxsize=256)
def storages(text: str) -> tuple[Storage, ...]:
    """A text like ``f32 bf16`` as storages. Raises ValueError for a name that is not a storage."""
    names = get_args(Storage)
    for name in text.split():
        if name not in names:
            raise ValueError(f"{shown(name)} is not a storage; expected some of {', '.join(names)}")
    return cast(tuple[Storage, ...], tuple(text.split()))


@lru_cache(maxsize=4096)
def drawn(text: str) -> int:
    """The number of statements of a program that draw random bits."""
    return sum(map(draws, program(text).statements))


@lru_cache(maxsize=4096)
def pointwise(text: str, loads: tuple[Storage, ...], result: Storage) -> Map:
    """The kernel of a program's text."""
    return map_kernel(program(text), loads, result)


@lru_cache(maxsize=4096)
def fused(text: str, loads: tuple[Storage, ...], results: str) -> Map:
    """The kernel of a fused program's text; ``results`` as in ``storages``."""
    return fused_kernel(program(text), loads, storages(results))


@lru_cache(maxsize=1024)
def contract(accumulate: str, round_by: str, loads: tuple[Storage, Storage], result: Storage) -> Contract:
    """The kernel of a sum of products."""
    return contract_kernel(accumulation(accumulate), _store(round_by), loads, result)


@lru_cache(maxsize=1024)
def total(order_of: str, accumulate: str, round_by: str, stored: Storage) -> Reduce | Exact:
    """The kernel of a sum in an order; operand and result are stored in the same way, as in all that follow."""
    return sum_kernel(order(order_of), accumulation(accumulate), _store(round_by), stored, stored)


def _store(round_by: str) -> Rounding | None:
    """The rounding of a sum that is stored; None for one that is unfinished."""
    return None if round_by == UNFINISHED else rounding(round_by)


def accumulators(accumulate: str, loads: Sequence[Storage]) -> Rounding:
    """The rounding of the accumulators of a sum, or of a sum of products, over elements that are stored so."""
    how, carriers = accumulation(accumulate), tuple(CARRIER_OF[stored] for stored in loads)
    return chain_rounding(how.step, accumulator_of(how.step, carriers), carriers, how.flips)


def scatter(accumulate: str, stored: Storage) -> Scatter:
    """The kernel that adds contributions to a destination."""
    return scatter_kernel(accumulation(accumulate), stored)
