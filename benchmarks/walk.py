"""Write a softmax and a convolution, from capture to machine code, into docs/design.md: ``python -m benchmarks.walk``.

Each text is what the code holds at that stage. In LLVM's texts registers are numbered anew and the elements of a
constant vector are left out after the first; the code is that for AVX2, which processors with other instructions can
be asked for too (``fxround.instruction_set``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import fxround
from fxround import Policy, Rule
from fxround.numerics.arithmetic.scalar import Function
from fxround.runtime.cpu import code
from fxround.runtime.cpu.llvm.contract import build_contract
from fxround.runtime.cpu.llvm.map import build_map
from fxround.views.graph_views import graph_text

DOCUMENT = Path(__file__).parents[1] / "docs" / "design.md"
ISA = "avx2"
NARROW = Policy("narrow", (Rule(rounding="bfloat16", accumulate="binary32"),))


def texts() -> dict[str, str]:
    """Return the texts of both walks by name."""
    return _softmax() | _convolution()


def _softmax() -> dict[str, str]:
    stages, built = _compiled(nn.Softmax(-1), torch.rand(8, 32), "reproducible")
    kernel, llvm = next((k, t) for build, k, t in built if build is build_map and "fdiv" in k.kernel.body.text())
    lines = llvm.splitlines()
    first = next(i for i, line in enumerate(lines) if " = fdiv <16 x float>" in line)
    last = next(i for i in range(first, len(lines)) if "store <16 x float>" in lines[i])
    stages["kernel"], stages["llvm"] = _body(kernel.kernel.body), _shortened(lines[first - 4 : last + 1])
    return {f"softmax {stage}": text for stage, text in stages.items()}


def _convolution() -> dict[str, str]:
    stages, built = _compiled(nn.Conv2d(4, 8, 3), torch.rand(2, 4, 16, 16), NARROW)
    # Nothing follows that could be fused: the fused graph is the lowered one.
    del stages["fused"]
    variant, llvm = next((k, t) for build, k, t in built if build is build_contract)
    stages["kernel"] = f"{_body(variant.kernel.step)}\n{_body(variant.kernel.finish)}"
    lines = llvm.splitlines()
    step = next(i for i, line in enumerate(lines) if "@llvm.fma" in line.replace('"', ""))
    first = next(i for i in range(step, len(lines)) if " = lshr <8 x i32>" in lines[i])
    stages["llvm step"] = _shortened(lines[step - 4 : step + 2])
    stages["llvm finish"] = _shortened(lines[first - 3 : first + 8])
    return {f"convolution {stage}": text for stage, text in stages.items()}


def _compiled(model: nn.Module, x: Tensor, policy: str | Policy) -> tuple[dict[str, str], list[tuple[Any, Any, str]]]:
    """Return the graphs of a model by stage, and (builder, subject, LLVM text) of each kernel that a call compiles."""
    with torch.no_grad(), fxround.instruction_set(ISA), _building() as built:
        compiled = fxround.compile(model.eval(), policy)
        compiled(x)
    entry = compiled._called()
    assert entry is not None
    graphs = {"captured": entry.captured.graph, "lowered": entry.lowered, "fused": entry.fused}
    return {stage: _sized(graph_text(graph)) for stage, graph in graphs.items()}, built


@contextmanager
def _building() -> Iterator[list[tuple[Any, Any, str]]]:
    """Record what is built within the block, where nothing counts as compiled yet."""
    built: list[tuple[Any, Any, str]] = []
    address = code._address

    def recorded(digest: str, build: Any, subject: Any, name: str, isa: str) -> int:
        built.append((build, subject, build(subject)))
        return address(digest, build, subject, name, isa)

    with patch.object(code, "_CODE", {}), patch.object(code, "_address", recorded):
        yield built


def _body(function: Function) -> str:
    return function.text().rstrip()


def _sized(text: str) -> str:
    """Return a graph's text with n for PyTorch's name of a size, and without the inputs."""
    lines = [line for line in re.sub(r"\bs\d+\b", "n", text).splitlines() if " = " not in line or "(" in line]
    return "\n".join(line.removeprefix("  ") for line in lines if not line.startswith("#"))


def _shortened(lines: list[str]) -> str:
    """Return lines of LLVM with registers numbered from 1 and constant vectors of one repeated element cut."""
    numbers: dict[str, str] = {}
    text = re.sub(r'%"\.\d+"', lambda m: numbers.setdefault(m[0], f"%{len(numbers) + 1}"), "\n".join(lines))
    text = re.sub(r"<(\w+ -?[\w.]+)(?:, \1)+>", r"<\1, ...>", text)
    return "\n".join(line.strip() for line in text.replace('@"', "@").replace('"(', "(").splitlines())


def written(document: str) -> str:
    """Return the document with the block of code after each mark ``<!-- walk: NAME -->`` replaced.

    Raises ValueError for a text without a mark, and for a mark without a text.
    """
    blocks = texts()
    marks = re.findall(r"<!-- walk: (.*?) -->", document)
    if sorted(marks) != sorted(blocks):
        raise ValueError(f"the document has marks for {sorted(marks)}; the texts are {sorted(blocks)}")
    block = re.compile(r"(<!-- walk: (.*?) -->\n\n```text\n).*?(\n```)", re.DOTALL)
    return block.sub(lambda m: m[1] + blocks[m[2]] + m[3], document)


def main() -> None:
    """Write the walks into docs/design.md."""
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    print(DOCUMENT)


if __name__ == "__main__":
    main()
