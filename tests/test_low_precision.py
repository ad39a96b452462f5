"""The experiment in 8 bits: its policies are those of its table, a seed determines a training, and results are kept."""

from __future__ import annotations

import pytest
import torch

import fxround
from benchmarks.low_precision import MASTERS, SCHEMES, Data, Results, Scheme, Trainer, rows, trainings


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(Scheme("SR", "8", "SR"), Data.load())


def test_every_scheme_has_a_policy_and_a_name_of_its_own() -> None:
    assert len({scheme.name for scheme in SCHEMES}) == len({str(scheme.policy) for scheme in SCHEMES}) == 11


def test_a_training_is_a_function_of_its_seed_and_needs_one_graph(trainer: Trainer) -> None:
    found = []
    for seed in (1, 2, 1):
        accuracy = trainer.train(seed, 1)
        weights = torch.cat([p.detach().flatten() for p in trainer.net.parameters()])
        found.append((accuracy, fxround.hash(weights)))
        assert torch.equal(weights, fxround.round(weights, MASTERS["8"])), "held in 8 bits"
    assert found[0] == found[2] and found[0] != found[1]
    assert len(trainer.compiled.captures().rows) == 2  # training, whose last batch is shorter, and testing


def test_what_is_done_is_not_done_again() -> None:
    kept: Results = {scheme.name: [0.5, 0.75] for scheme in SCHEMES}
    assert list(trainings(kept, 2, 1)) == []
    assert next(iter(rows(kept))) == ("32 bits", "32 bits", "62.5", "50.0", "75.0", "17.7", "2")
    del kept[SCHEMES[0].name]
    assert next(trainings(kept, 2, 1)) == (SCHEMES[0], 0)
