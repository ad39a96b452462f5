"""Localize: planted culprits are found in few runs; searches can be repeated, stopped and continued."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import joblib
import pytest
import torch
from literature import Cramer, LogSumExp, Muller, NaiveLogSumExp, Textbook, Welford, cramer_system, muller_start
from torch import Tensor, nn

import fxround
from fxround.localization.localize import NothingFails, localize
from fxround.localization.masked_model import Masked
from fxround.localization.remedy import remaining
from fxround.localization.report import LocalizeReport
from fxround.localization.shared import Shared
from fxround.localization.verdicts import output_of


class Block(nn.Module):
    """tanh(Wx); a bad block also adds and subtracts numbers that are too large."""

    def __init__(self, bad: bool) -> None:
        super().__init__()
        self.linear, self.offset = nn.Linear(8, 8), 4096.0 if bad else 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return (y + self.offset) - self.offset


def network(*bad: int, blocks: int = 10) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(Block(i in bad) for i in range(blocks)))


X = torch.linspace(-1, 1, 16).reshape(2, 8)


def close(reference: Tensor) -> Callable[[Any], bool]:
    return lambda y: bool((y - reference).abs().max() < 1e-5)


SMALL = network(2, blocks=4)


# At the first use: every process of the suite imports this file, and one runs it.
@cache
def expected() -> Tensor:
    return fxround.compile(SMALL, "reproducible")(X)


def is_close(y: Any) -> bool:
    return close(expected())(y)


@pytest.fixture(scope="module")
def reference() -> Tensor:
    return fxround.compile(network(6), "reproducible")(X)


@pytest.fixture(scope="module")
def small() -> LocalizeReport:
    return localize(SMALL, X, is_close)


def test_the_one_bad_layer_of_ten_is_found_and_the_node_in_it(reference: Tensor) -> None:
    found = localize(network(6), X, close(reference))
    assert [c.modules for c in found.sets] == [("6",)]
    assert [[(s.module, s.operator, s.code) for s in c.sites] for c in found.sets] == [
        [("6", "aten.add.Tensor", "return (y + self.offset) - self.offset")]
    ]
    assert found.ended == "complete" and len(found.passing) == found.sites - 1
    assert found.executed <= 60 and found.sites >= 40  # 2^40 sets; and 40 nodes one by one, five times each
    (site,) = found.sets[0].sites
    assert site.amplifier.startswith("aten.sub.Tensor at test_localize.py:") and site.cancelled >= 9
    assert (int(site.source.partition(":")[2]), "        return (y + self.offset) - self.offset") in site.excerpt
    assert len(found.sets[0].failures) >= 1 and site.node not in found.passing


def test_a_module_is_found_small() -> None:
    found = localize(SMALL, X, is_close, level="modules")
    assert [c.modules for c in found.sets] == [("2",)]
    assert "\n  2 (Block): tanh, add, sub\n" in str(found)


def test_two_bad_layers_are_two_sets() -> None:
    reference = fxround.compile(network(3, 5, blocks=6), "reproducible")(X)
    found = localize(network(3, 5, blocks=6), X, close(reference), level="modules")
    assert sorted(c.modules for c in found.sets) == [("3",), ("5",)]


RULES = [{"rounding": "bfloat16/nearest_even"}]


class Pair(nn.Module):
    """Wrong only if both of two values are."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x / 3, x * 0.7, x + 0.3


def test_a_set_may_need_two_members() -> None:
    x = torch.tensor([1.0, 1.1])
    quiet = fxround.compile(Pair(), "reproducible")(x)
    found = localize(
        Pair(), x, lambda y: bool(torch.equal(y[0], quiet[0]) or torch.equal(y[2], quiet[2])), {"rules": RULES}
    )
    assert [[s.operator for s in c.sites] for c in found.sets] == [["aten.div.Tensor", "aten.add.Tensor"]]
    assert found.runs == 1 and not found.random and found.overlooked == 0.0


class OneBad(nn.Module):
    """An offset in element 5 of twenty elements."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "offset", torch.zeros(4, 5).index_put((torch.tensor(1), torch.tensor(0)), torch.tensor(1e4))
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.offset) - self.offset


def test_the_element_is_found() -> None:
    x = torch.full((4, 5), 0.3179)
    found = localize(OneBad(), x, min_bits=10, level="elements")
    assert [[(s.operator, s.elements, s.shape) for s in c.sites] for c in found.sets] == [
        [("aten.add.Tensor", ((5, 6),), (4, 5))]
    ]
    assert "elements 5 (1 of a result of shape [4, 5], row-major)" in str(found)


# ---- the literature's cases ----


DATA = 1000 + torch.rand(12, generator=torch.Generator().manual_seed(1))


def test_the_textbook_variance_is_lost_in_what_its_difference_amplifies() -> None:
    found = localize(Textbook(), DATA, min_bits=6)
    sites = [s for c in found.sets for s in c.sites]
    assert sites and {s.operator for s in sites} <= {
        "aten.sum.default",
        "aten.sum.dim_IntList",
        "aten.mul.Tensor",
        "aten.div.Tensor",
    }
    assert all(s.amplifier.startswith("aten.sub.Tensor") and s.cancelled >= 12 for s in sites)
    with pytest.raises(
        NothingFails, match=r"passes in 5 runs with all \d+ sites on \(policy 'stochastic'\) \(\d+\.\d+ bits"
    ):
        localize(Welford(), DATA, min_bits=6)


def finite(y: Tensor) -> bool:
    return bool(y.isfinite().all())


@pytest.mark.parametrize("x, culprits", [(12.0, {"exp", "sum"}), (10.5, {"sum"})])
def test_a_naive_log_sum_exp_overflows_in_the_exp_or_the_sum(x: float, culprits: set[str]) -> None:
    inputs = torch.full((4,), x)
    found = localize(NaiveLogSumExp(), inputs, finite, "binary16")
    assert all(len(c.sites) == 1 for c in found.sets)
    assert {c.sites[0].operator.split(".")[1] for c in found.sets} == culprits
    stopped = localize(NaiveLogSumExp(), inputs, finite, "binary16", limit=1)
    assert stopped.sets == found.sets[:1]
    assert stopped.ended == ("limit" if len(culprits) > 1 else "complete")
    assert set(_names(found)) - set(_names(stopped)) <= set(stopped.narrowed)
    with pytest.raises(NothingFails, match="passes in 1 run with all"):
        localize(LogSumExp(), inputs, finite, "binary16")


def test_the_first_steps_of_mullers_recurrence_are_to_blame() -> None:
    start = muller_start(torch.float64)
    found = localize(Muller(12), start, min_bits=22, limit=3)
    order = [*_names(found), *found.passing, *found.narrowed]
    masked = fxround.compile(Muller(12), "stochastic", example_inputs=start).summary()
    steps = [row["node"] for row in masked]
    assert len(set(order)) <= len(steps) and found.sets
    assert max(steps.index(name) for name in _names(found)) < len(steps) / 2


def test_cramers_rule_loses_its_bits_in_products_before_a_difference() -> None:
    found = localize(Cramer(), cramer_system(), min_bits=30)
    sites = [s for c in found.sets for s in c.sites]
    assert sites and {s.operator for s in sites} == {"aten.mul.Tensor"}
    assert all(s.amplifier.startswith("aten.sub.Tensor") and s.cancelled >= 20 for s in sites)


# ---- and what to do about it ----


@pytest.mark.parametrize("policy", ["stochastic", "binary16"])
def test_a_remedy_is_a_policy_under_which_the_check_passes(policy: str) -> None:
    if policy == "stochastic":
        model, inputs, options = SMALL, X, {"check": is_close}
    else:
        model, inputs, options = NaiveLogSumExp(), torch.full((4,), 12.0), {"check": finite}
    found = localize(model, inputs, policy=policy, **options)
    assert found.remedied and "With report.remedy, a policy that rounds what is to blame as reproducible does" in str(
        found
    )
    cured = fxround.compile(model, found.remedy, fuse=False)
    assert all(options["check"](cured.reseed(0, sample=i)(inputs)) for i in range(5))
    masked = Masked(model, policy, inputs)
    on = remaining(masked, fxround.Policy.parse(found.remedy))
    assert set(on) <= set(found.passing)
    assert torch.equal(masked.run(on, sample=3), cured.reseed(0, sample=3)(inputs))


def test_weights_are_given_back_by_their_role() -> None:
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1 + 2.0**-9)
    found = localize(model, torch.ones(2, 4), min_bits=11, policy="bfloat16")
    assert {(rule.get("role"), rule["rounding"]) for rule in found.remedy["rules"] if not rule.get("operator")} >= {
        ("weight", "identity")
    }
    assert found.remedied


# ---- again, and on ----


def _names(found: Any) -> list[str]:
    return [s.node for c in found.sets for s in c.sites]


def without_counts(found: Any) -> dict[str, Any]:
    return {k: v for k, v in found.to_dict().items() if k not in ("executed", "recalled")}


def test_the_same_seed_gives_the_same_answer_and_a_cache_no_run_but_the_first_two(
    small: LocalizeReport, tmp_path: Path
) -> None:
    first, again = (localize(SMALL, X, is_close, cache=tmp_path) for _ in range(2))
    assert without_counts(first) == without_counts(again) == without_counts(small)
    assert first.executed == small.executed and first.recalled == 0
    assert again.executed == 2 and again.recalled == first.executed - 2


class Impatient:
    """A check that presses Ctrl-C at its n-th call."""

    def __init__(self, check: Callable[[Any], bool], calls: int) -> None:
        self.check, self.calls = check, calls

    def __call__(self, y: Any) -> bool:
        self.calls -= 1
        if self.calls == 0:
            raise KeyboardInterrupt
        return self.check(y)

    def __repr__(self) -> str:
        return "Impatient"


def test_an_interrupted_search_reports_and_goes_on_where_it_was(small: LocalizeReport, tmp_path: Path) -> None:
    stopped = localize(SMALL, X, Impatient(is_close, 9), cache=tmp_path)
    assert stopped.ended == "interrupted" and stopped.executed == 8 and not stopped.passing
    assert set(_names(small)) <= set(stopped.narrowed) and len(stopped.narrowed) < stopped.sites
    assert f"Interrupted: a further set is to be found among {len(stopped.narrowed)} of 20 sites, in " in str(stopped)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text() + '{"on": "3', encoding="utf-8")  # a line that the interruption cut off
    resumed = localize(SMALL, X, Impatient(is_close, 0), cache=tmp_path)
    assert without_counts(resumed) == without_counts(small)
    assert resumed.executed == small.executed - 8 + 2


def test_a_check_that_changed_its_mind_is_noticed(tmp_path: Path) -> None:
    localize(SMALL, X, Impatient(is_close, 0), cache=tmp_path)
    with pytest.raises(ValueError, match="says that this check passed before, and now it does not"):
        localize(SMALL, X, Impatient(close(expected() + 1), 0), cache=tmp_path)


# ---- mistakes and reports ----


def test_a_check_must_pass_with_everything_off() -> None:
    with pytest.raises(ValueError, match="fails with every site off"):
        localize(SMALL, X, lambda y: False)
    with pytest.raises(ValueError, match=r"fails with every site off .*\(0 bits, at least 8 asked\)"):
        localize(SMALL, X, min_bits=8, reference=torch.zeros(2, 8))
    for check, bits in ((("relative_error", math.nan), None), (None, math.nan)):
        with pytest.raises(ValueError, match="is nan"):
            localize(SMALL, X, check, min_bits=bits)


def test_a_model_that_draws_by_itself_is_said_to() -> None:
    noisy = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).train()
    with pytest.raises(ValueError, match=r"model draws random bits of its own \(.*\): call model\.eval\(\)") as caught:
        localize(noisy, X, ("relative_error", 1e-3))
    assert "(0, at most 0.001 asked)" not in str(caught.value)
    with pytest.raises(ValueError, match=r"The model is in training mode: call model\.eval\(\) first"):
        localize(network(blocks=2).train(), X, lambda y: False)
    with pytest.raises(ValueError, match=r"is not the cause\. Loosen the check"):
        localize(network(blocks=2).eval(), X, lambda y: False)


def test_metrics_and_references_are_checks_too(small: LocalizeReport) -> None:
    def worst(y: Tensor, r: Tensor) -> Tensor:
        return (y - r).abs().max()

    assert _names(localize(SMALL, X, (worst, "<= 1e-5"))) == _names(small)
    assert _names(localize(SMALL, X, ("sqnr", 80))) == _names(small)
    with pytest.raises(ValueError, match="no metric is named 'sqrn'"):
        localize(SMALL, X, ("sqrn", 80))
    with pytest.raises(NothingFails, match=r"at most 1 asked"):
        localize(SMALL, X, (worst, "<= 1"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "a check is needed, in one of three forms"),
        ({"check": finite, "min_bits": 3}, "a check is needed, in one of three forms"),
        ({"check": 3}, "expected a function of the output"),
        ({"check": lambda y: y[0]}, "check returned Tensor"),
        ({"check": finite, "level": "lines"}, "level is 'lines'; expected one of modules, nodes, elements"),
        ({"check": finite, "runs": 0}, "runs is 0; expected a whole number of at least 1"),
        ({"check": finite, "runs": 1.5}, "runs is 1.5; expected a whole number of at least 1"),
        ({"check": finite, "limit": True}, "limit is True; expected a whole number of at least 1"),
        ({"check": finite, "progress": 3}, "progress is 3; expected True, False or None"),
    ],
)
def test_mistakes_are_reported(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        localize(Pair(), X, **arguments)


@pytest.mark.parametrize(
    "reference, error, message",
    [
        (torch.zeros(8), ValueError, r"reference for output has shape \(8,\); expected that of all results together"),
        (torch.zeros(3, 8), ValueError, r"reference for output has shape \(3, 8\)"),
        (torch.zeros(2, 8).long(), ValueError, "has dtype torch.int64; expected floating point, as the result"),
        ((X, X), ValueError, "reference has 2 tensors to compare, and the results have 1"),
        ("binary64", TypeError, "reference is 'binary64'; expected None, or a tensor shaped like the results"),
        (3, TypeError, "reference is 3; expected None, or a tensor shaped like the results"),
    ],
)
def test_a_reference_has_the_shape_of_the_result(reference: Any, error: Any, message: str) -> None:
    for check, bits in ((("relative_error", 5.0), None), (None, 8)):
        with pytest.raises(error, match=message):
            localize(SMALL, X, check, min_bits=bits, reference=reference)


def test_a_function_takes_any_reference() -> None:
    with pytest.raises(NothingFails):
        localize(SMALL, X, (lambda y, limit: float(y.abs().max() > limit), "<= 0.5"), reference=3)


def test_a_report_is_data_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    found = localize(SMALL, X, is_close, progress=True)
    data = json.loads(found.to_json())
    assert data["sets"][0]["sites"][0]["module"] == "2" and data["executed"] == found.executed
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"localize: {found.executed}it ") and "1 found, the next is among" in last
    text = str(found)
    assert "Set 1: fails in " in text and "return (y + self.offset) - self.offset" in text
    assert f"The other {len(found.passing)} of {found.sites} sites pass, all of them on." in text
    assert found.to_pandas().to_dict("records") == list(found.table())
    assert [row["module"] for row in found.table()] == ["2"] and "<table" in found._repr_html_()
    assert abs(0.05 - (1 - found.overlooked) ** 5) < 1e-12


class Solved(nn.Module):
    """Numbers that are too large are added and subtracted; then singular values are computed."""

    def forward(self, x: Tensor) -> Tensor:
        y = (x + 4096.0) - 4096.0
        return torch.linalg.svdvals(y)


def test_operations_that_draw_nothing_are_no_sites_and_are_named() -> None:
    quiet = fxround.compile(Solved(), "reproducible", strict=False)(X)
    # Any spread fails.
    found = localize(Solved(), X, lambda y: torch.equal(y, quiet))
    (place,) = found.undrawn
    assert place.startswith("_linalg_svd: aten._linalg_svd.default in the root module at test_localize.py:")
    assert "1 operation of this model draws nothing: _linalg_svd." in str(found)
    assert not any("linalg" in site.operator for culprits in found.sets for site in culprits.sites)
    assert found.to_dict()["undrawn"] == (place,)


# ---- workers ----


def plain() -> nn.Module:
    """A model of torch's own classes, because workers cannot import the test modules by name."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).eval()


class Judge:
    """Passes results near the quiet one, and keeps all that it was asked about."""

    def __init__(self, limit: float) -> None:
        self.quiet = fxround.compile(plain(), "reproducible")(X).detach()
        self.limit, self.seen = limit, list[Tensor]()

    def __call__(self, y: Tensor) -> bool:
        self.seen.append(y)
        return bool((y - self.quiet).abs().max() < self.limit)


def searched(n_jobs: int, **options: Any) -> tuple[dict[str, Any], list[Tensor]]:
    judge = Judge(3e-8 if "policy" not in options else 3e-3)
    return localize(plain(), X, judge, n_jobs=n_jobs, **options).to_dict(), judge.seen


SEARCHES: dict[str, dict[str, Any]] = {
    "elements": {"level": "elements", "runs": 3, "limit": 2},
    "nodes": {"policy": "bfloat16"},
}


@pytest.mark.part("nodes-threading-2", "elements-threading-3")
@pytest.mark.parametrize("backend, jobs", [("threading", 2), ("threading", 3), ("loky", 2)])
@pytest.mark.parametrize("search", SEARCHES)
def test_workers_find_the_same_and_ask_the_check_the_same(backend: str, jobs: int, search: str) -> None:
    alone, asked = searched(1, **SEARCHES[search])
    with joblib.parallel_config(backend=backend):
        found, seen = searched(jobs, **SEARCHES[search])
    assert alone["sets"] and found == alone
    assert len(seen) == len(asked) and all(map(torch.equal, seen, asked))


def test_workers_leave_the_same_cache_and_continue_from_it(tmp_path: Path) -> None:
    def search(jobs: int, cache: str) -> tuple[dict[str, Any], Path]:
        found = localize(plain(), X, min_bits=9, policy="bfloat16", n_jobs=jobs, cache=tmp_path / cache).to_dict()
        (file,) = (tmp_path / cache).iterdir()
        return found, file

    alone, one = search(1, "one")
    with joblib.parallel_config(backend="threading"):
        found, two = search(2, "two")
        assert found == alone and one.read_text() == two.read_text() and one.name == two.name
        two.write_text("".join(one.read_text().splitlines(keepends=True)[:5]))
        continued, _ = search(2, "two")
    assert continued["sets"] == alone["sets"] and one.read_text() == two.read_text()
    # The first two run again.
    assert (continued["executed"], continued["recalled"]) == (alone["executed"] - 3, 3)


def test_dropout_draws_the_same_in_threads() -> None:
    masked = Masked(plain().append(nn.Dropout(0.5)).train(), "stochastic", X)
    runs = [(tuple(masked.sites)[:some], sample, None) for some in (0, 3) for sample in range(6)]
    alone = [output_of(masked, 0, *run) for run in runs]
    with joblib.parallel_config(backend="threading"), Shared(3, masked, 0) as pool:
        assert all(map(torch.equal, pool.outputs(runs), alone))


_LOST: Final = """
import logging, os, signal, sys

import torch
import fxround
from torch import nn

class Fragile(nn.Module):
    def forward(self, x):
        return torch.tanh(x * 0.7) + 0.3

    def __setstate__(self, state):
        super().__setstate__(state)
        if not os.path.exists(sys_argv[1]):
            open(sys_argv[1], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

sys_argv = sys.argv
logging.basicConfig(level=logging.WARNING)
x = torch.linspace(-1, 1, 16)
function = {
    "localize": lambda jobs: fxround.localize(Fragile(), x, min_bits=9, policy="bfloat16", n_jobs=jobs).to_dict(),
    "calibrate": lambda jobs: fxround.calibrate(
        nn.Sequential(Fragile(), nn.Linear(4, 2)), x.view(4, 4), batch_size=2, n_jobs=jobs
    ).to_toml(),
}[sys.argv[2]]
torch.manual_seed(0)
one = function(1)
torch.manual_seed(0)
assert function(2) == one
assert os.path.exists(sys.argv[1])
"""


@pytest.mark.long
@pytest.mark.parametrize("function", ["localize", "calibrate"])
def test_the_work_of_a_worker_that_dies_is_done_again(function: str, tmp_path: Path) -> None:
    ended = run_program(_LOST, str(tmp_path / "mark"), function)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("a worker process died") == 1


_INTERRUPTED: Final = """
import os, signal, threading, time

import torch
import fxround
from torch import nn

torch.manual_seed(0)
net, asked = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)), []
def check(y):
    asked.append(y)
    if len(asked) == 3:  # to the workers as well, as a terminal does, while they run
        threading.Timer(0.1, lambda: os.killpg(0, signal.SIGINT)).start()
    if len(asked) > 3:
        time.sleep(0.05)
    return len(asked) < 3
began = time.monotonic()
report = fxround.localize(net, torch.rand(64, 8), check, n_jobs=2, runs=1000)
print(report.ended)
"""


@pytest.mark.long
def test_ctrl_c_ends_workers_and_gives_a_report() -> None:
    ended = run_program(_INTERRUPTED)
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", "interrupted\n")


def run_program(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(fxround.__file__).parents[1])},
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
    )
