"""A cached property without a lock, so that a fork or a signal handler never finds one held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_T = TypeVar("_T")


class cached_property(Generic[_T]):  # noqa: N801 (as functools.cached_property, which holds a lock in Python 3.11)
    """A value that is computed at its first use and kept in the instance.

    Threads that use it at the same time each compute it; none waits.
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[_T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> _T: ...

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        # An attribute of the instance wins over this descriptor from now on.
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
