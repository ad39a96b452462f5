"""Caches of keys and values (transformers' ``DynamicCache`` and ``StaticCache``) as plain tuples of tensors.

A cache is a Python object that a model changes, so that no graph can hold it. An exported program takes the tensors of
a cache as an argument and returns those of the changed cache. This module converts in both directions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fxround.errors import shown, type_of

# The module that defines caches.
CACHES: Final = "transformers.cache_utils"
# For each layer its keys and values, and for a layer of a fixed size the number of its positions that are in use.
CacheTensors = tuple[tuple[Tensor, ...], ...]


@dataclass(frozen=True)
class CacheLayer:
    """What a program needs to know of a layer of a cache, whose keys are [batch, heads, positions, key_width].

    room: the positions of a layer of a fixed size, which is changed in place; 0 for a layer that grows.
    """

    heads: int
    key_width: int
    value_width: int
    dtype: str
    room: int

    def __post_init__(self) -> None:
        """Raise ValueError for sizes below zero, or no dtype."""
        if min(self.heads, self.key_width, self.value_width, self.room) < 0:
            raise ValueError(f"a layer of a cache has sizes below zero: {self}")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"a layer of a cache has the dtype {shown(self.dtype)}, which is none")

    @staticmethod
    def of(layer: Any) -> CacheLayer:
        """Return the description of a layer that holds tensors."""
        _, heads, positions, width = layer.keys.shape
        room = positions if _is_static(layer) else 0
        return CacheLayer(heads, width, layer.values.shape[3], str(layer.keys.dtype).removeprefix("torch."), room)

    def made(self) -> Any:
        """Return a new layer without tensors."""
        kinds = _kinds()
        return kinds.StaticLayer(self.room) if self.room else kinds.DynamicLayer()

    def initialize(self, layer: Any, batch: int, device: torch.device) -> None:
        """Give a layer the tensors that it has before the first text: for a layer that grows, of no positions."""
        dtype, widths = getattr(torch, self.dtype), (self.key_width, self.value_width)
        keys, values = (torch.zeros(batch, self.heads, 0, width, dtype=dtype, device=device) for width in widths)
        layer.lazy_initialization(keys, values)
        if not self.room:
            layer.keys, layer.values = keys, values


def is_cache(value: Any) -> bool:
    """Whether a value is one of transformers' caches."""
    kinds = _kinds()
    return kinds is not None and isinstance(value, kinds.Cache | kinds.EncoderDecoderCache)


def layers_of(cache: Any) -> tuple[CacheLayer, ...]:
    """Return the descriptions of a cache's layers. Raises TypeError for layers without a form as tensors, or none."""
    kinds = _kinds()
    layers = getattr(cache, "layers", None)
    other = [cache] if layers is None else [x for x in layers if type(x) not in (kinds.DynamicLayer, kinds.StaticLayer)]
    if other:
        raise TypeError(
            f"the example holds {type_of(other[0])}, and a program takes caches of DynamicLayer and StaticLayer alone: "
            "export a module that takes tensors and makes the cache of them"
        )
    if not layers or not all(layer.is_initialized for layer in layers):
        raise TypeError(
            f"the example's {type(cache).__name__} is empty, so that its heads and widths are not known: call the "
            "compiled module with it, and then export"
        )
    return tuple(map(CacheLayer.of, layers))


def tensors_of(cache: Any) -> CacheTensors:
    """Return the tensors of a cache whose layers hold some."""
    return tuple((x.keys, x.values, x.cumulative_length) if _is_static(x) else (x.keys, x.values) for x in cache.layers)


def cache_of(tensors: CacheTensors, layers: Sequence[CacheLayer], dynamic: bool) -> Any:
    """Return a cache of tensors, which are copied where the cache would change them in place.

    dynamic: whether it is a ``DynamicCache``.
    """
    made = []
    for (keys, values, *length), described in zip(tensors, layers, strict=True):
        layer = described.made()
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layer.keys, layer.values = keys, values
        if described.room:
            layer.keys, layer.values, layer.cumulative_length = keys.clone(), values.clone(), length[0].clone()
            layer.batch_size, layer.num_heads = keys.shape[:2]
            layer.k_head_dim, layer.v_head_dim = described.key_width, described.value_width
        made.append(layer)
    kinds = _kinds()
    cache = kinds.DynamicCache() if dynamic else kinds.Cache(layers=made)
    cache.layers = made
    return cache


def require_layers(cache: Any, layers: Sequence[CacheLayer], batch: int, device: torch.device) -> None:
    """Initialize the layers of a cache that no call has filled. Raises ValueError for a cache of other layers."""
    if not cache.layers:
        cache.layers += [described.made() for described in layers]
    if len(cache.layers) != len(layers):
        raise ValueError(f"the cache has {len(cache.layers)} layers; the program was exported for {len(layers)}")
    for index, (layer, described) in enumerate(zip(cache.layers, layers, strict=True)):
        if type(layer) is not type(described.made()):
            raise ValueError(
                f"layer {index} of the cache is {type_of(layer)}; the program was exported for {described}"
            )
        if not layer.is_initialized:
            described.initialize(layer, batch, device)
        if CacheLayer.of(layer) != described:
            own = CacheLayer.of(layer)
            raise ValueError(f"layer {index} of the cache is {own}; the program was exported for {described}")


def put(cache: Any, tensors: CacheTensors) -> None:
    """Change a cache as the model's call would: a layer of a fixed size in place."""
    for layer, (keys, values, *length) in zip(cache.layers, tensors, strict=True):
        if not length:
            layer.keys, layer.values = keys, values
            continue
        for held, new in ((layer.keys, keys), (layer.values, values), (layer.cumulative_length, length[0])):
            held.copy_(new)


def _is_static(layer: Any) -> bool:
    return isinstance(layer, _kinds().StaticLayer)


def _kinds() -> Any:
    """Return transformers' module of caches, None if it is not imported."""
    return sys.modules.get(CACHES)
