"""Reports do not depend on where the samples were computed: this process, threads, processes, or a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import joblib
import pytest
import torch
from torch import nn

import fxround
from fxround.errors import FxroundError
from fxround.significance import stopping
from fxround.significance.workers import Pool


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """A model of torch's own classes, because workers cannot import the test modules by name."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).eval()


X = torch.rand(9, 6, generator=torch.Generator().manual_seed(2))
OPTIONS: dict[str, Any] = {"samples": 7, "capture": "layers", "batch_size": 5, "metrics": ("sqnr", "label_flips")}


@pytest.fixture
def cheap_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are worth their start, whatever a sample takes."""
    monkeypatch.setattr("fxround.significance.study.STARTING", 0.0)


def found(report: fxround.VariabilityReport) -> dict[str, Any]:
    data = report.to_dict()
    del data["provenance"]
    return data


@pytest.fixture(scope="module")
def alone(net: nn.Module) -> dict[str, Any]:
    return found(fxround.variability(net, X, **OPTIONS))


@pytest.mark.usefixtures("cheap_workers")
def test_processes_give_the_same_report(net: nn.Module, alone: dict[str, Any]) -> None:
    assert found(fxround.variability(net, X, n_jobs=2, **OPTIONS)) == alone


def test_a_worker_leaves_ctrl_c_to_its_parent() -> None:
    # A process that is started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Pool(2) as pool:
            (ignored,) = pool.ordered(lambda: signal.getsignal(signal.SIGINT) == signal.SIG_IGN, [()])
        assert ignored and signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("cheap_workers")
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


@pytest.mark.usefixtures("cheap_workers")
def test_a_dask_cluster_gives_the_same_report(net: nn.Module, alone: dict[str, Any], cluster: Any) -> None:
    with joblib.parallel_config(backend="dask"):
        report = fxround.variability(net, X, n_jobs=-1, **OPTIONS)
    assert found(report) == alone


@pytest.mark.usefixtures("cheap_workers")
def test_adaptive_sampling_stops_at_the_same_sample(net: nn.Module) -> None:
    options = OPTIONS | {"samples": "auto", "tolerance": 0.2, "reference": None, "capture": "outputs"}
    one = fxround.variability(net, X, **options)
    two = fxround.variability(net, X, n_jobs=2, **options)
    assert found(one) == found(two)
    assert one.adaptive is not None and one.adaptive.reached


def test_an_error_in_a_worker_is_the_models_own(net: nn.Module) -> None:
    with pytest.raises(TypeError, match="forward"):
        fxround.variability(net, (X, X), n_jobs=2, samples=5)


def test_samples_shorter_than_the_start_of_workers_stay_here_with_a_warning(
    net: nn.Module, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxround.significance.study.STARTING", float("inf"))
    with pytest.warns(UserWarning, match="starts no workers: the 12 samples that remain") as said:
        report = fxround.variability(net, X, n_jobs=2, **OPTIONS)
    assert found(report) == alone
    assert [warning.filename for warning in said] == [__file__]


@pytest.mark.usefixtures("cheap_workers")
def test_samples_worth_their_workers_give_no_warning(net: nn.Module) -> None:
    with joblib.parallel_config(backend="threading"), warnings.catch_warnings():
        warnings.simplefilter("error")
        fxround.variability(net, X, n_jobs=2, **OPTIONS)


# Alone, the third sample gets the signal; with workers, these get it while they start.
_INTERRUPTED: Final = """
import os, signal, sys, threading, time

import torch
import fxround
from fxround.significance import study

jobs = int(sys.argv[1])
study.STARTING = 0.0
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).eval()
if jobs == 1:
    taken, seen = study.Study._take, []
    def take(self, batch, stream):
        seen.append(1)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return taken(self, batch, stream)
    study.Study._take = take
else:
    # As a terminal does: to the workers as well, before they have imported anything.
    signal_sent = threading.Thread(target=lambda: (time.sleep(1), os.killpg(0, signal.SIGINT)))
    study.Study._pays = lambda self, seconds: (signal_sent.start(), True)[1]
report = fxround.variability(net, torch.rand(9, 6), samples=1000, n_jobs=jobs, reference="binary64")
print(report.samples, report.complete, report.outputs[0].bits is not None, sorted(report.outputs[0].agreement))
print(report.heading.partition("INTERRUPTED")[1])
"""


@pytest.mark.parametrize("jobs, taken", [(1, 3), (2, 2)])
def test_ctrl_c_ends_a_process_with_a_report(jobs: int, taken: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, str(jobs)],
        env={**os.environ, "PYTHONPATH": str(Path(fxround.__file__).parents[1])},
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"({taken},) False True ['unperturbed']\nINTERRUPTED\n"


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_backend_that_would_wait_forever_is_refused(net: nn.Module) -> None:
    with joblib.parallel_config(backend="multiprocessing"), pytest.raises(ValueError, match="is 'multiprocessing'"):
        fxround.calibrate(net, X, n_jobs=2)


def test_workers_that_die_again_are_an_error_that_says_so() -> None:
    with Pool(2) as pool, pytest.raises(FxroundError, match=r"died twice, of 2.*fewer workers by n_jobs"):
        list(pool.ordered(_die, [(), ()]))


def test_what_a_lost_worker_had_to_do_is_done_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def work(number: int, mark: str) -> int:
        if number == 2 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with Pool(2) as pool:
        assert list(pool.ordered(work, [(i, str(tmp_path / "mark")) for i in range(5)])) == [0, 1, 2, 3, 4]
    assert [record.levelname for record in caplog.records if "a worker process died" in record.getMessage()] == [
        "WARNING"
    ]


def test_processes_of_workers_start_out_of_reach_of_ctrl_c() -> None:
    with stopping.interruptible() as stopped:
        with stopping.workers():
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
            with pytest.raises(stopping.Stopped):
                _interrupted_in_a_wait()
        child.send_signal(signal.SIGINT)
        assert stopped() and child.wait() == 0


def _interrupted_in_a_wait() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(2000):
        time.sleep(0.01)
