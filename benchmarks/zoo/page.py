"""Write docs/zoo.md and docs/zoo.json from a walk's records: totals, every refusal with its reason, every misfit."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, table, versions
from benchmarks.zoo.judge import POLICIES, Record
from benchmarks.zoo.subjects import ZOOS

DOCS = Path(__file__).parents[2] / "docs"
PACKAGES = ["torch", "torchvision", "timm", "transformers", "diffusers", "torchaudio", "segmentation_models_pytorch"]
MARK = "<!-- figures: python -m benchmarks.zoo --page -->"
KEPT = (
    "name", "outcome", "reason", "parameters", "nodes", "stock_error", "policies", "fused", "row", "gradient", "draws",
    "no_yardstick",
    "unrounded", "misfits", "seconds", "commit", "date",
)  # fmt: skip
# The fields that are left out if they have these values.
USUAL: dict[str, Any] = {"draws": False, "again": True, "finite": True, "fused": True, "misfits": [], "unrounded": 0}


def write(records: Sequence[Record], docs: Path = DOCS) -> None:
    """Write the figures of docs/zoo.md, below its introduction, and docs/zoo.json."""
    conditions = {"machine": machine(), "versions": versions(PACKAGES)}
    lines = ",\n".join(json.dumps(compact(record), separators=(",", ":")) for record in sorted(records, key=_name))
    text = f'{json.dumps(conditions)[:-1]}, "records": [\n{lines}\n]}}\n'
    (docs / "zoo.json").write_text(text)
    page = docs / "zoo.md"
    head = page.read_text().partition(MARK)[0]
    page.write_text(f"{head}{MARK}\n\n{figures(json.loads(text))}\n")


def _name(record: Record) -> str:
    return str(record["name"])


def compact(record: Record) -> Record:
    """Return the part of a record that the file stores: numbers to two digits, without fields of expected value."""
    kept = {key: record[key] for key in KEPT if key in record}
    if kept["outcome"] == "unbuildable":
        kept = {key: kept[key] for key in ("name", "outcome", "reason")}
    for name, answer in kept.get("policies", {}).items():
        kept["policies"][name] = {key: value for key, value in answer.items() if key != "seconds"}
        if name == "identity":
            kept["policies"][name].pop("unrounded", None)
    brief: Record = _usual(kept)
    return brief


def _usual(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _usual(inner) for key, inner in value.items()}
        return {key: inner for key, inner in kept.items() if key not in USUAL or inner != USUAL[key]}
    if isinstance(value, str):  # paths of packages are no result
        return re.sub(r"[^\s'\"(]*/site-packages/", "", value)
    return float(f"{value:.1e}") if isinstance(value, float) else value


def figures(stored: Record) -> str:
    """Return everything below the introduction, from the contents of docs/zoo.json."""
    records: list[Record] = [USUAL | record for record in stored["records"]]
    walked = judged(records)
    dates = sorted({record["date"] for record in walked})
    commits = list(dict.fromkeys(record["commit"] for record in walked))
    between = f"{dates[0]} to {dates[-1]}" if len(dates) > 1 else dates[0]
    parts = [
        f"{len(walked)} architectures, {between}, commit {', '.join(commits)}, on {stored['machine']}. "
        f"Versions: {stored['versions']}.",
        "## Totals\n\n" + totals(walked),
        "## Errors against binary64\n\n" + errors(walked),
        "## Refusals\n\n" + refusals(walked),
        "## Left to stock kernels\n\n" + unrounded(walked),
        "## Misfits\n\n" + misfits(walked),
        "## Not judged\n\n" + unjudged(records),
    ]
    return "\n\n".join(parts)


def judged(records: Iterable[Record]) -> list[Record]:
    """Return the records of models that could be built and run by stock PyTorch."""
    return [record for record in records if record["outcome"] != "unbuildable"]


def totals(records: Sequence[Record]) -> str:
    """Return a table with one row per zoo."""
    rows = []
    for zoo in ZOOS:
        of = [record for record in records if record["name"].startswith(f"{zoo}/")]
        if of:
            rows.append([zoo, *_counts(of)])
    rows.append(["all", *_counts(records)])
    head = ("zoo", "architectures", "captured", "refused", "out of time or memory", "no float left unrounded",
            "row alone the same", "second call the same", "gradients", "with a misfit")  # fmt: skip
    return table(head, rows)


def _counts(records: Sequence[Record]) -> list[str]:
    captured = [record for record in records if record["outcome"] == "captured"]
    rowed = [record["row"] for record in captured if record.get("row") is not None]
    again = [all(answer.get("again", True) for answer in record["policies"].values()) for record in captured]
    graded = _graded(captured)
    whole = [not record["unrounded"] for record in captured]
    return [
        str(len(records)),
        str(len(captured)),
        str(sum(record["outcome"] == "refused" for record in records)),
        str(sum(record["outcome"] in ("time", "memory") for record in records)),
        f"{sum(whole)} of {len(captured)}",
        f"{sum(answer is True for answer in rowed)} of {len(rowed)}",
        f"{sum(again)} of {len(again)}",
        f"{sum(answer.get('again', True) and answer.get('finite', True) for answer in graded)} of {len(graded)}",
        str(sum(bool(record["misfits"]) for record in records)),
    ]


def _graded(records: Iterable[Record]) -> list[Record]:
    """Return the gradients' records of the models that have gradients."""
    return [record["gradient"] for record in records if "reason" not in (record.get("gradient") or {"reason": ""})]


def errors(records: Sequence[Record]) -> str:
    """Return quantiles over the captured models that draw no random numbers of their own."""
    captured = [r for r in records if r["outcome"] == "captured" and not r["draws"]]
    columns = {"stock float32": [r["stock_error"] for r in captured]}
    columns |= {name: [r["policies"][name]["error"] for r in captured if name in r["policies"]] for name in POLICIES}
    graded = _graded(captured)
    columns["gradient, stock float32"] = [g["stock_error"] for g in graded]
    columns["gradient, reproducible"] = [g["error"] for g in graded]
    rows = []
    for name, column in columns.items():
        ordered = sorted(column)
        if ordered:
            at = [statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))], ordered[-1]]
            rows.append([name, str(len(ordered)), *(f"{value:.1e}" for value in at)])
    return table(("", "models", "median", "nine in ten below", "greatest"), rows)


def refusals(records: Sequence[Record]) -> str:
    """Return every refusal by its reason: of the whole model, of one row, of its gradient."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for record in records:
        if record["outcome"] == "refused":
            reasons[_reason(record["reason"])].append(record["name"])
        if isinstance(record.get("row"), str):
            reasons[f"A row alone: {_reason(record['row'])}"].append(record["name"])
        gradient = (record.get("gradient") or {}).get("reason", "")
        if gradient and not gradient.startswith("stock"):
            reasons[f"Gradients: {_reason(gradient)}"].append(record["name"])
    return _listed(reasons)


def _reason(text: str) -> str:
    """Return a refusal's reason and advice as sentences, without its line and model, so that equal ones are grouped."""
    told, _, advice = (text.partition(" reason ")[2] or text).partition(" change ")
    return " ".join(_sentence(part) for part in (told, advice) if part.strip())


def _sentence(text: str) -> str:
    """Return the text with a capital, unless it begins with a name of code, and with a full stop."""
    text = text.strip()
    first, end = text.partition(" ")[0], "" if text.endswith((".", "!", "?", "…")) else "."
    return f"{text[:1].upper() if first.isalpha() else text[:1]}{text[1:]}{end}"


def unrounded(records: Sequence[Record]) -> str:
    """Return the operators that a strict policy refuses, and their models."""
    listed: defaultdict[str, list[str]] = defaultdict(list)
    for record in records:
        for text in record["unrounded"] or ():
            listed[text].append(record["name"])
    return _listed(listed)


def misfits(records: Sequence[Record]) -> str:
    """Return every broken promise."""
    lines = [f"- `{record['name']}`: {text}" for record in records for text in record["misfits"]]
    return "\n".join(lines) or "None."


def unjudged(records: Sequence[Record]) -> str:
    """Return the models that stopped, and the number that could not be built."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for record in records:
        if record["outcome"] in ("time", "memory"):
            reasons[f"out of {record['outcome']}, {record['reason']}"].append(record["name"])
    missing = Counter(record["name"].partition("/")[0] for record in records if record["outcome"] == "unbuildable")
    said = ", ".join(f"{count} of {zoo}" for zoo, count in missing.items()) or "none"
    note = "Not built, or not run by stock PyTorch with the arguments that the walk knows"
    return f"{_listed(reasons)}\n\n{note}: {said} (zoo.json has the reasons)."


def _listed(reasons: dict[str, list[str]]) -> str:
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    return "\n".join(f"- {reason}: {', '.join(f'`{name}`' for name in names)}" for reason, names in ordered) or "None."
