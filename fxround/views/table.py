"""Tables of plain values, from which text, HTML, JSON and data frames are made.

A table holds text, numbers and None, and nothing that was formatted for reading, so that people and programs read the
same rows: ``Table(("layer", "bits"), (("conv1", 21.3),)).to_json()``, or ``print(table)``, or a notebook's cell.
"""

from __future__ import annotations

import html
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fxround.errors import brief
from fxround.short_reprs import Short

Value = str | int | float | None
# The characters of a cell that a text shows. The rows, and what is made of them, have all.
_LONGEST: Final = 200

_CSS = (
    "border-collapse:collapse;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace",
    "text-align:left;padding:3px 14px 3px 0;border-bottom:1.5px solid #495057;white-space:nowrap",
    "padding:2px 14px 2px 0;border-bottom:1px solid #e9ecef;white-space:nowrap",
)


class Numeral(str):
    """A number as text, with as many digits as it needs: it is aligned like a number."""


@dataclass(frozen=True, repr=False)
class Table(Short):
    """Column names, rows of values in the same order, a title and a note. ValueError for a row of another length."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    title: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        wrong = next((row for row in self.rows if len(row) != len(self.columns)), None)
        if wrong is not None:
            raise ValueError(f"a row has {len(wrong)} values for {len(self.columns)} columns {self.columns}: {wrong}")

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        columns = brief(", ".join(self.columns))
        return f"<{type(self).__name__}: {len(self.rows)} rows of {columns}>"

    def __iter__(self) -> Iterator[dict[str, Value]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"title", "columns", "rows", "note"}``. The rows are dicts, which ``pandas.DataFrame`` reads."""
        return {"title": self.title, "columns": list(self.columns), "rows": list(self), "note": self.note}

    def to_json(self, indent: int | None = 2) -> str:
        """Return ``to_dict`` as JSON. NaN and infinities, which JSON lacks, become null."""
        return json.dumps(_finite(self.to_dict()), indent=indent, allow_nan=False)

    def to_pandas(self) -> Any:
        """Return the rows as a ``pandas.DataFrame``.

        Raises ImportError, which names the extra to install, without pandas.
        """
        return data_frame(list(self), list(self.columns))

    @property
    def _numeric(self) -> list[bool]:
        """For each column, whether it holds no text and is therefore aligned to the right."""
        return [not any(is_text(row[i]) for row in self.rows) for i in range(len(self.columns))]

    def __str__(self) -> str:
        shown = [[_shown(value) for value in row] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(self.columns, *shown, strict=True)]
        lines = [_line(row, widths, self._numeric) for row in (self.columns, *shown)]
        rule = "  ".join("─" * width for width in widths)
        return "\n".join(part for part in (self.title, lines[0], rule, *lines[1:], self.note) if part)

    def _repr_html_(self) -> str:
        table, head, cell = _CSS
        heads = "".join(
            _head(column, head, numeric) for column, numeric in zip(self.columns, self._numeric, strict=True)
        )
        rows = "".join(f"<tr>{''.join(_cell(value, cell) for value in row)}</tr>" for row in self.rows)
        title, note = (f"<p>{html.escape(text)}</p>" if text else "" for text in (self.title, self.note))
        return f'{title}<table style="{table}"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{note}'


class Tabled(Short, ABC):
    """A report: plain data (``to_dict``) that is shown as a table.

    It is available as JSON, data frame, text and HTML.
    """

    @abstractmethod
    def table(self) -> Table:
        """Return the rows that are shown."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""

    def to_json(self, indent: int | None = 2) -> str:
        """Return ``to_dict`` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_pandas(self) -> Any:
        """Return the table's rows as a ``pandas.DataFrame``. Raises ImportError without pandas."""
        return self.table().to_pandas()

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def of_notebook(heading: str, tables: Iterable[Table], said: Iterable[str], legend: str) -> str:
    """Return what a notebook shows of a report: a heading, sentences that a reader must see, tables and a legend."""
    sentences = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in said)
    shown = f"<p><b>{html.escape(heading)}</b></p>" + (f"<ul>{sentences}</ul>" if sentences else "")
    return f"{shown}{''.join(table._repr_html_() for table in tables)}<p>{html.escape(legend)}</p>"


def data_frame(rows: list[dict[str, Any]], columns: list[str]) -> Any:
    """Return the rows as a ``pandas.DataFrame``.

    Raises ImportError, which names the extra to install, without pandas.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise ImportError("pandas is needed here and not installed: pip install 'fxround[report]'") from error
    return pandas.DataFrame(rows, columns=columns)


def is_text(value: Value) -> bool:
    """Whether a cell holds words, which are aligned to the left."""
    return isinstance(value, str) and not isinstance(value, Numeral)


def _shown(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 4]} ..."


def _line(row: Sequence[str], widths: list[int], numeric: list[bool]) -> str:
    cells = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
    return "  ".join(cells).rstrip()


def _head(column: str, style: str, numeric: bool) -> str:
    return f'<th style="{style}{";text-align:right" if numeric else ""}">{html.escape(column)}</th>'


def _cell(value: Value, style: str) -> str:
    align = "" if is_text(value) else ";text-align:right"
    return f'<td style="{style}{align}">{html.escape(_shown(value))}</td>'


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
