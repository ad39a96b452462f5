"""The rules of operators: what each ATen overload does to numbers, one row per operator.

An operator yields R(f(x, ...)) with one rounding (pointwise, elementary), accumulates (contraction, reduction), selects
among its operands (exact), moves them (movement), yields no floating point (integer), draws (random), runs graphs of
such operators (loop), or hides arithmetic that fxround has no kernel for (opaque). ``rule_of(node).body``, for
example, is ``"mul({0}, {1})"``.
Composite operators have no row: ``formulas`` splits them into these operators while the model is captured. ``rule_of``
returns None for an operator without a row, and its callers report that operator.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import fx

from fxround.graph.dialect import CALLS
from fxround.graph.dialect.loops import BODIES
from fxround.graph.dtypes import FORMAT_OF
from fxround.numerics.elementary import ELEMENTARY
from fxround.numerics.formats import Format

Kind = Literal[
    "pointwise", "elementary", "contraction", "reduction", "exact", "movement", "integer", "random", "opaque", "loop"
]


@dataclass(frozen=True)
class OpRule:
    """The rule of one operator.

    kind    what it does to numbers
    body    pointwise, elementary and some exact operators: the program, with ``{i}`` for argument i of the ATen call
    lower   contraction and reduction: the name of the fxround operator
    reason  why its result cannot be computed with a rounding of its own ("" if it can)
    """

    kind: Kind
    body: str = ""
    lower: str = ""
    reason: str = ""


_MATCHED: Final = "fxround_rule"


def rule_of(node: fx.Node) -> OpRule | None:
    """Return the rule of a call_function node, None if the table lacks its operator.

    ``getitem`` has the rule of the operator whose result it takes from.
    """
    # A node is matched once, and again only if a pass gave it another target, other arguments or another value.
    state = (node.target, node.args, node.meta.get("val"))
    kept = node.meta.get(_MATCHED)
    if kept is None or any(a is not b for a, b in zip(kept[0], state, strict=True)):
        kept = node.meta[_MATCHED] = state, _match(node)
    rule: OpRule | None = kept[1]
    return rule


def _match(node: fx.Node) -> OpRule | None:
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return rule_of(source) if source.op == "call_function" else MOVEMENT
    name = str(node.target)
    refine = _REFINED.get(name)
    return refine(node) if refine else RULES.get(name)


def argument(node: fx.Node, which: int | str) -> Any:
    """Return an argument of an ATen call, or its default. which: its position or its name in the schema."""
    target: Any = node.target
    declarations = target._schema.arguments
    position = which if isinstance(which, int) else [declared.name for declared in declarations].index(which)
    declared = declarations[position]
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(declared.name, declared.default_value if declared.has_default_value() else None)


def _rows(kind: Kind, namespace: str, names: str, reason: str = "") -> dict[str, OpRule]:
    """Return one row for each name. A name without an overload means ``.default``."""
    full = [f"{namespace}.{name if '.' in name else name + '.default'}" for name in names.split()]
    return {name: OpRule(kind, reason=reason) for name in full}


def _bodies(kind: Kind, rows: dict[str, str]) -> dict[str, OpRule]:
    full = {f"aten.{name if '.' in name else name + '.default'}": body for name, body in rows.items()}
    return {name: OpRule(kind, body=body) for name, body in full.items()}


MOVEMENT: Final = OpRule("movement")

_POINTWISE: Final = {
    "add.Tensor": "add({0}, {1})",
    "add.Scalar": "add({0}, {1})",
    "sub.Tensor": "sub({0}, {1})",
    "sub.Scalar": "sub({0}, {1})",
    "rsub.Tensor": "sub({1}, {0})",
    "rsub.Scalar": "sub({1}, {0})",
    "mul.Tensor": "mul({0}, {1})",
    "mul.Scalar": "mul({0}, {1})",
    "div.Tensor": "div({0}, {1})",
    "div.Scalar": "div({0}, {1})",
    "sqrt": "sqrt({0})",
    "_to_copy": "identity({0})",
}

# Functions of one argument have the names of ATen's operators; ATen has no cbrt.
_UNARY: Final = {
    name: f"{name}({{0}})" for name, row in ELEMENTARY.items() if row.arity == 1 and hasattr(torch.ops.aten, name)
}

_BINARY: Final = {
    "pow.Tensor_Scalar": "pow({0}, {1})",
    "pow.Tensor_Tensor": "pow({0}, {1})",
    "pow.Scalar": "pow({0}, {1})",
    "atan2": "atan2({0}, {1})",
    "hypot": "hypot({0}, {1})",
    "fmod.Scalar": "fmod({0}, {1})",
    "fmod.Tensor": "fmod({0}, {1})",
    "remainder.Scalar": "remainder({0}, {1})",
    "remainder.Tensor": "remainder({0}, {1})",
    "remainder.Scalar_Tensor": "remainder({0}, {1})",
}

_LOWERED: Final = {
    f"aten.{overload}": OpRule(cls.kind, lower=cls.name) for cls in CALLS.values() for overload in cls.aten
}
_CONVOLUTION_GRADIENTS: Final = {
    (True, False, False): OpRule("contraction", lower="convolution_input_gradient"),
    (False, True, False): OpRule("contraction", lower="convolution_weight_gradient"),
}
_QUOTIENTS: Final = {
    "floor": OpRule("elementary", body="floordiv({0}, {1})"),
    "trunc": OpRule("elementary", body="truncdiv({0}, {1})"),
}
_INDEX_PUT: Final = OpRule("reduction", lower="index_put")

# Operators that select among their operand and numbers. As programs they can follow the operation of the operand.
_CHOICES: Final = {
    "neg": "neg({0})",
    "abs": "abs({0})",
    "relu": "relu({0})",
    "hardtanh": "clamp({0}, {1}, {2})",
    "clamp": "clamp({0}, {1}, {2})",
    "clamp_min": "clamp({0}, {1}, inf)",
    "clamp_max": "clamp({0}, -inf, {1})",
}

# The result is one of the operands, a small integer or a sign: no rounding happens.
_EXACT: Final = """
    threshold clamp.Tensor clamp_min.Tensor clamp_max.Tensor
    maximum minimum fmax fmin where.self where.ScalarSelf where.ScalarOther where.Scalar amax amin aminmax
    max max.dim min min.dim sort sort.stable topk kthvalue median median.dim nanmedian nanmedian.dim mode
    cummax cummin floor ceil round trunc frac sign sgn copysign.Tensor copysign.Scalar nan_to_num heaviside hardshrink
    max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d
    fractional_max_pool2d fractional_max_pool3d max_unpool2d max_unpool3d histc
    _unique2 unique_consecutive unique_dim
"""

_MOVEMENT: Final = """
    view view.dtype _unsafe_view reshape alias detach permute transpose.int t expand squeeze squeeze.dim squeeze.dims
    unsqueeze slice.Tensor select.int narrow clone contiguous copy lift_fresh lift_fresh_copy cat stack split.Tensor
    split_with_sizes unbind.int chunk diagonal unfold as_strided flip roll repeat repeat_interleave.Tensor tile
    movedim.intlist constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d tril triu diag_embed im2col pixel_shuffle pixel_unshuffle channel_shuffle
    embedding gather index.Tensor _unsafe_index.Tensor _unsafe_masked_index index_select take masked_select
    slice_scatter select_scatter diagonal_scatter as_strided_scatter scatter.src scatter.value masked_scatter
    masked_scatter_backward
    masked_fill.Scalar masked_fill.Tensor index_fill.int_Scalar index_fill.int_Tensor index_copy fill.Scalar fill.Tensor
    empty.memory_format empty_like empty_permuted empty_strided new_empty new_empty_strided view_copy expand_copy
    permute_copy lu_unpack resize set_data _reshape_alias _conj resolve_conj resolve_neg broadcast_to upsample_nearest1d
    upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
"""

# Numbers that enter the graph from the program text. arange with a floating-point step is a formula.
_CONSTANT: Final = """
    full full_like new_full zeros zeros_like new_zeros ones ones_like new_ones scalar_tensor arange arange.start
    arange.start_step eye eye.m
"""

_INTEGER: Final = """
    eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar
    ge.Tensor isnan isinf isfinite signbit logical_not logical_and logical_or logical_xor bitwise_not bitwise_and.Tensor
    bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar
    bitwise_left_shift.Tensor bitwise_right_shift.Tensor bitwise_left_shift.Tensor_Scalar
    bitwise_right_shift.Tensor_Scalar __lshift__.Scalar __rshift__.Scalar any any.dim any.dims all all.dim all.dims
    argmax argmin argsort argsort.stable nonzero searchsorted.Tensor
    bucketize.Tensor bincount floor_divide div.Tensor_mode div.Scalar_mode prod prod.dim_int cumprod
    is_nonzero equal
    sym_size.int sym_numel sym_stride.int
    sym_storage_offset _assert_tensor_metadata _assert_async _assert_async.msg _assert_scalar sym_constrain_range
    sym_constrain_range_for_size _linalg_check_errors
"""

_RANDOM: Final = """
    bernoulli bernoulli.p bernoulli.Tensor rand rand_like randn randn_like uniform normal_functional
    normal.float_float normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor exponential geometric cauchy
    log_normal poisson binomial native_dropout rrelu_with_noise_functional rand.generator randn.generator
    randperm randperm.generator randint randint.generator randint.low randint.low_generator randint_like
    randint_like.low_dtype multinomial
"""

_OPAQUE: Final = {
    "no kernel has this function yet": """
        special_entr special_ndtri special_erfcx
        special_zeta igamma igammac round.decimals logaddexp logaddexp2 nextafter ldexp.Tensor frexp.Tensor
        special_log_ndtr xlogy.Tensor angle mvlgamma float_power.Tensor_Scalar""",
    "an iteration of linear algebra, whose steps depend on its roundings: no formula defines them yet": """
        _linalg_eigh _linalg_svd linalg_matrix_exp linalg_eig linalg_eigvals linalg_pinv.atol_rtol_tensor""",
    "linear algebra that no formula defines yet": "linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_cross",
    "its accumulation order is not defined by a formula yet": """
        logcumsumexp _pdist_forward _pdist_backward _embedding_bag _embedding_bag_forward_only
        _embedding_bag_backward scatter_reduce.two index_reduce col2im grid_sampler_3d _ctc_loss.Tensor _ctc_loss
        segment_reduce grid_sampler_2d_backward
        rrelu_with_noise_backward convolution_backward
        upsample_bicubic2d upsample_trilinear3d embedding_renorm""",
}

_OF_A_GROUP: Final = "the process group adds in an order of its own, which depends on the number of processes"

_TABLE: Final = (
    _bodies("pointwise", _POINTWISE)
    | _bodies("elementary", {"reciprocal": "reciprocal({0})"} | _UNARY | _BINARY)
    | _LOWERED
    | _bodies("exact", _CHOICES)
    | _rows("exact", "aten", _EXACT)
    | _rows("movement", "aten", _MOVEMENT + _CONSTANT)
    | _rows("integer", "aten", _INTEGER)
    | _rows("random", "aten", _RANDOM, "drawn from PyTorch's global generator, not from (seed, sample)")
)
RULES: Final = MappingProxyType(
    {str(loop): OpRule("loop") for loop in BODIES}
    |
    # A new function overrides its row in _OPAQUE.
    {name: rule for reason, names in _OPAQUE.items() for name, rule in _rows("opaque", "aten", names, reason).items()}
    | _TABLE
    | _rows("movement", "fxround", "marked marked_gradient")
    | _rows("reduction", "fxround", "sum_of_processes", _OF_A_GROUP)
    | _rows("exact", "fxround", "extreme_of_processes")
    | _rows("movement", "_c10d_functional", "all_gather_into_tensor all_to_all_single wait_tensor")
    | _rows("opaque", "_c10d_functional", "all_reduce reduce_scatter_tensor", _OF_A_GROUP)
    | _rows("movement", "prims", "scalar_tensor")
    | _rows("opaque", "transformers", "grouped_mm_fallback grouped_mm_fallback_backward", "a third party's operator")
    | _rows("opaque", "higher_order", "run_and_save_rng_state run_with_rng_state", "random state of a checkpoint")
)
CONSTANTS: Final = frozenset(_rows("movement", "aten", _CONSTANT) | _rows("movement", "prims", "scalar_tensor"))


def _index_put(node: fx.Node) -> OpRule:
    return _INDEX_PUT if argument(node, 3) else MOVEMENT


def _scatter_reduce(node: fx.Node) -> OpRule:
    chooses = argument(node, 4) in ("amax", "amin")
    return OpRule("exact") if chooses else RULES["aten.scatter_reduce.two"]


def _bincount(node: fx.Node) -> OpRule:
    """Return the rule of a count, or of a sum of weights in the order of a stock kernel."""
    unordered = "its accumulation order is not defined by a formula yet"
    return OpRule("opaque", reason=unordered) if _yields_floats(node) else INTEGER


def _yields_floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _quotient(node: fx.Node) -> OpRule:
    """Return the rule of a division that may round to an integer: exact on integers, one rounding on floating point."""
    mode = node.kwargs.get("rounding_mode", "floor" if "floor" in str(node.target) else None)
    if not _yields_floats(node):
        return INTEGER
    return RULES["aten.div.Tensor"] if mode is None else _QUOTIENTS[str(mode)]


def _reduction(node: fx.Node) -> OpRule:
    """Return the rule of a reduction that is exact on integers: a chain of rounded steps on floating point."""
    return _LOWERED[str(node.target)] if _yields_floats(node) else INTEGER


def _convolution_backward(node: fx.Node) -> OpRule:
    """Return the rule of one of the three results: the formula asks for one at a time."""
    wanted = tuple(argument(node, 10))
    return _CONVOLUTION_GRADIENTS.get(wanted, RULES["aten.convolution_backward.default"])


def _cast(node: fx.Node) -> OpRule:
    """Return the rule of a conversion, which rounds if the source has values that the result lacks."""
    source, value = node.args[0], node.meta.get("val")
    assert isinstance(source, fx.Node)
    old, new = source.meta["val"].dtype, value.dtype if isinstance(value, torch.Tensor) else None
    if new == old:
        return MOVEMENT
    return OpRule("exact") if new is not None and _keeps_values(old, new) else RULES["aten._to_copy.default"]


def _keeps_values(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether a dtype has every value of another one, which is not an integer dtype."""
    if new not in FORMAT_OF:
        return old == torch.bool or (old.is_floating_point and torch.promote_types(old, new) == new)
    wide = Format.parse(FORMAT_OF[new])
    if old == torch.bool:
        return wide.zero
    return old in FORMAT_OF and Format.parse(FORMAT_OF[old]).within(wide)


INTEGER: Final = OpRule("integer")
_REFINED: Final[dict[str, Callable[[fx.Node], OpRule]]] = {
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten.scatter_reduce.two": _scatter_reduce,
    "aten._to_copy.default": _cast,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.bincount.default": _bincount,
    **dict.fromkeys(("aten.floor_divide.default", "aten.div.Tensor_mode", "aten.div.Scalar_mode"), _quotient),
    **{name: _reduction for name in _LOWERED if RULES[name].kind == "integer"},
}
