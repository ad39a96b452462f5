"""``pytest --quick``: an answer in two minutes.

The core test of every file runs first, in its first case, then further tests in their first cases, file by file in
turn, until the time is over. The core tests always run; the rest of the suite is deselected or skipped by name,
and the summary says how much was run: a quick run is no substitute for the suite.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import pytest

# When no further test begins: the last ones end within the two minutes.
_SECONDS: Final = 90
_STARTED: Final = "FXROUND_QUICK_STARTED"
_FOLDER: Final = Path(__file__).parent
_PLACE: Final = pytest.StashKey[int]()
# The core test of a file, where that is not its first one: the first is a check of tables, or takes long.
CORES: Final = {
    "cli/test_cli": "test_inspect_prints_summary_and_coverage",
    "training/test_distributed": "test_sums_are_rounded_as_the_policy_says",
    "numerics/test_formats": "test_magnitudes_are_the_values_of_all_codes",
    "operators/test_formulas": "test_a_formula_computes_its_operator",
    "numerics/test_elementary_unary": "test_every_16_bit_input_is_rounded_once",
    "runtime/test_guards": "test_one_element_too_far_ends_the_process",
    "numerics/test_elementary_binary": "test_random_pairs_and_hard_cases_are_correctly_rounded",
    "test_random_models": "test_the_judge_sees_a_fault",
    "numerics/test_rounding": "test_boundaries",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="two minutes: the core of every file, then what time allows")


def pytest_configure(config: pytest.Config) -> None:
    # The processes of xdist are started later, and inherit it.
    if config.getoption("--quick"):
        os.environ.setdefault(_STARTED, str(time.time()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    files: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        name = item.path.relative_to(_FOLDER).with_suffix("").as_posix()
        files.setdefault(name, {}).setdefault(getattr(item, "originalname", item.name), item)
    turns = zip_longest(*(_core_first(name, tests) for name, tests in files.items()))
    chosen = []
    for place, turn in enumerate(turns):
        for item in turn:
            if item is not None:
                item.stash[_PLACE] = place
                chosen.append(item)
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def _core_first(name: str, tests: dict[str, pytest.Item]) -> Sequence[pytest.Item]:
    core = CORES.get(name)
    # A run of chosen tests alone (-k, file::test) may leave the core out.
    return sorted(tests.values(), key=lambda item: getattr(item, "originalname", item.name) != core)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    # PyTorch and the tests live as long as the process: the search for garbage cycles need not walk them again.
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.stash.get(_PLACE, 0) and time.time() - float(os.environ[_STARTED]) > _SECONDS:
        pytest.skip("the time of --quick is over")


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    yield
    if terminalreporter.config.getoption("--quick"):
        done, left = (len(terminalreporter.stats.get(name, ())) for name in ("passed", "skipped"))
        terminalreporter.write_line(
            f"--quick: {done} tests in their first cases; {left} more would follow in their turn"
        )


@pytest.fixture(scope="session")
def compiler() -> str:
    """The C++ compiler that compiles the texts of a GPU for the host. ``.ci/run`` fails where there is none."""
    # tests/support is not on the path where this file is copied alone (test_quick.py).
    import host_gpu

    if not host_gpu.COMPILER:
        pytest.skip("no C++ compiler: install g++ to run the CUDA texts on the host")
    return host_gpu.COMPILER
