"""Views of a graph show its content completely, as data and as text."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx as nx
import pytest
import torch
from torch import fx, nn

import fxround
from fxround.graph.site import META, PORT, Port, Site
from fxround.policy import PRESETS
from fxround.views.graph_views import coverage, graph_text, html, operations, summary, to_networkx
from fxround.views.pictures import colourings_of, write_picture
from fxround.views.svg import DUMMY, GAP, HEIGHT, WIDTH, Legend, svg
from fxround.views.table import Table

A = torch.ops.aten
SVG = "{http://www.w3.org/2000/svg}"


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def a_site(op: str, kind: str, status: Any = "rounded", path: str = "fc", reason: str = "") -> Site:
    place = {"path": path, "operator": op, "kind": kind, "role": "activation"}
    assignment = PRESETS["stochastic"].assign(**place, dtype="binary32") if status == "rounded" else None
    return Site(path, "Linear", op, kind, "activation", "net.py:7", "y = fc(x)", 0, assignment, status, reason)


def a_graph() -> fx.GraphModule:
    """x @ w.T, relu, a mask that is unused, topk (a tuple), a sum that no rule classifies."""
    graph = fx.Graph()

    def call(target: Any, args: tuple[Any, ...], value: Any, entry: Site | None = None) -> fx.Node:
        node = graph.create_node("call_function", target, args, name=str(target).split(".")[1])
        node.meta["val"] = value
        if entry is not None:
            node.meta[META] = entry
        return node

    x, w = graph.placeholder("arg0_1"), graph.placeholder("arg1_1")
    x.meta |= {"val": meta(4, 3), PORT: Port("argument", index=0)}
    w.meta |= {"val": meta(5, 3), PORT: Port("parameter", name="fc.weight")}
    t = call(A.permute.default, (w, [1, 0]), meta(3, 5), a_site("aten.permute.default", "movement", "movement"))
    mm = call(A.mm.default, (x, t), meta(4, 5), a_site("aten.mm.default", "contraction"))
    relu = call(A.relu.default, (mm,), meta(4, 5), a_site("aten.relu.default", "exact", "exact", path=""))
    view = call(A.view.default, (relu, [20]), meta(20), a_site("aten.view.default", "movement", "movement", path=""))
    i0 = a_site("aten.i0.default", "opaque", "native", path="", reason="no kernel has this function yet")
    y = call(A.i0.default, (view,), meta(20), i0)
    total = call(A.sum.default, (y,), meta())
    graph.output((total, relu))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.fixture
def gm() -> fx.GraphModule:
    return a_graph()


def test_the_text_names_every_node_with_its_origin(gm: fx.GraphModule) -> None:
    lines = graph_text(gm).splitlines()
    assert "  arg0_1: float32[4, 3] = argument 0" in lines
    assert "  arg1_1: float32[5, 3] = fc.weight" in lines
    assert "# fc (Linear)  net.py:7  y = fc(x)" in lines
    assert "  mm: float32[4, 5] = aten.mm.default(arg0_1, permute)" in lines
    assert lines[-1] == "  return sum_1, relu"
    assert sum(not line.startswith("#") for line in lines) == len(gm.graph.nodes)


def test_the_summary_has_one_row_an_operation(gm: fx.GraphModule) -> None:
    rows = list(summary(gm))
    assert [row["node"] for row in rows] == ["mm", "relu", "i0", "sum_1"]
    assert rows[0] == {
        "node": "mm",
        "operator": "aten.mm.default",
        "module": "fc",
        "source": "net.py:7",
        "rounding": "binary32/stochastic/inf",
        "accumulate": "binary32/stochastic/inf",
    }
    assert rows[1]["rounding"] == "exact"
    assert rows[2]["rounding"] == "native: no kernel has this function yet"
    assert [row["node"] for row in summary(gm, movement=True)] == ["permute", "mm", "relu", "view", "i0", "sum_1"]


def test_coverage_counts_nodes_and_operations_and_hides_nothing(gm: fx.GraphModule) -> None:
    table = coverage(gm)
    counted = [(row["status"], row["operator"], row["nodes"], row["operations"]) for row in table]
    assert counted == [
        ("rounded", "", 1, 2 * 4 * 5 * 3),
        ("exact", "", 1, 20),
        ("native", "aten.i0.default", 1, 20),
        ("native", "aten.sum.default", 1, 1),
        ("movement", "", 2, 0),
    ]
    assert [row["reason"] for row in table][2:4] == ["no kernel has this function yet", "not classified"]
    assert math.fsum(float(row["%"] or 0) for row in table) == pytest.approx(100)  # a sum of rounded shares
    assert [line.split(":")[0] for line in table.unrounded] == ["i0", "sum_1"]
    assert "2 float operations are not rounded. The bits of stock kernels depend on the device." in str(table)
    assert table.to_dict()["unrounded"] == list(table.unrounded)


def test_a_covered_graph_says_so(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.name in ("i0", "sum_1"):
            node.meta[META] = a_site(str(node.target), "exact", "exact")
    assert coverage(gm).unrounded == ()
    assert "Every float operation is rounded or exact." in str(coverage(gm))


CONVOLUTIONS = [
    ((2, 4, 9), (6, 2, 3), ([1], [0], [1], False, [0], 2)),
    ((2, 4, 8, 8), (6, 4, 3, 3), ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)),
    ((2, 4, 8, 8), (4, 3, 3, 3), ([2, 2], [0, 0], [1, 1], True, [0, 0], 2)),
]


@pytest.mark.parametrize("x, w, rest", CONVOLUTIONS)
def test_operations_of_a_convolution_are_its_multiply_adds(
    x: tuple[int, ...], w: tuple[int, ...], rest: tuple[Any, ...]
) -> None:
    graph = fx.Graph()
    arguments = [graph.placeholder(name) for name in "xw"]
    for node, shape in zip(arguments, (x, w), strict=True):
        node.meta["val"] = meta(*shape)
    call = graph.call_function(A.convolution.default, (*arguments, None, *rest))
    call.meta["val"] = A.convolution.default(meta(*x), meta(*w), None, *rest)
    # Every weight meets every position of the side that it slides over, in every image, once.
    slides = x if rest[3] else tuple(call.meta["val"].shape)
    expected = 2 * math.prod(w) * slides[0] * math.prod(slides[2:])
    assert operations(call, a_site("aten.convolution.default", "contraction")) == expected


def test_operations_of_a_reduction_are_its_terms() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = meta(7, 11)
    total = graph.call_function(A.sum.dim_IntList, (x, [1]))
    total.meta["val"] = meta(7)
    assert operations(total, a_site("aten.sum.dim_IntList", "reduction")) == 77


def test_networkx_has_the_whole_graph_and_can_be_written(gm: fx.GraphModule, tmp_path: Path) -> None:
    graph = to_networkx(gm)
    assert set(graph) == {node.name for node in gm.graph.nodes}
    assert set(graph.edges) == {(used.name, node.name) for node in gm.graph.nodes for used in node.all_input_nodes}
    assert graph.nodes["mm"]["rounding"] == "binary32/stochastic/inf"
    assert graph.nodes["arg1_1"]["name"] == "fc.weight"
    nx.write_graphml(graph, tmp_path / "graph.graphml")
    assert set(nx.read_graphml(tmp_path / "graph.graphml")) == set(graph)


def boxes(text: str) -> dict[str, ElementTree.Element]:
    root = ElementTree.fromstring(text)
    return {(g.findtext(f"{SVG}text") or ""): g for g in root.iter(f"{SVG}g")}


def test_the_drawing_shows_arithmetic_in_its_colours(gm: fx.GraphModule, tmp_path: Path) -> None:
    graph = to_networkx(gm)
    colourings, title = colourings_of(graph, None), "a <title> & more"
    path = write_picture(tmp_path / "graph.svg", graph, colourings, title)
    drawn = boxes(path.read_text(encoding="utf-8"))
    assert list(drawn) == ["argument 0", "mm", "relu", "i0", "sum", "result"]
    assert "rounding: binary32/stochastic/inf" in (drawn["mm"].findtext(f"{SVG}title") or "")
    assert "path: fc" in (drawn["mm"].findtext(f"{SVG}title") or "")
    colours = {name: box.find(f"{SVG}rect[@class='box']").get("stroke") for name, box in drawn.items()}  # type: ignore[union-attr]
    assert len({colours["mm"], colours["relu"], colours["i0"], colours["result"]}) == 4
    again = write_picture(tmp_path / "again.svg", graph, colourings, title)
    assert path.read_text(encoding="utf-8") == again.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"ends in \.svg, \.html or \.json, got 'graph\.png'"):
        write_picture("graph.png", graph, colourings, title)


def test_html_is_a_fragment_of_its_own(gm: fx.GraphModule) -> None:
    text = html(gm)
    assert "<svg" in text and text.count("<table") == 2
    assert "src=" not in text and "href=" not in text


def random_graph(seed: int) -> nx.DiGraph:
    graph = nx.gn_graph(40, seed=seed).reverse()
    graph.add_edges_from((a, b) for a, b in nx.gnp_random_graph(40, 0.05, seed=seed).edges if a < b)
    graph = nx.DiGraph((min(e), max(e)) for e in graph.edges)
    for node in graph:
        graph.nodes[node].update(lines=[str(node)], title=str(node), fill="#fff", stroke="#000")
    return graph


def rectangles(text: str) -> Iterator[tuple[float, float]]:
    for box in boxes(text).values():
        rect = box.find(f"{SVG}rect")
        assert rect is not None
        yield float(rect.get("x", "nan")), float(rect.get("y", "nan"))


@pytest.mark.parametrize("seed", range(5))
def test_no_boxes_overlap_and_every_edge_points_down(seed: int) -> None:
    graph = random_graph(seed)
    text = svg(graph, Legend("random"))
    corners = list(rectangles(text))
    assert len(corners) == len(graph)
    for i, (x, y) in enumerate(corners):
        for other_x, other_y in corners[:i]:
            assert abs(x - other_x) >= WIDTH + GAP - 0.2 or abs(y - other_y) > HEIGHT
    tops = dict(zip(map(str, graph.nodes), (y for _, y in corners), strict=True))
    assert all(tops[str(a)] < tops[str(b)] for a, b in graph.edges)
    assert DUMMY < WIDTH


def test_a_cycle_is_refused() -> None:
    with pytest.raises(ValueError, match="cycle"):
        svg(nx.DiGraph([(0, 1), (1, 0)]), Legend(""))


def test_an_empty_graph_can_be_drawn() -> None:
    assert ElementTree.fromstring(svg(nx.DiGraph(), Legend("nothing"))).tag == f"{SVG}svg"


def test_a_table_is_data_first() -> None:
    table = Table(("layer", "bits"), (("conv", 21.25), ("<fc>", None)), title="t", note="n")
    assert table.to_dict()["rows"] == [{"layer": "conv", "bits": 21.25}, {"layer": "<fc>", "bits": None}]
    assert json.loads(table.to_json()) == table.to_dict()
    assert str(table).splitlines() == ["t", "layer   bits", "─────  ─────", "conv   21.25", "<fc>", "n"]
    assert "&lt;fc&gt;" in table._repr_html_() and "<fc>" not in table._repr_html_()
    long = Table(("x",), (("y" * 201,),))
    assert max(map(len, str(long).splitlines())) == 200 and str(long).endswith("y ...")
    assert list(long) == [{"x": "y" * 201}]
    assert json.loads(Table(("x",), ((math.nan,), (math.inf,))).to_json())["rows"] == [{"x": None}, {"x": None}]
    assert len(table) == 2 and operator.length_hint(table) == 2
    with pytest.raises(ValueError, match="a row has 1 values for 2 columns"):
        Table(("a", "b"), ((1,),))


def test_what_depends_on_no_input_stands_just_above_its_use() -> None:
    graph = nx.DiGraph([("x", "a"), ("a", "b"), ("b", "c"), ("v", "w"), ("w", "c"), ("x", "c")])
    for node in graph:
        graph.nodes[node].update(lines=[node], title=node, fill="#fff", stroke="#000", input=node == "x")
    tops = dict(zip(graph, (y for _, y in rectangles(svg(graph, Legend("")))), strict=True))
    assert tops["x"] < tops["a"] < tops["b"] < tops["c"]
    assert (tops["w"], tops["v"]) == (tops["b"], tops["a"])


def test_rows_are_typed(gm: fx.GraphModule) -> None:
    found = summary(gm)
    assert isinstance(found, fxround.Summary) and len(found.operations) == len(found)
    first = found[0]
    assert isinstance(first, fxround.Operation)
    assert (first.node, first.module, first.status, first.kind, first.direction) == (
        "mm", "fc", "rounded", "contraction", "forward"
    )  # fmt: skip
    assert first.operations == 2 * 4 * 5 * 3 and first.code == "y = fc(x)"
    with pytest.raises(FrozenInstanceError):
        first.node = "other"  # type: ignore[misc]
    group = coverage(gm)[0]
    assert (group.status, group.nodes, group.operations) == ("rounded", 1, 120)


def test_a_summary_is_sorted_and_filtered_and_stays_a_summary(gm: fx.GraphModule) -> None:
    found = summary(gm)
    assert [row["node"] for row in found.sort("node")] == ["i0", "mm", "relu", "sum_1"]
    costly = found.sort("operations", "node", reverse=True)
    assert [o.node for o in costly.operations] == ["mm", "relu", "i0", "sum_1"] and costly.note == found.note
    chosen = found.filter(status="native")
    assert [o.node for o in chosen.operations] == ["i0", "sum_1"] and chosen.note == "2 native"
    assert [o.node for o in found.filter("fc").operations] == [o.node for o in found.operations if o.module == "fc"]
    assert [o.node for o in found.filter(operator="mm").operations] == ["mm"]
    assert [o.node for o in found.filter(operator="contraction", status="rounded").operations] == ["mm"]
    assert len(found.filter(direction="backward")) == 0 and len(found.filter("f")) == 0
    with pytest.raises(ValueError, match="no field 'operatons' to sort by; did you mean 'operations'"):
        found.sort("operatons")
    with pytest.raises(ValueError, match="no status is named 'rouded'; did you mean 'rounded'"):
        found.filter(status="rouded")


def test_a_coverage_is_sorted_and_filtered(gm: fx.GraphModule) -> None:
    table = coverage(gm)
    assert [g.operations for g in table.sort("operations", reverse=True).groups] == [120, 20, 20, 1, 0]
    native = table.filter(status="native")
    assert native.unrounded == table.unrounded and [g.operator for g in native.groups] == [
        "aten.i0.default",
        "aten.sum.default",
    ]
    rounded = table.filter(operator="mm")
    assert [(g.status, g.percent) for g in rounded.groups] == [("rounded", 100.0)] and rounded.unrounded == ()
    assert rounded.line == "1 rounded; 100 % of the arithmetic is rounded or exact"
    assert table.line.startswith("1 rounded, 1 exact, 2 native, 2 movement; 86.96 %")


def test_data_frames_have_every_field(gm: fx.GraphModule) -> None:
    pandas = pytest.importorskip("pandas")
    frame = summary(gm).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == [f.name for f in fields(fxround.Operation)]
    assert frame["operations"].sum() == 120 + 20 + 20 + 1
    assert list(summary(gm).filter("nowhere").to_pandas().columns) == list(frame.columns)
    assert list(coverage(gm).to_pandas()["nodes"]) == [1, 1, 1, 1, 2]


def test_forward_and_backward_are_listed_apart() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    compiled = fxround.compile(model, "reproducible", example_inputs=torch.ones(2, 3))
    whole, forward, backward = (compiled.summary(backward=b) for b in (None, False, True))
    assert {o.direction for o in forward.operations} == {"forward"} != {o.direction for o in whole.operations}
    assert {o.direction for o in backward.operations} == {"backward"}
    assert sorted(forward.rows + backward.rows) == sorted(whole.rows)
    assert sum(g.nodes for b in (True, False) for g in compiled.coverage(backward=b).groups) == (
        sum(g.nodes for g in compiled.coverage().groups)
    )
    compiled.eval()
    with torch.no_grad():
        compiled(torch.ones(2, 3))
    assert compiled.summary(backward=False).rows == compiled.summary().rows
    for listed in (compiled.summary, compiled.coverage):
        with pytest.raises(ValueError, match="recorded no gradients"):
            listed(backward=True)


def test_a_compiled_module_prints_policy_coverage_and_cost_and_captures_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()).eval()
    compiled = fxround.compile(model, "stochastic", seed=5)
    assert repr(compiled) == (
        "RoundedModule(\n"
        "  policy='stochastic', seed=5, sample=0\n"
        "  (not captured yet: call it, or prepare(*example_inputs))\n"
        "  (source): Sequential(\n"
        "    (0): Linear(in_features=3, out_features=2, bias=True)\n"
        "    (1): Tanh()\n"
        "  )\n"
        ")"
    )
    assert not compiled.captures().rows
    with torch.no_grad():
        compiled(torch.ones(4, 3))
    operations = sum(o.operations for o in compiled.summary().operations)
    rounded = len(compiled.summary().filter(status="rounded"))
    text = repr(compiled).splitlines()
    assert text[2].startswith(f"  coverage: {rounded} rounded, ")
    assert text[2].endswith("100 % of the arithmetic is rounded or exact")
    assert text[3] == f"  cost: {operations:,} operations, 1 captured graph"
    assert "2 captured graphs" in repr(compiled.train().prepare(torch.ones(4, 3)))


@pytest.mark.parametrize("policy", ["identity", "bfloat16", "stochastic", "int8"])
def test_products_count_the_length_of_their_sums_and_roundings_their_elements(policy: str) -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(24, 5)).eval()
    with torch.no_grad():
        listed = fxround.compile(model, policy).prepare(torch.randn(7, 2, 8)).summary()
    products = [o.operations for o in listed.operations if o.kind == "contraction" and o.operator != "fxround.round"]
    rounded = [o.operations for o in listed.operations if o.kind == "contraction" and o.operator == "fxround.round"]
    assert products == [2 * 7 * 4 * 6 * 2 * 3, 2 * 7 * 5 * 24]
    assert rounded == ([7 * 4 * 6, 7 * 5] if policy == "int8" else [])
