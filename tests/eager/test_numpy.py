"""NumPy: arrays of every layout, and functions for the array API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat
import numpy as np
import pytest
import torch

import fxround

X = np.random.default_rng(2).standard_normal((4, 6))
TEXT = "bfloat16/stochastic"


def read_only(x: Any) -> Any:
    y = x.copy()
    y.setflags(write=False)
    return y


def field(kind: list[tuple[str, str]]) -> Callable[[Any], Any]:
    def of(x: Any) -> Any:
        records = np.zeros(x.shape, np.dtype(kind))
        records["x"] = x
        return records["x"]

    return of


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "column-major": np.asfortranarray,
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "reversed": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "every second": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "read-only": read_only,
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "unaligned field": field([("a", "i1"), ("x", "f8")]),
    "field of 12 bytes": field([("x", "f8"), ("a", "i4")]),
    "subclass": lambda x: x.view(np.recarray),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_bits_of_a_row_major_array(layout: str) -> None:
    x, before = LAYOUTS[layout](X), X.copy()
    assert np.array_equal(x, X)
    want = fxround.round(X, TEXT, seed=3)
    got = fxround.round(x, TEXT, seed=3)
    assert got.dtype == x.dtype and got.flags.c_contiguous and not np.shares_memory(got, x)
    assert got.astype(np.float64).tobytes() == want.tobytes()
    assert np.array_equal(x, before)
    out = np.empty((8, 6), x.dtype)[::2]
    assert fxround.round(x, TEXT, seed=3, out=out) is out
    assert out.astype(np.float64).tobytes() == want.tobytes()


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_numbers_and_arrays_without_dimensions(kind: Any) -> None:
    number, array = fxround.round(kind(1.3), "sbits(2)"), fxround.round(np.array(1.3, kind), "sbits(2)")
    assert type(number) is kind and number == 1.25
    assert isinstance(array, np.ndarray) and array.shape == () and array.dtype == kind and array == 1.25
    assert np.isnan(fxround.round(kind(np.nan), "bfloat16" if kind is not np.float16 else "e5m2"))


REFUSED = {
    "dtype int64": np.arange(3),
    "bool": np.array([True]),
    "complex64": np.ones(2, np.complex64),
    "object": np.array([1.3], object),
    "'a'": np.zeros(2, [("a", "f4"), ("b", "f4")]),
    "datetime64": np.array(["2020-01-01"], "M8[D]"),
    "masked array": np.ma.array([1.3, 2.7], mask=[0, 1]),
    "a list": [1.3],
    "x has dtype int64": np.int64(3),
}


@pytest.mark.parametrize("said", REFUSED)
def test_other_kinds_are_refused(said: str) -> None:
    with pytest.raises(TypeError, match=said):
        fxround.round(REFUSED[said], "bfloat16")


def test_an_array_that_cannot_be_written_is_no_out() -> None:
    with pytest.raises(ValueError, match="read-only"):
        fxround.round(X, TEXT, out=read_only(X))


def lorenz(state: Any, h: float) -> Any:
    xp = array_api_compat.array_namespace(state)
    x, y, z = state[..., 0], state[..., 1], state[..., 2]
    return state + h * xp.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], axis=-1)


def layer(x: Any, w: Any) -> Any:
    """Roundings in all of these are the same in NumPy: each sum is exact."""
    xp = array_api_compat.array_namespace(x, w)
    h = xp.matmul(x, w)
    h = xp.where(h > 0, h, xp.zeros_like(h))
    total = xp.sum(h, axis=0, keepdims=True)
    return xp.sqrt(xp.concat([h, total], axis=0)) / xp.asarray(3.0, dtype=h.dtype)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_functions_for_the_array_api_have_the_bits_of_numpy() -> None:
    compiled, state = fxround.compile(lorenz, "reproducible"), np.array([1.0, 2.0, 3.0])
    ours = torch.from_numpy(state.copy())
    for _ in range(50):
        ours, state = compiled(ours, 2.0**-7), lorenz(state, 2.0**-7)
    assert ours.numpy().tobytes() == state.tobytes()
    x, w = np.arange(-6.0, 6.0).reshape(3, 4), np.arange(8.0).reshape(4, 2)
    got = fxround.compile(layer, "reproducible")(torch.from_numpy(x), torch.from_numpy(w))
    assert got.numpy().tobytes() == np.ascontiguousarray(layer(x, w)).tobytes()


@pytest.mark.part(2)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("policy", ["sbits(51)", "ieee(10,12)/stochastic", "up_down"])
def test_loops_of_such_functions(policy: str) -> None:
    state = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    got = fxround.iterate(lambda s: lorenz(s, 0.01), state, 20, policy, seed=1)
    assert got.dtype == torch.float64 and bool(got.isfinite().all())
    assert not torch.equal(got, fxround.iterate(lambda s: lorenz(s, 0.01), state, 20, "binary64"))
