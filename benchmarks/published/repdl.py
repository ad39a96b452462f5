"""RepDL's question: do the hashes of a training stay, whatever runs it?

RepDL's example trains a LeNet on MNIST for two epochs by Adam and prints hashes of the weights at the beginning and at
the end, and of the logits of the test images. Here the policy ``repdl`` trains the same network, from the same weights,
with the same optimizer and batches of 100; on MNIST if a folder has its four files, else on scikit-learn's digits: the
first 1,500 for training, their pixels repeated three times and padded to 28 x 28. Each variation must not change a
hash. Batches of the test are of other sizes, which must not change the logits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fxround
from benchmarks.published.folders import Images, mnist
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.training import compile_optimizer

EPOCHS: Final = 2
POLICY: Final = "repdl"
SHOWN: Final = 12
COLUMNS: Final = ("run", "initial weights", "trained weights", "logits", "right, %")
# github.com/microsoft/RepDL, README.md: two epochs of 60,000 images of MNIST.
PUBLISHED: Final = (
    "2a2d133895b1684e55d0f152ead2914b55adc551d9790a4b4585309b79c60362",
    "31ee86a7f75dbd76bac22f209617eb7349f93b0ede116dba924f328cac3013f1",
    "0ca34dcd37105b4af690c46a62407b4b9b097d1063864c6d99f4309aeb4bca3e",
)
PUBLISHED_RIGHT: Final = "98.04"


def network() -> nn.Module:
    """Return the LeNet with RepDL's initial weights: images (N, 1, 28, 28) to logits (N, 10)."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
    layers = (first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    rest = (nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
    return nn.Sequential(*layers, *rest)


def hash_of(tensors: Iterator[Tensor] | list[Tensor]) -> str:
    """Return SHA-256 of the bytes of the tensors, one after the other, as ``repdl.utils.get_hash`` does."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def digits() -> Images:
    """Return scikit-learn's digits as images (N, 1, 28, 28) in 0..1, and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    images = F.pad(images.repeat_interleave(3, 2).repeat_interleave(3, 3), (2, 2, 2, 2))
    labels = torch.tensor(data.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def run(
    images: Images, *, threads: int = 1, isa: str = "host", tested: int = 100, policy: str | None = POLICY
) -> list[str]:
    """Train once; returns the cells of a row. policy: None for stock PyTorch. tested: the batches of the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with fxround.instruction_set(isa):
            return _run(images, tested, policy)
    finally:
        torch.set_num_threads(before)


def _run(images: Images, tested: int, policy: str | None) -> list[str]:
    net = network()
    plain = torch.optim.Adam(net.parameters(), lr=0.01)
    step: Any = net if policy is None else fxround.compile(net, policy)
    loss: Any = F.cross_entropy if policy is None else fxround.compile(F.cross_entropy, policy)
    optimizer: Any = plain if policy is None else compile_optimizer(plain, policy)
    initial = hash_of(net.parameters())
    # The order of the batches is a function of PyTorch's generator after the weights were drawn, as in the example.
    batches = DataLoader(images[0], batch_size=100, shuffle=True)
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            loss(step(x), y).backward()
            optimizer.step()
    step.eval()
    with torch.no_grad():
        logits = torch.cat([step(x) for x, _ in DataLoader(images[1], batch_size=tested)])
    right = 100 * float((logits.argmax(1) == images[1].tensors[1]).double().mean())
    return [initial, hash_of(net.parameters()), hash_of([logits]), f"{right:.2f}"]


def tables(folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """Train in each variation, and yield the table after each. folder: with MNIST; None for the digits."""
    images = digits() if folder is None else mnist(folder)
    variations: dict[str, dict[str, Any]] = {"1 thread": {}, "2 threads": {"threads": 2}, "3 threads": {"threads": 3}}
    variations |= {f"code for {isa}": {"isa": isa} for isa in instruction_sets() if isa != "host"}
    variations |= {"test in batches of 7": {"tested": 7}, "test as a whole": {"tested": len(images[1])}}
    variations |= {f"stock PyTorch, {n} threads": {"policy": None, "threads": n} for n in (1, 2)}
    variations |= {"stock PyTorch, test in batches of 7": {"policy": None, "tested": 7}}
    rows = [["RepDL, MNIST, published", *(digest[:SHOWN] for digest in PUBLISHED), PUBLISHED_RIGHT]]
    for name, choices in variations.items():
        cells = run(images, **choices)
        rows.append([name, *(cell[:SHOWN] for cell in cells)])
        yield {"published-repdl": {"columns": COLUMNS, "numbers": [4], "rows": rows}}
