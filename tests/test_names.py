"""The names of the package: those that a star import defines, and those that need ``fxround.``."""

from __future__ import annotations

import builtins
from typing import Any

import fxround
import fxround.training


def test_a_star_import_leaves_the_builtins_alone() -> None:
    namespace: dict[str, Any] = {}
    exec("from fxround import *", namespace)
    assert not [name for name in namespace if hasattr(builtins, name) and name != "__builtins__"]
    assert namespace["Policy"] is fxround.Policy and namespace["perturb"] is fxround.perturb
    assert eval("round(2.5), compile('1', '', 'eval'), hash(1)", namespace)[0] == 2


def test_every_name_of_all_is_there_once_and_the_three_others_go_by_their_full_names() -> None:
    assert sorted(set(fxround.__all__)) == sorted(fxround.__all__)
    assert all(hasattr(fxround, name) for name in fxround.__all__)
    for name in ("compile", "round", "hash"):
        assert getattr(fxround, name).__module__.startswith("fxround.")
    assert fxround.compile_optimizer is fxround.training.compile_optimizer
