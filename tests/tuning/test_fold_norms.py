"""Folded batch norms: the same function over rational numbers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.demo import DigitsCNN
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_exact
from fxround.tuning.fold_norms import fold_norm


class Chain(nn.Module):
    """Norms after a convolution of groups, a transposed one of groups, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm1 = nn.Conv1d(4, 6, 2, groups=2, bias=False), nn.BatchNorm1d(6)
        self.back, self.norm2 = nn.ConvTranspose1d(6, 4, 2, groups=2), nn.BatchNorm1d(4, affine=False)
        self.linear, self.norm3 = nn.Linear(12, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.back(torch.relu(self.norm1(self.conv(x)))))
        z: Tensor = self.norm3(self.linear(y.flatten(1)))
        return z


def with_small_numbers(model: nn.Module, seed: int) -> nn.Module:
    """Give a model integers, and norms whose factors are dyadic, so that every step is exact."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(rng.integers(-4, 5, parameter.shape)))
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm1d):
                assert norm.running_mean is not None and norm.running_var is not None
                norm.eps = 2.0**-10
                norm.running_mean.copy_(torch.from_numpy(rng.integers(-3, 4, norm.running_mean.shape)))
                roots = torch.from_numpy(2.0 ** rng.integers(-2, 3, norm.running_var.shape))
                norm.running_var.copy_(roots**2 - norm.eps)
    return model.eval()


def exact(x: Any) -> Any:
    """Return an array of rational numbers."""
    return np.vectorize(Fraction, otypes=[object])(x.detach().double().numpy() if isinstance(x, Tensor) else x)


def layer(module: nn.Module, x: Any) -> Any:
    """Return what a layer or a norm computes, over rational numbers."""
    if isinstance(module, nn.Identity):
        return x
    if isinstance(module, nn.BatchNorm1d):
        variance = exact(module.running_var) + Fraction(module.eps)
        roots = [Fraction(2) ** k for v in variance for k in range(-8, 9) if Fraction(4) ** k == v]
        y = (x.swapaxes(1, -1) - exact(module.running_mean)) / np.array(roots, object)
        y = y * exact(module.weight) + exact(module.bias) if module.affine else y
        return y.swapaxes(1, -1)
    assert isinstance(module, nn.Linear | nn.Conv1d | nn.ConvTranspose1d)
    w, b = exact(module.weight), 0 if module.bias is None else exact(module.bias)
    if isinstance(module, nn.Linear):
        return x @ w.T + b
    parts = []
    for g, piece in enumerate(np.split(x, module.groups, 1)):
        if isinstance(module, nn.Conv1d):
            own = np.split(w, module.groups, 0)[g]
            sums = [np.einsum("nik,oik->no", piece[:, :, t : t + 2], own) for t in range(x.shape[2] - 1)]
            parts.append(np.stack(sums, -1))
        else:
            own = np.split(w, module.groups, 0)[g]
            zero = exact(np.zeros((len(x), own.shape[1], x.shape[2] + 1)))
            for t in range(x.shape[2]):
                zero[:, :, t : t + 2] += np.einsum("ni,iok->nok", piece[:, :, t], own)
            parts.append(zero)
    return (np.concatenate(parts, 1).swapaxes(1, -1) + b).swapaxes(1, -1)


def run(model: Any, x: Any) -> Any:
    y = layer(model.norm1, layer(model.conv, exact(x)))
    y = layer(model.norm2, layer(model.back, np.maximum(y, Fraction(0))))
    return layer(model.norm3, layer(model.linear, y.reshape(len(y), -1)))


def test_a_folded_model_is_the_same_function_over_rational_numbers() -> None:
    for seed in range(2):
        model, x = with_small_numbers(Chain(), seed), torch.arange(-12.0, 12.0).view(2, 4, 3)
        before = {name: t.clone() for name, t in model.state_dict().items()}
        folded = fxround.fold_norms(model, x)
        assert folded.folded_norms == {"norm1": "conv", "norm2": "back", "norm3": "linear"}
        assert not any(isinstance(module, nn.BatchNorm1d) for module in folded.modules())
        assert (run(folded, x) == run(model, x)).all()
        # stock: small dyadic numbers
        assert torch.equal(folded(x), model(x)) and not np.array_equal(model(x).detach(), 0 * x[:, :3, 0])
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_every_step_is_rounded_once() -> None:
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(2, 3, 2).bfloat16(), nn.BatchNorm2d(3).bfloat16()
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        assert tensor is not None
        nn.init.uniform_(tensor, 0.5, 2.0)
    w, b = exact(conv.weight.float()), exact(conv.bias.float())  # type: ignore[union-attr]
    fold_norm(conv, norm)
    gamma, beta, mean, variance = (
        t.detach().double().numpy()  # type: ignore[union-attr]
        for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    )
    factor = gamma / np.sqrt(variance + norm.eps)  # NumPy's binary64
    partial = (b.astype(float) - mean) * factor
    bfloat16 = Rounding.parse("bfloat16/nearest_even/inf")
    for o in range(3):
        wanted = [round_exact(v * Fraction(factor[o]), v * Fraction(factor[o]) < 0, bfloat16) for v in w[o].flat]
        assert conv.weight[o].flatten().tolist() == wanted
        total = Fraction(partial[o]) + Fraction(beta[o])
        assert float(conv.bias.detach()[o]) == round_exact(total, total < 0, bfloat16)  # type: ignore[union-attr]


class Cases(nn.Module):
    """A layer and a norm, called in the way of ``how``."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.how, self.layer, self.norm, self.other = how, nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def plain(m: Any, x: Tensor) -> Tensor:
    result: Tensor = m.norm(m.layer(x))
    return result


def read_again(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    result: Tensor = m.norm(y) + y
    return result


def trains(m: Cases) -> None:
    m.norm.train()


def without_statistics(m: Cases) -> None:
    m.norm = nn.BatchNorm1d(3, track_running_stats=False).eval()


def ties(m: Cases) -> None:
    m.other.weight = m.layer.weight


def shares(m: Cases) -> None:
    m.again = m.norm


def hooks(m: Cases) -> None:
    m.layer.register_forward_hook(lambda *_: None)


def test_what_cannot_be_folded_stays_or_raises() -> None:
    for how, change, said in (
        (read_again, None, "something else reads the result of layer"),
        (lambda m, x: m.norm(m.norm(m.layer(x))), None, "called twice|several values"),
        (lambda m, x: m.norm(m.layer(m.layer(x))), None, "something else reads the result of layer|called twice"),
        (lambda m, x: m.norm(torch.relu(m.layer(x))), None, "no convolution or linear layer is directly before"),
        (lambda m, x: m.norm(x), None, "no convolution or linear layer is directly before"),
        (lambda m, x: m.layer(x), None, "the data never reach it"),
        (lambda m, x: m.norm(m.layer(x)) + m.layer.weight.sum(), None, "something else reads layer.weight"),
        (lambda m, x: m.norm(m.layer(x[:, None].expand(-1, 3, -1))).sum(1), None, "more than two dimensions"),
        (plain, trains, "normalizes by the batch"),
        (plain, without_statistics, "normalizes by the batch"),
        (plain, ties, "shares its parameters with other"),
        (plain, shares, "is shared: it is again too"),
        (plain, hooks, "has hooks"),
    ):
        model = Cases(how).eval()
        if change is not None:
            change(model)
        with pytest.raises(ValueError, match=f"^the norm norm cannot be folded: .*({said})"):
            fxround.fold_norms(model, torch.ones(2, 3), ["norm"])
    kept = fxround.fold_norms(Cases(read_again).eval(), torch.ones(2, 3))
    assert kept.folded_norms == {} and isinstance(kept.norm, nn.BatchNorm1d)


def test_wrong_arguments_are_said() -> None:
    model, x = Cases(plain).eval(), torch.ones(2, 3)
    assert fxround.fold_norms(model, x, ["norm"]).folded_norms == {"norm": "layer"}
    with pytest.raises(ValueError, match="the model is in training mode"):
        fxround.fold_norms(Cases(plain), x)
    with pytest.raises(ValueError, match="norms has 'layer', which is no batch norm"):
        fxround.fold_norms(model, x, ["layer"])
    with pytest.raises(ValueError, match="inputs hold no batch"):
        fxround.fold_norms(model, [])
    with pytest.raises(ValueError, match="the name of the result"):
        fxround.fold_norms(fxround.fold_norms(model, x), x)
    model.norm.running_var -= 3  # type: ignore[operator]
    with pytest.raises(ValueError, match="is not finite"):
        fxround.fold_norms(model, x)


def test_the_digits_network_keeps_its_results() -> None:
    torch.manual_seed(0)
    model, x = DigitsCNN().eval().double(), torch.rand(4, 1, 8, 8, dtype=torch.float64)
    for norm in (model.norm1, model.norm2):
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        nn.init.normal_(norm.running_mean)
    folded = fxround.fold_norms(model, x)
    assert folded.folded_norms == {"norm1": "conv1", "norm2": "conv2"}
    # Sums of at most 600 products, each with a relative error of a few 2^-53.
    assert torch.allclose(folded(x), model(x), rtol=0, atol=1e-12)
    assert not fxround.compile(folded, "bfloat16", example_inputs=x).coverage().unrounded
