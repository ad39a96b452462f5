"""The table of rules covers the operators of models, and every layer of the zoo runs with all operations rounded."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from layers import LAYERS
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

import fxround
from fxround.graph.site import site
from fxround.operators.formulas import FORMULAS, decompositions
from fxround.operators.rules import _REFINED, CONSTANTS, RULES, rule_of

# Every overload of section "operators seen" of the measurements on 36 training graphs and on the layer zoo.
COVERAGE = """
mm convolution_backward convolution bmm addmm sum.dim_IntList mean.dim linalg_vector_norm cumsum histc mean
_native_batch_norm_legit_functional native_layer_norm _native_batch_norm_legit.no_stats native_group_norm
_weight_norm_interface_backward _native_batch_norm_legit_no_training _softmax _log_softmax avg_pool2d
max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d_backward index.Tensor embedding index_select gather
index_put scatter_add slice_scatter as_strided_scatter scatter.src native_dropout bernoulli.p sigmoid exp gelu erf
pow.Tensor_Scalar tanh rsqrt log cos sin mul.Tensor sub.Tensor add.Tensor div.Tensor mul.Scalar neg div.Scalar
fmod.Scalar abs div.Tensor_mode where.self relu clamp minimum sort topk le.Scalar arange.start_step eq.Scalar
logical_not lt.Scalar bitwise_and.Tensor any.dim ge.Scalar ne.Scalar gt.Scalar bitwise_not _assert_tensor_metadata
le.Tensor eq.Tensor _to_copy view unsqueeze permute clone alias expand slice.Tensor full scalar_tensor cat select.int
squeeze.dims split_with_sizes full_like empty.memory_format constant_pad_nd copy lift_fresh_copy as_strided
empty_permuted repeat flip new_empty_strided
_cdist_backward _cdist_forward _pdist_backward _pdist_forward _trilinear linalg_matrix_exp cumprod logcumsumexp
median.dim prod.dim_int var.correction _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
_adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d
adaptive_max_pool3d_backward avg_pool3d avg_pool3d_backward max_pool3d_with_indices max_pool3d_with_indices_backward
_embedding_bag _embedding_bag_backward scatter_reduce.two diagonal_scatter masked_scatter masked_scatter_backward
scatter.value grid_sampler_2d grid_sampler_2d_backward replication_pad1d_backward replication_pad2d_backward
replication_pad3d_backward exponential rand rand_like randn_like rrelu_with_noise_backward rrelu_with_noise_functional
asinh atan atan2 cosh digamma elu erfc erfinv exp2 expm1 hypot i0 lgamma log1p log2 polygamma pow.Scalar
pow.Tensor_Tensor reciprocal sinh special_i1 sqrt tan add.Scalar leaky_relu remainder.Scalar sub.Scalar amax
clamp.Tensor copysign.Tensor cummax floor hardtanh isnan kthvalue max.dim maximum round sign trunc _fft_c2c
_fft_r2c _linalg_det
_linalg_eigh _linalg_solve_ex _linalg_svd linalg_cholesky_ex linalg_inv_ex linalg_lu_solve linalg_qr
linalg_solve_triangular bitwise_or.Tensor ge.Tensor gt.Tensor logical_and lt.Tensor ne.Tensor _conj diagonal unfold
"""


def overload(name: str) -> Any:
    """The ATen overload of ``aten.mm.default``."""
    namespace, packet, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), kind)


@pytest.mark.parametrize("name", COVERAGE.split())
def test_every_operator_that_models_use_has_a_rule_or_a_formula(name: str) -> None:
    full = f"aten.{name if '.' in name else name + '.default'}"
    assert full in RULES or full in _REFINED or overload(full) in decompositions()


@pytest.mark.parametrize("name", sorted(set(RULES) | set(_REFINED)))
def test_every_row_names_an_overload_that_exists(name: str) -> None:
    if name.startswith("aten."):
        assert str(overload(name)) == name


def test_no_operator_has_both_a_formula_and_a_final_rule() -> None:
    both = {str(op) for op in FORMULAS} & set(RULES)
    # These formulas apply to some arguments only; the rule covers the rest.
    partial = "add.Tensor sub.Tensor rsub.Tensor rsub.Scalar pow.Tensor_Scalar convolution.default softplus.default"
    partial += " arange.start_step native_dropout.default convolution_backward.default"
    partial += " scatter_reduce.two index_reduce.default _embedding_bag.default _embedding_bag_forward_only.default"
    partial += " _embedding_bag_backward.default maximum.default minimum.default clamp.Tensor clamp_min.Tensor"
    partial += " clamp_max.Tensor amax.default amin.default aminmax.default max.default min.default"
    assert both == {f"aten.{name}" for name in partial.split()}


def test_bodies_name_arguments_of_the_operator() -> None:
    for name, rule in RULES.items():
        positions = [int(p) for p in re.findall(r"\{(\d+)\}", rule.body)]
        assert bool(positions) == (rule.kind in ("pointwise", "elementary") or bool(rule.body)), name
        assert not rule.body or rule.kind in ("pointwise", "elementary", "exact"), name
        assert all(p < len(overload(name)._schema.arguments) for p in positions), name


def test_opaque_and_random_rows_say_why() -> None:
    assert all(rule.reason for rule in RULES.values() if rule.kind in ("opaque", "random"))
    assert set(RULES) >= CONSTANTS


def test_index_put_is_classified_by_its_argument() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    accumulating = graph.call_function(torch.ops.aten.index_put.default, (x, [x], x, True))
    overwriting = graph.call_function(torch.ops.aten.index_put.default, (x, [x], x))
    kinds = [rule.kind for node in (accumulating, overwriting) if (rule := rule_of(node)) is not None]
    assert kinds == ["reduction", "movement"]


def test_an_operator_without_a_rule_is_none() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten._standard_gamma.default, (graph.placeholder("x"),))
    assert rule_of(node) is None


def _returning(func: Any) -> str:
    """The name of an operator; of a gather into memory that is given, that of the one that returns new memory."""
    return "aten.gather.default" if func is torch.ops.aten.gather.out else str(func)


class Executed(TorchDispatchMode):
    """Records every operator with a floating-point result while a module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.unrounded: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(leaf.is_floating_point() for leaf in leaves) and not self.accounted(_returning(func), args, result):
            self.unrounded.append(str(func))
        return result

    @staticmethod
    def accounted(name: str, args: Any, result: Any) -> bool:
        if name.startswith("fxround.") or (name in RULES and RULES[name].kind in ("exact", "movement")):
            return True
        if name in ("aten._to_copy.default", "aten.where.self"):
            return bool(torch.promote_types(args[0].dtype, result.dtype) == result.dtype)
        # Buffers that a model in training mode writes; the values were rounded before.
        return name in ("aten.copy_.default", "aten.index_put.default", "aten._unsafe_view.default")


def index_arithmetic(graph: torch.fx.GraphModule) -> list[str]:
    """The operators that a policy leaves alone: those that make an index of no data."""
    places = [(str(node.target), site(node)) for node in graph.graph.nodes if node.op == "call_function"]
    names = [name for name, place in places if place is not None and place.kind == "coordinate"]
    return [name for name in names if RULES[name].kind == "pointwise" and name != "aten._to_copy.default"]


# What PyTorch computes for these cannot be compared: its half-precision steps differ from one rounding each.
COARSE = {"autocast": 2e-2, "casts": 2e-2}


@pytest.mark.part(14)
@pytest.mark.parametrize("name", LAYERS)
def test_every_float_operation_of_a_layer_is_rounded(name: str) -> None:
    """``reproducible`` is strict: an operator without a kernel raises. The dispatcher is the second witness."""
    module, args = LAYERS[name]
    with torch.no_grad():
        expected = pytree.tree_leaves(module(*args))
        compiled = fxround.compile(module, "reproducible", example_inputs=args)
        with Executed() as executed:
            results = pytree.tree_leaves(compiled(*args))
    assert executed.unrounded == index_arithmetic(compiled.graph)
    assert compiled.coverage().unrounded == ()
    for result, reference in zip(results, expected, strict=True):
        assert (result.dtype, result.shape) == (reference.dtype, reference.shape)
        # A tolerance: the stock kernels add in another order and evaluate elementary functions less exactly.
        tolerance = COARSE.get(name, 2e-5)
        torch.testing.assert_close(result, reference, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_an_operator_that_yields_floats_is_never_left_to_the_policy_without_a_reason() -> None:
    """Operators with integer results: with floating-point results they select, or are an error under strict."""
    x, i = torch.tensor([2.0, 1.0, 2.0]), torch.tensor([0, 1, 1])
    chosen = fxround.compile(lambda x: torch.unique(x, return_inverse=True)[1] + x, "reproducible")
    chosen(x)
    assert not chosen.coverage().unrounded
    named = {
        "accumulation order": lambda x: torch.bincount(i, weights=x, minlength=4) + 1,
        "global generator": lambda x: x + torch.randint(0, 3, (3,), dtype=x.dtype),
    }
    for said, function in named.items():
        with pytest.raises(fxround.UnsupportedOperator, match=said):
            fxround.compile(function, "reproducible")(x)


def test_a_float_result_that_a_rule_of_integers_does_not_speak_of_is_named() -> None:
    from fxround.passes.classify import _status

    integers = [name for name, rule in RULES.items() if rule.kind == "integer"]
    graph = fx.Graph()
    for name in integers:
        packet, overload = name.removeprefix("aten.").rsplit(".", 1)
        node = graph.call_function(getattr(getattr(torch.ops.aten, packet), overload), ())
        node.meta["val"] = torch.zeros(2)
        status, reason = _status(node, "integer", "")
        assert status == "native" and packet in reason


def test_rrelu_in_eval_mode_draws_nothing() -> None:
    x, compiled = torch.linspace(-2, 2, 41), fxround.compile(torch.nn.RReLU().eval(), "reproducible")
    values, slope = x.numpy(), np.float32((1 / 8 + 1 / 3) / 2)
    assert compiled(x).numpy().tobytes() == np.where(values > 0, values, values * slope).tobytes()
    with pytest.raises(fxround.FxroundError, match="generator"):
        fxround.compile(torch.nn.RReLU().train(), "reproducible", example_inputs=x)
