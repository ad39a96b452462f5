"""transformers' Trainer and Accelerate train a compiled model with the bits of a plain loop, and resume with them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import hugging_face
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fxround

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

STEPS, SEED, POLICY = 4, 3, "stochastic"
ROW = torch.arange(1, 7)
# The Trainer passes the number of labels, by which the sum of losses is divided.
COUNT = torch.tensor(4.0 * len(ROW))


class Rows(Dataset[dict[str, Tensor]]):
    """Equal rows, so that their order does not matter."""

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": ROW, "labels": ROW}


@pytest.fixture(scope="module")
def compiled() -> Any:
    """A model whose first and last weights are one tensor, compiled; captured once for all tests."""
    transformers = hugging_face()
    special = {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
        "resid_pdrop": 0,
    }
    config = transformers.GPT2Config(
        vocab_size=8, n_embd=8, n_layer=1, n_head=2, n_positions=8, use_cache=False, **special
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return fxround.compile(transformers.GPT2LMHeadModel(config), POLICY, seed=SEED)


def begun(compiled: Any, state: dict[str, Tensor]) -> tuple[Any, Any]:
    """The module with the weights, the seed and the sample that it began with, and a new optimizer."""
    compiled.load_state_dict(state)
    compiled.zero_grad()
    sgd = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
    return compiled, fxround.compile_optimizer(sgd, POLICY)


@pytest.fixture(scope="module")
def state(compiled: Any) -> dict[str, Tensor]:
    """The weights, the seed and the sample before any test."""
    return {name: value.detach().clone() for name, value in compiled.state_dict().items()}


def trained_plainly(compiled: Any, optimizer: Any) -> list[Tensor]:
    ids, labels = ROW.repeat(4, 1), ROW.repeat(4, 1)
    compiled.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        compiled(input_ids=ids, labels=labels, num_items_in_batch=COUNT).loss.backward()
        optimizer.step()
    return parameters_of(compiled)


def parameters_of(compiled: Any) -> list[Tensor]:
    return [p.detach().clone() for p in compiled.parameters()]


def equal(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.long
def test_a_trainer_has_the_bits_of_a_plain_loop_and_resumes_with_them(
    compiled: Any, state: dict[str, Tensor], tmp_path: Path
) -> None:
    transformers = hugging_face()
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        save_steps=2,
        seed=0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    found = []
    for start in (None, str(tmp_path / "checkpoint-2")):
        _, optimizer = begun(compiled, state)
        if start:
            compiled.reseed(9)
        trainer = transformers.Trainer(
            model=compiled, args=settings, train_dataset=Rows(), optimizers=(optimizer, None)
        )
        trainer.train(resume_from_checkpoint=start)
        assert compiled.rng.tolist() == [SEED, STEPS]
        found.append(parameters_of(compiled))
    # The Trainer comes first, so that the graph is captured inside of it.
    wanted = trained_plainly(*begun(compiled, state))
    assert all(equal(each, wanted) for each in found)
    assert len(compiled.captures()) == 1
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    assert equal(saved.parameters(), wanted)


def test_accelerate_has_the_bits_of_a_plain_loop_and_resumes_with_them(
    compiled: Any, state: dict[str, Tensor], tmp_path: Path
) -> None:
    wanted = trained_plainly(*begun(compiled, state))
    accelerator = accelerate.Accelerator(cpu=True)
    for begin in (0, 2):
        _, optimizer = begun(compiled, state)
        model, optimizer, rows = accelerator.prepare(compiled, optimizer, DataLoader(Rows(), batch_size=4))
        assert model is compiled and accelerator.unwrap_model(model) is compiled
        if begin:
            accelerator.load_state(str(tmp_path))
        model.train()
        for i, batch in enumerate(rows):
            if i < begin:
                continue
            if i == 2 and not begin:
                accelerator.save_state(str(tmp_path))
            optimizer.zero_grad()
            accelerator.backward(model(**batch, num_items_in_batch=COUNT).loss)
            optimizer.step()
        assert equal(compiled.parameters(), wanted)
        accelerator.free_memory()
