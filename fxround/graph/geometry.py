"""How the windows of a convolution are placed on its input, and the checks of every number that says so.

A convolution and its two gradients get the sizes of their results here, in the kernels and in their fake counterparts
alike. Kernels make offsets only of numbers that were checked here. Sizes may be symbolic in a graph that is being
traced; there a condition counts only if it certainly fails, and the kernel checks it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

Sizes = Sequence[Any]
# No convolution that fits into memory has larger numbers; within them, sums and products of offsets fit in 64 bits.
_LARGEST: Final = (1 << 31) - 1
_MOST_ELEMENTS: Final = 1 << 46


def surely(condition: Any) -> bool:
    """Whether a condition on sizes certainly holds; False for one on symbolic sizes that may hold or not."""
    if isinstance(condition, bool):
        return condition
    return bool(statically_known_true(condition)) or _guarded(condition)


def _guarded(condition: torch.SymBool) -> bool:
    """Whether a guard says so: PyTorch remembers an answer that it gave before the guard was added."""
    environment = condition.node.shape_env
    return environment is not None and bool(environment.axioms.get(condition.node.expr, False))


def differ(a: Sizes, b: Sizes) -> bool:
    """Whether two lists of sizes certainly differ."""
    return len(a) != len(b) or any(surely(m != n) for m, n in zip(a, b, strict=True))


def broadcast(what: str, *shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that shapes broadcast to; ValueError if they do not."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        listed = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{what}: shapes {listed} do not broadcast") from None


def require_one_dtype(what: str, a: torch.dtype, b: torch.dtype) -> None:
    """Raise TypeError for operands of two dtypes; ``what`` names them in the message."""
    if a != b:
        raise TypeError(f"{what} of {a} and {b}: expected one dtype (cast one of them first)")


@dataclass(frozen=True)
class Geometry:
    """How windows are placed on the input: one number for each spatial dimension, and the number of channel groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @staticmethod
    def of(
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> Geometry:
        """The geometry of an operator's arguments, which are not checked yet."""
        return Geometry(tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)

    def result_size(self, x: Sizes, w: Sizes) -> list[Any]:
        """The sizes [batch, channels, *spatial] of the result for an input and a weight of these sizes.

        Raises ValueError for numbers that describe no convolution, as PyTorch's own operator does.
        """
        dims = len(x) - 2
        if dims not in (1, 2, 3) or len(w) != len(x):
            raise ValueError(f"convolution takes 1 to 3 spatial dimensions, got {tuple(x)} with {tuple(w)}")
        self._require_numbers(dims)
        what = f"convolution of {tuple(x)} with {tuple(w)}"
        if any(surely(n < 0) for n in (*x, *w)) or any(surely(taps < 1) for taps in w[2:]):
            raise ValueError(f"{what}: a kernel has at least one tap in each dimension, and no size is negative")
        expected = w[0] if self.transposed else w[1] * self.groups
        if surely(x[1] != expected) or surely(w[0] % self.groups != 0):
            raise ValueError(f"{what}: channels differ for groups={self.groups}")
        reach = [self.dilation[d] * (w[d + 2] - 1) + 1 for d in range(dims)]
        padded = [x[d + 2] + 2 * self.padding[d] for d in range(dims)]
        spatial = [self._extent(x[d + 2], w[d + 2], d) for d in range(dims)]
        if self.transposed and any(surely(n < 1) for n in spatial):
            raise ValueError(f"{what}: the result would have the size {spatial}; decrease the padding")
        if not self.transposed and any(surely(n < taps) for n, taps in zip(padded, reach, strict=True)):
            raise ValueError(f"{what}: the kernel exceeds the input, {reach} against {padded} with its padding")
        size = [x[0], w[1] * self.groups if self.transposed else w[0], *spatial]
        held = [*spatial, *reach] if self.transposed else padded
        if any(surely(prod((*n[:2], *more)) > _MOST_ELEMENTS) for n in (x, size) for more in (spatial, held)):
            raise ValueError(f"{what}: {size} elements with their padding exceed any memory")
        return size

    def _require_numbers(self, dims: int) -> None:
        """Raise ValueError unless the lists have ``dims`` numbers each, and the numbers are within their limits."""
        lists = {"stride": (self.stride, 1), "padding": (self.padding, 0), "dilation": (self.dilation, 1)}
        if self.transposed:
            lists["output_padding"] = (self.output_padding, 0)
        for name, (values, least) in lists.items():
            if len(values) != dims:
                raise ValueError(f"convolution in {dims} dimensions: {name} needs {dims} values, got {list(values)}")
            if any(surely(v < least) or surely(v > _LARGEST) for v in values):
                raise ValueError(f"convolution: {name} is {list(values)}; expected {least} to {_LARGEST}")
        if surely(self.groups < 1) or surely(self.groups > _LARGEST):
            raise ValueError(f"convolution: groups is {self.groups}; expected 1 to {_LARGEST}")
        if self.transposed:
            for more, s, d in zip(self.output_padding, self.stride, self.dilation, strict=True):
                if surely(more >= s) and surely(more >= d):
                    raise ValueError(
                        f"convolution: output_padding is {list(self.output_padding)}; expected less than the stride "
                        f"{list(self.stride)} or the dilation {list(self.dilation)} in each dimension"
                    )

    def require_gradient(self, grad: Sizes, x: Sizes, w: Sizes) -> None:
        """Raise ValueError unless ``grad`` has the size of the result for an input and a weight of these sizes."""
        expected = self.result_size(x, w)
        if differ(grad, expected):
            raise ValueError(
                f"convolution of {tuple(x)} with {tuple(w)}: its gradient is {tuple(grad)}, expected {tuple(expected)}"
            )

    def _extent(self, size: Any, taps: Any, d: int) -> Any:
        """The size of the result in spatial dimension d."""
        reach = self.dilation[d] * (taps - 1)
        if self.transposed:
            return (size - 1) * self.stride[d] - 2 * self.padding[d] + reach + self.output_padding[d] + 1
        return (size + 2 * self.padding[d] - reach - 1) // self.stride[d] + 1

    def plain(self) -> Geometry:
        """The same windows for a convolution that is not transposed."""
        return Geometry(self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups)

    def reversed_for(self, x: Sizes, w: Sizes) -> Geometry:
        """The transposed convolution from a plain one's result back to an input of size ``x``."""
        none = (0,) * len(self.stride)
        back = Geometry(self.stride, self.padding, self.dilation, True, none, self.groups)
        reached = [self._extent(size, w[d + 2], d) for d, size in enumerate(x[2:])]
        again = [back._extent(size, w[d + 2], d) for d, size in enumerate(reached)]
        extra = tuple(size - other for size, other in zip(x[2:], again, strict=True))
        return Geometry(self.stride, self.padding, self.dilation, True, extra, self.groups)


# The same for sizes that are numbers, remembered.
result_size: Final = lru_cache(maxsize=1024)(Geometry.result_size)
require_gradient: Final = lru_cache(maxsize=1024)(Geometry.require_gradient)
