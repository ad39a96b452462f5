"""References: what the caller gives for the results of a model to be compared with.

A reference is a tensor, or a structure of tensors as the model returns it. Its floating-point tensors belong to those
of the result in order; other tensors count only where there are no floating-point ones. Example::

    require_reference(reference, "binary64")
    for name, rows in reference_rows(reference, result):
        ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from fxround.errors import shown
from fxround.significance.places import RESULT, results


def require_reference(reference: Any, *names: str) -> None:
    """Raise unless the reference is None, one of the names, or has tensors.

    ValueError for another text, TypeError for anything else.
    """
    if reference is None or (isinstance(reference, str) and reference in names):
        return
    if not _tensors(reference):
        kind = ValueError if isinstance(reference, str) and names else TypeError
        expected = f"{''.join(f'{name!r}, ' for name in names)}None, or a tensor shaped like the results"
        raise kind(f"reference is {shown(reference)}; expected {expected}")


def reference_rows(reference: Any, result: Any, offset: int = 0, *, last: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each tensor of a result, and the rows of the reference that belong to it.

    offset: the position of the result's first row among those of all batches. last: whether no batch follows.

    Raises ValueError if the number of tensors, a shape or a kind of number differs.
    """
    mine, theirs = _tensors(result), _tensors(reference)
    if len(mine) != len(theirs):
        raise ValueError(
            f"reference has {len(theirs)} tensors to compare, and the results have {len(mine)} "
            f"({', '.join(name for name, _ in mine)}): give them in the structure that the model returns"
        )
    for (name, tensor), (_, whole) in zip(mine, theirs, strict=True):
        rows = whole[offset : None if last else offset + tensor.shape[0]] if tensor.dim() and whole.dim() else whole
        if rows.shape != tensor.shape:
            raise ValueError(
                f"reference for {name} has shape {tuple(whole.shape)}; expected that of all results together, and "
                f"those from row {offset} on have {tuple(tensor.shape)}"
            )
        if tensor.is_floating_point() and not whole.is_floating_point():
            raise ValueError(f"reference for {name} has dtype {whole.dtype}; expected floating point, as the result")
        yield name, rows


def _tensors(structure: Any) -> list[tuple[str, Tensor]]:
    """Return the floating-point tensors of a structure with their names; without any, all its tensors."""
    others = [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, Tensor)]
    return list(results(structure)) or [(RESULT, leaf) for leaf in others]
