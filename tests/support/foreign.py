"""A pytest plugin, ``-p foreign``: PyTorch's own float kernels are off by one ulp, and add in another order.

This models another processor, whose square root, exponential, and orders of sums, products and convolutions differ. A
test that passes on one processor alone takes a stock operation as an oracle. Kept are what IEEE 754 defines (``+ - *
/`` of elements, selections, copies) and short results (small integers are the same in any order).

Every kernel is a function of its operands, so that a graph run eagerly has the bits of the same graph run again.
``STOCK`` names the tests that need PyTorch's own kernels, with the reason; they are skipped.

    PYTHONPATH=tests/support ./run tests -p foreign [FILE...]
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor

_INTEGER: Final = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
# A file, or file::test, and why it cannot pass where PyTorch's kernels are others.
_CHILDREN: Final = "it compares with processes of its own, which have them"
STOCK: Final = {
    "tests/training/test_distributed.py::test_two_processes_are_one_that_accumulates_in_order": _CHILDREN,
    "tests/training/test_distributed.py::test_sums_are_rounded_as_the_policy_says": _CHILDREN,
    "tests/module/test_flips.py::test_a_flipped_value_is_one_value_for_all_who_read_it": (
        "its products have one term each, which are exact on every processor"
    ),
}
# The families of operators whose results IEEE 754 does not define, by their names without the "_" of those in place.
FUNCTIONS: Final = r"""
    a?(cos|sin|tan)h? | atan2 | exp2? | expm1 | log(2|10|1p)? | r?sqrt | pow | hypot | erf(c|inv)? | sigmoid | sinc
    l?gamma | lgamma | digamma | polygamma | mvlgamma | i0 | igammac? | logit | xlogy | logaddexp2? | special_\w+
    gelu | silu | mish | elu | celu | softplus | log_sigmoid_forward | hardswish | hardsigmoid | polar | angle
    (gelu|silu|mish|elu|softplus|log_sigmoid|hardswish|hardsigmoid|tanh|sigmoid|logit)_backward | lerp | addc(mul|div)
"""
SUMS: Final = r"""
    sum | nansum | mean | prod | cumsum | cumprod | _?logcumsumexp | (var|std)(_mean)? | norm | linalg_\w+ | _linalg_\w+
    trace | v?dot | mm | bmm | addmm | _addmm_activation | addmv | addbmm | baddbmm | addr | convolution
    convolution_backward | _?(log_)?softmax(_backward_data)? | _masked_softmax(_backward)? | cholesky | cholesky_inverse
    (native_)?(layer|batch|group)_norm(_backward)? | _native_batch_norm_legit | _batch_norm_with_update | renorm
    (_?adaptive_)?avg_pool[23]d(_backward)? | _adaptive_avg_pool[23]d(_backward)? | grid_sampler_[23]d(_backward)?
    _?upsample_(bicubic2d|bilinear2d|lanczos2d|linear1d|trilinear3d)(_aa)?(_backward)? | _embedding_bag(_forward_only)?
    _embedding_bag_(dense|per_sample_weights)_backward | (mse|smooth_l1|huber)_loss(_backward)?
    _ctc_loss(_backward)?
    binary_cross_entropy(_backward)? | nll_loss(2d)?_forward | multi_margin_loss(_backward)? | _cdist_(forward|backward)
    _pdist_(forward|backward) | mkldnn_rnn_layer(_backward)? | _scaled_dot_product_flash_attention_for_cpu(_backward)?
    _transformer_encoder_layer_fwd | _native_multi_head_attention | _fft_\w+ | _weight_norm_interface(_backward)?
    triangular_solve | ormqr | _fused_(adam|adamw|sgd|adagrad)
"""
# These add to elements, each a single time or in some order.
_SCATTERS: Final = r"scatter_add | index_add | embedding_dense_backward"
_LIBRARY: Final = torch.library.Library("aten", "IMPL")


def named(families: str) -> re.Pattern[str]:
    return re.compile("|".join(" | ".join(families.strip().splitlines()).split(" | ")).replace(" ", ""))


def _moved(y: Tensor) -> Tensor:
    """The neighbour whose encoding differs in the last bit, where the low bits are not all zeros."""
    if y.is_complex():
        return torch.view_as_complex(_moved(torch.view_as_real(y.resolve_conj())))
    if y.dtype not in _INTEGER:
        return y
    code = y.contiguous().view(_INTEGER[y.dtype])
    low = 0xFF if y.itemsize > 2 else 0x3
    chosen = torch.isfinite(y) & (y != 0) & ((code & low) != 0)
    return y.clone().copy_((code ^ chosen.to(code.dtype)).view(y.dtype))


def _apart(other: Tensor, usual: Tensor) -> Tensor:
    """The result of another order, or the neighbour where the order changes nothing."""
    return torch.where(other == usual, _moved(usual), other)


def _inner(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The operands of a product with k descending."""
    return a.flip(-1), b.flip(-2 if b.dim() > 1 else 0)


def _channels(x: Tensor, dim: int, groups: int) -> Tensor:
    """The channels of each group in the other order."""
    shape = x.shape
    return x.unflatten(dim, (groups, shape[dim] // groups)).flip(dim + 1).reshape(shape)


def _reordered(name: str, args: list[Any]) -> list[Any]:
    """Operands that give the same exact result and another order of additions."""
    if name in ("mm", "bmm", "dot", "vdot"):
        return [*_inner(*args[:2]), *args[2:]]
    if name in ("addmm", "addmv", "baddbmm", "addbmm", "_addmm_activation"):
        return [args[0], *_inner(*args[1:3]), *args[3:]]
    if name in ("sum", "mean", "nansum") and args[0].dim():
        dims = args[1] if len(args) > 1 and args[1] else range(args[0].dim())
        return [args[0].flip(list(dims)), *args[1:]]
    if name == "convolution":
        x, w, bias, *rest = args
        transposed, groups = rest[3], rest[5]
        batched = x.dim() - (w.dim() - 1)
        w = _channels(w, 0, groups) if transposed else w.flip(1)
        return [_channels(x, batched, groups), w, bias, *rest]
    if name == "scatter_add":
        x, dim, index, source = args
        return args if not index.dim() else [x, dim, index.flip(dim), _as(source, index).flip(dim)]
    if name == "index_add":
        x, dim, index, source = args
        return args if not source.dim() or not index.dim() else [x, dim, index.flip(0), source.flip(dim)]
    if name == "embedding_dense_backward":
        gradient, index, *rest = args
        return [gradient.reshape(-1, gradient.shape[-1]).flip(0), index.reshape(-1).flip(0), *rest]
    return args


def _as(source: Tensor, index: Tensor) -> Tensor:
    return source[tuple(slice(n) for n in index.shape)]


# Where the norms and the distances have their exponent.
_EXPONENTS: Final = {"linalg_vector_norm": 1, "norm": 1, "_pdist_forward": 1, "_cdist_forward": 2}


def _is_exact(packet: str, args: Any) -> bool:
    """Whether IEEE 754 defines the result after all: x ** 1, x ** 2 = x * x, and the norms that select or count."""
    if packet == "pow":
        return len(args) > 1 and isinstance(args[1], int | float) and args[1] in (1, 2)
    place = _EXPONENTS.get(packet, len(args))
    return len(args) > place and args[place] in (math.inf, -math.inf, 0)


def _replaced(packet: str, schema: Any, kernel: Any) -> Callable[..., Any]:
    written = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    names = [argument.name for argument in schema.arguments]
    tensors = [str(argument.type) == "Tensor" for argument in schema.arguments]
    scatters = named(_SCATTERS).fullmatch(packet)

    def foreign(keys: Any, *args: Any, **kwargs: Any) -> Any:
        values = [_tensor(a, args) if of else a for a, of in zip(args, tensors, strict=False)]
        other = _reordered(packet, values)
        if scatters or _is_exact(packet, args):
            return kernel.call_boxed(keys, *other, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        targets = [one for each in written for one in _tensors(given.get(each))]
        if other is values:
            result = kernel.call_boxed(keys, *values, **kwargs)
            for target in targets:
                target.copy_(_moved(target))
            return result if targets else _mapped(result)
        if not targets:
            return _apart(kernel.call_boxed(keys, *other, **kwargs), kernel.call_boxed(keys, *values, **kwargs))
        (target,) = targets
        before = target.clone()
        usual = kernel.call_boxed(keys, *values, **kwargs).clone()
        if target.shape == before.shape:
            target.copy_(before)
        return target.copy_(_apart(kernel.call_boxed(keys, *other, **kwargs), usual))

    return foreign


def _tensor(value: Any, others: Any) -> Any:
    """A number where a kernel takes a tensor, as one that changes no dtype."""
    if not isinstance(value, int | float | complex):
        return value
    return torch.tensor(value, dtype=torch.result_type(next(x for x in others if isinstance(x, Tensor)), value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _mapped(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _moved(value)
    return type(value)(map(_mapped, value)) if isinstance(value, list | tuple) else value


def _kernels() -> Iterator[tuple[str, str]]:
    """The name and the family of every kernel that is replaced."""
    families = re.compile("|".join(f"(?:{named(each).pattern})" for each in (FUNCTIONS, SUMS, _SCATTERS)))
    for name in torch._C._dispatch_get_all_op_names():
        packet = name.removeprefix("aten::").partition(".")[0].removesuffix("_")
        keys = ("CPU", "CompositeExplicitAutograd") if packet.startswith("convolution") else ("CPU",)
        has = any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)
        if has and name.startswith("aten::") and families.fullmatch(packet):
            yield name, packet


def install() -> None:
    """Replace the kernels for the rest of the process."""
    for name, packet in list(_kernels()):
        base, _, overload = name.partition(".")
        kernel = torch.library.get_kernel(name, "CPU")
        replacement = _replaced(packet, torch._C._get_schema(base, overload), kernel)
        _LIBRARY.impl(name.removeprefix("aten::"), replacement, "CPU", with_keyset=True)


def pytest_configure() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced is the purpose
        install()


def pytest_report_header() -> str:
    return f"foreign: {len(list(_kernels()))} kernels of PyTorch are off by an ulp"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.partition("[")[0]
        reason = STOCK.get(name) or STOCK.get(name.partition("::")[0])
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs PyTorch's own kernels: {reason}"))
