"""Whole models: identity keeps the captured graph's bits; stochastic rounds everything, reproducibly, in a file too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from models import ZOO, build, unfused
from torch import Tensor

import fxround
from fxround.compiler.executable import Entry
from fxround.compiler.torch_backend import rounding_backend
from fxround.runtime import buffers


class Case:
    """One model of the zoo, captured once."""

    def __init__(self, name: str) -> None:
        self.name, self.example = name, build(name)
        self.inputs = (self.example.args, self.example.kwargs)
        self.stochastic = fxround.compile(self.example.model, "stochastic", example_inputs=self.inputs, seed=3)

    def run(self, module: Any) -> Tensor:
        with torch.no_grad():
            return self.example.result(module(*self.example.args, **self.example.kwargs))


@pytest.fixture(scope="module", params=list(ZOO))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.mark.part("digits_cnn", "unet", "recurrent")
def test_identity_gives_the_bits_of_the_captured_graph(case: Case) -> None:
    compiled = case.stochastic.with_policy("identity")
    result = case.run(compiled)
    entry = compiled._called()
    assert isinstance(entry, Entry)
    with torch.no_grad():
        eager = entry.captured.graph(*entry._inputs(pytree.tree_leaves(case.inputs)))
    kept = [value for value, port in zip(eager, entry.captured.outputs, strict=True) if not port.mutation]
    assert torch.equal(result, case.example.result(pytree.tree_unflatten(kept, entry.captured.out_spec)))


@pytest.mark.part("digits_cnn", "unet", "recurrent")
def test_the_captured_graph_computes_the_model(case: Case) -> None:
    # A tolerance: formulas order their operations differently from the stock kernels.
    torch.testing.assert_close(case.run(case.stochastic), case.run(case.example.model), rtol=1e-4, atol=1e-5)


# bert and vit have the layers of gpt2 and encoder.
@pytest.mark.part(without=("bert", "vit"))
def test_no_float_operation_is_left_unrounded(case: Case) -> None:
    assert case.stochastic.coverage().unrounded == ()


@pytest.mark.part("digits_cnn", "unet", "recurrent")
def test_fusion_changes_no_bit(case: Case) -> None:
    compiled = unfused(case.stochastic)
    assert compiled._called().fused is compiled._called().lowered
    assert torch.equal(case.run(compiled), case.run(case.stochastic))


@pytest.mark.part(without=("bert", "vit"))
def test_a_second_run_and_one_thread_give_the_same_bits(case: Case) -> None:
    first = case.run(case.stochastic)
    assert torch.equal(case.run(case.stochastic), first)
    threads = torch.get_num_threads()
    for count in (1, 2):
        try:
            torch.set_num_threads(count)
            assert torch.equal(case.run(case.stochastic), first)
        finally:
            torch.set_num_threads(threads)
    assert not torch.equal(case.run(case.stochastic.reseed(3, sample=1)), first)
    assert torch.equal(case.run(case.stochastic.reseed(3)), first)


@pytest.mark.part(without=("bert", "vit"))
def test_no_kernel_uses_memory_that_is_not_its_own(case: Case) -> None:
    want = case.run(case.stochastic)
    with buffers.guarded():
        assert torch.equal(case.run(case.stochastic), want)


# A convolution and a transformer of PyTorch's, loops, and a model that asks whether it is exported: the rest of
# compile and export knows no other model, and tests/module tries it on modules of a few operations.
@pytest.mark.part("unet")
@pytest.mark.parametrize("case", ["unet", "recurrent", "encoder", "vit"], indirect=True)
def test_torch_compile_gives_the_same_bits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.name == "vit":  # transformers makes it an attention mask of ones where it is told that it is exported
        monkeypatch.setattr("transformers.masking_utils.is_torchdynamo_exporting", lambda: True)
    torch._dynamo.reset()
    options = {"policy": "stochastic", "seed": 3}
    module = torch.compile(case.example.model, backend=rounding_backend, options=options, fullgraph=True)
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        # fxround.compile does this by itself.
        torch.backends.mha.set_fastpath_enabled(False)
        with torch._dynamo.config.patch(allow_rnn=True):
            assert torch.equal(case.run(module), case.run(case.stochastic))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@pytest.mark.part(without=("bert",))
@pytest.mark.parametrize("case", ["unet", "recurrent", "bert"], indirect=True)
def test_an_exported_file_gives_the_same_bits(case: Case, tmp_path: Path) -> None:
    path = case.stochastic.export(tmp_path / "model.pt2", case.inputs)
    assert torch.equal(case.run(fxround.load(path)), case.run(case.stochastic))


@pytest.mark.part("unet", "digits_cnn")
@pytest.mark.parametrize("name", ["digits_cnn", "unet", "recurrent", "vit"])
def test_nothing_of_a_training_step_is_left_to_a_stock_kernel(name: str) -> None:
    """Strict: an operation of the forward or the backward without a kernel would raise."""
    example = build(name)
    compiled = fxround.compile(example.model.train(), "reproducible")
    with buffers.guarded():
        example.result(compiled(*example.args, **example.kwargs)).square().sum().backward()
    assert compiled.coverage().unrounded == ()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in example.model.parameters())
