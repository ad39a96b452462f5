"""Results that are ``torch.Size``: pytree flattens them, and makes tuples of their numbers again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return ``tree_map_only(Tensor, function, value)``, with each ``torch.Size`` of the value."""
    return with_sizes(pytree.tree_map_only(Tensor, function, value), pytree.tree_structure(value))


def with_sizes(value: Any, spec: pytree.TreeSpec) -> Any:
    """Return what ``tree_unflatten`` made, with a ``torch.Size`` wherever the structure has one."""
    if spec.type is torch.Size:
        return torch.Size(value)
    if not has_sizes(spec):
        return value
    parts, one = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    return pytree.tree_unflatten(list(map(with_sizes, parts, spec.children())), one)


def has_sizes(spec: pytree.TreeSpec) -> bool:
    """Whether there is a ``torch.Size`` in a structure."""
    return spec.type is torch.Size or any(map(has_sizes, spec.children()))
