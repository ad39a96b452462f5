"""Loading an exported program without doing the same work for each of its values.

``torch.export.load`` asks for the annotations of a class whenever it makes an object of it, and parses the text of a
symbolic size whenever one occurs. A program names a few sizes thousands of times: of BERT-base, that was half of what
its loading took.
"""

from __future__ import annotations

import contextlib
import functools
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from fxround.capture.torch_private import capturing, uncollected


@contextlib.contextmanager
def quick_loading() -> Iterator[None]:
    """Let ``torch.export.load`` remember, in this block, what it asks and parses again.

    One thread of the process loads or captures at a time. Nothing is collected meanwhile.
    """
    # Imported at the first loading: it imports Dynamo.
    from torch._export.serde import serialize
    from torch._export.serde.serialize import GraphModuleDeserializer

    names = types.SimpleNamespace(**vars(typing))
    names.get_type_hints = _remembered_hints(typing.get_type_hints)
    parse = _remembered_sizes(GraphModuleDeserializer._parse_sym_expr)
    with contextlib.ExitStack() as stack:
        stack.enter_context(capturing())
        stack.enter_context(uncollected())
        stack.enter_context(mock.patch.object(serialize, "typing", names))
        stack.enter_context(mock.patch.object(GraphModuleDeserializer, "_parse_sym_expr", parse))
        yield


def _remembered_hints(hints: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    @functools.wraps(hints)
    def remembered(owner: Any, globalns: dict[str, Any] | None = None, **settings: Any) -> Any:
        key = owner, id(globalns), *sorted(settings.items())
        if key not in known:
            known[key] = hints(owner, globalns=globalns, **settings)
        return known[key]

    return remembered


def _remembered_sizes(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return a parser that parses a text once for an environment.

    Parsing it again, with the same example of its value, changes nothing of the environment: its symbols are known, and
    so are their ranges.
    """

    @functools.wraps(parse)
    def remembered(self: Any, text: Any, hint: Any = None) -> Any:
        environment, known = self.__dict__.get("fxround_sizes", (None, {}))
        if environment is not self.shape_env:
            known = {}
            self.__dict__["fxround_sizes"] = self.shape_env, known
        key = text, type(hint), hint
        if key not in known:
            known[key] = parse(self, text, hint)
        return known[key]

    return remembered
