"""Recurrent layers run as loops with the bits of PyTorch's unrolled formulas, in both directions, for every length."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._higher_order_ops import map as mapped

import fxround
from fxround.errors import UnsupportedRounding
from fxround.graph.dialect import Matmul, loops_of, read
from fxround.passes.analyses.leaks import edges

_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM of two layers, both directions, projected": lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
    "LSTM, batch first, without biases": lambda: nn.LSTM(3, 4, bias=False, batch_first=True),
    "GRU, both directions": lambda: nn.GRU(3, 4, bidirectional=True),
    "RNN of ReLU": lambda: nn.RNN(3, 4, nonlinearity="relu"),
    "RNN of tanh": lambda: nn.RNN(3, 4),
}


def _step(compiled: nn.Module, x: Tensor) -> list[Tensor]:
    """Return results, and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    compiled.zero_grad()
    results = pytree.tree_leaves(compiled(x))
    torch.manual_seed(1)
    sum((r * torch.rand_like(r)).sum() for r in results).backward()
    return [t.detach().clone() for t in (*results, x.grad, *(p.grad for p in compiled.parameters()))]  # type: ignore[union-attr]


@pytest.mark.part("LSTM, batch first, without biases", "RNN of tanh")
@pytest.mark.parametrize("name", _LAYERS)
def test_layers_have_the_bits_of_the_unrolled_formulas(name: str) -> None:
    torch.manual_seed(0)
    policy = "bfloat16" if "tanh" in name else "reproducible"
    layer, x = _LAYERS[name](), torch.rand(3, 2, 3)
    found = _step(fxround.compile(layer, policy), x)
    unrolled = fxround.compile(layer, policy, unroll_loops=True)
    expected = _step(unrolled, x)
    assert not any("scan" in row.operator for row in unrolled.summary().operations)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_one_graph_serves_every_length_and_batch() -> None:
    compiled = fxround.compile(nn.LSTM(3, 4, 2), "reproducible")
    with torch.no_grad():
        rows = [compiled(torch.ones(length, 2, 3))[0] for length in (5, 2, 40)]
        assert compiled(torch.ones(6, 3, 3))[0].shape == (6, 3, 4)
    assert torch.equal(rows[0], rows[2][:5]) and torch.equal(rows[1], rows[2][:2])
    assert len(compiled.captures()) <= 2  # the batch was a number until it changed


def test_random_bits_follow_the_seed() -> None:
    layer, x = nn.GRU(3, 4, 2), torch.rand(4, 2, 3)
    compiled = fxround.compile(layer, "stochastic", seed=1)
    first = compiled.evaluate(x)
    trained = compiled(x)
    assert torch.equal(first[0], trained[0]) and torch.equal(first[1], trained[1])
    assert torch.equal(fxround.compile(layer, "stochastic", seed=1).evaluate(x)[0], first[0])
    assert not torch.equal(compiled.reseed(2).evaluate(x)[0], first[0])
    assert not compiled.coverage().unrounded


@pytest.mark.part("bfloat16")
@pytest.mark.parametrize("text", ["bfloat16", "e4m3fn", "mxfp8", "reproducible"])
def test_leaks_are_proved_and_found_inside_of_loops(text: str) -> None:
    policy = fxround.Policy.parse(text)
    compiled = fxround.compile(nn.LSTM(3, 4), policy, example_inputs=torch.rand(4, 2, 3), strict=False)
    graph = compiled.lowered
    found = edges(graph, policy)
    assert [edge for edge in found if not edge.proved] == []
    ((_, (body,)), *_rest) = loops_of(graph)
    inside = set(body.graph.nodes)
    assert sum(edge.consumer in inside for edge in found) > 8
    if text == "mxfp8":  # stock kernels compute the products
        return
    product = next(node for node in body.graph.nodes if isinstance(read(node), Matmul))
    call = read(product)
    assert isinstance(call, Matmul)
    product.args = replace(call, rounding="binary64/nearest_even/inf").arguments()
    if text in ("bfloat16", "e4m3fn"):
        assert any(edge.producer is product for edge in edges(graph, policy) if not edge.proved)


def test_policies_that_loops_cannot_have_unroll_layers_and_refuse_loops() -> None:
    layer, x = nn.LSTM(3, 4), torch.rand(3, 2, 3)
    delayed = fxround.compile(layer, "fp8_delayed")
    delayed(x)
    assert not any("scan" in row.operator for row in delayed.summary().operations)

    def loop(x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = mapped(lambda row, w: row @ w, x, w)
        return found

    with pytest.raises(UnsupportedRounding, match="inside of a loop cannot have a delayed scale"):
        fxround.compile(loop, "fp8_delayed")(x, torch.rand(3, 3))
    treated = fxround.Policy(
        "treated", (fxround.Rule(rounding="e4m3fn/nearest_even/saturate", gradient="zero_clamped"),)
    )
    with pytest.raises(UnsupportedRounding, match="treats gradients of roundings"):
        fxround.compile(loop, treated)(x.requires_grad_(), torch.rand(3, 3))


def test_a_training_step_needs_no_new_capture() -> None:
    layer = nn.LSTM(3, 4)
    compiled, optimizer = fxround.compile(layer, "reproducible"), torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(3):
        compiled(torch.rand(4, 2, 3))[0].sum().backward()
        optimizer.step()
    assert len(compiled.captures()) == 1


@pytest.mark.long
def test_gates_of_every_step_are_operations_of_an_unrolled_layer() -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(3, 4).eval(), torch.rand(3, 2, 3)
    compiled = fxround.compile(layer, "bfloat16", unroll_loops=True)
    with torch.no_grad():
        seen = dict(compiled.observe(x))
        assert torch.equal(seen["output"][0], fxround.compile(layer, "bfloat16")(x)[0])
    # Of each step: the gates of the input, of the state and of the result. The last result is sigmoid times tanh.
    gates = [name for name in seen if name.startswith("sigmoid")]
    assert gates == ["sigmoid", *(f"sigmoid_{i}" for i in range(1, 9))]
    product = seen["sigmoid_8"].double() * seen["tanh_5"].double()
    assert torch.equal(fxround.round(product, "bfloat16").float()[0], seen["output"][0][2])
    assert pickle.loads(pickle.dumps(compiled)).unroll_loops and compiled.with_policy("reproducible").unroll_loops
    report = fxround.variability(layer, x, samples=5, capture="nodes", unroll_loops=True, reference=None)
    assert {place.place.name for place in report.places} >= {*gates}


def test_localize_names_a_gate_of_a_step() -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(3, 4).eval(), torch.rand(3, 2, 3)
    # Without the first rule tanh would be PyTorch's, which differs from the quiet policy's on some processors.
    rules = (fxround.Rule(rounding="dtype", accumulate="wide"), fxround.Rule(operator="sigmoid", rounding="e4m3fn"))
    narrow = fxround.Policy("gates", rules)
    with torch.no_grad():
        wanted = fxround.compile(layer, "reproducible")(x)[0]

    # The first result depends on the first step alone, and its cell is zero, which the gate of the state multiplies.
    report = fxround.localize(layer, x, lambda out: bool(torch.equal(out[0][0], wanted[0])), narrow)
    found = [[site.node for site in culprits.sites] for culprits in report.sets]
    assert sorted(found) == [["sigmoid"], ["sigmoid_2"]]


def test_a_function_may_read_a_layer_from_outside() -> None:
    layer, x = nn.GRU(3, 4), torch.rand(5, 2, 3)
    read, module = fxround.compile(lambda x: layer(x), "reproducible"), fxround.compile(layer, "reproducible")
    with torch.no_grad():
        for _ in range(3):
            layer.weight_hh_l0.add_(0.25)
            assert all(torch.equal(a, b) for a, b in zip(read(x), module(x), strict=True))
