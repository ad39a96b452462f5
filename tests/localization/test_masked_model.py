"""Masks: all sites on give the perturbed module's bits, all off the quiet module's, and sets are composed by site."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from models import build
from torch import Tensor, fx, nn

import fxround
from fxround.localization.bundles import bundles, origin
from fxround.localization.masked_model import Masked


def hashes(value: Any) -> list[str]:
    return [fxround.hash(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in pytree.tree_leaves(value)]


@pytest.mark.parametrize(
    "name, policy",
    [
        ("digits_cnn", "stochastic"),
    ],
)
def test_all_on_is_the_policy_and_all_off_the_quiet_one(name: str, policy: str) -> None:
    example = build(name)
    masked = Masked(example.model, policy, (example.args, example.kwargs))
    loud = fxround.compile(example.model, policy).reseed(5, sample=2)(*example.args, **example.kwargs)
    quiet = fxround.compile(example.model, "reproducible", strict=False)(*example.args, **example.kwargs)
    assert hashes(masked.run(masked.sites, seed=5, sample=2)) == hashes(loud) != hashes(quiet)
    assert hashes(masked.run(seed=5, sample=2)) == hashes(quiet)
    assert hashes(masked.run(masked.sites, seed=5, sample=2)) == hashes(loud)  # once more, beside the kept values


class Net(nn.Module):
    """Three operations that round, one that selects, a sum over a scalar, and a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls.add_(1)
        a = (x * 0.1).relu()
        b = a / 3
        total = (a + b).sum()
        return total.cumsum(0), {"b": b}


X = torch.linspace(-1, 2, 12).reshape(3, 4)


@pytest.fixture(scope="module")
def masked() -> Masked:
    return Masked(Net(), "bfloat16", X)


def test_every_lowered_node_computes_one_captured_node(masked: Masked) -> None:
    captured = {node.name for node in masked.nodes}
    for policy in ("stochastic", "bfloat16", "identity"):
        graph = fxround.compile(Net(), policy, example_inputs=X).graph
        found = bundles(graph)
        assert set(found) == captured
        for name, bundle in found.items():
            inside = set(bundle.nodes)
            used = {origin(n) for node in bundle.nodes for n in node.all_input_nodes if n not in inside}
            before = {n.name for node in masked.nodes if node.name == name for n in node.all_input_nodes}
            assert used <= before | {"rng"}, name


def test_sites_are_what_the_policies_lower_differently(masked: Masked) -> None:
    operators = [place.operator for place in masked.sites.values()]
    assert {"aten.mul.Tensor", "aten.div.Tensor", "aten.add.Tensor", "aten.sum.dim_IntList"} <= set(operators)
    assert "aten.relu.default" not in operators
    assert not Masked(Net(), "bfloat16", X, quiet="bfloat16").sites


def test_one_site_on_is_that_operation_alone_in_the_other_format(masked: Masked) -> None:
    (div,) = (name for name, place in masked.sites.items() if place.operator == "aten.div.Tensor")
    _, named = masked.run({div})
    assert torch.equal(named["b"], fxround.round((X * 0.1).relu().double() / 3, "bfloat16").float())
    blocks = {div: torch.arange(12) % 2 == 0}
    _, mixed = masked.run({div}, blocks=blocks)
    quiet = (X * 0.1).relu() / 3
    assert torch.equal(mixed["b"], torch.where(blocks[div].reshape(3, 4), named["b"], quiet))
    assert not torch.equal(mixed["b"], quiet) and not torch.equal(mixed["b"], named["b"])


def test_runs_are_the_same_with_kept_values_and_without(masked: Masked) -> None:
    frugal = Masked(Net(), "bfloat16", X, memory=0)
    small = Masked(Net(), "bfloat16", X, memory=100)
    names = list(masked.sites)
    for on in ([], names[:1], names[1:3], names[-1:], names):
        assert hashes(masked.run(on)) == hashes(frugal.run(on)) == hashes(small.run(on))


def test_buffers_stay_as_they_are() -> None:
    net = Net()
    Masked(net, "bfloat16", X).run()
    assert net.calls == 0


def test_observers_see_every_node_with_its_operands(masked: Masked) -> None:
    seen: dict[str, Any] = {}

    def note(node: fx.Node, operands: Any, value: Any) -> None:
        seen[node.name] = value
        assert all(value is seen[used.name] for used, value in operands.items())

    masked.run(observe=note)
    assert list(seen) == [node.name for node in masked.nodes]
    assert all(masked.shapes[name] == seen[name].shape for name in masked.sites)


def test_dropout_is_the_same_in_every_run() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    masked = Masked(model, "bfloat16", X)
    state = torch.random.get_rng_state()
    outputs = [hashes(masked.run(on, seed=3)) for on in ([], list(masked.sites), [], list(masked.sites))]
    assert outputs[:2] == outputs[2:] and outputs[0] != outputs[1]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_digest_speaks_of_policies_state_and_inputs(masked: Masked) -> None:
    assert masked.digest() == Masked(Net(), "bfloat16", X).digest()
    others = [
        Masked(Net(), "binary16", X),
        Masked(Net(), "bfloat16", X, quiet="identity"),
        Masked(Net(), "bfloat16", X + 1),
    ]
    assert len({masked.digest(), *(other.digest() for other in others)}) == 4


def test_an_unknown_site_is_refused(masked: Masked) -> None:
    with pytest.raises(ValueError, match=r"'nowhere' is not a site.*expected some of: "):
        masked.run(["nowhere"])
