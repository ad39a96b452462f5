"""Caches that are bounded by bytes: for tables and plans whose size grows with the shapes that they serve.

``by_bytes(most)`` is ``functools.lru_cache`` that counts what its values hold. Values used longest ago go when all
together hold more than ``most`` bytes; the latest one stays whatever it holds, since the next call may ask for it
again. A caller that needs a value for longer holds it: nothing is freed under it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import update_wrapper
from typing import Any, Final, Generic, ParamSpec, TypeVar

from torch import Tensor

from fxround.locks import waited_for

P = ParamSpec("P")
T = TypeVar("T")
# A key and what Python keeps for an entry; small values are counted by their number in this way.
_ENTRY: Final = 1 << 10


def held(value: object) -> int:
    """The bytes of a value's tensors: of those in tuples and in dataclasses too."""
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, tuple | list):
        return sum(map(held, value))
    if is_dataclass(value):
        return sum(held(getattr(value, field.name)) for field in fields(value))
    return 0


class Memo(Generic[P, T]):
    """A function that remembers what it returned, up to ``most`` bytes."""

    def __init__(self, function: Callable[P, T], most: int) -> None:
        self.function, self.most, self.bytes = function, most, 0
        self.known: OrderedDict[Any, tuple[T, int]] = OrderedDict()
        self.lock = waited_for()
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(kwargs.items())) if kwargs else args
        with self.lock:
            found = self.known.get(key)
            if found is not None:
                self.known.move_to_end(key)
                return found[0]
        value = self.function(*args, **kwargs)
        self._keep(key, value, _ENTRY + held(value))
        return value

    def _keep(self, key: Any, value: T, size: int) -> None:
        with self.lock:
            if key in self.known:
                return
            self.known[key] = (value, size)
            self.bytes += size
            while self.bytes > self.most and len(self.known) > 1:
                _, (_, least) = self.known.popitem(last=False)
                self.bytes -= least

    def cache_clear(self) -> None:
        """Forget everything."""
        with self.lock:
            self.known.clear()
            self.bytes = 0


def by_bytes(most: int) -> Callable[[Callable[P, T]], Memo[P, T]]:
    """A decorator: remember what a function of hashable arguments returned, up to ``most`` bytes."""
    return lambda function: Memo(function, most)
