"""A contraction over CUDA tensors and the map after it, as one text.

The threads compute the map for the elements of the contraction that they have (``cpp.contract``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fxround.graph.dialect import Call, Fused
from fxround.graph.dtypes import dtype_of
from fxround.runtime import buffers
from fxround.runtime.cuda.contraction import Following, begun, run_followed
from fxround.runtime.epilogues import CONTRACTION, Followed

# The operators of a map that follows; a longer one has registers of its own.
_LONGEST: Final = 1 << 12


@dataclass(frozen=True)
class FollowedCall:
    """A contraction and the map after it, for inputs of given layouts; spent: those that nothing reaches after it."""

    followed: Followed
    following: Following
    spent: tuple[int, ...]

    def run(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Launch the text and return the results."""
        call = self.followed.call(*inputs)
        operands = [inputs[i] for i in self.followed.operands if i is not None]
        with _named(call, operands):
            product = begun(call)
            assert not isinstance(product, Tensor)
            kept, made = run_followed(product, self.following, operands)
        buffers.release(*(inputs[i] for i in self.spent))
        values = dict(enumerate(made)) | ({} if kept is None else {CONTRACTION: kept})
        return [values[number] for number in self.followed.outside]


@contextmanager
def _named(call: Call[Tensor], operands: Sequence[Tensor]) -> Iterator[None]:
    """Say in an error of the allocator what needed the memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what, read = f"{call.name} and the map after it", [*call.operands, *operands]
        raise buffers.out_of_memory(error, what, read) from error


def plan_followed(followed: Followed, inputs: Sequence[Any], spent: tuple[int, ...]) -> FollowedCall | None:
    """The map as it follows a contraction in its text; None if the graph is to run as it says."""
    call = followed.call(*inputs)
    with _named(call, [inputs[i] for i in followed.operands if i is not None]):
        product = begun(call)
    if isinstance(product, Tensor) or product.is_empty or not followed.one_rng:
        return None
    mapped = followed.map_over(inputs, product.size, dtype_of(product.kernel.result))
    if mapped is None:
        return None
    kernel, operands = mapped
    if len(kernel.body.schedule) > _LONGEST:
        return None
    nodes = followed.map.nodes if isinstance(followed.map, Fused) else (followed.map.node,)
    taken = [i is None for i in followed.operands]
    layouts = [(tuple(x.shape), x.stride()) for x in operands]
    following = Following.of(kernel, layouts, taken, CONTRACTION in followed.outside, nodes)
    return None if following is None else FollowedCall(followed, following, spent)
