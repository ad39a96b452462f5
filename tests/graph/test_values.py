"""Fake values: equal nodes share one, and it is the value that the operator computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import build
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

import fxround
from fxround.capture import capture
from fxround.graph.dialect import CALLS, Fused, Pointwise
from fxround.graph.values import copy_node, evaluate, fake_mode
from fxround.operators.formulas import decompositions
from fxround.passes import Plan, lower
from fxround.policy import Policy

aten = torch.ops.aten
ADD = "t0 = add(x0, x0) @ binary32/stochastic/inf"


def described(value: Any, layout: bool = True) -> list[str]:
    return [
        f"{x.dtype} {tuple(x.shape)} {(x.stride(), x.storage_offset()) if layout else ''} {x.device}"
        if isinstance(x, Tensor)
        else str(x)
        for x in pytree.tree_leaves(value)
    ]


def values(target: Any, *calls: tuple[Any, ...]) -> list[Any]:
    """The fake values of calls of one operator; "x", "y", "z" and "rng" among the arguments are inputs."""
    mode, graph = FakeTensorMode(shape_env=ShapeEnv()), fx.Graph()
    x, rng = torch.ones(3, 4), torch.zeros(2, dtype=torch.int64)
    inputs = {"x": x, "y": torch.ones(4, 3).T, "z": x.clone(), "rng": rng}
    nodes = {name: graph.placeholder(name) for name in inputs}
    for name, node in nodes.items():
        node.meta["val"] = mode.from_tensor(inputs[name], static_shapes=True)
    made = [
        graph.call_function(
            target, pytree.tree_map(lambda a: nodes[a] if isinstance(a, str) and a in nodes else a, args)
        )
        for args in calls
    ]
    graph.output(None)
    module = fx.GraphModule({}, graph)
    for node in made:
        evaluate(module, node)
    return [node.meta["val"] for node in made]


def test_results_of_one_dtype_and_size_are_one_value_where_a_graph_is_lowered_alone() -> None:
    other = ADD.replace("add", "mul")
    calls = [(["x"], ADD, torch.float32, "rng", 1), (["x"], other, torch.float32, "rng", 2)]
    further = [(["x"], other, torch.float64, "rng", 2), (["y"], other, torch.float32, "rng", 2)]
    one, same, wide, of_columns = values(Pointwise.overload, *calls, *further)
    assert one is same is of_columns and described(one) == ["torch.float32 (3, 4) ((4, 1), 0) cpu"]
    assert described(wide) == ["torch.float64 (3, 4) ((4, 1), 0) cpu"]
    with FakeTensorMode():
        x, rng = torch.ones(3, 4), torch.zeros(2, dtype=torch.int64)
        traced = [Pointwise.overload([x], text, torch.float32, rng, 1) for text in (ADD, other)]
    assert traced[0] is not traced[1]  # PyTorch writes to the results of its own traces


def test_a_copied_node_is_the_node_over_other_operands() -> None:
    graph, other = fx.Graph(), fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.cat.default, ([x, x],), {"dim": 1}, name="whole")
    node.meta = {"val": 3}
    made = {x: copy_node(other, x, {})}
    copied = copy_node(other, node, made)
    assert (copied.name, copied.target, copied.meta) == ("whole", aten.cat.default, {"val": 3})
    assert copied.args == ([made[x], made[x]],) and copied.kwargs == {"dim": 1} and copied.graph is other
    assert copied.meta is not node.meta and list(made[x].users) == [copied] and list(x.users) == [node]


def test_equal_calls_share_a_value_and_others_do_not() -> None:
    same, again, equal, other = values(aten.exp.default, ("x",), ("x",), ("z",), ("y",))
    assert same is again is equal
    assert described(other) != described(same) == ["torch.float32 (3, 4) ((4, 1), 0) cpu"]


def test_numbers_that_are_equal_and_of_other_types_are_different() -> None:
    dtypes = [value.dtype for value in values(aten.full.default, ([2], 1), ([2], True), ([2], 1.0))]
    assert dtypes == [torch.int64, torch.bool, torch.float32]


@pytest.mark.parametrize("pads", [[0, 1], [0, -1], [2, -1, 1, 0]])
def test_a_symbolic_size_stays_one_in_a_pad_that_a_pass_changed(pads: list[int]) -> None:
    """PyTorch's C++ kernel would fix it to the number that the batch had at the capture, or fail for negative pads."""

    def forward(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, pads)

    compiled = fxround.compile(forward, "bfloat16")
    for batch in (2, 5):
        x = torch.randn(batch, 8, 6).requires_grad_()
        padded = compiled(x)
        padded.sum().backward()
        assert torch.equal(padded, torch.nn.functional.pad(x.bfloat16().float(), pads))
    entry = compiled._called()
    assert len(compiled.captures()) == 1
    padded = [node for node in entry.lowered.graph.nodes if node.target is aten.constant_pad_nd.default]
    assert len(padded) == 2
    assert all(node.meta["val"].shape[0].node.expr.free_symbols for node in padded)


def test_the_reciprocal_of_a_symbolic_size_stays_one() -> None:
    class Mean(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(0)

    captured = capture(Mean(), (torch.randn(2, 4, requires_grad=True),), {}, decompositions("repdl"))
    mode = fake_mode(captured.graph)
    before = [str(guard.expr) for guard in mode.shape_env.guards]
    lower(captured.graph, Plan(Policy.preset("repdl"), strict=False))
    assert [str(guard.expr) for guard in mode.shape_env.guards] == before


def test_sizes_that_depend_on_data_are_not_shared() -> None:
    first, second = values(aten.nonzero.default, ("x",), ("z",))
    assert str(first.shape[0]) != str(second.shape[0])


def test_the_number_of_a_node_is_no_part_of_its_value_but_how_many_there_are_is_checked() -> None:
    a, b = values(Pointwise.overload, (["x"], ADD, torch.float32, "rng", 3), (["x"], ADD, torch.float32, "rng", 4))
    assert a is b
    fused = f"{ADD}; return t0"
    values(Fused.overload, (["x"], fused, "f32", "rng", [3]), (["x"], fused, "f32", "rng", [4]))
    with pytest.raises(ValueError, match="draws 1 times, got 0 node numbers"):
        values(Fused.overload, (["x"], fused, "f32", "rng", [3]), (["x"], fused, "f32", "rng", []))


@pytest.mark.parametrize("name", ["encoder", "unet"])
def test_every_value_of_a_lowered_graph_is_what_its_operator_computes(name: str) -> None:
    example = build(name)
    with torch.no_grad():
        captured = capture(example.model, example.args, example.kwargs, decompositions())
    graph = lower(captured.graph, Plan(Policy.preset("stochastic"), strict=False))
    compared = 0
    for node in graph.graph.nodes:
        if node.op == "call_function" and (node.target in CALLS or isinstance(node.target, torch._ops.OpOverload)):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
            with fake_mode(graph):
                value = node.target(*args, **kwargs)
            # Another operator's value has the layout of the captured graph.
            layout = node.target in CALLS
            assert described(node.meta["val"], layout) == described(value, layout)
            compared += 1
    assert compared > 30
