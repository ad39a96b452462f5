"""Sweeps: each combination is the policy that one would write, and trainings are those of each policy and seed."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround import Policy, PolicyError, Rule
from fxround.module.rounded_module import RoundedModule
from fxround.policy import nvfp4
from fxround.significance.bits import student_half_width
from fxround.tuning.sweep_report import UNROUNDED

X = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(12) % 3


def operands(policy: Policy) -> list[tuple[str | None, str | None, str | None, str]]:
    return [(rule.role, rule.direction, rule.result, rule.operands) for rule in policy.rules if rule.operands]


def test_named_axes_change_formats_modes_and_transforms() -> None:
    axes = {
        "scale": ["e4m3fn", "ue5m3"],
        "tensor": {"absolute": False, "tensor": True},
        "block": [32],
        "hadamard": [None, 16],
        "errors": {"RNE": "nearest_even", "SR": "stochastic"},
    }
    sweep = fxround.sweep("nvfp4", axes)
    assert len(sweep) == 16 and not sweep.dropped and list(sweep.axes["hadamard"]) == ["none", "16"]
    plain = "scale=ue5m3, tensor=tensor, block=32, hadamard=none, errors=RNE"
    form = "scaled(e2m1fn;32,ue5m3,nearest,binary32)"
    assert sweep[plain].name == plain
    nearest, random = f"{form}/nearest_even/saturate", f"{form}/stochastic/saturate"
    assert operands(sweep[plain]) == [(None, None, None, nearest), (None, "backward", None, nearest)]
    full = sweep[plain.replace("none", "16").replace("RNE", "SR")]
    assert operands(full) == [
        (None, None, None, nearest),
        (None, "backward", None, random),
        (None, None, "gradient", f"hadamard(16)+{nearest}"),
        (None, "backward", "gradient", f"hadamard(16)+{random}"),
    ]
    absolute = sweep[plain.replace("tensor=tensor", "tensor=absolute")]
    assert operands(absolute)[0][3] == "scaled(e2m1fn;32,ue5m3,nearest)/nearest_even/saturate"
    others = [rule for rule in Policy.parse("nvfp4").rules if not rule.operands]
    assert [rule for rule in full.rules if not rule.operands] == others
    assert set(sweep.where(scale="ue5m3", hadamard=16)) == {n for n in sweep if "ue5m3" in n and "hadamard=16" in n}
    with pytest.raises(ValueError, match=r"no scale=ue4m3; it has e4m3fn, ue5m3"):
        sweep.where(scale="ue4m3")


def test_the_order_of_axes_does_not_matter() -> None:
    axes = {"errors": ["nearest_even", "stochastic"], "hadamard": [None, 16], "tensor": [False], "scale": ["e8m0fnu"]}
    one = fxround.sweep("nvfp4", axes)
    other = fxround.sweep("nvfp4", dict(reversed(axes.items())))
    assert {policy.rules for policy in one.values()} == {policy.rules for policy in other.values()} and len(one) == 4


def test_the_recipe_is_among_the_combinations_of_its_own_axes() -> None:
    weights = Policy("w", (*Policy.parse("nvfp4").rules, Rule(operator="contraction", role="weight", operands="nvfp4")))
    sweep = fxround.sweep(weights, {"errors": ["stochastic"], "weights": ["16x16"], "hadamard": [16]})
    (policy,) = sweep.values()
    x, y = X, Y
    torch.manual_seed(0)
    model = nn.Linear(16, 3)
    gradients = []
    for one in (policy, nvfp4()):
        model.zero_grad()
        nn.functional.cross_entropy(fxround.compile(model, one, seed=3)(x.repeat(2, 1)), y.repeat(2)).backward()
        gradients.append(model.weight.grad)
    assert torch.equal(*gradients)


def test_elements_and_modes_of_plain_formats() -> None:
    axes = {"element": ["e4m3fn", "e5m2"], "mode": ["stochastic"], "gradient": ["straight_through", "zero_clamped"]}
    sweep = fxround.sweep("e4m3fn/nearest_even/saturate", axes)
    policy = sweep["element=e5m2, mode=stochastic, gradient=zero_clamped"]
    assert all(rule.rounding == "e5m2/stochastic/saturate" and rule.gradient == "zero_clamped" for rule in policy.rules)
    assert policy.rules[0].accumulate == Policy.parse("e5m2").rules[0].accumulate


def test_a_base_may_be_a_function_a_text_or_a_dict() -> None:
    made = fxround.sweep(nvfp4, {"hadamard": [None, 16], "stochastic_errors": [True, False], "scale": ["ue5m3"]})
    wanted = fxround.sweep(nvfp4(hadamard=None, stochastic_errors=False), {"scale": ["ue5m3"]})
    name = "hadamard=none, stochastic_errors=false, scale=ue5m3"
    assert made[name].rules == wanted["scale=ue5m3"].rules and len(made) == 4
    own = {"form": ["e2m1fn"], "size": [16], "mode": ["stochastic"]}
    (text,) = fxround.sweep("scaled({form};{size},e8m0fnu,floor)/{mode}", own).values()
    assert text.rules == Policy.parse("mxfp4:16/stochastic").rules
    source = {"name": "own", "rules": [{"operator": "contraction", "operands": "int{bits}:channel"}]}
    integers = fxround.sweep(source, {"bits": [4, 8], "accumulate": ["binary32"]})
    assert [rules[0][3] for rules in map(operands, integers.values())] == [
        f"{Policy.parse(f'int{bits}:channel').rules[-1].operands}" for bits in (4, 8)
    ]
    assert all(policy.rules[-1].accumulate == "binary32/nearest_even/inf" for policy in integers.values())


def test_rules_make_an_axis_of_ones_own() -> None:
    head = Rule("2", operator="contraction", operands="identity")
    sweep = fxround.sweep("mxfp4", {"head": {"kept": head, "rounded": None}})
    assert sweep["head=kept"].rules == (*Policy.parse("mxfp4").rules, head)
    assert sweep["head=rounded"].rules == Policy.parse("mxfp4").rules


def test_what_no_policy_can_say_is_dropped_with_a_reason() -> None:
    sweep = fxround.sweep("nvfp4", {"scale": ["e4m3fn", "e8m0fnu"], "tensor": [True, False]})
    assert set(sweep.dropped) == {"scale=e8m0fnu, tensor=true"} and "scale of the tensor" in str(sweep)
    twice = fxround.sweep("mxfp4", {"scale": ["e8m0fnu"], "element": {"a": "e2m1fn", "b": "e2m1fn"}})
    assert twice.dropped == {"scale=e8m0fnu, element=b": "the same policy as scale=e8m0fnu, element=a"}
    assert json.loads(twice.to_json())["axes"] == {"scale": ["e8m0fnu"], "element": ["a", "b"]}


@pytest.mark.parametrize(
    "base, axes, error, says",
    [
        ("nvfp4", {}, TypeError, "axes is {}; expected a dict"),
        ("nvfp4", ["scale"], TypeError, "expected a dict"),
        ("nvfp4", {"scale": []}, ValueError, "axis 'scale' has no values"),
        ("nvfp4", {"scale": "ue5m3"}, TypeError, "axis 'scale' is 'ue5m3'; expected a list"),
        ("nvfp4", {"scale": ["ue5m3", "ue5m3"]}, ValueError, "two values 'ue5m3'"),
        ("nvfp4", {"scales": ["ue5m3"]}, ValueError, "no axis is named 'scales'.*scale"),
        ("nvfp4", {"scale": ["ue5m3", "ue5m4"]}, ValueError, "no combination has the value ue5m4: .*ue5m4"),
        ("mxfp4", {"scale": ["e8m0fnu", "e4m3fn"]}, ValueError, "value e4m3fn: floor makes powers of two"),
        ("bfloat16", {"block": [16]}, ValueError, "no scaled format, which block would change"),
        ("mxfp4", {"weights": ["16x16"]}, ValueError, "no rule of its own for weights"),
        ("mxfp4", {"hadamard": [16, 5]}, ValueError, "value 5: "),
        ("mxfp4", {"gradient": ["straight_through", "zero_clamped"]}, ValueError, "rounds operands alone"),
        ("mxfp4", {"errors": ["sideways"]}, ValueError, "no mode is named 'sideways'"),
        ("mxfp4", {"block": ["wide"]}, ValueError, "a block is 'wide'; expected 16"),
        ("fixed(8,4)", {"scale": ["e4m3fn"]}, ValueError, "no scale of a block"),
        ("mxfp{bits}", {"scale": ["e8m0fnu"]}, ValueError, "the base has {bits}, and no axis has this name"),
        ("mxfp5", {"scale": ["e8m0fnu"]}, ValueError, "no policy is named 'mxfp5'"),
        ("mxfp4", {3: ["e8m0fnu"]}, ValueError, "axes has the name 3"),
    ],
)
def test_wrong_axes(base: Any, axes: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        fxround.sweep(base, axes)


def test_compare_takes_a_sweep_and_keeps_what_one_policy_cannot_do() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    missing = Rule("missing", operands="identity")
    sweep = fxround.sweep("mxfp4", {"block": [16, 32], "rest": {"missing": missing, "none": None}})
    report = fxround.compare(model, X, sweep)
    assert [row.name for row in report.policies] == list(sweep)
    for row in report.policies:
        if "missing" in row.name:
            assert row.error.startswith("PolicyError: ") and "matches no operation" in str(report) and not row.complete
        else:
            alone = fxround.compare(model, X, {row.name: row.policy})
            assert row.complete and row.metrics == alone.policies[0].metrics
    with pytest.raises(PolicyError, match="matches no operation"):
        fxround.compare(model, X, dict(sweep))


# ---- trainings ----


def make(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def train(compiled: Any, seed: int) -> dict[str, float]:
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(compiled(X), Y)
        loss.backward()
        optimizer.step()
    return {"loss": float(loss.detach()), "drawn": float(torch.rand(()))}


# With a scale of the tensor, scales of one precision, such as e4m3fn and ue5m3, give the same bits.
AXES = {"scale": ["e4m3fn", "e5m2"], "errors": {"RNE": "nearest_even", "SR": "stochastic"}}


@pytest.fixture(scope="module")
def whole() -> fxround.SweepReport:
    return fxround.sweep("nvfp4", AXES, model=make, train=train, seeds=2)


def figures(report: fxround.SweepReport) -> dict[tuple[str, int], Any]:
    return {(run.name, run.seed): dict(run.values) for run in report.trainings}


def test_each_training_is_that_of_its_policy_and_seed(whole: fxround.SweepReport) -> None:
    state = torch.get_rng_state()
    wanted = [(name, seed) for name in (UNROUNDED, *whole.sweep) for seed in (0, 1)]
    assert [(run.name, run.seed) for run in whole.trainings] == wanted
    for run in whole.trainings[::3]:
        with torch.random.fork_rng():
            torch.manual_seed(run.seed)
            values = train(fxround.compile(make(run.seed), run.policy, seed=run.seed), run.seed)
        assert run.values == values and not run.error and run.seconds > 0
    assert torch.equal(torch.get_rng_state(), state)
    losses = {run.values["loss"] for run in whole.trainings}
    assert len(losses) == len(whole.trainings)  # every policy and seed differs


def test_a_module_is_copied_for_each_training() -> None:
    torch.manual_seed(3)
    model = make(0)
    before = [p.clone() for p in model.parameters()]
    report = fxround.sweep("nvfp4", {"errors": ["nearest_even"]}, model=model, train=train, seeds=1)
    one, two = (run.values["loss"] for run in report.trainings)
    assert one != two and all(map(torch.equal, before, model.parameters()))


def test_workers_train_the_same(whole: fxround.SweepReport) -> None:
    # Processes cannot import a module of the tests by its name.
    own: dict[str, Any] = {"X": X, "Y": Y, "torch": torch, "nn": nn, "__name__": "__main__"}
    exec(compile(TRAINING, "<training>", "exec"), own)
    report = fxround.sweep("nvfp4", AXES, model=own["make"], train=own["train"], seeds=[1], n_jobs=2)
    wanted = {run.name: run.values["loss"] for run in whole.trainings if run.seed == 1}
    assert {run.name: run.values["loss"] for run in report.trainings} == wanted


TRAINING = """
def make(seed):
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))

def train(compiled, seed):
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(compiled(X), Y)
        loss.backward()
        optimizer.step()
    return {"loss": float(loss.detach())}
"""


def test_the_table_has_means_and_intervals(whole: fxround.SweepReport) -> None:
    name = "scale=e5m2, errors=SR"
    values = list(whole.values(name, "loss").values())
    row = next(row for row in whole.table() if (row["scale"], row["errors"]) == ("e5m2", "SR"))
    assert row["loss"] == float(np.mean(values)) and row["±"] is not None and row["runs"] == 2
    # Two values: half of the interval is t(0.975, 1) = 12.706 times half of their distance.
    half = student_half_width(values)
    assert (
        half is not None and abs(half - 12.706204736432095 * abs(values[0] - values[1]) / 2) < 1e-9 * half
    )  # scipy's t
    frame = whole.to_pandas()
    assert len(frame) == 10 and list(frame["loss"]) == [run.values["loss"] for run in whole.trainings]
    assert json.loads(whole.to_json())["seeds"] == [0, 1] and "±" in str(whole)


def test_effects_are_paired_by_everything_else(whole: fxround.SweepReport) -> None:
    def loss(scale: str, errors: str, seed: int) -> float:
        return whole.values(f"scale={scale}, errors={errors}", "loss")[seed]

    rows = {(row["axis"], row["change"]): row for row in whole.effects("loss")}
    seeds = [np.mean([loss("e5m2", e, s) - loss("e4m3fn", e, s) for e in ("RNE", "SR")]) for s in (0, 1)]
    row = rows["scale", "e4m3fn to e5m2"]
    assert row["loss"] == float(np.mean(seeds)) and row["pairs"] == 2
    assert rows["errors", "RNE to SR"]["loss"] == float(
        np.mean([np.mean([loss(x, "SR", s) - loss(x, "RNE", s) for x in ("e4m3fn", "e5m2")]) for s in (0, 1)])
    )
    with pytest.raises(KeyError, match="no metric is named 'lost'; the trainings returned loss, drawn"):
        whole.effects("lost")


def test_a_plot_has_each_policy_at_its_number(whole: fxround.SweepReport, tmp_path: Path) -> None:
    against = {name: float(i) for i, name in enumerate(list(whole.sweep)[:3])}
    (axes,) = whole.plot(against, tmp_path / "p.svg", metric="loss", label="cost").axes
    assert (tmp_path / "p.svg").exists() and axes.get_xlabel().startswith("cost\nNot shown: scale=e5m2, errors=SR")
    means = {name: float(np.mean(list(whole.values(name, "loss").values()))) for name in against}
    lines = [bar.lines[0] for bar in axes.containers]
    places = [(float(x), float(y)) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]
    assert places == [(against[name], means[name]) for name in against]
    best = whole.frontier(against, "loss")
    assert best[0] == next(iter(against)) and len(axes.texts) == len(best)
    for name in against:  # a name is missing only where one with less is as good
        beaten = any(means[other] <= means[name] for other in against if against[other] < against[name])
        assert (name in best) != beaten
    assert whole.frontier(dict.fromkeys(against, 1.0), better="higher") == (max(means, key=means.__getitem__),)
    with pytest.raises(ValueError, match="better is 'more'"):
        whole.frontier(against, better="more")  # type: ignore[arg-type]


def counting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    ran: list[tuple[str, int]] = []
    init: Callable[..., Any] = RoundedModule.__init__

    def noting(self: Any, model: Any, policy: Any, strict: Any, seed: int, *rest: Any, **named: Any) -> None:
        ran.append((policy.name, seed))
        init(self, model, policy, strict, seed, *rest, **named)

    monkeypatch.setattr(RoundedModule, "__init__", noting)
    return ran


def test_a_file_resumes_after_an_interruption(
    whole: fxround.SweepReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ran = tmp_path / "rows.json", counting(monkeypatch)

    def interrupting(compiled: Any, seed: int) -> dict[str, float]:
        if stop and len(ran) == 3:
            signal.raise_signal(signal.SIGINT)
        return train(compiled, seed)

    asked: dict[str, Any] = {"model": make, "train": interrupting, "seeds": 2, "path": path}
    stop = True
    first = fxround.sweep("nvfp4", AXES, **asked)
    assert first.interrupted and len(first.trainings) == 3 and "INTERRUPTED" in str(first)
    held = json.loads(path.read_text())["trainings"]
    assert [(row["name"], row["seed"]) for row in held] == [(run.name, run.seed) for run in first.trainings]
    stop = False
    ran.clear()
    second = fxround.sweep("nvfp4", AXES, **asked)
    assert len(ran) == 7 and figures(second) == figures(whole) and not second.interrupted
    # Further values of an axis train alone; a file of another training is refused.
    ran.clear()
    fxround.sweep("nvfp4", {"scale": ["e5m2", "e4m3fn", "ue5m3"], "errors": {"RNE": "nearest_even"}}, **asked)
    assert {name for name, _ in ran} == {"scale=ue5m3, errors=RNE"}
    with pytest.raises(ValueError, match="sweep with another train"):
        fxround.sweep("nvfp4", AXES, **asked | {"train": train})


def test_a_training_that_raises_or_has_a_nan_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(compiled: Any, seed: int) -> Any:
        if "SR" in compiled.policy.name and seed == 1:
            raise ArithmeticError("diverged")
        return math.nan if compiled.policy.name == "scale=e5m2, errors=RNE" else 1.5

    asked: dict[str, Any] = {"model": make, "train": picky, "seeds": 2, "path": tmp_path / "rows.json"}
    report = fxround.sweep("nvfp4", AXES, **asked)
    said = str(report)
    assert "scale=e4m3fn, errors=SR, seed 1 failed: ArithmeticError: diverged" in said
    assert "scale=e5m2, errors=RNE, seed 0: NaN in result" in said
    assert report.values("scale=e4m3fn, errors=SR", "result") == {0: 1.5}
    assert report.effects().to_dict()["rows"][0]["pairs"] == 0
    ran = counting(monkeypatch)
    fxround.sweep("nvfp4", AXES, **asked)
    assert ran == [("scale=e4m3fn, errors=SR", 1), ("scale=e5m2, errors=SR", 1)]  # what failed runs again
    wrong = fxround.sweep("nvfp4", {"errors": ["stochastic"]}, model=make, train=lambda *_: "good", seeds=1)
    assert "returned a str as 'result'; expected a number" in str(wrong)


@pytest.mark.parametrize(
    "asked, error, says",
    [
        ({"train": 3, "model": make}, TypeError, "train is 3"),
        ({"train": train}, TypeError, r"model is None; expected a torch\.nn\.Module"),
        ({"model": make}, TypeError, "model is given without train"),
        ({"train": train, "model": make, "seeds": 0}, ValueError, "seeds is 0"),
        ({"train": train, "model": make, "seeds": []}, ValueError, "seeds is \\[\\]"),
        ({"train": train, "model": make, "seeds": [1, 1]}, ValueError, "different ones"),
        ({"train": train, "model": make, "seeds": [-1]}, ValueError, "seed"),
        ({"train": train, "model": make, "n_jobs": 0}, ValueError, "n_jobs is 0"),
    ],
)
def test_wrong_arguments_of_trainings(asked: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        fxround.sweep("nvfp4", {"scale": ["e5m2"]}, **asked)


def test_a_model_without_numbers_trains_under_its_name() -> None:
    def one(compiled: Any, seed: int) -> Tensor:
        return torch.tensor([float(seed)])

    report = fxround.sweep("nvfp4", {"scale": ["e5m2"]}, model=make, train=one, seeds=[4])
    assert report.values("scale=e5m2", "result") == {4: 4.0} and report.model == "make"
