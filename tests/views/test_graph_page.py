"""The HTML page of a graph has the whole graph, and needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.views.colouring import ByPolicy
from fxround.views.graph_page import embedded_json, graph_page, page_data
from fxround.views.module_tree import FOLDED, Group, module_tree
from fxround.views.pictures import colourings_of, drawn, embedded


class Block(nn.Module):
    """A layer with a function that is called twice, between other operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [..., width] to the same shape."""
        return x + self.act(self.second(self.act(self.first(x))))


class Net(nn.Module):
    """Equal layers between two others."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layers = nn.ModuleList(Block(6) for _ in range(depth))
        self.wide = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 [n, length] to float32 [n, length, 3]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.softmax(self.wide(x), -1)


TOKENS = torch.arange(15).reshape(3, 5) % 10


@pytest.fixture(scope="module")
def compiled() -> fxround.RoundedModule:
    torch.manual_seed(0)
    with torch.no_grad():
        return fxround.compile(Net().eval(), "stochastic", example_inputs=TOKENS)


@pytest.fixture(scope="module")
def data(compiled: fxround.RoundedModule) -> dict[str, Any]:
    graph = compiled.to_networkx()
    return page_data(graph, drawn(graph), colourings_of(graph, None), "Net")


def test_the_page_has_every_node_and_edge_once(compiled: fxround.RoundedModule, data: dict[str, Any]) -> None:
    shown = drawn(compiled.to_networkx())
    names = [node["name"] for node in data["nodes"]]
    assert names == list(shown)
    assert {(names[a], names[b]) for a, b in data["edges"]} == set(shown.edges)
    assert len(data["edges"]) == shown.number_of_edges()
    assert {o.node for o in compiled.summary().operations} == {n["name"] for n in data["nodes"] if n["facts"]}


def test_every_node_is_in_one_group_and_every_group_but_the_first_in_one(data: dict[str, Any]) -> None:
    children = [child for group in data["groups"] for child in group["children"]]
    assert sorted(child["node"] for child in children if "node" in child) == list(range(len(data["nodes"])))
    assert sorted(child["group"] for child in children if "group" in child) == list(range(1, len(data["groups"])))


def test_a_node_says_what_the_summary_says(compiled: fxround.RoundedModule, data: dict[str, Any]) -> None:
    facts = {node["name"]: node["facts"] for node in data["nodes"]}
    for operation in compiled.summary().operations:
        assert {"node": operation.node, **facts[operation.node]} == vars(operation)


def test_a_loop_says_what_the_summary_says() -> None:
    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        carry = torch.tanh(carry * x)
        return carry, carry + x

    def scanned(xs: Tensor) -> Tensor:
        return torch._higher_order_ops.scan(step, torch.ones(3), xs)[1]

    compiled = fxround.compile(scanned, "reproducible", example_inputs=torch.ones(7, 3))
    graph = compiled.to_networkx()
    nodes = {n["name"]: n["facts"] for n in page_data(graph, drawn(graph), colourings_of(graph, None), "")["nodes"]}
    listed = compiled.summary().operations
    assert max(operation.operations for operation in listed) == 7 * 3
    for operation in listed:
        assert {"node": operation.node, **nodes[operation.node]} == vars(operation)


def test_equal_layers_are_folded_and_counted(data: dict[str, Any]) -> None:
    (layers,) = [group for group in data["groups"] if group["kind"] == "layers"]
    inside = [data["groups"][child["group"]] for child in layers["children"]]
    assert (layers["label"], layers["class"], len(inside)) == ("layers.0 to 3", "Block", 4)
    assert [group["module"] for group in inside] == [f"layers.{i}" for i in range(4)]
    assert {group["operations"] for group in inside} == {layers["operations"] / 4}


def test_layers_of_other_shapes_or_roundings_are_not_folded() -> None:
    policy = fxround.Policy("mixed", (fxround.Rule(rounding="bfloat16"), fxround.Rule("layers.2", rounding="e4m3fn")))
    with torch.no_grad():
        compiled = fxround.compile(Net(2 * FOLDED).eval(), policy, example_inputs=TOKENS)
    groups = walk(module_tree(drawn(compiled.to_networkx())))
    assert [group.label for group in groups if group.kind == "layers"] == ["3 to 5"]
    shapes = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise((4, 5, 6, 7)))).eval()
    with torch.no_grad():
        compiled = fxround.compile(shapes, "bfloat16", example_inputs=torch.ones(2, 4))
    assert all(group.kind == "module" for group in walk(module_tree(drawn(compiled.to_networkx()))))


def walk(group: Group) -> list[Group]:
    return [group, *(inner for child in group.children if isinstance(child, Group) for inner in walk(child))]


def test_a_module_that_is_called_twice_is_two_groups(data: dict[str, Any]) -> None:
    calls = [group["label"] for group in data["groups"] if group["module"] == "layers.0.act"]
    assert calls == ["act", "act, call 2"]


def random_modules(seed: int) -> nx.DiGraph:
    """A graph whose edges lead from lower numbers to higher ones, and whose modules are drawn."""
    generator = torch.Generator().manual_seed(seed)
    graph = nx.DiGraph()
    for i in range(60):
        path = ".".join(
            "abc"[int(k)]
            for k in torch.randint(3, (int(torch.randint(4, (), generator=generator)),), generator=generator)
        )
        row = {"path": path, "module_type": "", "operator": "f", "type": "", "rounding": "", "accumulate": ""}
        graph.add_node(str(i), **row, status="rounded")
    pairs = torch.randint(60, (90, 2), generator=generator).sort(1).values.tolist()
    graph.add_edges_from((str(a), str(b)) for a, b in pairs if a < b)
    return graph


@pytest.mark.parametrize("seed", range(20))
def test_closed_modules_are_in_no_circle_and_children_stand_in_the_order_of_their_edges(seed: int) -> None:
    graph = random_modules(seed)
    tree = module_tree(graph)
    assert sorted(tree.nodes(), key=int) == list(graph)
    for group in walk(tree):
        place = {}
        for i, child in enumerate(group.children):
            place |= dict.fromkeys(child.nodes() if isinstance(child, Group) else [child], i)
        edges = [(place[a], place[b]) for a, b in graph.edges if a in place and b in place]
        assert all(a <= b for a, b in edges)


def test_edges_carry_format_and_shape_in_readable_names(data: dict[str, Any]) -> None:
    values = {node["label"]: node["value"] for node in data["nodes"]}
    assert values["argument 0"] == "int64[n, length]"
    assert values["div.Tensor"] == "binary32[n, length, 3]"
    assert values["amax"] == "float32[n, length, 1]"
    assert not re.search(r"\bs\d+\b", json.dumps(data))
    reads = {node["facts"].get("module"): node["reads"] for node in data["nodes"] if node["label"] == "mm"}
    assert "wide.weight float32[3, 6]" in reads["wide"]


def test_the_texts_of_the_graph_have_readable_sizes(compiled: fxround.RoundedModule) -> None:
    assert "float32[n, length, 6]" in compiled.graph_text()
    assert not re.search(r"\bs\d+\b", compiled.graph_text())


class Parts(HTMLParser):
    """The elements of a document with their attributes, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, text: str) -> None:
        if self.elements and self.elements[-1][0] == "script":
            self.scripts[-1] += text


def test_the_page_needs_nothing_else(compiled: fxround.RoundedModule, tmp_path: Path, data: dict[str, Any]) -> None:
    text = compiled.draw(tmp_path / "graph.html").read_text(encoding="utf-8")
    parts = Parts(text)
    assert not [a for _, a in parts.elements if {"src", "href", "srcset", "data"} & a.keys()]
    assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\((?!#)|\bfetch\(|XMLHttpRequest|\bimport\b *[({]", text)
    assert "Permission is hereby granted" in text and "Chris Pettitt" in text
    assert len(parts.scripts) == 3 and json.loads(parts.scripts[0]) == data


def test_texts_of_a_model_cannot_leave_their_element() -> None:
    hostile = "</script><script>alert(1)</script><!--<script>"
    graph = nx.DiGraph()
    keys = ("operator", "path", "module_type", "modules", "source", "rounding", "accumulate", "reason", "name", "role")
    row = dict.fromkeys(keys, hostile) | {"op": "call_function", "status": "rounded", "tensor": True, "operations": 1}
    graph.add_node(hostile, **row, code=hostile, kind="", direction="forward", type="float32[1]")
    text = graph_page(graph, graph, [ByPolicy(graph)], hostile)
    scripts = Parts(text).scripts
    assert len(scripts) == 3 and hostile not in text
    assert json.loads(scripts[0])["nodes"][0]["name"] == hostile
    assert embedded_json("x", '{"a":"<"}').count("<") == 2


def test_the_first_marks_are_those_of_the_report(compiled: fxround.RoundedModule, tmp_path: Path) -> None:
    report = fxround.variability(compiled.source, TOKENS, samples=3, capture="nodes", metrics=(), reference=None)
    costs = fxround.attribute(compiled.source, TOKENS)
    path = compiled.draw(tmp_path / "graph.html", report=(report, costs))
    shown = json.loads(Parts(path.read_text(encoding="utf-8")).scripts[0])
    assert [c["name"] for c in shown["colourings"]] == ["significant bits", "share of the error", "policy"]
    bits, shares, _ = shown["colourings"]
    for node, mark, share in zip(shown["nodes"], bits["nodes"], shares["nodes"], strict=True):
        if node["kind"] == "operation":
            figures = report[node["name"]]
            assert mark["said"] == ("no evidence" if figures.bits is None else f"{figures.bits:.1f} bits")
            row = next((row for row in costs.rows if row.node == node["name"]), None)
            assert share["said"] == ("" if row is None else f"{100 * row.share:.1f} %")
    assert shares["groups"][0]["facts"]["share"] == f"{100 * sum(row.share for row in costs.rows):.2f} %"
    for group, mark in zip(shown["groups"], bits["groups"], strict=True):
        operations = [node["name"] for node in inside(shown, group) if node["kind"] == "operation"]
        least = min(b for name in operations if (b := report[name].bits) is not None)
        assert mark["said"] == f"least: {least:.1f} bits"


def test_model_explorer_gets_the_nodes_their_modules_and_the_bits(
    compiled: fxround.RoundedModule, tmp_path: Path
) -> None:
    report = fxround.variability(compiled.source, TOKENS, samples=2, capture="nodes", metrics=(), reference=None)
    text = compiled.draw(tmp_path / "graph.json", report=report).read_text(encoding="utf-8")
    # The forms that the viewer's own reader accepts: a collection with a label, or a list of graphs.
    collection = json.loads(text)
    (graph,) = collection["graphs"]
    shown = drawn(compiled.to_networkx())
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert (collection.keys(), graph["id"]) == ({"label", "graphs"}, "Net") and list(nodes) == list(shown)
    edges = [(edge["sourceNodeId"], name) for name, node in nodes.items() for edge in node["incomingEdges"]]
    assert len(edges) == len(set(edges)) and set(edges) == set(shown.edges)
    for operation in compiled.summary().operations:
        node = nodes[operation.node]
        assert node["namespace"] == operation.module.replace(".", "/")
        attributes = {pair["key"]: pair["value"] for pair in node["attrs"]}
        assert attributes.get("rounding", "") == operation.rounding and attributes["status"] == operation.status
        bits = report[operation.node].bits
        assert bits is None or attributes["significant bits"].startswith(f"{bits:.1f} of 24")
        (output,) = node["outputsMetadata"]
        assert output["attrs"] == [{"key": "tensor_shape", "value": shown.nodes[operation.node]["type"]}]
    assert graph["groupNodeAttributes"]["layers/0"] == {"class": "Block"}


def inside(data: dict[str, Any], group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the nodes in a group of a page."""
    nodes = [data["nodes"][child["node"]] for child in group["children"] if "node" in child]
    groups = [data["groups"][child["group"]] for child in group["children"] if "group" in child]
    return [*nodes, *(node for other in groups for node in inside(data, other))]


def test_a_report_of_another_graph_is_refused(compiled: fxround.RoundedModule, tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(6, 3)).eval()
    report = fxround.variability(other, torch.ones(2, 6), samples=2, metrics=(), reference=None)
    with pytest.raises(ValueError, match=r"of another graph: its mm \(aten.mm.default in 0\) is not in this one"):
        compiled.draw(tmp_path / "graph.html", report=report)
    with pytest.raises(TypeError, match="report is a str; expected a VariabilityReport"):
        compiled.draw(tmp_path / "graph.html", report="bits")
    assert list(tmp_path.iterdir()) == []


def test_reports_and_notebooks_show_graphs_of_any_size(compiled: fxround.RoundedModule) -> None:
    report = fxround.variability(compiled.source, TOKENS, samples=2, metrics=(), reference=None)
    costs = fxround.attribute(compiled.source, TOKENS)
    assert report.graph is not None and costs.graph is not None
    for text in (report.to_html(), compiled._repr_html_()):
        (frame,) = [attributes for tag, attributes in Parts(text).elements if tag == "iframe"]
        shown = json.loads(Parts(frame["srcdoc"] or "").scripts[0])
        assert [node["name"] for node in shown["nodes"]] == list(drawn(compiled.to_networkx()))
    small = fxround.compile(nn.Linear(2, 2), "bfloat16", example_inputs=torch.ones(1, 2)).to_networkx()
    assert embedded(small, colourings_of(small, None), "").startswith("<svg")


def test_the_library_of_the_layout_is_the_one_of_its_record() -> None:
    folder = Path(fxround.__file__).parent / "views" / "vendor"
    version = re.search(r"\| (\d+\.\d+\.\d+) \|", (folder / "README.md").read_text(encoding="utf-8"))
    assert version is not None
    assert f'"{version[1]}"' in (folder / "dagre.min.js").read_text(encoding="utf-8")
    assert "</script" not in (folder / "dagre.min.js").read_text(encoding="utf-8")
