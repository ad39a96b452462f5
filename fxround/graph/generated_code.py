"""The sources of generated code, which PyTorch keeps for ever: forgotten when the code is dropped.

torch.fx writes a function for every graph, and keeps its source in two tables of the process, for the lines of
tracebacks.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import weakref
from collections.abc import Iterator
from types import CodeType
from typing import Final

from torch import fx
from torch.fx import graph_module

# The names of generated files, by which linecache finds their sources.
_GENERATED: Final = re.compile(r"<eval_with_key>\.(\d+)")


@contextlib.contextmanager
def forgotten_sources() -> Iterator[None]:
    """Forget the sources of the graphs that are made in this block as soon as no graph has the code."""
    first = graph_module._loader.next_id
    try:
        yield
    finally:
        codes = {code.co_filename: code for code in _codes_of(fx.GraphModule)}
        for file in list(graph_module._loader.eval_cache):
            generated = _GENERATED.match(file)
            if generated is None or int(generated[1]) < first:
                continue
            if file in codes:
                forget_source_of(codes[file])
            else:
                _forget_source(file)


def forget_source_of(code: CodeType) -> None:
    """Forget the source of generated code when the code is dropped."""
    weakref.finalize(code, _forget_source, code.co_filename).atexit = False


def _codes_of(cls: type[fx.GraphModule]) -> Iterator[CodeType]:
    """Yield the code of every graph: each has a class of its own."""
    for own in cls.__subclasses__():
        code = getattr(own.forward, "__code__", None)
        if code is not None:
            yield code
        yield from _codes_of(own)


def _forget_source(file: str) -> None:
    graph_module._loader.eval_cache.pop(file, None)
    linecache.cache.pop(file, None)
