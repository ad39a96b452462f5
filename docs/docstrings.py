"""The docstrings of the package as Markdown, for the site (mkdocs.yml): aligned columns and examples.

Columns of a name and its meaning become a list, and ``Example::`` with its indented lines becomes a block of code.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# A name or several, two blanks or more, and the meaning.
_ENTRY = re.compile(r"(?P<names>[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*) {2,}(?P<meaning>\S.*)")
_EXAMPLE = re.compile(r"(?:(?<=\n)|(?<=\. )|^)Examples?::\n\n(?P<code>(?: {4}.*\n|\n)*(?: {4}.*)\n?)", re.MULTILINE)
_NAMED = re.compile(r"^(?P<names>[a-z_]+(?:, [a-z_]+)*):(?= [^\n])")


class Docstrings(griffe.Extension):
    """Rewrites every docstring before its sections are parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the text of an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Return the text of a docstring with lists and code as Markdown writes them."""
    blocked = _EXAMPLE.sub(lambda m: f"\n\n```python\n{textwrap.dedent(m['code']).strip()}\n```\n", text + "\n")
    return "\n\n".join(_listed(part) for part in blocked.strip().split("\n\n"))


def _listed(paragraph: str) -> str:
    """Return a paragraph of aligned columns as a list, and one that begins ``name: ...`` with the name as code."""
    lines = paragraph.split("\n")
    entries = [_ENTRY.fullmatch(line) for line in lines]
    if "```" in paragraph:
        return paragraph
    if entries[0] is None:
        return _NAMED.sub(lambda m: _code(m["names"]) + ":", paragraph)
    parts = []
    for line, entry in zip(lines, entries, strict=True):
        if entry is not None:
            parts.append(f"- {_code(entry['names'])}: {entry['meaning']}")
        else:
            parts.append(f"  {line.strip()}")
    return "\n".join(parts)


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))
