"""Weights on the grid of a policy: bit for bit those of ``fxround.round``, in the blocks that products have."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from weight_models import Mixed, Shared, Unreached, mlp, only_weights, rows

import fxround
from fxround import demo
from fxround.policy import Policy, Rule
from fxround.policy.policy import of_operands
from fxround.tuning.grid import Grid
from fxround.tuning.quantize_weights import METHODS

FORMATS = [
    *("int4:channel", "int2:8", "int8", "uint4:8", "nvfp4", "mxfp4", "mxfp8:8", "scaled(nf4;16,binary32,nearest)"),
    *("scaled(table(-1,0,1);channel,binary32,nearest)", "scaled(e4m3fn;tensor,binary32,inverse)", "bfp(4,16)"),
]


def in_groups(w: Tensor, groups: int, text: str, dims: tuple[int, ...]) -> Tensor:
    """The rounding of a weight of a transposed convolution, whose first dimension has the channels of all groups."""
    split = w.reshape(groups, -1, *w.shape[1:])
    return fxround.round(split, text, dim=[d + 1 for d in dims]).reshape(w.shape)


@pytest.mark.part(2)
@pytest.mark.parametrize("text", FORMATS)
def test_weights_are_those_of_round_in_blocks_along_the_sum(text: str) -> None:
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(3, 4, 10)
    small = fxround.quantize_weights(model, only_weights(text), x)
    channel, rounding = ":channel" in text or ";channel" in text, fxround.round
    wanted = {
        "groups.weight": rounding(model.groups.weight, text, dim=(1, 2) if channel else 1),
        "back.weight": in_groups(model.back.weight, 2, text, (0, 2) if channel else (0,)),
        "attention.in_proj_weight": rounding(model.attention.in_proj_weight, text),
        "attention.out_proj.weight": rounding(model.attention.out_proj.weight, text),
        "head.weight": rounding(model.head.weight, text),
    }
    assert [row.weight for row in small.quantization.weights] == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(small.get_parameter(name), value), name
    others = {name: value for name, value in model.state_dict().items() if name not in wanted}
    assert all(torch.equal(small.state_dict()[name], value) for name, value in others.items())


def test_the_result_computes_what_the_policy_computes() -> None:
    model, x = mlp().eval(), rows()
    policy = of_operands("nvfp4", Rule(operands="nvfp4")).with_rules(Rule(rounding="dtype", accumulate="wide"))
    kept = policy.with_rules(Rule(role="weight", operands="identity"))
    small = fxround.quantize_weights(model, policy, x)
    assert torch.equal(fxround.compile(small, kept)(x), fxround.compile(model, policy)(x))


@pytest.mark.parametrize("text", ["bfloat16", "e4m3fn", "e5m2/stochastic/saturate", "nf4"])
def test_a_format_rounds_every_parameter_as_it_enters(text: str) -> None:
    model, x = mlp(), rows()
    small = fxround.quantize_weights(model, text, x)
    for name, value in model.named_parameters():
        assert torch.equal(
            small.get_parameter(name), fxround.round(value, f"{text.partition('/')[0]}/nearest_even/saturate")
        )
    assert small.quantization["0.bias"].output_sqnr is None


def test_rules_decide_the_format_of_each_layer() -> None:
    model, x = mlp(), rows()
    policy = of_operands(
        "mixed", Rule(role="weight", operands="int4:channel"), Rule("2", role="weight", operands="identity")
    )
    small = fxround.quantize_weights(model, policy, x)
    assert [row.weight for row in small.quantization.weights] == ["0.weight"]
    assert torch.equal(small.get_parameter("2.weight"), model[2].weight)
    entering = Policy("entering", (Rule("0", role="weight", rounding="int4:8"),))
    small = fxround.quantize_weights(model, entering, x)
    assert torch.equal(small.get_parameter("0.weight"), fxround.round(model[0].weight, "int4:8"))
    assert torch.equal(small.get_parameter("0.bias"), fxround.round(model[0].bias, "int4:8"))


def test_a_recurrent_layer_reads_its_weight_at_each_step() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(8, 4, batch_first=True)
    small = fxround.quantize_weights(model, only_weights("int4:channel"), torch.randn(2, 5, 8))
    for name in ("weight_ih_l0", "weight_hh_l0"):
        assert torch.equal(small.get_parameter(name), fxround.round(getattr(model, name), "int4:channel"))


def squares(x: Tensor) -> float:
    return float(x.detach().double().square().sum())


def test_the_report_has_errors_of_weights_and_of_products() -> None:
    model, x = mlp(), rows(32)
    small = fxround.quantize_weights(model, only_weights("int3:channel"), x, batch_size=8)
    report = small.quantization
    first, last = model[0], model[2]
    inner = torch.relu(first(x))
    for layer, given, row in ((first, x, report["0.weight"]), (last, inner, report["2.weight"])):
        kept = fxround.round(layer.weight, "int3:channel")
        assert math.isclose(row.weight_sqnr, 10 * math.log10(squares(layer.weight) / squares(layer.weight - kept)))
        # Products of stock kernels, in batches of another size.
        y, z = given @ layer.weight.T, given @ kept.T
        assert row.output_sqnr is not None
        assert math.isclose(row.output_sqnr, 10 * math.log10(squares(y) / squares(y - z)), rel_tol=1e-3)
        assert (row.changed, row.left, row.method, row.elements) == (0.0, None, "nearest", layer.weight.numel())
    assert (report.batches, report.rows, report.interrupted) == (4, 32, False)
    assert report["0.weight"].format == "int3:channel"
    assert "0.weight" in str(report) and report.to_dict()["weights"][0]["weight"] == "0.weight"
    assert len(report.to_pandas()) == 2


def test_exact_weights_have_an_infinite_ratio_and_clamped_ones_are_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.5, -2.0, 600.0], [0.0, 1.5, 448.0, -1000.0]]))
    report = fxround.quantize_weights(model, only_weights("e4m3fn"), torch.randn(3, 4)).quantization
    assert report["0.weight"].clamped == 2 / 8
    with torch.no_grad():
        model[0].weight.clamp_(-448, 448)
    report = fxround.quantize_weights(model, only_weights("e4m3fn"), torch.randn(3, 4)).quantization
    assert report["0.weight"].weight_sqnr == report["0.weight"].output_sqnr == math.inf
    assert report.to_dict()["weights"][0]["weight_sqnr"] == "inf" and "Infinity" not in report.to_json()


@pytest.mark.parametrize("method", METHODS)
def test_the_model_and_generators_stay_as_they_were(method: str) -> None:
    model = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 5)).train()
    model[1].eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    small = fxround.quantize_weights(model, only_weights("int4:channel"), rows(), method, **brief(method))
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [m.training for m in small.modules()] == [m.training for m in model.modules()]
    assert not any(p.grad is not None for p in [*model.parameters(), *small.parameters()])
    assert not hasattr(model, "quantization")
    assert pickle.loads(pickle.dumps(small)).quantization == small.quantization


def brief(method: str) -> dict[str, Any]:
    """Options with which a method takes little time."""
    return {"adaround": {"steps": 10}, "discquant": {"steps": 6, "accumulate": 1, "warmup": 2}}.get(method, {})


@pytest.mark.part(3)
@pytest.mark.parametrize("text", ["nvfp4", "uint4:8", "int3:channel", "scaled(nf4;8,binary32,nearest)", "e2m1fn"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_stays_on_the_grid(method: str, text: str) -> None:
    model, x = mlp(), rows()
    small = fxround.quantize_weights(model, only_weights(text), x, method, batch_size=16, **brief(method))
    for name in ("0.weight", "2.weight"):
        weight, kept = model.get_parameter(name).detach(), small.get_parameter(name).detach()
        grid = Grid.of(weight, text)
        down, up = grid.neighbours(weight)
        if method == "gptq":
            down = up = grid.nearest(kept)
        assert ((kept == down) | (kept == up)).all()
        row = small.quantization[name]
        assert row.method == method and row.changed == int((kept != grid.nearest(weight)).sum()) / kept.numel()
    again = fxround.quantize_weights(model, only_weights(text), x, method, batch_size=16, **brief(method))
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), again.parameters(), strict=True))


def test_a_loader_of_the_digits_cnn() -> None:
    torch.manual_seed(0)
    model, digits = demo.DigitsCNN().eval(), demo.load_digits()
    loader = DataLoader(TensorDataset(digits.train[0][:96], digits.train[1][:96]), 32, shuffle=True)
    report = fxround.quantize_weights(model, "int4:channel", loader).quantization
    assert [row.weight for row in report.weights] == ["conv1.weight", "conv2.weight", "hidden.weight", "logits.weight"]
    assert (report.batches, report.rows) == (3, 96)
    assert all(15 < row.weight_sqnr < 30 and row.output_sqnr is not None for row in report.weights)


class Tied(nn.Module):
    """An embedding whose weight is that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 8), nn.Linear(8, 6)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.embedding(x))
        return y


def zeros_in(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.get_parameter("0.weight")[0, :3] = 0.0
    return model


def exhausted() -> Iterator[Tensor]:
    batches = iter([rows()])
    next(batches)
    return batches


def nan_row() -> Tensor:
    x = rows()
    x[3, 2] = math.nan
    return x


INT4 = only_weights("int4:channel")


@pytest.mark.parametrize(
    "model, policy, data, said",
    [
        (mlp(), INT4, [], "hold no batch"),
        (mlp(), INT4, exhausted(), "hold no batch"),
        (mlp(), INT4, nan_row(), "batch 0 of the data has 1 NaNs"),
        (mlp(), INT4, [rows(), nan_row()], "batch 1 of the data"),
        (Shared(), INT4, torch.randn(2, 8), "a, b read it"),
        (Tied(), INT4, torch.tensor([[1, 2]]), "is shared: embedding, head read it"),
        (Unreached(), INT4, torch.randn(2, 8), "never reach the weight spare.weight"),
        (zeros_in(mlp()), only_weights("table(-1,1)"), rows(), "has 3 zeros, and table"),
        (zeros_in(mlp()), only_weights("scaled(table(-1,1);channel,binary32,nearest)"), rows(), "cannot hold zero"),
        (mlp(), "reproducible", rows(), "rounds no weight"),
        (mlp(), only_weights("scaled(e4m3fn;tensor,binary32,delayed)"), rows(), "earlier steps"),
        (mlp(), of_operands("turned", Rule(operands="hadamard(4)+nvfp4")), rows(), "transform of both operands"),
        (mlp(), of_operands("faults", Rule(operands="int8", faults="any:0.1")), rows(), "flips bits of the weight"),
    ],
)
def test_refusals(model: nn.Module, policy: Any, data: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fxround.quantize_weights(model, policy, data)


def test_what_a_rule_keeps_is_not_refused() -> None:
    kept = Rule("spare", role="weight", operands="identity", optional=True)
    small = fxround.quantize_weights(Unreached(), INT4.with_rules(kept), torch.randn(2, 8))
    assert [row.weight for row in small.quantization.weights] == ["used.weight"]
    kept = Rule("b", role="weight", operands="identity")
    with pytest.raises(ValueError, match="a, b read it"):
        fxround.quantize_weights(Shared(), INT4.with_rules(kept), torch.randn(2, 8))


def test_two_roundings_of_a_weight_are_refused() -> None:
    policy = INT4.with_rules(Rule("0", role="weight", rounding="bfloat16"))
    with pytest.raises(ValueError, match="as it enters"):
        fxround.quantize_weights(mlp(), policy, rows())


def test_wrong_arguments() -> None:
    model, x = mlp(), rows()
    with pytest.raises(ValueError, match="did you mean 'nearest'"):
        fxround.quantize_weights(model, INT4, x, "neares")
    with pytest.raises(TypeError, match="no option 'damp'; it has none"):
        fxround.quantize_weights(model, INT4, x, damp=0.1)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        fxround.quantize_weights(lambda y: y, INT4, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attribute 'quantization'"):
        fxround.quantize_weights(fxround.quantize_weights(model, INT4, x), INT4, x)
    with pytest.raises(ValueError, match="seed"):
        fxround.quantize_weights(model, INT4, x, seed=-1)
    with torch.no_grad():
        model[0].weight[0, 0] = np.nan
    with pytest.raises(ValueError, match=r"the weight 0\.weight has NaNs"):
        fxround.quantize_weights(model, INT4, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_other_dtypes_keep_theirs(method: str, dtype: torch.dtype) -> None:
    model, x = mlp().to(dtype), rows().to(dtype)
    small = fxround.quantize_weights(model, only_weights("nvfp4"), x, method, **brief(method))
    w, kept = model[0].weight.detach(), small.get_parameter("0.weight").detach()
    assert kept.dtype == dtype and torch.equal(Grid.of(w, "nvfp4").nearest(kept), kept)


class Counting(nn.Module):
    """A model that counts its calls in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.linear(x)


@pytest.mark.parametrize("method", ["nearest", "gptq", "adaround", "discquant"])
def test_buffers_of_the_result_are_those_of_the_model(method: str) -> None:
    torch.manual_seed(0)
    options = {"adaround": {"steps": 2}, "discquant": {"steps": 3, "accumulate": 2, "warmup": 1}}.get(method, {})
    model = Counting()
    small = fxround.quantize_weights(model, "int4:channel", torch.randn(16, 8), method, batch_size=4, **options)
    assert small.count == 0 and model.count == 0


@pytest.mark.parametrize("method", ["nearest", "gptq", "adaround", "discquant"])
def test_weights_are_the_same_in_inference_mode(method: str) -> None:
    torch.manual_seed(0)
    options = {"adaround": {"steps": 2}, "discquant": {"steps": 3, "accumulate": 2, "warmup": 1}}.get(method, {})
    model, x = nn.Linear(8, 4), torch.randn(16, 8)
    plain = fxround.quantize_weights(model, "int4:channel", x, method, **options)
    with torch.inference_mode():
        other = fxround.quantize_weights(model, "int4:channel", x * 1, method, **options)
    assert torch.equal(plain.weight, other.weight)
