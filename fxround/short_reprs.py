"""What a prompt shows of an object in one line. ``print`` shows all of it."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from fxround.errors import brief, shown


class Short:
    """Its repr is the class and one line: the first of its text, unless ``_line`` says otherwise."""

    def _line(self) -> str:
        return str(self).partition("\n")[0]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {brief(self._line())}>"


class Sparse:
    """A dataclass whose repr leaves out the fields that have their default."""

    def __repr__(self) -> str:
        named: list[tuple[str, Any, Any]] = [
            (f.name, getattr(self, f.name), f.default if f.default_factory is MISSING else f.default_factory())
            for f in fields(self)  # type: ignore[arg-type]
            if f.repr
        ]
        said = [f"{name}={shown(value)}" for name, value, default in named if value is not default and value != default]
        return f"{type(self).__name__}({', '.join(said)})"
