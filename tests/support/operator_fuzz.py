"""Operators called with corrupted arguments: ``python tests/support/operator_fuzz.py --cases 10000``.

Each case takes a good call of one operator and spoils one or two of its arguments. The call must give a result that
its fake counterpart gives too, or raise an error that says what is wrong; operands lie at pages that may not be
touched, so that a kernel that follows a bad number ends the process.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from typing import Any, Final

import guard_pages
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fxround  # noqa: F401  registers the operators
from fxround.errors import FxroundError

RNE, SR = "binary32/nearest_even/inf", "binary32/stochastic/inf"
OPS = torch.ops.fxround
GOOD: Final = (ValueError, TypeError, IndexError, FxroundError)
# PyTorch's own words for an argument that an operator's schema does not take, and for a lack of memory.
STOCK: Final = ("expected", "Expected", "not enough memory", "can't allocate memory", "Overflow when unpacking")
NUMBERS: Final = (-(1 << 63), -(1 << 40), -3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 99, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1)
TEXTS: Final = (
    *("", "/", "exact", "lanes:3", "lanes:99999999999999999999", "sequential", "binary64", "e4m3fn/stochastic:33"),
    *("ieee(99999999999999999999,2)", "custom(3,-999999,1e308,signed)", "custom(3,-2,1e999,nan)", "\ud800", "x" * 5000),
    *("binary32 chunk=0 combine=binary32", "binary32 chunk=5 combine=binary32", "t0 = add(x0, x1) @ exact", "f32 f32"),
    *("t0 = add(x0, x99999999999999999999) @ exact", "t0 = add(x0, 0x1p+99999) @ binary32", "t0 = exp(x0) @ exact"),
    *("t0 = add(x0, x1) @ binary64", "return t0", "t0 = add(x0, x1) @ binary32; return t1", "mask", "f32 mask", "f64"),
)
DTYPES: Final = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def calls() -> list[tuple[str, list[Any]]]:
    """A valid call of each operator."""
    rng = torch.tensor([3, 0])
    tail, place = [SR, RNE, rng, 2], [[1, 2], [1, 0], [1, 2], False, [0, 0], 2]
    back = [[1, 2], [1, 0], [1, 2], True, [0, 1], 2]
    x, w, t = normal(2, 4, 7, 9), normal(6, 2, 3, 2), normal(4, 3, 3, 2)
    y, z = OPS.convolution(x, w, *place, *tail), OPS.convolution(x, t, *back, *tail)
    index = torch.tensor([[0, 1, 1], [2, 0, 1]])
    return [
        ("pointwise", [[normal(5, 4), normal(4)], f"t0 = add(x0, x1) @ {SR}", torch.float32, rng, 1]),
        ("fused", [[normal(5, 4)], f"t0 = exp(x0) @ {SR}; t1 = add(t0, x0) @ {RNE}", "f32", rng, [1]]),
        ("matmul", [normal(5, 4), normal(4, 3), *tail]),
        ("matmul", [normal(2, 5, 4), normal(2, 4, 3), *tail]),
        ("convolution", [x, w, *place, *tail]),
        ("convolution", [x, t, *back, *tail]),
        ("convolution_input_gradient", [y, w, list(x.shape), *place, *tail]),
        ("convolution_input_gradient", [z, t, list(x.shape), *back, *tail]),
        ("convolution_weight_gradient", [y, x, list(w.shape), *place, *tail]),
        ("convolution_weight_gradient", [z, x, list(t.shape), *back, *tail]),
        ("sum", [normal(3, 4, 5), [0, 2], False, "lanes:16", *tail]),
        ("sum", [normal(3, 4, 5), [1], True, "exact", *tail]),
        ("prod", [normal(3, 4), [1], False, *tail]),
        ("cumsum", [normal(3, 4), 0, *tail]),
        ("cumprod", [normal(3, 4), 1, *tail]),
        ("scatter_add", [normal(3, 4), 0, index, normal(2, 3), SR, rng, 2]),
        ("index_put", [normal(3, 4), [index[0], None], normal(3, 4), SR, rng, 2]),
        ("index_put", [normal(3, 4), [torch.tensor([True, False, True])], normal(2, 4), SR, rng, 2]),
    ]


class Spoiler(random.Random):
    """Replaces valid arguments by invalid ones."""

    def any_of(self, value: Any) -> Any:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return self.choice(NUMBERS)
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, torch.dtype):
            return self.choice(DTYPES)
        if value is None:
            return torch.tensor([1])
        return self.listed(list(value))

    def listed(self, values: list[Any]) -> list[Any]:
        how = self.randrange(4)
        if not values or how == 0:
            return [*values, self.any_of(values[0]) if values else self.choice(NUMBERS)]
        at = self.randrange(len(values))
        if how == 1:
            del values[at]
            return values
        values[at] = self.any_of(values[at])
        return values

    def text(self, value: str) -> str:
        if self.random() < 0.4:
            return self.choice(TEXTS)
        at = self.randrange(len(value) + 1)
        end = min(len(value), at + self.randrange(6))
        return value[:at] + self.choice(("", "9", "-", "0", "(", "x", "t", "@", ",", " ", ";", "é")) + value[end:]

    def tensor(self, x: Tensor) -> Tensor:
        how = self.randrange(8)
        if how == 0 and x.dim():
            return x.narrow(self.randrange(x.dim()), 0, self.choice((0, 1)))
        if how == 1:
            return x.unsqueeze(self.randint(0, x.dim()))
        if how == 2 and x.dim():
            return x.select(0, 0)
        if how == 3:
            return x.to(self.choice(DTYPES))
        if how == 4 and x.dim():
            return x.transpose(0, x.dim() - 1)
        if how == 5 and x.dim():
            return torch.cat([x, x], self.randrange(x.dim()))
        if how == 6 and x.dtype == torch.int64:
            return torch.full_like(x, self.choice(NUMBERS))
        return x.reshape(-1)


def outcome(operator: Any, args: Any) -> Any:
    """The layouts of the results of a call, or the error that it raises."""
    try:
        found = operator(*args)
    except Exception as error:  # each is judged by its type
        return error
    results = [found] if isinstance(found, Tensor) else list(found)
    return [(tuple(r.shape), r.stride(), r.dtype) for r in results]


def is_ours(error: Exception) -> bool:
    """Whether an error is one of fxround's, which says what is wrong."""
    text = str(error)
    stock = isinstance(error, RuntimeError) and any(words in text for words in STOCK)
    return (isinstance(error, GOOD) or stock) and bool(text) and (len(text) < 2000 or stock)


def is_of_values(error: Any) -> bool:
    """Whether an error depends on a tensor's values or on available memory, which a fake tensor does not have."""
    words = ("is out of range for dimension", "memory", "2^63", "2^32", "do not broadcast", "values of shape")
    return isinstance(error, Exception) and any(word in str(error) for word in words)


def run(number: int) -> str | None:
    """The fault of a case, or None."""
    spoil = Spoiler(number)
    good = calls()
    name, args = good[number % len(good)]
    for _ in range(spoil.choice((1, 1, 1, 2))):
        at = spoil.randrange(len(args))
        args[at] = spoil.any_of(args[at])
    operator = getattr(OPS, name)
    said = f"{name}({', '.join(map(shown, args))})"
    guard_pages.announce(number, said)
    at_end = spoil.random() < 0.5
    with guard_pages.everywhere(at_end):
        real = outcome(operator, pytree.tree_map_only(Tensor, lambda x: guard_pages.guarded(x, at_end), args))
    with FakeTensorMode() as mode:
        fake = outcome(operator, pytree.tree_map_only(Tensor, mode.from_tensor, args))
    for kind, result in (("kernel", real), ("fake kernel", fake)):
        if isinstance(result, Exception) and not is_ours(result):
            return f"{number} {said}: the {kind} raises {type(result).__name__}: {str(result)[:300]}"
    if isinstance(real, Exception) != isinstance(fake, Exception):
        agree = is_of_values(real)
    else:
        agree = isinstance(real, Exception) or real == fake
    return None if agree else f"{number} {said}: the kernel gives {real!r:.300}, its fake {fake!r:.300}"


def shown(value: Any) -> str:
    """An argument on one line."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}" + (f"={value.tolist()}" if value.numel() < 3 else "")
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return ascii(value)[:200]


def main() -> int:
    """Try the cases of the command line; print a line for each failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="begin", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()  # a fake tensor logs every refusal
    for number in range(given.begin, given.cases):
        wrong = run(number)
        if wrong:
            print(f"FAIL {wrong}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
