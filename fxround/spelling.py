"""How policies are spelled: checks of keys, globs that select operations, suggestions for unknown words, TOML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from fxround.errors import PolicyError, shown


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word.

    It is a question if some known word is similar, else a full stop.
    """
    near = get_close_matches(word[:80], list(known), n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else "."


def require_keys(what: str, data: Mapping[str, Any], allowed: Mapping[str, type]) -> None:
    """Raise PolicyError for a key that is not allowed, or a value that has not the allowed type."""
    for key, value in data.items():
        if key not in allowed:
            near = f"{nearest(str(key), allowed)} Allowed: {', '.join(allowed)}"
            raise PolicyError(f"{what} has no key {shown(key)}{near}")
        is_listed = allowed[key] is list and isinstance(value, Sequence) and not isinstance(value, str | bytes)
        if not isinstance(value, allowed[key]) and not is_listed:
            expected = allowed[key].__name__
            raise PolicyError(f"{what}: {key!r} is {shown(value)} ({type(value).__name__}), expected {expected}")


def selects(match: str, operator: str | None, *, path: str, name: str, kind: str) -> bool:
    """Whether a glob over module paths, and one over operators and kinds (None: any), match an operation.

    path, name, kind: the operation's, as in "layer1.conv", "aten.mm.default", "contraction". A module's path also
    matches what is inside the module.
    """
    parts = name.split(".")
    names = (kind, name, ".".join(parts[:2]), parts[1]) if len(parts) > 1 else (kind, name)
    if operator is not None and not any(fnmatchcase(word, operator) for word in names):
        return False
    return fnmatchcase(path, match) or fnmatchcase(path, f"{match}.*")


def toml(value: str | bool) -> str:
    """Return a TOML value: JSON's spelling, with DEL escaped, which TOML requires and JSON does not."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
