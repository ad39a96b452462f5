"""Messages that a model logs: they are logged when the model is captured, not at every call.

Dynamo would refuse a call of ``logging.Logger``, although it computes nothing. Here a method of a logger is called
while the model is traced, once for each message. A message that depends on a tensor is left out.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, Final

from fxround.capture.torch_private import refusing_logger, traced_logger


class _Thread(threading.local):
    """The messages of the trace that a thread is in; None outside of traces."""

    logged: set[str] | None = None


_THREAD: Final = _Thread()
_QUESTIONS: Final = ("isEnabledFor", "getEffectiveLevel", "hasHandlers")


@contextlib.contextmanager
def logging_while_traced() -> Iterator[None]:
    """Let models that this thread traces in the block log their messages at once."""
    _install()
    outer, _THREAD.logged = _THREAD.logged, set() if _THREAD.logged is None else _THREAD.logged
    try:
        yield
    finally:
        _THREAD.logged = outer


@functools.cache
def _install() -> None:
    """Let Dynamo ask here for loggers' methods; other threads, and traces of others, get Dynamo's answer."""
    logger, constant = traced_logger()
    refuse = logger.call_method

    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if _THREAD.logged is None:
            return refuse(self, tx, name, args, kwargs)
        try:
            values = [arg.as_python_constant() for arg in args]
            named = {key: value.as_python_constant() for key, value in kwargs.items()}
        except NotImplementedError:
            return constant(None)
        if name in _QUESTIONS:
            return constant(getattr(self.value, name)(*values, **named))
        message = f"{self.value.name}.{name} {values} {named}"
        if message not in _THREAD.logged:
            _THREAD.logged.add(message)
            getattr(self.value, name)(*values, **named)
        return constant(None)

    logger.call_method = call_method
    # What PyTorch logs of an operation that refuses its operands is raised too.
    refusing_logger().addFilter(lambda record: _THREAD.logged is None)
