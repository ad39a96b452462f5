"""The models of timm: the smallest member of every file of models, on small images."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from benchmarks.zoo.subjects import Example, Subject, Unbuildable
from benchmarks.zoo.subjects import images as pictures

# Smaller images and fewer layers are tried first; a model that accepts only its own sizes gets those.
SIZES = (64, 96, 128, 224)
FEWER: tuple[dict[str, Any], ...] = ({"depth": 2}, {"depths": (1, 1, 1, 1)}, {"layers": (1, 1, 1, 1)}, {})


def _built(name: str) -> Callable[[], Example]:
    def make() -> Example:
        import timm

        first: Exception | None = None
        for size in SIZES:
            for options in [{"img_size": size, **fewer} for fewer in FEWER] + list(FEWER):
                try:
                    model = timm.create_model(name, num_classes=10, **options).eval()
                    with torch.no_grad():
                        model(pictures(size))
                except Exception as e:  # a model may raise anything for a size that it does not accept
                    first = first or e
                    continue
                return Example(model, (pictures(size),))
        raise Unbuildable(f"no size of {SIZES} is taken: {first}")

    return make


@cache
def members() -> dict[str, list[str]]:
    """Return the models of timm by the file that defines them."""
    import timm
    from timm.models import _registry

    named: dict[str, list[str]] = {}
    for name in timm.list_models():
        named.setdefault(_registry._model_to_module[name], []).append(name)
    return named


_WORDS = "test zepto atto femto pico nano xxt xxs _xt tiny _t xs mini small _s"
SMALL = _WORDS.split()


def smallest(names: list[str]) -> str:
    """Return the member whose name says that it is the smallest; many files of timm have a tiny member for tests."""

    def size(name: str) -> tuple[int, list[int], int, str]:
        word = next((i for i, word in enumerate(SMALL) if word in name), len(SMALL))
        return word, [int(n) for n in re.findall(r"\d+", name)], len(name), name

    return min(names, key=size)


def subjects() -> Iterator[Subject]:
    """Yield one subject per file of models."""
    for _, names in sorted(members().items()):
        name = smallest(names)
        yield Subject("timm", name, _built(name))
