"""Kernels with operands at inaccessible pages, and operators with corrupted arguments, in child processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import guard_pages
import pytest
from guarded_kernels import KINDS


@pytest.mark.part("once")
@pytest.mark.parametrize("cases", [len(KINDS), 2 * len(KINDS)], ids=["once", "twice"])
def test_no_kernel_leaves_its_operands(cases: int) -> None:
    """Every kind of kernel, odd sizes, any strides, each instruction set; more: tests/support/guarded_kernels.py."""
    assert guard_pages.survive("guarded_kernels.py", [], cases) == []


def test_an_operator_refuses_corrupted_arguments_or_agrees_with_its_fake() -> None:
    """More: tests/support/operator_fuzz.py --cases 100000."""
    assert guard_pages.survive("operator_fuzz.py", [], 300) == []


def test_one_element_too_far_ends_the_process() -> None:
    command = [sys.executable, str(Path(guard_pages.__file__).parent / "guarded_kernels.py"), "--too-far"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert child.returncode < 0, child.stderr
    assert child.stdout.startswith("CASE 0")
