"""Files of reports: everything that a report holds, as PyTorch's archive of plain data and tensors.

Reading one runs no code of the file: ``torch.load`` with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import networkx as nx
import torch
from torch import Tensor

from fxround.atomic_files import write_file
from fxround.errors import brief
from fxround.policy import Policy
from fxround.significance.elements import Elements
from fxround.significance.figures import Agreement, Figures, Options, Place
from fxround.significance.parts import BatchRecord, Part
from fxround.significance.recorder import Measured

if TYPE_CHECKING:
    from fxround.significance.report import VariabilityReport

# The first entry of a file, with the version of its layout.
LAYOUT: Final = "fxround.VariabilityReport 1"
# Fields that are stored as they are.
_PLAIN: Final = (
    "seed",
    "method",
    "confidence",
    "samples",
    "complete",
    "batches",
    "rows",
    "notes",
    "undrawn",
    "provenance",
    "kept",
)


def write(report: VariabilityReport, path: str | Path) -> Path:
    """Write a report; returns the path. Raises ValueError for a policy that is more than its rules."""
    policy = report.policy.to_dict()
    if Policy.from_dict(policy) != report.policy:
        raise ValueError(
            f"a report under a {type(report.policy).__name__} cannot be saved: the file has rules, and not its tensors"
        )
    data = {
        "layout": LAYOUT,
        **{name: getattr(report, name) for name in _PLAIN},
        "policy": policy,
        "figures": [asdict(figures) for figures in report.figures],
        "isolated": [asdict(figures) for figures in report.isolated],
        "metrics": [asdict(measured) for measured in report.metrics],
        "adaptive": None if report.adaptive is None else asdict(report.adaptive),
        "graph": None if report.graph is None else (list(report.graph.nodes.items()), list(report.graph.edges)),
        "part": None if report.part is None else _data_of(report.part),
        "elements": _arrays(report.elements, torch.from_numpy),
    }
    archive = io.BytesIO()
    torch.save(data, archive)
    return write_file(path, archive.getbuffer())


def read(path: str | Path) -> dict[str, Any]:
    """Return the fields of the report in a file; ``adaptive`` is plain data.

    Raises OSError for a file that cannot be read, ValueError for one that is no report of this version.
    """
    content = Path(path).read_bytes()
    try:
        data = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = brief((str(error).splitlines() or [""])[0])
        raise ValueError(f"{path} is no report that fxround saved: {type(error).__name__}: {reason}") from error
    layout = data.get("layout") if isinstance(data, Mapping) else None
    if layout != LAYOUT:
        raise ValueError(f"{path} is no report that fxround saved: its layout is {layout!r}, expected {LAYOUT!r}")
    return {
        **{name: data[name] for name in (*_PLAIN, "adaptive")},
        "policy": Policy.from_dict(data["policy"]),
        "figures": tuple(map(_figures, data["figures"])),
        "isolated": tuple(map(_figures, data["isolated"])),
        "metrics": tuple(Measured(**measured) for measured in data["metrics"]),
        "graph": None if data["graph"] is None else _graph(*data["graph"]),
        "part": None if data["part"] is None else _part(data["part"]),
        "elements": Elements(**_arrays(Elements(**data["elements"]), Tensor.numpy)),
    }


def _arrays(elements: Elements, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the fields of elements, with each array changed."""
    bits = {name: list(map(change, batches)) for name, batches in elements.bits.items()}
    inputs = [None if given is None else change(given) for given in elements.inputs]
    return {"bits": bits, "inputs": inputs, "elements": elements.elements, "of_inputs": elements.of_inputs}


def _figures(data: Mapping[str, Any]) -> Figures:
    agreement = {name: Agreement(**shared) for name, shared in data["agreement"].items()}
    return Figures(**{**data, "place": Place(**data["place"]), "agreement": agreement})


def _graph(nodes: Any, edges: Any) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(edges)
    return graph


def _data_of(part: Part) -> dict[str, Any]:
    """Return a part as plain data. Not ``asdict``, which would copy the tensors."""
    batches = [
        {f.name: getattr(record, f.name) for f in fields(record)} | {"places": [asdict(p) for p in record.places]}
        for record in part.batches
    ]
    return {f.name: getattr(part, f.name) for f in fields(part)} | {"options": asdict(part.options), "batches": batches}


def _part(data: Mapping[str, Any]) -> Part:
    batches = tuple(
        BatchRecord(**{**record, "places": tuple(Place(**place) for place in record["places"])})
        for record in data["batches"]
    )
    return Part(**{**data, "options": Options(**data["options"]), "batches": batches})
