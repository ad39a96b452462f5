"""The formulas that docs/numerics.md has for PyTorch's own definitions are what is captured, and none is missing.

A line of the page is Python. It is compiled like the function that it describes, under a policy whose roundings are so
coarse that another order of operations, or one more of them, changes bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import special as S
from torch.nn import functional as F

import fxround
from fxround import Policy, Rule
from fxround.capture import core_decompositions
from fxround.operators.formulas import FORMULAS

TEXT = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
LINES = re.findall(r"^([a-z_0-9]+)\(([a-z_, ]+)\) = (.*)$", TEXT, re.MULTILINE)
COARSE = Policy("coarse", (Rule(rounding="ieee(8,7)", accumulate="ieee(8,9)"),))
ROWS, COLUMNS = 40, 6


def drawn(low: float = -3, high: float = 3, seed: int = 1, special: bool = False) -> Tensor:
    x = low + (high - low) * torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))
    if special:
        x[:9, 0] = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 0.5, -0.5])
    return x


X, Y, Z = drawn(special=True), drawn(seed=2, special=True).flip(0), drawn(seed=3)
P, Q = drawn(0.1, 4), drawn(0.1, 4, seed=4)
A, B, C = drawn(), drawn(seed=5), drawn(seed=6)
SIGNS = torch.where(A > 0.5, 1.0, -1.0)
CLASSES = torch.arange(ROWS) % COLUMNS

# The line's name and arguments, the function, and the operands: tensors, and numbers in place of further arguments.
ROW: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rms_norm(x, w, eps)": (lambda x, w, eps: F.rms_norm(x, (COLUMNS,), w, eps), (A, P[0], 1e-5)),
    "logaddexp(x, y)": (torch.logaddexp, (X, Y)),
    "logaddexp2(x, y)": (torch.logaddexp2, (X, Y)),
    "xlogy(x, y)": (torch.xlogy, (X, Y)),
    "xlog1py(x, y)": (S.xlog1py, (X, Y)),
    "entr(x)": (S.entr, (X,)),
    "celu(x, a)": (F.celu, (X, 1.5)),
    "selu(x)": (F.selu, (X,)),
    "hardshrink(x, c)": (F.hardshrink, (X, 0.5)),
    "threshold(x, c, v)": (F.threshold, (X, 0.5, 0.3)),
    "frac(x)": (torch.frac, (A,)),
    "deg2rad(x)": (torch.deg2rad, (X,)),
    "rad2deg(x)": (torch.rad2deg, (X,)),
    "float_power(x, c)": (torch.float_power, (P, 2.5)),
    "mvlgamma(x, p)": (lambda x, p: torch.mvlgamma(x[..., 0], p).unsqueeze(-1), (P[..., :1] + 2, 3)),
    "nansum(x)": (lambda x: torch.nansum(x, -1, keepdim=True), (X,)),
    "nanmean(x)": (lambda x: torch.nanmean(x, -1, keepdim=True), (X,)),
    "trace(x)": (lambda x: torch.trace(x).unsqueeze(-1), (A,)),
    "cross(x, y)": (torch.linalg.cross, (A[:, :3], B[:, :3])),
    "vecdot(x, y)": (lambda x, y: torch.linalg.vecdot(x, y).unsqueeze(-1), (A, B)),
    "diff(x)": (torch.diff, (A,)),
    "renorm(x, c)": (lambda x, c: torch.renorm(x, 2, 0, c), (A, 3.0)),
    "normalize(x, eps)": (lambda x, eps: F.normalize(x, dim=-1, eps=eps), (A, 1e-12)),
    "cosine_similarity(x, y, eps)": (lambda x, y, e: F.cosine_similarity(x, y, -1, e).unsqueeze(-1), (A, B, 1e-8)),
    "pairwise_distance(x, y, eps)": (lambda x, y, e: F.pairwise_distance(x, y, 2, e).unsqueeze(-1), (A, B, 1e-6)),
    "trapezoid(y, d)": (lambda y, d: torch.trapezoid(y, dx=d).unsqueeze(-1), (A, 0.3)),
    "trapezoid(y, x)": (lambda y, x: torch.trapezoid(y, x).unsqueeze(-1), (A, B)),
    "cumulative_trapezoid(y)": (torch.cumulative_trapezoid, (A,)),
    "softmin(x)": (lambda x: F.softmin(x, -1), (A,)),
}
LOSS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "l1_loss(x, t)": (F.l1_loss, (A, B)),
    "kl_div(x, t)": (F.kl_div, (A, P)),
    "kl_div(x, t, log_target)": (lambda x, t, log_target: F.kl_div(x, t, log_target=log_target), (A, B, True)),
    "poisson_nll_loss(x, t)": (F.poisson_nll_loss, (A, P)),
    "soft_margin_loss(x, t)": (F.soft_margin_loss, (A, SIGNS)),
    "multi_margin_loss(x, t)": (lambda x, t: F.multi_margin_loss(x, t.squeeze(1)), (A, CLASSES[:, None])),
    "hinge_embedding_loss(x, t, m)": (F.hinge_embedding_loss, (A, SIGNS, 0.7)),
    "margin_ranking_loss(x, y, t, m)": (F.margin_ranking_loss, (A, B, SIGNS, 0.1)),
}
# Losses whose terms are rows.
OF_ROWS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "triplet_margin_loss(a, p, q, m)": (F.triplet_margin_loss, (A, B, C, 0.7)),
    "cosine_embedding_loss(x, y, t, m)": (F.cosine_embedding_loss, (A, B, SIGNS[:, 0].contiguous(), 0.2)),
}
# In words, or without an operand that varies.
UNCHECKED = {
    "gaussian_nll_loss",
    "log_ndtr",
    "linspace",
    "logspace",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
}


def names(kind: str) -> dict[str, Any]:
    """What the lines of a kind refer to."""
    found: dict[str, Any] = {**vars(F), **{k: getattr(torch, k) for k in dir(torch)}}
    # These globals are no module's, and must not say that they are.
    for name in ("__name__", "__file__", "__spec__", "__path__", "__package__", "__loader__"):
        found.pop(name, None)
    found |= {"pi": math.pi, "nan": math.nan, "inf": math.inf, "logsigmoid": F.logsigmoid}
    found["cumsum"], found["softmax"] = (lambda x: x.cumsum(-1)), (lambda x: F.softmax(x, -1))
    found["arange"], found["len"], found["roll"] = (
        torch.arange,
        len,
        lambda x, k: torch.cat([x[..., -k:], x[..., :-k]], -1),
    )
    found["vecdot"] = lambda x, y: (x * y).sum(-1)
    if kind == "row":
        found |= {"sum": lambda x: x.sum(-1, keepdim=True), "n": COLUMNS}
        found["norm"] = lambda x: (x * x).sum(-1, keepdim=True).sqrt()
    else:
        found |= {"sum": lambda x: x.sum(), "n": ROWS * COLUMNS if kind == "loss" else ROWS}
        found["pairwise_distance"] = lambda x, y, eps: F.pairwise_distance(x, y, 2, eps)
    return found


def function_of(arguments: str, text: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """The Python function of a line: an expression, and perhaps definitions of what it names."""
    expression, *defined = re.split(r", (?=[a-z] = )", text)
    body = "".join(f"    {line}\n" for line in defined) + f"    return {expression}\n"
    exec(f"def line({arguments}):\n{body}", namespace)
    made: Callable[..., Any] = namespace["line"]
    return made


def compiled_result(function: Callable[..., Any], operands: tuple[Any, ...]) -> Tensor:
    """The result under the coarse policy."""
    numbers = {i: v for i, v in enumerate(operands) if not isinstance(v, Tensor)}

    class Model(nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            given = iter(tensors)
            return function(*(numbers[i] if i in numbers else next(given) for i in range(len(operands))))

    result: Tensor = fxround.compile(Model(), COARSE)(*(v for v in operands if isinstance(v, Tensor)))
    return result


CASES = [(kind, head) for kind, table in (("row", ROW), ("loss", LOSS), ("rows", OF_ROWS)) for head in table]


@pytest.mark.part(7)
@pytest.mark.parametrize("kind, head", CASES)
def test_a_line_of_the_page_has_the_bits_of_the_function(kind: str, head: str) -> None:
    function, operands = {"row": ROW, "loss": LOSS, "rows": OF_ROWS}[kind][head]
    ((arguments, text),) = [(a, t) for name, a, t in LINES if f"{name}({a})" == head]
    expected = compiled_result(function, operands)
    found = compiled_result(function_of(arguments, text, names(kind)), operands)
    assert expected.dtype == found.dtype and expected.shape == found.shape
    assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_linspace_is_the_line_of_the_page() -> None:
    ((arguments, text),) = [(a, t) for name, a, t in LINES if name == "linspace"]
    line = function_of(arguments, text, names("row"))
    expected = compiled_result(lambda x: torch.linspace(0.1, 3.7, 11) + x, (torch.zeros(11),))
    found = compiled_result(lambda x: line(0.1, 3.7, 11) + x, (torch.zeros(11),))
    assert found.tolist() == expected.tolist()


def test_arange_without_a_dtype_is_the_line_of_the_page() -> None:
    found = compiled_result(lambda x: torch.arange(0.1, 5.0, 0.3) + x, (torch.zeros(17),))

    def rounded(x: Tensor) -> Tensor:
        return fxround.round(x, "ieee(8,7)")

    k = torch.arange(17, dtype=torch.float32)
    # Products and sums of short significands are exact in binary64; the second 0 is added.
    product = rounded((k.double() * float(torch.tensor(0.3))).float())
    assert found.tolist() == rounded((product.double() + float(torch.tensor(0.1))).float()).tolist()


def test_a_loss_of_pytorchs_python_code_computes_each_operation_in_its_dtype() -> None:
    x, y, m = A.half(), B.half(), np.float16(0.1)

    class Loss(nn.Module):
        def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
            return F.margin_ranking_loss(x, y, t, margin=0.1, reduction="none")

    found = fxround.compile(Loss(), "reproducible")(x, y, SIGNS.half())
    # NumPy rounds each operation on binary16 numbers once: those of binary32 have more than twice the bits.
    expected = np.maximum(-SIGNS.half().numpy() * (x.numpy() - y.numpy()) + m, np.float16(0))
    assert found.numpy().tobytes() == (expected + np.float16(0)).tobytes()


def words_of(text: str) -> set[str]:
    return set(text.split())


# What PyTorch's table moves, selects, counts or makes, without arithmetic on floating-point numbers.
MOVES = words_of("""
    alias_copy block_diag channel_shuffle chunk_cat clamp_max clamp_min count_nonzero detach diag_embed
    diagonal_copy empty_like expand_copy eye fill hardtanh heaviside im2col index_copy index_fill isin isneginf isposinf
    masked_fill max_unpool2d max_unpool3d new_empty new_full new_ones new_zeros ones ones_like pixel_shuffle
    pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
    replication_pad3d reshape_alias resize_as roll rot90 select_scatter split split_with_sizes_copy squeeze squeeze_copy
    stack t_copy take transpose transpose_copy tril triu unbind unfold_copy unsafe_index unsafe_masked_index
    unsafe_split unsafe_split_with_sizes unsafe_view unsqueeze_copy upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_nearest_exact1d upsample_nearest_exact2d upsample_nearest_exact3d zeros_like
""")
# Operators that the page has under another name: with interpolation, folds, norms, losses and dropout; a backward pass
# consists of operations of the page. floor_divide is a division with rounding_mode="floor".
ELSEWHERE = words_of("""
    affine_grid_generator bernoulli col2im cudnn_batch_norm euclidean_dist floor_divide hann_window grid_sampler_2d
    linalg_cross log_sigmoid_forward logit sinc multilabel_margin_loss_forward nll_loss_forward nll_loss2d_forward
    unsafe_index_put unsafe_masked_index_put_accumulate upsample_bilinear2d upsample_linear1d upsample_trilinear3d
    vdot weight_norm_interface
""")


def test_every_formula_of_pytorchs_table_is_on_the_page() -> None:
    words = set(re.findall(r"\w+", TEXT))
    missing = set()
    for operator in core_decompositions():
        if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten" or operator in FORMULAS:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
            continue
        name = operator._schema.name.removeprefix("aten::").strip("_").removeprefix("special_")
        if not (re.search("_backward(_data)?$", name) or {name} & (words | MOVES | ELSEWHERE)):
            missing.add(name)
    assert missing == set()


def test_every_line_is_checked() -> None:
    block = TEXT[TEXT.index("PyTorch's table has formulas") : TEXT.index("`logcumsumexp` has no formula")]
    lines = re.findall(r"^([a-z_0-9]+)\(([a-z_, ]+)\) = ", block, re.MULTILINE)
    assert len(lines) > 40
    heads = {head for _, head in CASES}
    assert [name for name, a in lines if f"{name}({a})" not in heads and name not in UNCHECKED] == []
