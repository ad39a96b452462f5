"""Caches that are bounded by bytes, for tables and plans whose size grows with the shapes that they are made for.

``by_bytes(most)`` is ``functools.lru_cache`` that counts the bytes of its values. Values used longest ago are dropped
when all together hold more than ``most`` bytes; the latest one stays whatever it holds, since the next call may need it
again. A caller that needs a value for longer keeps a reference to it: dropping a value frees nothing that is in use.

Tensors on a CUDA device are remembered for each stream, since another one might read them before they are written. A
CUDA graph that is being captured gets its own, since a replay must find them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import update_wrapper
from typing import Any, Final, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from fxround.locks import waited_for

P = ParamSpec("P")
T = TypeVar("T")
# The bytes that count for an entry besides its tensors: its key and what Python allocates.
_ENTRY: Final = 1 << 10


def held(value: object) -> int:
    """The bytes of a value's tensors, those in tuples, lists and dataclasses included."""
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
        key: Any = (args, tuple(kwargs.items())) if kwargs else args
        device = next((x for x in args if isinstance(x, torch.device) and x.type == "cuda"), None)
        if device is not None:
            if torch.cuda.is_current_stream_capturing():
                return self.function(*args, **kwargs)
            key = key, torch.cuda.current_stream(device).cuda_stream
        with self.lock:
            entry = self.known.get(key)
            if entry is not None:
                self.known.move_to_end(key)
                return entry[0]
        value = self.function(*args, **kwargs)
        self._keep(key, value, _ENTRY + held(value))
        return value

    def _keep(self, key: Any, value: T, size: int) -> None:
        """Remember a value, and drop the values used longest ago beyond the limit."""
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
