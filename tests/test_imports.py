"""What is imported when: nothing that takes seconds before it is used."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

import pytest
from import_graph import imports_at_once, modules

import fxround
from fxround import new_process

# What takes most of the time of a full import, and what only some extras have.
HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "llvmlite", "networkx", "sympy", "matplotlib",
         "pandas", "rich", "joblib", "sklearn", "scipy", "numba", "IPython")  # fmt: skip
LOADED = "import json, sys\n{}\nprint(json.dumps(sorted(sys.modules)))"


def loaded(code: str) -> set[str]:
    """The modules that are loaded after the code has run in a process of its own."""
    ended = new_process.run(LOADED.format(code))
    assert ended.returncode == 0, ended.stderr
    return set(json.loads(ended.stdout.splitlines()[-1]))


def test_the_package_adds_nothing_heavy_to_torch() -> None:
    added = loaded("import torch, fxround") - loaded("import torch")
    assert "fxround" in added
    assert not [name for name in HEAVY if any(m == name or m.startswith(f"{name}.") for m in added)]
    assert sorted(name for name in added if name.startswith("fxround")) == [
        "fxround",
        "fxround.deferred_operators",
        "fxround.interrupts",
        "fxround.version",
    ]


@pytest.mark.parametrize(
    "arguments, status",
    [
        (["--help"], 0),
        (["--version"], 0),
        (["variability", "--help"], 0),
        (["tune", "--help"], 0),
        (["doctor", "--help"], 0),
        ([], 2),
        (["nonsense"], 2),
        (["localize", "net.py:build"], 2),
        (["invariance", "net.py:build", "--dim", "x"], 2),
    ],
)
def test_the_command_reads_its_arguments_without_torch(arguments: Sequence[str], status: int) -> None:
    """-X importtime lists on standard error what a process imports, also of one that ends while it parses."""
    started = [sys.executable, "-X", "importtime", "-m", "fxround", *arguments]
    ended = subprocess.run(started, capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stderr
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time")}
    assert "fxround.cli.tune" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "numpy", *HEAVY)}


def test_names_are_shown_before_they_are_imported() -> None:
    code = "import fxround\nassert {*fxround.__all__, 'compile', 'round', 'hash'} <= set(dir(fxround))"
    assert "fxround.module" not in loaded(code)


def test_formats_are_there_without_the_compiler() -> None:
    modules = loaded("import fxround\nassert fxround.formats['bfloat16'] is fxround.Format.parse('bfloat16')")
    assert "fxround.numerics.formats" in modules and "fxround.module" not in modules


def test_a_part_of_the_package_needs_no_import_of_its_own() -> None:
    code = "import fxround\nassert fxround.training.RoundedOptimizer is fxround.RoundedOptimizer"
    assert "fxround.training" in loaded(code)


def test_an_unknown_name_is_an_attribute_error() -> None:
    code = """
import fxround
for name in ("nonsense", "_nonsense", "__wrapped__"):
    try:
        getattr(fxround, name)
    except AttributeError as error:
        assert str(error) == f"module 'fxround' has no attribute {name!r}", error
    else:
        raise SystemExit("no error")
"""
    loaded(code)


def test_operators_of_exported_programs_are_found_with_the_package_alone() -> None:
    code = """
import torch, fxround
assert not hasattr(torch.ops.fxround, "nonsense")
x = torch.ones(3)
rounded = torch.ops.fxround.round_tensor(x, "bfloat16/nearest_even/inf", 0, 0, "straight_through", 0, None)
assert rounded.tolist() == [1, 1, 1]
assert str(torch.ops.fxround.marked.default) == "fxround.marked.default"
assert "matmul" in dir(torch.ops.fxround)
"""
    loaded(code)


def test_torch_compile_knows_the_backend_without_an_import() -> None:
    """The entry point is read from the installed package; the code is that of this checkout."""
    code = """
import torch
assert not [name for name in sys.modules if name.startswith("fxround")]
model = torch.compile(lambda x: x / 3, backend="fxround", options={"policy": "bfloat16"})
assert model(torch.tensor([1.0])).item() == 0.333984375  # 171 / 512, the bfloat16 next to a third
"""
    assert "fxround.compiler.torch_backend" in loaded(code)


def test_an_untested_torch_is_refused_at_the_first_use_and_not_before() -> None:
    code = """
import torch
torch.__version__ = "2.10.0"
import fxround
from fxround.compiler import torch_version
torch_version._probed = lambda version: "no answer"
try:
    fxround.compile(torch.nn.Linear(2, 2), "bfloat16")(torch.ones(1, 2))
except fxround.CaptureError as error:
    assert str(error) == torch_version.standing_of("2.10.0").reason, error
else:
    raise SystemExit("no error")
"""
    loaded(code)


def test_what_runs_kernels_has_the_operators_with_what_it_imports() -> None:
    """Otherwise it would work in a process that has compiled a model, and in no other."""
    computing = {home for home in _homes() if "runtime.run" in _loaded_by(home)}
    without = {home for home in computing if "runtime.torch_ops" not in _loaded_by(home)}
    assert "eager.round" in computing
    assert without == {"selftests"}  # which calls kernels alone


def test_the_first_call_of_a_process_may_round_in_blocks() -> None:
    code = """
import torch, fxround
assert fxround.round(torch.full((2, 16), 3.3), "nvfp4").unique().numel() == 1
"""
    assert "fxround.module.rounded_module" not in loaded(code)


def _homes() -> set[str]:
    """The modules that define the public names, below ``fxround``."""
    return {home.removeprefix("fxround.") for home, _ in fxround._homes().values()}


@cache
def _loaded_by(name: str) -> frozenset[str]:
    """The modules that are loaded when one is: it, the packages around it, and what they import at their top level."""
    loaded, left = set[str](), [name]
    while left:
        name = left.pop()
        if name in modules() and name not in loaded:
            loaded.add(name)
            left += [name.rpartition(".")[0], *imports_at_once(modules()[name])]
    return frozenset(loaded)
