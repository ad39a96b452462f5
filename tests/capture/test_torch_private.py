"""The measures that make tracing faster change no graph, and are undone afterwards."""

from __future__ import annotations

import contextlib
import gc
from threading import Event, Thread

import pytest
import torch
from models import build
from torch import Tensor, fx, nn

import fxround
import fxround.capture
from fxround.capture import capture, core_decompositions
from fxround.capture.torch_private import quickened, uncollected
from fxround.operators.formulas import decompositions


def described(name: str) -> list[str]:
    """Every node with a tensor result, with its operands, shape and strides, but not the computation of sizes."""
    example = build(name)
    captured = capture(example.model, example.args, example.kwargs, decompositions())
    # Each trace names its symbols again.
    symbols = {str(d): "batch" for dims in captured.sizes.dimensions if dims for d in dims if not isinstance(d, int)}
    numbers: dict[fx.Node, int] = {}
    lines = []
    for node in captured.graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            continue
        numbers[node] = len(numbers)
        args = fx.map_arg((node.args, node.kwargs), lambda n: numbers.get(n, n.meta["val"]))
        layout = (tuple(value.shape), value.stride()) if isinstance(value, Tensor) else value
        line = f"{node.target} {args} {layout}"
        for symbol, word in symbols.items():
            line = line.replace(symbol, word)
        lines.append(line)
    return lines


@pytest.mark.part("digits_cnn")
@pytest.mark.parametrize("name", ["digits_cnn", "encoder"])
def test_quickened_tracing_gives_the_same_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = described(name)
    monkeypatch.setattr(fxround.capture, "quickened", contextlib.nullcontext)
    slow = described(name)
    assert quick == slow
    assert any("batch" in line for line in quick)


def test_quickening_is_undone() -> None:
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.sym_node import SymNode

    watched = [(SymNode, "_mul"), (SymNode, "_eq"), (SymNode, "maybe_as_int"), (FunctionalTensor, "__new__")]
    before = [owner.__dict__[name] for owner, name in watched]
    with contextlib.suppress(RuntimeError), quickened():
        assert all(owner.__dict__[name] is not b for (owner, name), b in zip(watched, before, strict=True))
        raise RuntimeError
    assert [owner.__dict__[name] for owner, name in watched] == before


def test_quickening_is_undone_whichever_thread_ends_last() -> None:
    """One that began in the block of another put back what it had met there, for the rest of the process."""
    from torch.fx.experimental.sym_node import SymNode

    before, began, entered, left = SymNode.__dict__["_mul"], Event(), Event(), Event()

    def later() -> None:
        began.set()
        with quickened():
            entered.set()
            left.wait()

    with quickened():
        thread = Thread(target=later)
        thread.start()
        began.wait()
        entered.wait(0.2)  # it has to wait for the end of this block
    entered.wait()
    left.set()
    thread.join()
    assert SymNode.__dict__["_mul"] is before


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_it_was(enabled: bool) -> None:
    try:
        gc.enable() if enabled else gc.disable()
        with contextlib.suppress(RuntimeError), uncollected():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


class AloneOrNot(nn.Module):
    """Treats a batch of one differently."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 1 else x + 1


def test_a_model_that_treats_a_batch_of_one_apart_is_captured_apart() -> None:
    compiled = fxround.compile(AloneOrNot(), "identity")
    one, two, three = torch.rand(1, 3), torch.rand(2, 3), torch.rand(3, 3)
    assert torch.equal(compiled(one), one * 2)
    assert torch.equal(compiled(two), two + 1)
    assert torch.equal(compiled(three), three + 1)
    assert len(compiled.captures().rows) == 2


def test_the_doubled_example_is_given_up_before_it_is_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage of capture costs more than the first, so it runs once."""
    from torch._functorch import aot_autograd

    calls = []
    stage = aot_autograd.aot_export_joint_with_descriptors

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return stage(*args, **kwargs)

    monkeypatch.setattr(aot_autograd, "aot_export_joint_with_descriptors", counted)
    fxround.compile(AloneOrNot(), "identity").prepare(torch.rand(1, 3))
    assert len(calls) == 1


def test_the_table_of_decompositions_is_kept_until_a_library_adds_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = core_decompositions(), core_decompositions()
    assert first == again and first is not again
    made: list[int] = []
    plain = torch._decomp.core_aten_decompositions
    monkeypatch.setattr(torch._decomp, "core_aten_decompositions", lambda: made.append(1) or plain())
    core_decompositions()
    assert not made
    library = torch.library.Library("fxround_tests", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
    assert torch.ops.fxround_tests.twice.default in core_decompositions() and made
    library._destroy()
