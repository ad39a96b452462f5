"""What every run shares: the same numbers for the same test, no state left behind, and four options.

**Draws.** Before a test, a fixture that tests share, and the import of a file, the generators of torch, NumPy and
random are seeded from its name, so that a test draws the same numbers alone, after others, and in every run of a
commit. Hypothesis draws from the test's own source. ``--seed N`` gives every test other numbers (``./run explore``).
PyTorch has two threads, whatever the machine has, which wait without spinning. A test that leaves a setting of the
process changed fails.

**Order.** ``--shuffle N`` runs the files, and the tests of each file, in an order drawn from N.

**``--long``**: every case. Without it, a test marked ``part(n)`` runs each n-th of its cases, one marked
``part("a", "b")`` those of these names, one marked ``part(without=("a", "b"))`` the others, and one marked ``long``
none; where ``--seed`` is given, a part of the same size is drawn from it. A command that names a test
(``file::test``) runs all its cases. The summary says how many were left.

**``--quick``**: an answer in two minutes. The core test of every file runs first, in its first case, then further
tests in their first cases, file by file in turn, until the time is over. The core tests always run; the rest of the
suite is deselected or skipped by name, and the summary says how much was run: a quick run is no substitute for the
suite.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

# OpenMP reads it when PyTorch is loaded. The processes of xdist have more threads than there are cores: one that spins
# takes the time of one that computes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import numpy as np
import pytest
import torch

# PyTorch writes a record of every guard and graph of a capture, with stacks, for each handler of this logger. pytest
# gives handlers to all loggers that do not propagate, which took a seventh of a capture's time, and kept every record.
logging.getLogger("torch.__trace").propagate = True
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
    "runtime/test_guard_pages": "test_one_element_too_far_ends_the_process",
    "numerics/test_elementary_binary": "test_random_pairs_and_hard_cases_are_correctly_rounded",
    "test_random_models": "test_the_judge_sees_a_fault",
    "numerics/test_rounding": "test_boundaries",
}
# Of PyTorch, in every test.
_THREADS: Final = 2
_SEED: Final = pytest.StashKey[int]()
_SETTINGS: Final = pytest.StashKey[dict[str, Any]]()
# The memory of a process of tests, which takes 4 GB at most: more is an error where it is asked for, not a machine
# without memory.
_MEMORY: Final = 10 << 30
# Among the many, one of each context that replaces some.
_REPLACED: Final = (
    ("torch.fx.experimental.sym_node", "SymNode", "_mul"),
    ("torch.fx.experimental.symbolic_shapes", "ShapeEnv", "__init__"),
    ("torch._subclasses.functional_tensor", "FunctionalTensor", "__new__"),
    ("torch._subclasses.fake_tensor", "FakeTensorConverter", "from_real_tensor"),
)
# How many cases are left to --long.
_LEFT: Final = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="every case: also those that marks part and long leave out")
    parser.addoption("--quick", action="store_true", help="two minutes: the core of every file, then what time allows")
    parser.addoption("--seed", type=int, default=0, help="every test draws other numbers; 0: those of every run")
    parser.addoption("--shuffle", type=int, help="run files, and the tests of each, in an order drawn from this number")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SEED] = config.getoption("--seed")
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY if most == resource.RLIM_INFINITY else min(_MEMORY, most), most))
    config.stash[_LEFT] = 0
    config.addinivalue_line("markers", "part(n, or names of cases, or without=names): what a run without --long takes")
    config.addinivalue_line("markers", "long: only a run with --long takes the test, or the case")
    # Neither load nor an earlier run decides: no deadline, no database. too_slow is a time as well.
    hypothesis.settings.register_profile(
        "fixed",
        derandomize=not config.stash[_SEED],
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=(hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture),
    )
    hypothesis.settings.load_profile("fixed")
    if config.stash[_SEED]:
        hypothesis.core.global_force_seed = config.stash[_SEED]
    # The processes of xdist are started later, and inherit it.
    if config.getoption("--quick"):
        os.environ.setdefault(_STARTED, str(time.time()))


def _draw_from(config: pytest.Config, name: str) -> None:
    """Seed every generator of the process from a name."""
    number = int.from_bytes(hashlib.sha256(f"{config.stash[_SEED]} {name}".encode()).digest()[:4], "little")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.File):
        _draw_from(collector.config, collector.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    """A fixture that several tests share draws from its own name, not from that of the test which comes first."""
    if fixturedef.scope == "function":
        return (yield)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    _draw_from(request.config, f"{fixturedef.baseid}::{fixturedef.argname} {getattr(request, 'param', '')}")
    try:
        return (yield)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _settings() -> dict[str, Any]:
    """What a test may change for a while, and must give back."""
    # Before its first capture a process has not loaded all of these classes.
    owners = [(owner, name, getattr(sys.modules.get(module), owner, None)) for module, owner, name in _REPLACED]
    return {
        **{f"{owner}.{name}": getattr(loaded, name) for owner, name, loaded in owners if loaded is not None},
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "switches of kernels": [
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled,
            torch.backends.mha.get_fastpath_enabled(),
        ],
        "global hooks of modules": len(torch.nn.modules.module._global_forward_hooks),
        "os.environ": {name: value for name, value in os.environ.items() if name.startswith("FXROUND")},
    }


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    before, after = item.stash.get(_SETTINGS, {}), _settings()
    left = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not left, f"the test leaves settings changed, each as before and after: {left}"


def _shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    chosen, files = random.Random(seed), {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    chosen.shuffle(groups)
    for group in groups:
        chosen.shuffle(group)
    return [item for group in groups for item in group]


def _part(cases: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """What a run without ``--long`` takes of the cases of one test."""
    cases = [case for case in cases if not case.get_closest_marker("long")]
    if not cases:
        return []
    mark = cases[0].get_closest_marker("part")
    if mark is None:
        return cases
    if mark.args and isinstance(mark.args[0], int):
        part = cases[:: mark.args[0]]
    else:
        without = mark.kwargs.get("without", ())
        names = {item.name.partition("[")[2].removesuffix("]"): item for item in cases}
        if unknown := {*mark.args, *without} - {*names}:
            raise pytest.UsageError(f"{cases[0].nodeid}: part() names {sorted(unknown)}; the cases are {[*names]}")
        part = [item for name, item in names.items() if name in (mark.args or {*names} - {*without})]
    return random.Random(f"{seed} {cases[0].nodeid}").sample(cases, len(part)) if seed else part


def _leave(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is left to ``--long``."""
    names = [argument.split("::") for argument in config.args if "::" in argument]
    named = {(Path(file).resolve(), test[-1].split("[")[0]) for file, *test in names}
    tests: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        tests.setdefault((item.path, item.name.split("[")[0]), []).append(item)
    taken = {
        item
        for test, cases in tests.items()
        for item in (cases if test in named else _part(cases, config.stash[_SEED]))
    }
    left = [item for item in items if item not in taken]
    config.stash[_LEFT] = len(left)
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item in taken]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        _leave(config, items)
    if config.getoption("--shuffle") is not None:
        items[:] = _shuffled(items, config.getoption("--shuffle"))
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
    torch.set_num_threads(_THREADS)
    item.stash[_SETTINGS] = _settings()
    _draw_from(item.config, item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # A process of xdist: it collects, and another one prints.
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left to --long"] = session.config.stash[_LEFT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # Every process has collected the same.
    node.config.stash[_LEFT] = getattr(node, "workeroutput", {}).get("left to --long", 0) or node.config.stash[_LEFT]


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    yield
    if cases := terminalreporter.config.stash[_LEFT]:
        terminalreporter.write_line(f"{cases} cases were left to --long")
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
