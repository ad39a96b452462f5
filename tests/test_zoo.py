"""Real architectures are captured as one graph, completely rounded and near binary64, with the same bits in every run.

Some of those that ``python -m benchmarks.zoo`` walks, chosen for operators of their own and for small graphs. All run
under "reproducible", fused; every fifth runs node by node too, and under another policy, which take turns.
"""

from __future__ import annotations

import json
import os
import signal
import time
import weakref
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks.zoo.judge import FUSED, POLICIES, Judge
from benchmarks.zoo.page import DOCS, MARK, figures
from benchmarks.zoo.subjects import Example, Subject, images, subjects
from benchmarks.zoo.walk import Limits, alone, read, walk
from fxround.compiler import signature

CHOSEN = [
    "torchvision/mobilenet_v3_small",
    "torchvision/squeezenet1_1",
    "torchvision/swin3d_t",
    "transformers/beit",
    "transformers/bloom",
    "transformers/clip",
    "transformers/codegen",
    "transformers/convbert",
    "transformers/convnext",
    "transformers/deberta-v2",
    "transformers/dpt",
    "transformers/gemma2",
    "transformers/gpt_neo",
    "transformers/llama",
    "transformers/mamba",
    "transformers/mobilebert",
    "transformers/nystromformer",
    "transformers/perceiver",
    "transformers/poolformer",
    "transformers/regnet",
    "transformers/squeezebert",
    "transformers/t5",
    "transformers/wav2vec2",
    "transformers/yoso",
]
# Every fifth under another policy too, in turn, and node by node: each is one more lowering and its kernels.
OTHERS = [policy for policy in POLICIES if policy != FUSED]
TWICE = dict(zip(CHOSEN[2::5], cycle(OTHERS), strict=False))


@pytest.fixture(scope="module")
def known() -> dict[str, Subject]:
    return {subject.title: subject for subject in subjects(["torchvision", "transformers"])}


def test_the_page_says_how_many_are_chosen() -> None:
    assert f"The tests run {len(set(CHOSEN))} of them" in (DOCS / "zoo.md").read_text()


@pytest.mark.part("transformers/llama", "torchvision/squeezenet1_1")
@pytest.mark.parametrize("name", CHOSEN)
def test_an_architecture_keeps_every_promise(known: dict[str, Subject], name: str) -> None:
    policies = (FUSED, TWICE[name]) if name in TWICE else (FUSED,)
    record = Judge(known[name], policies, gradient=False, unfused=name in TWICE).run()
    assert record["outcome"] == "captured", record["reason"]
    # Errors beyond benchmarks.zoo.judge.bound, bits that differ: each is a sentence here.
    assert record["misfits"] == []
    assert "unrounded" not in record
    assert record.get("fused", name not in TWICE) and record["row"] in (True, None)


def _line() -> Example:
    return Example(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (images(2),))


def _dies() -> Example:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def _hangs() -> Example:
    while True:
        time.process_time()


def _fails() -> Example:
    raise RuntimeError("no such file")


def test_a_walk_survives_what_it_meets_and_is_taken_up_again(tmp_path: Path) -> None:
    results, made = tmp_path / "zoo.jsonl", (_line, _dies, _hangs, _fails)
    parade = [Subject("timm", make.__name__, make) for make in made]
    limits = Limits(processor=2, clock=120)
    walk(parade[:2], results, limits, ("identity",), gradient=False)
    walk(parade, results, limits, ("identity",), gradient=False)
    assert len(results.read_text().splitlines()) == 4
    outcomes = {record["name"]: record["outcome"] for record in read(results)}
    assert outcomes["timm/_dies"] == "signal SIGSEGV" and outcomes["timm/_hangs"] == "time"
    assert outcomes["timm/_fails"] == "unbuildable"


def test_a_hang_without_work_ends_by_the_clock() -> None:
    record = alone(Subject("timm", "sleeps", lambda: time.sleep(60)), Limits(10, 5), ("identity",), False)  # type: ignore[arg-type, return-value]
    assert record["outcome"] == "time" and record["stage"] == "build"


def test_wrong_numbers_are_misfits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge can find a misfit."""
    import fxround.module

    run = fxround.module.RoundedModule.forward
    calls: list[Any] = []

    def drifting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return run(self, *args, **kwargs) * (1 + len(calls) / 100)

    monkeypatch.setattr(fxround.module.RoundedModule, "forward", drifting)
    # Classes that were made before have the function of before.
    monkeypatch.setattr(signature, "_CLASSES", weakref.WeakKeyDictionary())
    record = Judge(Subject("timm", "line", _line), (FUSED,), gradient=False).run()
    said = " ".join(record["misfits"])
    for word in ("second call differs", "against binary64", "row alone differs", "fused and node by node differ"):
        assert word in said, record["misfits"]


def test_the_page_says_what_its_table_says() -> None:
    page = (DOCS / "zoo.md").read_text().partition(MARK)[2].strip()
    assert page == figures(json.loads((DOCS / "zoo.json").read_text())).strip()
    assert (DOCS / "zoo.json").stat().st_size < 300_000
