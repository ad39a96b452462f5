"""Repeated blocks: the graph of a model with equal layers is the graph that a trace of every layer gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import hugging_face
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxround.capture import Captured, capture, repeated_blocks
from fxround.compiler.pipeline import Pipeline
from fxround.graph.site import site
from fxround.operators.formulas import decompositions
from fxround.policy import Policy
from fxround.views.graph_views import graph_text

BLOCKS = 9
X = torch.randn(2, 5, 8)


def captured(model: nn.Module, *args: Any, gradients: bool = False, **kwargs: Any) -> Captured:
    torch._dynamo.reset()
    with torch.set_grad_enabled(gradients):
        return capture(model, args, kwargs, decompositions())


def described(found: Captured) -> list[str]:
    """Return everything in a captured graph as text, with symbols of sizes alike.

    Autograd's numbers, which differ from trace to trace, are left out.
    """
    texts = [f"{found.inputs} {found.outputs} {found.sizes}"]
    for node in found.graph.graph.nodes:
        meta = {key: value for key, value in node.meta.items() if key not in ("val", "from_node", "desc", "seq_nr")}
        value = node.meta.get("val")
        layout = (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else value
        texts.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {layout} {sorted(meta.items())}")
    return [re.sub(r"\bs\d+\b", "s", text) for text in texts]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of blocks of each run that was left out of a trace, in order."""
    found: list[int] = []
    restore = repeated_blocks._restored

    def restored(graph: fx.GraphModule, shortened: Any) -> bool:
        complete = restore(graph, shortened)
        found.extend(len(run.blocks) if complete else -1 for run in shortened)
        return complete

    monkeypatch.setattr(repeated_blocks, "_restored", restored)
    return found


def in_full(model: nn.Module, *args: Any, **kwargs: Any) -> Captured:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated_blocks, "find_runs", lambda *_: ())
        return captured(model, *args, **kwargs)


class Block(nn.Module):
    """A block of seven operations and three parameters."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.linear, self.scale, self.eps = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), eps

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        y = F.gelu(self.linear(x)) * self.scale + shared
        return F.layer_norm((x + y.transpose(0, 1).transpose(0, 1)) * 0.5, (8,), eps=self.eps)


class Stack(nn.Module):
    """Equal blocks, and what makes them differ."""

    def __init__(self, change: Callable[[nn.ModuleList], None] = lambda _: None, every: bool = False) -> None:
        super().__init__()
        self.blocks, self.every, self.head = nn.ModuleList(Block() for _ in range(BLOCKS)), every, nn.Linear(8, 3)
        change(self.blocks)

    def forward(self, x: Tensor) -> Any:
        shared, seen = x.mean(-1, keepdim=True), []
        for block in self.blocks:
            x = block(x, shared)
            seen.append(x)
        return (self.head(x), *seen) if self.every else self.head(x)


@pytest.mark.part("False")
@pytest.mark.parametrize("gradients", [False, True])
def test_equal_blocks_are_copied(gradients: bool, runs: list[int]) -> None:
    model = Stack()
    assert described(captured(model, X, gradients=gradients)) == described(in_full(model, X, gradients=gradients))
    assert runs == [BLOCKS]


def test_gradients_that_are_sums_over_the_blocks_are_traced(runs: list[int]) -> None:
    captured(Stack(), X.clone().requires_grad_(), gradients=True)
    captured(Stack(common), X, gradients=True)
    assert runs == []


def differing(blocks: nn.ModuleList) -> None:
    blocks[4] = Block(eps=1e-3)


def tied(blocks: nn.ModuleList) -> None:
    blocks[5].scale = blocks[2].scale


def common(blocks: nn.ModuleList) -> None:
    for block in blocks:
        block.scale = blocks[0].scale


def frozen(blocks: nn.ModuleList) -> None:
    blocks[-1].scale.requires_grad_(False)


def shapes(blocks: nn.ModuleList) -> None:
    blocks[3].scale = nn.Parameter(torch.ones(1))


@pytest.mark.part("tied")
@pytest.mark.parametrize("change", [differing, tied, shapes])
def test_blocks_that_differ_are_traced(change: Any, runs: list[int]) -> None:
    captured(Stack(change), X)
    assert runs == []


@pytest.mark.part("frozen-8")
@pytest.mark.parametrize("change, equal", [(common, BLOCKS), (frozen, BLOCKS - 1)])
def test_blocks_with_a_common_parameter_or_before_another_block_are_copied(
    change: Any, equal: int, runs: list[int]
) -> None:
    model = Stack(change)
    assert described(captured(model, X)) == described(in_full(model, X))
    assert runs == [equal]


def test_blocks_whose_results_are_returned_are_traced(runs: list[int]) -> None:
    captured(Stack(every=True), X)
    assert runs == []


class Recurrent(nn.Module):
    """One layer, many times: every block has the same parameters, and reads the blocks before it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 8)
        for _ in range(12):
            h = self.cell(x[:, 0] + h, h)
        return h


class Mutating(nn.Module):
    """Blocks that change a parameter in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.scale.mul_(0.5)
            x = block(x, x)
        return x


def test_parameters_that_change_are_traced_for_every_block(runs: list[int]) -> None:
    model = Mutating()
    assert described(captured(model, X)) == described(in_full(model, X))
    assert runs == [-1]


def test_a_layer_that_is_called_many_times(runs: list[int]) -> None:
    model = Recurrent()
    assert described(captured(model, X)) == described(in_full(model, X))


def bert() -> tuple[nn.Module, dict[str, Any]]:
    transformers = hugging_face()
    sizes = {"num_hidden_layers": 5, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=50, **sizes)
    return transformers.BertModel(config), {"input_ids": torch.randint(0, 50, (2, 5))}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    transformers = hugging_face()
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=5, n_head=2)
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 50, (2, 5)), "use_cache": False}


@pytest.mark.long
@pytest.mark.parametrize("build, gradients", [(bert, True), (gpt2, False)])
def test_transformers_have_the_graphs_of_a_full_trace(build: Any, gradients: bool, runs: list[int]) -> None:
    model, kwargs = build()
    model.train(gradients)
    once, full = captured(model, **kwargs, gradients=gradients), in_full(model, **kwargs, gradients=gradients)
    assert described(once) == described(full)
    assert runs == [5]
    for policy in ("stochastic",) if build is gpt2 else ():
        pipeline = Pipeline(Policy.preset(policy), strict=False)
        a, b = pipeline.graphs(once.graph), pipeline.graphs(full.graph)
        assert graph_text(a.lowered) == graph_text(b.lowered)
        assert graph_text(a.fused) == graph_text(b.fused)
        assert [str(site(node)) for node in a.lowered.graph.nodes] == [
            str(site(node)) for node in b.lowered.graph.nodes
        ]
