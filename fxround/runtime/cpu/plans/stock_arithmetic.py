"""PyTorch's own arithmetic as programs: sums, differences, products and quotients on the CPU are those of IEEE 754.

An operation that a policy leaves alone keeps PyTorch's kernel. For these four, in binary32 and binary64, that kernel
computes the correctly rounded result (IEEE 754-2019, section 5.4.1), and so does a program with the rounding
nearest_even: the bits are the same, except those of a NaN. A program's NaN is always the same one, PyTorch's has the
sign and payload that the processor gives it. Each of the four gives a NaN for a NaN, and so do a change of the sign and
an absolute value, which change that bit alone: no result can differ unless one of them is a NaN. PyTorch's square root
is no fifth one: on a vector, it may be a function of MKL that is off by a bit.
"""

from __future__ import annotations

import re
from typing import Any, Final

import torch
from torch import fx

from fxround.graph.dialect import Pointwise
from fxround.graph.dtypes import FORMAT_OF, literal
from fxround.operators.rules import argument, rule_of

_EXACTLY_ROUNDED: Final = ("add", "sub", "mul", "div")
_OF_SIGNS: Final = ("neg", "abs")
_DTYPES: Final = (torch.float32, torch.float64)


def as_program(node: fx.Node) -> Pointwise[fx.Node] | None:
    """Return the program of a call of PyTorch's arithmetic; None for any other call.

    Tensors of several dtypes, a factor ``alpha`` (which is multiplied without a rounding in between), and sizes as
    operands have no program.
    """
    rule, value = rule_of(node) if node.op == "call_function" else None, node.meta.get("val")
    name = rule.body.partition("(")[0] if rule is not None else ""
    if rule is None or name not in _EXACTLY_ROUNDED + _OF_SIGNS or not isinstance(value, torch.Tensor):
        return None
    if value.dtype not in _DTYPES or value.device.type != "cpu" or _alpha(node) != 1:
        return None
    operands: list[fx.Node] = []
    texts: dict[int, str] = {}
    for position in sorted({int(p) for p in re.findall(r"\{(\d+)\}", rule.body)}):
        operand: Any = node.args[position]
        if isinstance(operand, fx.Node):
            like = operand.meta.get("val")
            if not isinstance(like, torch.Tensor) or like.dtype != value.dtype:
                return None
            if operand not in operands:
                operands.append(operand)
            texts[position] = f"x{operands.index(operand)}"
        else:
            texts[position] = literal(operand, value.dtype)
    text = re.sub(r"\{(\d+)\}", lambda match: texts[int(match[1])], rule.body)
    rounding = "exact" if name in _OF_SIGNS else f"{FORMAT_OF[value.dtype]}/nearest_even/inf"
    # Nothing is drawn: the random state is that of no node.
    return Pointwise(operands, f"t0 = {text} @ {rounding}", value.dtype, node, 0)


def _alpha(node: fx.Node) -> Any:
    """Return the factor of the second operand of a sum or difference; 1 for operations without one."""
    target: Any = node.target
    has = any(declared.name == "alpha" for declared in target._schema.arguments)
    return argument(node, "alpha") if has else 1
