"""Write a variability report as one HTML page that needs no network and no other file.

The page shows the findings, the tables, the plots, the graph coloured by bits, and the data for repeating the study.
All numbers are the report's. The report's JSON is embedded in the page, so that the page is also an archive.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Final

from fxround.significance.figures import Figures
from fxround.significance.report import plots
from fxround.significance.report.drawing import ByBits
from fxround.views.colouring import ByPolicy
from fxround.views.graph_page import embedded_json
from fxround.views.pictures import drawn, embedded
from fxround.views.table import Table, Value, is_text

if TYPE_CHECKING:
    from fxround.significance.report import VariabilityReport

_CSS: Final = """
:root{color-scheme:light}
body{margin:0;background:#f8f9fa;color:#212529;line-height:1.55;font-size:15px;
 font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}
main{max-width:1200px;margin:0 auto;padding:32px 28px 64px;background:#fff;min-height:100vh;box-shadow:0 0 24px #0001}
h1{font-size:26px;margin:0 0 4px}
h2{font-size:18px;margin:36px 0 10px;padding-bottom:5px;border-bottom:1px solid #dee2e6}
p.sub{color:#5c636a;margin:0 0 22px}
.cards{display:flex;flex-wrap:wrap;gap:14px;margin-bottom:16px}
.card{border:1px solid #dee2e6;border-radius:9px;padding:12px 18px;min-width:150px}
.card b{display:block;font-size:25px;line-height:1.25}
.card span{color:#5c636a;font-size:13px}
.found{border-left:4px solid #2b8a3e;background:#f3faf5;padding:9px 14px;margin:9px 0;border-radius:0 6px 6px 0}
.found.bad{border-color:#c92a2a;background:#fff5f5}
.scroll{overflow:auto;max-height:36em;border:1px solid #e9ecef;border-radius:7px}
.graph{max-height:64em}
table{border-collapse:collapse;font-size:13px;width:100%;font-variant-numeric:tabular-nums}
th{position:sticky;top:0;background:#f1f3f5;text-align:right;padding:6px 9px;white-space:nowrap;font-weight:600}
td{text-align:right;padding:4px 9px;border-top:1px solid #f1f3f5;white-space:nowrap}
th.text,td.text{text-align:left}
.rail{display:inline-block;width:96px;height:9px;border-radius:3px;background:#e9ecef;margin-left:9px;
 vertical-align:middle;text-align:left;line-height:0}
.rail i{display:inline-block;height:9px;border-radius:3px;background:#1c7ed6}
.plots svg{width:100%;height:auto}
.graph svg{max-width:none}
pre{background:#f8f9fa;border:1px solid #e9ecef;border-radius:7px;padding:12px 14px;overflow:auto;font-size:12.5px;
 max-height:30em}
.legend{color:#5c636a;font-size:13px}
"""
_READING: Final = escape(
    "worst: the element with the fewest bits; whole: from the norms of deviation and mean; contrib.: bits that round "
    "towards the right value; = r: leading bits that the mean of the samples shares with run r; "
    "≠ r: elements further from r than their spread explains."
)


def page(report: VariabilityReport) -> str:
    """Return the whole HTML document."""
    title = f"Variability of {report.provenance['model']['class'].rpartition('.')[2]}"
    parts = [
        f"<h1>{escape(title)}</h1><p class='sub'>{escape(report.heading)}</p>",
        "".join(map(finding, report.warnings)),
        _cards(report),
        "".join(finding(text) for text in (*report.findings, *report.worst_elements, *report.notes)),
        section(
            "Results and layers", _figures(report) + f"<p class='legend'>{escape(report.legend)}<br>{_READING}</p>"
        ),
        section("One site perturbed alone", table_html(report.isolated_table())) if report.isolated else "",
        section("Metrics", table_html(report.metrics_table())) if report.metrics else "",
        section("Plots", f"<div class='plots'>{plots.svg(report)}</div>") if report.figures else "",
        section("The graph, by significant bits", _graph(report)),
        section("To repeat this", _repeat(report)),
    ]
    return document(title, parts, report.to_json(indent=None))


def document(title: str, parts: Iterable[str], data: str) -> str:
    """Return a whole HTML document of parts. data: JSON that it archives."""
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{_CSS}</style>"
    body = f"<body><main>{''.join(parts)}</main>{embedded_json('report', data)}</body>"
    return f"<!doctype html><html lang='en'><head>{head}</head>{body}</html>\n"


def section(heading: str, body: str) -> str:
    """Return a section of a document."""
    return f"<section><h2>{escape(heading)}</h2>{body}</section>"


def _cards(report: VariabilityReport) -> str:
    cards = [(_bits(f.bits), f"bits in the mean of {f.place.name}, of {f.precision}") for f in report.outputs[:2]]
    cards += [(_bits(f.worst), "bits in the worst element") for f in report.outputs[:1]]
    cards += [(f"{m.changed:,} of {m.labels:,}", "labels change") for m in report.metrics if m.rows is not None]
    cards += [(f"{min(report.samples, default=0)}", "samples" if report.complete else "samples, interrupted")]
    return (
        "<div class='cards'>"
        + "".join(f"<div class='card'><b>{a}</b><span>{escape(b)}</span></div>" for a, b in cards)
        + "</div>"
    )


def _bits(bits: float | None) -> str:
    return "no evidence" if bits is None else f"{bits:.1f}"


def finding(text: str, bad: bool | None = None) -> str:
    """Return a sentence that a reader must see. bad: whether something is wrong; None asks the text."""
    if bad is None:
        bad = any(word in text for word in ("WARNING", "WRONG", "NOT", "no evidence", "NaN", "generator"))
    return f"<div class='found{' bad' if bad else ''}'>{escape(text)}</div>"


def _figures(report: VariabilityReport) -> str:
    table = report.table()
    marks = [_rail(f) for f in report.figures]
    return table_html(table, marks)


def _rail(f: Figures) -> str:
    share = 0.0 if f.bits is None else 100 * f.bits / f.precision
    return f"<span class='rail'><i style='width:{share:.0f}%'></i></span>"


def table_html(table: Table, marks: list[str] | None = None) -> str:
    """Return a table. marks: what follows the second cell of each row."""
    texts = [any(is_text(row[i]) for row in table.rows) for i in range(len(table.columns))]
    marked = zip(table.columns, texts, strict=True)
    heads = "".join(f"<th{' class=text' if text else ''}>{escape(column)}</th>" for column, text in marked)
    rows = []
    for i, row in enumerate(table.rows):
        cells = [_cell(value) for value in row]
        if marks is not None:
            cells[1] = cells[1].replace("</td>", f"{marks[i]}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def _cell(value: Value) -> str:
    if isinstance(value, str):
        return f"<td{' class=text' if is_text(value) else ''}>{escape(value)}</td>"
    return f"<td>{'' if value is None else f'{value:.2f}' if isinstance(value, float) else f'{value:,}'}</td>"


def _graph(report: VariabilityReport) -> str:
    if report.graph is None:
        return "<p>No graph was captured.</p>"
    colouring = ByBits(report)
    picture = embedded(report.graph, [colouring, ByPolicy(drawn(report.graph))], colouring.title)
    return f"<div class='scroll graph'>{picture}</div>"


def _repeat(report: VariabilityReport) -> str:
    facts = {
        **report.provenance,
        "undrawn": list(report.undrawn),
        "samples": list(report.samples),
        "method": report.method,
    }
    return f"<pre>{escape(json.dumps(facts, indent=2, default=str))}</pre><pre>{escape(report.policy.to_toml())}</pre>"
