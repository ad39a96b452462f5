"""Reports do not depend on where the samples were computed: this process, threads, processes, or a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import joblib
import pytest
import torch
from torch import nn

import fxround


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """A model of torch's own classes, because workers cannot import the test modules by name."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).eval()


X = torch.rand(9, 6, generator=torch.Generator().manual_seed(2))
OPTIONS: dict[str, Any] = {"samples": 7, "capture": "layers", "batch_size": 5, "metrics": ("sqnr", "label_flips")}


def found(report: fxround.VariabilityReport) -> dict[str, Any]:
    data = report.to_dict()
    del data["provenance"]
    return data


@pytest.fixture(scope="module")
def alone(net: nn.Module) -> dict[str, Any]:
    return found(fxround.variability(net, X, **OPTIONS))


def test_processes_give_the_same_report(net: nn.Module, alone: dict[str, Any]) -> None:
    assert found(fxround.variability(net, X, n_jobs=2, **OPTIONS)) == alone


def test_threads_give_the_same_report(net: nn.Module, alone: dict[str, Any]) -> None:
    with joblib.parallel_config(backend="threading"):
        assert found(fxround.variability(net, X, n_jobs=2, **OPTIONS)) == alone


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed", reason="the extra 'distributed' is not installed")
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as local,
        distributed.Client(local) as client,
    ):
        yield client


def test_a_dask_cluster_gives_the_same_report(net: nn.Module, alone: dict[str, Any], cluster: Any) -> None:
    with joblib.parallel_config(backend="dask"):
        report = fxround.variability(net, X, n_jobs=-1, **OPTIONS)
    assert found(report) == alone


def test_adaptive_sampling_stops_at_the_same_sample(net: nn.Module) -> None:
    options = OPTIONS | {"samples": "auto", "tolerance": 0.2, "reference": None, "capture": "outputs"}
    one = fxround.variability(net, X, **options)
    two = fxround.variability(net, X, n_jobs=2, **options)
    assert found(one) == found(two)
    assert one.adaptive is not None and one.adaptive.reached


def test_an_error_in_a_worker_is_the_models_own(net: nn.Module) -> None:
    with pytest.raises(TypeError, match="forward"):
        fxround.variability(net, (X, X), n_jobs=2, samples=5)
