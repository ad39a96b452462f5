"""What WAGE asks beside a policy (``fxround.policy.wage``): initial weights, and gradients divided by their size.

Source: Wu, Li, Chen, Shi: Training and inference with integers in deep neural networks, ICLR 2018, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fxround.numerics.formats.scaled import ROOT_OF_TWO

# The paper's beta: weights are drawn from at least 1.5 times the distance of two numbers.
_BETA = 1.5


def shift(x: float) -> float:
    """Return 2^round(log2(x)) of a positive binary32 number, exactly.

    A binary64 number between the square root of 2 and the binary32 number above it, times a power of two, goes down.
    """
    fraction, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - (2 * fraction < ROOT_OF_TWO))


@torch.no_grad()
def initial_weights(model: nn.Module, weights: int = 2, seed: int = 0) -> dict[str, float]:
    """Draw the weights of linear and convolutional layers as WAGE does, and return the scales of layers by path.

    With n inputs of an output, weights are uniform within +-L, where L = max(sqrt(6 / n), 1.5 s) and s = 2^(1 - k_W);
    the scale a of the layer is max(Shift(1.5 s / sqrt(6 / n)), 1), and its parameter is divided by a
    (``fxround.policy.wage``).

    weights: k_W, in bits. seed: of PyTorch's generator for these draws, which leaves the global one as it is.

    Raises ValueError for a model without such layers, and for a layer with a bias, which WAGE does not have.
    """
    generator, scales = torch.Generator().manual_seed(seed), {}
    least = _BETA * 2.0 ** (1 - weights)
    for path, layer in model.named_modules():
        if not isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)):
            continue
        if layer.bias is not None:
            raise ValueError(f"{path} has a bias, and WAGE has none; make the layer with bias=False")
        limit = math.sqrt(6 / layer.weight[0].numel())
        scales[path] = max(shift(least / limit), 1.0)
        drawn = torch.rand(layer.weight.shape, generator=generator) * 2 - 1
        layer.weight.copy_(drawn * (max(limit, least) / scales[path]))
    if not scales:
        raise ValueError("the model has no linear or convolutional layers")
    return scales


@torch.no_grad()
def normalize_gradients(model: nn.Module, scales: Mapping[str, float] | None = None) -> None:
    """Divide the gradient g of each parameter by Shift(max |g|), and by the scale of its layer.

    A division by a power of two is exact, but for results below the normal numbers. A gradient of zeros, and one with
    infinities or NaNs, stays as it is. scales: as for ``fxround.policy.wage``, by path of a module.
    """
    for path, layer in model.named_modules():
        scale = (scales or {}).get(path, 1.0)
        for parameter in layer.parameters(recurse=False):
            if parameter.grad is not None:
                _normalize(parameter.grad, scale)


def _normalize(gradient: Tensor, scale: float) -> None:
    most = float(gradient.abs().amax()) if gradient.numel() else 0.0
    if most > 0 and math.isfinite(most):
        gradient.div_(shift(most) * scale)
