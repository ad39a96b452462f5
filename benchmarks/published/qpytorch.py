"""QPyTorch's question: which formats train a network? Binary32, half, 8-bit block floating point, SWALP and WAGE.

A CNN without biases (two convolutions, two linear layers, 27,280 weights) learns scikit-learn's digits, 1,200 images of
8 x 8, and is tested on the other 597. Batches have 64 images. All but WAGE are SGD with momentum 0.9 and the rate 0.05,
divided by 10 after two thirds of the epochs. All numbers but the loss are held in the format: weights, activations,
errors, gradients and momentum; products are PyTorch's in binary32. 8-bit block floating point has one exponent for each
tensor, and rounds stochastically. SWALP is the same at a constant rate; the average of its weights after each of the
last third of the epochs is kept in binary32, and is tested. WAGE (``fxround.policy.wage``) has the rate 8, then 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import fxround
from benchmarks.low_precision import BATCH, TRAINING, Data
from benchmarks.published import folders
from benchmarks.published.folders import Images
from fxround import Policy, Rule
from fxround.policy import wage
from fxround.significance.bits import student_half_width
from fxround.training import compile_optimizer
from fxround.training.wage import initial_weights, normalize_gradients

RATE: Final = 0.05
MOMENTUM: Final = 0.9
EPOCHS: Final = 30
TESTED: Final = 1000
BLOCKS: Final = "scaled(int8;tensor,e8m0fnu,floor)/stochastic"
# Test errors in percent on CIFAR-10. VGG16: SGD-FP, SGD-LP and SWALP in github.com/Tiiiger/QPyTorch,
# examples/SWALP/README.md. WAGE's network: an accuracy of 93.04 %, the mean of four seeds, in
# github.com/stevenygd/WAGE.pytorch, README.md.
PUBLISHED: Final[Mapping[str, str]] = {
    "binary32": "6.81 ± 0.09 (VGG16)",
    "8-bit blocks": "7.61 ± 0.15 (VGG16)",
    "SWALP": "6.70 ± 0.12 (VGG16)",
    "WAGE": "6.96 (WAGE's network)",
}
COLUMNS: Final = ("format", "test error, %", "by seed", "published, CIFAR-10: test error, %")


class Net(nn.Module):
    """Two convolutions, a hidden layer, no biases: images (N, channels, side, side) to logits (N, classes)."""

    def __init__(self, channels: int = 1, side: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.fc1, self.fc2 = nn.Linear(32 * (side // 4) ** 2, 64, bias=False), nn.Linear(64, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


def held(name: str, rounding: str) -> Policy:
    """Return the policy that holds every number of a training in a format, with products by PyTorch in binary32."""
    roles = ("weight", "activation", "input", "error", "gradient")
    return Policy(
        name,
        (
            Rule(rounding="dtype", accumulate="dtype"),
            Rule(operator="contraction", accumulate="native", optional=True),
            *(Rule(role=role, rounding=rounding, optional=True) for role in roles),
            Rule(role="state", direction="update", rounding=rounding, optional=True),
        ),
    )


@dataclass(frozen=True)
class Scheme:
    """A policy for a network, whose weights this may draw, and whether weights are averaged."""

    policy: Callable[[Net, int], tuple[Policy, dict[str, float] | None]]
    averages: bool = False


def _plain(policy: Policy, net: Net, seed: int) -> tuple[Policy, None]:
    return policy, None


def _wage(net: Net, seed: int) -> tuple[Policy, dict[str, float]]:
    scales = initial_weights(net, seed=seed)
    return wage("fc2", scales=scales), scales


SCHEMES: Final[Mapping[str, Scheme]] = {
    "binary32": Scheme(partial(_plain, Policy.preset("identity"))),
    "half": Scheme(partial(_plain, held("half", "binary16"))),
    "8-bit blocks": Scheme(partial(_plain, held("8-bit blocks", BLOCKS))),
    "SWALP": Scheme(partial(_plain, held("SWALP", BLOCKS)), averages=True),
    "WAGE": Scheme(_wage),
}


def images_of(folder: Path | None) -> Images:
    """Return the images of a folder; None for the digits, of which the first TRAINING are trained on."""
    if folder is not None:
        return folders.images(folder)
    data = Data.load()
    first, rest = slice(TRAINING), slice(TRAINING, None)
    return TensorDataset(data.images[first], data.digits[first]), TensorDataset(data.images[rest], data.digits[rest])


def trained(scheme: Scheme, data: TensorDataset, seed: int, epochs: int = EPOCHS) -> tuple[Net, Any]:
    """Return the network with the weights of the last step, and the module that is to be tested."""
    torch.manual_seed(seed)
    images, labels = data.tensors
    net = Net(images.shape[1], images.shape[2], int(labels.max()) + 1)
    policy, scales = scheme.policy(net, seed)
    compiled = fxround.compile(net, policy, seed=seed)
    if scales is None:
        plain = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    else:
        plain = torch.optim.SGD(net.parameters(), lr=8 * 2.0**-7)
    optimizer = compile_optimizer(plain, policy, model=net, seed=seed + 1)
    average = AveragedModel(net)
    shuffled, late = torch.Generator().manual_seed(seed), epochs * 2 // 3
    for epoch in range(epochs):
        if epoch == late and not scheme.averages:
            plain.param_groups[0]["lr"] *= 0.1 if scales is None else 0.125
        compiled.train()
        for batch in torch.randperm(len(images), generator=shuffled).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(compiled(images[batch]), labels[batch]).backward()
            if scales is not None:
                normalize_gradients(net, scales)
            optimizer.step()
        if epoch >= late and scheme.averages:
            average.update_parameters(net)
    return net, (average.module if scheme.averages else compiled).eval()


@torch.no_grad()
def error_of(tested: Any, data: TensorDataset) -> float:
    """Return the error on the test images, in percent."""
    images, labels = data.tensors
    predicted = torch.cat([tested(part).argmax(1) for part in images.split(TESTED)])
    return 100 * (predicted != labels).double().mean().item()


def tables(seeds: int = 5, folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """Train with each seed, and yield the table after each. folder: images to learn; None for the digits."""
    train, test = images_of(folder)
    errors: dict[str, list[float]] = {name: [] for name in SCHEMES}
    for seed in range(seeds):
        for name, scheme in SCHEMES.items():
            errors[name].append(error_of(trained(scheme, train, seed)[1], test))
        yield {"published-qpytorch": {"columns": COLUMNS, "numbers": [1, 2, 3], "rows": rows(errors)}}


def rows(errors: Mapping[str, list[float]]) -> list[list[str]]:
    """Return the rows of the table."""
    made = []
    for name, values in errors.items():
        half = student_half_width(values)
        mean = f"{statistics.fmean(values):.2f}" + ("" if half is None else f" ± {half:.2f}")
        made.append([name, mean, ", ".join(f"{e:.1f}" for e in values), PUBLISHED.get(name, "")])
    return made
