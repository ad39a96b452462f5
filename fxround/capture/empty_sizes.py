"""Conditions on sizes that data decide, which hold for every data where no size of an argument is 0.

A mask leaves an unknown number of rows, u, and a model asks whether u and the n rows of an argument are none at all,
``u + n == 0``. PyTorch refuses such a question, because u is data. It is answered for every u if n is at least 1, which
``Sizes`` requires of a size that is not 0 in the example.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def asked_of_data() -> Iterator[None]:
    """Answer conditions that hold for all data if sizes of arguments that are not 0 in the example are never 0."""
    from torch.fx.experimental import symbolic_shapes
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    evaluate, files = ShapeEnv._evaluate_expr, symbolic_shapes.uninteresting_files() | {__file__}

    def evaluated(self: Any, condition: Any, *rest: Any, **settings: Any) -> Any:
        try:
            return evaluate(self, condition, *rest, **settings)
        except GuardOnDataDependentSymNode:
            answer = _if_none_is_empty(self, condition)
            if answer is None:
                raise
            return answer

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ShapeEnv, "_evaluate_expr", evaluated))
        # An error names the line that asked: PyTorch leaves the files out that only pass the question on.
        stack.enter_context(mock.patch.object(symbolic_shapes, "uninteresting_files", return_value=files))
        yield


def _if_none_is_empty(environment: Any, condition: Any) -> Any:
    """Return the answer that follows if no size of an argument that is not 0 in the example is 0 in a call.

    None if data decide it even then.
    """
    from torch.utils._sympy.value_ranges import ValueRanges

    known, sizes = environment.var_to_range, environment.backed_var_to_val
    present = [s for s in known if s.is_positive and sizes.get(s, 0) >= 1 and known[s].lower < 1]
    ranges = {**known, **{s: ValueRanges(1, known[s].upper) for s in present}}
    return environment._maybe_evaluate_static(condition, var_to_range=tuple(ranges.items()))
